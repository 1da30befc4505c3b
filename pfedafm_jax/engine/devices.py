"""The one place that knows about devices: how functions are spread over them, sums joined."""

import contextlib
import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from threadpoolctl import threadpool_limits

from pfedafm_jax.errors import reason
from pfedafm_jax.files import default_cache_dir
from pfedafm_jax.settings import bad

AXIS = "devices"
Tree = Any


def setup_devices(count: int = 0, cache: bool = True) -> None:
    """Gives JAX one CPU device per core (or `count`) and a compilation cache; call it first.

    One client per core beats one client on all cores. Once JAX has started, or on a GPU, the count
    changes nothing.
    """
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or os.cpu_count() or 1)
    threadpool_limits(limits=1, user_api="blas")  # LAPACK's own threads fight with several devices
    _keep_memory()
    if cache:
        _cache(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


def _cache(chosen: str | None) -> None:
    """Has JAX keep compiled programs; a folder that cannot be written costs one line."""
    # It may fill up or go later, which costs time only.
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
    if chosen and "://" in chosen:
        return
    folder = Path(chosen or default_cache_dir() / "compiled")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
    except OSError as error:
        words = f"warning: compiled programs are not kept, {folder} cannot be written"
        print(f"{words} ({reason(error)})", file=sys.stderr, flush=True)
        return jax.config.update("jax_compilation_cache_dir", None)
    if not chosen:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _keep_memory() -> None:
    """Has the C library keep what is freed: XLA frees and takes the same hundred megabytes every
    round, and each time the system would have to clear them anew, a tenth of a round."""
    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        # Thresholds of mmap and of trimming, and what is kept on top.
        for option, megabytes in ((-3, 32), (-1, 2047), (-2, 64)):
            ctypes.CDLL(None).mallopt(option, megabytes << 20)


class Devices:
    """The local devices of a run; `count` 0 takes all of them."""

    def __init__(self, count: int = 0):
        available = jax.local_devices()
        if count > len(available):
            raise bad("devices", count, f"0 (all) to {len(available)} on this machine")
        self.devices = available[: count or len(available)]
        self._mesh = Mesh(np.array(self.devices), (AXIS,))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Devices) and self.devices == other.devices

    def __hash__(self) -> int:
        return hash(tuple(self.devices))

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        """cpu, gpu or tpu."""
        return self.devices[0].platform

    def __str__(self) -> str:
        name = "CPU core" if self.kind == "cpu" else self.devices[0].device_kind
        return f"{len(self)} × {name}" if len(self) > 1 else f"one {name}"

    def replicate(self, tree: Tree) -> Tree:
        """The same arrays on every device."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec()))

    def split(self, tree: Tree) -> Tree:
        """Arrays `[devices, …]`, each device holding its own row."""
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec(AXIS)))

    def spread(self, function: Callable, in_axes: tuple, out_axes: Any = 0, donate: tuple = ()):
        """`function` on every device: arguments with axis 0 are split, the others given to all."""
        axes: Any = {"in_axes": in_axes, "out_axes": out_axes}
        return jax.pmap(function, AXIS, devices=self.devices, donate_argnums=donate, **axes)


def lowered(spread: Any, *shapes: Tree) -> Any:
    """A spread function traced for arguments of these shapes, ready to be compiled."""
    if jax.process_count() > 1:  # JAX then wants arrays
        shapes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    return spread.lower(*shapes)


def sum_over_devices(tree: Tree) -> Tree:
    """Inside a spread function: the sum of a tree over all devices."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, AXIS), tree)
