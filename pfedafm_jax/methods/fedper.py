"""FedPer: one extractor for all clients, averaged, and a private header each.

A participant trains the received extractor and its own header together on its data and uploads the
extractor. Every client's network is then the shared extractor's: `Config.architectures` has no say,
so there is nothing heterogeneous left.
It is the control for pFedAFM once its mix vector has gone to 0: FedAvg on the shared extractor,
with private headers.
"""

from dataclasses import dataclass

import jax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.models import Architecture
from pfedafm_jax.training import Batch, ClientData, cross_entropy, sgd, train


@dataclass(frozen=True)
class FedPer(Method):
    """It has no settings of its own."""

    name = "fedper"
    title = "FedPer"
    one_network = True

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        _, header_key = jax.random.split(key)
        return {"header": self.shared.init_header(header_key)}

    def init_server(self, key: jax.Array) -> Server:
        return {"shared_extractor": self.shared.init_extractor(key)}

    def logits(self, shared_extractor: Tree, header: Tree, images: jax.Array) -> jax.Array:
        """Class scores `[batch, classes]`."""
        return self.shared.classify(header, self.shared.extract(shared_extractor, images))

    def client_update(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
        weight: jax.Array,
    ) -> Update:
        def loss(params: Tree, batch: Batch) -> jax.Array:
            logits = self.logits(params["shared_extractor"], params["header"], batch.images)
            return cross_entropy(logits, batch.labels, batch.weights)

        model = {"shared_extractor": server["shared_extractor"], "header": client["header"]}
        trained = train(
            self.training, jax.random.fold_in(key, 1), model, loss, data, sgd(self.training)
        )
        upload = {"shared_extractor": trained.params["shared_extractor"]}
        # Judged right after training, with the extractor it has just trained.
        view = {**server, **upload}
        return Update(
            {"header": trained.params["header"]},
            upload,
            {"shared_extractor": weight},
            {"loss": trained.loss},
            view,
        )

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        return {"personal": self.logits(server["shared_extractor"], client["header"], images)}

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        floats = self.shared.extractor_params
        return Cost(
            floats, floats, 2.0 * 3 * self.shared.macs * num_train * self.training.local_epochs
        )
