"""FedProx: FedAvg with a term that keeps participants near the model they received.

L = CE(z, y) + μ / 2 ‖w - w_received‖²
"""

from typing import Any

import jax
import jax.numpy as jnp

from pfedafm_jax.config.method_settings import MethodSettings, Rate
from pfedafm_jax.methods.base import Client, Tree
from pfedafm_jax.methods.fedavg import FedAvg
from pfedafm_jax.models.batch_stats import without_statistics
from pfedafm_jax.training.batches import Batch


def proximal_term(weight: jax.typing.ArrayLike, model: Tree, center: Tree) -> jax.Array:
    """weight / 2 ‖model - center‖², without running statistics."""
    pair = without_statistics(model), without_statistics(center)
    apart = jax.tree.map(lambda new, old: jnp.sum(jnp.square(new - old)), *pair)
    distance: Any = sum(jax.tree.leaves(apart))
    return 0.5 * weight * distance


class FedProx(FedAvg):
    """FedAvg with a proximal term."""

    name = "fedprox"
    title = "FedProx"

    class Settings(MethodSettings):
        mu: Rate = 0.01
        """Weight of the squared distance to the received model (μ; its paper tries 0.001 to 1)."""

    def loss(self, client: Client, received: Tree, model: Tree, batch: Batch) -> jax.Array:
        alone = super().loss(client, received, model, batch)
        return alone + proximal_term(self.settings.mu, model, received)
