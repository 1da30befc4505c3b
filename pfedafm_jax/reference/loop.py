"""The plain loop: rounds, clients, epochs and batches, and what every method in it needs.

A method is four plain functions, entered in `ALGORITHMS` by the file that holds it.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config, bad, known
from pfedafm_jax.data import NORMALISATION, Dataset, Partition, augment, normalise
from pfedafm_jax.engine.federation import SERVER_KEY, START_KEY, draw_participants
from pfedafm_jax.methods import find_method
from pfedafm_jax.models import Architecture, describe
from pfedafm_jax.training import epoch_order

Tree = Any
Client = dict[str, Any]
Server = dict[str, Any]
Report = dict[str, float]


class Algorithm(NamedTuple):
    """A method as four plain functions."""

    init_client: Callable[[Config, Architecture, jax.Array], Client]
    init_server: Callable[["Reference", jax.Array], Server]
    run_round: Callable[["Reference", int, list[int]], list[Report]]  # numbers of each participant
    predict: Callable[[Architecture, Architecture, Client, Server, jax.Array], dict[str, jax.Array]]


ALGORITHMS: dict[str, Algorithm] = {}


class Reference:
    """All clients in a list, the server in a dictionary; `run_round` moves them on by one round."""

    def __init__(self, config: Config, dataset: Dataset, partition: Partition):
        if config.method not in ALGORITHMS:
            raise bad("method", config.method, f"{known(config.method, ALGORITHMS)}, for the plain loop")
        self.config, self.dataset, self.partition = config, dataset, partition
        self.algorithm = ALGORITHMS[config.method]
        own = (dataset.mean, dataset.std)
        self.mean, self.std = NORMALISATION["imagenet"] if config.normalisation == "imagenet" else own
        self.key = jax.random.key(config.seed)
        names = (config.shared_extractor,) if find_method(config.method).one_network else config.architectures
        self.architectures = [self._plain(name) for name in names]
        self.shared = self._plain(config.shared_extractor)
        self.server = self.algorithm.init_server(self, jax.random.fold_in(self.key, SERVER_KEY))
        self.relay: dict[str, Tree] = {}  # released code: what one client leaves for the next
        self.behind_rows: dict[int, dict[int, tuple[int, np.ndarray]]] = {}  # FD: class → who made its row, with what
        start_key = jax.random.fold_in(self.key, START_KEY)
        groups = len(self.architectures)
        numbers = [k % groups if config.same_start else groups + k for k in range(config.num_clients)]
        starts = {}
        for k, number in enumerate(numbers):
            if number not in starts:
                key = jax.random.fold_in(start_key, number)
                starts[number] = self.algorithm.init_client(config, self.architecture(k), key)
        self.clients: list[Client] = [dict(starts[number]) for number in numbers]

    def _plain(self, name: str) -> Architecture:
        config = self.config
        return describe(
            name, self.dataset.num_classes, self.dataset.image_shape, config.feature_size, config.initialisation
        )

    def architecture(self, client: int) -> Architecture:
        """Client k has architecture number k mod their count."""
        return self.architectures[client % len(self.architectures)]

    def sizes(self, clients: Sequence[int]) -> list[int]:
        """n_k of these clients."""
        return [len(self.partition.train[k]) for k in clients]

    def batches(
        self, rows: np.ndarray, key: jax.Array, epochs: int | None = None
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Images and labels of every batch of every local epoch; the last batch of an epoch may be short."""
        config = self.config
        for epoch in range(config.local_epochs if epochs is None else epochs):
            epoch_key = jax.random.fold_in(key, epoch)
            for number, batch in enumerate(shuffled(rows, epoch_key, config.batch_size)):
                images = prepared(
                    config, self.mean, self.std, jax.random.fold_in(epoch_key, number), self.dataset.images[batch]
                )
                yield images, jnp.asarray(self.dataset.labels[batch])

    def clean(self, rows: np.ndarray) -> jax.Array:
        """These images, normalised and not augmented."""
        return normalised(self.mean, self.std, self.dataset.images[rows])

    def run_round(
        self, round_index: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """One round; returns by name one number for each participant, under the names the engine reports."""
        config = self.config
        if participants is None:
            participants = draw_participants(config.seed, round_index, config.num_clients, config.num_participants)
        reports = self.algorithm.run_round(self, round_index, [int(client) for client in participants])
        return {name: np.array([report[name] for report in reports]) for name in reports[0]}

    def accuracy(self, client: int, server: Server | None = None) -> dict[str, float]:
        """Shares of a client's test images that are classified rightly, as clients and (unless given) server are now."""
        rows = self.partition.test[client]
        states = arrays(self.clients[client]), arrays(server or self.server)
        predict = jax.jit(self.algorithm.predict, static_argnums=(0, 1))
        scores = predict(self.architecture(client), self.shared, *states, self.clean(rows))
        right = {
            name: np.argmax(np.asarray(logits), axis=-1) == self.dataset.labels[rows] for name, logits in scores.items()
        }
        return {f"accuracy/{name}": float(np.mean(hits)) for name, hits in right.items()}

    def evaluate(self) -> dict[str, np.ndarray]:
        """Accuracy of all clients: name → `[clients]`."""
        scores = [self.accuracy(client) for client in range(self.config.num_clients)]
        return {name: np.array([score[name] for score in scores]) for name in scores[0]}


def arrays(state: dict[str, Any]) -> dict[str, Tree]:
    """What models are made of; plain numbers are book-keeping."""
    return {name: part for name, part in state.items() if not isinstance(part, int)}


# ---------------------------------------------------------------------------------------------- data

ordered = jax.jit(epoch_order, static_argnums=2)
normalised = jax.jit(lambda mean, std, images: normalise(images, mean, std), static_argnums=(0, 1))


def shuffled(rows: np.ndarray, epoch_key: jax.Array, batch_size: int) -> Iterator[np.ndarray]:
    """Rows of each batch of one epoch."""
    order = np.asarray(ordered(jax.random.fold_in(epoch_key, 2**20), np.int32(len(rows)), len(rows)))
    for start in range(0, len(rows), batch_size):
        yield rows[order[start : start + batch_size]]


@partial(jax.jit, static_argnums=(0, 1, 2))
def prepared(config: Config, mean: tuple, std: tuple, key: jax.Array, images: jax.Array) -> jax.Array:
    """Training images, normalised and augmented."""
    return augment(key, normalise(images, mean, std), flip=config.flip, erase=config.erase, crop=config.crop)


# ---------------------------------------------------------------------------------------------- models


@partial(jax.jit, static_argnums=0)
def new_model(architecture: Architecture, key: jax.Array) -> dict[str, Tree]:
    """A client's own model F_k."""
    extractor_key, header_key = jax.random.split(key)
    return {
        "local_extractor": architecture.init_extractor(extractor_key),
        "header": architecture.init_header(header_key),
    }


def model_of(client: Client) -> dict[str, Tree]:
    """F_k among all that a client keeps."""
    return {part: client[part] for part in ("local_extractor", "header")}


def scores_of(architecture: Architecture, model: dict[str, Tree], images: jax.Array) -> jax.Array:
    """Logits of F_k."""
    return architecture.classify(model["header"], architecture.extract(model["local_extractor"], images))


# ---------------------------------------------------------------------------------------------- losses and steps


def log_softmax(logits: jax.Array) -> jax.Array:
    return logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label], mean over the batch."""
    return -jnp.mean(jnp.take_along_axis(log_softmax(logits), labels[:, None], axis=-1))


def clipped(gradient: Tree, norm: float) -> Tree:
    """The gradient of one network, shortened to this global norm where it is longer."""
    length = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))  # pyright: ignore
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, norm / jnp.maximum(length, 1e-30)), gradient)


def sgd(params: Tree, gradient: Tree, velocity: Tree, learning_rate: float, momentum: float, decay: float) -> tuple:
    """One step of SGD as PyTorch has it: decay joins the gradient, momentum gathers it. Returns (params, velocity)."""
    gradient = jax.tree.map(lambda g, p: g + decay * p, gradient, params)
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity), velocity


def zeros(params: Tree) -> Tree:
    """A fresh momentum."""
    return jax.tree.map(jnp.zeros_like, params)


def network_step(
    config: Config, params: Tree, gradient: Tree, velocity: Tree, learning_rate: float | None = None
) -> tuple[Tree, Tree]:
    """One step of a network: clip, then SGD with the run's settings."""
    gradient = clipped(gradient, config.clip_norm)
    learning_rate = config.rate if learning_rate is None else learning_rate
    return sgd(params, gradient, velocity, learning_rate, config.momentum, config.weight_decay)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def step(gradient, config, architecture, shared, params, velocity, received, images, labels, rates):
    """One batch: loss and gradients by `gradient`, then every network of `params` steps by its own."""
    value, slope = gradient(config, architecture, shared, params, received, images, labels)
    new, moved = {}, {}
    for name in params:
        new[name], moved[name] = network_step(config, params[name], slope[name], velocity[name], rates.get(name))
    return new, moved, value


def train(
    reference: Reference,
    client: int,
    rows: np.ndarray,
    key: jax.Array,
    params: dict[str, Tree],
    gradient: Callable,
    received: Tree = None,
    rates: dict[str, float] | None = None,
    epochs: int | None = None,
) -> tuple[dict[str, Tree], float]:
    """E (or `epochs`) epochs over `rows` with momentum fresh at the start; returns the trained networks, the mean loss.

    `gradient(config, architecture, shared, params, received, images, labels)` gives (loss, gradients) of a batch;
    `rates` holds learning rates of networks that have their own.
    """
    fixed = gradient, reference.config, reference.architecture(client), reference.shared
    velocity, total, seen = zeros(params), 0.0, 0
    for images, labels in reference.batches(rows, key, epochs):
        params, velocity, loss = step(*fixed, params, velocity, received, images, labels, rates or {})
        total += float(loss) * len(labels)
        seen += len(labels)
    return params, total / seen


# ---------------------------------------------------------------------------------------------- the server


def weighted_sum(weights: Sequence[float], trees: Sequence[Tree]) -> Tree:
    """Σ weight · tree."""
    return jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *trees)


def aggregation_shares(config: Config, sizes: Sequence[int]) -> list[float]:
    """n_k / n; or all equal; or the last participant alone, as in the released code."""
    if config.aggregation == "last":
        return [0.0] * (len(sizes) - 1) + [1.0]
    if config.aggregation == "uniform":
        return [1.0 / len(sizes)] * len(sizes)
    return [size / sum(sizes) for size in sizes]
