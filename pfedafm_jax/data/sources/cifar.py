"""CIFAR-10 and CIFAR-100: the official files, their digests, and the arrays in them.

A file is read only after its digest has been found to be the official one. That makes it safe to
unpickle the files of the `python` version, and a damaged download is named before it is unpacked.
Whatever the arrays come from, they are used only if their own sha256 are the official ones.
"""

import hashlib
import pickle
import tarfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pfedafm_jax.base.errors import PfedafmError, naming
from pfedafm_jax.base.files import read_bytes, reading

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
    """A published .tar or .tar.gz archive, and the files of it that are read."""

    file: str
    num_bytes: int
    sha256: str
    folder: str  # inside the archive
    files: tuple[str, ...]  # inside that folder; of CIFAR the test file comes last


@dataclass(frozen=True)
class Cifar:
    """One of the two datasets."""

    name: str
    num_classes: int
    python: Archive
    binary: Archive
    python_md5: dict[str, str]  # by file, of the python archive once it is unpacked
    label_key: bytes  # of the labels in the official pickles
    label_bytes: int  # in front of an image in the binary files; the last one is the label
    sums: tuple[str, str, str, str]  # SHA-256 over the bytes of the four uint8 `Arrays`
    class_names: tuple[str, ...]


CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_CLASSES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup
dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower
leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid
otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray
road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle
wardrobe whale willow_tree wolf woman worm
"""
CIFAR10 = Cifar(
    name="cifar10",
    num_classes=10,
    python=Archive(
        file="cifar-10-python.tar.gz",
        num_bytes=170498071,
        sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        folder="cifar-10-batches-py",
        files=(
            "data_batch_1",
            "data_batch_2",
            "data_batch_3",
            "data_batch_4",
            "data_batch_5",
            "test_batch",
        ),
    ),
    binary=Archive(
        file="cifar-10-binary.tar.gz",
        num_bytes=170052171,
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        folder="cifar-10-batches-bin",
        files=(
            "data_batch_1.bin",
            "data_batch_2.bin",
            "data_batch_3.bin",
            "data_batch_4.bin",
            "data_batch_5.bin",
            "test_batch.bin",
        ),
    ),
    python_md5={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "40351d587109b95175f43aff81a1287e",
    },
    label_key=b"labels",
    label_bytes=1,
    sums=(
        "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "2b7cd2f24487317614016b72ffd53071c3062f592f0eb300c18a770d41ae1253",
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5",
    ),
    class_names=tuple(CIFAR10_CLASSES.split()),
)
CIFAR100 = Cifar(
    name="cifar100",
    num_classes=100,
    python=Archive(
        file="cifar-100-python.tar.gz",
        num_bytes=169001437,
        sha256="85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        folder="cifar-100-python",
        files=("train", "test"),
    ),
    binary=Archive(
        file="cifar-100-binary.tar.gz",
        num_bytes=168513733,
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        folder="cifar-100-binary",
        files=("train.bin", "test.bin"),
    ),
    python_md5={
        "train": "16019d7e3df5f24257cddd939b257f8d",
        "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
    label_key=b"fine_labels",
    label_bytes=2,
    sums=(
        "4e457917601a66aed021f5fa37957b56c6319557c0a8ed5484de3c390af45430",
        "9f11b9f97aad759ba6df0a33e3218b01d8deaf4ed3a14aa1185d69b9ad7ebcb3",
        "4cb8e5d9309da489bf6b19cc10cd96c3ae6f8daf225380b605aaee4c0d6aee19",
        "4dad7d09c7c97d33f6cb928d705cf4196221316fd6e31bdd978a08ed9103ee0b",
    ),
    class_names=tuple(CIFAR100_CLASSES.split()),
)
CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def sums_of(arrays: Arrays) -> tuple[str, str, str, str]:
    """SHA-256 of the four arrays, hexadecimal, over their bytes in C order."""
    a, b, c, d = (hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for array in arrays)
    return a, b, c, d


def check_sums(cifar: Cifar, arrays: Arrays, source: str) -> None:
    """Raise unless every image and label is the official one, in the official order.

    A wrong copy would make results incomparable without notice, so nothing is used unchecked.
    """
    all_sums = zip(Arrays._fields, arrays, sums_of(arrays), cifar.sums, strict=True)
    for field, array, found, expected in all_sums:
        if found != expected:
            raise PfedafmError(
                f"{cifar.name} from {source}: the {field.replace('_', ' ')} are not the official "
                f"ones ({len(array)} of them, sha256 {found[:16]}..., expected {expected[:16]}...)."
                f" The copy is damaged or altered: fetch it again, from {HOMEPAGE} if in doubt."
            )


# ----------------------------------------------------------------------------------- official files


def read_official_archive(cifar: Cifar, path: Path) -> Arrays:
    """The four arrays from one of the two official archives, whatever its file is called."""
    archive, content = read_archive(path, cifar.python, cifar.binary)
    return _arrays(cifar, archive, content)


def read_official_folder(cifar: Cifar, folder: Path) -> Arrays:
    """The four arrays from the folder that the official python archive unpacks to."""
    content: dict[str, bytes] = {}
    for file, official_md5 in cifar.python_md5.items():
        path = folder / file
        with naming(f"{path}: cannot be read"):
            content[file] = read_bytes(path)
        md5 = hashlib.md5(content[file], usedforsecurity=False).hexdigest()
        if md5 != official_md5:
            raise PfedafmError(
                f"{path}: not the official file (md5 {md5}, expected {official_md5}). Unpack "
                f"{cifar.python.file} again, or download it from {HOMEPAGE}"
            )
    return _arrays(cifar, cifar.python, content)


def read_archive(path: Path, *accepted: Archive) -> tuple[Archive, dict[str, bytes]]:
    """Which of the accepted archives a file is, by its sha256, and the content of its files by name.

    Nothing is unpacked, on disk or in memory, of a file with another sha256.
    """
    with naming(f"{path}: cannot be read"), reading(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = file.tell()
        archive = next((archive for archive in accepted if archive.sha256 == sha256), None)
        if archive is None:
            names = " or ".join(archive.file for archive in accepted)
            sums = " or ".join(
                f"{archive.num_bytes} bytes, sha256 {archive.sha256}" for archive in accepted
            )
            raise PfedafmError(
                f"{path}: not the published {names} ({num_bytes} bytes, sha256 {sha256}; expected "
                f"{sums}). Download it again"
            )
        file.seek(0)
        content: dict[str, bytes] = {}
        with tarfile.open(fileobj=file) as tar:
            for member in tar:
                folder, _, name = member.name.rpartition("/")
                if folder == archive.folder and name in archive.files:
                    content[name] = tar.extractfile(member).read()  # pyright: ignore[reportOptionalMemberAccess]
    return archive, content


def _arrays(cifar: Cifar, archive: Archive, content: dict[str, bytes]) -> Arrays:
    """The four arrays from the content of an archive's files."""
    read = _from_pickle if archive is cifar.python else _from_binary
    *train, test = (read(cifar, content[file]) for file in archive.files)
    train_images = np.concatenate([images for images, _ in train])
    train_labels = np.concatenate([labels for _, labels in train])
    return Arrays(train_images, train_labels, *test)


def _from_binary(cifar: Cifar, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images [num, 32, 32, 3] and labels [num] from rows of label bytes and three colour planes."""
    rows = np.frombuffer(content, np.uint8).reshape(-1, cifar.label_bytes + IMAGE_BYTES)
    return channels_last(rows[:, cifar.label_bytes :]), rows[:, cifar.label_bytes - 1]


def _from_pickle(cifar: Cifar, content: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Images [num, 32, 32, 3] and labels [num] from a pickle whose digest is the official one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy deprecates how Python 2 wrote its types
        batch = pickle.loads(content, encoding="bytes")
    return channels_last(batch[b"data"]), np.array(batch[cifar.label_key], np.uint8)


def channels_last(planes: np.ndarray) -> np.ndarray:
    """uint8 [num, 3072] of colour planes to [num, 32, 32, 3]."""
    return planes.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).transpose(0, 2, 3, 1)
