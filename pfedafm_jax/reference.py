"""The method as the paper writes it down: plain loops over rounds, clients, epochs and batches.

Slow and obvious: one client after the other, `lax.conv` networks, losses and SGD by hand, the last batch at its true
size, the average as a sum. The engine is tested against it and timed against it. Parameters, keys and the order of
samples are those of the engine, so both compute the same numbers up to rounding.

Only `pfedafm` is here. To add a method, write its four functions and enter them in `ALGORITHMS`.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config, bad, known
from pfedafm_jax.data import NORMALISATION, Dataset, Partition, augment, normalise
from pfedafm_jax.engine.federation import SERVER_KEY, START_KEY, draw_participants
from pfedafm_jax.engine.program import client_key
from pfedafm_jax.models import Architecture, describe
from pfedafm_jax.training import epoch_order

Tree = Any
Client = dict[str, Any]


class Algorithm(NamedTuple):
    """A method as four plain functions."""

    init_client: Callable[[Config, Architecture, jax.Array], Client]
    init_server: Callable[[Config, Architecture, jax.Array], dict[str, Tree]]
    run_round: Callable[["Reference", int, list[int]], list[dict[str, Any]]]  # numbers of each participant
    predict: Callable[[Architecture, Architecture, Client, dict[str, Tree], jax.Array], dict[str, jax.Array]]


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
        self.architectures = [self._plain(name) for name in config.architectures]
        self.shared = self._plain(config.shared_extractor)
        self.server = self.algorithm.init_server(config, self.shared, jax.random.fold_in(self.key, SERVER_KEY))
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
        """The architecture with `lax.conv` instead of the fused layers, where it has them."""
        config = self.config
        found = describe(
            name, self.dataset.num_classes, self.dataset.image_shape, config.feature_size, config.initialisation
        )
        if "fused" not in found.extractor.__dataclass_fields__:
            return found
        return dataclasses.replace(found, extractor=found.extractor.clone(fused=False))  # pyright: ignore

    def architecture(self, client: int) -> Architecture:
        """Client k has architecture number k mod their count."""
        return self.architectures[client % len(self.architectures)]

    def batches(self, client: int, key: jax.Array) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Images and labels of every batch of every local epoch; the last batch of an epoch may be short."""
        config, rows = self.config, self.partition.train[client]
        for epoch in range(config.local_epochs):
            epoch_key = jax.random.fold_in(key, epoch)
            order = ordered(jax.random.fold_in(epoch_key, 2**20), np.int32(len(rows)), len(rows))
            order = np.asarray(order)
            for number, start in enumerate(range(0, len(rows), config.batch_size)):
                batch = rows[order[start : start + config.batch_size]]
                images = prepared(
                    config, self.mean, self.std, jax.random.fold_in(epoch_key, number), self.dataset.images[batch]
                )
                yield images, jnp.asarray(self.dataset.labels[batch])

    def run_round(
        self, round_index: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """One round; returns by name one number for each participant, under the names the engine reports."""
        config = self.config
        if participants is None:
            participants = draw_participants(config.seed, round_index, config.num_clients, config.num_participants)
        reports = self.algorithm.run_round(self, round_index, [int(client) for client in participants])
        return {name: np.array([report[name] for report in reports]) for name in reports[0]}

    def accuracy(self, client: int, server: dict[str, Tree] | None = None) -> dict[str, float]:
        """Shares of a client's test images that are classified rightly, as clients and (unless given) server are now."""
        rows = self.partition.test[client]
        images = jax.jit(normalise, static_argnums=(1, 2))(self.dataset.images[rows], self.mean, self.std)
        state = {name: part for name, part in self.clients[client].items() if name != "visited"}
        predict = jax.jit(self.algorithm.predict, static_argnums=(0, 1))
        scores = predict(self.architecture(client), self.shared, state, server or self.server, images)
        right = {
            name: np.argmax(np.asarray(logits), axis=-1) == self.dataset.labels[rows] for name, logits in scores.items()
        }
        return {f"accuracy/{name}": float(np.mean(hits)) for name, hits in right.items()}

    def evaluate(self) -> dict[str, np.ndarray]:
        """Accuracy of all clients: name → `[clients]`."""
        scores = [self.accuracy(client) for client in range(self.config.num_clients)]
        return {name: np.array([score[name] for score in scores]) for name in scores[0]}


# ---------------------------------------------------------------------------------------------- for all methods


ordered = jax.jit(epoch_order, static_argnums=2)


@partial(jax.jit, static_argnums=(0, 1, 2))
def prepared(config: Config, mean: tuple, std: tuple, key: jax.Array, images: jax.Array) -> jax.Array:
    """Training images, normalised and augmented."""
    return augment(key, normalise(images, mean, std), flip=config.flip, erase=config.erase, crop=config.crop)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """-log softmax(logits)[label], mean over the batch."""
    log_probabilities = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1))


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


def network_step(config: Config, params: Tree, gradient: Tree, velocity: Tree) -> tuple[Tree, Tree]:
    """One step of a network: clip, then SGD with the run's settings."""
    gradient = clipped(gradient, config.clip_norm)
    return sgd(params, gradient, velocity, config.learning_rate, config.momentum, config.weight_decay)


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


# ---------------------------------------------------------------------------------------------- pFedAFM


def pfedafm_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A local model F_k = (extractor, header) and a mix vector of ones."""
    extractor_key, header_key = jax.random.split(key)
    size = 1 if config.pfedafm.mix_scalar else architecture.feature_size
    start = 1.0 if config.pfedafm.mix_fixed is None else config.pfedafm.mix_fixed
    return {
        "local_extractor": jax.jit(architecture.init_extractor)(extractor_key),
        "header": jax.jit(architecture.init_header)(header_key),
        "mix": jnp.full(size, start, jnp.float32),
        "visited": False,
    }


def pfedafm_server(config: Config, shared: Architecture, key: jax.Array) -> dict[str, Tree]:
    """The shared extractor G."""
    return {"shared_extractor": jax.jit(shared.init_extractor)(key)}


def mixed_features(mix: jax.Array, shared: jax.Array, local: jax.Array) -> jax.Array:
    """Eq. 3."""
    return shared * (1.0 - mix)[None, :] + local * mix[None, :]


def pfedafm_predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    """The mixed model, and the header on either extractor alone."""
    small = shared.extract(server["shared_extractor"], images)
    large = architecture.extract(client["local_extractor"], images)
    features = {"mixed": mixed_features(client["mix"], small, large), "small": small, "large": large}
    return {name: architecture.classify(client["header"], value) for name, value in features.items()}


@partial(jax.jit, static_argnums=(0, 1, 2))
def mixed_step(
    config: Config, architecture: Architecture, shared: Architecture, params, velocity, frozen, images, labels
):
    """One batch on the mixed features; trains `model` and `mix`, and the shared extractor if it is among `params`."""
    own = config.pfedafm

    def loss(params):
        small = shared.extract({**frozen, **params}["shared_extractor"], images)  # Eq. 2
        large = architecture.extract(params["model"]["local_extractor"], images)
        mixed = mixed_features(params["mix"], small, large)
        return cross_entropy(architecture.classify(params["model"]["header"], mixed), labels)  # Eqs. 4, 5

    value, gradient = jax.value_and_grad(loss)(params)
    new, moved = dict(params), dict(velocity)
    for name in params.keys() - {"mix"}:  # Eq. 6, with a norm for each network
        new[name], moved[name] = network_step(config, params[name], gradient[name], velocity[name])
    if own.mix_fixed is None:
        new["mix"], moved["mix"] = sgd(
            params["mix"],
            gradient["mix"],
            velocity["mix"],
            own.mix_learning_rate,
            config.momentum,
            own.mix_weight_decay,
        )
    if own.mix_project:
        new["mix"] = jnp.clip(new["mix"], 0.0, 1.0)
    return new, moved, value


@partial(jax.jit, static_argnums=(0, 1))
def shared_step(config: Config, shared: Architecture, params, velocity, header, images, labels):
    """One batch of phase 2: the shared extractor under the client's frozen header."""

    def loss(params):  # Eqs. 7 to 9
        return cross_entropy(shared.classify(header, shared.extract(params, images)), labels)

    value, gradient = jax.value_and_grad(loss)(params)
    return *network_step(config, params, gradient, velocity), value  # Eq. 10


def pfedafm_round(reference: Reference, round_index: int, participants: list[int]) -> list[dict[str, Any]]:
    """Algorithm 1, one pass of its outer loop."""
    config, own, server = reference.config, reference.config.pfedafm, reference.server
    received = server["shared_extractor"]
    sizes = [len(reference.partition.train[k]) for k in participants]
    uploads, reports = [], []
    for k, size in zip(participants, sizes, strict=True):
        client, architecture = reference.clients[k], reference.architecture(k)
        key = client_key(reference.key, round_index, k)
        seen = size * config.local_epochs
        if own.mix_relay and client["visited"]:
            client["mix"] = server["mix"]  # released code: whatever the last client left
        client["visited"] = True

        # Phase 1: freeze the shared extractor, train the local model and the mix vector.
        params = {"model": {part: client[part] for part in ("local_extractor", "header")}, "mix": client["mix"]}
        frozen = {"shared_extractor": received}
        if own.training == "end_to_end":
            params, frozen = {**params, **frozen}, {}
        velocity = zeros(params)
        if own.leak_momentum and "mix_velocity" in server:
            velocity["mix"] = server["mix_velocity"]
        total = 0.0
        for images, labels in reference.batches(k, jax.random.fold_in(key, 1)):
            params, velocity, loss = mixed_step(
                config, architecture, reference.shared, params, velocity, frozen, images, labels
            )
            total += float(loss) * len(labels)
        client.update(**params["model"], mix=params["mix"])
        server["mix"], server["mix_velocity"] = params["mix"], velocity["mix"]
        view = {**server, "shared_extractor": {**frozen, **params}["shared_extractor"]}
        report = {"loss": total / seen, "mix_mean": float(jnp.mean(params["mix"])), **reference.accuracy(k, view)}

        # Phase 2: freeze the header, train the shared extractor.
        if own.training == "end_to_end":
            trained = params["shared_extractor"]
        else:
            trained, total = received, 0.0
            moved = server["shared_velocity"] if own.leak_momentum and "shared_velocity" in server else zeros(trained)
            for images, labels in reference.batches(k, jax.random.fold_in(key, 2)):
                trained, moved, loss = shared_step(
                    config, reference.shared, trained, moved, client["header"], images, labels
                )
                total += float(loss) * len(labels)
            server["shared_velocity"] = moved
            report["shared_loss"] = total / seen
        uploads.append(trained)
        reports.append(report)

    server["shared_extractor"] = weighted_sum(aggregation_shares(config, sizes), uploads)  # Eq. 11
    return reports


ALGORITHMS: dict[str, Algorithm] = {
    "pfedafm": Algorithm(pfedafm_client, pfedafm_server, pfedafm_round, pfedafm_predict)
}
