"""States of clients between the host and the devices, where all of a device's train in lockstep.

Only what participants have travels, each client's own parameters and no padding: a client's state
is put into its row of a buffer on its device, padded there to the widest of its family, and
taken from there again. Copies of one call go on while another computes.
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
from pfedafm_jax.families import Kind, narrow, widen
from pfedafm_jax.models import Architecture

if TYPE_CHECKING:
    from pfedafm_jax.engine.programs import Programs

Tree = Any


def place(kind: Kind, architecture: Architecture, buffer: Tree, state: Tree, row: jax.Array):
    """The buffer `[slots, …]` with a client's state in a row of it; below 0 in none."""
    new = widen(kind, architecture, state)

    def put(rows: jax.Array, leaf: jax.Array) -> jax.Array:
        at = jnp.maximum(row, 0)
        old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(rows, jnp.where(row < 0, old, leaf), at, 0)

    return jax.tree.map(put, buffer, new)


def take(kind: Kind, architecture: Architecture, buffer: Tree, row: jax.Array) -> Tree:
    """The state of the client in a row of the buffer `[slots, …]`."""
    rows = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), buffer)
    return narrow(kind, architecture, rows)


class Buffers:
    """States of clients on the devices, `[devices, slots, …]` for each call that is under way."""

    def __init__(self, programs: "Programs"):
        self._devices, self._groups = programs.devices, programs.groups
        self._compiled, form = programs.compiled, programs.form
        self._kinds, self._starts = self._compiled.shapes.kinds, self._compiled.shapes.starts
        self._slots = [form.runs * form.slots(form.share(kind)) for kind in self._kinds]
        self._free: dict[int, list[Tree]] = defaultdict(list)
        self._blank: dict[tuple, jax.Array] = {}  # what devices without a client are given

    def load(self, call: Call, store: ClientStore) -> Tree:
        """The states of a call's clients, on its devices."""
        free = self._free[call.group]
        buffer = free.pop() if free else self._empty(call.group)
        for group, clients, rows in self._steps(call):
            states = [store.state(client) if client >= 0 else None for client in clients]
            buffer = self._compiled.place[group](buffer, self._joined(group, states), rows)
        return buffer

    def save(self, call: Call, buffer: Tree, store: ClientStore) -> None:
        """Stores the states of a call's clients; the buffer may be used again afterwards."""
        taken = []
        for group, clients, rows in self._steps(call):
            states = self._compiled.take[group](buffer, np.maximum(rows, 0))
            for place, client in enumerate(clients):
                if client >= 0:
                    own = jax.tree.map(lambda leaf: leaf.addressable_shards[place].data, states)  # noqa: B023
                    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), own)
                    taken.append((group, client, own))
        for group, client, own in taken:
            store.write(group, [client], jax.tree.map(np.asarray, own))
        self.release(call, buffer)

    def release(self, call: Call, buffer: Tree) -> None:
        """Nobody needs these states any more."""
        self._free[call.group].append(buffer)

    def _steps(self, call: Call) -> Iterator[tuple[int, list[int], np.ndarray]]:
        """Clients of one architecture, at most one a device, until a call's are done, with rows."""
        for group in self._kinds[call.group].members:
            found = [
                [(row, int(c)) for row, c in enumerate(own) if c >= 0 and self._groups[c] == group]
                for own in call.clients
            ]
            for index in range(max(map(len, found))):
                pairs = [own[index] if index < len(own) else (-1, -1) for own in found]
                yield group, [c for _, c in pairs], np.array([row for row, _ in pairs], np.int32)

    def _empty(self, number: int) -> Tree:
        front = (len(self._devices), self._slots[number])
        states = self._compiled.shapes.states[number]
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*front, *leaf.shape), leaf.dtype), states
        )
        return self._devices.zeros(shapes)

    def _joined(self, group: int, states: list[Tree | None]) -> Tree:
        """One client's state a device as arrays `[devices, …]`; only what there is travels."""

        def leaf(shape: jax.ShapeDtypeStruct, *own: np.ndarray | None) -> jax.Array:
            parts = []
            for device, array in zip(self._devices.devices, own, strict=True):
                key = device, shape.shape, shape.dtype
                if array is None and key not in self._blank:
                    self._blank[key] = jax.device_put(
                        np.zeros((1, *shape.shape), shape.dtype), device
                    )
                parts.append(
                    self._blank[key] if array is None else jax.device_put(array[None], device)
                )
            whole = (len(parts), *shape.shape)
            return jax.make_array_from_single_device_arrays(whole, self._devices.rows, parts)

        start = self._starts[group]
        missing = jax.tree.map(lambda _: None, start)
        given = [missing if state is None else state for state in states]
        flat = [jax.tree.leaves(one, is_leaf=lambda leaf: leaf is None) for one in given]
        shapes, structure = jax.tree.flatten(start)
        return jax.tree.unflatten(
            structure, [leaf(*row) for row in zip(shapes, *flat, strict=True)]
        )
