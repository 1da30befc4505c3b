"""Checkpoints of a run's `State`, written by Orbax in the background during the next rounds.

    round-000010/        clients, in blocks; server, records and per-client numbers
    round-000010.json    the manifest, written last: the folders whose clients make up this
                         checkpoint, and size and sha256 of every file

A save holds only the clients changed since the previous one. A checkpoint is therefore a chain of
folders, in which later states replace earlier ones. Once the chain is twice as large as its
first folder, the next save holds all clients and starts a new chain, so a client is written about
twice as often as it changes, however many there are. The last two checkpoints and the best one are
kept, and the first of the previous chain, which shares no file with the latest: no single damaged
file makes all of them unusable. Checkpoints do not depend on the number of devices or processes:
with several processes, each writes its own clients, through Orbax, to a folder that all must see,
and rounds wait for it.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.base import trees
from pfedafm_jax.base.errors import START_OVER, PfedafmError, storage_error
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.trees import Leaves, by_path, num_bytes
from pfedafm_jax.engine import Processes, State
from pfedafm_jax.engine.hosts import lost_process
from pfedafm_jax.runs import checkpoint_files as files
from pfedafm_jax.runs.checkpoint_files import Manifest, Tree, name_of, part_of

BLOCK_BYTES = 2**30  # clients are copied and written in blocks of this size


class Chain(NamedTuple):
    """The folders that the next save can extend."""

    parts: tuple[int, ...] = ()  # their rounds, the one with all clients first
    first: int = 0  # clients in that one
    later: int = 0  # clients in the others, with repetition


class Checkpoints:
    """The checkpoints of one run in one folder; `identity` (settings, data) is in every manifest.

    `seconds` is how long rounds waited for saves, `background_seconds` how long the saves took.
    """

    def __init__(
        self,
        folder: str | Path,
        identity: dict[str, Any] | None = None,
        log: Callable[[str], None] = lambda line: None,
        processes: Processes | None = None,
    ):
        self._processes = processes if processes and processes.count > 1 else None
        self._first = processes is None or processes.first
        self.folder, self.log = Path(folder).absolute(), log
        self.identity = identity or {"config": {}, "data": "", "split": ""}
        self.seconds = self.background_seconds = 0.0
        self.chain = Chain()
        self._versions: dict[int, Manifest] = {}
        self._last = 0  # the round saved or loaded last
        self._pending: Future | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # ---------------------------------------------------------------------------- reading

    def manifests(self) -> dict[int, Manifest]:
        """The valid manifests by round, newest first; the files they name are not checked."""
        found = {}
        for number in self._rounds():
            with contextlib.suppress(OSError, ValueError):
                found[number] = files.read_manifest(self._manifest_path(number))
        return found

    def load(self, state: State) -> tuple[State, dict[str, Any], Leaves] | None:
        """Loads the newest checkpoint whose files are all intact; reports damaged ones.

        Args:
            state: the state before the first round; its store is overwritten.

        Returns:
            The state, details and arrays that were saved; None if there is no checkpoint.
        """
        manifest = self.newest()
        if manifest is None:
            return None
        self._last = manifest["round"]
        self._versions = {n: m for n, m in self.manifests().items() if n <= self._last}
        run = files.read_tree(self.folder / name_of(manifest["round"]) / "run")
        store = state.clients
        sizes = []
        for part in manifest["parts"]:
            sizes.append(0)
            for group, clients, states in files.read_clients(self.folder / name_of(part)):
                states = trees.fitted(store.start(group), states, len(clients))
                for row, client in enumerate(clients.tolist()):
                    if client < 0:
                        continue
                    sizes[-1] += 1
                    if self._processes and not self._processes.keeps(client):
                        store.written_elsewhere([client])
                    else:
                        store.write(client, jax.tree.map(lambda leaf, row=row: leaf[row], states))
        store.changed[:] = False
        self.chain = Chain(tuple(manifest["parts"]), sizes[0] if sizes else 0, sum(sizes[1:]))
        server = trees.fitted(jax.device_get(state.server), run.get("server", {}))

        def put(new: np.ndarray, old: Any) -> jax.Array:
            return jax.device_put(new, getattr(old, "sharding", None))

        server = jax.tree.map(put, server, state.server)
        return State(server, store), json.loads(run["details"].tobytes()), run["arrays"]

    def newest(self) -> Manifest | None:
        """The newest manifest whose files are all intact; reports damaged ones."""
        rounds = self._rounds()
        for number in rounds:
            try:
                manifest = files.read_manifest(self._manifest_path(number))
                self.verify(manifest)
                return manifest
            except (OSError, ValueError) as error:
                name = f"{self.folder.name}/{name_of(number)}"
                self.log(f"warning: checkpoint {name} is skipped: {error}")
        if rounds:
            words = "can be used, all are damaged"
            raise PfedafmError(f"no checkpoint in {self.folder} {words}; {START_OVER}")
        return None

    def verify(self, manifest: Manifest) -> None:
        """Raises `ValueError` if a file of this manifest is missing or was altered."""
        for name, (size, digest) in manifest["files"].items():
            path = self.folder / name
            if not path.is_file():
                raise ValueError(f"{name} is missing")
            if path.stat().st_size != size:
                raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
            if files.digest_of(path) != digest:
                raise ValueError(f"{name} has changed since it was written (sha256)")

    def _rounds(self) -> list[int]:
        """Rounds that have a manifest, newest first."""
        matches = [files.NAME.fullmatch(path.name) for path in self.folder.glob("round-*.json")]
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    # ---------------------------------------------------------------------------- writing

    def save(
        self,
        number: int,
        state: State,
        arrays: Leaves,
        details: dict[str, Any],
        score: float | None = None,
    ) -> None:
        """Copies what has changed by round `number`, and saves it in the background.

        Args:
            arrays, details: what else `load` should return, as arrays and as JSON.
            score: the checkpoint with the highest one is kept as the best.
        """
        self.wait()
        if number <= self._last:
            return
        start, store = time.perf_counter(), state.clients
        clients = np.flatnonzero(store.changed)
        first, later = self.chain.first, self.chain.later + len(clients)
        if later >= first:
            clients = np.flatnonzero(store.visited)
            self.chain = Chain((number,), first=len(clients))
        else:
            self.chain = Chain((*self.chain.parts, number), first, later)
        self._last, store.changed[:] = number, False
        run: dict[str, Tree] = {
            "server": trees.filled(trees.named(jax.device_get(state.server))),
            "arrays": {"round": np.array(number), **trees.filled(arrays)},
            "details": np.frombuffer(json.dumps(details).encode(), np.uint8),
        }
        manifest = {"format": files.FORMAT, "round": number, "score": score, **self.identity}
        manifest["parts"] = list(self.chain.parts)
        blocks = self._blocks(clients, state)
        client_bytes = int(store.row_bytes[store.groups[clients]].sum())
        if client_bytes <= BLOCK_BYTES:
            blocks = list(blocks)
        self._pending = self._pool.submit(self._write, manifest, blocks, run, client_bytes)
        # States too large to copy are read while they are written. With several processes, Orbax
        # synchronizes them as rounds do, and the two must not overlap.
        if client_bytes > BLOCK_BYTES or self._processes:
            self.wait()
        else:
            self.seconds += time.perf_counter() - start

    def _blocks(self, clients: np.ndarray, state: State) -> Iterator[Tree]:
        """Clients and their states by group, in blocks of at most `BLOCK_BYTES`."""
        store = state.clients
        most = max(1, BLOCK_BYTES // max(1, int(store.row_bytes.max())))
        for first in range(0, len(clients), most):
            tree, block = {}, clients[first : first + most]
            for group in np.unique(store.groups[block]):
                members = block[store.groups[block] == group]
                if self._processes:
                    members = self._processes.kept_rows(members)
                states = trees.filled(by_path(store.read(int(group), members)))
                rows = {"clients": members, "states": states}
                join = self._processes.joined if self._processes else np.asarray
                tree[str(group)] = jax.tree.map(join, rows)
            yield tree

    def _write(
        self, manifest: Manifest, blocks: Iterable[Tree], run: Tree, client_bytes: int
    ) -> None:
        start, number = time.perf_counter(), manifest["round"]
        folder = self.folder / name_of(number)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._first:
            self._manifest_path(number).unlink(missing_ok=True)
            files.remove(folder)  # of an interrupted save, or a damaged checkpoint
            for left in (*self.folder.glob(".*.tmp"), *self.folder.glob(".space.*")):
                left.unlink(missing_ok=True)
        try:
            files.reserve(self.folder, client_bytes + num_bytes(run))
            for block, tree in enumerate(blocks):
                files.write_tree(folder / "clients" / str(block), tree)
            files.write_tree(folder / "run", run)
            if not self._first:
                return
            # The files of earlier folders, with their digests of that time.
            manifest["files"] = {
                name: entry
                for version in self._versions.values()
                for name, entry in version["files"].items()
                if "/clients/" in name and part_of(name) in manifest["parts"]
            }
            for path in sorted(path for path in folder.rglob("*") if path.is_file()):
                entry = [path.stat().st_size, files.digest_of(path, flush=True)]
                manifest["files"][path.relative_to(self.folder).as_posix()] = entry
            write_atomically(self._manifest_path(number), files.signed(manifest))
        except BaseException:
            files.remove(folder)  # makes room if the disk is full
            raise
        self._versions[number] = manifest
        self._prune(2)
        self.background_seconds += time.perf_counter() - start

    def _prune(self, latest: int) -> None:
        """Deletes all but the latest checkpoints, the best, one that shares no file with the last,
        and the folders they need."""
        versions, numbers = self._versions, sorted(self._versions)
        scores = {n: m["score"] for n, m in versions.items() if m["score"] is not None}
        best = [min(scores, key=lambda n: (-scores[n], n))] if scores else []
        start = versions[numbers[-1]]["parts"][0] if numbers else 0  # of the present chain
        apart = [n for n in numbers if versions[n]["parts"] == [n] and n < start][-1:]
        kept = {*numbers[-latest:], *best, *apart}
        self._versions = {n: m for n, m in versions.items() if n in kept}
        self.clean(max(kept, default=0))

    def clean(self, last: int | None = None) -> None:
        """Removes, in process 0, everything that no valid checkpoint needs.

        `last`: spare anything newer, since other processes may be at the next save already.
        """
        if not self._first:
            return
        for number in self._rounds():
            if number not in self._versions:
                self._manifest_path(number).unlink(missing_ok=True)
        needed = {part for manifest in self._versions.values() for part in manifest["parts"]}
        for path in self.folder.glob("round-*"):
            part = part_of(path.name)
            old = last is None or part is None or part <= last
            if path.is_dir() and part not in needed and old:
                files.remove(path)

    def check(self) -> None:
        """Raises if the last save has failed by now; does not wait for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the last save; `StorageError`, which ends the run, if it failed (earlier ones are
        intact)."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            pending.result()
        except Exception as error:
            if self._processes and (lost := lost_process(error)):
                raise lost from None
            raise storage_error(f"a checkpoint in {self.folder}", self.folder, error) from error
        finally:
            self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """After the last round: keeps the last checkpoint, the best, and one that shares no file."""
        self.wait()
        self._prune(1)

    def close(self) -> None:
        """Waits for a save in progress, and ignores its errors."""
        # If another process has died, it would never end.
        self._pool.shutdown(wait=self._processes is None)

    def clear(self) -> None:
        """Removes all checkpoints."""
        self._versions = {}
        self.clean()

    def _manifest_path(self, number: int) -> Path:
        return self.folder / f"{name_of(number)}.json"
