"""Atomic writes, safe reads, digests, and the user's cache folder."""

import errno
import hashlib
import json
import os
import re
import stat
import tempfile
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TypeVar

from pfedafm_jax.base.errors import PfedafmError, bad, reason

Item = TypeVar("Item")

Log = Callable[[str], None]  # takes single lines, such as warnings and what is downloaded


UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.tmp")
THREADS = 8  # a disk makes a thousand small files durable together as fast as ten one by one


def write_atomically(
    path: Path,
    content: str | bytes | bytearray | Callable[[IO[bytes]], object],
    durable: bool = True,
) -> None:
    """Replaces a file; after a failure, or if the process dies, it is as it was.

    Args:
        path: the file; its folder is made where there is none.
        content: text, bytes, or a function that writes to the file it is given.
        durable: wait until it is on the disk, so that it outlives a loss of power; otherwise `flush`
            does that later, for many files at once.
    """
    # In the same folder, since a rename is atomic only within one file system; with a short name,
    # since `path` itself may have the longest name allowed.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with _created(temporary) as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _created(path: Path) -> IO[bytes]:
    """A new file; its folder is made where there is none."""
    try:
        return open(path, "xb")
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "xb")


def is_unfinished(name: str) -> bool:
    """Whether a file of this name is what a killed process left of `write_atomically`."""
    return UNFINISHED.fullmatch(name) is not None


def flush(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def in_threads(function: Callable[[Item], object], items: Iterable[Item]) -> None:
    """Calls a function with each item, several at a time; raises the first error when all threads
    have ended."""
    everything = list(items)

    def work(first: int) -> None:
        for item in everything[first::THREADS]:
            function(item)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(min(THREADS, len(everything)))))


def reading(path: str | Path) -> BufferedReader:
    """A file opened for reading; `OSError` for a pipe or device, which may never end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def read_bytes(path: str | Path) -> bytes:
    """The content of a regular file."""
    with reading(path) as file:
        return file.read()


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pfedafm_jax`, or `~/.cache/pfedafm_jax` if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pfedafm_jax"


def digest(content: Mapping[str, Any]) -> str:
    """sha256 of a JSON object without its own `sha256`, independent of formatting."""
    plain = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _unusable(path: str | Path, accepted: str, why: str) -> PfedafmError:
    return bad("run_dir", str(path), f"{accepted} ({why})")


def check_writable(path: str | Path, setting: str = "run_dir") -> None:
    """Raises if a folder cannot be created or written; creates nothing."""
    place = Path(path).absolute()
    try:
        if "\0" in str(path).encode().decode():  # invalid text would fail later, in a library
            raise ValueError("no name can hold a zero byte")
        while not place.exists():
            place = place.parent
        # Permissions are not enough: root has all of them, and a disk may be read-only.
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, ValueError) as error:
        accepted = f"a folder that can be written ({reason(error)})"
        raise bad(setting, str(path), accepted) from error
