"""A dataset once fetched is kept as one uncompressed file in the user's cache folder, and checked at every load.

$XDG_CACHE_HOME/pfedafm_jax/cifar10.npz    images and labels, training part first
$XDG_CACHE_HOME/pfedafm_jax/cifar10.json   where they came from, for people
"""

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.data.cifar import Arrays, Cifar, check_sums
from pfedafm_jax.errors import PfedafmError

Log = Callable[[str], None]


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pfedafm_jax`, or `~/.cache/pfedafm_jax` where that is not set."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative values ignored.
    root = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    return root / "pfedafm_jax"


def store(cifar: Cifar, arrays: Arrays, source: str, cache_dir: Path, log: Log) -> None:
    """Keep `arrays` for the next run. A folder that cannot be written to costs one line, not the run."""
    try:
        # The note first: data without a note would say "unknown origin", a note without data is never read.
        note = json.dumps({"source": source, "sums": list(cifar.sums)}, indent=2) + "\n"
        write_atomically(_note_path(cifar, cache_dir), lambda file: file.write(note.encode()))
        write_atomically(_data_path(cifar, cache_dir), lambda file: np.savez(file, **arrays._asdict()))
    except OSError as error:
        log(f"warning: {cifar.name} is not cached, {cache_dir} cannot be written to ({error.strerror or error})")


def exists(cifar: Cifar, cache_dir: Path) -> bool:
    """Whether there is a cached copy, good or bad."""
    return os.path.isfile(_data_path(cifar, cache_dir))


def load(cifar: Cifar, cache_dir: Path, log: Log) -> tuple[Arrays, str] | None:
    """(arrays, where they came from), or None when there is nothing usable; damaged files are removed."""
    path = _data_path(cifar, cache_dir)
    if not os.path.isfile(path):
        return None
    if not os.access(path, os.R_OK):
        log(f"warning: the cached copy {path} may not be read; fetching again")
        return None
    try:
        # Opened here, because numpy leaves a damaged file open.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = Arrays(*(archive[field] for field in Arrays._fields))
        check_sums(cifar, arrays, "the cache")
    except Exception as error:  # zipfile and numpy raise many types on damaged input
        reason = "contents changed" if isinstance(error, PfedafmError) else f"{type(error).__name__}: {error}"
        log(f"the cached copy {path} is damaged ({reason}); removing it and fetching again")
        _remove(path)
        return None
    return arrays, f"{_source(cifar, cache_dir)} (cached)"


def _source(cifar: Cifar, cache_dir: Path) -> str:
    # Only a note for people: its loss must not make the data useless.
    try:
        return str(json.loads(_note_path(cifar, cache_dir).read_text())["source"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown origin"


def _remove(path: Path) -> None:
    # Where the folder is read-only, it will be found damaged again, and fetched again.
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _data_path(cifar: Cifar, cache_dir: Path) -> Path:
    return cache_dir / f"{cifar.name}.npz"


def _note_path(cifar: Cifar, cache_dir: Path) -> Path:
    return cache_dir / f"{cifar.name}.json"
