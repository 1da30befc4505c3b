"""FD, federated distillation: clients exchange the mean output of their models for each class.

A participant trains on CE(z, y) + γ · m_y · CE(z, q_y), where q_y is the broadcast row of the sample's class and m_y is 0
as long as no client has sent that row. The target is always a probability vector: with raw logits in its place the loss
has no lower bound. After training, one clean pass yields the client's own rows.

`leave_one_out`: q_y is the mean over the other clients, (W · row - w · own) / (W - w), as the server would send it to this
client; where the client is the only one behind a row, W = w, it is masked.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.losses import class_means, class_weights, soft_cross_entropy
from pfedafm_jax.methods.standalone import init_private_model, private_logits, private_model
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import MethodSettings, Positive, Rate
from pfedafm_jax.training import Batch, ClientData, cross_entropy, mean_over, sgd, train


@dataclass(frozen=True)
class FD(Method):
    """The server holds the table of rows and which of them were ever sent.

    To leave a client out, the server also holds each row's weight W and how often it was renewed, and the client what it
    sent last, with which weight and into which renewal.
    """

    name = "fd"
    title = "FD"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        """Settings of FD's own."""

        gamma: Rate = 1.0
        """Weight of the distillation term (γ)."""
        outputs: Literal["softmax", "logits"] = "softmax"
        """What clients average for each class: probabilities, or logits, which become probabilities when they are used."""
        temperature: Positive = 1.0
        """Logits are divided by it before the softmax that makes the targets (τ)."""
        leave_one_out: bool = False
        """A client receives rows without its own part in them (the first paper on FD); a row that is all its own is masked."""
        whole_table: bool = False
        """Count the whole table as received, not only the rows of a client's own classes."""

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        model = init_private_model(key, architecture)
        return {**model, "sent": self.nothing_sent()} if self.settings.leave_one_out else model

    def nothing_sent(self) -> dict[str, jax.Array]:
        classes = self.shared.num_classes
        return {
            "rows": jnp.zeros((classes, classes)),
            "weight": jnp.zeros((classes,)),
            "renewal": jnp.zeros((classes,)),
        }

    def init_server(self, key: jax.Array) -> Server:
        classes = self.shared.num_classes
        server = {"class_scores": jnp.zeros((classes, classes)), "class_known": jnp.zeros((classes,))}
        if self.settings.leave_one_out:
            server |= {"class_weight": jnp.zeros((classes,)), "class_renewal": jnp.zeros((classes,))}
        return server

    def outputs(self, logits: jax.Array) -> jax.Array:
        """What is averaged for each class: probabilities, or logits."""
        return jax.nn.softmax(logits / self.settings.temperature) if self.settings.outputs == "softmax" else logits

    def targets(self, class_scores: jax.Array) -> jax.Array:
        """The table as probabilities `[classes, classes]`, whichever was averaged."""
        return (
            class_scores
            if self.settings.outputs == "softmax"
            else jax.nn.softmax(class_scores / self.settings.temperature)
        )

    def received(self, client: Client, server: Server) -> tuple[jax.Array, jax.Array]:
        """The rows a client is sent, and which of them hold something."""
        scores, known = server["class_scores"], server["class_known"]
        if not self.settings.leave_one_out:
            return scores, known
        sent = client["sent"]
        own = jnp.where(sent["renewal"] == server["class_renewal"], sent["weight"], 0.0)
        others = server["class_weight"] - own
        known = known * (others > 0.5).astype(known.dtype)  # weights are whole numbers
        total = server["class_weight"][:, None] * scores - own[:, None] * sent["rows"]
        return total / jnp.maximum(others, 1.0)[:, None], known

    def client_update(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
        weight: jax.Array,
    ) -> Update:
        scores, known = self.received(client, server)
        targets = self.targets(scores)

        def loss(params: Tree, batch: Batch) -> jax.Array:
            logits = private_logits(architecture, params, batch.images)
            distillation = known[batch.labels] * soft_cross_entropy(logits, targets[batch.labels])
            return cross_entropy(logits, batch.labels, batch.weights) + self.settings.gamma * mean_over(
                distillation, batch.weights
            )

        trained = train(self.how, jax.random.fold_in(key, 1), private_model(client), loss, data, sgd(self.how))

        def outputs(images: jax.Array) -> jax.Array:
            return self.outputs(private_logits(architecture, trained.params, images))

        rows, counts = class_means(self.how, outputs, data, architecture.num_classes)
        upload = {"class_scores": rows, "class_known": jnp.ones_like(counts)}
        weights = dict.fromkeys(upload, class_weights(self.config, counts, weight))
        kept: Client = trained.params
        if self.settings.leave_one_out:
            mine = weights["class_scores"]
            new = {"rows": rows, "weight": mine, "renewal": server["class_renewal"] + 1.0}
            keep = {name: (mine > 0) if leaf.ndim == 1 else (mine > 0)[:, None] for name, leaf in new.items()}
            kept = {**kept, "sent": jax.tree.map(jnp.where, keep, new, client["sent"])}
            upload["class_weight"] = mine  # has no weight of its own: it is summed
        return Update(kept, upload, weights, {"loss": trained.loss})

    def server_update(self, server: Server, averaged: dict[str, Tree]) -> Server:
        if not self.settings.leave_one_out:
            return {**server, **averaged}
        renewed = averaged["class_weight"] > 0
        weight = jnp.where(renewed, averaged["class_weight"], server["class_weight"])
        renewal = server["class_renewal"] + renewed.astype(jnp.float32)
        return {**server, **averaged, "class_weight": weight, "class_renewal": renewal}

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        return {"private": private_logits(architecture, client, images)}

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        classes = architecture.num_classes
        received = classes if self.settings.whole_table else num_classes_seen
        passes = 3 * self.config.local_epochs + 1  # the last is the clean pass
        return Cost(num_classes_seen * classes, received * classes, 2.0 * passes * architecture.macs * num_train)
