"""Client states on their way between host and devices, in both layouts.

In the loop layout they are copied with the call. In lockstep transfers carry no padding: a client's own parameters are copied to its device, padded there to the
widest of its family in its row of a buffer, and later sliced out again and copied back. Copies for
one call overlap with the computation of another.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.engine.schedule import Call
from pfedafm_jax.engine.store import ClientStore, stacked
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.padding import ArchitectureGroup, narrow, widen

if TYPE_CHECKING:
    from pfedafm_jax.engine.programs import CompiledPrograms, ProgramKey

Tree = Any


def place(
    group: ArchitectureGroup, architecture: Architecture, buffer: Tree, state: Tree, row: jax.Array
):
    """The buffer `[slots, …]` with a client's state in this row; unchanged if it is negative."""
    new = widen(group, architecture, state)

    def put(rows: jax.Array, leaf: jax.Array) -> jax.Array:
        at = jnp.maximum(row, 0)
        old = lax.dynamic_index_in_dim(rows, at, keepdims=False)
        return lax.dynamic_update_index_in_dim(rows, jnp.where(row < 0, old, leaf), at, 0)

    return jax.tree.map(put, buffer, new)


def take(
    group: ArchitectureGroup, architecture: Architecture, buffer: Tree, row: jax.Array
) -> Tree:
    """The state, without padding, of the client in this row of the buffer `[slots, …]`."""
    rows = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, row, keepdims=False), buffer)
    return narrow(group, architecture, rows)


def _shard(tree: Tree, index: int) -> Tree:
    """One device's shard of arrays `[devices, …]`, with its copy to the host started."""
    own = jax.tree.map(lambda leaf: leaf.addressable_shards[index].data, tree)
    jax.tree.map(lambda leaf: leaf.copy_to_host_async(), own)
    return own


class HostTransfers:
    """Client states on their way in the loop layout: copied to the devices as arrays of a call.

    Args:
        like: what is copied of a client's state, for each program of a stage: its shapes by part.
    """

    most_in_progress: int | None = None  # calls; the results of all of a round are small

    def __init__(self, like: Sequence[Tree]):
        self._like = like

    def load(self, call: Call, clients: ClientStore) -> Tree:
        """The states of a call's clients: `[devices, slots, …]`, zeros in empty slots."""
        like = self._like[call.program]
        parts = tuple(like)
        numbers = call.clients.reshape(-1).tolist()
        states = [clients.state(client, parts) if client >= 0 else None for client in numbers]
        return call.folded(stacked(states, like))

    def save(self, call: Call, states: Tree, clients: ClientStore) -> None:
        """Writes the states `[devices, slots, …]` of a call's clients to the store."""
        for client, state in call.each(states) if states else ():
            clients.write(client, state)

    def release(self, call: Call, states: Tree) -> None:
        """Nothing is reused."""


class LockstepTransfers:
    """Client states on the devices: one buffer `[devices, slots, …]` per call in progress.

    Args:
        programs: of which `place` and `take` are used.
        program_key: that of the programs.
        architecture_of_client: int `[clients]`, as `Federation.groups`.
    """

    most_in_progress: int | None = 1  # calls: one computes while the next is copied

    def __init__(
        self,
        programs: "CompiledPrograms",
        program_key: "ProgramKey",
        architecture_of_client: np.ndarray,
    ):
        self._programs, self._groups = programs, programs.shapes.groups
        self._devices, self._architectures = program_key.devices, architecture_of_client
        self._starts = programs.shapes.starts
        self._slots = [program_key.slots(group) for group in self._groups]
        self._free: dict[int, list[Tree]] = defaultdict(list)
        self._blank: dict[tuple, Tree] = {}  # zeros for devices without a client

    def load(self, call: Call, store: ClientStore) -> Tree:
        """Copies the states of a call's clients to the devices: `[devices, slots, …]`."""
        free = self._free[call.program]
        buffer = free.pop() if free else self._empty(call.program)
        for number, clients, rows in self._steps(call):
            states = [store.state(client) if client >= 0 else None for client in clients]
            buffer = self._programs.place[number](buffer, self._joined(number, states), rows)
        return buffer

    def save(self, call: Call, buffer: Tree, store: ClientStore) -> None:
        """Copies the states of a call's clients back to the store, and releases the buffer."""
        taken = []
        for number, clients, rows in self._steps(call):
            states = self._programs.take[number](buffer, np.maximum(rows, 0))
            for device, client in enumerate(clients):
                if client >= 0:
                    taken.append((client, _shard(states, device)))
        for client, own in taken:
            store.write(client, jax.tree.map(lambda leaf: np.asarray(leaf)[0], own))
        self.release(call, buffer)

    def release(self, call: Call, buffer: Tree) -> None:
        """Lets the next call of this program use the buffer."""
        self._free[call.program].append(buffer)

    def _steps(self, call: Call) -> Iterator[tuple[int, list[int], np.ndarray]]:
        """Architecture, one client per device and their rows, until all are done; -1: none."""
        for number in self._groups[call.program].members:
            found = [
                [
                    (row, int(client))
                    for row, client in enumerate(clients)
                    if client >= 0 and self._architectures[client] == number
                ]
                for clients in call.clients
            ]
            for index in range(max(map(len, found))):
                pairs = [own[index] if index < len(own) else (-1, -1) for own in found]
                yield number, [c for _, c in pairs], np.array([row for row, _ in pairs], np.int32)

    def _empty(self, number: int) -> Tree:
        states = self._programs.shapes.states[number]
        return self._devices.zeros(self._devices.shapes(states, self._slots[number]))

    def _joined(self, number: int, states: list[Tree | None]) -> Tree:
        """One client's state per device as arrays `[devices, …]`; None is not copied again."""

        def own(device: Any, state: Tree | None) -> Tree:
            if state is not None:
                return jax.device_put(jax.tree.map(lambda leaf: leaf[None], state), device)
            if (number, device) not in self._blank:
                start = self._starts[number]
                zeros = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), start)
                self._blank[number, device] = jax.device_put(zeros, device)
            return self._blank[number, device]

        def join(*parts: jax.Array) -> jax.Array:
            whole = (len(parts), *parts[0].shape[1:])
            return jax.make_array_from_single_device_arrays(whole, self._devices.rows, parts)

        return jax.tree.map(join, *map(own, self._devices.devices, states))
