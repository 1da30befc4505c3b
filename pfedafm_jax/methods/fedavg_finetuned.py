"""FedAvg with fine-tuning: before a client is judged, it trains the last average on its own data.

Training and upload are FedAvg's. Whenever all clients are judged, each first takes E local epochs
from the last average with the run's rate, of the whole model or of its header; nothing of that is
kept or sent. Its FLOPs are the `adaptation_flops` of a record. Participants are judged right after
their visit with the model that they have just trained, which is that many epochs from the broadcast.
"""

from functools import partial
from typing import Literal

import jax
from jax import lax

from pfedafm_jax.config.method_settings import MethodSettings
from pfedafm_jax.methods.base import Client, Server, Tree
from pfedafm_jax.methods.fedavg import FedAvg
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import Batch, ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import frozen_features, train


class FedAvgFinetuned(FedAvg):
    """FedAvg whose clients are fine-tuned before they are judged."""

    name = "fedavg_finetuned"
    title = "FedAvg with fine-tuning"

    class Settings(MethodSettings):
        finetune: Literal["model", "header"] = "model"
        """What is fine-tuned: the whole model, or its header under the frozen extractor."""

    @property
    def adapts(self) -> bool:
        return True

    def adapt(self, key, architecture, client, server, data) -> tuple[Client, Server]:
        model = server["shared_model"]
        if self.settings.finetune == "model":
            loss = partial(self.loss, client, model)
            finetuned = train(self.training, key, model, loss, data).params
        else:
            header = self.train_header(key, model, data)
            finetuned = {**model, "header": header}
        return client, {**server, "shared_model": finetuned}

    def train_header(self, key: jax.Array, model: Tree, data: ClientData) -> Tree:
        """The header after E local epochs under the frozen extractor."""
        extract = partial(self.shared.extract, model["extractor"])
        features = frozen_features(self.training, extract, data)

        def loss(header: Tree, batch: Batch) -> jax.Array:
            logits = self.shared.classify(header, lax.stop_gradient(features(batch)))
            return cross_entropy(logits, batch.labels, batch.weights)

        return train(self.training, key, model["header"], loss, data).params

    def adaptation_flops(self, architecture: Architecture, num_train: float) -> float:
        # One pass forward and two backward of what is trained, one forward of what is frozen.
        macs = 3 * self.shared.macs
        if self.settings.finetune == "header":
            macs = self.shared.extractor_macs + 3 * self.shared.header_macs
        return 2.0 * macs * num_train * self.training.local_epochs

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {"finetuned": super().predict(architecture, client, server, images)["shared"]}
