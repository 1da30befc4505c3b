"""Any method as a plain loop over clients: its own functions are jitted, the rest is numpy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.data import Dataset, Partition, normalise
from pfedafm_jax.engine import visit
from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.engine import padded_rows
from pfedafm_jax.engine.executor import RoundResult, State
from pfedafm_jax.engine.federation import Federation
from pfedafm_jax.engine.hosts import Processes
from pfedafm_jax.engine.round import participants_of, weights_of
from pfedafm_jax.engine.state import initial_state
from pfedafm_jax.engine.visit import (
    ADAPT_KEY,
    PRIVATE_STATISTICS,
    SERVER_KEY,
    client_key,
    kept,
    received,
    shared_parts_of,
)
from pfedafm_jax.methods.base import Update, Uploads, next_broadcast
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import ClientData

Tree = Any
Report = dict[str, float]
Sent = tuple[dict[str, Tree], dict[str, Any]]  # a client's upload and its weights, by part


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


class PlainLoop:
    """Does rounds one client after the other, on one device: an `Executor`.

    Slow and obvious; what `Engine` is tested against. It is given what the engine is given.
    """

    def __init__(
        self,
        federation: Federation,
        dataset: Dataset,
        partition: Partition,
        devices: Devices | None = None,
    ):
        self.federation, self.dataset, self.partition = federation, dataset, partition
        self.devices = devices or Devices(federation.config.devices)
        self.processes = Processes()
        self.method = federation.method
        self.images = jnp.asarray(dataset.images)
        self.labels = jnp.asarray(dataset.labels, jnp.int32)
        self.train_rows = padded_rows(partition.train)
        self.test_rows = padded_rows(partition.test)

    def prepare(self) -> None:
        """Nothing: functions are compiled when they are called."""

    def start(self, folder: str | None = None) -> State:
        """The state before round 1; `folder` is where the store puts its files."""
        return initial_state(self.federation, folder)

    def run_round(
        self, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> tuple[State, RoundResult]:
        """Round `t`, see `Executor`; `participants` instead of those drawn."""
        whole = jax.device_get(state.server)
        server = broadcast_of(whole)
        order, dropped = participants_of(self.federation.config, t, participants)
        sent: dict[int, Sent] = {}
        reports: list[Report] = []
        for client, weight in zip(order, weights_of(self.federation, order), strict=True):
            new, upload, report = self.visit(
                t, client, state.clients.state(client), server, np.float32(weight)
            )
            state.clients.write(client, new)
            reports.append(report)
            if upload is not None:
                sent[client] = upload
        if any(upload for upload, _ in sent.values()):
            whole = broadcast(self.method, whole, self._stacked(t, order, sent))
        result = RoundResult(np.array(order, int), columns(reports), dropped)
        return with_server(state, whole), result

    def evaluate(
        self, state: State, clients: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Accuracies of these clients, or of all: `accuracy/NAME` → `[clients]`."""
        if clients is None:
            clients = range(self.federation.config.num_clients)
        server = judged_of(jax.device_get(state.server))
        reports: list[Report] = []
        for client in map(int, clients):
            judged = self._judged(client, state.clients.state(client), server)
            reports.append(self.accuracy(client, *judged))
        return columns(reports)

    def visit(
        self, t: int, client: int, state: Tree, server: Tree, weight: np.float32
    ) -> tuple[Tree, Sent | None, Report]:
        """Both stages of a client in round `t`.

        Returns:
            Its new state, what it uploads with which weights (None: it is discarded), and what it
            reports.
        """
        random_key = client_key(self.federation.run_key, t, client)
        data = self.data_of(client)
        arguments = random_key, state, server, data, weight
        update = client_update(self.method, self.architecture_of(client), *arguments)
        report = {name: float(value) for name, value in update.info.items()}
        report["finite"] = finite((update.client, update.upload, update.info))
        if not report["finite"]:
            return state, None, report | self.accuracy(client, *self._judged(client, state, server))
        state = update.client
        judged = self._judged(client, state, server)
        if update.view is not None:
            judged = state, update.view
        report |= self.accuracy(client, *judged)
        upload, weights = dict(update.upload), dict(update.weight)
        if self.method.shared_parts:
            parts = shared_parts_of(self.method, state)
            second: Update = shared_update(self.method, random_key, parts, server, data, weight)
            report |= {name: float(value) for name, value in second.info.items()}
            report["finite"] = finite((second.upload, second.info))
            if report["finite"]:
                upload |= second.upload
                weights |= second.weight
                if PRIVATE_STATISTICS in state:
                    statistics = second.client[PRIVATE_STATISTICS]
                    state = {**state, PRIVATE_STATISTICS: statistics}
        return state, (upload, weights), report

    def _judged(self, client: int, state: Tree, server: Tree) -> tuple[Tree, Tree]:
        """A client's state and broadcast as it is judged with them: adapted, if the method adapts."""
        if not self.method.adapts:
            return state, server
        key = jax.random.fold_in(self.federation.run_key, ADAPT_KEY)
        key = jax.random.fold_in(key, client)
        architecture = self.architecture_of(client)
        adapted = adapt(self.method, architecture, key, state, server, self.data_of(client))
        adapted = jax.device_get(adapted)
        return adapted if finite(adapted) else (state, server)

    def accuracy(self, client: int, state: Tree, server: Tree) -> Report:
        """Fraction of a client's test images classified correctly: `{"accuracy/NAME": …}`."""
        rows = self.test_rows[client]
        num = self.federation.num_test[client]
        images, labels = self.dataset.images[rows], self.dataset.labels[rows]
        architecture = self.architecture_of(client)
        scores = predict(self.method, architecture, state, jax.device_get(server), images)
        scores = jax.device_get(scores)
        right = {name: np.argmax(logits, axis=-1) == labels for name, logits in scores.items()}
        return {f"accuracy/{name}": float(np.mean(hits[:num])) for name, hits in right.items()}

    def architecture_of(self, client: int) -> Architecture:
        """A client's architecture."""
        return self.federation.architectures[self.federation.groups[client]]

    def data_of(self, client: int) -> ClientData:
        """One client's data, as the method's functions expect it."""
        return ClientData(
            self.images,
            self.labels,
            train=jnp.asarray(self.train_rows[client]),
            num_train=jnp.int32(self.federation.num_train[client]),
            test=jnp.asarray(self.test_rows[client]),
            num_test=jnp.int32(self.federation.num_test[client]),
            client=jnp.int32(client),
        )

    def _stacked(self, t: int, order: Sequence[int], sent: dict[int, Sent]) -> Uploads:
        """Uploads and weights by place in the order drawn, with zeros of those who sent nothing."""
        config = self.federation.config
        nobody = max(config.num_participants - len(order), 0)
        fullest = max(sent.values(), key=lambda pair: len(pair[0]))
        blank = jax.tree.map(np.zeros_like, fullest)
        pairs = [sent.get(client, ({}, {})) for client in order] + [({}, {})] * nobody
        rows = [({**blank[0], **upload}, {**blank[1], **weight}) for upload, weight in pairs]
        parts, weight = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
        clients: Any = np.array([*order, *[config.num_clients] * nobody], np.int32)
        key = client_key(self.federation.run_key, t, SERVER_KEY)
        return Uploads(clients, parts, weight, key)


def finite(tree: Tree) -> bool:
    """Whether all numbers of a tree are finite."""
    return all(bool(np.all(np.isfinite(leaf))) for leaf in jax.tree.leaves(jax.device_get(tree)))


def with_server(state: State, server: Tree) -> State:
    """The state with another broadcast, as numpy arrays."""
    return state._replace(server=jax.device_get(server))


def columns(reports: list[Report]) -> dict[str, np.ndarray]:
    """Reports as arrays by name, one entry per report; NaN where a report lacks the name."""
    names = dict.fromkeys(name for report in reports for name in report)

    def column(name: str) -> np.ndarray:
        values = np.array([report.get(name, np.nan) for report in reports], np.float32)
        return values.astype(bool) if name == "finite" else values

    return {name: column(name) for name in names}
