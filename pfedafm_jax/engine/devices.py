"""The one module that knows about devices: it runs functions on all of them and sums over them."""

import contextlib
import ctypes
import importlib
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

from pfedafm_jax.base.errors import bad, reason
from pfedafm_jax.base.files import default_cache_dir, read_bytes

AXIS = "devices"
Tree = Any


def setup_devices(count: int = 0, cache: bool = True) -> None:
    """Gives JAX one CPU device per usable core (or `count`) and a persistent compilation cache.

    Call it before anything else uses JAX; the count has no effect later, or on GPUs. One client per
    core is faster than one client on all cores.
    """
    logging.getLogger("jax._src.xla_bridge").addFilter(_without_driver)
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count or usable_cores())
    # LAPACK's threads would compete with devices. What is not loaded yet cannot be limited, and
    # jaxlib loads SciPy's at its first use.
    importlib.import_module("scipy.linalg")
    threadpool_limits(limits=1, user_api="blas")
    _keep_memory()
    if cache:
        _cache(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]


def usable_cores() -> int:
    """The cores that this process may use: Slurm, containers and taskset may give it a few."""
    known = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(known(0)) if known else os.cpu_count() or 1


def usable_memory(
    groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of a control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    lines = own.read_text().splitlines() if own.exists() else []  # /proc/self/cgroup
    for _, kinds, name in (line.split(":", 2) for line in lines):
        if kinds in ("", "memory"):  # version 2, or 1
            file = "memory.limit_in_bytes" if kinds else "memory.max"
            place = groups / kinds / name.lstrip("/")
            for group in (place, *place.parents):
                with contextlib.suppress(OSError, ValueError):  # not there, or `max`
                    found.append(int(read_bytes(group / file)))
    return min(found)


def _without_driver(record: logging.LogRecord) -> bool:
    """Shortens JAX's traceback to one line if CUDA is installed without a driver."""
    if record.exc_info and "plugin configuration error" in str(record.msg):
        why = str(record.exc_info[1]).splitlines()[0].split(";")[0].split(": ", 1)[-1]
        record.msg = f"warning: no GPU can be used, so the CPU is; JAX says: {why}"
        record.args = record.exc_info = record.exc_text = None
    return True


def _cache(chosen: str | None) -> None:
    """Turns on JAX's compilation cache; warns in one line if its folder cannot be written."""
    # If the cache fails later, that costs only time.
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
    """Makes the C library keep freed memory: XLA frees and allocates the same hundred megabytes
    every round, and having the system clear them each time takes a tenth of a round.

    In two arenas: with one for each of the threads that write checkpoints, 40 rounds of Standalone
    with a hundred clients took 4.8 GB instead of 3.4, and 500 rounds took seven.
    """
    with contextlib.suppress(OSError, AttributeError):  # only glibc has `mallopt`
        # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX.
        for option, value in ((-3, 32 << 20), (-1, 2047 << 20), (-2, 64 << 20), (-8, 2)):
            ctypes.CDLL(None).mallopt(option, value)


class Devices:
    """The devices of a run in this process.

    Args:
        count: how many; 0: all.
        devices: these instead of the machine's, which need not exist.
        lower_for: a platform to lower programs for if it is not this machine's; they cannot be
            compiled then.
    """

    def __init__(self, count: int = 0, devices: Sequence[Any] = (), lower_for: str = ""):
        available = devices or jax.local_devices()
        if count > len(available):
            raise bad("devices", count, f"0 (all) to {len(available)} on this machine")
        self.devices = available[: count or len(available)]
        self.lower_for = lower_for
        self._absent = bool(devices)
        self._identity = (lower_for, *self.devices)
        mesh = Mesh(np.array(self.devices), (AXIS,))
        self.everyone = NamedSharding(mesh, PartitionSpec())
        self.rows = NamedSharding(mesh, PartitionSpec(AXIS))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Devices) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        """The platform: cpu, gpu or tpu."""
        return self.devices[0].platform

    def __str__(self) -> str:
        name = "CPU core" if self.kind == "cpu" else self.devices[0].device_kind
        return f"{len(self)} × {name}" if len(self) > 1 else f"one {name}"

    @property
    def memory(self) -> int:
        """Bytes that JAX may use on a device; 0 if unknown, or if it is the host's memory."""
        stats = self.devices[0].memory_stats() if self.kind != "cpu" and not self._absent else None
        return int((stats or {}).get("bytes_limit", 0))

    def replicate(self, tree: Tree) -> Tree:
        """Copies of these arrays on every device."""
        return jax.device_put(tree, self.everyone)

    def split(self, tree: Tree) -> Tree:
        """Arrays `[devices, …]`, each row on its device."""
        return jax.device_put(tree, self.rows)

    def spread(self, function: Callable, in_axes: tuple, out_axes: Any = 0, donate: tuple = ()):
        """`function` on all devices; arguments with axis 0 are split, with None replicated."""
        axes: Any = {"in_axes": in_axes, "out_axes": out_axes}
        return jax.pmap(function, AXIS, devices=self.devices, donate_argnums=donate, **axes)

    def lowered(
        self,
        function: Callable,
        shapes: Sequence[Tree],
        in_axes: tuple,
        out_axes: Any = 0,
        donate: tuple = (),
    ) -> Any:
        """`spread(function, …)` lowered for arguments of these shapes, ready to be compiled."""
        if jax.process_count() > 1:  # JAX needs arrays then
            shapes = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
        else:
            places = (self.everyone if axis is None else self.rows for axis in in_axes)
            shapes = [_on(tree, place) for tree, place in zip(shapes, places, strict=True)]
        spread = self.spread(function, in_axes, out_axes, donate)
        if self.lower_for:
            return jax.jit(spread).trace(*shapes).lower(lowering_platforms=(self.lower_for,))
        return spread.lower(*shapes)

    def everywhere(self, shapes: Tree) -> Tree:
        """These shapes with the sharding of what is on every device."""
        return _on(shapes, self.everyone)

    def shapes(self, tree: Tree, *rows: int) -> Tree:
        """Shapes with leading axes of devices and, if given, of rows per device."""
        front = (len(self), *rows)
        return jax.tree.map(lambda one: jax.ShapeDtypeStruct(front + one.shape, one.dtype), tree)

    def zeros(self, shapes: Tree) -> Tree:
        """Zeros of these shapes `[devices, …]`, created on the devices."""

        def make() -> Tree:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

        return jax.jit(make, out_shardings=self.rows)()


def _on(shapes: Tree, place: NamedSharding) -> Tree:
    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    return jax.tree.map(shape, shapes)


def matmul_precision(name: str) -> Any:
    """A context in which matrix products are traced with this precision.

    Algorithms are named explicitly, since XLA takes JAX's `tensorfloat32` for float32 on GPUs.
    """
    algorithms = {"highest": "highest", "tf32": "TF32_TF32_F32", "bfloat16": "BF16_BF16_F32"}
    return jax.default_matmul_precision(algorithms[name])


def sum_over_devices(tree: Tree) -> Tree:
    """The sum of a tree over all devices; for use inside a function given to `spread`."""
    return jax.tree.map(lambda leaf: jax.lax.psum(leaf, AXIS), tree)
