"""A trained client: it predicts, from its weights and the card that says where they come from."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data.arrays import standardised
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.data.images import Pictures, read_pictures
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.programs import init_client, init_server
from pfedafm_jax.engine.visit import predict
from pfedafm_jax.methods import Method, make_method, method_names
from pfedafm_jax.methods.base import Client, Server
from pfedafm_jax.methods.server_optimizer import broadcast_of
from pfedafm_jax.models import kernels
from pfedafm_jax.models.architecture import Architecture, describe
from pfedafm_jax.training.accuracy import EVALUATION_BATCH

BLOCKS = 16  # batches per call


CARD_FORMAT = 2


@dataclass(frozen=True)
class TrainedClient:
    """One client's model, ready to classify.

    Attributes:
        architecture: that of its own network.
        params: what the client keeps between visits.
        server: the last broadcast; methods that share something predict with both.
        card: where it comes from, as JSON: method, settings, data, round, accuracies.
        history: of a newcomer: `history[v]` has its accuracies after v visits.
    """

    method: Method
    architecture: Architecture
    params: Client
    server: Server
    card: dict[str, Any]
    history: list[dict[str, float]] = field(default_factory=list)

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the scores."""
        return self.card["data"]["classes"]

    def pictures(self, images: Pictures) -> tuple[np.ndarray, list[str]]:
        """Images as the model expects them, and their names; see `data.pictures`."""
        resize = bool(self.card["config"].get("image_size"))
        return read_pictures(images, self.architecture.stored(1), resize)

    def predict(self, images: Pictures) -> dict[str, np.ndarray]:
        """Class scores (logits).

        Args:
            images: uint8 `[num, height, width, channels]`, or features or token ids where the model
                was trained on such; a `.npy` or `.npz` file, image files or a folder of them. They
                are normalised here as in training.

        Returns:
            float32 `[num, classes]` by name of the prediction, the method's main one first
            (pFedAFM: mixed, small, large).
        """
        data, found = self.card["data"], []
        pixels = standardised(self.pictures(images)[0], data["mean"], data["std"])
        for start in range(0, max(len(pixels), 1), BLOCKS * EVALUATION_BATCH):
            block = pixels[start : start + BLOCKS * EVALUATION_BATCH]
            padded = np.zeros((BLOCKS * EVALUATION_BATCH, *block.shape[1:]), block.dtype)
            padded[: len(block)] = block
            with matmul_precision("highest"):
                out = _classify(
                    self._numbers,
                    self.architecture,
                    str(kernels.implementation()),
                    *self._states,
                    padded,
                )
            found.append({name: np.asarray(out[name])[: len(block)] for name in self.predictions})
        return {name: np.concatenate([one[name] for one in found]) for name in self.predictions}

    def probabilities(self, images: Pictures) -> dict[str, np.ndarray]:
        """`predict`, as probabilities of the classes."""
        return softmax(self.predict(images))

    def scores(self, images: jax.Array) -> dict[str, jax.Array]:
        """`predict` as a function of images (uint8, or as they were given) that can be traced."""
        data = self.card["data"]
        pixels = normalise(images, tuple(data["mean"]), tuple(data["std"]))
        return predict(self.method, self.architecture, self.params, self.server, pixels)

    @property
    def predictions(self) -> list[str]:
        """Names of the predictions, the method's main one first."""
        return self.card["predictions"]

    @cached_property
    def _numbers(self) -> Method:
        return jax.tree.map(jnp.asarray, self.method)

    @cached_property
    def _states(self) -> tuple[Client, Server]:
        return jax.device_put((self.params, self.server))


def about_data(data: dict[str, Any]) -> dict[str, Any]:
    """What `make_method` takes of the data, from what `config.json` says of them."""
    about: dict[str, Any] = {name: tuple(data[name]) for name in ("image_shape", "mean", "std")}
    # Runs of early versions, which have images, do not say so.
    return about | {"num_classes": len(data["classes"]), "dtype": data.get("dtype", "uint8")}


def config_of(written: dict[str, Any]) -> Config:
    """Settings as a run or a card has them."""
    if (method := written["method"]) not in method_names():
        accepted = f"{known(method, method_names())}; your own are loaded by --plugin FILE.py"
        raise bad("method", method, accepted)
    return updated(Config(), written)


def network_of(name: str, config: Config, data: dict[str, Any]) -> Architecture:
    """The network of this name under these settings, for such data."""
    about = about_data(data)
    sizes = about["num_classes"], about["image_shape"], config.feature_size
    return describe(name, *sizes, config.initialisation, about["dtype"])


class Model(NamedTuple):
    """What a client's weights belong to."""

    config: Config
    method: Method
    network: Architecture
    shapes: dict[str, Any]  # of `client`, what it keeps, and `server`, what it is sent


def model_of(card: dict[str, Any]) -> Model:
    """The model that a card describes: by its `config`, `data` and `architecture`."""
    config = config_of(card["config"])
    method = make_method(config, num_train=[1], **about_data(card["data"]))
    network, key = network_of(card["architecture"], config, card["data"]), jax.random.key(0)
    client = jax.eval_shape(partial(init_client, architecture=network), method, key)
    server = broadcast_of(jax.eval_shape(init_server, method, key))
    shapes = {"client": client, "server": server}
    return Model(config, method, network, shapes)


def make_card(method: Method, network: Architecture, client: int | None, **more: Any) -> dict:
    """A client's origin as JSON values; `client` None: a newcomer."""
    names = {"method": method.name, "title": type(method).title, "architecture": network.name}
    return {"format": CARD_FORMAT, **names, "client": client, **more}


def softmax(logits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Probabilities from scores, by name."""
    return {name: np.asarray(jax.nn.softmax(rows, axis=-1)) for name, rows in logits.items()}


@partial(jax.jit, static_argnums=(1, 2))
def _classify(
    method: Method, architecture: Architecture, form: str, client: Client, server: Server, images
):
    """Scores of `[BLOCKS · 64, …]` samples, as many at a time as an evaluation takes."""
    del form  # which kernels are traced: another one is another program

    def block(images: jax.Array) -> dict[str, jax.Array]:
        pixels = normalise(images, method.training.mean, method.training.std)
        return predict(method, architecture, client, server, pixels)

    found = jax.lax.map(block, images.reshape(BLOCKS, EVALUATION_BATCH, *images.shape[1:]))
    return jax.tree.map(lambda leaf: leaf.reshape(-1, leaf.shape[-1]), found)
