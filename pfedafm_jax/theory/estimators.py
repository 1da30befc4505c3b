"""Estimates of the constants of the theory, for any loss; and the bound that it makes of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Tree = Any


class Pass(NamedTuple):
    """One pass over a client's data at fixed parameters."""

    loss: jax.Array
    gradient: Tree
    variance: jax.Array  # of a batch's gradient around it: E‖g_B - ∇L‖², Eq. 16


def gradient_pass(loss: Callable[[Tree, Tree], jax.Array], params: Tree, batches: Tree, sizes: jax.Array) -> Pass:
    """Loss, gradient and the variance of batch gradients from one epoch of random batches `[batches, …]`.

    `loss(params, batch)` is a mean over the batch; `sizes` `[batches]` says over how many samples (0: padding). Batches of a
    random order are random batches, and their mean, weighted by size, is the gradient on all data: the mean squared distance
    from it has no bias where all batches have one size.
    """
    shares = sizes / jnp.sum(sizes)

    def add(total: Pass, part: tuple[Tree, jax.Array]) -> tuple[Pass, None]:
        batch, share = part
        value, gradient = jax.value_and_grad(loss)(params, batch)
        mean = jax.tree.map(lambda sum_, leaf: sum_ + share * leaf, total.gradient, gradient)
        return Pass(total.loss + share * value, mean, total.variance + share * _squared(gradient)), None

    empty = Pass(jnp.float32(0), jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
    total, _ = lax.scan(add, empty, (batches, shares))
    return total._replace(variance=jnp.maximum(total.variance - _squared(total.gradient), 0.0))


def _squared(tree: Tree) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))


def squared_distance(first: Tree, second: Tree) -> float:
    """‖first - second‖² over all arrays, in double precision."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return sum(float(np.sum(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64)))) for a, b in pairs)


def smoothness(first: tuple[Tree, Tree], second: tuple[Tree, Tree]) -> float | None:
    """‖∇L(h') - ∇L(h)‖ / ‖h' - h‖ for two (parameters, gradient): no L₁ below it satisfies Eq. 13. None: no distance."""
    moved = squared_distance(first[0], second[0])
    return (squared_distance(first[1], second[1]) / moved) ** 0.5 if moved > 0 else None


def bound(T: float, *, L1: float, sigma2: float, delta2: float, Delta: float, E: float, eta: float) -> float | None:
    """The right side of Eq. 30, divided by E: what the mean of ‖∇L‖² over steps may be. None: void, since η ≥ 2/L₁.

    >>> bound(10, L1=1.0, sigma2=0.0, delta2=0.0, Delta=2.0, E=4, eta=1.0)
    0.1
    """
    below = eta - L1 * eta**2 / 2
    return (Delta / T + L1 * E * eta**2 * sigma2 / 2 + eta * delta2) / below / E if below > 0 else None
