"""FML, federated mutual learning: a private model and a shared one teach each other.

    L_F = α CE(z_F, y) + (1 - α) KL(sg[softmax z_G] ‖ softmax z_F)
    L_G = β CE(z_G, y) + (1 - β) KL(sg[softmax z_F] ‖ softmax z_G)

Both gradients are taken at the same point, and each network takes a step along its own. The shared
model, extractor and header, is exchanged; the private one is evaluated.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
from jax import lax

from pfedafm_jax.methods.base import Cost, Server, Tree, Update
from pfedafm_jax.methods.losses import kl_divergence
from pfedafm_jax.methods.standalone import Standalone, private_logits, private_model
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import MethodSettings, Share
from pfedafm_jax.training import Batch, Partitioned, cross_entropy, sgd, train


def init_shared_model(key: jax.Array, shared: Architecture) -> dict[str, Tree]:
    """The initial shared model, with its header."""
    extractor_key, header_key = jax.random.split(key)
    extractor, header = shared.init_extractor(extractor_key), shared.init_header(header_key)
    return {"extractor": extractor, "header": header}


def shared_logits(shared: Architecture, model: dict[str, Tree], images: jax.Array) -> jax.Array:
    """Class scores `[batch, classes]` of the shared model."""
    return shared.classify(model["header"], shared.extract(model["extractor"], images))


def mutual_loss(
    own: "FML.Settings",
    private: jax.Array,
    shared: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """L_F + L_G from the logits of both models, each of which gets the gradient of its own loss."""
    target = lax.stop_gradient if own.detach_targets else (lambda logits: logits)
    kl = partial(kl_divergence, weights=weights, mean=own.kl)
    ce_private = cross_entropy(private, labels, weights)
    loss_private = own.alpha * ce_private + (1 - own.alpha) * kl(target(shared), private)
    ce_shared = cross_entropy(shared, labels, weights)
    loss_shared = own.beta * ce_shared + (1 - own.beta) * kl(target(private), shared)
    return loss_private + loss_shared


@dataclass(frozen=True)
class PrivateAndShared(Standalone):
    """Base of methods whose clients keep one model and share another."""

    def init_server(self, key) -> Server:
        return {"shared_model": init_shared_model(key, self.shared)}

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {
            "private": private_logits(architecture, client, images),
            "shared": shared_logits(self.shared, server["shared_model"], images),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        macs = architecture.macs + self.shared.macs
        return self.training_cost(self.shared.params, macs, num_train)


@dataclass(frozen=True)
class FML(PrivateAndShared):
    """A private and a shared model that distil into each other."""

    name = "fml"
    title = "FML"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        """FML's own settings."""

        alpha: Share = 0.5
        """Weight of the private model's cross-entropy; 1 - α is that of its distillation."""
        beta: Share = 0.5
        """Weight of the shared model's cross-entropy; 1 - β is that of its distillation."""
        kl: Literal["batch_mean", "element_mean"] = "batch_mean"
        """The divergence itself, or divided by the number of classes (PyTorch, HtFLlib)."""
        detach_targets: bool = True
        """No gradient through the teacher's output; off: each model gets both (HtFLlib)."""

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        def loss(params: Tree, batch: Batch) -> jax.Array:
            private = private_logits(architecture, params["model"], batch.images)
            shared = shared_logits(self.shared, params["shared_model"], batch.images)
            return mutual_loss(self.settings, private, shared, batch.labels, batch.weights)

        params = {"model": private_model(client), "shared_model": server["shared_model"]}
        optimizer = Partitioned(dict.fromkeys(params, sgd(self.training)))
        trained = train(self.training, jax.random.fold_in(key, 1), params, loss, data, optimizer)
        model, upload = trained.params["model"], {"shared_model": trained.params["shared_model"]}
        return Update(model, upload, {"shared_model": weight}, {"loss": trained.loss})
