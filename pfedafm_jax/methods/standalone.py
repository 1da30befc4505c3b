"""Standalone: every client trains its own model on its own data, and nothing travels.

A client trains only in the rounds it is drawn for, like the clients of every other method.
"""

from dataclasses import dataclass

import jax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.models import Architecture
from pfedafm_jax.training import Batch, ClientData, cross_entropy, sgd, train

PRIVATE = ("local_extractor", "header")


def init_private_model(key: jax.Array, architecture: Architecture) -> Client:
    """A client's own model, the paper's F_k."""
    extractor_key, header_key = jax.random.split(key)
    return {
        "local_extractor": architecture.init_extractor(extractor_key),
        "header": architecture.init_header(header_key),
    }


def private_model(client: Client) -> dict[str, Tree]:
    """The parts of a client's state that are its own model."""
    return {part: client[part] for part in PRIVATE}


def private_logits(
    architecture: Architecture, model: dict[str, Tree], images: jax.Array
) -> jax.Array:
    """Class scores `[batch, classes]` of a client's own model."""
    return architecture.classify(
        model["header"], architecture.extract(model["local_extractor"], images)
    )


@dataclass(frozen=True)
class Standalone(Method):
    """No exchange; it has no settings of its own."""

    name = "standalone"
    title = "Standalone"

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        return init_private_model(key, architecture)

    def client_update(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
        weight: jax.Array,
    ) -> Update:
        def loss(params: Tree, batch: Batch) -> jax.Array:
            return cross_entropy(
                private_logits(architecture, params, batch.images), batch.labels, batch.weights
            )

        trained = train(
            self.training,
            jax.random.fold_in(key, 1),
            private_model(client),
            loss,
            data,
            sgd(self.training),
        )
        return Update(trained.params, {}, {}, {"loss": trained.loss})

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        return {"private": private_logits(architecture, client, images)}

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        return Cost(0, 0, 2.0 * 3 * architecture.macs * num_train * self.training.local_epochs)
