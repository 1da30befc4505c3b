"""FedAvg: one model for all clients, extractor and header, averaged; clients keep nothing.

A participant trains the received model on its data and uploads it. All clients have the shared
extractor's network; `Config.architectures` is ignored. It is the baseline for personalization.
"""

import jax
import jax.numpy as jnp

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.fml import init_shared_model, shared_logits
from pfedafm_jax.training import Batch, cross_entropy, train


class FedAvg(Method):
    """It has no settings of its own."""

    name = "fedavg"
    title = "FedAvg"
    one_network = True

    def init_client(self, key, architecture) -> Client:
        # Nothing reads it, but checkpoints are cut by the bytes of a state: there must be some.
        return {"visits": jnp.float32(0)}

    def init_server(self, key) -> Server:
        return {"shared_model": init_shared_model(key, self.shared)}

    def penalty(self, model: Tree, received: Tree) -> jax.Array | float:
        """A term added to the loss of a batch."""
        return 0.0

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        received = server["shared_model"]

        def loss(model: Tree, batch: Batch) -> jax.Array:
            logits = shared_logits(self.shared, model, batch.images)
            alone = cross_entropy(logits, batch.labels, batch.weights)
            return alone + self.penalty(model, received)

        trained = train(self.training, jax.random.fold_in(key, 1), received, loss, data)
        upload, kept = {"shared_model": trained.params}, {"visits": client["visits"] + 1.0}
        # Evaluated right after training, with the model it has just trained.
        return Update(kept, upload, {"shared_model": weight}, {"loss": trained.loss}, view=upload)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {"shared": shared_logits(self.shared, server["shared_model"], images)}

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        return self.training_cost(self.shared.params, self.shared.macs, num_train)
