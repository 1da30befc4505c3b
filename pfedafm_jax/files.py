"""Files that are either there whole or not there at all, and where those of the user are kept."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO


def write_atomically(path: Path, content: str | bytes | Callable[[IO[bytes]], object]) -> None:
    """Makes `path` hold this, or what a function writes into the open file that it is given; on any
    failure `path` is as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, because a rename is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
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


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pfedafm_jax`, or `~/.cache/pfedafm_jax` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pfedafm_jax"
