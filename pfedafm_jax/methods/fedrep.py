"""FedRep: FedPer with header and extractor trained one after the other.

A round of a participant:
  phase 1  the received extractor is frozen; the private header is trained for `head_epochs`
  phase 2  the header is frozen; the extractor is trained for the local epochs and uploaded

As in FedPer, all clients have the shared extractor's network; `Config.architectures` is ignored.
"""

from dataclasses import replace
from functools import partial

import jax
from jax import lax

from pfedafm_jax.config.method_settings import Epochs, MethodSettings
from pfedafm_jax.methods.base import Cost, Tree, Update
from pfedafm_jax.methods.fedper import FedPer
from pfedafm_jax.methods.pfedafm import train_shared_extractor
from pfedafm_jax.training.batches import Batch, ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import Trained, frozen_features, train


class FedRep(FedPer):
    """The header is trained first and alone, then the extractor."""

    name = "fedrep"
    title = "FedRep"

    class Settings(MethodSettings):
        head_epochs: Epochs = 10
        """Epochs of the header alone, before the local epochs of the extractor."""

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        received = server["shared_extractor"]
        head = self.train_header(jax.random.fold_in(key, 1), client["header"], received, data)
        key = jax.random.fold_in(key, 2)
        body = train_shared_extractor(self, key, head.params, received, data)  # as in pFedAFM
        kept, upload = {"header": head.params}, {"shared_extractor": body.params}
        info = {"loss": body.loss, "head_loss": head.loss}
        return Update(kept, upload, {"shared_extractor": weight}, info, view={**server, **upload})

    def train_header(
        self, key: jax.Array, header: Tree, shared_extractor: Tree, data: ClientData
    ) -> Trained:
        """Phase 1."""
        training = replace(self.training, local_epochs=self.settings.head_epochs)
        features = frozen_features(training, partial(self.shared.extract, shared_extractor), data)

        def loss(params: Tree, batch: Batch) -> jax.Array:
            logits = self.shared.classify(params, lax.stop_gradient(features(batch)))
            return cross_entropy(logits, batch.labels, batch.weights)

        return train(training, key, header, loss, data)

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        floats, shared = self.shared.extractor_params, self.shared
        # Phase 1 is one pass of the extractor and 3 of the header, phase 2 is 3 of both.
        head = self.settings.head_epochs * (shared.extractor_macs + 3 * shared.header_macs)
        macs = head + 3 * shared.macs * self.training.local_epochs
        return Cost(floats, floats, 2.0 * macs * num_train)
