"""A round as a function of programs and state: participants train, then uploads are aggregated."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.config.config import Config
from pfedafm_jax.engine.federation import Programs
from pfedafm_jax.engine.programs import shapes_of
from pfedafm_jax.engine.schedule import Call, schedule
from pfedafm_jax.engine.state import State
from pfedafm_jax.engine.store import stacked
from pfedafm_jax.engine.visit import PRIVATE_STATISTICS, Slots, Totals, Worked
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of

Tree = Any
Reports = dict[int, dict[str, Any]]  # client → name → number
Entries = dict[int, tuple[float, int]]  # client → its weight and its rank, see `Slots`


class RoundResult(NamedTuple):
    """The participants of a round, and what each reported."""

    participants: np.ndarray  # int [K], in the order drawn, without those that dropped out
    info: dict[str, np.ndarray]  # each [K]: loss, accuracy/…, finite, and what the method reports
    dropped: Sequence[int] = ()  # clients that were drawn and dropped out


def draw_participants(seed: int, t: int, num_clients: int, num_participants: int) -> np.ndarray:
    """The participants of round `t`, in the order drawn; they depend on seed and round only."""
    generator = np.random.Generator(np.random.PCG64([seed, t, 0xD4A3]))
    return generator.choice(num_clients, num_participants, replace=False)


def participants_of(
    config: Config, t: int, given: Sequence[int] | np.ndarray | None = None
) -> tuple[list[int], list[int]]:
    """Who takes part in round `t` to its end, in the order drawn, and who of those drawn drops out.

    Both depend on nothing but seed and round. Clients that are `given` take part, all of them.
    """
    if given is not None:
        return [int(client) for client in given], []
    order = draw_participants(config.seed, t, config.num_clients, config.num_participants)
    generator = np.random.Generator(np.random.PCG64([config.seed, t, 0xD209]))
    gone = generator.random(config.num_clients)[order] < config.dropout
    return order[~gone].tolist(), order[gone].tolist()


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One communication round.

    Args:
        state: that after the previous round; its store is changed in place.
        t: the number of the round, which determines participants and batches.
        participants: clients to train instead of those drawn.

    Returns:
        The next state, and what each participant reported.
    """
    config = programs.config
    order, dropped = participants_of(config, t, participants)
    if len(set(order)) < len(order) or not all(0 <= k < config.num_clients for k in order):
        raise bad("participants", order, f"0 to {config.num_clients - 1}, each once")
    if programs.method.sees_uploads and len(order) > config.num_participants:
        accepted = f"{config.num_participants} at most, where the server sees single uploads"
        raise bad("participants", len(order), accepted)
    by_samples = config.aggregation == "samples"
    weights = {k: float(programs.num_train[k]) if by_samples else 1.0 for k in order}
    entries = {k: (weights[k], rank) for rank, k in enumerate(order)}
    entries_here = {k: entry for k, entry in entries.items() if programs.processes.keeps(k)}
    reports: Reports = {k: {} for k in entries_here}
    totals = [_train(programs, state, t, entries_here, reports)]
    if programs.method.shared_parts:
        finite = {k: entry for k, entry in entries_here.items() if reports[k]["finite"]}
        totals.append(_train(programs, state, t, finite, reports, shared_stage=True))
    state.store.written_elsewhere([k for k in order if k not in entries_here])
    state = aggregate(programs, state, t, order, totals)
    return state, RoundResult(np.array(order, int), _collected(programs, order, reports), dropped)


def evaluate(
    programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Accuracies of these clients, or of all, with the current broadcast: name → `[clients]`."""
    if clients is None:
        clients = range(programs.config.num_clients)
    order = [int(client) for client in clients]
    mine = [client for client in order if programs.processes.keeps(client)]
    common = programs.common(judged_of(state.server), 0)
    pending: list[tuple[Call, dict[str, jax.Array]]] = []
    reports: Reports = {client: {} for client in mine}
    for call in calls_of(programs, mine, programs.num_test):
        states = _states(programs, state, call)
        arguments = states, _slots(programs, call, {}), call.trips
        worked = programs.compiled.evaluate[call.kind](common, Totals({}, {}), *arguments)
        if programs.lockstep:
            programs.buffers.release(call, states)
        pending.append((call, worked.info))
        if len(pending) > 1:  # at most two calls in memory, however many clients there are
            _report(*pending.pop(0), reports)
    for call, info in pending:
        _report(call, info, reports)
    found = _collected(programs, order, reports)
    return {name: values for name, values in found.items() if name.startswith("accuracy/")}


# --------------------------------------------------------------------------------------- the stages


def _train(
    programs: Programs,
    state: State,
    t: int,
    entries: Entries,
    reports: Reports,
    shared_stage: bool = False,
) -> Totals:
    """Trains the clients in `entries`: in the stage of their own architectures, after which they are
    evaluated, or in the one that all architectures share.

    Returns:
        The sums for the average. States go to the store, reports to `reports`.
    """
    compiled, common = programs.compiled, programs.common(broadcast_of(state.server), t)
    stage: Any = (compiled.shared,) if shared_stage else compiled.train
    totals, nothing, pending = compiled.zeros[int(shared_stage)], Totals({}, {}), []

    def finish(call: Call, states: Tree, info: Tree) -> None:
        if shared_stage:  # it changes private statistics only, and has only some parts of a state
            states = {name: states[name] for name in states if name == PRIVATE_STATISTICS}
        if programs.lockstep and not shared_stage:
            programs.buffers.save(call, states, state.store)
        else:
            for client, own in _each(call, states) if states else ():
                whole = state.store.state(client) if shared_stage else {}
                state.store.write(client, {**whole, **own})
        _report(call, info, reports)

    for call in calls_of(programs, list(entries), programs.num_train, shared_stage):
        slots = _slots(programs, call, entries)
        states = _states(programs, state, call, shared_stage)
        worked: Worked = stage[call.kind](common, totals, states, slots, call.trips)
        totals, info = worked.totals, worked.info
        # `work` has evaluated clients whose update has a `view`; the others are evaluated here, with
        # the broadcast that they received.
        if not shared_stage and not any(name.startswith("accuracy/") for name in info):
            evaluate = compiled.evaluate[call.kind]
            info = {**info, **evaluate(common, nothing, worked.state, slots, call.trips).info}
        pending.append((call, worked.state, info))
        # In lockstep at most two calls are in progress: one computes while the next is copied.
        while programs.lockstep and len(pending) > 1:
            finish(*pending.pop(0))
    for done in pending:
        finish(*done)
    return totals


def aggregate(
    programs: Programs, state: State, t: int, participants: list[int], totals: list[Totals]
) -> State:
    """The state with the next broadcast, computed from the totals of all stages."""
    if programs.compiled.sum is None or programs.compiled.update is None:
        return state
    summed = programs.compiled.sum(totals)
    if programs.processes.count > 1:
        summed = programs.devices.replicate(programs.processes.sum(summed))
    common, config = programs.common(broadcast_of(state.server), t), programs.config
    drawn = np.full(config.num_participants, config.num_clients, np.int32)
    drawn[: len(participants)] = participants[: config.num_participants]
    order = programs.devices.replicate(drawn)
    arguments = common.method, state.server, summed, order, common.key, common.round
    server = programs.compiled.update(*arguments)
    jax.block_until_ready(server)  # collectives of two rounds must not overlap
    return state._replace(server=server)


# -------------------------------------------------------------------------------------------- calls


def calls_of(
    programs: Programs, clients: list[int], samples: np.ndarray, shared_stage: bool = False
) -> list[Call]:
    """Calls that cover these clients, by kind, or of the `shared_stage`; balanced by cost."""
    form = programs.form
    if shared_stage:
        kinds = [None]
        kind_of_client = np.zeros_like(programs.groups)
        macs = float(programs.method.shared.macs)
    else:
        kinds = shapes_of(form).kinds
        kind_of_client = programs.kinds
        macs = programs.macs
    return schedule(
        clients,
        kind_of_client,
        costs=samples * macs,
        num_devices=len(programs.devices),
        clients_per_step=[form.step(kind) for kind in kinds],
        slots=[form.slots(kind) for kind in kinds],
    )


def _states(programs: Programs, state: State, call: Call, shared_stage: bool = False) -> Tree:
    """States of a call's clients `[devices, slots, …]`; of the `shared_stage`, parts of them."""
    store, shapes = state.store, programs.compiled.shapes
    if programs.lockstep and not shared_stage:
        return programs.buffers.load(call, store)
    # In a loop, kinds are architectures.
    like = shapes.parts if shared_stage else shapes.starts[call.kind]
    clients = call.clients.reshape(-1).tolist()
    states = [store.state(client, tuple(like)) if client >= 0 else None for client in clients]
    return _folded(call, stacked(states, like))


def _slots(programs: Programs, call: Call, entries: Entries) -> Slots:
    """Data and weights of a call's clients `[devices, slots, …]`."""
    flat = call.clients.reshape(-1)

    def count(sizes: np.ndarray) -> np.ndarray:
        return np.where(flat >= 0, sizes[flat], 0).astype(np.int32)

    nobody = 0.0, programs.config.num_participants
    own = [entries.get(int(client), nobody) for client in flat]
    weight = np.array([weight for weight, _ in own], np.float32)
    rank = np.array([rank for _, rank in own], np.int32)
    client = np.maximum(flat, 0).astype(np.int32)
    train, test = programs.train_rows[flat], programs.test_rows[flat]
    sizes = count(programs.num_train), count(programs.num_test)
    rows: Any = (client, train, sizes[0], test, sizes[1], weight, rank)
    return _folded(call, Slots(*rows))


def _folded(call: Call, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(*call.clients.shape, *leaf.shape[1:]), tree)


def _each(call: Call, tree: Tree) -> Iterator[tuple[int, Tree]]:
    """A call's clients, each with its own of arrays `[devices, slots, …]`."""
    arrays = jax.tree.map(np.asarray, tree)
    for device, slot in np.argwhere(call.clients >= 0).tolist():
        own = jax.tree.map(lambda leaf, at=(device, slot): leaf[at], arrays)
        yield int(call.clients[device, slot]), own


def _report(call: Call, info: dict[str, jax.Array], reports: Reports) -> None:
    """Adds what each slot reported to its client's reports."""
    for client, own in _each(call, info):
        reports[client] |= own


# -------------------------------------------------------------------------------- several processes


def _collected(programs: Programs, order: list[int], reports: Reports) -> dict[str, np.ndarray]:
    """Reports of all clients in `order`, gathered from their processes: name → `[clients]`."""
    names: Sequence[str] = programs.compiled.reported
    if programs.processes.count == 1:
        names = [name for name in names if any(name in own for own in reports.values())]
    missing = np.float32(np.nan)  # a client whose first stage was discarded has no second one
    table = np.zeros((len(names), len(order)), np.float32)
    for column, client in enumerate(order):
        if client in reports:
            table[:, column] = [reports[client].get(name, missing) for name in names]
    rows = zip(names, programs.processes.sum(table), strict=True)
    return {name: row.astype(bool) if name == "finite" else row for name, row in rows}
