"""FedProx: FedAvg with a term that keeps participants near the model they received.

L = CE(z, y) + μ / 2 ‖w - w_received‖²
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pfedafm_jax.methods.base import Tree
from pfedafm_jax.methods.fedavg import FedAvg
from pfedafm_jax.settings import MethodSettings, Rate
from pfedafm_jax.statistics import without_statistics


class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name = "fedprox"
    title = "FedProx"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        mu: Rate = 0.01
        """Weight of the squared distance to the received model (μ; its paper tries 0.001 to 1)."""

    def penalty(self, model: Tree, received: Tree) -> jax.Array:
        pair = without_statistics(model), without_statistics(received)
        apart = jax.tree.map(lambda new, old: jnp.sum(jnp.square(new - old)), *pair)
        return 0.5 * self.settings.mu * sum(jax.tree.leaves(apart))
