"""Atomic writes, safe reads, digests, and the user's cache folder."""

import errno
import hashlib
import json
import os
import stat
import tempfile
import uuid
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from pfedafm_jax.base.errors import PfedafmError, bad, reason

Log = Callable[[str], None]  # takes single lines, such as warnings and what is downloaded


def write_atomically(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Replaces `path` by this content, or by what a function writes to the file it is given; after
    a failure `path` is unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within one file system; with a short name,
    # since `path` itself may have the longest name allowed.
    temporary = path.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
