"""Several processes in one run: how they meet, what travels between them, and what is said when one
of them is lost.

Every process holds the states of its own clients and trains participants on its own devices. Once a
round they add up numerators and weights; when a participant trains elsewhere than it did last time,
its state travels. Both are sums over the processes, made by JAX's distributed runtime.
"""

import contextlib
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pfedafm_jax.errors import PfedafmError

Tree = Any
AXIS = "processes"
MEETING_SECONDS = 120  # how long processes wait for each other at the start
SILENCE_SECONDS = 30  # a process that gives no sign of life for so long is taken for dead


class LostProcess(PfedafmError):
    """Another process of the run is gone."""

    exit_code = 1


def join(coordinator: str, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Meets the other processes of the run at `coordinator` (`address:port`); call it before
    anything else uses JAX.

    `auto` leaves address, number and count to what JAX finds in its surroundings, Slurm or Open MPI
    for example.
    """
    options: dict[str, Any] = {}
    if coordinator != "auto":
        _check_meeting(coordinator, num_processes, process_id)
        options = {
            "coordinator_address": coordinator,
            "num_processes": num_processes,
            "process_id": process_id,
        }
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    try:
        jax.distributed.initialize(
            **options,
            initialization_timeout=MEETING_SECONDS,
            heartbeat_timeout_seconds=SILENCE_SECONDS,
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise PfedafmError(
            f"coordinator = {coordinator!r}: the processes did not meet ({reason}); start all of them within "
            f"{MEETING_SECONDS} s with the same --coordinator and --num-processes, each with its own --process-id"
        ) from None


def _check_meeting(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise PfedafmError(
            f"coordinator = {coordinator!r} cannot be used; accepted: ADDRESS:PORT, or auto"
        )
    if num_processes is None or num_processes < 1:
        raise PfedafmError(
            f"num_processes = {num_processes} cannot be used; accepted: 1 or more, beside --coordinator"
        )
    if process_id is None or not 0 <= process_id < num_processes:
        raise PfedafmError(
            f"process_id = {process_id} cannot be used; accepted: 0 to {num_processes - 1}, beside --coordinator"
        )


class Processes:
    """The processes of a run as seen from this one."""

    def __init__(self, num_devices: int):
        self.count, self.index = jax.process_count(), jax.process_index()
        devices = jax.devices()
        self._meeting = [
            next(d for d in devices if d.process_index == p) for p in range(self.count)
        ]
        self._sum = jax.pmap(lambda tree: jax.lax.psum(tree, AXIS), AXIS, devices=self._meeting)
        self.devices = self.sum(
            np.eye(self.count, dtype=np.int32)[self.index] * num_devices
        )  # of every process

    @property
    def first(self) -> bool:
        """Whether this process writes the records and speaks to the user."""
        return self.index == 0

    def any(self, here: bool) -> bool:
        """Whether something is so in any process; waits for all of them."""
        return bool(self.sum(np.array([here], np.int32))[0])

    def sum(self, tree: Tree) -> Tree:
        """The sum of a tree over all processes, as numpy arrays; with one process the tree
        itself."""
        if self.count == 1:
            return tree
        if not jax.tree.leaves(tree):
            return tree
        with _explained():
            total = self._sum(jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree))
            return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], total)

    def own_rows(self, clients: np.ndarray, home: np.ndarray) -> np.ndarray:
        """Those of `clients` whose home is here, filled with -1 to as many rows as the process with
        most has."""
        own = clients[home == self.index]
        return np.concatenate(
            [own, np.full(np.bincount(home, minlength=self.count).max() - len(own), -1)]
        )

    def joined(self, rows: np.ndarray) -> jax.Array:
        """Every process's rows as one array `[processes, …]`, each part kept where it is."""
        sharding = NamedSharding(Mesh(np.array(self._meeting), (AXIS,)), PartitionSpec(AXIS))
        return jax.make_array_from_process_local_data(sharding, np.asarray(rows)[None])

    def move(self, tree: Tree) -> Tree:
        """Arrays that one process fills and the others leave zero, given to all, to the last
        bit."""
        if self.count == 1:
            return tree
        leaves, structure = jax.tree.flatten(tree)
        bits = self.sum([np.ascontiguousarray(leaf).view(np.uint32) for leaf in leaves])
        same = [
            moved.view(leaf.dtype).reshape(leaf.shape)
            for moved, leaf in zip(bits, leaves, strict=True)
        ]
        return jax.tree.unflatten(structure, same)


@contextlib.contextmanager
def _explained():
    """Turns the runtime's error about a lost peer into one that says what to do."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise lost_process(error) or error from None


def lost_process(error: BaseException) -> LostProcess | None:
    """What to tell where an error of the runtime means that another process is gone."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    if "Gloo" not in reason and not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    return LostProcess(
        f"another process of this run is gone ({reason}); start all processes again with the same command: the run goes "
        "on from its last checkpoint"
    )
