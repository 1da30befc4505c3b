"""Files that are either there whole or not there at all, and where those of the user are kept."""

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


def write_atomically(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Makes `path` hold this, or what a function writes into the open file that it is given; on any
    failure `path` is as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system; and short, because
    # the name itself may be as long as names can be.
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
    """A file opened to be read; `OSError` for a pipe or a device too, which may have no end."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return open(path, "rb")


def read_bytes(path: str | Path) -> bytes:
    """All of a regular file."""
    with reading(path) as file:
        return file.read()


@cache
def own_version() -> str:
    """This package's version; in a checkout with the commit, `+` where files were changed."""
    from pfedafm_jax import __version__ as version  # here, since that imports all of it

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
    """`$XDG_CACHE_HOME/pfedafm_jax`, or `~/.cache/pfedafm_jax` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pfedafm_jax"
