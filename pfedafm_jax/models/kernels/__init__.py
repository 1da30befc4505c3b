"""The operations that determine speed on a CPU: convolution with pooling, and the SGD step.

Each is one function. On a CPU it is native code (`native.cc`), called from compiled programs
through JAX's foreign function interface. On other platforms, for other dtypes, and if the native
code cannot be built, it is XLA (`xla.py`). Callers need not know which. Convolutions of own
networks are in `layers.py`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import default_cache_dir
from pfedafm_jax.models.kernels import build, xla

Tree = Any
HANDLERS = ("ConvPool", "ConvPoolWeightGradient", "ConvPoolInputGradient", "Sgd")
HANDLERS += ("Conv", "ConvWeightGradient", "ConvInputGradient")


class Implementation(NamedTuple):
    """Which implementation of the operations runs, and why."""

    name: str  # native or xla
    why: str
    prefix: str = ""  # of the names under which compiled programs call native operations

    def __str__(self) -> str:
        return f"{self.name} ({self.why})"


# The setting in force, and the implementation that each setting gave. When that changes, programs
# traced with the old one are dropped, so that one process can compare the two.
_asked = "auto"
_found: dict[str, Implementation] = {}
_building = threading.Lock()


def choose(kernels: str = "auto", log: Callable[[str], Any] | None = None) -> Implementation:
    """Chooses the implementation for everything that is traced from now on.

    Args:
        kernels: `native`, `xla`, or `auto`: native on a CPU if it can be built.
        log: called with one line if `auto` finds no native operations on a CPU.

    Returns:
        The one that runs. Raises `PfedafmError` if `kernels` is `native` and that is unavailable.
    """
    global _asked
    if kernels not in ("auto", "native", "xla"):
        raise bad("kernels", kernels, "auto, native, xla")
    first = kernels not in _found
    chosen = _implementation(kernels)
    if kernels == "native" and chosen.name != "native":
        raise PfedafmError(f"kernels = 'native' cannot be used; {chosen.why}; accepted: auto, xla")
    if _asked != kernels:
        changed, _asked = _implementation(_asked) != chosen, kernels
        if changed:
            jax.clear_caches()
    if log is not None and first and kernels == "auto" and chosen.name == "xla" and _on_cpu():
        log(f"rounds take about twice as long without native operations: {chosen.why}")
    return chosen


def implementation() -> Implementation:
    """The implementation in force."""
    return _implementation(_asked)


@contextmanager
def using(kernels: str) -> Iterator[Implementation]:
    """A context with another implementation; the previous one is restored afterwards."""
    before = _asked
    try:
        yield choose(kernels)
    finally:
        choose(before)


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _implementation(kernels: str) -> Implementation:
    with _building:
        if kernels not in _found:
            _found[kernels] = _find(kernels)
        return _found[kernels]


def _find(kernels: str) -> Implementation:
    if kernels == "xla":
        return Implementation("xla", "as asked for")
    if not _on_cpu():
        return Implementation("xla", f"the platform is {jax.default_backend()}")
    other = _found.get("native" if kernels == "auto" else "auto")
    if other is not None:
        return other
    try:
        library, digest = build.load(default_cache_dir() / "kernels")
        # The digest in the name ties compiled programs in JAX's cache to the code they call.
        prefix = f"pfedafm_{digest[:16]}_"
        for name in HANDLERS:
            capsule = jax.ffi.pycapsule(getattr(library, name))
            jax.ffi.register_ffi_target(prefix + name, capsule, platform="cpu")
        return Implementation("native", f"{library.RegisterWidth()} floats per register", prefix)
    except (build.Unavailable, AttributeError) as error:
        return Implementation("xla", str(error))


# -------------------------------------------------------------------------------------- convolution


def conv_pool(images: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Convolution 5x5 without padding, bias, ReLU and max-pooling 2x2.

    The gradient goes to the largest of the four outputs under a pooled pixel, the first in reading
    order if several are, and to none where ReLU gives zero. NaN counts as the largest, so it
    propagates in both directions.

    Args:
        images: float32 `[batch, height, width, channels]`; pooling drops an odd last row or column.
        kernel: `[5, 5, channels, outputs]`.
        bias: `[outputs]`.

    Returns:
        `[batch, (height - 4) // 2, (width - 4) // 2, outputs]`.
    """
    _, height, width, _ = images.shape
    if height % 2 or width % 2:
        images = images[:, : height - height % 2, : width - width % 2]
    chosen = implementation()
    native = chosen.name == "native" and images.dtype == kernel.dtype == bias.dtype == jnp.float32
    if not native or min(images.shape) == 0 or min(height, width) < 6:
        return xla.conv_pool(images, kernel, bias)
    both: Any = _native_conv_pool(chosen.prefix, images, kernel, bias)
    return both[0]


def _call(prefix: str, name: str, results: Any, **options: Any) -> Callable[..., Any]:
    # Under vmap an operation gets another leading axis, the clients, and loops over it itself.
    return jax.ffi.ffi_call(prefix + name, results, vmap_method="broadcast_all", **options)


def _like(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _native_conv_pool(
    prefix: str, images: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The output `[batch, rows, columns, outputs]`, and which of the four was the maximum:
    0 to 3, or 4 if ReLU gave zero."""
    batch, height, width, _ = images.shape
    shape = (batch, height // 2 - 2, width // 2 - 2, kernel.shape[-1])
    results = (jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.uint8))
    pooled, winners = _call(prefix, "ConvPool", results)(images, kernel, bias)
    return pooled, winners


def _conv_pool_forward(prefix: str, images: jax.Array, kernel: jax.Array, bias: jax.Array):
    both: Any = _native_conv_pool(prefix, images, kernel, bias)
    return both, (images, kernel, both[1])


def _conv_pool_backward(prefix: str, kept: tuple, slopes: tuple):
    return _gradients(prefix, *kept, slopes[0])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradients(
    prefix: str, images: jax.Array, kernel: jax.Array, winners: jax.Array, gradient: jax.Array
):
    # Two calls, so that XLA can drop the images' gradient if it is unused, as in a first layer.
    results = (_like(kernel), jax.ShapeDtypeStruct(kernel.shape[-1:], jnp.float32))
    to_kernel, to_bias = _call(prefix, "ConvPoolWeightGradient", results)(images, winners, gradient)
    to_images = _call(prefix, "ConvPoolInputGradient", _like(images))(kernel, winners, gradient)
    return to_images, to_kernel, to_bias


def _gradients_forward(prefix: str, *arguments: jax.Array):
    return _gradients(prefix, *arguments), arguments


def _gradients_backward(prefix: str, arguments: tuple, slopes: tuple):
    images, kernel, winners, gradient = arguments  # second derivatives use XLA

    def gradients(images: jax.Array, kernel: jax.Array, gradient: jax.Array):
        return xla.conv_pool_gradients(images, kernel, winners, gradient)

    _, pull = jax.vjp(gradients, images, kernel, gradient)
    to_images, to_kernel, to_gradient = pull(slopes)
    return to_images, to_kernel, None, to_gradient


_native_conv_pool.defvjp(_conv_pool_forward, _conv_pool_backward)
_gradients.defvjp(_gradients_forward, _gradients_backward)


# ---------------------------------------------------------------------------------------------- SGD


def sgd(
    weights: Tree,
    momenta: Tree,
    gradients: Tree,
    *,
    learning_rate: jax.typing.ArrayLike,
    momentum: jax.typing.ArrayLike = 0.0,
    weight_decay: jax.typing.ArrayLike = 0.0,
    clip_norm: jax.typing.ArrayLike = jnp.inf,
    active: jax.typing.ArrayLike = True,
) -> tuple[Tree, Tree]:
    """An SGD step in PyTorch's order: clip the gradient's norm, add decay, momentum, step.

    All numbers may be traced, so other values need no recompilation. Compiled programs update
    weights and momenta in place.

    Args:
        weights: a tree of float32 arrays.
        momenta: the same tree, zero at first.
        gradients: the same tree.
        learning_rate: the length of the step.
        momentum: the factor by which old momenta are multiplied.
        weight_decay: this multiple of the weights is added to the gradient after clipping.
        clip_norm: the largest norm over all gradients together; infinity: no clipping.
        active: False leaves weights and momenta unchanged, bit for bit.

    Returns:
        New weights and momenta.
    """
    numbers = (learning_rate, momentum, weight_decay, clip_norm, active)
    table = jnp.stack([jnp.asarray(number, jnp.float32) for number in numbers])
    chosen, leaves = implementation(), jax.tree.leaves((weights, momenta, gradients))
    fits = leaves and all(leaf.dtype == jnp.float32 and leaf.size for leaf in leaves)
    if chosen.name != "native" or not fits:
        return xla.sgd(table, weights, momenta, gradients)
    both, structure = jax.tree.flatten((weights, momenta))
    in_place = {1 + place: place for place in range(len(both))}
    shapes = [_like(leaf) for leaf in both]
    call = _call(chosen.prefix, "Sgd", shapes, input_output_aliases=in_place)
    return jax.tree.unflatten(structure, call(table, *leaves))
