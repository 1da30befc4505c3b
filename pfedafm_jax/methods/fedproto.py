"""FedProto: clients exchange class prototypes, the mean representation of each class.

A participant trains on CE(F(x), y) + λ · mean over batch and features of (r(x) - P_y)², for samples
whose class has a broadcast prototype P_y. After training, one pass without augmentation yields the
client's own prototypes. A client predicts by its header or by the nearest prototype; both are
recorded.
"""

from dataclasses import replace
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from pfedafm_jax.config.method_settings import MethodSettings, Rate
from pfedafm_jax.methods.base import Cost, Server, Update
from pfedafm_jax.methods.standalone import Standalone
from pfedafm_jax.training.losses import (
    class_means,
    class_weights,
    cross_entropy,
    mean_over,
    squared_distance,
)


def nearest_prototype(features: jax.Array, prototypes: jax.Array, known: jax.Array) -> jax.Array:
    """Scores `[batch, classes]` that fall with the distance to each prototype; -∞ if unknown."""
    # -|r - P|² without |r|², which is the same for all classes.
    scores = 2.0 * features @ prototypes.T - jnp.sum(prototypes**2, axis=-1)[None, :]
    return jnp.where(known[None, :] > 0, scores, -jnp.inf)


class FedProto(Standalone):
    """The server keeps the prototypes, and which of them were ever sent."""

    name = "fedproto"
    title = "FedProto"

    class Settings(MethodSettings):
        lambda_mse: Rate = 1.0
        """Weight of the squared distance to the prototypes, a mean over features (λ)."""
        evaluated_by: Literal["header", "prototype"] = "header"
        """What it is evaluated by, the header or the nearest prototype; both are recorded."""
        whole_table: bool = False
        """Count all prototypes as received, not only those of own classes (as by prototype)."""

    def init_server(self, key) -> Server:
        classes, width = self.shared.num_classes, self.shared.feature_size
        return {"prototypes": jnp.zeros((classes, width)), "prototype_known": jnp.zeros((classes,))}

    def loss(self, architecture, client, server, params, batch) -> jax.Array:
        prototypes, known = server["prototypes"], server["prototype_known"]
        features = architecture.extract(params["local_extractor"], batch.images)
        logits = architecture.classify(params["header"], features)
        distance = known[batch.labels] * squared_distance(features, prototypes[batch.labels])
        alone = cross_entropy(logits, batch.labels, batch.weights)
        return alone + self.settings.lambda_mse * mean_over(distance, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        update = super().client_update(key, architecture, client, server, data, weight)
        extract = partial(architecture.extract, update.client["local_extractor"])
        means, counts = class_means(self.training, extract, data, architecture.num_classes)
        upload = {"prototypes": means, "prototype_known": jnp.ones_like(counts)}
        weights = dict.fromkeys(upload, class_weights(self.aggregation, counts, weight))
        return update._replace(upload=upload, weight=weights)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        features = architecture.extract(client["local_extractor"], images)
        known = server["prototype_known"]
        logits = architecture.classify(client["header"], features)
        scores = nearest_prototype(features, server["prototypes"], known)
        scores = jnp.where(jnp.any(known > 0), scores, logits)  # before the first upload
        both = {"header": logits, "prototype": scores}
        return both if self.settings.evaluated_by == "header" else dict(reversed(both.items()))

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        # The loss needs prototypes of the client's own classes, the nearest one all of them.
        whole = self.settings.whole_table or self.settings.evaluated_by == "prototype"
        received = architecture.num_classes if whole else num_classes_seen
        width, macs = architecture.feature_size, architecture.macs
        # The last pass makes the prototypes.
        cost = self.training_cost(num_classes_seen * width, macs, num_train, more_passes=1)
        return replace(cost, floats_down=received * width)
