"""Checkpoints of a run: the server's part, the numbers so far, and which file each client is in.

    rounds/000035/server/arrays.safetensors     what the server sends next, and the table
    rounds/000035/history/arrays.safetensors    records and per-client numbers
    clients/…                                   see `base.client_files`

The table says after which round's visit each client is, and so names its file. A save therefore
writes the clients that were visited since the save before and nothing else, whatever their number.
The last two checkpoints and the best one are kept; a client's file that none of them names is
removed. A checkpoint appears whole or not at all, and every file has a digest.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from pfedafm_jax.base.array_files import SUFFIX, About, Arrays, DamagedFile, read_arrays
from pfedafm_jax.base.client_files import ClientFile, ClientFiles, visits_in
from pfedafm_jax.base.errors import START_OVER, PfedafmError, StorageError, storage_error
from pfedafm_jax.base.files import flush
from pfedafm_jax.runs.weights_folder import ROUNDS, rounds_saved

ITEM_FILE = f"arrays{SUFFIX}"
TABLE = "table"
JSON = "json"
LATEST = 2  # checkpoints that are kept beside the best


class Server(NamedTuple):
    """The server's part of a checkpoint: all that `predict` needs beside a client's file.

    Attributes:
        round: the round after which it was saved.
        arrays: what the server sends next, by path in its tree.
        table: after which round's visit each client is, int32 `[clients]`; 0: in its first state.
        score: by which the best checkpoint is kept; None: it has none.
    """

    round: int
    arrays: Arrays
    table: np.ndarray
    score: float | None


class SavedHistory(NamedTuple):
    """What else a run needs to go on.

    Attributes:
        details: anything, as JSON.
        arrays: numbers by name.
    """

    details: dict[str, Any]
    arrays: Arrays


class Saved(NamedTuple):
    """A checkpoint as a run resumes from it; its clients' files are all whole."""

    server: Server
    history: SavedHistory


class Processes(Protocol):
    """The processes of a run. Client k is kept by process `k % count`; all see the same folder."""

    index: int
    count: int

    def any(self, here: bool) -> bool:
        """Whether it is so in any of them; waits for all."""
        ...


class OneProcess:
    """A run in one process."""

    index = 0
    count = 1

    def any(self, here: bool) -> bool:
        return here


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: of the run's weights; it must be this run's, see `weights_folder.claim`.
        run: the run's id; what has another one is not used.
        log: called with single lines, such as a damaged checkpoint.
        processes: those of the run, if there are several.

    Attributes:
        files: the clients' files.
        seconds: how long rounds have waited for saves.
        background_seconds: how long the saves took.

    A run calls `resume` once, then `save` after some rounds and `check` after each, and `close`.
    Who only reads calls `newest_server`.
    """

    def __init__(
        self,
        folder: str | Path,
        run: str,
        log: Callable[[str], Any] = lambda line: None,
        processes: Processes | None = None,
    ):
        self.folder = Path(folder).absolute()
        self.rounds_folder = self.folder / ROUNDS
        self.run = run
        self.log = log
        self.files = ClientFiles(self.folder / "clients", run)
        self.seconds = 0.0
        self.background_seconds = 0.0
        self._processes = processes or OneProcess()
        self._last = 0  # the round of the checkpoint saved or resumed from last
        self._tables: dict[int, np.ndarray] = {}  # of the checkpoints that are kept
        self._scores: dict[int, float | None] = {}
        self._manager: Any = None
        self._pending: Future | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # --------------------------------------------------------------------------------- reading

    def rounds(self) -> list[int]:
        """The rounds that there are checkpoints of, oldest first; what is in them is not checked."""
        return rounds_saved(self.folder)

    def server(self, t: int) -> Server:
        """The server's part of the checkpoint of round `t`; `DamagedFile` if it is not whole."""
        arrays, about = self._item(t, "server")
        return Server(t, arrays, arrays.pop(TABLE), about["score"])

    def history(self, t: int) -> SavedHistory:
        """The history in the checkpoint of round `t`; `DamagedFile` if it is not whole."""
        arrays, _ = self._item(t, "history")
        return SavedHistory(json.loads(arrays.pop(JSON).tobytes()), arrays)

    def newest_server(self) -> Server | None:
        """The server's part of the newest checkpoint, for use without training; clients' files are
        checked when they are read. None if there is no checkpoint; damaged ones are reported."""
        rounds = self.rounds()
        for t in reversed(rounds):
            try:
                return self.server(t)
            except DamagedFile as error:
                self._skip(t, error)
        if rounds:
            raise self._all_damaged()
        return None

    def client(self, client: int, server: Server) -> ClientFile | None:
        """One client's state at a checkpoint; None if it is in its first state."""
        t = int(server.table[client])
        if t == 0:
            return None
        try:
            return self.files.read(client, t)
        except DamagedFile as error:
            if server.round in self.rounds():
                raise
            raise PfedafmError(
                f"{error.path} is gone: the run went on after it was opened; call load_run again"
            ) from error

    def newest(self) -> Saved | None:
        """The newest checkpoint whose files are all whole, clients' files included; None if there is
        no checkpoint. Reports what is damaged and changes nothing."""
        rounds = self.rounds()
        found: Saved | None = None
        for t in reversed(rounds):
            problem: DamagedFile | None = None
            saved: Saved | None = None
            try:
                saved = self._read_whole(t)
            except DamagedFile as error:
                problem = error
                self._skip(t, error)
            # Where one process finds damage, all of them pass on.
            if not self._processes.any(problem is not None):
                found = saved
                break
        if rounds and found is None:
            raise self._all_damaged()
        return found

    def resume(self) -> Saved | None:
        """The newest checkpoint whose files are all whole; called once, before the first round.

        Reports what is damaged, and passes on to an older checkpoint where there is one. Then
        removes what no checkpoint needs: files of rounds that will be done again, damaged
        checkpoints, and what a killed process left. Clients' files are checked here and read when
        their clients are drawn.

        Returns:
            None if there is no checkpoint.
        """
        rounds = self.rounds()
        found = self.newest()
        self._last = found.server.round if found else 0
        servers = list(self._usable_servers(rounds))
        self._scores = {server.round: server.score for server in servers}
        wanted = self._wanted([server.round for server in servers])
        self._tables = {server.round: server.table for server in servers if server.round in wanted}
        if self._processes.index == 0:
            self._remove_checkpoints(set(rounds) - self._tables.keys())
            self.files.remove_all_but(list(self._tables.values()))
        self._processes.any(False)  # nobody writes before everything unwanted is gone
        return found

    def _read_whole(self, t: int) -> Saved:
        """The checkpoint of round `t`, after its clients' files were checked, of this process."""
        server = self.server(t)
        history = self.history(t)
        self.files.check_all(visits_in(server.table, self._mine(np.arange(len(server.table)))))
        return Saved(server, history)

    def _mine(self, clients: np.ndarray) -> np.ndarray:
        """Those clients, int `[some]`, that this process keeps."""
        return clients[clients % self._processes.count == self._processes.index]

    def _usable_servers(self, rounds: list[int]) -> Iterator[Server]:
        """The server's parts of the checkpoint that is resumed from and of those before it; one that
        cannot be read could never be used."""
        for t in rounds:
            if t <= self._last:
                with contextlib.suppress(DamagedFile):
                    yield self.server(t)

    def _item(self, t: int, name: str) -> tuple[Arrays, About]:
        path = self.rounds_folder / f"{t:06d}" / name / ITEM_FILE
        arrays, about = read_arrays(path)
        expected = self._about(t, name)
        if not expected.items() <= about.items():
            raise DamagedFile(path, f"it is {about}, and not of this run")
        return arrays, about

    def _about(self, t: int, name: str) -> About:
        return {"kind": name, "run": self.run, "round": t}

    def _skip(self, t: int, error: DamagedFile) -> None:
        self.log(f"warning: the checkpoint of round {t} is skipped: {error}")

    def _all_damaged(self) -> PfedafmError:
        return PfedafmError(
            f"no checkpoint in {self.folder} can be used, all are damaged; {START_OVER}"
        )

    # --------------------------------------------------------------------------------- writing

    def save(
        self,
        t: int,
        server: Mapping[str, np.ndarray],
        table: np.ndarray,
        states: Mapping[int, Arrays],
        history: SavedHistory,
        score: float | None = None,
    ) -> None:
        """Saves a run after round `t`, in the background; raises if the save before has failed.

        With several processes all call it, each with its own clients, and wait for each other.

        Args:
            server: what it sends next, by path; copied here.
            table: the round of each client's last visit, int `[clients]`, 0 where there was none.
            states: of this process's clients, those visited since the last checkpoint whose files
                are not written yet. Their arrays are read later and must not change any more.
            history: what else `resume` should return; its arrays are copied here.
            score: the checkpoint with the highest one is kept as the best; None: it has none.
        """
        self.wait()
        if t <= self._last:
            return
        start = time.perf_counter()
        table = np.array(table, np.int32)
        details = np.frombuffer(json.dumps(history.details).encode(), np.uint8)
        items = {
            "server": _copied(server) | {TABLE: table},
            "history": _copied(history.arrays) | {JSON: details},
        }
        visited = np.flatnonzero(table > self._last)
        self._last = t
        task = (t, items, states, visited, score)
        self._pending = self._thread.submit(self._write, *task)
        if self._processes.count > 1:
            self.wait()  # the others are waited for in the background thread, by a sum over devices
        else:
            self.seconds += time.perf_counter() - start

    def _write(
        self,
        t: int,
        items: dict[str, Arrays],
        states: Mapping[int, Arrays],
        visited: np.ndarray,
        score: float | None,
    ) -> None:
        start = time.perf_counter()
        table = items["server"][TABLE]
        mine = self._mine(visited)

        def write_clients() -> None:
            self.files.write_all(states, table)
            self.files.flush(visits_in(table, mine))

        def commit() -> None:
            if self._processes.index == 0:
                self._commit(t, items, score)

        for step in (write_clients, commit):
            problem: Exception | None = None
            try:
                step()
            except Exception as error:
                problem = error
            # All end here together, or none: a checkpoint needs the clients of every process.
            if self._processes.any(problem is not None):
                if t not in self.rounds():  # makes room, since the disk may be full
                    with contextlib.suppress(OSError):
                        self.files.remove(visits_in(table, np.array(list(states), int)))
                raise problem or StorageError("another process could not write a checkpoint")
        self.background_seconds += time.perf_counter() - start

    def _commit(self, t: int, items: dict[str, Arrays], score: float | None) -> None:
        """Writes the checkpoint itself; then removes what is no longer needed."""
        if self._manager is None:
            from pfedafm_jax.runs.orbax_manager import (
                RoundsManager,  # here: the import takes a while
            )

            self._manager = RoundsManager(self.rounds_folder, self._wanted)
        self._scores[t] = None if score is None else float(score)
        about = {name: self._about(t, name) for name in items}
        about["server"]["score"] = self._scores[t]
        left = self._manager.save(t, {name: (items[name], about[name]) for name in items})
        flush(self.rounds_folder)
        self._tables[t] = items["server"][TABLE]
        gone = [self._tables.pop(old) for old in self._tables.keys() - left]
        for table in gone:
            unnamed = table > 0
            for other in self._tables.values():
                unnamed &= table != other
            self.files.remove(visits_in(table, np.flatnonzero(unnamed)))

    def _wanted(self, rounds: list[int]) -> set[int]:
        """The checkpoints to keep: the last two and the best, of equally good ones the first."""
        scores = {t: score for t in rounds if (score := self._scores.get(t)) is not None}
        best = [max(scores, key=lambda t: scores[t])] if scores else []
        return {*rounds[-LATEST:], *best}

    def check(self) -> None:
        """Raises if the last save has failed by now; does not wait for it."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the last save; `StorageError`, which ends the run, if it failed (earlier ones
        are whole)."""
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        start = time.perf_counter()
        try:
            pending.result()
        except PfedafmError:
            raise
        except Exception as error:
            raise storage_error(f"a checkpoint in {self.folder}", self.folder, error) from error
        finally:
            self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Waits for a save in progress, and ignores its errors."""
        # With several processes it has ended, or waits for one that has died.
        self._thread.shutdown(wait=self._processes.count == 1)
        if self._manager is not None:
            self._manager.close()

    def clear(self) -> None:
        """Removes all checkpoints and clients' files, of any run, in a folder that is ours."""
        if self._processes.index == 0:
            self._remove_checkpoints(set(self.rounds()))
            self.files.remove_all_but([])
        self._tables = {}
        self._scores = {}
        self._last = 0

    def _remove_checkpoints(self, rounds: set[int]) -> None:
        for t in sorted(rounds, reverse=True):
            shutil.rmtree(self.rounds_folder / f"{t:06d}", ignore_errors=True)
        for left in self.rounds_folder.glob("*.orbax-checkpoint-tmp*"):
            shutil.rmtree(left, ignore_errors=True)


def _copied(arrays: Mapping[str, np.ndarray]) -> Arrays:
    return {name: np.array(array) for name, array in arrays.items()}
