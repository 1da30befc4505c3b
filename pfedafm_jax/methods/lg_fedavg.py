"""LG-FedAvg: private lower layers, a shared header.

A participant overwrites its header with the broadcast one, trains its whole model and uploads the
header. Header rows of classes that a client lacks are trained too (downwards, by the softmax) and
averaged as they are.
"""

from dataclasses import dataclass

import jax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.standalone import init_private_model, private_logits, private_model
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import MethodSettings, bad
from pfedafm_jax.training import Batch, ClientData, cross_entropy, sgd, train


def pick_layers(model: dict[str, Tree], names: tuple[str, ...]) -> dict[str, Tree]:
    """The named layers of a model: `header`, or layers of its extractor."""
    return {
        name: model["header"] if name == "header" else model["local_extractor"][name]
        for name in names
    }


def put_layers(model: dict[str, Tree], layers: dict[str, Tree]) -> dict[str, Tree]:
    """The model with these layers in place of its own."""
    inner = {name: layer for name, layer in layers.items() if name != "header"}
    return {
        "local_extractor": {**model["local_extractor"], **inner},
        "header": layers.get("header", model["header"]),
    }


@dataclass(frozen=True)
class LGFedAvg(Method):
    """The server holds the shared layers by name."""

    name = "lg_fedavg"
    title = "LG-FedAvg"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        """Settings of LG-FedAvg's own."""

        shared_layers: tuple[str, ...] = ("header",)
        """What clients share: header, or layers of the extractor by name (conv1, conv2, fc1, fc2),
        where all architectures have them in one shape."""

        def __post_init__(self):
            layers = self.shared_layers
            if isinstance(layers, tuple) and (not layers or len(set(layers)) < len(layers)):
                raise bad("lg_fedavg.shared_layers", layers, "one or more names, each once")

    @property
    def layers(self) -> tuple[str, ...]:
        return self.settings.shared_layers

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        return init_private_model(key, architecture)

    def init_server(self, key: jax.Array) -> Server:
        shapes = {
            architecture.name: self._shapes(architecture) for architecture in self.architectures
        }
        first, *others = shapes
        for other in others:
            unlike = [
                layer for layer in self.layers if shapes[other][layer] != shapes[first][layer]
            ]
            if unlike:
                accepted = f"layers of one shape in all architectures ({unlike[0]} differs in {first} and {other})"
                raise bad("lg_fedavg.shared_layers", self.layers, accepted)
        return pick_layers(init_private_model(key, self.architectures[0]), self.layers)

    def _shapes(self, architecture: Architecture) -> dict[str, Tree]:
        model = jax.eval_shape(lambda key: init_private_model(key, architecture), jax.random.key(0))
        present = ("header", *model["local_extractor"])
        for layer in self.layers:
            if layer not in present:
                accepted = f"layers of {architecture.name}: {', '.join(present)}"
                raise bad("lg_fedavg.shared_layers", self.layers, accepted)
        return pick_layers(model, self.layers)

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
            return cross_entropy(
                private_logits(architecture, params, batch.images), batch.labels, batch.weights
            )

        model = put_layers(private_model(client), server)
        trained = train(
            self.training, jax.random.fold_in(key, 1), model, loss, data, sgd(self.training)
        )
        upload = pick_layers(trained.params, self.layers)
        return Update(trained.params, upload, dict.fromkeys(upload, weight), {"loss": trained.loss})

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        return {
            "own": private_logits(architecture, client, images),
            "aggregated": private_logits(architecture, put_layers(client, server), images),
        }

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        floats = sum(leaf.size for leaf in jax.tree.leaves(self._shapes(architecture)))
        return Cost(
            floats, floats, 2.0 * 3 * architecture.macs * num_train * self.training.local_epochs
        )
