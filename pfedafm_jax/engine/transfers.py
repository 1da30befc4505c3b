"""Client states on their way between host and devices, in the lockstep layout.

Transfers carry no padding: a client's own parameters are copied to its device, padded there to the
widest of its family in its row of a buffer, and later sliced out again and copied back. Copies for
one call overlap with the computation of another.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.engine.schedule import Call
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.padding import Kind, narrow, widen

if TYPE_CHECKING:
    from pfedafm_jax.engine.federation import Programs

Tree = Any


def place(kind: Kind, architecture: Architecture, buffer: Tree, state: Tree, row: jax.Array):
    """The buffer `[slots, …]` with a client's state in this row; unchanged if it is negative."""
    new = widen(kind, architecture, state)

    def put(rows: jax.Array, leaf: jax.Array) -> jax.Array:
        at = jnp.maximum(row, 0)
        old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(rows, jnp.where(row < 0, old, leaf), at, 0)

    return jax.tree.map(put, buffer, new)


def take(kind: Kind, architecture: Architecture, buffer: Tree, row: jax.Array) -> Tree:
    """The state, without padding, of the client in this row of the buffer `[slots, …]`."""
    rows = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), buffer)
    return narrow(kind, architecture, rows)


def _shard(tree: Tree, index: int) -> Tree:
    """One device's shard of arrays `[devices, …]`, with its copy to the host started."""
    own = jax.tree.map(lambda leaf: leaf.addressable_shards[index].data, tree)
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), own)
    return own


class Buffers:
    """Client states on the devices: one buffer `[devices, slots, …]` per call in progress."""

    def __init__(self, programs: "Programs"):
        self._devices, self._groups = programs.devices, programs.groups
        self._compiled, form = programs.compiled, programs.form
        self._kinds, self._starts = self._compiled.shapes.kinds, self._compiled.shapes.starts
        self._slots = [form.slots(kind) for kind in self._kinds]
        self._free: dict[int, list[Tree]] = defaultdict(list)
        self._blank: dict[tuple, Tree] = {}  # zeros for devices without a client

    def load(self, call: Call, store: ClientStore) -> Tree:
        """Copies the states of a call's clients to the devices: `[devices, slots, …]`."""
        free = self._free[call.kind]
        buffer = free.pop() if free else self._empty(call.kind)
        for group, clients, rows in self._steps(call):
            states = [store.state(client) if client >= 0 else None for client in clients]
            buffer = self._compiled.place[group](buffer, self._joined(group, states), rows)
        return buffer

    def save(self, call: Call, buffer: Tree, store: ClientStore) -> None:
        """Copies the states of a call's clients back to the store, and releases the buffer."""
        taken = []
        for group, clients, rows in self._steps(call):
            states = self._compiled.take[group](buffer, np.maximum(rows, 0))
            for device, client in enumerate(clients):
                if client >= 0:
                    taken.append((client, _shard(states, device)))
        for client, own in taken:
            store.write(client, jax.tree.map(lambda leaf: np.asarray(leaf)[0], own))
        self.release(call, buffer)

    def release(self, call: Call, buffer: Tree) -> None:
        """Lets the next call of this kind use the buffer."""
        self._free[call.kind].append(buffer)

    def _steps(self, call: Call) -> Iterator[tuple[int, list[int], np.ndarray]]:
        """Architecture, one client per device and their rows, until all are done; -1: none."""
        for group in self._kinds[call.kind].members:
            found = [
                [(row, int(c)) for row, c in enumerate(own) if c >= 0 and self._groups[c] == group]
                for own in call.clients
            ]
            for index in range(max(map(len, found))):
                pairs = [own[index] if index < len(own) else (-1, -1) for own in found]
                yield group, [c for _, c in pairs], np.array([row for row, _ in pairs], np.int32)

    def _empty(self, number: int) -> Tree:
        states = self._compiled.shapes.states[number]
        return self._devices.zeros(self._devices.shapes(states, self._slots[number]))

    def _joined(self, group: int, states: list[Tree | None]) -> Tree:
        """One client's state per device as arrays `[devices, …]`; None is not copied again."""

        def own(device: Any, state: Tree | None) -> Tree:
            if state is not None:
                return jax.device_put(jax.tree.map(lambda leaf: leaf[None], state), device)
            if (group, device) not in self._blank:
                start = self._starts[group]
                zeros = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), start)
                self._blank[group, device] = jax.device_put(zeros, device)
            return self._blank[group, device]

        def join(*parts: jax.Array) -> jax.Array:
            whole = (len(parts), *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(whole, self._devices.rows, parts)

        return jax.tree.map(join, *map(own, self._devices.devices, states))
