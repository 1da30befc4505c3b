"""pFedAFM as Algorithm 1 of the paper has it, and what the released code does instead."""

from functools import partial

import jax
import jax.numpy as jnp

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
    aggregation_shares,
    cross_entropy,
    model_of,
    network_step,
    new_model,
    sgd,
    weighted_sum,
    zeros,
)


def init_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """A local model F_k = (extractor, header) and a mix vector of ones."""
    size = 1 if config.pfedafm.mix_scalar else architecture.feature_size
    start = 1.0 if config.pfedafm.mix_fixed is None else config.pfedafm.mix_fixed
    return {**new_model(architecture, key), "mix": jnp.full(size, start, jnp.float32), "visited": False}


def init_server(reference: Reference, key: jax.Array) -> Server:
    """The shared extractor G."""
    return {"shared_extractor": jax.jit(reference.shared.init_extractor)(key)}


def mixed_features(mix: jax.Array, shared: jax.Array, local: jax.Array) -> jax.Array:
    """Eq. 3."""
    return shared * (1.0 - mix)[None, :] + local * mix[None, :]


def predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
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


def run_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    """Algorithm 1, one pass of its outer loop."""
    config, own, relay = reference.config, reference.config.pfedafm, reference.relay
    received = reference.server["shared_extractor"]
    sizes = reference.sizes(participants)
    uploads, reports = [], []
    for k, size in zip(participants, sizes, strict=True):
        client, architecture = reference.clients[k], reference.architecture(k)
        rows, key = reference.partition.train[k], client_key(reference.key, round_index, k)
        seen = size * config.local_epochs
        if own.mix_relay and client["visited"]:
            client["mix"] = relay["mix"]  # released code: whatever the last client left
        client["visited"] = True

        # Phase 1: freeze the shared extractor, train the local model and the mix vector.
        params = {"model": model_of(client), "mix": client["mix"]}
        frozen = {"shared_extractor": received}
        if own.training == "end_to_end":
            params, frozen = {**params, **frozen}, {}
        velocity = zeros(params)
        if own.leak_momentum and "mix_velocity" in relay:
            velocity["mix"] = relay["mix_velocity"]
        total = 0.0
        for images, labels in reference.batches(rows, jax.random.fold_in(key, 1)):
            params, velocity, loss = mixed_step(
                config, architecture, reference.shared, params, velocity, frozen, images, labels
            )
            total += float(loss) * len(labels)
        client.update(**params["model"], mix=params["mix"])
        relay["mix"], relay["mix_velocity"] = params["mix"], velocity["mix"]
        view = {"shared_extractor": {**frozen, **params}["shared_extractor"]}
        report = {"loss": total / seen, "mix_mean": float(jnp.mean(params["mix"])), **reference.accuracy(k, view)}

        # Phase 2: freeze the header, train the shared extractor.
        if own.training == "end_to_end":
            trained = params["shared_extractor"]
        else:
            trained, total = received, 0.0
            moved = relay["shared_velocity"] if own.leak_momentum and "shared_velocity" in relay else zeros(trained)
            for images, labels in reference.batches(rows, jax.random.fold_in(key, 2)):
                trained, moved, loss = shared_step(
                    config, reference.shared, trained, moved, client["header"], images, labels
                )
                total += float(loss) * len(labels)
            relay["shared_velocity"] = moved
            report["shared_loss"] = total / seen
        uploads.append(trained)
        reports.append(report)

    reference.server = {"shared_extractor": weighted_sum(aggregation_shares(config, sizes), uploads)}  # Eq. 11
    return reports


ALGORITHMS["pfedafm"] = Algorithm(init_client, init_server, run_round, predict)
