"""Ditto: FedAvg's shared model, and beside it a private one that is drawn towards it.

    L_w = CE(z_w, y)                                     the shared model w, as in FedAvg
    L_v = CE(z_v, y) + λ / 2 ‖v - w_received‖²           the private model v, which is evaluated

Both are trained for the local epochs; only w is sent. With λ = 0 the private models are those of
Standalone with the shared extractor's network, which all clients have: `Config.architectures` is
ignored.
"""

import jax

from pfedafm_jax.config.method_settings import MethodSettings, Rate
from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.fedprox import proximal_term
from pfedafm_jax.methods.two_models import init_shared_model, shared_logits
from pfedafm_jax.training.batches import Batch
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import train


class Ditto(Method):
    """A client keeps its private model; the server the shared one."""

    name = "ditto"
    title = "Ditto"
    one_network = True

    class Settings(MethodSettings):
        lambda_near: Rate = 0.1
        """Weight of the squared distance of the private model to the received one (λ)."""

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return ("shared_model",)

    def init_client(self, key, architecture) -> Client:
        return init_shared_model(key, self.shared)

    def init_server(self, key) -> Server:
        return {"shared_model": init_shared_model(key, self.shared)}

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        received = server["shared_model"]

        def shared_loss(model: Tree, batch: Batch) -> jax.Array:
            logits = shared_logits(self.shared, model, batch.images)
            return cross_entropy(logits, batch.labels, batch.weights)

        def private_loss(model: Tree, batch: Batch) -> jax.Array:
            near = proximal_term(self.settings.lambda_near, model, received)
            return shared_loss(model, batch) + near

        private = train(self.training, jax.random.fold_in(key, 1), client, private_loss, data)
        shared = train(self.training, jax.random.fold_in(key, 2), received, shared_loss, data)
        upload = {"shared_model": shared.params}
        info = {"loss": private.loss, "shared_loss": shared.loss}
        return Update(private.params, upload, {"shared_model": weight}, info)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {
            "private": shared_logits(self.shared, client, images),
            "shared": shared_logits(self.shared, server["shared_model"], images),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        return self.training_cost(self.shared.params, 2 * self.shared.macs, num_train)
