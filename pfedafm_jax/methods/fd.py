"""FD, federated distillation: clients exchange the mean output of their models for each class.

A participant trains on CE(z, y) + γ · m_y · CE(z, q_y), where q_y is the broadcast row of the
sample's class and m_y is 0 as long as no client has sent that row. The target is always a
probability vector: with raw logits instead, the loss has no lower bound. After training, one pass
without augmentation yields the client's own rows.
"""

from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp

from pfedafm_jax.config.method_settings import MethodSettings, Positive, Rate
from pfedafm_jax.methods.base import Cost, Server, Update
from pfedafm_jax.methods.standalone import Standalone, private_logits
from pfedafm_jax.training.losses import (
    class_means,
    class_weights,
    cross_entropy,
    mean_over,
    soft_cross_entropy,
)


class FD(Standalone):
    """The server keeps the table of rows, and which of them were ever sent."""

    name = "fd"
    title = "FD"

    class Settings(MethodSettings):
        gamma: Rate = 1.0
        """Weight of the distillation term (γ)."""
        outputs: Literal["softmax", "logits"] = "softmax"
        """What clients average for each class: probabilities, or logits (softmaxed later)."""
        temperature: Positive = 1.0
        """Logits are divided by it before the softmax that makes the targets (τ)."""
        whole_table: bool = False
        """Count the whole table as received, not only the rows of a client's own classes."""

    def init_server(self, key) -> Server:
        classes = self.shared.num_classes
        return {"class_scores": jnp.zeros((classes, classes)), "class_known": jnp.zeros((classes,))}

    def outputs(self, logits: jax.Array) -> jax.Array:
        """What is averaged for each class: probabilities, or logits."""
        probabilities = self.settings.outputs == "softmax"
        return jax.nn.softmax(logits / self.settings.temperature) if probabilities else logits

    def targets(self, class_scores: jax.Array) -> jax.Array:
        """The table as probabilities `[classes, classes]`, whichever was averaged."""
        if self.settings.outputs == "softmax":
            return class_scores
        return jax.nn.softmax(class_scores / self.settings.temperature)

    def loss(self, architecture, client, server, params, batch) -> jax.Array:
        targets, known = self.targets(server["class_scores"]), server["class_known"]
        logits = private_logits(architecture, params, batch.images)
        distillation = known[batch.labels] * soft_cross_entropy(logits, targets[batch.labels])
        alone = cross_entropy(logits, batch.labels, batch.weights)
        return alone + self.settings.gamma * mean_over(distillation, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        update = super().client_update(key, architecture, client, server, data, weight)

        def outputs(images: jax.Array) -> jax.Array:
            return self.outputs(private_logits(architecture, update.client, images))

        rows, counts = class_means(self.training, outputs, data, architecture.num_classes)
        upload = {"class_scores": rows, "class_known": jnp.ones_like(counts)}
        weights = dict.fromkeys(upload, class_weights(self.aggregation, counts, weight))
        return update._replace(upload=upload, weight=weights)

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        classes = architecture.num_classes
        received = classes if self.settings.whole_table else num_classes_seen
        sent, macs = num_classes_seen * classes, architecture.macs
        cost = self.training_cost(sent, macs, num_train, more_passes=1)  # which makes the rows
        return replace(cost, floats_down=received * classes)
