"""The methods with one extractor for all and a private header each: FedPer, FedRep."""

import jax

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
    new_model,
    train,
    weighted_sum,
)


def init_client(config: Config, architecture: Architecture, key: jax.Array) -> Client:
    """The header of a model; headers are alike in all architectures."""
    return {"header": new_model(architecture, key)["header"]}


def init_server(reference: Reference, key: jax.Array) -> Server:
    """The extractor that all share."""
    return {"shared_extractor": jax.jit(reference.shared.init_extractor)(key)}


def predict(architecture, shared, client, server, images) -> dict[str, jax.Array]:
    return {"personal": shared.classify(client["header"], shared.extract(server["shared_extractor"], images))}


def personal_round(reference: Reference, round_index: int, participants: list[int], local_work) -> list[Report]:
    """`local_work(client, rows, key)` gives extractor, header and report of one participant; extractors are averaged."""
    uploads, reports = [], []
    for k in participants:
        key = client_key(reference.key, round_index, k)
        extractor, header, report = local_work(reference, k, key)
        reference.clients[k]["header"] = header
        uploads.append(extractor)
        reports.append({**report, **reference.accuracy(k, {"shared_extractor": extractor})})
    shares = aggregation_shares(reference.config, reference.sizes(participants))
    reference.server = {"shared_extractor": weighted_sum(shares, uploads)}
    return reports


# ---------------------------------------------------------------------------------------------- FedPer


def joint_gradient(config, architecture, shared, params, received, images, labels):
    """CE(header(G(x)), y), both trained."""

    def loss(params):
        features = shared.extract(params["model"]["extractor"], images)
        return cross_entropy(shared.classify(params["model"]["header"], features), labels)

    return jax.value_and_grad(loss)(params)


def fedper_work(reference: Reference, client: int, key: jax.Array):
    model = {"extractor": reference.server["shared_extractor"], "header": reference.clients[client]["header"]}
    rows = reference.partition.train[client]
    params, loss = train(reference, client, rows, jax.random.fold_in(key, 1), {"model": model}, joint_gradient)
    return params["model"]["extractor"], params["model"]["header"], {"loss": loss}


def fedper_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    return personal_round(reference, round_index, participants, fedper_work)


# ---------------------------------------------------------------------------------------------- FedRep


def header_gradient(config, architecture, shared, params, received, images, labels):
    """CE(header(G(x)), y), G frozen."""
    features = shared.extract(received, images)
    return jax.value_and_grad(lambda params: cross_entropy(shared.classify(params["header"], features), labels))(params)


def extractor_gradient(config, architecture, shared, params, received, images, labels):
    """CE(header(G(x)), y), the header frozen."""

    def loss(params):
        return cross_entropy(shared.classify(received, shared.extract(params["extractor"], images)), labels)

    return jax.value_and_grad(loss)(params)


def fedrep_work(reference: Reference, client: int, key: jax.Array):
    """The header first, on the extractor received; then the extractor, under the new header."""
    received, rows = reference.server["shared_extractor"], reference.partition.train[client]
    head_key, body_key = jax.random.fold_in(key, 1), jax.random.fold_in(key, 2)
    start, epochs = {"header": reference.clients[client]["header"]}, reference.config.fedrep.head_epochs
    head, head_loss = train(reference, client, rows, head_key, start, header_gradient, received, epochs=epochs)
    body, loss = train(reference, client, rows, body_key, {"extractor": received}, extractor_gradient, head["header"])
    return body["extractor"], head["header"], {"loss": loss, "head_loss": head_loss}


def fedrep_round(reference: Reference, round_index: int, participants: list[int]) -> list[Report]:
    return personal_round(reference, round_index, participants, fedrep_work)


ALGORITHMS["fedper"] = Algorithm(init_client, init_server, fedper_round, predict)
ALGORITHMS["fedrep"] = Algorithm(init_client, init_server, fedrep_round, predict)
