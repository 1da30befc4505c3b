"""Client states between visits, in the host's memory or in their files.

The table `rounds` is all that is known of every client: after which round's visit it is. Who was
never visited has the first state of its architecture, which takes neither memory nor a file.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.array_files import Arrays
from pfedafm_jax.base.client_files import ClientFiles
from pfedafm_jax.base.errors import StorageError, disk_is_full, reason
from pfedafm_jax.base.trees import by_path, fitted, num_bytes
from pfedafm_jax.engine.devices import usable_memory

Tree = Any


class ClientStore:
    """The states of all clients, grouped by architecture.

    Args:
        starts: the initial state of each group's clients, as numpy arrays.
        groups: the group of each client, int `[clients]`.
        place: `memory`, `disk`, or `auto`: on disk if all states exceed a third of the memory.
        folder: where files go that belong to no run; None: the system's temporary folder.
        start_of: from a client to an initial state of its own, instead of `starts`.

    Attributes:
        rounds: after which round's visit each client is, int32 `[clients]`; 0: before its first.
        visited: whether a client's state was written, bool `[clients]`; otherwise it is initial.

    With several processes, both are of all clients, and states only of those that this one keeps.
    A run calls `keep_in` once, before its first round, and `hand_over` at each checkpoint.
    """

    def __init__(
        self,
        starts: Sequence[Tree],
        groups: np.ndarray,
        *,
        place: str = "auto",
        folder: str | Path | None = None,
        start_of: Callable[[int], Tree] | None = None,
    ):
        self.groups = np.asarray(groups)
        self.rounds = np.zeros(len(self.groups), np.int32)
        self.visited = np.zeros(len(self.groups), bool)
        self._starts = [jax.tree.map(np.asarray, start) for start in starts]
        self._start_of = start_of
        sizes = np.bincount(self.groups, minlength=len(starts))
        row_bytes = np.array([num_bytes(start) for start in self._starts])
        self.nbytes = int(row_bytes @ sizes)  # of all clients together
        self.on_disk = place == "disk" or (place == "auto" and self.nbytes > usable_memory() // 3)
        self._folder = folder
        self._files: ClientFiles | None = None
        self._in_memory: dict[int, Tree] = {}
        self._saved = 0  # the round of the last checkpoint

    def keep_in(self, files: ClientFiles, rounds: np.ndarray | None = None, t: int = 0) -> None:
        """Uses the files of a run; they are read when their clients are drawn.

        Args:
            files: of the run's clients.
            rounds: the table of the checkpoint to go on from, int `[clients]`; None: there is none.
            t: the round of that checkpoint.
        """
        self._files = files
        if rounds is not None:
            self.rounds = np.array(rounds, np.int32)
            self.visited = self.rounds > 0
            self._saved = t
            self._in_memory = {}

    def state(self, client: int, parts: Sequence[str] | None = None) -> Tree:
        """A copy of one client's state, or of these parts of it."""
        whole = self._whole(int(client))
        picked = whole if parts is None else {part: whole[part] for part in parts}
        return jax.tree.map(np.array, picked)

    def _whole(self, client: int) -> Tree:
        """A client's state, not to be changed in place."""
        if not self.visited[client]:
            if self._start_of is None:
                return self.start(int(self.groups[client]))
            return self._start_of(client)
        if client in self._in_memory:
            return self._in_memory[client]
        assert self._files is not None, "what is not in memory is in a file"
        arrays = self._files.read(client, int(self.rounds[client])).arrays
        like = {"client": self.start(int(self.groups[client]))}
        state = fitted(like, arrays)["client"]
        if not self.on_disk:
            self._in_memory[client] = state
        return state

    def write(self, client: int, state: Tree, t: int) -> None:
        """Keeps a copy of a client's state after its visit in round `t`."""
        client = int(client)
        before = int(self.rounds[client])
        if self.on_disk:
            self._write_file(client, jax.device_get(state), t)
            if self.visited[client] and self._saved < before < t:
                self._files_of_this().remove([(client, before)])  # no checkpoint names it
        else:
            self._in_memory[client] = jax.tree.map(np.array, state)
        self.rounds[client] = t
        self.visited[client] = True

    def _write_file(self, client: int, state: Tree, t: int) -> None:
        """Writes a client's file; the next checkpoint waits until it is on the disk."""
        files = self._files_of_this()
        try:
            files.write(client, t, arrays_of(state), durable=False)
        except OSError as error:
            why = "no space left on the disk" if disk_is_full(error) else reason(error)
            raise StorageError(
                f"a client's state cannot be written to {files.folder} ({why}); free some space there, "
                "for example the checkpoints of finished runs, or use --store memory; the same "
                "command resumes from the last checkpoint"
            ) from error

    def _files_of_this(self) -> ClientFiles:
        """The files of the run, or in a temporary folder that is removed with the store."""
        if self._files is None:
            folder = tempfile.mkdtemp(dir=self._folder, prefix="clients-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._files = ClientFiles(folder, run="")
        return self._files

    def written_elsewhere(self, clients: Sequence[int] | np.ndarray, t: int) -> None:
        """Notes that other processes, which keep these clients, have written their states after
        round `t`."""
        elsewhere = np.asarray(clients, int)
        self.rounds[elsewhere] = t
        self.visited[elsewhere] = True

    def hand_over(self, t: int) -> dict[int, Arrays]:
        """What a checkpoint of round `t` has to write: the states of clients visited since the last
        one, by client; none where they are in files already. They do not change any more."""
        visited = np.flatnonzero(self.rounds > self._saved).tolist()
        self._saved = t
        return {
            client: arrays_of(self._in_memory[client])
            for client in visited
            if client in self._in_memory
        }

    def start(self, group: int) -> Tree:
        """The initial state of a group's clients."""
        return self._starts[group]


def arrays_of(state: Tree) -> Arrays:
    """A client's state as its file has it: `client.…` by path, without copies."""
    return {name: np.asarray(leaf) for name, leaf in by_path({"client": state}).items()}


def stacked(states: Sequence[Tree | None], like: Tree) -> Tree:
    """States as arrays `[len(states), …]` of leaves like these; zeros for None."""

    def stack(number: int, leaf: np.ndarray) -> np.ndarray:
        # Rows of zeros are pages that are never touched.
        rows = np.zeros((len(states), *leaf.shape), leaf.dtype)
        for row, own in enumerate(found):
            if own is not None:
                rows[row] = own[number]
        return rows

    found = [None if state is None else jax.tree.leaves(state) for state in states]
    leaves, structure = jax.tree.flatten(like)
    return jax.tree.unflatten(structure, [stack(i, leaf) for i, leaf in enumerate(leaves)])
