"""The compiled work of a device: a loop over chunks of clients, vectorized inside a chunk.

A round has up to two stages, `client_update` for the clients of one architecture and, where a method has it,
`shared_update` for clients of all architectures together; `judge` is the evaluation. All three run through `over_slots`.
"""

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


class Common(NamedTuple):
    """What all clients of a round share."""

    images: jax.Array
    labels: jax.Array
    server: Server
    key: jax.Array  # the run's key, as plain numbers
    round: jax.Array  # int32


class Result(NamedTuple):
    """What one client's work yields: what replaces its state, what is summed over clients, what is only reported."""

    state: Tree
    total: Tree  # (numerators, weights)
    info: dict[str, jax.Array]
    relay: Tree


def client_key(key: jax.Array, round_index: jax.Array | int, client: jax.Array | int) -> jax.Array:
    """The key of a client's visit: by seed, round and client, never by order of execution."""
    return jax.random.fold_in(jax.random.fold_in(key, round_index), client)


def _finite(tree: Tree) -> jax.Array:
    # 0 · x is 0, or NaN where x is not finite; a sum reads each leaf once and stores nothing, as `all(isfinite)` would
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.sum(0.0 * leaf) == 0 for leaf in floats]))


def work(method: Method, architecture: Architecture | None, common: Common, state: Tree, slot: Slots) -> Result:
    """A participant's local work in one stage; no architecture means the stage that all architectures share.

    An update that is not finite is thrown away: the client keeps its old state and has no part in the average.
    """
    data = ClientData(common.images, common.labels, slot.train, slot.num_train, slot.test, slot.num_test)
    key = client_key(jax.random.wrap_key_data(common.key), common.round, slot.client)
    if architecture is None:
        update = method.shared_update(key, state, common.server, data, slot.weight)
        update = update._replace(client=state)
    else:
        update = method.client_update(key, architecture, state, common.server, data, slot.weight)
    finite = _finite((update.client, update.upload, update.info))

    def if_finite(new, old):
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    info = {**update.info, "finite": finite}
    if update.view is not None:
        info |= scores(method, architecture, if_finite(update.client, state), update.view, data)
    weight = {name: jnp.where(finite, value, jnp.zeros_like(value)) for name, value in update.weight.items()}
    upload = if_finite(update.upload, jax.tree.map(jnp.zeros_like, update.upload))
    old_relay = {name: common.server["relay"][name] for name in update.relay}
    return Result(
        if_finite(update.client, state),
        (weigh(upload, weight), weight),
        info,
        if_finite(update.relay, old_relay),
    )


def judge(method: Method, architecture: Architecture | None, common: Common, state: Tree, slot: Slots) -> Result:
    """Accuracy of a client in this state, with the broadcast at hand."""
    data = ClientData(common.images, common.labels, slot.train, slot.num_train, slot.test, slot.num_test)
    return Result(None, None, scores(method, architecture, state, common.server, data), None)


def scores(
    method: Method, architecture: Architecture | None, state: Tree, server: Server, data: ClientData
) -> dict[str, jax.Array]:
    """Accuracies of a client's model by name, as they are reported."""
    assert architecture is not None, "the stage that all architectures share has no model of its own to judge"
    found = accuracy(method.how, lambda images: method.predict(architecture, state, server, images), data)
    return {f"accuracy/{name}": value for name, value in found.items()}


Stage = Callable[[Method, Architecture | None, Common, Tree, Slots], Result]


def over_slots(stage: Stage, method: Method, architecture: Architecture | None, chunk: int) -> Callable:
    """`(common, total, states, slots, trips) -> Result [slots]` for one device: `trips` chunks of `chunk` clients.

    Results of slots that no chunk reaches are zero; their states stay as they are.
    """
    if chunk > 1:
        method = replace(method, how=replace(method.how, axis=CLIENT_AXIS))

    def one(common: Common, state: Tree, slot: Slots) -> Result:
        return stage(method, architecture, common, state, slot)

    @jax.jit  # so that it is traced once, for its shapes and for the loop
    def some(common: Common, states: Tree, slots: Slots, first: jax.Array) -> Result:
        if chunk == 1:  # no vmap: on CPU a plain product is faster than a batched one
            row = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, first, keepdims=False), (states, slots))
            return jax.tree.map(lambda leaf: leaf[None], one(common, *row))
        rows = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, first, chunk), (states, slots))
        return jax.vmap(one, in_axes=(None, 0, 0), axis_name=CLIENT_AXIS)(common, *rows)

    def program(common: Common, total: Tree, states: Tree, slots: Slots, trips: jax.Array) -> Result:
        shapes = jax.eval_shape(some, common, states, slots, jnp.int32(0))
        count = slots.num_train.shape[0]
        info = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes.info)
        relay = jax.tree.map(lambda s: jnp.zeros(s.shape[1:], s.dtype), shapes.relay)
        kept = None if shapes.state is None else states

        def put(buffer: Tree, rows: Tree, first: jax.Array) -> Tree:
            return jax.tree.map(lambda b, r: lax.dynamic_update_slice_in_dim(b, r, first, axis=0), buffer, rows)

        def body(index: jax.Array, carry: Result) -> Result:
            first = lax.convert_element_type(index * chunk, jnp.int32)  # not weakly typed: `some` is traced once
            new = some(common, states if carry.state is None else carry.state, slots, first)
            return Result(
                put(carry.state, new.state, first),
                jax.tree.map(lambda sum_, rows: sum_ + jnp.sum(rows, axis=0), carry.total, new.total),
                put(carry.info, new.info, first),
                jax.tree.map(lambda rows: rows[-1], new.relay),
            )

        return lax.fori_loop(0, trips, body, Result(kept, total, info, relay))

    return program


def zero_total(method: Method, architecture: Architecture | None, common: Common, state: Tree, slot: Slots) -> Tree:
    """The empty sums of a stage: numerators and weights."""
    shapes = jax.eval_shape(lambda *arguments: work(method, architecture, *arguments), common, state, slot)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes.total)
