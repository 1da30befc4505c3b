"""The methods with a private and a shared model that teach each other: FML, FedKD, FedAPEN."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.config import Config
from pfedafm_jax.engine.program import client_key
from pfedafm_jax.methods.fedapen import SPLIT_KEY
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
    ordered,
    scores_of,
    sgd,
    shuffled,
    train,
    weighted_sum,
)


def init_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A private model."""
    return dict(new_model(architecture, key))


def init_server(reference: Reference, key: jax.Array) -> Server:
    """A shared model with its header."""
    model = new_model(reference.shared, key)
    return {"shared_model": {"extractor": model["local_extractor"], "header": model["header"]}}


def shared_scores(shared: Architecture, model: dict[str, Tree], images: jax.Array) -> jax.Array:
    return shared.classify(model["header"], shared.extract(model["extractor"], images))


def divergence(target: jax.Array, logits: jax.Array, mean: str) -> jax.Array:
    """KL(softmax target ‖ softmax logits): a sum over classes, averaged over the batch, or over all its entries."""
    terms = jnp.exp(log_softmax(target)) * (log_softmax(target) - log_softmax(logits))
    return jnp.mean(terms) if mean == "element_mean" else jnp.sum(terms) / len(logits)


def own_losses(loss_private, loss_shared, params):
    """The sum of two losses `(model, shared model) -> value`, and of each the gradient for its own model alone."""
    model, shared_model = params["model"], params["shared_model"]
    value_private, slope_private = jax.value_and_grad(loss_private, argnums=0)(model, shared_model)
    value_shared, slope_shared = jax.value_and_grad(loss_shared, argnums=1)(model, shared_model)
    return value_private + value_shared, {"model": slope_private, "shared_model": slope_shared}


def predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    return {
        "private": scores_of(architecture, client, images),
        "shared": shared_scores(shared, server["shared_model"], images),
    }


# ---------------------------------------------------------------------------------------------- FML


def fml_gradient(config, architecture, shared, params, received, images, labels):
    """L_F = α CE + (1 - α) KL(G ‖ F), L_G = β CE + (1 - β) KL(F ‖ G); each model by its own, or both by the sum."""
    own = config.fml

    def loss_private(model, shared_model):
        mine, other = scores_of(architecture, model, images), shared_scores(shared, shared_model, images)
        return own.alpha * cross_entropy(mine, labels) + (1 - own.alpha) * divergence(other, mine, own.kl)

    def loss_shared(model, shared_model):
        mine, other = shared_scores(shared, shared_model, images), scores_of(architecture, model, images)
        return own.beta * cross_entropy(mine, labels) + (1 - own.beta) * divergence(other, mine, own.kl)

    if own.detach_targets:
        return own_losses(loss_private, loss_shared, params)

    def both(params):
        models = params["model"], params["shared_model"]
        return loss_private(*models) + loss_shared(*models)

    return jax.value_and_grad(both)(params)


def fml_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """Private and shared model train side by side; the shared ones are averaged."""
    received, uploads, reports = reference.server["shared_model"], [], []
    for k in participants:
        client, rows = reference.clients[k], reference.partition.train[k]
        key = jax.random.fold_in(client_key(reference.key, round_index, k), 1)
        start = {"model": model_of(client), "shared_model": received}
        params, loss = train(reference, k, rows, key, start, fml_gradient)
        client.update(params["model"])
        uploads.append(params["shared_model"])
        reports.append({"loss": loss, **reference.accuracy(k)})
    shares = aggregation_shares(reference.config, reference.sizes(participants))
    reference.server = {"shared_model": weighted_sum(shares, uploads)}
    return reports


# ---------------------------------------------------------------------------------------------- FedKD


def fedkd_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A mentor, and W_h: a linear layer without bias, initialised like the others."""
    size = architecture.feature_size
    bound = np.sqrt((3.0 if config.initialisation == "flax" else 1.0) / size)
    projection = jax.random.uniform(jax.random.fold_in(key, 2), (size, size), minval=-bound, maxval=bound)
    return {**new_model(architecture, key), "projection": projection, "visited": False, "floats_received": 0}


def fedkd_server(reference: Reference, key: jax.Array) -> Server:
    """The mentee, and counts of what was broadcast."""
    return {**init_server(reference, key), "round": 0, "floats_last": 0, "floats_sent": 0}


def fedkd_gradient(config, architecture, shared, params, received, images, labels):
    """L_F + L_G over everything, with c = CE(F) + CE(G): CE(F) + CE(G) + (KL + KL + twice the hidden loss) / c."""
    own = config.fedkd
    target = lax.stop_gradient if own.detach_targets else (lambda value: value)

    def loss(params):
        model, shared_model = params["model"], params["shared_model"]
        r_f = architecture.extract(model["local_extractor"], images)
        r_g = shared.extract(shared_model["extractor"], images)
        z_f, z_g = architecture.classify(model["header"], r_f), shared.classify(shared_model["header"], r_g)
        projected = r_g @ params["projection"]
        c = jnp.maximum(cross_entropy(z_f, labels) + cross_entropy(z_g, labels), own.denominator_floor)
        c = lax.stop_gradient(c) if own.detach_denominator else c
        loss_f = cross_entropy(z_f, labels)
        loss_f += divergence(target(z_g), z_f, own.kl) / c + jnp.mean((r_f - target(projected)) ** 2) / c
        loss_g = cross_entropy(z_g, labels)
        loss_g += divergence(target(z_f), z_g, own.kl) / c + jnp.mean((target(r_f) - projected) ** 2) / c
        return loss_f + loss_g

    return jax.value_and_grad(loss)(params)


def coded(parameter: np.ndarray, energy: float) -> tuple[np.ndarray, int]:
    """A parameter after its way through the SVD, and the floats sent: U_r, S_r, V_r, or itself where that is less."""
    if parameter.ndim < 2:
        return parameter, parameter.size
    matrix = parameter.reshape(-1, parameter.shape[-1]).astype(np.float64)
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    held = np.cumsum(values**2)
    rank = next((r for r in range(1, len(held)) if held[r - 1] >= energy * held[-1]), len(held))
    floats = rank * (matrix.shape[0] + 1 + matrix.shape[1])
    if floats >= parameter.size:
        return parameter, parameter.size
    decoded = left[:, :rank] @ np.diag(values[:rank]) @ right[:rank]
    return decoded.reshape(parameter.shape).astype(parameter.dtype), floats


def transfer(config: Config, energy: float, old: Tree, new: Tree) -> tuple[Tree, int]:
    """`new` as the other side has it, that knows `old`, and the floats sent."""
    coding, total = config.fedkd.coding, 0
    old, new = jax.device_get((old, new))

    def one(before, after):
        nonlocal total
        if coding == "none":
            arrived, floats = after, after.size
        elif coding == "weight":
            arrived, floats = coded(after, energy)
        else:
            update, floats = coded(after - before, energy)
            arrived = before + update
        total += floats
        return jnp.asarray(arrived)

    return jax.tree.map(one, old, new), total


def fedkd_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """Mentor and mentee train; the mentees travel coded, are averaged, and the mean travels coded again."""
    config, own, server = reference.config, reference.config.fedkd, reference.server
    received, whole = server["shared_model"], reference.shared.params
    progress = min((1 + round_index) / config.rounds, 1.0)
    energy = own.t_start + (own.t_end - own.t_start) * progress
    rates = {} if own.mentee_learning_rate is None else {"shared_model": own.mentee_learning_rate}
    uploads, reports = [], []
    for k in participants:
        client, rows = reference.clients[k], reference.partition.train[k]
        missed = server["floats_sent"] - client["floats_received"] if own.coding == "update" else server["floats_last"]
        floats_down = whole if own.coding == "none" or not client["visited"] else min(missed, whole)
        client.update(visited=True, floats_received=server["floats_sent"])

        key = jax.random.fold_in(client_key(reference.key, round_index, k), 1)
        start = {"model": model_of(client), "shared_model": received, "projection": client["projection"]}
        params, loss = train(reference, k, rows, key, start, fedkd_gradient, rates=rates)
        client.update(**params["model"], projection=params["projection"])
        upload, floats_up = transfer(config, energy, received, params["shared_model"])
        uploads.append(upload)
        reports.append(
            {"loss": loss, "floats_up": floats_up, "floats_down": floats_down, **reference.accuracy(k, server)}
        )
    mean = weighted_sum(aggregation_shares(config, reference.sizes(participants)), uploads)
    shared_model, floats = transfer(config, energy, received, mean)
    counts = {"floats_last": floats, "floats_sent": server["floats_sent"] + floats}
    reference.server = {"shared_model": shared_model, "round": round_index + 1, **counts}
    return reports


# ---------------------------------------------------------------------------------------------- FedAPEN


def fedapen_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A private model, and its weight λ in the ensemble."""
    weight = jnp.float32(config.fedapen.lambda_start)
    return {**new_model(architecture, key), "ensemble_weight": weight, "visited": False}


def fedapen_gradient(config, architecture, shared, params, received, images, labels):
    """L_F = CE(F) + KL(G ‖ F) + CE(λ F + (1 - λ) G), L_G the same the other way round; λ is fixed."""
    weight = received

    def outputs(model, shared_model):
        return scores_of(architecture, model, images), shared_scores(shared, shared_model, images)

    def loss_private(model, shared_model):
        z_f, z_g = outputs(model, shared_model)
        together = cross_entropy(weight * z_f + (1 - weight) * z_g, labels)
        return cross_entropy(z_f, labels) + divergence(z_g, z_f, "batch_mean") + together

    def loss_shared(model, shared_model):
        z_f, z_g = outputs(model, shared_model)
        together = cross_entropy(weight * z_f + (1 - weight) * z_g, labels)
        return cross_entropy(z_g, labels) + divergence(z_f, z_g, "batch_mean") + together

    return own_losses(loss_private, loss_shared, params)


def split(reference: Reference, client: int) -> tuple[np.ndarray, np.ndarray]:
    """(adaptability set, rest) of a client's training rows: drawn once by seed and the client's first row."""
    rows, fraction = reference.partition.train[client], reference.config.fedapen.adaptability_fraction
    key = jax.random.fold_in(jax.random.fold_in(reference.key, SPLIT_KEY), rows[0])
    order = np.asarray(ordered(key, np.int32(len(rows)), len(rows)))
    count = min(max(round(fraction * len(rows)), 1), len(rows) - 1)
    return rows[order[:count]], rows[order[count:]]


@partial(jax.jit, static_argnums=(0, 1, 2))
def weight_step(config, architecture, shared, weight, client, server, images, labels):
    """One batch of learning λ: both models frozen, no momentum, no decay, then back into [0, 1]."""
    z_f, z_g = scores_of(architecture, client, images), shared_scores(shared, server["shared_model"], images)
    slope = jax.grad(lambda weight: cross_entropy(weight * z_f + (1 - weight) * z_g, labels))(weight)
    new, _ = sgd(weight, slope, 0.0 * weight, config.fedapen.lambda_learning_rate, 0.0, 0.0)
    return jnp.clip(new, 0.0, 1.0)


def learned_weight(reference: Reference, client: int, rows: np.ndarray, key: jax.Array) -> jax.Array:
    """λ after its epochs over the adaptability set."""
    config, state, server = reference.config, model_of(reference.clients[client]), reference.server
    fixed = config, reference.architecture(client), reference.shared
    weight = reference.clients[client]["ensemble_weight"]
    for epoch in range(config.fedapen.lambda_epochs):
        for batch in shuffled(rows, jax.random.fold_in(key, epoch), 64):
            labels = jnp.asarray(reference.dataset.labels[batch])
            weight = weight_step(*fixed, weight, state, server, reference.clean(batch), labels)
    return weight


def fedapen_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """On receipt of a new shared model learn λ (from the second visit on), then train both models with λ fixed."""
    received, uploads, reports = reference.server["shared_model"], [], []
    for k in participants:
        client, key = reference.clients[k], client_key(reference.key, round_index, k)
        apart, rest = split(reference, k)
        if client["visited"]:
            client["ensemble_weight"] = learned_weight(reference, k, apart, jax.random.fold_in(key, 2))
        client["visited"] = True
        weight = client["ensemble_weight"]
        start = {"model": model_of(client), "shared_model": received}
        params, loss = train(reference, k, rest, jax.random.fold_in(key, 1), start, fedapen_gradient, weight)
        client.update(params["model"])
        uploads.append(params["shared_model"])
        view = {"shared_model": params["shared_model"]}  # before the average, a client has the one it trained
        reports.append({"loss": loss, "ensemble_weight": float(weight), **reference.accuracy(k, view)})
    shares = aggregation_shares(reference.config, reference.sizes(participants))
    reference.server = {"shared_model": weighted_sum(shares, uploads)}
    return reports


def fedapen_predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    """The ensemble, each model alone, and both at equal weight."""
    z_f, z_g = scores_of(architecture, client, images), shared_scores(shared, server["shared_model"], images)
    weight = client["ensemble_weight"]
    return {
        "ensemble": weight * z_f + (1 - weight) * z_g,
        "private": z_f,
        "shared": z_g,
        "equal": 0.5 * z_f + 0.5 * z_g,
    }


ALGORITHMS["fml"] = Algorithm(init_client, init_server, fml_round, predict)
ALGORITHMS["fedkd"] = Algorithm(fedkd_client, fedkd_server, fedkd_round, predict)
ALGORITHMS["fedapen"] = Algorithm(fedapen_client, init_server, fedapen_round, fedapen_predict)
