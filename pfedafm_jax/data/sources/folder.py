"""Your own data, not necessarily trusted: a folder of images, or arrays in a `.npz` file."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, naming
from pfedafm_jax.base.files import reading
from pfedafm_jax.data.images import SUFFIXES, images_of, opened, same_shape
from pfedafm_jax.data.sources.cifar import Arrays

FOLDER, LEAF, NPZ, TFDS = PREFIXES = ("folder", "leaf", "npz", "tfds")  # prefixes of dataset names
# Names of the four arrays in a file: ours, our cache's, and those of Keras.
KEYS = (
    ("images", "labels", "test_images", "test_labels"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
    ("x", "y", "test_x", "test_y"),
)
USERS = ("user", "test_user")


class Found(NamedTuple):
    """What a file or folder holds."""

    arrays: Arrays
    num_classes: int | None  # None: as many as there are labels
    source: str
    class_names: tuple[str, ...] = ()
    users: np.ndarray | None = None


def read_npz(path: Path) -> Found:
    """`images` and `labels`, and, where there are any, `test_images` and `test_labels`; `user` and
    `test_user` say whose they are."""
    what = naming(f"{str(path)!r} cannot be read as a .npz file, which numpy.savez writes")
    with what, reading(path) as file, np.load(file, allow_pickle=False) as archive:
        names = list(archive.files)
        content = {
            name: np.atleast_1d(archive[name]) for name in {*names} & {*sum(KEYS, ()), *USERS}
        }
    keys = next((keys for keys in KEYS if set(keys[:2]) <= set(content)), None)
    if keys is None or (keys[2] in content) != (keys[3] in content):
        raise PfedafmError(
            f"{path} holds {', '.join(names) or 'nothing'}; accepted: images and labels, and "
            "test_images and test_labels if there are official test images"
        )
    images, labels = content[keys[0]], content[keys[1]]
    test = content.get(keys[2], images[:0]), content.get(keys[3], labels[:0])
    noun = "images" if images.ndim > 2 and images.dtype == np.uint8 else "samples"
    source = f"{path}: {count_of(len(images), len(test[0]), noun)}"
    given = [content[name] for name in USERS if name in content]
    if given and len(given) != 1 + (len(test[0]) > 0):
        raise PfedafmError(f"{path}: user and test_user are needed, for images and test_images")
    users = np.concatenate(given) if given else None
    return Found(Arrays(images, labels, *test), None, source, users=users)


def read_own(source: str, classes: Sequence[str], image_size: int = 0) -> Arrays:
    """One client's own images and labels, from a `.npz` file or a folder per class, for a run with
    these classes; those of a folder are found by their names."""
    path = Path(source.removeprefix(f"{NPZ}:").removeprefix(f"{FOLDER}:")).expanduser()
    if not path.is_dir():
        return read_npz(path).arrays
    found = read_folder(path, image_size)
    unknown = sorted(set(found.class_names) - set(classes))
    if unknown:
        known = ", ".join(classes)
        raise PfedafmError(f"{path} has the class {unknown[0]!r}; the run knows {known}")
    numbers = np.array([classes.index(name) for name in found.class_names], np.int32)
    train, test = (numbers[labels] for labels in (found.arrays[1], found.arrays[3]))
    return Arrays(found.arrays.train_images, train, found.arrays.test_images, test)


def count_of(train: int, test: int, noun: str = "images") -> str:
    """How many samples there are, for people."""
    return f"{train} training and {test} test {noun}" if test else f"{train} {noun}"


# ------------------------------------------------------------------------------- a folder of images


def read_folder(path: Path, image_size: int = 0) -> Found:
    """Images in one subfolder for each class, or `train/` and `test/` with such subfolders in each.

    Classes are numbered in the order of their names. Where the only subfolder is `users`, it has a
    folder for each user, with those of the classes in it.
    """
    with naming(f"folder {str(path)!r} cannot be read"):
        inside = _subfolders(path)
        parts = ["train", "test"] if "train" in inside else [""]
        if len(parts) == 2 and "test" not in inside:
            accepted = "both, or one subfolder for each class"
            raise PfedafmError(f"{path} has train/ and no test/; accepted: {accepted}")
        owners = [_by_user(path / part) for part in parts]
    classes = sorted({name for part in owners for own in part.values() for name in own})
    if not classes:
        accepted = "one for each class, with images in it"
        raise PfedafmError(f"{path} has no subfolders; accepted: {accepted}")
    rows = [
        (file, classes.index(name), user)
        for part in owners
        for user, own in part.items()
        for name, files in own.items()
        for file in files
    ]
    cut = sum(len(files) for own in owners[0].values() for files in own.values())
    numbers = np.array([label for _, label, _ in rows], np.int32)
    users = np.array([user for _, _, user in rows])
    empty = set(range(len(classes))) - set(numbers.tolist())
    if empty:
        accepted = f"accepted are files that end in {', '.join(SUFFIXES)}"
        raise PfedafmError(f"{path}: class {classes[min(empty)]} has no images; {accepted}")
    images = same_shape(((str(file), opened(file)) for file, _, _ in rows), image_size)
    arrays = Arrays(images[:cut], numbers[:cut], images[cut:], numbers[cut:])
    source = f"{path}: {count_of(cut, len(images) - cut)} of {len(classes)} classes"
    known = sorted(set(users) - {""})
    if known and "" in users:
        raise PfedafmError(f"{path}: users/ is needed in both of train/ and test/, or in neither")
    source += f" and {len(known)} users" if known else ""
    unused = sorted(set(inside) - {"train", "test"}) if len(parts) == 2 else []
    source += f" ({', '.join(unused)} not used)" if unused else ""
    return Found(arrays, len(classes), source, tuple(classes), users if known else None)


def _by_user(folder: Path) -> dict[str, dict[str, list[Path]]]:
    """Image files by user and class; where folders are those of classes, of a user without name."""
    places, inside = {"": folder}, _subfolders(folder)
    if inside == ["users"]:
        places = {name: folder / "users" / name for name in _subfolders(folder / "users")}
    found = {
        user: {name: images_of(place / name) for name in _subfolders(place)}
        for user, place in places.items()
    }
    for user in found:
        if user and not any(found[user].values()):
            accepted = "one subfolder for each class, with images in it"
            raise PfedafmError(f"{places[user]}: user {user} has no images; accepted: {accepted}")
    return found


def _subfolders(path: Path) -> list[str]:
    found = (item.name for item in path.iterdir() if item.is_dir())
    return sorted(name for name in found if not name.startswith("."))
