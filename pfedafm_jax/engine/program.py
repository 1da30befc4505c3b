"""The compiled work of a device: a loop over chunks of clients of one architecture, vectorized inside a chunk."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.evaluate import accuracy
from pfedafm_jax.methods.base import Method, Server, weigh
from pfedafm_jax.models import Architecture
from pfedafm_jax.training import ClientData

Tree = Any
CLIENT_AXIS = "clients"


class Slots(NamedTuple):
    """Clients on a device, one per row."""

    client: jax.Array  # int32 [slots]: the client's number
    train: jax.Array  # int32 [slots, longest]
    num_train: jax.Array  # int32 [slots]; 0 marks an empty slot
    test: jax.Array
    num_test: jax.Array
    weight: jax.Array  # float32 [slots]: weight in the average
    state: Tree = None  # [slots, …]: what the client keeps


class Common(NamedTuple):
    """What all clients of a round share."""

    images: jax.Array
    labels: jax.Array
    server: Server
    key: jax.Array  # the run's key data
    round: jax.Array  # int32


class Visit(NamedTuple):
    """What one client's visit yields."""

    state: Tree
    numerator: Tree  # weighted upload, to be summed
    weight: dict[str, jax.Array]
    info: dict[str, jax.Array]
    relay: Tree


def client_key(key: jax.Array, round_index: jax.Array, client: jax.Array) -> jax.Array:
    """The key of a client's visit: by seed, round and client, never by order of execution."""
    return jax.random.fold_in(jax.random.fold_in(key, round_index), client)


def client_data(common: Common, slot: Slots) -> ClientData:
    return ClientData(common.images, common.labels, slot.train, slot.num_train, slot.test, slot.num_test)


def _finite(tree: Tree) -> jax.Array:
    leaves = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
    return jnp.all(jnp.stack(leaves))


def visit(method: Method, architecture: Architecture, common: Common, slot: Slots) -> Visit:
    """A participant's round: local work, judged by the paper's convention, and its share of the average.

    An update that is not finite is thrown away: the client keeps its old state and has no part in the average.
    """
    data = client_data(common, slot)
    key = client_key(jax.random.wrap_key_data(common.key), common.round, slot.client)
    update = method.client_update(key, architecture, slot.state, common.server, data, slot.weight)
    finite = _finite((update.client, update.upload, update.info["loss"]))

    def if_finite(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    state = if_finite(update.client, slot.state)
    weight = {name: jnp.where(finite, value, 0.0) for name, value in update.weight.items()}
    upload = if_finite(update.upload, jax.tree.map(jnp.zeros_like, update.upload))
    scores = accuracy(
        method.how, lambda images: method.predict(architecture, state, update.view, images), data
    )
    info = {**update.info, **{f"accuracy/{name}": value for name, value in scores.items()}, "finite": finite}
    relay = if_finite(update.relay, common.server.get("relay")) if method.sequential else None
    return Visit(state, weigh(upload, weight), weight, info, relay)


def judge(method: Method, architecture: Architecture, common: Common, slot: Slots) -> dict[str, jax.Array]:
    """Accuracy of a client as it is, with the current broadcast."""
    return accuracy(
        method.how,
        lambda images: method.predict(architecture, slot.state, common.server, images),
        client_data(common, slot),
    )


def over_chunks(one: Callable, method: Method, architecture: Architecture, chunk: int) -> Callable:
    """`one(method, architecture, common, slot)` for a chunk of slots at once: `(common, slots, first) -> results [chunk]`."""
    if chunk == 1:  # no vmap: on CPU a plain product is faster than a batched one

        def single(common: Common, slots: Slots, first: jax.Array) -> Tree:
            slot = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, first, keepdims=False), slots)
            return jax.tree.map(lambda leaf: leaf[None], one(method, architecture, common, slot))

        return single

    method = replace(method, how=replace(method.how, axis=CLIENT_AXIS))
    mapped = jax.vmap(
        lambda common, slot: one(method, architecture, common, slot), in_axes=(None, 0), axis_name=CLIENT_AXIS
    )

    def many(common: Common, slots: Slots, first: jax.Array) -> Tree:
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, chunk), slots)
        return mapped(common, rows)

    return many


def _put(buffer: Tree, rows: Tree, first: jax.Array) -> Tree:
    return jax.tree.map(lambda b, r: lax.dynamic_update_slice_in_dim(b, r, first, axis=0), buffer, rows)


def _empty(shapes: Tree, slots: int) -> Tree:
    return jax.tree.map(lambda s: jnp.zeros((slots, *s.shape[1:]), s.dtype), shapes)


def training_program(method: Method, architecture: Architecture, chunk: int) -> Callable:
    """`(common, total, states, slots, trips) -> (states, total, info, relay)` for one device; `total` gathers the average."""
    work = over_chunks(visit, method, architecture, chunk)

    def program(common: Common, total: Tree, states: Tree, slots: Slots, trips: jax.Array):
        count = slots.num_train.shape[0]
        shapes = jax.eval_shape(work, common, slots._replace(state=states), jnp.int32(0))

        def body(index, carry):
            states, total, info, relay = carry
            first = index * chunk
            result: Visit = work(common, slots._replace(state=states), first)
            summed = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), (result.numerator, result.weight))
            total = jax.tree.map(jnp.add, total, summed)
            relay = jax.tree.map(lambda leaf: leaf[-1], result.relay)
            return _put(states, result.state, first), total, _put(info, result.info, first), relay

        start_relay = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), shapes.relay)
        carry = (states, total, _empty(shapes.info, count), start_relay)
        return lax.fori_loop(0, trips, body, carry)

    return program


def judging_program(method: Method, architecture: Architecture, chunk: int) -> Callable:
    """`(common, states, slots, trips) -> accuracies` for one device."""
    work = over_chunks(judge, method, architecture, chunk)

    def program(common: Common, states: Tree, slots: Slots, trips: jax.Array):
        slots = slots._replace(state=states)
        shapes = jax.eval_shape(work, common, slots, jnp.int32(0))

        def body(index, scores):
            return _put(scores, work(common, slots, index * chunk), index * chunk)

        return lax.fori_loop(0, trips, body, _empty(shapes, slots.num_test.shape[0]))

    return program


def zero_total(method: Method, architecture: Architecture, common: Common, slot: Slots) -> Tree:
    """The empty sums of numerators and weights."""
    shapes = jax.eval_shape(lambda common, slot: visit(method, architecture, common, slot), common, slot)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes.numerator, shapes.weight))
