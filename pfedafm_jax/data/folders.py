"""Data of one's own, maybe from strangers: a folder of images, or arrays in a `.npz` file."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps

from pfedafm_jax.data.cifar import Arrays
from pfedafm_jax.errors import PfedafmError, naming
from pfedafm_jax.files import reading

FOLDER, NPZ, TFDS = "folder", "npz", "tfds"  # what stands before the colon in a dataset's name
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
# Other formats may call programs to be decoded.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
GREY_MODES = ("1", "L", "LA")
# Names of the four arrays in a file: ours, our cache's, and those of Keras.
KEYS = (
    ("images", "labels", "test_images", "test_labels"),
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
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
    source = f"{path}: {_count(len(images), len(test[0]))}"
    given = [content[name] for name in USERS if name in content]
    if given and len(given) != 1 + (len(test[0]) > 0):
        raise PfedafmError(f"{path}: user and test_user are needed, for images and test_images")
    users = np.concatenate(given) if given else None
    return Found(Arrays(images, labels, *test), None, source, users=users)


def _count(train: int, test: int) -> str:
    return f"{train} training and {test} test images" if test else f"{train} images"


# ------------------------------------------------------------------------------- a folder of images


def read_folder(path: Path, image_size: int = 0) -> Found:
    """Images in one subfolder for each class, or `train/` and `test/` with such subfolders in each.

    Classes are numbered in the order of their names.
    """
    with naming(f"folder {str(path)!r} cannot be read"):
        inside = _subfolders(path)
        parts = ["train", "test"] if "train" in inside else [""]
        if len(parts) == 2 and "test" not in inside:
            accepted = "both, or one subfolder for each class"
            raise PfedafmError(f"{path} has train/ and no test/; accepted: {accepted}")
        classes = sorted({name for part in parts for name in _subfolders(path / part)})
        if not classes:
            accepted = "one for each class, with images in it"
            raise PfedafmError(f"{path} has no subfolders; accepted: {accepted}")

        def labelled(part: str) -> list[tuple[Path, int]]:
            folders = enumerate(path / part / name for name in classes)
            return [(file, label) for label, folder in folders for file in _images_of(folder)]

        train, *test = map(labelled, parts)
    pairs, cut = sum(test, train), len(train)
    numbers = np.array([label for _, label in pairs], np.int32)
    empty = set(range(len(classes))) - set(numbers.tolist())
    if empty:
        accepted = f"accepted are files that end in {', '.join(SUFFIXES)}"
        raise PfedafmError(f"{path}: class {classes[min(empty)]} has no images; {accepted}")
    if len(classes) == 1:
        raise PfedafmError(f"{path} has one class only ({classes[0]}); two or more are needed")
    images = same_shape(((str(file), opened(file)) for file, _ in pairs), image_size)
    arrays = Arrays(images[:cut], numbers[:cut], images[cut:], numbers[cut:])
    source = f"{path}: {_count(cut, len(images) - cut)} of {len(classes)} classes"
    unused = sorted(set(inside) - {"train", "test"}) if len(parts) == 2 else []
    source += f" ({', '.join(unused)} not used)" if unused else ""
    return Found(arrays, len(classes), source, tuple(classes))


def _subfolders(path: Path) -> list[str]:
    found = (item.name for item in path.iterdir() if item.is_dir())
    return sorted(name for name in found if not name.startswith("."))


def _images_of(folder: Path) -> list[Path]:
    """The image files of a class, at any depth, in the order of their names."""
    found = (file for file in folder.rglob("*") if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in found if file.is_file())


def opened(path: Path) -> Image.Image:
    what = naming(f"{path} is not a readable image")
    with what, reading(path) as file, Image.open(file, formats=FORMATS) as image:
        if _deep(image):
            found = f"{path} has more than 8 bits a channel ({image.mode})"
            raise PfedafmError(f"{found}; accepted: 8-bit images")
        return ImageOps.exif_transpose(image)  # cameras store pictures lying on their side


def _deep(image: Image.Image) -> bool:
    """Whether a picture has more than 8 bits a channel, of which Pillow drops the lower ones."""
    for codec, _, _, told in getattr(image, "tile", ()):  # what the decoder is told of the bits
        if codec.startswith("ppm") and isinstance(told, tuple) and told[-1] > 255:
            return True
        if ";16" in str(told):
            return True
    return image.mode[0] in "IF"


def same_shape(images: Iterable[tuple[str, Image.Image]], image_size: int) -> np.ndarray:
    """(name, picture) pairs as uint8 [num, height, width, 1 or 3]: grey if all are, else RGB."""
    found: list[np.ndarray] = []
    first: tuple[str, tuple[int, int]] | None = None
    for name, image in images:
        image = image.convert("L" if image.mode in GREY_MODES else "RGB")
        if image_size:
            image = image.resize((image_size, image_size), Image.Resampling.BILINEAR)
        first = first or (name, image.size)
        if image.size != first[1]:
            sizes = [f"{n} is {w}x{h}" for n, (w, h) in (first, (name, image.size))]
            mend = "resize them all with --image-size N (image_size in Python)"
            raise PfedafmError(f"images differ in size: {', '.join(sizes)}; {mend}")
        pixels = np.asarray(image)
        found.append(pixels[..., None] if pixels.ndim == 2 else pixels)
    channels = max((pixels.shape[-1] for pixels in found), default=1)
    return np.stack([np.repeat(pixels, channels // pixels.shape[-1], axis=-1) for pixels in found])
