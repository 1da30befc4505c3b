"""The PyTorch loop at its best on a CPU: one process per core, each with some of the participants.

One client per core is faster than one client on all cores, for PyTorch as for us. The frozen
extractor's features are computed once per visit, SGD is fused, the memory layout is the fastest;
weights are exchanged through shared memory.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as multiprocessing
from common import Work
from torch_loop import TorchLoop

from pfedafm_jax.models.architecture import describe


def serve(
    connection: Any, work: Work, shared: dict[str, torch.Tensor], total: dict[str, torch.Tensor]
) -> None:
    """The process of one core: trains its clients and adds its part to the sum."""
    loop = TorchLoop(work, cached=True, threads=1)
    while True:
        try:
            message = connection.recv()
        except EOFError:  # the benchmark has ended
            return
        if isinstance(message, int):
            answer = loop.prepare(message)
        else:
            for value in total.values():
                value.zero_()
            loop.shared.load_state_dict(shared)
            answer = loop.visits(message[0], message[1], total, message[2])
        connection.send(answer)


class TorchProcesses:
    """Participants go to the core with the least work, but a client stays where its state is."""

    def __init__(self, work: Work):
        loop = TorchLoop(work, threads=1)
        self.work, self.home = work, dict[int, int]()
        config, dataset = work.config, work.dataset
        about = dataset.num_classes, dataset.image_shape
        macs = [describe(name, *about).macs for name in config.architectures]
        self.cost = [len(rows) * macs[k % len(macs)] for k, rows in enumerate(work.partition.train)]
        weights = loop.shared.state_dict()
        self.shared = {name: value.cpu().clone().share_memory_() for name, value in weights.items()}
        self.connections, self.totals, self.load = [], [], np.zeros(os.cpu_count() or 1)
        context = multiprocessing.get_context("spawn")
        for _ in self.load:
            total = {name: value.clone().share_memory_() for name, value in self.shared.items()}
            here, there = context.Pipe()
            arguments = (there, work, self.shared, total)
            context.Process(target=serve, args=arguments, daemon=True).start()
            self.connections.append(here)
            self.totals.append(total)

    def prepare(self, batch_size: int) -> dict[str, Any]:
        """Each process finds its fastest layout and optimizer, all at once, as they will run."""
        for connection in self.connections:
            connection.send(batch_size)
        found = [connection.recv() for connection in self.connections]
        return {"processes": len(found), **found[0]}

    def round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """One round of these clients: seconds, mean loss, mean accuracy."""
        shares: list[list[int]] = [[] for _ in self.connections]
        load = np.zeros(len(shares))
        for client in sorted(participants, key=lambda k: (k not in self.home, -self.cost[k])):
            core = self.home.setdefault(client, int(np.argmin(load)))
            load[core] += self.cost[client]
            shares[core].append(client)
        samples = sum(len(self.work.partition.train[client]) for client in participants)
        start = time.perf_counter()
        for connection, share in zip(self.connections, shares, strict=True):
            connection.send((number, share, samples))
        visits = [visit for connection in self.connections for visit in connection.recv()]
        for name, value in self.shared.items():
            value.copy_(torch.stack([total[name] for total in self.totals]).sum(0))
        loss, accuracy = np.mean(visits, axis=0).tolist()
        return {"seconds": time.perf_counter() - start, "loss": loss, "accuracy": accuracy}
