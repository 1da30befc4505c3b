"""The operations as XLA computes them: on every platform, and differentiable in every way."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Tree = Any
SMALL = 100_000  # numbers


def conv_pool(images: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Convolution, bias, max-pooling and ReLU; see `pfedafm_jax.kernels.conv_pool`."""
    scores = jnp.split(window_scores(images, kernel), 4, -2)
    first, second, third, fourth = (one[..., 0, :] for one in scores)
    pooled = _first_largest(_first_largest(first, second), _first_largest(third, fourth))
    pooled = pooled + bias[None, None, None, :]
    return jnp.where(pooled <= 0, 0.0, pooled)  # NaN stays NaN


def _first_largest(a: jax.Array, b: jax.Array) -> jax.Array:
    """The larger one, the first of two equal ones; NaN wins. It alone has the gradient."""
    return jnp.where((a >= b) | (a != a), a, b)


def window_scores(images: jax.Array, kernel: jax.Array) -> jax.Array:
    """The four outputs under each pooled pixel: `[b, h, w, c]` → `[b, h/2-2, w/2-2, 4, out]`.

    They come from one 6x6 window, so one product of `[windows, 36·c]` with `[36·c, 4·out]` gives
    them side by side. That is 1.44 times the multiplications of the plain convolution, but far less
    memory traffic, a good matrix shape, and under vmap it stays a batched product, where `lax.conv`
    would become a grouped convolution, whose gradient is slow on CPU and GPU alike.
    """
    batch, height, width, channels = images.shape
    outputs = kernel.shape[-1]
    rows, columns = height // 2 - 2, width // 2 - 2
    # Blocks of 2x2 pixels become channels; a 6x6 window is then 3x3 blocks: put three columns side
    # by side, then three rows. The barriers keep XLA from computing a layer's output anew for each
    # of these slices.
    blocks = images.reshape(batch, height // 2, 2, width // 2, 2 * channels)
    blocks = blocks.transpose(0, 1, 3, 2, 4)
    blocks = lax.optimization_barrier(blocks.reshape(batch, height // 2, width // 2, 4 * channels))
    threes = jnp.concatenate([blocks[:, :, j : j + columns] for j in range(3)], axis=-1)
    threes = lax.optimization_barrier(threes)
    windows = jnp.concatenate([threes[:, i : i + rows] for i in range(3)], axis=-1)
    windows = windows.reshape(batch * rows * columns, 36 * channels)
    # The 5x5 kernel at each of the four offsets in the 6x6 window, its rows in the blocks' order.
    pads = [((i, 1 - i), (j, 1 - j), (0, 0), (0, 0)) for i in (0, 1) for j in (0, 1)]
    expanded = jnp.stack([jnp.pad(kernel, pad) for pad in pads], axis=-2)
    expanded = expanded.reshape(3, 2, 3, 2, channels, 4, outputs).transpose(0, 2, 1, 3, 4, 5, 6)
    expanded = expanded.reshape(36 * channels, 4 * outputs)
    scores = lax.optimization_barrier(lax.optimization_barrier(windows) @ expanded)
    return scores.reshape(batch, rows, columns, 4, outputs)


def conv_pool_gradients(
    images: jax.Array, kernel: jax.Array, winners: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of images, kernel and bias, from that of the output and who won (4: nobody)."""
    chosen = jnp.stack([winners == place for place in range(4)], axis=-2)
    scores = jnp.where(chosen, gradient[..., None, :], 0.0)
    _, pull = jax.vjp(window_scores, images, kernel)  # linear in both: the scores are not computed
    return *pull(scores), jnp.sum(scores, axis=(0, 1, 2, 3))


def sgd(numbers: jax.Array, weights: Tree, momenta: Tree, gradients: Tree) -> tuple[Tree, Tree]:
    """A step of SGD; see `pfedafm_jax.kernels.sgd`."""
    learning_rate, momentum, decay, clip_norm, active = (numbers[i] for i in range(5))
    leaves = jax.tree.leaves(gradients)
    # Small arrays together: on a GPU each sum by itself is a launch.
    small = [leaf.reshape(-1) for leaf in leaves if leaf.size < SMALL]
    whole = [jnp.concatenate(small)] if small else []
    whole += [leaf for leaf in leaves if leaf.size >= SMALL]
    squares = [jnp.sum(jnp.square(leaf)) for leaf in whole]
    norm = jnp.sqrt(jnp.sum(jnp.stack(squares)))
    # NaN and 0 are not above the limit: NaN gives NaN, and nothing is divided by 0.
    scale = jnp.where(norm > clip_norm, clip_norm / norm, jnp.where(norm == norm, 1.0, norm))

    def velocity(weight: jax.Array, old: jax.Array, slope: jax.Array) -> jax.Array:
        return jnp.where(active != 0, momentum * old + (slope * scale + decay * weight), old)

    def step(weight: jax.Array, speed: jax.Array) -> jax.Array:
        return jnp.where(active != 0, weight - learning_rate * speed, weight)

    momenta = jax.tree.map(velocity, weights, momenta, gradients)
    return jax.tree.map(step, weights, momenta), momenta
