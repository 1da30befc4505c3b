"""Checkpoints of a run, written by Orbax in the background while the next rounds go on.

    round-000010/        clients written to since the checkpoint before; server, records and per-client numbers
    round-000010.json    the manifest, written last: the folders whose clients make up this checkpoint, and size and
                         sha256 of every file

A checkpoint is the clients of all folders that its manifest names, later ones over earlier ones, so that a save costs
what the changed clients cost, however many there are. Once more than half of the rows on disk are outdated, a save takes
along clients of the emptiest folders (at most as many as have changed), until nobody needs these folders.
The last two checkpoints and the best one are kept. Nothing in them depends on the number of devices or processes: where
several processes run together, Orbax has each write its own clients into the folder, which all of them must see, and
rounds wait for it.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.engine import ClientStore, Hosts
from pfedafm_jax.engine.hosts import lost_process
from pfedafm_jax.errors import START_OVER, PfedafmError, disk_is_full, storage_error

Tree = Any
Leaves = dict[str, np.ndarray]  # by their path, `header.kernel`
Manifest = dict[str, Any]

FORMAT = 1
MAX_MANIFEST_BYTES = 256 * 2**20
_NAME = re.compile(r"round-(\d{6,8})(\.json)?")


class Saved(NamedTuple):
    """What a checkpoint held besides clients, which are back in their store."""

    round: int
    server: Leaves
    arrays: Leaves
    details: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run in one folder; `identity` (settings, data) goes into every manifest.

    `seconds` is how long the run was held up by saving, `background_seconds` how long saves took beside it.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: dict[str, Any] | None = None,
        log: Callable[[str], None] = lambda line: None,
        hosts: Hosts | None = None,
    ):
        self._hosts = hosts if hosts and hosts.count > 1 else None
        self._process, self._processes = (hosts.index, hosts.count) if hosts else (0, 1)
        self.folder, self.identity, self.log = Path(folder).absolute(), identity or {}, log
        self.seconds = self.background_seconds = 0.0
        self._versions: dict[int, Manifest] = {}
        self._holder = np.zeros(0, np.int64)  # for each client the folder that holds its newest state; 0: none
        self._rows: dict[int, int] = {}  # folder → clients in it
        self._last = 0  # the round saved or loaded last
        self._pending: Future | None = None
        self._undo: Callable[[], None] = lambda: None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # ------------------------------------------------------------------------------------------ reading

    def manifests(self) -> dict[int, Manifest]:
        """The manifests that can be read, by round, newest first; the files that they name are not looked at."""
        found = {}
        for number in self._rounds():
            try:
                found[number] = read_manifest(self._manifest_path(number))
            except (OSError, ValueError):
                continue
        return found

    def load(self, store: ClientStore, home: np.ndarray | None = None) -> Saved | None:
        """The newest checkpoint whose files are all as they were written, its clients put into `store`; None: none yet.

        Damaged ones are named and skipped. With several processes `home[client]` becomes the one that keeps a client.
        """
        self._holder = np.zeros(len(store.groups), np.int64)
        rounds = self._rounds()
        for number in rounds:
            try:
                manifest = read_manifest(self._manifest_path(number))
                self._verify(manifest)
            except (OSError, ValueError) as error:
                self.log(f"warning: checkpoint {self.folder.name}/{_name(number)} is skipped: {error}")
                continue
            self._versions = {n: m for n, m in self.manifests().items() if n <= number}
            self._last = number
            return self._read(manifest, store, home)
        if rounds:
            raise PfedafmError(f"no checkpoint in {self.folder} can be used, all are damaged; {START_OVER}")
        return None

    def _read(self, manifest: Manifest, store: ClientStore, home: np.ndarray | None) -> Saved:
        folder = self.folder / _name(manifest["round"])
        run = _orbax_read(folder / "run")
        kept = run["arrays"].pop("home", None)
        if kept is None or manifest["processes"] != self._processes:
            kept = np.arange(len(store.groups)) % self._processes
        for part in manifest["parts"]:
            self._rows[part] = 0
            for group, rows in sorted(_orbax_read(self.folder / _name(part) / "clients").items()):
                clients = rows["clients"].reshape(-1)  # -1 fills the rows of a process with fewer clients than another
                states = {name: leaf.reshape(len(clients), *leaf.shape[rows["clients"].ndim :]) for name, leaf in
                          rows["states"].items()}  # fmt: skip
                mine = np.where((clients >= 0) & (kept[clients] == self._process), clients, -1)
                store.write(int(group), mine, fitted(store.start(int(group)), states, len(clients)))
                clients = clients[clients >= 0]
                self._holder[clients] = part
                self._rows[part] += len(clients)
                if home is not None and self._hosts:
                    home[clients] = kept[clients]
        store.changed[:] = False
        details = json.loads(run["details"].tobytes())
        return Saved(manifest["round"], run.get("server", {}), run["arrays"], details)

    def _verify(self, manifest: Manifest) -> None:
        for name, (size, digest) in manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{name} is missing")
            if path.stat().st_size != size:
                raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
            if _digest(path) != digest:
                raise ValueError(f"{name} has changed since it was written (sha256)")

    def _rounds(self) -> list[int]:
        """Rounds that have a manifest, newest first."""
        matches = [_NAME.fullmatch(path.name) for path in self.folder.glob("round-*.json")]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    # ------------------------------------------------------------------------------------------ writing

    def save(
        self,
        number: int,
        store: ClientStore,
        server: Tree,
        arrays: Leaves,
        details: dict[str, Any],
        score: float | None = None,
        home: np.ndarray | None = None,
    ) -> None:
        """Saves round `number` in the background, after copying what has changed; the highest `score` is the best.

        With several processes `home[client]` is the one that keeps a client; `store.changed` is the same in all of them.
        """
        self.wait()
        if number <= self._last:
            return
        start = time.perf_counter()
        if len(self._holder) != len(store.groups):
            self._holder = np.zeros(len(store.groups), np.int64)
        changed = np.flatnonzero(store.changed)
        clients = np.union1d(changed, self._taken_along(changed))
        tree = {}
        for group in np.unique(store.groups[clients]):
            members = clients[store.groups[clients] == group]
            if self._hosts and home is not None:
                members = self._hosts.own_rows(members, home[members])
            states = _filled(_by_path(store.read(int(group), members)))
            tree[str(group)] = {"clients": members, "states": states}
            if self._hosts:
                tree[str(group)] = jax.tree.map(self._hosts.joined, tree[str(group)])
        before, rows, last = self._holder[clients], dict(self._rows), self._last

        def undo() -> None:
            self._holder[clients], self._rows, self._last = before, rows, last
            store.changed[clients] = True

        self._undo, self._last = undo, number
        self._holder[clients], store.changed[:] = number, False
        self._rows[number] = len(clients)
        parts = [int(part) for part in np.unique(self._holder) if part > 0]
        self._rows = {part: self._rows[part] for part in parts}
        run: dict[str, Tree] = {
            "server": _filled(named(server)),
            "arrays": {"round": np.array(number), **_filled(arrays)},
        }
        if home is not None and self._hosts:
            run["arrays"]["home"] = np.array(home)
        manifest = {"format": FORMAT, "round": number, "score": score, "parts": parts, **self.identity}
        manifest["processes"] = self._processes
        run["details"] = np.frombuffer(json.dumps(details).encode(), np.uint8)
        self._pending = self._pool.submit(self._write, manifest, tree, run)
        if self._hosts:  # Orbax lets the processes meet as rounds do, and the two kinds of meeting must not overlap
            self.wait()
            return
        self.seconds += time.perf_counter() - start

    def _taken_along(self, changed: np.ndarray) -> np.ndarray:
        """Unchanged clients to be written again so that their folders can go; none while half of all rows is current."""
        holder = self._holder.copy()
        holder[changed] = 0
        parts, live = np.unique(holder[holder > 0], return_counts=True)
        rows = np.array([self._rows[part] for part in parts], np.int64)
        if rows.sum() <= 2 * live.sum() + len(changed):
            return np.zeros(0, np.int64)
        emptiest = parts[np.argsort(live / rows, kind="stable")]
        return np.concatenate([np.flatnonzero(holder == part) for part in emptiest])[: len(changed)]

    def _write(self, manifest: Manifest, clients: Tree, run: Tree) -> None:
        start, number = time.perf_counter(), manifest["round"]
        folder = self.folder / _name(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._process == 0:
            self._manifest_path(number).unlink(missing_ok=True)
            _remove(folder)  # what a save that was cut off, or a damaged checkpoint, left
        try:
            _reserve(self.folder, sum(leaf.nbytes for leaf in jax.tree.leaves((clients, run))))
            _orbax_write(folder, {"clients": clients, "run": run})
            if self._process > 0:
                return
            files = {}
            for version in self._versions.values():  # clients of earlier folders, as it was when these were written
                for name, entry in version["files"].items():
                    if "/clients/" in name and _part_of(name) in manifest["parts"]:
                        files[name] = entry
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                files[path.relative_to(self.folder).as_posix()] = [path.stat().st_size, _digest(path, flush=True)]
            manifest["files"] = files
            write_atomically(self._manifest_path(number), lambda file: file.write(_signed(manifest)))
        except BaseException:
            _remove(folder)  # leaves room for others where the disk is full
            raise
        self._versions[number] = manifest
        self._prune(2)
        self.background_seconds += time.perf_counter() - start

    def _prune(self, latest: int) -> None:
        """Keeps the latest checkpoints, the best one, and the folders that they need."""
        scores = {n: m["score"] for n, m in self._versions.items() if m["score"] is not None}
        best = [min(scores, key=lambda n: (-scores[n], n))] if scores else []
        kept = {*sorted(self._versions)[-latest:], *best}
        self._versions = {n: m for n, m in self._versions.items() if n in kept}
        self.clean(max(kept, default=0))

    def clean(self, last: int | None = None) -> None:
        """Removes what no checkpoint that is known to be good needs; the first process does it for all.

        `last`: only what is not newer, since other processes may be at the next one already.
        """
        if self._process > 0:
            return
        for number in self._rounds():
            if number not in self._versions:
                self._manifest_path(number).unlink(missing_ok=True)
        needed = {part for manifest in self._versions.values() for part in manifest["parts"]}
        for path in self.folder.glob("round-*"):
            part = _part_of(path.name)
            if path.is_dir() and part not in needed and (last is None or part is None or part <= last):
                _remove(path)

    def check(self) -> None:
        """Raises if the last save has failed by now; does not wait for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save is done; raises `StorageError` if it failed (the checkpoints before it are still good)."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            pending.result()
        except Exception as error:
            self._undo()
            if self._hosts and (lost := lost_process(error)):
                raise lost from None
            raise storage_error(f"a checkpoint in {self.folder}", self.folder, error) from error
        finally:
            self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """After the last round: only the last checkpoint and the best one stay."""
        self.wait()
        self._prune(1)

    def close(self) -> None:
        """Lets a save that is under way end; whether it succeeds no longer matters to anybody."""
        self._pool.shutdown(wait=self._hosts is None)  # where another process is gone it would never end

    def clear(self) -> None:
        """Removes all checkpoints."""
        for number in self._rounds():
            self._manifest_path(number).unlink(missing_ok=True)
        for path in self.folder.glob("round-*"):
            _remove(path)

    def _manifest_path(self, number: int) -> Path:
        return self.folder / f"{_name(number)}.json"


# ---------------------------------------------------------------------------------------------- manifests and files


def read_manifest(path: Path) -> Manifest:
    """A manifest that is as it was written; `ValueError` says what is wrong with any other."""
    if path.stat().st_size > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path.name} is larger than any manifest")
    try:
        outer = json.loads(path.read_bytes())
        manifest = outer["manifest"]
        if outer != json.loads(_signed(manifest)) or manifest["format"] != FORMAT:
            raise ValueError
        own = all(_part_of(name) in manifest["parts"] and ".." not in Path(name).parts for name in manifest["files"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path.name} is damaged, or of another version") from None
    if not own:
        raise ValueError(f"{path.name} names files that are not its own")
    return manifest


def _signed(manifest: Manifest) -> bytes:
    text = json.dumps(manifest, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "manifest": manifest}).encode()


def _name(number: int) -> str:
    return f"round-{number:06d}"


def _part_of(name: str) -> int | None:
    match = _NAME.fullmatch(name.split("/")[0])
    return int(match[1]) if match else None


def _digest(path: Path, flush: bool = False) -> str:
    with open(path, "rb") as file:
        if flush:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reserve(folder: Path, num_bytes: int) -> None:
    """Raises where there is no space for this much (and what comes with it), which Orbax would tell in many words."""
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


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    shutil.rmtree(path.with_name(f"{path.name}.orbax-checkpoint-tmp"), ignore_errors=True)


# ---------------------------------------------------------------------------------------------- trees and Orbax


def named(tree: Tree) -> Leaves:
    """The leaves of a tree by their path, as numpy arrays of their own (the tree's may be changed or donated)."""
    return {name: np.array(leaf) for name, leaf in _by_path(tree).items()}


def _by_path(tree: Tree) -> dict[str, Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in paths}


def fitted(template: Tree, leaves: Leaves, rows: int | None = None) -> Tree:
    """Leaves by path as a tree like `template` (with `rows` in front); raises where they do not fit."""
    front = () if rows is None else (rows,)
    expected = {name: ((*front, *np.shape(leaf)), leaf.dtype) for name, leaf in _by_path(template).items()}
    found = {name: (leaf.shape, leaf.dtype) for name, leaf in leaves.items()}
    if found != {name: entry for name, entry in expected.items() if 0 not in entry[0]}:
        raise PfedafmError(f"the checkpoint was written for other networks; {START_OVER}")
    empty = {name: np.zeros(*entry) for name, entry in expected.items() if 0 in entry[0]}
    return jax.tree.unflatten(jax.tree.structure(template), [{**leaves, **empty}[name] for name in expected])


def _filled(leaves: Leaves) -> Leaves:
    """Without arrays of size zero, which Orbax does not take."""
    return {name: leaf for name, leaf in leaves.items() if leaf.size}


def _orbax() -> Any:
    import orbax.checkpoint as ocp  # here, because it takes a while and `--help` needs none of it

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax tells of every folder; its errors are raised as well
    return ocp


def _orbax_write(folder: Path, trees: dict[str, Tree]) -> None:
    ocp = _orbax()
    for name, tree in trees.items():
        if tree:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as checkpointer:
                checkpointer.save(folder / name, args=ocp.args.StandardSave(tree))


def _orbax_read(folder: Path) -> Any:
    """A tree as numpy arrays, however many devices and processes it was written by."""
    ocp = _orbax()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.metadata(folder).item_metadata.tree
        plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), found)
        return checkpointer.restore(folder, args=ocp.args.PyTreeRestore(restore_args=plain))
