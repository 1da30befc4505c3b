"""Atomic writes, safe reads, this package's version, and the user's cache folder."""

import errno
import os
import stat
import subprocess
import uuid
from collections.abc import Callable
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import IO

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


@cache
def own_version() -> str:
    """This package's version; in a checkout with the commit, and `+` if files were changed."""
    from pfedafm_jax import __version__ as version  # here, since it imports this module

    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return version
    words = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        found = subprocess.run(words, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} ({found})" if found else version


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pfedafm_jax`, or `~/.cache/pfedafm_jax` if that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pfedafm_jax"
