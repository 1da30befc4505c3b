"""FML, federated mutual learning: a private model and a shared one teach each other.

    L_F = α CE(z_F, y) + (1 - α) KL(sg[softmax z_G] ‖ softmax z_F)
    L_G = β CE(z_G, y) + (1 - β) KL(sg[softmax z_F] ‖ softmax z_G)

Both gradients are taken at the same point, and each network takes a step along its own. The shared
model, extractor and header, is exchanged; the private one is evaluated.
"""

from functools import partial
from typing import Literal

import jax
from jax import lax

from pfedafm_jax.config.method_settings import MethodSettings, Share
from pfedafm_jax.methods.two_models import PrivateAndShared
from pfedafm_jax.training.losses import cross_entropy, kl_divergence


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


class FML(PrivateAndShared):
    """A private and a shared model that distil into each other."""

    name = "fml"
    title = "FML"

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
