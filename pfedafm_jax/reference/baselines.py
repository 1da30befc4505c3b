"""The methods that exchange nothing, layers, or one row for each class: Standalone, LG-FedAvg, FD, FedProto."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.engine.program import client_key
from pfedafm_jax.models import Architecture
from pfedafm_jax.reference.loop import (
    ALGORITHMS,
    Algorithm,
    Client,
    Reference,
    Report,
    Server,
    Tree,
    aggregation_shares,
    cross_entropy,
    log_softmax,
    model_of,
    new_model,
    scores_of,
    train,
    weighted_sum,
)


def init_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A private model."""
    return dict(new_model(architecture, key))


def own_gradient(config, architecture, shared, params, received, images, labels):
    """CE(F_k(x), y)."""

    def loss(params):
        return cross_entropy(scores_of(architecture, params["model"], images), labels)

    return jax.value_and_grad(loss)(params)


# ---------------------------------------------------------------------------------------------- Standalone


def standalone_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """Participants train by themselves."""
    reports = []
    for k in participants:
        client, rows = reference.clients[k], reference.partition.train[k]
        key = jax.random.fold_in(client_key(reference.key, round_index, k), 1)
        params, loss = train(reference, k, rows, key, {"model": model_of(client)}, own_gradient)
        client.update(params["model"])
        reports.append({"loss": loss, **reference.accuracy(k)})
    return reports


def private_predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    return {"private": scores_of(architecture, client, images)}


# ---------------------------------------------------------------------------------------------- LG-FedAvg


def layer(model: dict[str, Tree], name: str) -> Tree:
    """A layer by name: the header, or one of the extractor."""
    return model["header"] if name == "header" else model["local_extractor"][name]


def with_layers(model: dict[str, Tree], layers: dict[str, Tree]) -> dict[str, Tree]:
    """The model, these layers overwritten."""
    new = {"local_extractor": dict(model["local_extractor"]), "header": model["header"]}
    for name, value in layers.items():
        if name == "header":
            new["header"] = value
        else:
            new["local_extractor"][name] = value
    return new


def lg_fedavg_server(reference: Reference, key: jax.Array) -> Server:
    """Shared layers of a model like client 0's."""
    model = new_model(reference.architectures[0], key)
    return {name: layer(model, name) for name in reference.config.lg_fedavg.shared_layers}


def lg_fedavg_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """Overwrite the shared layers, train everything, upload them; the server averages."""
    uploads, reports = [], []
    for k in participants:
        client, rows = reference.clients[k], reference.partition.train[k]
        key = jax.random.fold_in(client_key(reference.key, round_index, k), 1)
        start = {"model": with_layers(model_of(client), reference.server)}
        params, loss = train(reference, k, rows, key, start, own_gradient)
        client.update(params["model"])
        uploads.append({name: layer(client, name) for name in reference.server})
        reports.append({"loss": loss, **reference.accuracy(k)})
    shares = aggregation_shares(reference.config, reference.sizes(participants))
    reference.server = weighted_sum(shares, uploads)
    return reports


def lg_fedavg_predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    """With the client's own layers, and with the received ones."""
    return {
        "own": scores_of(architecture, client, images),
        "aggregated": scores_of(architecture, with_layers(model_of(client), server), images),
    }


# ---------------------------------------------------------------------------------------------- one row for each class


@partial(jax.jit, static_argnums=(0, 1, 2))
def apply(function: Callable, config: Config, architecture: Architecture, model: dict[str, Tree], images: jax.Array):
    return function(config, architecture, model, images)


def class_rows(reference: Reference, client: int, function: Callable) -> dict[int, tuple[int, np.ndarray]]:
    """After training, one pass without augmentation: class → (n_{k,c}, mean of `function` over those images)."""
    config, rows = reference.config, reference.partition.train[client]
    model, values = model_of(reference.clients[client]), []
    for start in range(0, len(rows), config.batch_size):
        images = reference.clean(rows[start : start + config.batch_size])
        values.extend(np.asarray(apply(function, config, reference.architecture(client), model, images)))
    labels = reference.dataset.labels[rows]
    found = {}
    for c in np.unique(labels):
        mine = [value for value, label in zip(values, labels, strict=True) if label == c]
        found[int(c)] = len(mine), np.mean(mine, axis=0)
    return found


def next_rows(config: Config, old: jax.Array, uploads: list[dict[int, tuple[int, np.ndarray]]]) -> jax.Array:
    """Mean over the participants that have the class, by n_{k,c} or all alike; without one the old row stays."""
    if config.aggregation == "last":
        uploads = uploads[-1:]
    table = np.array(old)
    for c in range(len(table)):
        owners = [upload[c] for upload in uploads if c in upload]
        if owners:
            weights = [count if config.aggregation == "samples" else 1 for count, _ in owners]
            table[c] = sum(w * row for w, (_, row) in zip(weights, owners, strict=True)) / sum(weights)
    return jnp.asarray(table)


def without(reference: Reference, client: int, rows: jax.Array, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The rows without one client's part in them; a row that nobody else is behind is unknown."""
    table, left = np.array(rows), np.array(known)
    for c, owners in reference.behind_rows.items():
        others = [upload for k, upload in owners.items() if k != client]
        table[c] = next_rows(reference.config, rows[c : c + 1], [{0: upload} for upload in others])[0]
        left[c] = 1.0 if others else 0.0
    return jnp.asarray(table), jnp.asarray(left)


def class_round(
    reference: Reference, round_index: int, participants: list[int], gradient: Callable, function: Callable
) -> list[Report]:
    """Train with the rows received, then send one's own; the server's tables are (rows, which are known)."""
    rows_name, known_name = reference.server
    leave_one_out = reference.config.method == "fd" and reference.config.fd.leave_one_out
    received = reference.server[rows_name], reference.server[known_name]
    uploads, reports = [], []
    for k in participants:
        client, rows = reference.clients[k], reference.partition.train[k]
        key = jax.random.fold_in(client_key(reference.key, round_index, k), 1)
        sent = without(reference, k, *received) if leave_one_out else received
        params, loss = train(reference, k, rows, key, {"model": model_of(client)}, gradient, sent)
        client.update(params["model"])
        uploads.append(class_rows(reference, k, function))
        reports.append({"loss": loss, **reference.accuracy(k)})
    known, counted = np.array(received[1]), list(zip(participants, uploads, strict=True))
    counted = counted[-1:] if reference.config.aggregation == "last" else counted
    for _, upload in counted:
        known[list(upload)] = 1
        reference.behind_rows |= {c: {k: found[c] for k, found in counted if c in found} for c in upload}
    table = next_rows(reference.config, received[0], uploads)
    reference.server = {rows_name: table, known_name: jnp.asarray(known)}
    return reports


# ---------------------------------------------------------------------------------------------- FD


def fd_server(reference: Reference, key: jax.Array) -> Server:
    classes = reference.dataset.num_classes
    return {"class_scores": jnp.zeros((classes, classes)), "class_known": jnp.zeros(classes)}


def fd_gradient(config, architecture, shared, params, received, images, labels):
    """CE(z, y) + γ Σ_i m_i CE(z_i, q_{y_i}) / B, q a probability vector, m_i = 0 without a row of that class."""
    own, (table, known) = config.fd, received

    def loss(params):
        logits = scores_of(architecture, params["model"], images)
        rows = table[labels]
        targets = rows if own.outputs == "softmax" else jnp.exp(log_softmax(rows / own.temperature))
        each = -jnp.sum(targets * log_softmax(logits), axis=-1)
        return cross_entropy(logits, labels) + own.gamma * jnp.sum(known[labels] * each) / len(labels)

    return jax.value_and_grad(loss)(params)


def fd_outputs(config: Config, architecture: Architecture, model: dict[str, Tree], images: jax.Array) -> jax.Array:
    logits = scores_of(architecture, model, images)
    return logits if config.fd.outputs == "logits" else jnp.exp(log_softmax(logits / config.fd.temperature))


def fd_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    return class_round(reference, round_index, participants, fd_gradient, fd_outputs)


# ---------------------------------------------------------------------------------------------- FedProto


def fedproto_server(reference: Reference, key: jax.Array) -> Server:
    classes = reference.dataset.num_classes
    return {
        "prototypes": jnp.zeros((classes, reference.config.feature_size)),
        "prototype_known": jnp.zeros(classes),
    }


def fedproto_gradient(config, architecture, shared, params, received, images, labels):
    """CE(F(x), y) + λ · mean over batch and features of (r - P_y)², 0 for a sample without a prototype."""
    prototypes, known = received

    def loss(params):
        features = architecture.extract(params["model"]["local_extractor"], images)
        logits = architecture.classify(params["model"]["header"], features)
        apart = known[labels][:, None] * (features - prototypes[labels]) ** 2
        return cross_entropy(logits, labels) + config.fedproto.lambda_mse * jnp.mean(apart)

    return jax.value_and_grad(loss)(params)


def fedproto_features(config: Config, architecture: Architecture, model: dict[str, Tree], images: jax.Array):
    return architecture.extract(model["local_extractor"], images)


def fedproto_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    return class_round(reference, round_index, participants, fedproto_gradient, fedproto_features)


def fedproto_predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    """The header, and the nearest of the known prototypes; as long as there is none, the header again."""
    features = architecture.extract(client["local_extractor"], images)
    header = architecture.classify(client["header"], features)
    distances = jnp.mean((features[:, None, :] - server["prototypes"][None, :, :]) ** 2, axis=-1)
    known = server["prototype_known"] > 0
    nearest = jnp.where(known[None, :], -distances, -jnp.inf)
    return {"header": header, "prototype": jnp.where(jnp.any(known), nearest, header)}


ALGORITHMS["standalone"] = Algorithm(init_client, lambda reference, key: {}, standalone_round, private_predict)
ALGORITHMS["lg_fedavg"] = Algorithm(init_client, lg_fedavg_server, lg_fedavg_round, lg_fedavg_predict)
ALGORITHMS["fd"] = Algorithm(init_client, fd_server, fd_round, private_predict)
ALGORITHMS["fedproto"] = Algorithm(init_client, fedproto_server, fedproto_round, fedproto_predict)
