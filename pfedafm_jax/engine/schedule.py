"""Who trains where: participants into chunks of one architecture, chunks onto devices, longest work
first."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Call(NamedTuple):
    """One call of a program: which client is in which slot of which device."""

    group: int  # the architecture; 0 where clients of all architectures go together
    clients: np.ndarray  # int [devices, slots]; -1 is an empty slot
    trips: np.ndarray  # int32 [devices]: how many chunks each device works through


def slots_per_device(num_participants: int, num_groups: int, num_devices: int, chunk: int) -> int:
    """Slots of a program: twice an even share, at least four chunks. What does not fit goes into
    another call."""
    even = -(-2 * num_participants // (num_groups * num_devices))
    return max(4, -(-even // chunk)) * chunk


def schedule(
    clients: Sequence[int],
    groups: np.ndarray,
    work: np.ndarray,
    *,
    num_devices: int,
    chunk: int,
    slots: int,
) -> list[Call]:
    """Calls that cover `clients`, balanced over the devices by `work[client]`.

    Each device has its own number of chunks per architecture, so one may take three clients of a
    large one while another takes the small ones; nothing is padded but the last chunk of an
    architecture.
    """
    chunks = []  # (work, group, clients)
    for group in sorted({int(groups[client]) for client in clients}):
        members = sorted((c for c in clients if groups[c] == group), key=lambda c: (-work[c], c))
        for start in range(0, len(members), chunk):
            part = members[start : start + chunk]
            chunks.append((chunk * float(work[part[0]]), group, part))
    chunks.sort(key=lambda item: (-item[0], item[1], item[2]))
    load = [0.0] * num_devices
    queues: dict[int, list[list[list[int]]]] = {}
    for cost, group, part in chunks:
        device = int(np.argmin(load))
        load[device] += cost
        queues.setdefault(group, [[] for _ in range(num_devices)])[device].append(part)

    calls = []
    per_call = slots // chunk
    for group in sorted(queues):
        longest = max(len(queue) for queue in queues[group])
        for start in range(0, longest, per_call):
            table = np.full((num_devices, slots), -1, np.int64)
            trips = np.zeros(num_devices, np.int32)
            for device, queue in enumerate(queues[group]):
                parts = queue[start : start + per_call]
                trips[device] = len(parts)
                for place, part in enumerate(parts):
                    table[device, place * chunk : place * chunk + len(part)] = part
            calls.append(Call(group, table, trips))
    return calls


def assign(
    clients: Sequence[int], work: np.ndarray, home: np.ndarray, devices: np.ndarray
) -> np.ndarray:
    """The process of each of `clients`: the one that keeps its state, unless the others would have
    to wait for it.

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
