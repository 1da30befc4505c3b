"""A round as a function of programs and state: local work of participants, then the average."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.engine.compile import shapes_of
from pfedafm_jax.engine.programs import Programs
from pfedafm_jax.engine.schedule import Call, assign, merged, schedule
from pfedafm_jax.engine.state import State
from pfedafm_jax.engine.visit import Slots, Totals, Worked

Tree = Any
Numbers = dict[int, dict[str, Any]]  # client → name → number
MOVED_TOGETHER = 4  # states that travel between processes in one call


class RoundResult(NamedTuple):
    """Who took part in a round, and the numbers of each."""

    participants: np.ndarray  # int [K], in the order drawn
    info: dict[str, np.ndarray]  # each [K]: loss, accuracy/…, finite, and what the method reports


def draw_participants(seed: int, t: int, num_clients: int, num_participants: int) -> np.ndarray:
    """The participants of round `t`, in the order drawn; depends on nothing but seed and round."""
    generator = np.random.Generator(np.random.PCG64([seed, t, 0xD4A3]))
    return generator.choice(num_clients, num_participants, replace=False)


def participants_of(
    programs: Programs, t: int | np.ndarray, participants: Sequence[int] | np.ndarray | None
) -> list[int]:
    """Those given, or those drawn for round `t`."""
    if participants is None:
        config = programs.config
        counts = config.num_clients, config.num_participants
        participants = draw_participants(config.seed, int(t), *counts)
    return [int(client) for client in participants]


def run_round(
    programs: Programs,
    state: State,
    t: int | np.ndarray,
    participants: Sequence[int] | np.ndarray | None = None,
) -> tuple[State, RoundResult]:
    """One communication round.

    Args:
        state: that of the round before; its store is changed in place.
        t: the number of the round, which decides participants and batches.
        participants: the clients that take part, instead of those drawn.

    Returns:
        The state after the average, and the numbers of each participant.
    """
    order = participants_of(programs, t, participants)
    by_samples = programs.config.aggregation == "samples"
    weights = {k: float(programs.num_train[k]) if by_samples else 1.0 for k in order}
    state, mine = _fetched(programs, state, order)
    numbers: Numbers = {client: {} for client in mine}
    totals = [_train(programs, state, t, mine, weights, numbers)]
    if programs.method.shared_parts:
        weights = {client: weights[client] for client in mine if numbers[client]["finite"]}
        totals.append(_train_shared(programs, state, t, weights, numbers))
    state = _averaged(programs, state, totals)
    return state, RoundResult(np.array(order), _collected(programs, order, numbers))


def evaluate(
    programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Accuracy of (all) clients as they are, with the current broadcast: name → `[clients]`."""
    processes, compiled = programs.processes, programs.compiled
    clients = range(programs.config.num_clients) if clients is None else clients
    order = [int(client) for client in clients]
    home = np.where(state.home >= 0, state.home, np.arange(len(state.home)) % processes.count)
    mine = [client for client in order if processes.count == 1 or home[client] == processes.index]
    common = programs.common(state.server, 0)
    pending: list[tuple[Call, dict[str, jax.Array]]] = []
    numbers: Numbers = {client: {} for client in mine}
    for call in calls_of(programs, mine, programs.num_test):
        states = _states(programs, state, call)
        arguments = states, _slots(programs, call, {}), call.trips
        worked = compiled.evaluate[call.group](common, Totals({}, {}), *arguments)
        if programs.lockstep:
            programs.buffers.release(call, states)
        pending.append((call, worked.info))
        if len(pending) > 1:  # memory stays that of two calls, however many clients there are
            _report(*pending.pop(0), numbers)
    for call, info in pending:
        _report(call, info, numbers)
    found = _collected(programs, order, numbers)
    return {name: values for name, values in found.items() if name.startswith("accuracy/")}


# --------------------------------------------------------------------------------------- the stages


def _train(
    programs: Programs,
    state: State,
    t: int | np.ndarray,
    clients: list[int],
    weights: dict[int, float],
    numbers: Numbers,
) -> Totals:
    """Trains and evaluates these clients.

    Returns:
        The sums that the average is made of; states go to the store, what is reported to `numbers`.
    """
    compiled, common = programs.compiled, programs.common(state.server, t)
    totals = compiled.zeros[0]
    pending: list[tuple[Call, Tree, Tree]] = []
    for call in calls_of(programs, clients, programs.num_train):
        slots = _slots(programs, call, weights)
        states = _states(programs, state, call)
        worked: Worked = compiled.train[call.group](common, totals, states, slots, call.trips)
        totals, info = worked.totals, worked.info
        # `work` has evaluated clients whose update has a `view`; the others are evaluated here, with
        # the broadcast that they received.
        if not any(name.startswith("accuracy/") for name in info):
            evaluate, nothing = compiled.evaluate[call.group], Totals({}, {})
            info = {**info, **evaluate(common, nothing, worked.state, slots, call.trips).info}
        pending.append((call, worked.state, info))
        # In lockstep a device has two calls at most: the next one's states come while one works.
        while programs.lockstep and len(pending) > 1:
            _finish(programs, state, numbers, *pending.pop(0))
    for done in pending:
        _finish(programs, state, numbers, *done)
    return totals


def _finish(
    programs: Programs, state: State, numbers: Numbers, call: Call, states: Tree, info: Tree
) -> None:
    """Stores what a call's clients have become and reported."""
    if programs.lockstep:
        programs.buffers.save(call, states, state.store)
    else:
        rows = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), states)
        state.store.write(call.group, call.clients.reshape(-1), rows)
    _report(call, info, numbers)


def _train_shared(
    programs: Programs,
    state: State,
    t: int | np.ndarray,
    weights: dict[int, float],
    numbers: Numbers,
) -> Totals:
    """The stage that clients of all architectures go through together, for those with a weight."""
    compiled, common = programs.compiled, programs.common(state.server, t)
    assert compiled.shared is not None
    totals = compiled.zeros[1]
    for call in calls_of(programs, list(weights), programs.num_train, together=True):
        states, slots = _states(programs, state, call, True), _slots(programs, call, weights)
        worked = compiled.shared(common, totals, states, slots, call.trips)
        totals = worked.totals
        _report(call, worked.info, numbers)
    return totals


def _averaged(programs: Programs, state: State, totals: list[Totals]) -> State:
    """The state with the next broadcast, from the sums of all stages."""
    if programs.compiled.sum is None or programs.compiled.update is None:
        return state
    summed = programs.compiled.sum(totals)
    if programs.processes.count > 1:
        summed = programs.devices.replicate(programs.processes.sum(summed))
    server = programs.compiled.update(programs.numbers, state.server, summed)
    jax.block_until_ready(server)  # collectives of two rounds must never be under way together
    return state._replace(server=server)


# -------------------------------------------------------------------------------------------- calls


def calls_of(
    programs: Programs, clients: list[int], samples: np.ndarray, together: bool = False
) -> list[Call]:
    """Calls for these clients, or as one group, balanced by samples times cost of a model."""
    form, count = programs.form, programs.config.num_clients
    shares = [1.0] if together else [form.share(kind) for kind in shapes_of(form).kinds]
    macs = float(programs.method.shared.macs) if together else programs.macs
    plan = partial(
        schedule,
        groups=np.zeros_like(programs.groups) if together else programs.kinds,
        work=samples * macs,
        num_devices=len(programs.devices),
        clients_per_step=[form.step(share) for share in shares],
        slots=[form.slots(share) for share in shares],
    )
    runs = [[k for k in clients if k // count == run] for run in range(programs.runs)]
    return merged([plan(own) for own in runs])


def _states(programs: Programs, state: State, call: Call, together: bool = False) -> Tree:
    """States of a call's clients `[devices, slots, …]`, or of all groups the shared parts."""
    flat, store, parts = call.clients.reshape(-1), state.store, programs.method.shared_parts
    if programs.lockstep and not together:
        return programs.buffers.load(call, store)
    states = store.read_parts(parts, flat) if together else store.read(call.group, flat)
    return _folded(call, states)


def _slots(programs: Programs, call: Call, weights: dict[int, float]) -> Slots:
    """Data and weights of a call's clients `[devices, slots, …]`."""
    flat = call.clients.reshape(-1)

    def count(sizes: np.ndarray) -> np.ndarray:
        return np.where(flat >= 0, sizes[flat], 0).astype(np.int32)

    weight = np.array([weights.get(int(client), 0.0) for client in flat], np.float32)
    client = (np.maximum(flat, 0) % programs.config.num_clients).astype(np.int32)  # in its own run
    train, test = programs.train_rows[flat], programs.test_rows[flat]
    rows: Any = (client, train, count(programs.num_train), test, count(programs.num_test), weight)
    return _folded(call, Slots(*rows))


def _folded(call: Call, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(*call.clients.shape, *leaf.shape[1:]), tree)


def _report(call: Call, info: dict[str, jax.Array], numbers: Numbers) -> None:
    """Enters what slots reported under their clients."""
    clients = call.clients.reshape(-1).tolist()
    for name, values in info.items():
        for client, value in zip(clients, np.asarray(values).reshape(-1), strict=True):
            if client >= 0:
                numbers[client][name] = value


# -------------------------------------------------------------------------------- several processes


def _fetched(programs: Programs, state: State, order: list[int]) -> tuple[State, list[int]]:
    """The participants of this process, with the states of those that trained elsewhere before."""
    processes, store = programs.processes, state.store
    if processes.count == 1:
        return state, order
    work = programs.num_train * programs.macs
    process = assign(order, work, state.home, processes.devices)
    moving = [c for c, new in zip(order, process, strict=True) if state.home[c] not in (-1, new)]
    mine = [client for client, new in zip(order, process, strict=True) if new == processes.index]
    for group in range(len(programs.architectures)):
        members = [client for client in moving if programs.groups[client] == group]
        # Calls of one size: one program an architecture.
        for first in range(0, len(members), MOVED_TOGETHER):
            rows = np.full(MOVED_TOGETHER, -1)
            rows[: len(members[first:])] = members[first : first + MOVED_TOGETHER]
            here = np.where((rows >= 0) & (state.home[rows] == processes.index), rows, -1)
            states = processes.move(store.read(group, here))
            store.write(group, np.where(np.isin(rows, mine), rows, -1), states)
            store.forget(here)
    home = state.home.copy()
    home[order] = process
    store.changed[order] = True  # as in all other processes
    return state._replace(home=home), mine


def _collected(programs: Programs, order: list[int], numbers: Numbers) -> dict[str, np.ndarray]:
    """Numbers of all of `order`, each known to one process: name → `[clients]`."""
    names: Sequence[str] = programs.compiled.numbers
    if programs.processes.count == 1:
        names = [name for name in names if any(name in own for own in numbers.values())]
    missing = np.float32(np.nan)  # a client whose first stage failed has no numbers of the second
    table = np.zeros((len(names), len(order)), np.float32)
    for place, client in enumerate(order):
        if client in numbers:
            table[:, place] = [numbers[client].get(name, missing) for name in names]
    rows = zip(names, programs.processes.sum(table), strict=True)
    return {name: row.astype(bool) if name == "finite" else row for name, row in rows}
