"""FedAvg under class priors: one model for all, trained and asked under each client's frequencies.

    L = CE(z + log π_k, y)        scores: z + log π_k

π_k are the shares of the classes in client k's training data, at least `prior_floor`, and uniform
before its first visit. They stay with the client; upload and average are FedAvg's. What the shared
model then learns is what classes look like, not how often a client has them.

The correction is logit adjustment (Menon et al., 2021), or balanced softmax (Ren et al., 2020), with
the client as the domain whose prior is known. Near it in federated learning: FedRS (Li and Zhan,
2021) scales the scores of classes that a client lacks, FedLC (Zhang et al., 2022) subtracts a margin
by class counts in training only, and FedRoD (Chen and Chao, 2022) trains a generic head with
balanced softmax and adds a personal one.
"""

from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Lt

from pfedafm_jax.config.method_settings import MethodSettings
from pfedafm_jax.methods.base import Client, Tree
from pfedafm_jax.methods.fedavg import FedAvg
from pfedafm_jax.methods.two_models import shared_logits
from pfedafm_jax.training.batches import Batch, ClientData
from pfedafm_jax.training.losses import cross_entropy


def class_shares(data: ClientData, num_classes: int) -> jax.Array:
    """The shares of the classes in a client's training data, `[classes]`."""
    real = jnp.arange(data.train.shape[0]) < data.num_train
    labels = jnp.where(real, data.labels[data.train], num_classes)  # padding: one class more
    counts = jax.ops.segment_sum(jnp.ones(labels.shape), labels, num_classes + 1)[:-1]
    return counts / jnp.maximum(jnp.sum(counts), 1.0)


class FedAvgPriors(FedAvg):
    """FedAvg with a client's class shares added to its scores, in training and in prediction."""

    name = "fedavg_priors"
    title = "FedAvg under class priors"

    class Settings(MethodSettings):
        prior_floor: Annotated[float, Ge(1e-30), Lt(1)] = 1e-4
        """The least share of a class, for classes that a client has no training data of."""

    def init_client(self, key, architecture) -> Client:
        num_classes = self.shared.num_classes
        uniform = jnp.full((num_classes,), -jnp.log(num_classes), jnp.float32)
        return {"log_prior": uniform}

    def before_training(self, client: Client, data: ClientData) -> Client:
        shares = class_shares(data, self.shared.num_classes)
        return {"log_prior": jnp.log(jnp.maximum(shares, self.settings.prior_floor))}

    def loss(self, client: Client, received: Tree, model: Tree, batch: Batch) -> jax.Array:
        logits = shared_logits(self.shared, model, batch.images) + client["log_prior"][None, :]
        return cross_entropy(logits, batch.labels, batch.weights)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        logits = shared_logits(self.shared, server["shared_model"], images)
        return {"under_priors": logits + client["log_prior"][None, :], "shared": logits}
