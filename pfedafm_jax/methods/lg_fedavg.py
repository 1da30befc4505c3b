"""LG-FedAvg: private lower layers, a shared header.

A participant overwrites its header with the broadcast one, trains its whole model and uploads the
header. Header rows of classes that a client lacks are trained too (the softmax lowers their scores)
and averaged like the others.
"""

from functools import cache

import jax
from pydantic import field_validator

from pfedafm_jax.base.errors import bad
from pfedafm_jax.config.method_settings import MethodSettings
from pfedafm_jax.methods.base import Cost, Server, Tree, Update
from pfedafm_jax.methods.standalone import Standalone, init_private_model, private_logits
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.batch_stats import STATISTICS


def pick_layers(model: dict[str, Tree], names: tuple[str, ...]) -> dict[str, Tree]:
    """The named layers of a model: `header`, or layers of its extractor."""
    layers = {**model["local_extractor"], "header": model["header"]}
    return {name: layers[name] for name in names}


def put_layers(model: dict[str, Tree], layers: dict[str, Tree]) -> dict[str, Tree]:
    """The model with these layers in place of its own."""
    inner = {name: layer for name, layer in layers.items() if name != "header"}
    extractor = {**model["local_extractor"], **inner}
    return {"local_extractor": extractor, "header": layers.get("header", model["header"])}


@cache
def model_shapes(architecture: Architecture) -> dict[str, Tree]:
    """A model's arrays without values."""
    return jax.eval_shape(lambda key: init_private_model(key, architecture), jax.random.key(0))


class LGFedAvg(Standalone):
    """The server keeps the shared layers by name."""

    name = "lg_fedavg"
    title = "LG-FedAvg"

    class Settings(MethodSettings):
        shared_layers: tuple[str, ...] = ("header",)
        """What clients share: header, or layers of the extractor by name (conv1, conv2, fc1, fc2)
        that have the same shape in all architectures."""

        @field_validator("shared_layers")
        @classmethod
        def _each_once(cls, layers: tuple[str, ...]) -> tuple[str, ...]:
            if not layers or len(set(layers)) < len(layers):
                raise ValueError("one or more names, each once")
            return layers

    @property
    def layers(self) -> tuple[str, ...]:
        return self.settings.shared_layers

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return self.layers

    def init_server(self, key) -> Server:
        first, *others = self.architectures
        own = self._shapes(first)
        for other in others:
            unlike = [name for name, shape in self._shapes(other).items() if shape != own[name]]
            if unlike:
                differs = f"{unlike[0]} differs in {first.name} and {other.name}"
                accepted = f"layers of one shape in all architectures ({differs})"
                raise bad("lg_fedavg.shared_layers", self.layers, accepted)
        return pick_layers(init_private_model(key, first), self.layers)

    def _shapes(self, architecture: Architecture) -> dict[str, Tree]:
        model = model_shapes(architecture)
        present = ("header", *(name for name in model["local_extractor"] if name != STATISTICS))
        if not set(self.layers) <= set(present):
            accepted = f"layers of {architecture.name}: {', '.join(present)}"
            raise bad("lg_fedavg.shared_layers", self.layers, accepted)
        return pick_layers(model, self.layers)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        model = put_layers(client, server)
        update = super().client_update(key, architecture, model, server, data, weight)
        upload = pick_layers(update.client, self.layers)
        return update._replace(upload=upload, weight=dict.fromkeys(upload, weight))

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {
            "own": private_logits(architecture, client, images),
            "aggregated": private_logits(architecture, put_layers(client, server), images),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        floats = sum(leaf.size for leaf in jax.tree.leaves(self._shapes(architecture)))
        return self.training_cost(floats, architecture.macs, num_train)
