"""Standalone: every client trains its own model on its own data, and nothing is exchanged.

As in every other method, a client trains only in the rounds it is drawn for. It is the base of
methods whose clients keep their own model.
"""

from functools import partial

import jax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import Batch
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import train


def init_private_model(key: jax.Array, architecture: Architecture) -> Client:
    """A client's own model, the paper's F_k."""
    extractor_key, header_key = jax.random.split(key)
    extractor = architecture.init_extractor(extractor_key)
    return {"local_extractor": extractor, "header": architecture.init_header(header_key)}


def private_model(client: Client) -> dict[str, Tree]:
    """The parts of a client's state that are its own model."""
    return {part: client[part] for part in ("local_extractor", "header")}


def private_logits(
    architecture: Architecture, model: dict[str, Tree], images: jax.Array
) -> jax.Array:
    """Class scores `[batch, classes]` of a client's own model."""
    features = architecture.extract(model["local_extractor"], images)
    return architecture.classify(model["header"], features)


class Standalone(Method):
    """No exchange, and no settings of its own."""

    name = "standalone"
    title = "Standalone"

    def init_client(self, key, architecture) -> Client:
        return init_private_model(key, architecture)

    def loss(
        self, architecture: Architecture, client: Client, server: Server, params: Tree, batch: Batch
    ) -> jax.Array:
        """The loss of a batch: `params` is what is trained, `client` and `server` the states before
        training."""
        logits = private_logits(architecture, params, batch.images)
        return cross_entropy(logits, batch.labels, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        model, loss = private_model(client), partial(self.loss, architecture, client, server)
        trained = train(self.training, jax.random.fold_in(key, 1), model, loss, data)
        return Update(trained.params, {}, {}, {"loss": trained.loss})

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {"private": private_logits(architecture, client, images)}

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        return self.training_cost(0, architecture.macs, num_train)
