"""What CIFAR-10 and CIFAR-100 are: their files, their sizes, and the sums that every copy of them must have."""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pfedafm_jax.errors import PfedafmError

IMAGE_SIZE = 32
IMAGE_BYTES = 3 * IMAGE_SIZE * IMAGE_SIZE
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"


class Arrays(NamedTuple):
    """Both official parts of a dataset, each in its official order.

    Images are uint8 [num, height, width, channels], labels uint8 [num].
    """

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


@dataclass(frozen=True)
class Archive:
    """One official download: `folder/` inside `file` holds `train_files` and `test_files`."""

    file: str
    num_bytes: int
    sha256: str
    folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """Names inside the archive, training files first."""
        return tuple(f"{self.folder}/{name}" for name in self.train_files + self.test_files)


@dataclass(frozen=True)
class Cifar:
    """One of the two datasets. `sums` are SHA-256 over the bytes of the four uint8 `Arrays`, in their order."""

    name: str
    num_classes: int
    python: Archive
    binary: Archive
    label_key: bytes  # of the labels in the official pickles
    label_bytes: int  # in front of an image in the binary files; the last one is the label
    sums: tuple[str, str, str, str]


CIFAR10 = Cifar(
    name="cifar10",
    num_classes=10,
    python=Archive(
        file="cifar-10-python.tar.gz",
        num_bytes=170498071,
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        train_files=tuple(f"data_batch_{number}" for number in range(1, 6)),
        test_files=("test_batch",),
    ),
    binary=Archive(
        file="cifar-10-binary.tar.gz",
        num_bytes=170052171,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        folder="cifar-10-batches-bin",
        train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        test_files=("test_batch.bin",),
    ),
    label_key=b"labels",
    label_bytes=1,
    sums=(
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
)

CIFAR100 = Cifar(
    name="cifar100",
    num_classes=100,
    python=Archive(
        file="cifar-100-python.tar.gz",
        num_bytes=169001437,
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder="cifar-100-python",
        train_files=("train",),
        test_files=("test",),
    ),
    binary=Archive(
        file="cifar-100-binary.tar.gz",
        num_bytes=168513733,
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        folder="cifar-100-binary",
        train_files=("train.bin",),
        test_files=("test.bin",),
    ),
    label_key=b"fine_labels",
    label_bytes=2,
    sums=(
        "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
        "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
        "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
        "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
    ),
)

CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def sums_of(arrays: Arrays) -> tuple[str, str, str, str]:
    """SHA-256 of the four arrays, hexadecimal, over their bytes in C order."""
    a, b, c, d = (hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays)
    return a, b, c, d


def check_sums(cifar: Cifar, arrays: Arrays, source: str) -> None:
    """Raise unless every image and label is the official one, in the official place.

    One wrong copy would make results silently incomparable, so nothing is used unchecked.
    """
    for field, array, found, expected in zip(Arrays._fields, arrays, sums_of(arrays), cifar.sums, strict=True):
        if found != expected:
            raise PfedafmError(
                f"{cifar.name} from {source}: the {field.replace('_', ' ')} are not the official ones "
                f"({len(array)} of them, sha256 {found[:16]}..., expected {expected[:16]}...). "
                f"The copy is damaged or altered: fetch it again, from {HOMEPAGE} if in doubt."
            )
