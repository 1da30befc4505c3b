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

from pfedafm_jax.errors import StorageError

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
        leaves = [jax.tree.leaves(start) for start in self._starts]
        self.row_bytes = np.array([sum(leaf.nbytes for leaf in own) for own in leaves])
        self.nbytes = int(self.row_bytes @ sizes)  # of all clients together
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.on_disk = place == "disk" or (place == "auto" and self.nbytes > memory // 3)
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

    def read(self, group: int, clients: Sequence[int] | np.ndarray) -> Tree:
        """States `[len(clients), …]` of clients of one group; zeros for negative numbers."""
        states, structure = jax.tree.flatten(self._states[group])
        own, start = {}, jax.tree.leaves(self._starts[group])
        if self._start_of is not None:
            new = [client for client in clients if client >= 0 and not self.visited[client]]
            own = {client: jax.tree.leaves(self._start_of(client)) for client in new}

        def gather(number: int, rows: np.ndarray) -> np.ndarray:
            # Rows of empty slots are pages that are never touched.
            out = np.zeros((len(clients), *rows.shape[1:]), rows.dtype)
            for index, client in enumerate(clients):
                if client >= 0 and self.visited[client]:
                    out[index] = rows[self.rows[client]]
                elif client >= 0:
                    out[index] = own.get(client, start)[number]
            return out

        gathered = [gather(number, rows) for number, rows in enumerate(states)]
        return jax.tree.unflatten(structure, gathered)

    def read_parts(self, parts: Sequence[str], clients: Sequence[int] | np.ndarray) -> Tree:
        """Parts of states that have the same shapes in all groups: `{part: [len(clients), …]}`."""
        rows = [self._parts_of(int(client), parts) for client in clients]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def _parts_of(self, client: int, parts: Sequence[str]) -> Tree:
        group = int(self.groups[client]) if client >= 0 else 0
        if client >= 0 and self.visited[client]:
            row = self.rows[client]
            here = {part: self._states[group][part] for part in parts}
            return jax.tree.map(lambda leaf: leaf[row], here)
        start = self._starts[group]
        if client >= 0 and self._start_of is not None:
            start = self._start_of(client)
        return {part: start[part] for part in parts}

    def write(self, group: int, clients: Sequence[int] | np.ndarray, states: Tree) -> None:
        """Stores states `[len(clients), …]` of one group's clients; skips negative numbers."""
        written = [(index, client) for index, client in enumerate(clients) if client >= 0]
        leaves = jax.tree.leaves(self._states[group])
        for leaf, new in zip(leaves, jax.tree.leaves(states), strict=True):
            values = np.asarray(new)
            for index, client in written:
                leaf[self.rows[client]] = values[index]
        numbers = [client for _, client in written]
        self.visited[numbers] = self.changed[numbers] = True

    def forget(self, clients: Sequence[int] | np.ndarray) -> None:
        """Marks states that another process keeps from now on; negative numbers are skipped."""
        self.visited[[client for client in clients if client >= 0]] = False

    def start(self, group: int) -> Tree:
        """The initial state of a group's clients."""
        return self._starts[group]

    def state(self, client: int) -> Tree:
        """One client's state, as numpy arrays."""
        return jax.tree.map(lambda leaf: leaf[0], self.read(int(self.groups[client]), [client]))
