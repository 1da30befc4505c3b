"""What methods share whose clients keep one model and exchange another: FML, FedKD, FedAPEN."""

from functools import partial

import jax

from pfedafm_jax.methods.base import Cost, Server, Tree, Update
from pfedafm_jax.methods.standalone import Standalone, private_logits, private_model
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.sgd import Partitioned, sgd
from pfedafm_jax.training.train import train


def init_shared_model(key: jax.Array, shared: Architecture) -> dict[str, Tree]:
    """The initial shared model, with its header."""
    extractor_key, header_key = jax.random.split(key)
    extractor, header = shared.init_extractor(extractor_key), shared.init_header(header_key)
    return {"extractor": extractor, "header": header}


def shared_logits(shared: Architecture, model: dict[str, Tree], images: jax.Array) -> jax.Array:
    """Class scores `[batch, classes]` of the shared model."""
    return shared.classify(model["header"], shared.extract(model["extractor"], images))


class PrivateAndShared(Standalone):
    """Base of methods whose clients keep one model and share another.

    They define `loss`, whose `params` are both: `model` and `shared_model`.
    """

    def init_server(self, key) -> Server:
        return {"shared_model": init_shared_model(key, self.shared)}

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return ("shared_model",)

    def both_logits(
        self, architecture: Architecture, model: Tree, shared_model: Tree, images: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Class scores `[batch, classes]` of the private and of the shared model."""
        private = private_logits(architecture, model, images)
        return private, shared_logits(self.shared, shared_model, images)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        # Both are trained at once on `loss`, the sum of their losses; each is clipped by itself.
        params = {"model": private_model(client), "shared_model": server["shared_model"]}
        optimizer = Partitioned(dict.fromkeys(params, sgd(self.training)))
        loss, key = partial(self.loss, architecture, client, server), jax.random.fold_in(key, 1)
        trained = train(self.training, key, params, loss, data, optimizer)
        model, upload = trained.params["model"], {"shared_model": trained.params["shared_model"]}
        return Update(model, upload, {"shared_model": weight}, {"loss": trained.loss})

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        private, shared = self.both_logits(architecture, client, server["shared_model"], images)
        return {"private": private, "shared": shared}

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        macs = architecture.macs + self.shared.macs
        return self.training_cost(self.shared.params, macs, num_train)
