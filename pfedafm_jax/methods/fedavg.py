"""FedAvg: one model for all clients, extractor and header, averaged; clients keep nothing.

A participant trains the received model on its data and uploads it. All clients have the shared
extractor's network; `Config.architectures` is ignored. It is the baseline for personalization.
"""

from functools import partial

import jax
import jax.numpy as jnp

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.two_models import init_shared_model, shared_logits
from pfedafm_jax.training.batches import Batch, ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import train


class FedAvg(Method):
    """It has no settings of its own."""

    name = "fedavg"
    title = "FedAvg"
    one_network = True

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return ("shared_model",)

    def init_client(self, key, architecture) -> Client:
        # Nothing reads it; a file of a client says how often it took part.
        return {"visits": jnp.float32(0)}

    def init_server(self, key) -> Server:
        return {"shared_model": init_shared_model(key, self.shared)}

    def before_training(self, client: Client, data: ClientData) -> Client:
        """What a participant keeps of its visit, known before it trains."""
        return {"visits": client["visits"] + 1.0}

    def loss(self, client: Client, received: Tree, model: Tree, batch: Batch) -> jax.Array:
        """The loss of a batch: `model` is what is trained, from `received` on."""
        logits = shared_logits(self.shared, model, batch.images)
        return cross_entropy(logits, batch.labels, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        client, received = self.before_training(client, data), server["shared_model"]
        loss = partial(self.loss, client, received)
        trained = train(self.training, jax.random.fold_in(key, 1), received, loss, data)
        upload = {"shared_model": trained.params}
        # Evaluated right after training, with the model it has just trained.
        return Update(client, upload, {"shared_model": weight}, {"loss": trained.loss}, view=upload)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {"shared": shared_logits(self.shared, server["shared_model"], images)}

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        return self.training_cost(self.shared.params, self.shared.macs, num_train)
