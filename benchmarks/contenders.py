"""The engine as a contender, driven through `worker.py`: a round, its FLOPs, the machine's limit."""

import itertools
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import Work

from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition
from pfedafm_jax.engine import Devices, Federation, setup_devices
from pfedafm_jax.engine import Engine as Executor
from pfedafm_jax.models import kernels


class Engine:
    """The engine with its automatic settings, or with others."""

    def __init__(self, work: Work, **settings: Any):
        self.config = updated(work.config, **settings)
        setup_devices(self.config.devices)
        self.work = work

    def prepare(self, batch_size: int) -> dict[str, Any]:
        """Builds and compiles everything for this batch size; returns the seconds to compile."""
        jax.clear_caches()
        config = updated(self.config, batch_size=batch_size)
        form = kernels.choose(config.kernels)
        dataset, partition = self.work.dataset, self.work.partition
        self.federation = Federation.of_partition(config, dataset, partition)
        self.executor = Executor(self.federation, dataset, partition)
        self.state, begin = self.executor.start(), time.perf_counter()
        self.executor.prepare()
        seconds = round(time.perf_counter() - begin, 2)
        return {
            "compile_seconds": seconds,
            "kernels": str(form),
            "devices": len(self.executor.devices),
        }

    def round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """One round of these participants; loss and accuracy show that all contenders learn."""
        begin = time.perf_counter()
        self.state, result = self.executor.run_round(self.state, number, participants)
        seconds, first = time.perf_counter() - begin, self.federation.prediction_names[0]
        loss, accuracy = result.reports["loss"], result.reports[f"accuracy/{first}"]
        return {
            "seconds": seconds,
            "loss": float(np.mean(loss)),
            "accuracy": float(np.mean(accuracy)),
        }

    def flops(self, participants: Sequence[int]) -> float:
        """Floating-point operations of these clients' visits, as the algorithm has them."""
        costs = [self.federation.cost_of_visit(client) for client in participants]
        return float(sum(cost.flops for cost in costs))

    def matmul_gflops(self, sizes: Sequence[int] = (1024, 1536, 2048), repeats: int = 3) -> float:
        """Float32 matrix products on all devices at once: the best of some sizes and repeats."""
        return max(matmul_gflops(self.executor.devices, size, repeats) for size in sizes)


def matmul_gflops(devices: Devices, size: int, repeats: int) -> float:
    """Products `[size, size]` on every device at once: the fastest of some, in GFLOP/s."""
    values = np.random.default_rng(0).standard_normal((len(devices), size, size)).astype(np.float32)
    left, right = devices.split(values), devices.split(values[:, ::-1])
    product = devices.spread(lambda a, b: a @ b, in_axes=(0, 0))
    seconds = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        jax.block_until_ready(product(left, right))
        seconds.append(time.perf_counter() - begin)
    return len(devices) * 2.0 * size**3 / min(seconds[1:]) / 1e9


class ScalingPoint(Engine):
    """One point of the scaling curves: other numbers of clients, participants, epochs, devices."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        work = replace(work, config=updated(work.config, settings))
        super().__init__(replace(work, partition=shared_rows(work)))

    def prepare(self, batch_size: int) -> dict[str, Any]:
        report = super().prepare(batch_size)
        with suppress(OSError):  # the peak is that of the rounds, without compiling
            Path("/proc/self/clear_refs").write_text("5")
        return report

    def numbered_round(self, number: int) -> dict[str, Any]:
        """A round with as many participants of each architecture as at every other point."""
        return self.round(number, even_draw(self.config, number))

    def memory(self) -> dict[str, Any]:
        """Bytes: the process's peak in rounds, arrays on devices, the clients' store."""
        store = self.state.clients
        return {
            "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "device_bytes": int(sum(array.nbytes for array in jax.live_arrays())),
            "store_bytes": int(store.nbytes),
            "store_on_disk": bool(store.on_disk),
        }


def shared_rows(work: Work, train: int = 480, test: int = 120) -> Partition:
    """A split in which all clients have the same number of images: they share rows."""
    seed, available = work.config.seed, len(work.dataset.images)
    train, test = min(train, 4 * available // 5), min(test, available // 5)
    draws = [np.random.default_rng([seed, client]) for client in range(work.config.num_clients)]
    orders = [draw.permutation(available).astype(np.int32) for draw in draws]
    return Partition(
        tuple(np.sort(order[:train]) for order in orders),
        tuple(np.sort(order[train : train + test]) for order in orders),
        (np.zeros(0, np.int32),) * len(orders),
        shared=True,
    )


def even_draw(config: Config, number: int) -> list[int]:
    """K clients of a round, as evenly as can be from every architecture."""
    groups, clients = len(config.architectures), np.arange(config.num_clients)
    generator = np.random.default_rng([config.seed, number])
    orders = [generator.permutation(clients[group::groups]).tolist() for group in range(groups)]
    turns = itertools.zip_longest(*orders)
    dealt = [client for turn in turns for client in turn if client is not None]
    return dealt[: config.num_participants]


XLA = partial(Engine, kernels="xla")
KINDS: dict[str, Callable[..., Any]] = {"ours": Engine, "ours_xla": XLA, "point": ScalingPoint}
