"""Files of checkpoints: manifests with digests, and trees of arrays written and read by Orbax."""

import contextlib
import glob
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, disk_is_full
from pfedafm_jax.base.files import digest, read_bytes, reading
from pfedafm_jax.base.trees import Leaves

Tree = Any
Manifest = dict[str, Any]

FORMAT = 2
NAME = re.compile(r"round-(\d{6,8})(\.json)?")


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest and checks its digest; `ValueError` says what is wrong with it."""
    try:
        outer = json.loads(read_bytes(path))
        manifest = outer["manifest"]
        intact, version = outer["sha256"] == digest(manifest), manifest["format"]
        intact &= version != FORMAT or manifest["round"] == part_of(path.name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact, version, manifest = False, FORMAT, {}
    if not intact:
        raise ValueError(f"{path.name} is damaged")
    if version != FORMAT:
        raise ValueError(f"{path.name} has format {version}; this version reads format {FORMAT}")
    return manifest


def signed(manifest: Manifest) -> bytes:
    """A manifest as written, with its own digest."""
    return json.dumps({"sha256": digest(manifest), "manifest": manifest}).encode()


def name_of(number: int) -> str:
    """The folder of a round."""
    return f"round-{number:06d}"


def part_of(name: str) -> int | None:
    """The round that a file or folder belongs to."""
    match = NAME.fullmatch(name.split("/")[0])
    return int(match[1]) if match else None


def digest_of(path: Path, flush: bool = False) -> str:
    """The sha256 of a file; `flush` makes sure that it is on disk."""
    with reading(path) as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def reserve(folder: Path, num_bytes: int) -> None:
    """Raises if there is no space for this many bytes; Orbax's own error is hard to read."""
    path = folder / f".space.{os.getpid()}"
    try:
        with path.open("wb") as file:
            if hasattr(os, "posix_fallocate"):  # also sees quotas
                os.posix_fallocate(file.fileno(), 0, num_bytes + num_bytes // 50 + 2**18)
    except OSError as error:
        if disk_is_full(error):
            raise
    finally:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Removes a folder, complete or partial."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path.with_name(f"{path.name}.orbax-checkpoint-tmp"), ignore_errors=True)


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # here, since the import is slow and `--help` does not need it

    # Orbax logs every folder; its errors are raised as well.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    return ocp


@contextlib.contextmanager
def _plain(folder: Path) -> Iterator[Path]:
    """The folder under a path that Orbax accepts: without brackets (a pattern) and backslashes."""
    if not glob.has_magic(str(folder)) and "\\" not in str(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as place:
        folder.parent.mkdir(parents=True, exist_ok=True)
        (Path(place) / "link").symlink_to(folder.parent)
        yield Path(place) / "link" / folder.name


def write_tree(folder: Path, tree: Tree) -> None:
    """Writes a tree of arrays."""
    ocp = _orbax()
    with _plain(folder) as path, ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.StandardSave(tree))


def read_tree(folder: Path, only: str | None = None) -> Any:
    """A tree as numpy arrays, whatever devices and processes wrote it; or only the part under one
    name, if it exists."""
    ocp = _orbax()
    with _plain(folder) as path, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(path).item_metadata.tree
        if only is not None:
            found = {name: part for name, part in found.items() if name == only}
        if not found:
            return {}
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
        # With no transforms, what is not in `item` is not read.
        wanted = {} if only is None else {"item": found, "transforms": {}}
        return checkpointer.restore(path, args=ocp.args.PyTreeRestore(**wanted, restore_args=plain))


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[Path]:
    """A checkpoint's folder that is read inside; raises if it is removed before or meanwhile."""
    gone = f"{folder} is gone: the run went on after it was opened; call load_run again"
    try:
        yield folder
    except Exception as error:
        if (folder / "run").is_dir():
            raise
        raise PfedafmError(gone) from error
    if not (folder / "run").is_dir():
        raise PfedafmError(gone)


def read_clients(folder: Path, only: int | None = None) -> Iterator[tuple[int, np.ndarray, Leaves]]:
    """The clients in a folder, by group, or of one group only.

    Yields:
        The group, its clients (int `[rows]`, -1 fills the rows of a process with fewer than
        another), and their states by path, `[rows, …]`.
    """
    blocks = [path for path in (folder / "clients").glob("*") if path.name.isdecimal()]
    for block in sorted(blocks, key=lambda path: int(path.name)):
        for group, rows in sorted(read_tree(block, None if only is None else str(only)).items()):
            front = rows["clients"].ndim
            states = {
                n: leaf.reshape(-1, *leaf.shape[front:]) for n, leaf in rows["states"].items()
            }
            yield int(group), rows["clients"].reshape(-1), states
