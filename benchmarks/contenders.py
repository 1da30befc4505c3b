"""The contenders in JAX, each driven through `worker.py`: the engine in several settings, and the plain loop."""

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from common import Work

from pfedafm_jax import reference
from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import Partition
from pfedafm_jax.engine import Devices, Programs, State, build, run_round, setup_devices, start
from pfedafm_jax.engine.programs import compiled
from pfedafm_jax.methods.pfedafm import PFedAFM, train_local_model
from pfedafm_jax.training import ClientData


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of a call."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def means(info: dict[str, np.ndarray]) -> dict[str, float]:
    """Mean loss and the first accuracy of a round's participants, to see that all contenders learn."""
    judged = next((name for name in info if name.startswith("accuracy/")), None)
    judged = "accuracy/mixed" if "accuracy/mixed" in info else judged
    found = {"loss": float(np.mean(info["loss"]))}
    return found if judged is None else {**found, "accuracy": float(np.mean(info[judged]))}


class Engine:
    """The engine on one device per core (`devices` = 0) or on some, alone on one core if asked."""

    def __init__(
        self,
        work: Work,
        devices: int = 0,
        clients_per_step: int = 0,
        one_core: bool = False,
        method: str = "pfedafm",
    ):
        setup_devices(devices)
        self.work, self.one_core = work, one_core
        self.config = replace(work.config, devices=devices, clients_per_step=clients_per_step, method=method)
        self._built: tuple[Programs, State] | None = None
        self._limits: list[Product] = []

    @property
    def programs(self) -> Programs:
        assert self._built is not None, "prepare comes first"
        return self._built[0]

    @property
    def state(self) -> State:
        assert self._built is not None, "prepare comes first"
        return self._built[1]

    def prepare(self, batch_size: int, warm_up: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        """Builds and compiles everything for this batch size; returns the seconds to compile.

        Each program runs once, or these `warm_up` rounds: a client's first visit also makes its state.
        """
        self._built = None
        jax.clear_caches()
        compiled.cache_clear()
        config = replace(self.config, batch_size=batch_size)

        def built() -> tuple[Programs, State]:
            programs = build(config, self.work.dataset, self.work.partition)
            return programs, start(programs)

        start_seconds, (programs, state) = timed(built)
        seconds, _ = timed(programs.compile)
        for participants in warm_up or [range(min(len(config.architectures), config.num_clients))]:
            state, _ = run_round(programs, state, 0, participants)
        self._built = programs, state
        if self.one_core:
            pin_to_one_core()
        return {
            "start_seconds": start_seconds,
            "compile_seconds": seconds,
            "devices": len(programs.devices),
            "clients_per_step": programs.clients_per_step,
        }

    def round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """One round of these participants."""
        seconds, (state, result) = timed(lambda: run_round(self.programs, self.state, number, participants))
        self._built = self.programs, state
        return {"seconds": seconds, **means(result.info)}

    def flops(self, participants: Sequence[int]) -> float:
        """Floating-point operations of these clients' visits, as the algorithm has them."""
        return float(sum(cost.flops for cost in self.programs.costs(participants)))

    def matmul_gflops(self, sizes: Sequence[int] = (1024, 1536, 2048), repeats: int = 3) -> float:
        """Float32 matrix products on all devices at once: the best of some sizes and repeats."""
        if not self._limits:
            self._limits = [square_product(self.programs.devices, size) for size in sizes]
        return max(gflops(product, repeats) for product in self._limits)

    def phase1_gflops(self, repeats: int = 3) -> dict[str, Any]:
        """Phase 1 of the first architecture alone, one client on each device at once."""
        rates = phase1_gflops(self.programs, self.state, self.work, repeats)
        return {"architecture": self.programs.architectures[0].name, "rates": rates}


class PlainLoop:
    """`reference`, on one device with all threads."""

    def __init__(self, work: Work, method: str = "pfedafm"):
        setup_devices(1)
        self.work, self.config = work, replace(work.config, method=method)
        self._built: tuple[Programs, State] | None = None

    def prepare(self, batch_size: int, participants: Sequence[int]) -> dict[str, Any]:
        """Compiles its steps by running the very round that is timed: every size of a last batch is a program."""
        self._built = None
        jax.clear_caches()
        programs = build(replace(self.config, batch_size=batch_size), self.work.dataset, self.work.partition)
        self._built = programs, reference.start(programs)
        seconds, _ = timed(lambda: self.round(0, participants))
        return {"first_round_seconds": seconds}

    def round(self, number: int, participants: Sequence[int]) -> dict[str, Any]:
        """One round of these participants."""
        assert self._built is not None, "prepare comes first"
        programs, state = self._built

        def one() -> tuple[State, Any]:
            new, result = reference.run_round(programs, state, number, participants)
            jax.block_until_ready(new.server)
            return new, result

        seconds, (state, result) = timed(one)
        self._built = programs, state
        return {"seconds": seconds, **means(result.info)}


class ScalingPoint(Engine):
    """One point of the scaling curves: another number of clients, participants, epochs or devices."""

    def __init__(self, work: Work, settings: dict[str, Any]):
        work = replace(work, config=updated(work.config, settings))
        super().__init__(replace(work, partition=shared_rows(work)), devices=work.config.devices)

    def prepare(self, batch_size: int, warm_up: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
        report = super().prepare(batch_size, warm_up)
        self.peak_before = peak_memory()  # compiling counts in the whole peak, not in that of the rounds
        self.peak_reset = reset_peak_memory()
        return report

    def numbered_round(self, number: int) -> dict[str, Any]:
        """A round of participants spread evenly over the architectures, so that every point has the same mixture."""
        return self.round(number, even_draw(self.programs.config, number))

    def memory(self) -> dict[str, Any]:
        """Bytes: the process at its peak and since `prepare`, arrays on the devices, the clients' store."""
        store = self.state.store
        return {
            "peak_bytes": max(self.peak_before, peak_memory()),
            "rounds_peak_bytes": peak_memory() if self.peak_reset else None,
            "resident_bytes": memory_status("VmRSS"),
            "device_bytes": int(sum(array.nbytes for array in jax.live_arrays())),
            "store_bytes": int(store.nbytes),
            "store_on_disk": bool(store.on_disk),
        }


KINDS: dict[str, Callable[..., Any]] = {
    "ours": Engine,
    "ours_vmap": Engine,
    "ours_one_core": Engine,
    "reference": PlainLoop,
    "point": ScalingPoint,
}


# ---------------------------------------------------------------------------------------------- limits


class Product(NamedTuple):
    """A product on every device at once, ready to run, and its FLOPs."""

    run: Callable[[], Any]
    flops: float


def square_product(devices: Devices, size: int) -> Product:
    """Products `[size, size]` on every device at once, compiled."""
    values = np.random.default_rng(0).standard_normal((len(devices), size, size)).astype(np.float32)
    left, right = devices.split(values), devices.split(values[:, ::-1])
    product = devices.spread(lambda a, b: a @ b, in_axes=(0, 0))
    jax.block_until_ready(product(left, right))
    return Product(lambda: jax.block_until_ready(product(left, right)), len(devices) * 2.0 * size**3)


def gflops(product: Product, repeats: int) -> float:
    """Of all devices together, in GFLOP/s: the best repeat."""
    return product.flops / min(timed(product.run)[0] for _ in range(repeats)) / 1e9


def phase1_gflops(programs: Programs, state: State, work: Work, repeats: int) -> list[float]:
    """Phase 1 by itself on all devices at once, in the algorithm's GFLOP/s, one number a repeat.

    Each device trains one client of the first architecture, of middling size and the same on all devices; FLOPs are
    counted as in `PFedAFM.cost`: three passes of the local model and one of the shared extractor.
    """
    method, devices, architecture = programs.method, programs.devices, programs.architectures[0]
    assert isinstance(method, PFedAFM), "phase 1 is pFedAFM's"
    members = np.flatnonzero(programs.groups == 0)
    middle = np.argsort(np.abs(programs.num_train[members] - np.median(programs.num_train)), kind="stable")
    chosen = [int(members[middle[index % len(members)]]) for index in range(len(devices))]
    size = min(len(work.partition.train[client]) for client in chosen)
    rows = np.stack([work.partition.train[client][:size] for client in chosen])

    def phase1(index, rows, client, shared_extractor, images, labels):
        data = ClientData(images, labels, rows, jnp.int32(size), rows[:1], jnp.int32(1))
        key = jax.random.fold_in(jax.random.key(0), index)
        return train_local_model(method, architecture, key, client, shared_extractor, data)

    spread = devices.spread(phase1, in_axes=(0, 0, None, None, None, None))
    common = devices.replicate(
        (
            state.store.start(0),
            jax.device_get(state.server["shared_extractor"]),
            np.asarray(work.dataset.images),
            work.dataset.labels.astype(np.int32),
        )
    )
    each = devices.split((np.arange(len(devices), dtype=np.int32), rows.astype(np.int32)))
    jax.block_until_ready(spread(*each, *common))
    macs = 3 * architecture.macs + method.shared.extractor_macs
    flops = 2.0 * macs * size * work.config.local_epochs * len(devices)
    seconds = [timed(lambda: jax.block_until_ready(spread(*each, *common)))[0] for _ in range(repeats)]
    return [flops / value / 1e9 for value in seconds]


def pin_to_one_core() -> None:
    """Keeps every thread of this process on one core."""
    if not hasattr(os, "sched_setaffinity"):
        return
    core = {min(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it may have ended meanwhile
            os.sched_setaffinity(int(thread.name), core)


# ---------------------------------------------------------------------------------------------- scaling


def shared_rows(work: Work, train: int = 480, test: int = 120) -> Partition:
    """A split in which every client has the same number of images, whatever their number: clients share rows."""
    config, available = work.config, len(work.dataset.images)
    train, test = min(train, 4 * available // 5), min(test, available // 5)
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for client in range(config.num_clients):
        order = np.random.default_rng([config.seed, client]).permutation(available)[: train + test].astype(np.int32)
        parts[0].append(np.sort(order[:train]))
        parts[1].append(np.sort(order[train:]))
    none = tuple(np.zeros(0, np.int32) for _ in range(config.num_clients))
    return Partition(tuple(parts[0]), tuple(parts[1]), none)


def even_draw(config: Config, number: int) -> list[int]:
    """K clients of a round, as evenly as can be from every architecture."""
    groups = len(config.architectures)
    generator = np.random.default_rng([config.seed, number])
    orders = [generator.permutation(np.arange(group, config.num_clients, groups)) for group in range(groups)]
    dealt = [int(order[place]) for place in range(len(orders[0])) for order in orders if place < len(order)]
    return dealt[: config.num_participants]


def peak_memory() -> int:
    """Bytes of memory that this process had at its peak."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_status(field: str) -> int | None:
    """A line of this process's status in bytes: VmRSS is memory now."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None


def reset_peak_memory() -> bool:
    """Starts the peak of memory anew; False where the system cannot."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False
