"""CIFAR as its authors publish it: the `python` and the `binary` version, as folders or as .tar.gz archives."""

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.data.cifar import IMAGE_BYTES, IMAGE_SIZE, Archive, Arrays, Cifar
from pfedafm_jax.errors import PfedafmError

# The largest official member is the CIFAR-100 training pickle, 155 MB.
MAX_MEMBER_BYTES = 256 * 2**20
MAX_TOTAL_BYTES = 1024 * 2**20


def read_folder(cifar: Cifar, archive: Archive, folder: Path) -> Arrays:
    """The four arrays from an unpacked official folder (`cifar-10-batches-py` and its like)."""
    content = {}
    for name in archive.train_files + archive.test_files:
        path = folder / name
        try:
            if path.stat().st_size > MAX_MEMBER_BYTES:
                raise PfedafmError(f"{path}: larger than any official file of {cifar.name}")
            content[name] = path.read_bytes()
        except OSError as error:
            raise PfedafmError(f"{path}: cannot be read ({error.strerror or error})") from error
    return _decode(cifar, archive, content, lambda name: str(folder / name))


def read_archive(cifar: Cifar, path: Path) -> Arrays:
    """The four arrays from an official .tar.gz; which version it is follows from the names inside."""
    with open_tar(path) as tar:
        names = set(_names(tar, path))
        for archive in (cifar.python, cifar.binary):
            if any(member in names for member in archive.members):
                break
        else:
            raise PfedafmError(
                f"{path}: holds neither {cifar.python.folder}/ nor {cifar.binary.folder}/, so it is not an "
                f"official archive of {cifar.name} ({cifar.python.file} or {cifar.binary.file})"
            )
        content = read_members(tar, path, archive.members)
    by_file = {name.rsplit("/", 1)[1]: data for name, data in content.items()}
    return _decode(cifar, archive, by_file, lambda name: f"{path}: {archive.folder}/{name}")


@contextmanager
def open_tar(path: Path) -> Iterator[tarfile.TarFile]:
    """An archive open for reading, every way it can be damaged turned into an error that names it."""
    try:
        with tarfile.open(path) as tar:
            yield tar
    except (tarfile.TarError, EOFError, zlib.error, OSError, ValueError) as error:
        raise PfedafmError(f"{path}: not a complete .tar.gz archive ({error}). Download it again") from error


def read_members(tar: tarfile.TarFile, path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Content of the named regular files. Nothing is ever written to disk, whatever other names the archive has."""
    content, total = {}, 0
    for name in names:
        try:
            member = tar.getmember(name)
        except KeyError:
            raise PfedafmError(f"{path}: {name} is missing from the archive. Download it again") from None
        total += member.size
        if not member.isreg() or member.size > MAX_MEMBER_BYTES or total > MAX_TOTAL_BYTES:
            raise PfedafmError(f"{path}: {name} is not a regular file of a plausible size ({member.size} bytes)")
        stream = tar.extractfile(member)
        data = b"" if stream is None else stream.read()
        if len(data) != member.size:
            raise PfedafmError(f"{path}: {name} is cut short ({len(data)} of {member.size} bytes). Download it again")
        content[name] = data
    return content


def _names(tar: tarfile.TarFile, path: Path) -> Iterator[str]:
    """Member names, giving up on archives that unpack to far more than CIFAR."""
    total = 0
    for member in tar:
        total += member.size
        if total > MAX_TOTAL_BYTES:
            raise PfedafmError(f"{path}: unpacks to over {MAX_TOTAL_BYTES} bytes, so it is not an archive of CIFAR")
        yield member.name


def _decode(cifar: Cifar, archive: Archive, content: dict[str, bytes], where: Callable[[str], str]) -> Arrays:
    read = _from_pickle if archive is cifar.python else _from_binary
    train = [read(cifar, content[name], where(name)) for name in archive.train_files]
    test = [read(cifar, content[name], where(name)) for name in archive.test_files]
    train_images, train_labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    test_images, test_labels = (np.concatenate(parts) for parts in zip(*test, strict=True))
    return Arrays(train_images, train_labels, test_images, test_labels)


def _from_binary(cifar: Cifar, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    """Records of `label_bytes` labels, then 3072 bytes: red plane, green plane, blue plane."""
    record = cifar.label_bytes + IMAGE_BYTES
    if not content or len(content) % record:
        raise PfedafmError(f"{where}: {len(content)} bytes is not a whole number of {record}-byte records")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return _channels_last(rows[:, cifar.label_bytes :]), rows[:, cifar.label_bytes - 1]


def _from_pickle(cifar: Cifar, content: bytes, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = ArraysOnlyUnpickler(io.BytesIO(content), encoding="bytes").load()
    except pickle.UnpicklingError as error:
        raise PfedafmError(f"{where}: refused or damaged pickle ({error})") from error
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise PfedafmError(f"{where}: damaged pickle ({type(error).__name__}: {error})") from error
    # Files written again by Python 3 have text keys.
    batch = {k.encode() if isinstance(k, str) else k: v for k, v in batch.items()} if isinstance(batch, dict) else {}
    data, labels = batch.get(b"data"), batch.get(cifar.label_key)
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != IMAGE_BYTES:
        raise PfedafmError(f"{where}: has no `data` array of uint8 [num, {IMAGE_BYTES}]")
    known = range(cifar.num_classes)
    if not isinstance(labels, list) or not all(type(label) is int and label in known for label in labels):
        raise PfedafmError(f"{where}: has no list `{cifar.label_key.decode()}` of labels below {cifar.num_classes}")
    if len(labels) != len(data):
        raise PfedafmError(f"{where}: {len(data)} images but {len(labels)} labels")
    return _channels_last(data), np.array(labels, np.uint8)


def _channels_last(planes: np.ndarray) -> np.ndarray:
    """uint8 [num, 3072] of colour planes to [num, 32, 32, 3]."""
    return planes.reshape(-1, 3, IMAGE_SIZE, IMAGE_SIZE).transpose(0, 2, 3, 1)


class ArraysOnlyUnpickler(pickle.Unpickler):
    """Reads plain containers and numpy arrays of numbers; a pickle that asks for anything else is refused.

    A pickle is a program: the stock reader would run whatever a file from the internet asks for.
    """

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no CIFAR file needs") from None


def _number_dtype(code: Any, *_: Any) -> np.dtype:
    # The official files say dtype('u1', 0, 1), which newer numpy warns about, so the flags are not passed on.
    # Object arrays stay out.
    text = code.decode("ascii") if isinstance(code, bytes) else str(code)
    if text not in {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"}:
        raise pickle.UnpicklingError(f"it holds an array of dtype {text!r}")
    return np.dtype(text, copy=True)


def _latin1_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"it asks for the encoding {encoding!r}")
    return text.encode("latin1")


_ARRAY = "numpy.ndarray"  # stands for the class, which a pickle could call to ask for any amount of memory
_RECONSTRUCT: Any = np.empty(0, np.uint8).__reduce__()[0]


def _empty_array(kind: Any, shape: Any, code: Any) -> np.ndarray:
    """Every pickled array starts like this, and is filled from the pickle's own bytes."""
    if kind is not _ARRAY or tuple(shape) != (0,) or code not in (b"b", "b"):
        raise pickle.UnpicklingError("it builds an array in an unusual way")
    return _RECONSTRUCT(np.ndarray, (0,), b"b")


def _empty_bytes() -> bytes:
    return b""


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _empty_array,  # numpy 1, and the official files
    ("numpy._core.multiarray", "_reconstruct"): _empty_array,  # numpy 2
    ("numpy", "ndarray"): _ARRAY,
    ("numpy", "dtype"): _number_dtype,
    ("_codecs", "encode"): _latin1_bytes,  # how Python 3 writes bytes in protocol 2
    ("__builtin__", "bytes"): _empty_bytes,
    ("builtins", "bytes"): _empty_bytes,
}
