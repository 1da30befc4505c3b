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

from pfedafm_jax.config.method_settings import MethodSettings, Share
from pfedafm_jax.methods.base import Cost, Server, Tree, Update
from pfedafm_jax.methods.standalone import Standalone, private_logits, private_model
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.losses import cross_entropy, kl_divergence
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


def mutual_loss(
    settings: "FML.Settings",
    private: jax.Array,
    shared: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """L_F + L_G from the logits of both models, each of which gets the gradient of its own loss."""
    target = lax.stop_gradient if settings.detach_targets else (lambda logits: logits)
    kl = partial(kl_divergence, weights=weights, mean=settings.kl)
    alpha, beta = settings.alpha, settings.beta
    ce_private = cross_entropy(private, labels, weights)
    loss_private = alpha * ce_private + (1 - alpha) * kl(target(shared), private)
    ce_shared = cross_entropy(shared, labels, weights)
    loss_shared = beta * ce_shared + (1 - beta) * kl(target(private), shared)
    return loss_private + loss_shared


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


class FML(PrivateAndShared):
    """A private and a shared model that distil into each other."""

    name = "fml"
    title = "FML"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        alpha: Share = 0.5
        """Weight of the private model's cross-entropy; 1 - α is that of its distillation."""
        beta: Share = 0.5
        """Weight of the shared model's cross-entropy; 1 - β is that of its distillation."""
        kl: Literal["batch_mean", "element_mean"] = "batch_mean"
        """The divergence itself, or divided by the number of classes (PyTorch, HtFLlib)."""
        detach_targets: bool = True
        """No gradient through the teacher's output; off: each model gets both (HtFLlib)."""

    def loss(self, architecture, client, server, params, batch) -> jax.Array:
        logits = self.both_logits(architecture, **params, images=batch.images)
        return mutual_loss(self.settings, *logits, batch.labels, batch.weights)
