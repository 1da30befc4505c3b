"""Any method as a plain loop over clients: its own functions are jitted, the rest is numpy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.data import normalise
from pfedafm_jax.engine import Programs, RoundResult, State, visit
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.engine.visit import (
    ADAPT_KEY,
    PRIVATE_STATISTICS,
    SERVER_KEY,
    client_key,
    kept,
    received,
    shared_parts_of,
)
from pfedafm_jax.methods.base import Uploads, next_broadcast
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.training.batches import ClientData

Tree = Any
Report = dict[str, float]


@partial(jax.jit, static_argnums=1)
def client_update(method, architecture, key, client, server, data, weight):
    """`Method.client_update`, jitted."""
    own, server = received(client, server)
    update = method.client_update(key, architecture, own, server, data, weight)
    return kept(client, update)


@jax.jit
def shared_update(method, key, client, server, data, weight):
    """`Method.shared_update`, jitted."""
    own, server = received(client, server)
    return kept(client, method.shared_update(key, own, server, data, weight))


@jax.jit
def broadcast(method, server, uploads):
    """The next broadcast, jitted."""
    clients, parts, weight, key = uploads
    return next_broadcast(method, server, clients, parts, weight, key)


@partial(jax.jit, static_argnums=1)
def adapt(method, architecture, key, client, server, data):
    """`Method.adapt`, jitted."""
    return method.adapt(key, architecture, *received(client, server), data)


@partial(jax.jit, static_argnums=1)
def predict(method, architecture, client, server, images):
    """`Method.predict` on images as stored, jitted."""
    images = normalise(images, method.training.mean, method.training.std)
    return visit.predict(method, architecture, client, server, images)


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One round, see `engine.run_round`."""
    method, whole = programs.method, jax.device_get(state.server)
    server = broadcast_of(whole)
    order, dropped = participants_of(programs.config, t, participants)
    sent, reports = {}, []
    for k, weight in zip(order, weights(programs, order), strict=True):
        key, client = client_key(programs.key, t, k), state.store.state(k)
        data = data_of(programs, k)
        work = key, client, server, data, np.float32(weight)
        update = client_update(method, programs.architectures[programs.groups[k]], *work)
        report = {name: float(value) for name, value in update.info.items()}
        report["finite"] = finite((update.client, update.upload, update.info))
        client = update.client if report["finite"] else client
        state.store.write(k, client)
        trained = report["finite"] and update.view is not None
        if trained:
            report |= accuracy(programs, k, client, update.view)
        else:
            report |= accuracy(programs, k, *judged(programs, k, client, server))
        if report["finite"]:
            sent[k] = dict(update.upload), dict(update.weight)
        if report["finite"] and method.shared_parts:
            parts = shared_parts_of(method, client)
            update = shared_update(method, key, parts, server, data, np.float32(weight))
            report |= {name: float(value) for name, value in update.info.items()}
            report["finite"] = finite((update.upload, update.info))
            if report["finite"] and PRIVATE_STATISTICS in client:
                own = {PRIVATE_STATISTICS: update.client[PRIVATE_STATISTICS]}
                state.store.write(k, {**client, **own})
            if report["finite"]:
                sent[k][0].update(update.upload)
                sent[k][1].update(update.weight)
        reports.append(report)
    if any(upload for upload, _ in sent.values()):
        whole = broadcast(method, whole, stacked(programs, t, order, sent))
    result = RoundResult(np.array(order, int), columns(reports), dropped)
    return with_server(state, whole), result


def evaluate(programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None):
    """Accuracies by name, see `engine.evaluate`."""
    order = map(int, range(programs.config.num_clients) if clients is None else clients)
    server = judged_of(jax.device_get(state.server))

    def accuracy_of(client: int) -> Report:
        return accuracy(
            programs, client, *judged(programs, client, state.store.state(client), server)
        )

    return columns([accuracy_of(client) for client in order])


def judged(programs: Programs, client: int, state: Tree, server: Tree) -> tuple[Tree, Tree]:
    """A client's state and broadcast as it is judged with them: adapted, if the method adapts."""
    if not programs.method.adapts:
        return state, server
    key = jax.random.fold_in(jax.random.fold_in(programs.key, ADAPT_KEY), client)
    architecture = programs.architectures[programs.groups[client]]
    data = data_of(programs, client)
    new = jax.device_get(adapt(programs.method, architecture, key, state, server, data))
    return new if finite(new) else (state, server)


def stacked(
    programs: Programs, t: int, order: Sequence[int], sent: dict[int, tuple[dict, dict]]
) -> Uploads:
    """Uploads and weights by place in the order drawn, with zeros of those who sent nothing."""
    config = programs.config
    nobody = max(config.num_participants - len(order), 0)
    fullest = max(sent.values(), key=lambda pair: len(pair[0]))
    blank = jax.tree.map(np.zeros_like, fullest)
    pairs = [sent.get(k, ({}, {})) for k in order] + [({}, {})] * nobody
    rows = [({**blank[0], **upload}, {**blank[1], **weight}) for upload, weight in pairs]
    parts, weight = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    clients: Any = np.array([*order, *[config.num_clients] * nobody], np.int32)
    return Uploads(clients, parts, weight, client_key(programs.key, t, SERVER_KEY))


def weights(programs: Programs, order: Sequence[int]) -> list[float]:
    """Weights of the average: n_k, or 1."""
    if programs.config.aggregation in ("uniform", "median"):
        return [1.0] * len(order)
    return [float(programs.num_train[k]) for k in order]


def data_of(programs: Programs, client: int) -> ClientData:
    """One client's data, as the method's functions expect it."""
    counts = jnp.int32(programs.num_train[client]), jnp.int32(programs.num_test[client])
    train, test = programs.train_rows[client], programs.test_rows[client]
    rows = train, counts[0], test, counts[1], jnp.int32(client)
    return ClientData(programs.images, programs.labels, *rows)


def accuracy(programs: Programs, client: int, state: Tree, server: Tree) -> Report:
    """Fraction of a client's test images classified correctly: `{"accuracy/NAME": …}`."""
    rows, num = programs.test_rows[client], programs.num_test[client]
    images, labels = programs.dataset.images[rows], programs.dataset.labels[rows]
    architecture = programs.architectures[programs.groups[client]]
    scores = predict(programs.method, architecture, state, jax.device_get(server), images)
    scores = jax.device_get(scores)
    right = {name: np.argmax(logits, axis=-1) == labels for name, logits in scores.items()}
    return {f"accuracy/{name}": float(np.mean(hits[:num])) for name, hits in right.items()}


def finite(tree: Tree) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(jax.device_get(tree)))


def with_server(state: State, server: Tree) -> State:
    """The state with another broadcast, on the same devices as the old one."""
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), server, state.server)
    return state._replace(server=placed)


def columns(reports: list[Report]) -> dict[str, np.ndarray]:
    """Reports as arrays by name, one entry per report; NaN where a report lacks the name."""
    names = dict.fromkeys(name for report in reports for name in report)

    def column(name: str) -> np.ndarray:
        values = np.array([report.get(name, np.nan) for report in reports], np.float32)
        return values.astype(bool) if name == "finite" else values

    return {name: column(name) for name in names}
