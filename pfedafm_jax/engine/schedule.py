"""Who trains where: steps of a few clients of one architecture onto devices, longest work first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """One call of a program: which client is in which slot of which device."""

    group: int  # the architecture; 0 where clients of all architectures go together
    clients: np.ndarray  # int [devices, slots]; -1 is an empty slot
    trips: np.ndarray  # int32 [devices]: how many steps each device makes


def slots_per_device(
    num_participants: int, num_groups: int, num_devices: int, clients_per_step: int
) -> int:
    """Slots of a program: twice an even share, four steps at least. The rest goes into more calls."""
    even = -(-2 * num_participants // (num_groups * num_devices))
    return max(4, -(-even // clients_per_step)) * clients_per_step


def schedule(
    clients: Sequence[int],
    groups: np.ndarray,
    work: np.ndarray,
    *,
    num_devices: int,
    clients_per_step: Sequence[int],
    slots: Sequence[int],
) -> list[Call]:
    """Calls that cover `clients`, balanced over the devices by `work[client]`; `clients_per_step`
    and `slots` of a device are those of each group.

    Each device has its own number of steps per architecture, so one may take three clients of a
    large one while another takes the small ones; nothing is padded but the last step of an
    architecture.
    """
    steps = []  # (work, group, clients)
    for group in sorted({int(groups[client]) for client in clients}):
        members = sorted((c for c in clients if groups[c] == group), key=lambda c: (-work[c], c))
        size = clients_per_step[group]
        for start in range(0, len(members), size):
            step = members[start : start + size]
            steps.append((size * float(work[step[0]]), group, step))
    steps.sort(key=lambda item: (-item[0], item[1], item[2]))
    load = [0.0] * num_devices
    queues: dict[int, list[list[list[int]]]] = {}
    for cost, group, step in steps:
        device = int(np.argmin(load))
        load[device] += cost
        queues.setdefault(group, [[] for _ in range(num_devices)])[device].append(step)

    calls = []
    for group in sorted(queues):
        size = clients_per_step[group]
        per_call = slots[group] // size
        longest = max(len(queue) for queue in queues[group])
        for start in range(0, longest, per_call):
            table = np.full((num_devices, slots[group]), -1, np.int64)
            trips = np.zeros(num_devices, np.int32)
            for device, queue in enumerate(queues[group]):
                made = queue[start : start + per_call]
                trips[device] = len(made)
                for place, step in enumerate(made):
                    table[device, place * size : place * size + len(step)] = step
            calls.append(Call(group, table, trips))
    return calls


def merged(several: Sequence[list[Call]]) -> list[Call]:
    """The calls of several runs side by side: as many slots for each, one after the other.

    >>> calls = [[Call(0, np.array([[3, 1]]), np.array([1]))], [Call(0, np.array([[7, -1]]), np.array([1]))]]
    >>> merged(calls)[0].clients
    array([[ 3,  1,  7, -1]])
    """
    if len(several) == 1:
        return several[0]
    made = []
    for group in sorted({call.group for calls in several for call in calls}):
        own = [[call for call in calls if call.group == group] for calls in several]
        empty = next(call for calls in own for call in calls)
        empty = empty._replace(clients=np.full_like(empty.clients, -1))
        for index in range(max(map(len, own))):
            side = [calls[index] if index < len(calls) else empty for calls in own]
            clients = np.concatenate([call.clients for call in side], axis=1)
            made.append(Call(group, clients, np.ones_like(empty.trips)))
    return made


def assign(
    clients: Sequence[int], work: np.ndarray, home: np.ndarray, devices: np.ndarray
) -> np.ndarray:
    """The process of each of `clients`: the one that keeps its state, unless others had to wait.

    `home[client]` is that process, or -1 for a client that was never drawn; `devices[process]` is
    its share of the work.
    """
    order = sorted(range(len(clients)), key=lambda place: (-work[clients[place]], clients[place]))

    def least_loaded(load: np.ndarray, client: int) -> int:
        return int(np.argmin((load + work[client]) / devices))

    even = np.zeros(len(devices))
    for place in order:
        even[least_loaded(even, clients[place])] += work[clients[place]]
    limit = np.max(even / devices)  # how long the round takes where nothing has to stay
    load, found, homeless = np.zeros(len(devices)), np.full(len(clients), -1), []
    for place in order:
        client = clients[place]
        process = int(home[client])
        if process >= 0 and (load[process] + work[client]) / devices[process] <= limit:
            found[place] = process
            load[process] += work[client]
        else:
            homeless.append(place)
    for place in homeless:
        client = clients[place]
        found[place] = least_loaded(load, client)
        load[found[place]] += work[client]
    return found
