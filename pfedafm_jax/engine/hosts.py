"""Several processes in one run: how they connect and communicate, and the error if one is lost.

Client k belongs to process k mod P, which keeps its state and trains it on its own devices. Once per
round the processes sum numerators and weights, by JAX's distributed runtime.
"""

import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.aborts import on_abort
from pfedafm_jax.base.errors import PfedafmError, bad

Tree = Any
AXIS = "processes"
MEETING_SECONDS = 120  # how long processes wait for each other at startup
SILENCE_SECONDS = 30  # a process without a heartbeat for this long is considered dead


class LostProcess(PfedafmError):
    """Another process of the run has died or cannot be reached."""

    exit_code = 1

    def __init__(self, reason: str):
        mend = (
            "start all processes again with the same command: it resumes from the last checkpoint"
        )
        super().__init__(f"another process of this run is gone ({reason}); {mend}")


def join(coordinator: str, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Connects this process to the others of its run; call it before anything else uses JAX.

    Args:
        coordinator: `address:port` of process 0, or `auto`: JAX finds all three, for example from
            Slurm or Open MPI.
        num_processes: how many there are.
        process_id: the number of this one, from 0.
    """
    options: dict[str, Any] = {}
    if coordinator != "auto":
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
            raise bad("coordinator", coordinator, "ADDRESS:PORT, or auto")
        if num_processes is None or num_processes < 1:
            raise bad("num_processes", num_processes, "1 or more, beside --coordinator")
        if process_id is None or not 0 <= process_id < num_processes:
            raise bad("process_id", process_id, f"0 to {num_processes - 1}, beside --coordinator")
        options = {"coordinator_address": coordinator, "process_id": process_id}
        options["num_processes"] = num_processes
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
            f"coordinator = {coordinator!r}: the processes did not meet ({reason}); start all of "
            f"them within {MEETING_SECONDS} s with the same --coordinator and --num-processes, "
            "each with its own --process-id"
        ) from None
    _catch_abort()


def _catch_abort() -> None:
    """Turns the runtime's abort into a `LostProcess` message.

    If process 0 dies, a thread of JAX's runtime prints its stack and aborts. So what C++ prints is
    held back, and shown only after an abort for another reason.
    """
    printed, name = tempfile.mkstemp()
    os.unlink(name)
    sys.stderr = errors = os.fdopen(os.dup(2), "w", 1, errors="replace")
    os.dup2(printed, 2)

    def aborted(number: int) -> None:
        text = os.pread(printed, 2**20, 0).decode(errors="replace")
        lost = "JAX distributed service detected fatal errors" in text
        if lost:
            time.sleep(1)  # usually the main thread fails meanwhile, and says why
            text = f"error: {LostProcess('the first one, or one that it has waited for')}\n"
        errors.write(text)
        errors.flush()
        os._exit(LostProcess.exit_code if lost else 128 + number)

    on_abort(aborted)


class Processes:
    """The processes of a run, as seen from this one."""

    def __init__(self):
        self.count, self.index = jax.process_count(), jax.process_index()
        devices = jax.devices()
        firsts = {device.process_index: device for device in reversed(devices)}
        self._firsts = [firsts[process] for process in range(self.count)]  # a device of each
        self._sum = jax.pmap(lambda tree: jax.lax.psum(tree, AXIS), AXIS, devices=self._firsts)

    @property
    def first(self) -> bool:
        """Whether this process writes the records and prints to the terminal."""
        return self.index == 0

    def keeps(self, client: int) -> bool:
        """Whether this process keeps a client's state, and trains and evaluates it."""
        return client % self.count == self.index

    def any(self, here: bool) -> bool:
        """Whether `here` is true in any process; a barrier, since it waits for all of them."""
        return bool(self.sum(np.array([here], np.int32))[0])

    def agree(self, values: Mapping[str, Any]) -> None:
        """Raises `PfedafmError` in all processes if a named value differs between them."""
        sums = [zlib.crc32(json.dumps(value).encode()) for value in values.values()]
        mine = np.eye(self.count, dtype=np.uint32)[self.index][:, None] * np.array(sums, np.uint32)
        differ = np.ptp(self.sum(mine), axis=0) > 0
        if differ.any():
            names = ", ".join(name for name, one in zip(values, differ, strict=True) if one)
            raise PfedafmError(f"the processes of this run were started with different {names}")

    def sum(self, tree: Tree) -> Tree:
        """The sum of a tree over all processes, as numpy arrays; of one process, the tree."""
        if self.count == 1 or not jax.tree.leaves(tree):
            return tree
        try:
            total = self._sum(jax.tree.map(lambda leaf: np.asarray(leaf)[None], tree))
            return jax.tree.map(lambda leaf: np.asarray(leaf.addressable_shards[0].data)[0], total)
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            raise lost_process(error) or error from None


def lost_process(error: BaseException) -> LostProcess | None:
    """The error to raise instead, if an error of the runtime means that a process was lost."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
    lost = "Gloo" in reason or isinstance(error, jax.errors.JaxRuntimeError)
    if not lost or "RESOURCE_EXHAUSTED" in reason:  # out of memory
        return None
    return LostProcess(reason)
