"""CIFAR-10 and CIFAR-100: their files, sizes, and the sha256 that every copy must have.

The official files are read as bytes. Those of the `python` version are pickles, which can execute
anything, so they are only scanned for images and labels and never unpickled. The result is used
only if its sha256 are the official ones.
"""

import hashlib
import pickletools
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedafm_jax.errors import PfedafmError, naming
from pfedafm_jax.files import read_bytes, reading

IMAGE_SIZE = 32
IMAGE_BYTES = 3 * IMAGE_SIZE * IMAGE_SIZE
HOMEPAGE = "https://www.cs.toronto.edu/~kriz/cifar.html"
MAX_BYTES = 2**30  # of a file or an archive unpacked; CIFAR has 186 MB


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
    def files(self) -> tuple[str, ...]:
        """Training files first."""
        return self.train_files + self.test_files

    @property
    def members(self) -> tuple[str, ...]:
        """Names inside the archive."""
        return tuple(f"{self.folder}/{name}" for name in self.files)


@dataclass(frozen=True)
class Cifar:
    """One of the two datasets."""

    name: str
    num_classes: int
    python: Archive
    binary: Archive
    label_key: bytes  # of the labels in the official pickles
    label_bytes: int  # in front of an image in the binary files; the last one is the label
    sums: tuple[str, str, str, str]  # SHA-256 over the bytes of the four uint8 `Arrays`
    class_names: tuple[str, ...]

    @property
    def archives(self) -> tuple[Archive, Archive]:
        """The two official downloads."""
        return self.python, self.binary


def _archive(classes: int, form: str, num_bytes: int, sha256: str) -> Archive:
    """The official names: five training files in CIFAR-10, one in CIFAR-100."""
    end = ".bin" if form == "binary" else ""
    folder = f"cifar-10-batches-{'bin' if end else 'py'}" if classes == 10 else f"cifar-100-{form}"
    train = [f"data_batch_{number}" for number in range(1, 6)] if classes == 10 else ["train"]
    test = ("test_batch" if classes == 10 else "test") + end
    file = f"cifar-{classes}-{form}.tar.gz"
    return Archive(file, num_bytes, sha256, folder, tuple(name + end for name in train), (test,))


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
    python=_archive(
        10, "python", 170498071, "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
    ),
    binary=_archive(
        10, "binary", 170052171, "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
    ),
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
    python=_archive(
        100, "python", 169001437, "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7"
    ),
    binary=_archive(
        100, "binary", 168513733, "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec"
    ),
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


def read_official(cifar: Cifar, path: Path) -> Arrays:
    """The four arrays from an official .tar.gz archive, or from the folder it unpacks to."""
    if path.is_dir():
        found = next(a for a in cifar.archives if any((path / name).is_file() for name in a.files))
        content = {name: read_regular(path / name) for name in found.files}
        place = f"{path}/"
    else:
        what = f"an official archive of {cifar.name} ({cifar.python.file} or {cifar.binary.file})"
        members = read_tar(path, what, *(one.members for one in cifar.archives))
        found = next(one for one in cifar.archives if one.members[0] in members)
        content = {name.rsplit("/", 1)[1]: data for name, data in members.items()}
        place = f"{path}: {found.folder}/"
    read = _from_pickle if found is cifar.python else _from_binary
    parts: list[np.ndarray] = []
    for files in (found.train_files, found.test_files):
        arrays = [read(cifar, content[name], place + name) for name in files]
        parts += map(np.concatenate, zip(*arrays, strict=True))
    return Arrays(*parts)


def read_regular(path: Path) -> bytes:
    """All bytes of a file; a pipe or device, which may never end, is refused."""
    with naming(f"{path}: cannot be read"):
        size = path.stat().st_size  # raises where there is nothing
        if size > MAX_BYTES:
            raise PfedafmError(f"{path}: over {MAX_BYTES} bytes, which no file of CIFAR has")
        return read_bytes(path)


def read_tar(path: Path, what: str, *choices: tuple[str, ...]) -> dict[str, bytes]:
    """Files of an archive by name: those of the first of `choices` of which it has any file.

    Nothing is written to disk, whatever else the archive contains. `what` it should be is part of
    the error if it is something else.
    """
    whole = f"{path}: not a complete .tar.gz archive; download it again"
    with naming(whole), reading(path) as file, tarfile.open(fileobj=file) as tar:
        members, total, content = {}, 0, {}
        for member in tar:
            members[member.name] = member
            total += member.size
            if total > MAX_BYTES:
                raise PfedafmError(f"{path}: not {what}, it unpacks to over {MAX_BYTES} bytes")
        names = next((names for names in choices if members.keys() & set(names)), None)
        if names is None:
            raise PfedafmError(f"{path}: not {what}, it holds none of the files of one")
        for name in names:
            if name not in members:
                raise PfedafmError(f"{path}: {name} is missing from the archive. Download it again")
            stream = tar.extractfile(members[name]) if members[name].isreg() else None
            if stream is None:
                raise PfedafmError(f"{path}: {name} is not a regular file")
            content[name] = stream.read()
        return content


def _from_binary(cifar: Cifar, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Records of `label_bytes` labels, then 3072 bytes: red plane, green plane, blue plane."""
    record, num = cifar.label_bytes + IMAGE_BYTES, len(content)
    if not content or num % record:
        raise PfedafmError(f"{where}: {num} bytes is not a whole number of {record}-byte records")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _channels_last(rows[:, cifar.label_bytes :]), rows[:, cifar.label_bytes - 1]


_RAW = ("BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8")
_OF_LISTS = ("EMPTY_LIST", "MARK", "APPEND", "APPENDS", "BINPUT", "LONG_BINPUT", "MEMOIZE", "FRAME")


def _from_pickle(cifar: Cifar, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """The longest byte string is the images; the small integers after the labels' key are the
    labels. The pickle's opcodes are listed, never executed."""
    images, labels, inside = b"", [], False
    with naming(f"{where}: damaged pickle"):
        for code, argument, _ in pickletools.genops(content):
            if code.name in _RAW:
                raw: Any = argument.encode("latin-1") if isinstance(argument, str) else argument
                images, inside = max(images, raw, key=len), raw == cifar.label_key
            elif code.name == "BININT1" and inside:
                labels.append(argument)
            elif code.name not in _OF_LISTS:
                inside = False
    if not labels or len(images) != len(labels) * IMAGE_BYTES:
        found = f"{len(labels)} labels and {len(images)} bytes of images"
        raise PfedafmError(f"{where}: {found}; it is no official file")
    planes = np.frombuffer(images, np.uint8).reshape(-1, IMAGE_BYTES)
    return _channels_last(planes), np.array(labels, np.uint8)


def _channels_last(planes: np.ndarray) -> np.ndarray:
    """uint8 [num, 3072] of colour planes to [num, 32, 32, 3]."""
    return planes.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).transpose(0, 2, 3, 1)
