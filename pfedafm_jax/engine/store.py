"""Where clients' states wait between their visits: on the host, in memory or in memory-mapped
files.

A client that was never drawn equals the start of its architecture and takes neither memory nor
disk: rows are allocated as zero pages (or holes in a sparse file) and filled at the first write.
Reading and writing cost time in proportion to the clients at hand, not to all of them.
"""

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

Tree = Any


class ClientStore:
    """States of all clients, grouped by architecture.

    `starts[g]` is the start state of group `g`, as numpy arrays; `start_of(client)`, where given,
    is each client's own. `groups[client]` and `rows[client]` say where a client's state lies.
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
        for group in range(len(starts)):
            members = np.flatnonzero(self.groups == group)
            self.rows[members] = np.arange(len(members))
        self.visited = np.zeros(len(self.groups), bool)
        self.changed = np.zeros(
            len(self.groups), bool
        )  # written to since whoever saves states last cleared it
        self._starts = [jax.tree.map(np.asarray, start) for start in starts]
        self._start_of = start_of
        sizes = [int(np.sum(self.groups == group)) for group in range(len(starts))]
        self.row_bytes = np.array(
            [sum(leaf.nbytes for leaf in jax.tree.leaves(start)) for start in self._starts]
        )
        self.nbytes = int(self.row_bytes @ np.array(sizes))  # of all clients
        self.on_disk = place == "disk" or (place == "auto" and self.nbytes > _memory() // 3)
        if self.on_disk:
            self._folder = tempfile.mkdtemp(dir=folder, prefix="clients-")
            weakref.finalize(
                self, shutil.rmtree, self._folder, ignore_errors=True
            )  # the files go with the store
        self._states = [
            jax.tree.map(
                lambda leaf, size=size: self._allocate((size, *leaf.shape), leaf.dtype), start
            )
            for size, start in zip(sizes, self._starts, strict=True)
        ]

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if not self.on_disk or 0 in shape:
            return np.zeros(shape, dtype)
        handle, path = tempfile.mkstemp(dir=self._folder, suffix=".npy")
        os.close(handle)
        rows = np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape)
        with contextlib.suppress(
            OSError
        ):  # without a name the space goes with the process, however that ends
            os.unlink(path)
        return rows

    def read(self, group: int, clients: Sequence[int] | np.ndarray) -> Tree:
        """States `[len(clients), …]` of clients of one group; rows of client numbers below 0 are
        zero."""
        own = {}
        if self._start_of is not None:
            own = {
                c: jax.tree.leaves(self._start_of(c))
                for c in clients
                if c >= 0 and not self.visited[c]
            }

        def gather(number: int, leaf: np.ndarray, start: np.ndarray) -> np.ndarray:
            out = np.zeros(
                (len(clients), *leaf.shape[1:]), leaf.dtype
            )  # empty slots cost nothing: pages never touched
            for index, client in enumerate(clients):
                if client >= 0 and self.visited[client]:
                    out[index] = leaf[self.rows[client]]
                elif client >= 0:
                    out[index] = own[client][number] if client in own else start
            return out

        leaves, structure = jax.tree.flatten(self._states[group])
        starts = jax.tree.leaves(self._starts[group])
        gathered = [
            gather(n, leaf, start)
            for n, (leaf, start) in enumerate(zip(leaves, starts, strict=True))
        ]
        return jax.tree.unflatten(structure, gathered)

    def read_parts(self, parts: Sequence[str], clients: Sequence[int] | np.ndarray) -> Tree:
        """Top-level parts of states that are alike in all groups: `{part: [len(clients), …]}`."""
        rows = [self._parts_of(int(client), parts) for client in clients]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

    def _parts_of(self, client: int, parts: Sequence[str]) -> Tree:
        group = int(self.groups[client]) if client >= 0 else 0
        if client >= 0 and self.visited[client]:
            row = self.rows[client]
            return {
                part: jax.tree.map(lambda leaf: leaf[row], self._states[group][part])
                for part in parts
            }
        start = (
            self._starts[group] if client < 0 or self._start_of is None else self._start_of(client)
        )
        return {part: start[part] for part in parts}

    def write(self, group: int, clients: Sequence[int] | np.ndarray, states: Tree) -> None:
        """Stores states `[len(clients), …]`; client numbers below 0 are skipped."""
        for leaf, new in zip(
            jax.tree.leaves(self._states[group]), jax.tree.leaves(states), strict=True
        ):
            values = np.asarray(new)
            for index, client in enumerate(clients):
                if client >= 0:
                    leaf[self.rows[client]] = values[index]
        written = [client for client in clients if client >= 0]
        self.visited[written] = self.changed[written] = True

    def forget(self, clients: Sequence[int] | np.ndarray) -> None:
        """These clients' states are kept elsewhere from now on; numbers below 0 are skipped."""
        gone = [client for client in clients if client >= 0]
        self.visited[gone] = False

    def start(self, group: int) -> Tree:
        """The start state of an architecture's clients."""
        return self._starts[group]

    def state(self, client: int) -> Tree:
        """One client's state, as numpy arrays."""
        return jax.tree.map(lambda leaf: leaf[0], self.read(int(self.groups[client]), [client]))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
