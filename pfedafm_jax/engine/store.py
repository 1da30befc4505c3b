"""Client states between visits, in the host's memory or in files.

A client that was never drawn has the initial state of its architecture and takes neither memory
nor disk: rows are untouched zero pages (or holes in a sparse file) until the first write. The cost
of reading and writing depends on the clients involved, not on their total number.
"""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import StorageError
from pfedafm_jax.base.trees import num_bytes
from pfedafm_jax.engine.devices import usable_memory

Tree = Any


class Rows:
    """An array `[size, …]` in a sparse file of its own, read and written by row.

    Not memory-mapped: on a full disk that would kill the process with a signal; this raises.
    """

    def __init__(self, folder: str, shape: tuple[int, ...], dtype: np.dtype):
        self.shape, self.dtype, self._folder = shape, dtype, folder
        self._bytes = int(np.prod(shape[1:])) * dtype.itemsize
        with tempfile.TemporaryFile(dir=folder) as file:  # nameless: it disappears with the process
            os.truncate(file.fileno(), shape[0] * self._bytes)
            self._file = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._file)

    def __getitem__(self, row: int) -> np.ndarray:
        found = b""
        while len(found) < self._bytes:
            found += os.pread(self._file, self._bytes - len(found), row * self._bytes + len(found))
        return np.frombuffer(found, self.dtype).reshape(self.shape[1:])

    def __setitem__(self, row: int, values: np.ndarray) -> None:
        content, done = np.ascontiguousarray(values, self.dtype).tobytes(), 0
        try:
            while done < self._bytes:
                done += os.pwrite(self._file, content[done:], row * self._bytes + done)
        except OSError as error:
            raise StorageError(
                f"states of clients cannot be written to {self._folder} ({error.strerror}); free "
                "some space there, name another folder by TMPDIR, or use --store memory; the same "
                "command resumes from the last checkpoint"
            ) from error


class ClientStore:
    """The states of all clients, grouped by architecture.

    Args:
        starts: the initial state of each group's clients, as numpy arrays.
        groups: the group of each client, int `[clients]`.
        place: `memory`, `disk`, or `auto`: on disk if all states exceed a third of the memory.
        folder: where the files go; None: the system's temporary folder.
        start_of: from a client to an initial state of its own, instead of `starts`.

    Attributes:
        rows: the row of each client within its group, int `[clients]`.
        visited: whether a client's state was written, bool `[clients]`; otherwise it is initial.
        changed: whether it was written since the last checkpoint, which clears this.

    With several processes, both are of all clients, and states only of those that this one keeps.
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
        self.rows = np.zeros(len(self.groups), np.int64)
        sizes = np.bincount(self.groups, minlength=len(starts))
        for group, size in enumerate(sizes):
            self.rows[self.groups == group] = np.arange(size)
        self.visited = np.zeros(len(self.groups), bool)
        self.changed = np.zeros(len(self.groups), bool)
        self._starts = [jax.tree.map(np.asarray, start) for start in starts]
        self._start_of = start_of
        self.row_bytes = np.array([num_bytes(start) for start in self._starts])
        self.nbytes = int(self.row_bytes @ sizes)  # of all clients together
        self.on_disk = place == "disk" or (place == "auto" and self.nbytes > usable_memory() // 3)
        if self.on_disk:
            self._folder = tempfile.mkdtemp(dir=folder, prefix="clients-")
            # The folder is removed with the store.
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self._states: list[Any] = [
            jax.tree.map(partial(self._allocate, int(size)), start)
            for size, start in zip(sizes, self._starts, strict=True)
        ]

    def _allocate(self, size: int, leaf: np.ndarray) -> np.ndarray | Rows:
        """An array `[size, …]` of leaves like this one."""
        shape = (size, *leaf.shape)
        if not self.on_disk or 0 in shape:
            return np.zeros(shape, leaf.dtype)
        return Rows(self._folder, shape, leaf.dtype)

    def state(self, client: int, parts: Sequence[str] | None = None) -> Tree:
        """A copy of one client's state, or of these parts of it."""
        group = int(self.groups[client])
        if self.visited[client]:
            whole, read = self._states[group], lambda leaf: np.array(leaf[self.rows[client]])
        else:
            own = self._start_of
            whole, read = self._starts[group] if own is None else own(client), np.array
        picked = whole if parts is None else {part: whole[part] for part in parts}
        return jax.tree.map(read, picked)

    def write(self, client: int, state: Tree) -> None:
        """Stores one client's state."""
        rows = jax.tree.leaves(self._states[self.groups[client]])
        for leaf, new in zip(rows, jax.tree.leaves(state), strict=True):
            leaf[self.rows[client]] = np.asarray(new)
        self.visited[client] = self.changed[client] = True

    def written_elsewhere(self, clients: Sequence[int] | np.ndarray) -> None:
        """Notes that other processes, which keep these clients, have written their states."""
        elsewhere = np.asarray(clients, int)
        self.visited[elsewhere] = True
        self.changed[elsewhere] = True

    def read(self, group: int, clients: Sequence[int] | np.ndarray) -> Tree:
        """States `[len(clients), …]` of clients of one group; zeros for negative numbers."""
        states = [self.state(client) if client >= 0 else None for client in clients]
        return stacked(states, self._starts[group])

    def start(self, group: int) -> Tree:
        """The initial state of a group's clients."""
        return self._starts[group]


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
