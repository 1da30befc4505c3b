"""SGD in PyTorch's order, one for all weights or one for each part of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pfedafm_jax.models import kernels
from pfedafm_jax.training.batches import LocalTraining

Tree = Any


class SGD(NamedTuple):
    """SGD in PyTorch's order: clip, add decay, momentum, step. Its numbers may be traced."""

    learning_rate: jax.typing.ArrayLike
    momentum: jax.typing.ArrayLike
    weight_decay: jax.typing.ArrayLike
    clip_norm: jax.typing.ArrayLike  # infinity: no clipping

    def init(self, params: Tree) -> Tree:
        """The state before the first step: zero momenta."""
        return jax.tree.map(jnp.zeros_like, params)

    def step(self, params: Tree, state: Tree, gradient: Tree, active: jax.typing.ArrayLike = True):
        """New params and state; the old ones if `active` is False."""
        return kernels.sgd(params, state, gradient, active=active, **self._asdict())


class Partitioned(NamedTuple):
    """One optimizer, with its own clipping, for each top-level part of the trained tree."""

    parts: dict[str, SGD]

    def init(self, params: Tree) -> Tree:
        return {name: optimizer.init(params[name]) for name, optimizer in self.parts.items()}

    def step(self, params: Tree, state: Tree, gradient: Tree, active: jax.typing.ArrayLike = True):
        new, moved = {}, {}
        for name, optimizer in self.parts.items():
            part = params[name], state[name], gradient[name]
            new[name], moved[name] = optimizer.step(*part, active)
        return new, moved


def sgd(
    training: LocalTraining,
    *,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    clip: bool = True,
) -> SGD:
    """The optimizer of a client's training, with some of its numbers replaced."""
    return SGD(
        training.learning_rate if learning_rate is None else learning_rate,
        training.momentum,
        training.weight_decay if weight_decay is None else weight_decay,
        training.clip_norm if clip else jnp.inf,
    )
