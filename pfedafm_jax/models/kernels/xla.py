"""The operations in XLA: for every platform, and differentiable any number of times."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
SMALL = 100_000  # elements


def conv_pool(images: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Convolution, bias, max-pooling and ReLU; see `pfedafm_jax.models.kernels.conv_pool`."""
    scores = jnp.split(window_scores(images, kernel), 4, -2)
    first, second, third, fourth = (one[..., 0, :] for one in scores)
    pooled = _first_largest(_first_largest(first, second), _first_largest(third, fourth))
    pooled = pooled + bias[None, None, None, :]
    return jnp.where(pooled <= 0, 0.0, pooled)  # NaN stays NaN


def _first_largest(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger of two, the first if they are equal; NaN wins. Only it gets the gradient."""
    return jnp.where((a >= b) | (a != a), a, b)


def window_scores(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """The four outputs under each pooled pixel: `[b, h, w, c]` → `[b, h/2-2, w/2-2, 4, out]`.

    They come from one 6x6 window, so one product of `[windows, 36·c]` with `[36·c, 4·out]` computes
    them together. That takes 1.44 times the multiplications of the convolution, but far less
    memory traffic and a good matrix shape. Under vmap it is a batched product, whereas `lax.conv`
    becomes a grouped convolution, whose gradient is slow on CPUs and GPUs alike.
    """
    batch, height, width, channels = images.shape
    outputs = kernel.shape[-1]
    rows, columns = height // 2 - 2, width // 2 - 2
    # Blocks of 2x2 pixels become channels, so a 6x6 window is 3x3 blocks: concatenate three
    # columns, then three rows. The barriers keep XLA from recomputing the previous layer for each
    # of these slices.
    blocks = images.reshape(batch, height // 2, 2, width // 2, 2 * channels)
    blocks = blocks.transpose(0, 1, 3, 2, 4)
    blocks = lax.optimization_barrier(blocks.reshape(batch, height // 2, width // 2, 4 * channels))
    threes = jnp.concatenate([blocks[:, :, j : j + columns] for j in range(3)], axis=-1)
    threes = lax.optimization_barrier(threes)
    windows = jnp.concatenate([threes[:, i : i + rows] for i in range(3)], axis=-1)
    windows = windows.reshape(batch * rows * columns, 36 * channels)
    # The 5x5 kernel at each of the four offsets in the 6x6 window, rows in the order of the blocks.
    pads = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in (0, 1) for j in (0, 1)]
    expanded = jnp.stack([jnp.pad(kernel, pad) for pad in pads], axis=-2)
    expanded = expanded.reshape(3, 2, 3, 2, channels, 4, outputs).transpose(0, 2, 1, 3, 4, 5, 6)
    expanded = expanded.reshape(36 * channels, 4 * outputs)
    scores = lax.optimization_barrier(lax.optimization_barrier(windows) @ expanded)
    return scores.reshape(batch, rows, columns, 4, outputs)


def conv_pool_gradients(
    images: jax.Array, kernel: jax.Array, winners: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of images, kernel and bias, from that of the output and the position of its maximum
    (0 to 3, or 4: none)."""
    chosen = jnp.stack([winners == place for place in range(4)], axis=-2)
    scores = jnp.where(chosen, gradient[..., None, :], 0.0)
    _, pull = jax.vjp(window_scores, images, kernel)  # bilinear: XLA drops the scores themselves
    return *pull(scores), jnp.sum(scores, axis=(0, 1, 2, 3))


def sgd(numbers: jax.Array, weights: Tree, momenta: Tree, gradients: Tree) -> tuple[Tree, Tree]:
    """An SGD step; see `pfedafm_jax.models.kernels.sgd`."""
    learning_rate, momentum, decay, clip_norm, active = (numbers[i] for i in range(5))
    leaves = jax.tree.leaves(gradients)
    # Small arrays are concatenated: on a GPU each sum is a kernel launch.
    small = [leaf.reshape(-1) for leaf in leaves if leaf.size < SMALL]
    whole = [jnp.concatenate(small)] if small else []
    whole += [leaf for leaf in leaves if leaf.size >= SMALL]
    squares = [jnp.sum(jnp.square(leaf)) for leaf in whole]
    norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
    # A NaN norm scales by NaN; a norm of 0 is not above the limit, so nothing is divided by 0.
    scale = jnp.where(norm > clip_norm, clip_norm / norm, jnp.where(norm == norm, 1.0, norm))

    def velocity(weight: jax.Array, old: jax.Array, slope: jax.Array) -> jax.Array:
        return jnp.where(active != 0, momentum * old + (slope * scale + decay * weight), old)

    def step(weight: jax.Array, speed: jax.Array) -> jax.Array:
        return jnp.where(active != 0, weight - learning_rate * speed, weight)

    momenta = jax.tree.map(velocity, weights, momenta, gradients)
    return jax.tree.map(step, weights, momenta), momenta
