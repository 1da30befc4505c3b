"""Which device trains which participant: largest workload first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """One call of a compiled program: the client in each slot of each device."""

    kind: int  # the index of the clients' kind; 0 in the stage that all architectures share
    clients: np.ndarray  # int [devices, slots]; -1 is an empty slot
    trips: np.ndarray  # int32 [devices]: steps of each device


def slots_per_device(
    num_participants: int, num_kinds: int, num_devices: int, clients_per_step: int
) -> int:
    """Slots of a program: twice an even share, at least four steps; the rest takes more calls."""
    even = -(-2 * num_participants // (num_kinds * num_devices))
    return max(4, -(-even // clients_per_step)) * clients_per_step


def schedule(
    clients: Sequence[int],
    kinds: np.ndarray,
    costs: np.ndarray,
    *,
    num_devices: int,
    clients_per_step: Sequence[int],
    slots: Sequence[int],
) -> list[Call]:
    """Calls that train all of `clients`, balanced over the devices.

    Each device has its own number of steps per kind, so one may take three clients with a
    large network while another takes the small ones. Only the last step of a kind has padding.

    Args:
        clients: whom to train.
        kinds: the kind of each client, int `[clients]`; a call has clients of one kind.
        costs: the expected cost of each client, float `[clients]`.
        num_devices: of this process.
        clients_per_step: how many clients a device trains at once, for each kind.
        slots: clients per device and call, for each kind.
    """
    steps = []  # (cost, kind, clients); the first client of a step is its largest
    for kind in sorted({int(kinds[client]) for client in clients}):
        members = sorted((c for c in clients if kinds[c] == kind), key=lambda c: (-costs[c], c))
        size = clients_per_step[kind]
        for start in range(0, len(members), size):
            step = members[start : start + size]
            steps.append((size * float(costs[step[0]]), kind, step))
    steps.sort(key=lambda item: (-item[0], item[1], item[2]))
    load = [0.0] * num_devices
    queues: dict[int, list[list[list[int]]]] = {}
    for cost, kind, step in steps:
        device = int(np.argmin(load))
        load[device] += cost
        queues.setdefault(kind, [[] for _ in range(num_devices)])[device].append(step)

    calls = []
    for kind in sorted(queues):
        size = clients_per_step[kind]
        per_call = slots[kind] // size
        longest = max(len(queue) for queue in queues[kind])
        for start in range(0, longest, per_call):
            table = np.full((num_devices, slots[kind]), -1, np.int64)
            trips = np.zeros(num_devices, np.int32)
            for device, queue in enumerate(queues[kind]):
                queued = queue[start : start + per_call]
                trips[device] = len(queued)
                for index, step in enumerate(queued):
                    table[device, index * size : index * size + len(step)] = step
            calls.append(Call(kind, table, trips))
    return calls
