"""Which device trains which participant: largest workload first."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Tree = Any


class Call(NamedTuple):
    """One call of a compiled program: the client in each slot of each device."""

    program: int  # which of the programs of its stage; 0 in the stage that all architectures share
    clients: np.ndarray  # int [devices, slots]; -1 is an empty slot
    num_steps: np.ndarray  # int32 [devices]: steps of each device

    def folded(self, tree: Tree) -> Tree:
        """Arrays `[devices · slots, …]` as `[devices, slots, …]`."""
        return jax.tree.map(lambda leaf: leaf.reshape(*self.clients.shape, *leaf.shape[1:]), tree)

    def each(self, tree: Tree) -> Iterator[tuple[int, Tree]]:
        """The call's clients, each with its row of arrays `[devices, slots, …]`."""
        arrays = jax.tree.map(np.asarray, tree)
        for device, slot in np.argwhere(self.clients >= 0).tolist():
            row = jax.tree.map(lambda leaf, at=(device, slot): leaf[at], arrays)
            yield int(self.clients[device, slot]), row


def slots_per_device(
    num_participants: int, num_programs: int, num_devices: int, clients_per_step: int
) -> int:
    """Slots of a program: twice an even share, at least four steps; the rest takes more calls."""
    even = -(-2 * num_participants // (num_programs * num_devices))
    return max(4, -(-even // clients_per_step)) * clients_per_step


def schedule(
    clients: Sequence[int],
    program_of_client: np.ndarray,
    costs: np.ndarray,
    *,
    num_devices: int,
    clients_per_step: Sequence[int],
    slots: Sequence[int],
) -> list[Call]:
    """Calls that train all of `clients`, balanced over the devices.

    Each device has its own number of steps per program, so one may take three clients with a
    large network while another takes the small ones. Only the last step of a program has padding.

    Args:
        clients: whom to train.
        program_of_client: the program that trains each client, int `[clients]`; a call is of one program.
        costs: the expected cost of each client, float `[clients]`.
        num_devices: of this process.
        clients_per_step: how many clients a device trains at once, for each program.
        slots: clients per device and call, for each program.
    """
    steps = []  # (cost, program, clients); the first client of a step is its largest
    for program in sorted({int(program_of_client[client]) for client in clients}):
        members = sorted(
            (c for c in clients if program_of_client[c] == program), key=lambda c: (-costs[c], c)
        )
        size = clients_per_step[program]
        for start in range(0, len(members), size):
            step = members[start : start + size]
            steps.append((size * float(costs[step[0]]), program, step))
    steps.sort(key=lambda item: (-item[0], item[1], item[2]))
    load = [0.0] * num_devices
    queues: dict[int, list[list[list[int]]]] = {}
    for cost, program, step in steps:
        device = int(np.argmin(load))
        load[device] += cost
        queues.setdefault(program, [[] for _ in range(num_devices)])[device].append(step)

    calls = []
    for program in sorted(queues):
        size = clients_per_step[program]
        per_call = slots[program] // size
        longest = max(len(queue) for queue in queues[program])
        for start in range(0, longest, per_call):
            table = np.full((num_devices, slots[program]), -1, np.int64)
            num_steps = np.zeros(num_devices, np.int32)
            for device, queue in enumerate(queues[program]):
                queued = queue[start : start + per_call]
                num_steps[device] = len(queued)
                for index, step in enumerate(queued):
                    table[device, index * size : index * size + len(step)] = step
            calls.append(Call(program, table, num_steps))
    return calls
