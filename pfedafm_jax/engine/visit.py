"""What a compiled program does on one device: it loops over a few clients at a time, under `vmap`.

A round has up to three stages: `client_update` for the clients of one architecture,
`shared_update`, if the method has it, for clients of all architectures, and `evaluate`. The same
stages of one client away from the others, a newcomer or a node, are a `SingleClient`'s.

A client's own BatchNorm statistics of shared networks are the entry `statistics` of its state
(`PRIVATE_STATISTICS`): they replace those of the broadcast before it is used, and leave the upload.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.base.trees import as_numbers
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.methods.aggregation import weigh
from pfedafm_jax.methods.base import Client, Method, Server, Update
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.batch_stats import statistics_of, with_statistics, without_statistics
from pfedafm_jax.training.accuracy import accuracy
from pfedafm_jax.training.batches import ClientData

Tree = Any
CLIENT_AXIS = "clients"
# The entry in a client's state: its statistics, by their path in the broadcast.
PRIVATE_STATISTICS = "statistics"
# Far above any round or client number.
START_KEY, SERVER_KEY, ADAPT_KEY = 2**31 - 1, 2**31 - 2, 2**31 - 4


class Slots(NamedTuple):
    """The clients of a device, one per row."""

    client: jax.Array  # int32 [slots]: the client's number
    train: jax.Array  # int32 [slots, longest]: rows of the dataset, see `ClientData`
    num_train: jax.Array  # int32 [slots]; 0 marks an empty slot
    test: jax.Array  # int32 [slots, longest test]
    num_test: jax.Array  # int32 [slots]
    weight: jax.Array  # float32 [slots]: weight in the average
    rank: jax.Array  # int32 [slots]: index among the participants; past the end if empty


class RoundInputs(NamedTuple):
    """The arguments that all clients of a round share."""

    method: Method
    images: jax.Array  # uint8 [all, height, width, channels], or other data
    labels: jax.Array  # int32 [all]
    server: Server
    key: jax.Array  # the run's key, as `key_data`
    round: jax.Array  # int32


class StageResult(NamedTuple):
    """One client's result of one stage."""

    state: Tree  # the client's new state; None: unchanged
    upload: dict[str, Tree]  # this client's version of parts of the server's state
    weight: dict[str, jax.Array]  # the weight of each part in the average
    info: dict[str, jax.Array]  # numbers that are reported


class Totals(NamedTuple):
    """Sums over clients that the average is made of; or, where the server sees single uploads,
    these, `[participants, …]`, and zeros where those of other devices will be added."""

    numerator: dict[str, Tree]  # Σ weight · upload; or uploads
    weight: dict[str, jax.Array]  # Σ weight; or weights


class DeviceResult(NamedTuple):
    """A device's result for all its slots."""

    state: Tree  # [slots, …], or None
    totals: Totals
    info: dict[str, jax.Array]  # [slots] each, 0 for slots that no step reached


def totals_of(method: Method, result: StageResult) -> Totals:
    """One client's contribution to the totals: its weighted uploads, or the uploads themselves."""
    sent = result.upload if method.sees_uploads else weigh(result.upload, result.weight)
    return Totals(sent, result.weight)


def added(method: Method, totals: Totals, rows: Totals, ranks: jax.Array) -> Totals:
    """Totals with those of some clients `[clients, …]`: the sum, or each at its rank."""

    def add(total: jax.Array, row: jax.Array) -> jax.Array:
        if method.sees_uploads:
            return total.at[ranks].add(row, mode="drop")
        return total + jnp.sum(row, axis=0)

    return jax.tree.map(add, totals, rows)


def client_key(key: jax.Array, t: jax.Array | int, client: jax.Array | int) -> jax.Array:
    """The key of a client's visit: it depends on seed, round and client, not on execution order."""
    return jax.random.fold_in(jax.random.fold_in(key, t), client)


def data_of(inputs: RoundInputs, slot: Slots) -> ClientData:
    """A client's data, on the device."""
    return ClientData(
        *(inputs.images, inputs.labels, slot.train, slot.num_train, slot.test, slot.num_test),
        client=slot.client,
    )


def _finite(tree: Tree) -> jax.Array:
    # 0 · x is 0, or NaN if x is not finite; unlike `all(isfinite)`, a sum stores no array.
    floats = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.sum(0.0 * leaf) == 0 for leaf in floats]))


def work(
    architecture: Architecture | None, inputs: RoundInputs, state: Tree, slot: Slots
) -> StageResult:
    """One participant's training in one stage; `architecture` None: the stage that all share.

    An update with NaN or infinity is discarded: the client keeps its old state, is evaluated with
    that and the broadcast, and has weight 0 in the average.
    """
    method, data = inputs.method, data_of(inputs, slot)
    key = client_key(jax.random.wrap_key_data(inputs.key), inputs.round, slot.client)
    client, server = received(state, inputs.server)
    if architecture is None:
        update = method.shared_update(key, client, server, data, slot.weight)
        update = update._replace(client=client)
    else:
        update = method.client_update(key, architecture, client, server, data, slot.weight)
    update = kept(state, update)
    finite = _finite((update.client, update.upload, update.info))

    def if_finite(new: Tree, old: Tree) -> Tree:
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    new = if_finite(update.client, state)
    info = {**update.info, "finite": finite}
    if update.view is not None:
        view = {name: if_finite(part, server.get(name, part)) for name, part in update.view.items()}
        info |= accuracies(method, architecture, new, view, data)
    sent = (update.upload, update.weight)
    upload, weight = if_finite(sent, jax.tree.map(jnp.zeros_like, sent))
    return StageResult(new, upload, weight, info)


def evaluate(
    architecture: Architecture | None, inputs: RoundInputs, state: Tree, slot: Slots
) -> StageResult:
    """A client's accuracy in this state, with the broadcast in `inputs`; if the method adapts
    clients before they are judged, of the adapted client."""
    method, data = inputs.method, data_of(inputs, slot)
    server = inputs.server
    if method.adapts:
        state, server = adapted(architecture, inputs, state, slot)
    return StageResult(None, {}, {}, accuracies(method, architecture, state, server, data))


def adapted(
    architecture: Architecture | None, inputs: RoundInputs, state: Tree, slot: Slots
) -> tuple[Tree, Server]:
    """A client's state and broadcast after `Method.adapt`, with the client's own statistics in the
    broadcast; as they were if that is not finite.

    Its batches depend on seed and client alone, whatever the round.
    """
    assert architecture is not None, "the stage that all share has no model of its own"
    method, data = inputs.method, data_of(inputs, slot)
    key = jax.random.fold_in(jax.random.wrap_key_data(inputs.key), ADAPT_KEY)
    key = jax.random.fold_in(key, slot.client)
    client, server = received(state, inputs.server)
    new_client, new_server = method.adapt(key, architecture, client, server, data)
    before = (client, server)
    after = (new_client, new_server)
    finite = _finite(after)
    return jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, before)


def accuracies(
    method: Method, architecture: Architecture | None, state: Tree, server: Server, data: ClientData
) -> dict[str, jax.Array]:
    """Accuracies of a client's predictions: `{"accuracy/NAME": …}`."""
    assert architecture is not None, "the stage that all share has no model of its own"

    def scores(images: jax.Array) -> dict[str, jax.Array]:
        return predict(method, architecture, state, server, images)

    found = accuracy(method.training, scores, data)
    return {f"accuracy/{name}": value for name, value in found.items()}


Stage = Callable[[Architecture | None, RoundInputs, Tree, Slots], StageResult]


def over_slots(
    stage: Stage, architecture: Architecture | None, clients_per_step: int, lockstep: bool = False
) -> Callable:
    """The program of a stage for all slots of one device.

    Args:
        stage: `work` or `evaluate`.
        architecture: that of the clients; None: the stage that all share.
        clients_per_step: how many clients to `vmap` over.
        lockstep: take all slots in one step and ignore `num_steps`.

    Returns:
        `(inputs, totals, states, slots, num_steps) -> DeviceResult`, with states `[slots, …]`. It makes
        `num_steps` steps and adds what clients upload to `totals`. States of slots that no step reaches
        do not change.
    """
    size = clients_per_step

    def visit(inputs: RoundInputs, state: Tree, slot: Slots) -> tuple[StageResult, Totals]:
        if size > 1 or lockstep:
            training = replace(inputs.method.training, axis=CLIENT_AXIS)
            inputs = inputs._replace(method=replace(inputs.method, training=training))
        result = stage(architecture, inputs, state, slot)
        return result, totals_of(inputs.method, result)

    @jax.jit  # jitted, so that it is traced once for both its shapes and the loop
    def step(
        inputs: RoundInputs, states: Tree, slots: Slots, first: jax.Array
    ) -> tuple[StageResult, Totals]:
        rows = jax.tree.map(lambda b: lax.dynamic_slice_in_dim(b, first, size), (states, slots))
        if size == 1:  # no vmap: on a CPU a plain product is faster than a batched one
            row = jax.tree.map(lambda leaf: lax.squeeze(leaf, [0]), rows)
            return jax.tree.map(lambda leaf: leaf[None], visit(inputs, *row))
        return jax.vmap(visit, in_axes=(None, 0, 0), axis_name=CLIENT_AXIS)(inputs, *rows)

    def all_at_once(inputs: RoundInputs, totals: Totals, states: Tree, slots: Slots, _: jax.Array):
        result, rows = jax.vmap(visit, (None, 0, 0), axis_name=CLIENT_AXIS)(inputs, states, slots)
        totals = added(inputs.method, totals, rows, slots.rank)
        return DeviceResult(result.state, totals, result.info)

    def put(buffer: Tree, rows: Tree, first: jax.Array) -> Tree:
        write = partial(lax.dynamic_update_slice_in_dim, start_index=first, axis=0)
        return jax.tree.map(write, buffer, rows)

    def program(
        inputs: RoundInputs, totals: Totals, states: Tree, slots: Slots, num_steps: jax.Array
    ):
        result, _ = jax.eval_shape(step, inputs, states, slots, jnp.int32(0))
        count = slots.num_train.shape[0]
        info = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), result.info)
        kept = None if result.state is None else states

        def body(index: jax.Array, carry: DeviceResult) -> DeviceResult:
            # Not weakly typed, so that `step` is traced once.
            first = lax.convert_element_type(index * size, jnp.int32)
            new, rows = step(inputs, states if carry.state is None else carry.state, slots, first)
            ranks = lax.dynamic_slice_in_dim(slots.rank, first, size)
            return DeviceResult(
                put(carry.state, new.state, first),
                added(inputs.method, carry.totals, rows, ranks),
                put(carry.info, new.info, first),
            )

        return lax.fori_loop(0, num_steps, body, DeviceResult(kept, totals, info))

    return all_at_once if lockstep else program


def zero_totals(
    architecture: Architecture | None,
    inputs: RoundInputs,
    state: Tree,
    slot: Slots,
    participants: int,
) -> Totals:
    """Shapes of a stage's totals, from shapes of one client's state and slot."""

    def totals(inputs: RoundInputs, *arguments: Any) -> Totals:
        one = totals_of(inputs.method, work(architecture, inputs, *arguments))
        if not inputs.method.sees_uploads:
            return one
        return jax.tree.map(lambda leaf: jnp.zeros((participants, *leaf.shape), leaf.dtype), one)

    return jax.eval_shape(totals, inputs, state, slot)


# --------------------------------------------------------------------------- private to each client


def own_statistics(method: Method, key: jax.Array) -> dict[str, Tree]:
    """What a client's state has in addition to its method's: its statistics of the broadcast."""
    networks = method.shared, *method.architectures
    if method.statistics == "averaged" or not any(one.statistics for one in networks):
        return {}
    own = statistics_of(method.init_server(key))
    return {PRIVATE_STATISTICS: own} if own else {}


def shared_parts_of(method: Method, state: Tree) -> Tree:
    """The parts of a client's state that the shared stage reads, its statistics included."""
    names = (*method.shared_parts, PRIVATE_STATISTICS) if method.shared_parts else ()
    return {name: state[name] for name in names if name in state}


def received(state: Tree, server: Server) -> tuple[Tree, Server]:
    """A client's state without its statistics, and the broadcast with them."""
    if PRIVATE_STATISTICS not in state:
        return state, server
    client = {name: part for name, part in state.items() if name != PRIVATE_STATISTICS}
    return client, with_statistics(server, state[PRIVATE_STATISTICS])


def kept(state: Tree, update: Update) -> Update:
    """The update with its statistics moved from the upload to the client's state."""
    if PRIVATE_STATISTICS not in state:
        return update
    sent = statistics_of(update.upload)
    own = {path: sent.get(path, old) for path, old in state[PRIVATE_STATISTICS].items()}
    client, upload = {**update.client, PRIVATE_STATISTICS: own}, without_statistics(update.upload)
    return update._replace(client=client, upload=upload)


def predict(
    method: Method, architecture: Architecture, state: Tree, server: Server, images: jax.Array
) -> dict[str, jax.Array]:
    """`Method.predict` for a client in this state, with its own statistics."""
    return method.predict(architecture, *received(state, server), images)


# ----------------------------------------------------------------------------- away from the others


_work, _evaluate = (jax.jit(stage, static_argnums=0) for stage in (work, evaluate))


class SingleClient(NamedTuple):
    """What a client's visits need, whatever the round; made by `SingleClient.of`."""

    network: Architecture
    precision: str
    inputs: RoundInputs  # of no round, and without broadcast
    slot: Slots

    @classmethod
    def of(
        cls,
        method: Method,
        network: Architecture,
        *,
        seed: int,
        precision: str,
        client: int,
        images: np.ndarray,
        labels: np.ndarray,
        rows: Sequence[np.ndarray],
        widths: Sequence[int],
        weight: float,
    ) -> "SingleClient":
        """A client of a run.

        Args:
            seed, precision: the run's.
            client: its number.
            images, labels: `[num, …]` and `[num]`.
            rows: those of its training and of its test images.
            widths: lengths to which tables of these rows are padded, so that clients of similar
                size share programs.
            weight: in the average.
        """
        train, test = (
            jnp.asarray(np.pad(own, (0, width - len(own))), jnp.int32)
            for own, width in zip(rows, widths, strict=True)
        )
        inputs = RoundInputs(
            jax.device_put(as_numbers(method)),
            jnp.asarray(images),
            jnp.asarray(labels, jnp.int32),
            server={},
            key=jax.random.key_data(jax.random.key(seed)),
            round=jnp.int32(0),
        )
        sizes = [jnp.int32(len(own)) for own in rows]
        own = jnp.int32(client), train, sizes[0], test, sizes[1], jnp.float32(weight), jnp.int32(0)
        return cls(network, precision, inputs, Slots(*own))

    def visit(
        self, state: Client, server: Server, number: int, *, upload: bool = True
    ) -> tuple[Client, list[StageResult]]:
        """The client's work in round `number`.

        Args:
            state, server: what the client kept, and the broadcast.
            upload: otherwise a stage that only makes an upload is left out, unless there are
                statistics of the shared network to be had from it.

        Returns:
            Its new state, and the results of the stages; a stage that is not finite is the last.
        """
        inputs = self.inputs._replace(server=jax.device_put(server), round=jnp.int32(number))
        with matmul_precision(self.precision):
            stages = [_work(self.network, inputs, state, self.slot)]
            state = stages[0].state
            parts = shared_parts_of(inputs.method, state)
            if parts and stages[0].info["finite"] and (upload or PRIVATE_STATISTICS in state):
                stages.append(_work(None, inputs, parts, self.slot))
                if PRIVATE_STATISTICS in parts:
                    state = {**state, PRIVATE_STATISTICS: stages[1].state[PRIVATE_STATISTICS]}
        return state, stages

    def evaluate(self, state: Client, server: Server) -> dict[str, Any]:
        """Its accuracies on its test images, `accuracy/NAME`."""
        inputs = self.inputs._replace(server=jax.device_put(server))
        with matmul_precision(self.precision):
            return _evaluate(self.network, inputs, state, self.slot).info
