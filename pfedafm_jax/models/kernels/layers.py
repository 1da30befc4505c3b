"""Fast layers for users' networks, whose Flax modules need no changes.

On a CPU, XLA's convolutions in a compiled loop, and their gradients, take fifty times as long as
they could. Inside `fast_layers` those of a module are native code (`convolution.cc`), and
GroupNorm sums in an order that the compiler can vectorize. `kernels = xla` turns this off.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from pfedafm_jax.models.kernels import _call, _like, implementation

AXES = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))  # NHWC, HWIO, NHWC


_INSIDE: ContextVar[bool] = ContextVar("inside", default=False)


@contextmanager
def fast_layers() -> Iterator[None]:
    """A context in which Linen's `nn.Conv` and `nn.GroupNorm` use the fast operations."""
    token = _INSIDE.set(True)
    try:
        with nn.intercept_methods(_intercept):
            yield
    finally:
        _INSIDE.reset(token)


def hasten(layer: nnx.Module) -> None:
    """Makes an `nnx.Conv` use the fast operations inside `fast_layers`: NNX has no interceptors."""
    plain = isinstance(layer, nnx.Conv) and layer.conv_general_dilated is lax.conv_general_dilated
    if plain and _INSIDE.get():
        layer.conv_general_dilated = conv_general_dilated  # pyright: ignore


def _intercept(call: Any, arguments: Any, options: Any, context: Any) -> Any:
    layer = context.module
    if context.method_name != "__call__" or implementation().name != "native":
        return call(*arguments, **options)
    if isinstance(layer, nn.Conv) and layer.conv_general_dilated is None:
        if layer.conv_general_dilated_cls is None:
            # The layer is a copy, bound for this call, so its field can be set.
            object.__setattr__(layer, "conv_general_dilated", conv_general_dilated)
    elif isinstance(layer, nn.GroupNorm) and not (options or layer.is_initializing()):
        usual = layer.reduction_axes is None and layer.axis_name is None
        weights = layer.variables.get("params", {})
        types = {one.dtype for one in (*arguments, *weights.values())} | {layer.dtype}
        if usual and layer.use_fast_variance and types <= {None, jnp.dtype(jnp.float32)}:
            return group_norm(layer, *arguments, **weights)
    return call(*arguments, **options)


def group_norm(
    layer: nn.GroupNorm,
    inputs: jax.Array,
    scale: jax.typing.ArrayLike = 1.0,
    bias: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
    """The output of `layer` for `[batch, ..., channels]`, summing over pixels before channels.

    Its gradient has the same two steps, two sums over pixels and one pass over them.
    """
    batch, channels = inputs.shape[0], inputs.shape[-1]
    size = layer.group_size or channels // (layer.num_groups or 1)
    pixels = inputs.reshape(batch, -1, channels)

    def mean(values: jax.Array) -> jax.Array:
        """Means of groups, repeated for each of their channels."""
        groups = jnp.sum(values, axis=1).reshape(batch, channels // size, size).sum(-1)
        return jnp.repeat(groups / (pixels.shape[1] * size), size, axis=-1)

    middle = mean(pixels)
    variance = jnp.maximum(0.0, mean(pixels * pixels) - middle * middle)
    factor = lax.rsqrt(variance + layer.epsilon) * jnp.atleast_2d(scale)
    shift = jnp.atleast_2d(bias) - middle * factor
    return (pixels * factor[:, None] + shift[:, None]).reshape(inputs.shape)


def conv_general_dilated(
    images: jax.Array, kernel: jax.Array, window_strides: Any, padding: Any, **options: Any
) -> jax.Array:
    """`lax.conv_general_dilated`, with the same arguments; native if possible.

    That is on a CPU, for float32 images `[batch, height, width, channels]` and a kernel `[rows,
    columns, channels / groups, outputs]`, any stride, padding, dilation and groups.
    """
    chosen = implementation()
    numbers = _numbers(images, kernel, window_strides, padding, **options)
    if chosen.name != "native" or numbers is None:
        return lax.conv_general_dilated(images, kernel, window_strides, padding, **options)
    return _conv(chosen.prefix, numbers, images, kernel)


def _numbers(
    images: jax.Array,
    kernel: jax.Array,
    strides: Any,
    padding: Any,
    dimension_numbers: Any = None,
    lhs_dilation: Any = None,
    rhs_dilation: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> tuple[tuple[int, ...], ...] | None:
    """Strides, dilation, padding `(before, after)` of rows and columns, and groups; None: XLA's."""
    fits = images.ndim == 4 and images.dtype == kernel.dtype == jnp.float32
    fits = fits and preferred_element_type in (None, jnp.float32) and out_sharding is None
    fits = fits and batch_group_count == 1 and min(*images.shape, *kernel.shape) > 0
    if not fits or any(one != 1 for one in lhs_dilation or ()):
        return None
    if lax.conv_dimension_numbers(images.shape, kernel.shape, dimension_numbers) != AXES:
        return None
    dilation = tuple(rhs_dilation or (1, 1))
    sizes = [(size - 1) * wide + 1 for size, wide in zip(kernel.shape, dilation, strict=False)]
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(images.shape[1:3], sizes, strides, padding)
    padded = [size + sum(pads) for size, pads in zip(images.shape[1:3], padding, strict=True)]
    if np.min(padding) < 0 or np.any(np.less(padded, sizes)):
        return None
    return tuple(strides), dilation, *map(tuple, padding), (feature_group_count,)


def _plain(numbers: tuple, images: jax.Array, kernel: jax.Array) -> jax.Array:
    strides, dilation, rows, columns, (groups,) = numbers
    options = {"rhs_dilation": dilation, "feature_group_count": groups, "dimension_numbers": AXES}
    return lax.conv_general_dilated(images, kernel, strides, (rows, columns), **options)


def _native(prefix: str, name: str, numbers: tuple, like: Any, *arguments: jax.Array) -> jax.Array:
    strides, dilation, rows, columns, groups = numbers
    given = np.array([*strides, *dilation, rows[0], columns[0], *groups], np.int64)
    return _call(prefix, name, like)(*arguments, numbers=given)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _conv(prefix: str, numbers: tuple, images: jax.Array, kernel: jax.Array) -> jax.Array:
    like = jax.eval_shape(partial(_plain, numbers), images, kernel)
    return _native(prefix, "Conv", numbers, like, images, kernel)


def _forward(prefix: str, numbers: tuple, images: jax.Array, kernel: jax.Array):
    return _conv(prefix, numbers, images, kernel), (images, kernel)


def _backward(prefix: str, numbers: tuple, kept: tuple, gradient: jax.Array) -> Any:
    return _gradients(prefix, numbers, *kept, gradient)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(
    prefix: str, numbers: tuple, images: jax.Array, kernel: jax.Array, gradient: jax.Array
):
    native = partial(_native, prefix)
    to_kernel = native("ConvWeightGradient", numbers, _like(kernel), images, gradient)
    to_images = native("ConvInputGradient", numbers, _like(images), kernel, gradient)
    return to_images, to_kernel


def _gradients_forward(prefix: str, numbers: tuple, *arguments: jax.Array):
    return _gradients(prefix, numbers, *arguments), arguments


def _gradients_backward(prefix: str, numbers: tuple, arguments: tuple, slopes: tuple):
    def gradients(images: jax.Array, kernel: jax.Array, gradient: jax.Array):
        return jax.vjp(partial(_plain, numbers), images, kernel)[1](gradient)

    return jax.vjp(gradients, *arguments)[1](slopes)  # second derivatives use XLA


_conv.defvjp(_forward, _backward)
_gradients.defvjp(_gradients_forward, _gradients_backward)
