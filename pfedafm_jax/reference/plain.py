"""Any method as a plain loop over clients: its own functions, everything else by hand in numpy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.data import normalise
from pfedafm_jax.engine import Programs, RoundResult, State
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.training import ClientData

Tree = Any
Report = dict[str, float]


@partial(jax.jit, static_argnums=1)
def client_update(method, architecture, key, client, server, data, weight):
    """`Method.client_update` as one program."""
    return method.client_update(key, architecture, client, server, data, weight)


@jax.jit
def shared_update(method, key, client, server, data, weight):
    """`Method.shared_update` as one program."""
    return method.shared_update(key, client, server, data, weight)


@partial(jax.jit, static_argnums=1)
def predict(method, architecture, client, server, images):
    """`Method.predict` on images as they are stored."""
    images = normalise(images, method.training.mean, method.training.std)
    return method.predict(architecture, client, server, images)


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One round, see `engine.run_round`."""
    method, server = programs.method, jax.device_get(state.server)
    order = participants_of(programs, t, participants)
    sent, reports = [], []
    for k, weight in zip(order, weights(programs, order), strict=True):
        key, client = client_key(programs.key, t, k), state.store.state(k)
        data = data_of(programs, k)
        work = key, client, server, data, np.float32(weight)
        update = client_update(method, programs.architectures[programs.groups[k]], *work)
        report = {name: float(value) for name, value in update.info.items()}
        report["finite"] = finite((update.client, update.upload, update.info))
        client = update.client if report["finite"] else client
        write(state, k, client)
        report |= accuracy(programs, k, client, server if update.view is None else update.view)
        if report["finite"]:
            sent.append((update.upload, update.weight))
        if report["finite"] and method.shared_parts:
            parts = {name: client[name] for name in method.shared_parts}
            update = shared_update(method, key, parts, server, data, np.float32(weight))
            report |= {name: float(value) for name, value in update.info.items()}
            report["finite"] = finite((update.upload, update.info))
            if report["finite"]:
                sent.append((update.upload, update.weight))
        reports.append(report)
    names = {name for upload, _ in sent for name in upload}
    mean = {name: average(name, server[name], sent) for name in sorted(names)}
    server = method.server_update(server, mean) if mean else server
    return with_server(state, server), RoundResult(np.array(order), columns(reports))


def evaluate(programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None):
    """Accuracies by name, see `engine.evaluate`."""
    order = map(int, range(programs.config.num_clients) if clients is None else clients)
    return columns([accuracy(programs, k, state.store.state(k), state.server) for k in order])


def average(name: str, old: Tree, sent: list[tuple[dict, dict]]) -> Tree:
    """Σ w u / Σ w of a part of the server's state, by rows where weights are, or the old value."""
    shares = [np.asarray(weight[name], np.float64) for upload, weight in sent if name in upload]

    def mean(before: np.ndarray, *leaves: np.ndarray) -> np.ndarray:
        ndim = np.ndim(before)
        wide = [share.reshape(share.shape + (1,) * (ndim - share.ndim)) for share in shares]
        total = sum(wide)
        summed = sum(share * np.asarray(leaf) for share, leaf in zip(wide, leaves, strict=True))
        found = np.where(total > 0, summed / np.where(total > 0, total, 1), before)
        return found.astype(np.float32)

    return jax.tree.map(mean, old, *(upload[name] for upload, _ in sent if name in upload))


def weights(programs: Programs, order: Sequence[int]) -> list[float]:
    """n_k; or all equal; or the last participant alone, as in the released code."""
    if programs.config.aggregation == "last":
        return [0.0] * (len(order) - 1) + [1.0]
    if programs.config.aggregation == "uniform":
        return [1.0] * len(order)
    return [float(programs.num_train[k]) for k in order]


def data_of(programs: Programs, client: int) -> ClientData:
    """One client's data as the method's functions take it."""
    counts = jnp.int32(programs.num_train[client]), jnp.int32(programs.num_test[client])
    train, test = programs.train_rows[client], programs.test_rows[client]
    return ClientData(programs.images, programs.labels, train, counts[0], test, counts[1])


def accuracy(programs: Programs, client: int, state: Tree, server: Tree) -> Report:
    """Shares of a client's test images that are classified rightly."""
    rows, num = programs.test_rows[client], programs.num_test[client]
    images, labels = programs.dataset.images[rows], programs.dataset.labels[rows]
    architecture = programs.architectures[programs.groups[client]]
    scores = predict(programs.method, architecture, state, jax.device_get(server), images)
    scores = jax.device_get(scores)
    right = {name: np.argmax(logits, axis=-1) == labels for name, logits in scores.items()}
    return {f"accuracy/{name}": float(np.mean(hits[:num])) for name, hits in right.items()}


def finite(tree: Tree) -> bool:
    """Whether all of it is finite."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(jax.device_get(tree)))


def write(state: State, client: int, new: Tree) -> None:
    """Puts a client's state into the store."""
    rows = jax.tree.map(lambda leaf: np.asarray(leaf)[None], new)
    state.store.write(int(state.store.groups[client]), [client], rows)


def with_server(state: State, server: Tree) -> State:
    """The state with another broadcast, on the devices where the old one was."""
    placed = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), server, state.server)
    return state._replace(server=placed)


def columns(reports: list[Report]) -> dict[str, np.ndarray]:
    """One array by name, with an entry for each report; NaN where one has no such number."""
    names = dict.fromkeys(name for report in reports for name in report)

    def column(name: str) -> np.ndarray:
        values = np.array([report.get(name, np.nan) for report in reports], np.float32)
        return values.astype(bool) if name == "finite" else values

    return {name: column(name) for name in names}
