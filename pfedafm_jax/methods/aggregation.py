"""How the uploads of a round become one: weighted averages (Eq. 11) and medians."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any
Server = dict[str, Tree]


def _spread(weight: jax.Array, leaf: jax.Array) -> jax.Array:
    """Reshapes a weight for the leading axes of a leaf so that it broadcasts against it."""
    return weight.reshape(weight.shape + (1,) * (leaf.ndim - weight.ndim))


def weigh(upload: dict[str, Tree], weight: dict[str, jax.Array]) -> dict[str, Tree]:
    """Numerators of the average: each part times its weight.

    >>> weigh({"rows": jnp.ones((2, 2))}, {"rows": jnp.array([3.0, 0.0])})["rows"]
    Array([[3., 3.],
           [0., 0.]], dtype=float32)
    """

    def times(share: jax.Array, part: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf * _spread(share, leaf), part)

    return {name: times(weight[name], part) for name, part in upload.items()}


def average(
    server: Server, numerator: dict[str, Tree], weight: dict[str, jax.Array]
) -> dict[str, Tree]:
    """Sums over clients → weighted means (Eq. 11); what nobody sent keeps its old value, as do
    statistics that stay with the clients (None).

    >>> old, sums = {"rows": jnp.array([[7.0], [7.0]])}, {"rows": jnp.array([[6.0], [0.0]])}
    >>> average(old, numerator=sums, weight={"rows": jnp.array([3.0, 0.0])})["rows"]
    Array([[2.],
           [7.]], dtype=float32)
    """

    def mean(name: str, old: jax.Array, total: jax.Array | None) -> jax.Array:
        if total is None:
            return old
        share = _spread(weight[name], total)
        return jnp.where(share > 0, total / jnp.where(share > 0, share, 1.0), old)

    return {
        name: jax.tree.map(partial(mean, name), server[name], part)
        for name, part in numerator.items()
    }


def median(old: jax.Array, rows: jax.Array | None, weight: jax.Array) -> jax.Array:
    """Coordinate-wise median `[…]` of rows `[K, …]` whose weight `[K, …]` is above 0; `old` where
    there are none. Of an even number, the mean of the two in the middle.

    >>> rows = jnp.array([[1.0, 5.0], [2.0, 6.0], [9.0, 7.0]])
    >>> median(jnp.zeros(2), rows, weight=jnp.array([[3.0, 0.0], [1.0, 0.0], [1.0, 0.0]]))
    Array([2., 0.], dtype=float32)
    """
    if rows is None:  # statistics that stay with the clients
        return old
    there = _spread(weight, rows) > 0
    ordered = jnp.sort(jnp.where(there, rows, jnp.inf), axis=0)
    count = jnp.sum(there, axis=0, keepdims=True)
    low, high = (
        jnp.take_along_axis(ordered, jnp.broadcast_to(place, (1, *old.shape)), axis=0)[0]
        for place in ((count - 1) // 2, count // 2)
    )
    return jnp.where(count[0] > 0, 0.5 * (low + high), old)
