"""The compiled work of a device: a loop over steps of a few clients each, vectorized inside a step.

A round has up to two stages, `client_update` for the clients of one architecture and, where a
method has it, `shared_update` for clients of all architectures together; `evaluate` is a third.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    """Clients on a device, one a row."""

    client: jax.Array  # int32 [slots]: the client's number
    train: jax.Array  # int32 [slots, longest]: rows of the dataset, see `ClientData`
    num_train: jax.Array  # int32 [slots]; 0 marks an empty slot
    test: jax.Array  # int32 [slots, longest test]
    num_test: jax.Array  # int32 [slots]
    weight: jax.Array  # float32 [slots]: weight in the average


class Common(NamedTuple):
    """What all clients of a round share."""

    method: Method
    images: jax.Array  # uint8 [all, height, width, channels]
    labels: jax.Array  # int32 [all]
    server: Server
    key: jax.Array  # the run's key, as plain numbers
    round: jax.Array  # int32


class Visit(NamedTuple):
    """What one client's work in one stage yields."""

    state: Tree  # replaces the client's state; None: it stays
    upload: dict[str, Tree]  # parts of the server's state, as this client would have them
    weight: dict[str, jax.Array]  # of each part in the average
    info: dict[str, jax.Array]  # numbers that are reported


class Totals(NamedTuple):
    """Sums over clients that the average is made of."""

    numerator: dict[str, Tree]  # Σ weight · upload
    weight: dict[str, jax.Array]  # Σ weight


class Worked(NamedTuple):
    """What a device returns for all its slots."""

    state: Tree  # [slots, …], or None
    totals: Totals
    info: dict[str, jax.Array]  # [slots] each, 0 where no step reached


def totals_of(visit: Visit) -> Totals:
    """One client's part in the sums: the weighting of what it uploads."""
    return Totals(weigh(visit.upload, visit.weight), visit.weight)


def client_key(key: jax.Array, t: jax.Array | int, client: jax.Array | int) -> jax.Array:
    """The key of a client's visit: by seed, round and client, never by order of execution."""
    return jax.random.fold_in(jax.random.fold_in(key, t), client)


def data_of(common: Common, slot: Slots) -> ClientData:
    """A client's data, on the device."""
    return ClientData(
        common.images, common.labels, slot.train, slot.num_train, slot.test, slot.num_test
    )


def _finite(tree: Tree) -> jax.Array:
    # 0 · x is 0, or NaN where x is not finite; unlike `all(isfinite)` a sum stores nothing.
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.sum(0.0 * leaf) == 0 for leaf in floats]))


def work(architecture: Architecture | None, common: Common, state: Tree, slot: Slots) -> Visit:
    """A participant's local work in one stage; without architecture, in the one that all share.

    An update that is not finite is thrown away: the client keeps its old state and has no part in
    the average.
    """
    method, data = common.method, data_of(common, slot)
    key = client_key(jax.random.wrap_key_data(common.key), common.round, slot.client)
    if architecture is None:
        update = method.shared_update(key, state, common.server, data, slot.weight)
        update = update._replace(client=state)
    else:
        update = method.client_update(key, architecture, state, common.server, data, slot.weight)
    finite = _finite((update.client, update.upload, update.info))

    def if_finite(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    kept = if_finite(update.client, state)
    info = {**update.info, "finite": finite}
    if update.view is not None:
        info |= accuracies(method, architecture, kept, update.view, data)
    sent = (update.upload, update.weight)
    upload, weight = if_finite(sent, jax.tree.map(jnp.zeros_like, sent))
    return Visit(kept, upload, weight, info)


def evaluate(architecture: Architecture | None, common: Common, state: Tree, slot: Slots) -> Visit:
    """Accuracy of a client in this state, with the broadcast at hand."""
    data = data_of(common, slot)
    return Visit(None, {}, {}, accuracies(common.method, architecture, state, common.server, data))


def accuracies(
    method: Method, architecture: Architecture | None, state: Tree, server: Server, data: ClientData
) -> dict[str, jax.Array]:
    """Accuracies of a client's model by name, as they are reported: `accuracy/NAME`."""
    assert architecture is not None, "the stage that all share has no model of its own"

    def predict(images: jax.Array) -> dict[str, jax.Array]:
        return method.predict(architecture, state, server, images)

    found = accuracy(method.training, predict, data)
    return {f"accuracy/{name}": value for name, value in found.items()}


Stage = Callable[[Architecture | None, Common, Tree, Slots], Visit]


def over_slots(
    stage: Stage,
    architecture: Architecture | None,
    clients_per_step: int,
    lockstep: bool = False,
    runs: int = 1,
) -> Callable:
    """A stage for all slots of one device.

    Args:
        stage: `work` or `evaluate`.
        architecture: that of the clients; None for the stage that all share.
        clients_per_step: how many clients are vectorized.
        lockstep: all slots are one step, whatever `trips` says.
        runs: how many runs go together in lockstep, each with its part of the slots; what is not
            images and labels of `common`, and `totals`, then have the runs in front.

    Returns:
        `(common, totals, states, slots, trips) -> Worked`, with states `[slots, …]`: `trips` steps
        are made, and what clients send is added to `totals`. States of slots that no step reaches
        stay as they are.
    """
    size = clients_per_step

    def one(common: Common, state: Tree, slot: Slots) -> tuple[Visit, Totals]:
        if size > 1 or lockstep:
            training = replace(common.method.training, axis=CLIENT_AXIS)
            common = common._replace(method=replace(common.method, training=training))
        visit = stage(architecture, common, state, slot)
        return visit, totals_of(visit)

    @jax.jit  # so that it is traced once, for its shapes and for the loop
    def some(common: Common, states: Tree, slots: Slots, first: jax.Array) -> tuple[Visit, Totals]:
        rows = jax.tree.map(lambda b: lax.dynamic_slice_in_dim(b, first, size), (states, slots))
        if size == 1:  # no vmap: on CPU a plain product is faster than a batched one
            row = jax.tree.map(lambda leaf: lax.squeeze(leaf, [0]), rows)
            return jax.tree.map(lambda leaf: leaf[None], one(common, *row))
        return jax.vmap(one, in_axes=(None, 0, 0), axis_name=CLIENT_AXIS)(common, *rows)

    def all_at_once(common: Common, totals: Totals, states: Tree, slots: Slots, _: jax.Array):
        visit, rows = jax.vmap(one, (None, 0, 0), axis_name=CLIENT_AXIS)(common, states, slots)
        sums = jax.tree.map(lambda total, row: total + jnp.sum(row, axis=0), totals, rows)
        return Worked(visit.state, sums, visit.info)

    def several(common: Common, totals: Totals, states: Tree, slots: Slots, trips: jax.Array):
        split = partial(jax.tree.map, lambda leaf: leaf.reshape(runs, -1, *leaf.shape[1:]))
        own: Any = Common(method=0, images=None, labels=None, server=0, key=0, round=0)  # pyright: ignore
        together = jax.vmap(all_at_once, in_axes=(own, 0, 0, 0, None))
        worked = together(common, totals, split(states), split(slots), trips)
        join = partial(jax.tree.map, lambda leaf: leaf.reshape(-1, *leaf.shape[2:]))
        return Worked(join(worked.state), worked.totals, join(worked.info))

    def put(buffer: Tree, rows: Tree, first: jax.Array) -> Tree:
        place = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return jax.tree.map(place, buffer, rows)

    def program(common: Common, totals: Totals, states: Tree, slots: Slots, trips: jax.Array):
        visit, _ = jax.eval_shape(some, common, states, slots, jnp.int32(0))
        count = slots.num_train.shape[0]
        info = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), visit.info)
        kept = None if visit.state is None else states

        def body(index: jax.Array, carry: Worked) -> Worked:
            # Not weakly typed, so that `some` is traced once.
            first = lax.convert_element_type(index * size, jnp.int32)
            new, rows = some(common, states if carry.state is None else carry.state, slots, first)
            return Worked(
                put(carry.state, new.state, first),
                jax.tree.map(lambda total, row: total + jnp.sum(row, axis=0), carry.totals, rows),
                put(carry.info, new.info, first),
            )

        return lax.fori_loop(0, trips, body, Worked(kept, totals, info))

    if runs > 1:
        return several
    return all_at_once if lockstep else program


def zero_totals(
    architecture: Architecture | None, common: Common, state: Tree, slot: Slots
) -> Totals:
    """Shapes of a stage's sums, from shapes of one client's state and slot."""

    def totals(*arguments: Any) -> Totals:
        return totals_of(work(architecture, *arguments))

    return jax.eval_shape(totals, common, state, slot)
