"""Rounds of many clients: who changes and who does not, in which order, on how many devices, at
what size of step."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pfedafm_jax.engine import Devices, build, evaluate, run_round, start
from pfedafm_jax.engine.programs import TRACED
from pfedafm_jax.errors import PfedafmError


@pytest.fixture(scope="module")
def programs(config, dataset, partition):
    return build(config, dataset, partition)


@pytest.fixture
def state(programs):
    return start(programs)


def after(programs, *draws, state=None):
    """(state, results) after rounds with these participants; None: those drawn."""
    state, results = state or start(programs), []
    for t, participants in enumerate(draws):
        state, result = run_round(programs, state, t, participants)
        results.append(result)
    return state, results


def shared(state):
    return jax.device_get(state.server["shared_extractor"])


def states(state):
    return [state.store.state(client) for client in range(len(state.home))]


def moved(one, other) -> bool:
    return any(
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    )


# -------------------------------------------------------------------------------------- who changes


def test_clients_that_were_not_drawn_are_untouched(programs, state):
    before, server = states(state), shared(state)
    state, [result] = after(programs, [4, 1], state=state)
    assert result.participants.tolist() == [4, 1]
    for client, (old, new) in enumerate(zip(before, states(state), strict=True)):
        if client in (1, 4):
            assert all(moved(old[part], new[part]) for part in ("local_extractor", "header", "mix"))
        else:
            chex.assert_trees_all_equal(old, new)
    assert moved(server, shared(state))
    assert state.store.visited.tolist() == [False, True, False, False, True, False]


def test_participants_are_evaluated_with_what_they_received(programs, state):
    received = state.server
    state, [result] = after(programs, [2, 3, 5], state=state)
    scores = evaluate(programs, state._replace(server=received), [2, 3, 5])
    for name, values in scores.items():
        np.testing.assert_array_equal(result.info[name], values)


def test_evaluation_of_some_equals_theirs_among_all(programs):
    state, _ = after(programs, None)
    before = states(state)
    everyone, some = evaluate(programs, state), evaluate(programs, state, [5, 0, 4])
    assert set(everyone) == {"accuracy/mixed", "accuracy/small", "accuracy/large"}
    for name in everyone:
        np.testing.assert_array_equal(everyone[name][[5, 0, 4]], some[name])
        assert np.all((everyone[name] >= 0) & (everyone[name] <= 1))
    chex.assert_trees_all_equal(before, states(state))


def test_mix_stays_between_zero_and_one(programs):
    state, results = after(programs, None, None, None)
    for result in results:
        assert np.all((result.info["mix_mean"] >= 0) & (result.info["mix_mean"] <= 1))
    mixes = np.stack([one["mix"] for one in states(state)])
    assert mixes.min() >= 0 and mixes.max() == 1 and mixes.min() < 1


def test_a_group_without_participants(programs):
    state, [result] = after(programs, [0, 2])  # both of the first architecture
    assert np.all(result.info["finite"]) and len(result.info["loss"]) == 2
    assert not state.store.visited[[1, 3, 5]].any()


def test_more_participants_than_slots_take_more_calls(programs):
    alone = [after(programs, [client])[0].store.state(client) for client in range(6)]
    state, [result] = after(programs, range(6))
    assert result.participants.tolist() == list(range(6))
    chex.assert_trees_all_equal(states(state), alone)  # nobody depends on who else is there


# -------------------------------------------------------------------------------------- the average


def test_the_order_of_participants_does_not_matter(programs):
    one, _ = after(programs, [0, 1, 4])
    other, _ = after(programs, [4, 0, 1])
    chex.assert_trees_all_close(shared(one), shared(other), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(states(one), states(other))


def test_the_average_is_by_samples_and_not_the_last_client(programs, config, dataset, partition):
    own = [shared(after(programs, [client])[0]) for client in (0, 1, 4)]
    expected = jax.tree.map(lambda a, b, c: (21 * a + 16 * b + 19 * c) / np.float32(56), *own)
    together = shared(after(programs, [0, 1, 4])[0])
    chex.assert_trees_all_close(together, expected, rtol=1e-4, atol=1e-6)
    assert moved(together, own[2])

    uniform = dataclasses.replace(
        programs, config=dataclasses.replace(config, aggregation="uniform")
    )
    expected = jax.tree.map(lambda a, b, c: (a + b + c) / np.float32(3), *own)
    chex.assert_trees_all_close(
        shared(after(uniform, [0, 1, 4])[0]), expected, rtol=1e-4, atol=1e-6
    )


def poison(state, client):
    """NaN in a client's header."""
    poisoned = jax.tree.map(np.array, state.store.state(client))
    poisoned["header"]["kernel"][:] = np.nan
    state.store.write(
        int(state.store.groups[client]), [client], jax.tree.map(lambda leaf: leaf[None], poisoned)
    )
    return poisoned


def test_an_update_that_is_not_finite_is_kept_out_and_reported(programs, state):
    good, _ = after(programs, [0, 4])
    poisoned = poison(state, 1)
    state, [result] = after(programs, [0, 1, 4], state=state)
    assert result.info["finite"].tolist() == [True, False, True]
    assert np.isfinite(result.info["loss"]).tolist() == [True, False, True]
    chex.assert_trees_all_equal(shared(state), shared(good))
    chex.assert_trees_all_equal(state.store.state(1), poisoned)
    chex.assert_trees_all_equal(state.store.state(4), good.store.state(4))


def test_the_broadcast_stays_where_nobody_is_finite(programs, state):
    before = shared(state)
    poison(state, 3)
    state, [result] = after(programs, [3], state=state)
    assert not result.info["finite"].any()
    chex.assert_trees_all_equal(shared(state), before)


# ----------------------------------------------------------------------------------- the same again


def test_the_same_seed_gives_the_same_bits(programs):
    results = []
    for _ in range(2):
        state, rounds = after(programs, None, None)
        results.append((shared(state), states(state), [round_.info for round_ in rounds]))
    chex.assert_trees_all_equal(*results)


def test_another_seed_gives_other_bits(programs, config, dataset, partition):
    other = build(dataclasses.replace(config, seed=6), dataset, partition)
    assert moved(shared(start(programs)), shared(start(other)))
    assert moved(start(programs).store.state(0), start(other).store.state(0))
    ours, theirs = after(programs, [0])[0], after(other, [0], state=start(programs))[0]
    assert moved(ours.store.state(0), theirs.store.state(0))  # the same start, but other batches


def test_rounds_differ_in_their_batches(programs):
    one, _ = run_round(programs, start(programs), 0, [0])
    other, _ = run_round(programs, start(programs), 1, [0])
    assert moved(one.store.state(0), other.store.state(0))


def test_nothing_is_traced_after_the_first_round(programs):
    after(programs, None)
    traced = dict(TRACED)
    assert min(traced.values()) >= 1 and {"train", "evaluate", "shared", "update"} <= set(traced)
    state, _ = after(programs, None, None, [0], [1, 3], range(6), [0, 2, 4])
    evaluate(programs, state)
    evaluate(programs, state, [1])
    assert traced == TRACED


def test_clients_wait_on_disk_as_in_memory(programs, config, tmp_path):
    results = []
    for store in ("memory", "disk"):
        placed = dataclasses.replace(programs, config=dataclasses.replace(config, store=store))
        state = start(placed, str(tmp_path))
        assert state.store.on_disk == (store == "disk")
        state, _ = after(placed, None, None, state=state)
        results.append((shared(state), states(state)))
    chex.assert_trees_all_equal(*results)


# -------------------------------------------------------------------------------- devices and steps


@pytest.mark.parametrize(
    ("devices", "size"), [(4, 2), (1, 3), pytest.param(2, 1, marks=pytest.mark.slow)]
)
def test_devices_and_clients_per_step_change_nothing(
    programs, config, dataset, partition, devices, size
):
    draws = [[4, 0, 3, 1], [2, 5, 0, 4]]
    other = build(
        dataclasses.replace(config, devices=devices, clients_per_step=size), dataset, partition
    )
    assert len(other.devices) == devices and other.clients_per_step == size
    (one, ours), (two, theirs) = after(programs, *draws), after(other, *draws)
    for here, there in zip(ours, theirs, strict=True):
        chex.assert_trees_all_close(here.info, there.info, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(shared(one), shared(two), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(states(one), states(two), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(evaluate(programs, one), evaluate(other, two))


def test_too_many_devices_are_refused():
    with pytest.raises(PfedafmError, match=r"devices = 99 .*0 \(all\) to 4"):
        Devices(99)


def test_one_client_of_two_architectures(config, dataset, partition):
    alone = dataclasses.replace(config, num_clients=1, participation=1.0)
    parts = dataclasses.replace(partition, train=partition.train[:1], test=partition.test[:1])
    programs = build(alone, dataset, parts)
    state, [result] = after(programs, None)
    assert result.participants.tolist() == [0] and result.info["finite"].all()
    assert len(evaluate(programs, state)["accuracy/mixed"]) == 1


def test_costs_follow_the_participants(programs):
    costs = programs.costs([0, 1])
    by_hand = [programs.method.cost(programs.architectures[k], (21, 16)[k], 4) for k in (0, 1)]
    assert costs == by_hand
