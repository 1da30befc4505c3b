"""FedPer: one extractor for all clients, averaged, and a private header each.

A participant trains the received extractor and its own header together on its data and uploads the
extractor. All clients have the shared extractor's network; `Config.architectures` is ignored, so
nothing is heterogeneous. It is the control for pFedAFM with a mix vector of 0: FedAvg on the shared
extractor, with private headers.
"""

import jax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.training.batches import Batch
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.train import train


class FedPer(Method):
    """It has no settings of its own."""

    name = "fedper"
    title = "FedPer"
    one_network = True

    def init_client(self, key, architecture) -> Client:
        _, header_key = jax.random.split(key)
        return {"header": self.shared.init_header(header_key)}

    def init_server(self, key) -> Server:
        return {"shared_extractor": self.shared.init_extractor(key)}

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return ("shared_extractor",)

    def logits(self, shared_extractor: Tree, header: Tree, images: jax.Array) -> jax.Array:
        """Class scores `[batch, classes]`."""
        return self.shared.classify(header, self.shared.extract(shared_extractor, images))

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        def loss(params: Tree, batch: Batch) -> jax.Array:
            logits = self.logits(params["shared_extractor"], params["header"], batch.images)
            return cross_entropy(logits, batch.labels, batch.weights)

        model = {"shared_extractor": server["shared_extractor"], "header": client["header"]}
        trained = train(self.training, jax.random.fold_in(key, 1), model, loss, data)
        upload = {"shared_extractor": trained.params["shared_extractor"]}
        kept, info = {"header": trained.params["header"]}, {"loss": trained.loss}
        # Evaluated right after training, with the extractor it has just trained.
        return Update(kept, upload, {"shared_extractor": weight}, info, view={**server, **upload})

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {"personal": self.logits(server["shared_extractor"], client["header"], images)}

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        return self.training_cost(self.shared.extractor_params, self.shared.macs, num_train)
