"""FedAPEN: a private and a shared model that learn from each other and predict together.

    L_F = CE(z_F, y) + KL(sg[softmax z_G] ‖ softmax z_F) + CE(λ z_F + (1 - λ) sg[z_G], y)
    L_G = CE(z_G, y) + KL(sg[softmax z_F] ‖ softmax z_G) + CE(λ sg[z_F] + (1 - λ) z_G, y)

Each client has its own λ. It is learned on a small part of the client's training data that the
models never train on (the adaptability set), with both models frozen, when a client receives a new
shared model. At its first visit a client has no trained model to weigh and keeps the initial value.
"""

from dataclasses import replace
from typing import Annotated

import jax
import jax.numpy as jnp
from annotated_types import Ge, Gt, Le, Lt
from jax import lax

from pfedafm_jax.config.method_settings import MethodSettings, Rate, Share
from pfedafm_jax.methods.base import Client, Cost, Server, Update
from pfedafm_jax.methods.standalone import private_logits
from pfedafm_jax.methods.two_models import PrivateAndShared, shared_logits
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import Batch, ClientData, epoch_order
from pfedafm_jax.training.losses import cross_entropy, kl_divergence
from pfedafm_jax.training.sgd import sgd
from pfedafm_jax.training.train import extract_all, train

LAMBDA_BATCH = 64
SPLIT_KEY = 2**31 - 3


def ensemble(weight: jax.Array | float, private: jax.Array, shared: jax.Array) -> jax.Array:
    """λ z_F + (1 - λ) z_G, logits `[batch, classes]`."""
    return weight * private + (1.0 - weight) * shared


def ensemble_loss(
    weight: jax.Array, private: jax.Array, shared: jax.Array, labels: jax.Array, weights: jax.Array
) -> jax.Array:
    """L_F + L_G from the logits of both models; each model gets the gradient of its own loss."""
    private_target, shared_target = lax.stop_gradient(private), lax.stop_gradient(shared)

    def one(logits: jax.Array, target: jax.Array, both: jax.Array) -> jax.Array:
        alone = cross_entropy(logits, labels, weights)
        together = cross_entropy(both, labels, weights)
        return alone + kl_divergence(target, logits, weights) + together

    loss_private = one(private, shared_target, ensemble(weight, private, shared_target))
    loss_shared = one(shared, private_target, ensemble(weight, private_target, shared))
    return loss_private + loss_shared


def split_adaptability(
    seed: int, fraction: float, data: ClientData
) -> tuple[ClientData, ClientData]:
    """(adaptability set, rest) of a client's training data, the same in every round, neither empty.

    The choice depends on the seed and on the client's data, not on the padding of its rows.
    """
    longest = data.train.shape[0]
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), SPLIT_KEY), data.train[0])
    order = epoch_order(key, data.num_train, longest)
    wanted = jnp.round(fraction * data.num_train.astype(jnp.float32)).astype(jnp.int32)
    count = jnp.minimum(jnp.maximum(wanted, 1), jnp.maximum(data.num_train - 1, 0))
    behind = order[(jnp.arange(longest, dtype=jnp.int32) + count) % longest]
    apart = data._replace(train=data.train[order], num_train=count)
    return apart, data._replace(train=data.train[behind], num_train=data.num_train - count)


class FedAPEN(PrivateAndShared):
    """A client keeps its λ as `ensemble_weight`."""

    name = "fedapen"
    title = "FedAPEN"

    class Settings(MethodSettings):
        lambda_start: Share = 0.5
        """Initial weight of the private model in the ensemble (λ)."""
        lambda_learning_rate: Rate = 1e-3
        """Learning rate of λ."""
        lambda_epochs: Annotated[int, Ge(0), Le(1_000_000)] = 10
        """Epochs over the adaptability set when a client receives a new shared model."""
        learn_before_judging: bool = False
        """Learn λ once more from the newest average before a client is judged (its authors do so
        after every average); off: only when a participant receives one."""
        adaptability_fraction: Annotated[float, Gt(0), Lt(1)] = 0.05
        """Fraction of a client's training data for learning λ, not used to train the models."""

    def init_client(self, key, architecture) -> Client:
        weight = jnp.float32(self.settings.lambda_start)
        own = {"ensemble_weight": weight, "visited": jnp.float32(0)}
        return {**super().init_client(key, architecture), **own}

    def learn_weight(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
    ) -> jax.Array:
        """λ after learning on the adaptability set `data`, with both models frozen."""
        size = min(LAMBDA_BATCH, data.train.shape[0])
        plain = {"momentum": 0.0, "flip": False, "erase": False, "crop": False}
        plain |= {"batch_size": size, "rest_size": size}
        training = replace(self.training, local_epochs=self.settings.lambda_epochs, **plain)

        # Frozen models on images that are not augmented: their logits are the same in all epochs.
        def own(images: jax.Array) -> jax.Array:
            return private_logits(architecture, client, images)

        def received(images: jax.Array) -> jax.Array:
            return shared_logits(self.shared, server["shared_model"], images)

        private, shared = extract_all(training, own, data), extract_all(training, received, data)

        def loss(weight: jax.Array, batch: Batch) -> jax.Array:
            both = ensemble(weight, private[batch.positions], shared[batch.positions])
            return cross_entropy(both, batch.labels, batch.weights)

        def project(weight: jax.Array) -> jax.Array:
            return jnp.clip(weight, 0.0, 1.0)

        rate, start = self.settings.lambda_learning_rate, client["ensemble_weight"]
        optimizer = sgd(training, learning_rate=rate, weight_decay=0.0, clip=False)
        return train(training, key, start, loss, data, optimizer, project=project).params

    @property
    def adapts(self) -> bool:
        return self.settings.learn_before_judging

    def adapt(self, key, architecture, client, server, data) -> tuple[Client, Server]:
        apart, _ = split_adaptability(self.seed, self.settings.adaptability_fraction, data)
        learned = self.learn_weight(key, architecture, client, server, apart)
        weight = jnp.where(client["visited"] > 0, learned, client["ensemble_weight"])
        return {**client, "ensemble_weight": weight}, server

    def adaptation_flops(self, architecture, num_train) -> float:
        if not self.adapts:
            return 0.0
        macs = architecture.macs + self.shared.macs
        return 2.0 * macs * self.num_apart(num_train) * self.settings.lambda_epochs

    def num_apart(self, num_train: float) -> float:
        """How many of a client's training samples are for learning λ."""
        wanted = max(1, round(self.settings.adaptability_fraction * num_train))
        return min(wanted, max(num_train - 1, 0))

    def loss(self, architecture, client, server, params, batch) -> jax.Array:
        logits = self.both_logits(architecture, **params, images=batch.images)
        return ensemble_loss(client["ensemble_weight"], *logits, batch.labels, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        apart, rest = split_adaptability(self.seed, self.settings.adaptability_fraction, data)
        learned = self.learn_weight(jax.random.fold_in(key, 2), architecture, client, server, apart)
        ensemble_weight = jnp.where(client["visited"] > 0, learned, client["ensemble_weight"])
        own = {"ensemble_weight": ensemble_weight, "visited": jnp.ones_like(client["visited"])}
        update = super().client_update(key, architecture, {**client, **own}, server, rest, weight)
        kept, info = {**update.client, **own}, {**update.info, "ensemble_weight": ensemble_weight}
        # Evaluated with the shared model it has just trained.
        return update._replace(client=kept, info=info, view=update.upload)

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        private, shared = self.both_logits(architecture, client, server["shared_model"], images)
        return {
            "ensemble": ensemble(client["ensemble_weight"], private, shared),
            "private": private,
            "shared": shared,
            "equal": ensemble(0.5, private, shared),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        settings, both = self.settings, architecture.macs + self.shared.macs
        apart = self.num_apart(num_train)
        trained = self.training_cost(self.shared.params, both, num_train - apart)
        return replace(trained, flops=trained.flops + 2.0 * both * apart * settings.lambda_epochs)
