"""The one place that knows about devices: how functions are spread over them, sums joined."""

import contextlib
import ctypes
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
    logging.getLogger("jax._src.xla_bridge").addFilter(_without_driver)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or os.cpu_count() or 1)
    threadpool_limits(limits=1, user_api="blas")  # LAPACK's own threads fight with several devices
    _keep_memory()
    if cache:
        _cache(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


def _without_driver(record: logging.LogRecord) -> bool:
    """JAX's traceback where CUDA is installed and there is no driver, as one line."""
    if record.exc_info and "plugin configuration error" in str(record.msg):
        why = str(record.exc_info[1]).splitlines()[0].split(";")[0].split(": ", 1)[-1]
        record.msg = f"warning: no GPU can be used, so the CPU is; JAX says: {why}"
        record.args = record.exc_info = record.exc_text = None
    return True


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
    """The local devices of a run; `count` 0 takes all of them.

    Args:
        count: how many.
        backend: how functions are spread over them, `pmap` or `shard_map`.
        devices: these, instead of those of this machine.
        lower_for: a platform to lower programs for that is not there; they cannot be compiled.
    """

    def __init__(
        self,
        count: int = 0,
        backend: str = "pmap",
        devices: Sequence[Any] = (),
        lower_for: str = "",
    ):
        available = devices or jax.local_devices()
        if count > len(available):
            raise bad("devices", count, f"0 (all) to {len(available)} on this machine")
        self.devices, self.backend = available[: count or len(available)], backend
        self.lower_for, self._absent = lower_for, bool(devices)
        self._mesh = Mesh(np.array(self.devices), (AXIS,))
        self.everyone = NamedSharding(self._mesh, PartitionSpec())
        self.rows = NamedSharding(self._mesh, PartitionSpec(AXIS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Devices) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.backend, self.lower_for, *self.devices))

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        """cpu, gpu or tpu."""
        return self.devices[0].platform

    def __str__(self) -> str:
        name = "CPU core" if self.kind == "cpu" else self.devices[0].device_kind
        return f"{len(self)} × {name}" if len(self) > 1 else f"one {name}"

    @property
    def memory(self) -> int:
        """Bytes of a device for programs; 0 where it is the host's."""
        stats = self.devices[0].memory_stats() if self.kind != "cpu" and not self._absent else None
        return int((stats or {}).get("bytes_limit", 0))

    def replicate(self, tree: Tree) -> Tree:
        """The same arrays on every device."""
        return jax.device_put(tree, self.everyone)

    def split(self, tree: Tree) -> Tree:
        """Arrays `[devices, …]`, each device holding its own row."""
        return jax.device_put(tree, self.rows)

    def spread(self, function: Callable, in_axes: tuple, out_axes: Any = 0, donate: tuple = ()):
        """`function` on every device: arguments with axis 0 are split, the others given to all."""
        if self.backend == "pmap":
            axes: Any = {"in_axes": in_axes, "out_axes": out_axes}
            return jax.pmap(function, AXIS, devices=self.devices, donate_argnums=donate, **axes)

        def own(*arguments: Tree) -> Tree:
            pairs = zip(arguments, in_axes, strict=True)
            rows = [a if axis is None else _first(a) for a, axis in pairs]
            result = function(*rows)
            return result if out_axes is None else jax.tree.map(lambda leaf: leaf[None], result)

        specs = tuple(PartitionSpec() if axis is None else PartitionSpec(AXIS) for axis in in_axes)
        out = PartitionSpec() if out_axes is None else PartitionSpec(AXIS)
        sharded = jax.shard_map(
            own, mesh=self._mesh, in_specs=specs, out_specs=out, check_vma=False
        )
        return jax.jit(sharded, donate_argnums=donate)

    def lowered(
        self,
        function: Callable,
        shapes: Sequence[Tree],
        in_axes: tuple,
        out_axes: Any = 0,
        donate: tuple = (),
    ) -> Any:
        """A spread function traced for arguments of these shapes, ready to be compiled."""
        if jax.process_count() > 1 and self.backend == "pmap":  # JAX then wants arrays
            shapes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        else:
            places = (self.everyone if axis is None else self.rows for axis in in_axes)
            shapes = [_on(tree, place) for tree, place in zip(shapes, places, strict=True)]
        spread = self.spread(function, in_axes, out_axes, donate)
        if self.lower_for:
            return jax.jit(spread).trace(*shapes).lower(lowering_platforms=(self.lower_for,))
        return spread.lower(*shapes)

    def everywhere(self, shapes: Tree) -> Tree:
        """Shapes of what is on every device."""
        return _on(shapes, self.everyone)

    def zeros(self, shapes: Tree) -> Tree:
        """Zeros of these shapes `[devices, …]`, made on the devices."""

        def make() -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        return jax.jit(make, out_shardings=self.rows)()


def _first(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf[0], tree)


def _on(shapes: Tree, place: NamedSharding) -> Tree:
    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape, shapes)


def matmul_precision(name: str) -> Any:
    """A context in which products are traced with this precision; it matters on GPUs only.

    JAX's own `tensorfloat32` means float32 to XLA on GPUs, hence the names of algorithms.
    """
    algorithms = {"highest": "highest", "tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}
    return jax.default_matmul_precision(algorithms[name])


def sum_over_devices(tree: Tree) -> Tree:
    """Inside a spread function: the sum of a tree over all devices."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, AXIS), tree)
