"""Rounds of many clients: who changes and who does not, on how many devices, at what size of step.

What holds for every method (who takes no part is untouched, the order of the others does not
matter, a run repeats to the bit) is in `methods/test_all_methods.py`.
"""

import dataclasses

import chex
import jax
import numpy as np
import pytest
from small import (
    all_moved,
    engine_of,
    plain_loop,
    same,
    small_config,
    small_data,
    states,
    with_config,
)

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.engine import Devices
from pfedafm_jax.engine.programs import TRACED
from pfedafm_jax.results import plots
from pfedafm_jax.runs.experiment import Experiment


@pytest.fixture(scope="module")
def programs(config, dataset, partition):
    return engine_of(config, dataset, partition)


@pytest.fixture
def state(programs):
    return programs.start()


def after(programs, *draws, state=None):
    """(state, results) after rounds with these participants; None: those drawn."""
    state, results = state or programs.start(), []
    for t, participants in enumerate(draws):
        state, result = programs.run_round(state, t, participants)
        results.append(result)
    return state, results


def shared(state):
    return jax.device_get(state.server["shared_extractor"])


def test_every_part_of_a_participant_is_trained_and_nobody_depends_on_who_else_is_there(programs):
    before = states(programs.start())
    alone = [after(programs, [client])[0].clients.state(client) for client in range(6)]
    assert all(all_moved(old, new) for old, new in zip(before, alone, strict=True))
    state, [result] = after(programs, range(6))  # more than slots: more calls
    assert result.participants.tolist() == list(range(6))
    chex.assert_trees_all_equal(states(state), alone)
    state, [result] = after(programs, [4, 2])  # both of the first architecture
    assert result.participants.tolist() == [4, 2] and np.all(result.reports["finite"])
    assert state.clients.visited.tolist() == [False, False, True, False, True, False]


def test_participants_are_evaluated_with_what_they_received(programs, state):
    received = state.server
    state, [result] = after(programs, [2, 3, 5], state=state)
    scores = programs.evaluate(state._replace(server=received), [2, 3, 5])
    for name, values in scores.items():
        np.testing.assert_array_equal(result.reports[name], values)


def test_evaluation_of_some_equals_theirs_among_all_and_changes_nobody(programs):
    state, _ = after(programs, None)
    before = states(state)
    everyone, some = programs.evaluate(state), programs.evaluate(state, [5, 0, 4])
    assert set(everyone) == {"accuracy/mixed", "accuracy/small", "accuracy/large"}
    for name in everyone:
        np.testing.assert_array_equal(everyone[name][[5, 0, 4]], some[name])
        assert np.all((everyone[name] >= 0) & (everyone[name] <= 1))
    chex.assert_trees_all_equal(before, states(state))


def test_the_average_is_by_samples_or_uniform_and_not_the_last_client(programs, config):
    own = [shared(after(programs, [client])[0]) for client in (0, 1, 4)]
    uniform = updated(config, aggregation="uniform")
    for settings, sizes in ((config, (21, 16, 19)), (uniform, (1, 1, 1))):
        shares = np.float32(sizes) / np.float32(sum(sizes))
        expected = jax.tree.map(lambda *leaves, s=shares: np.tensordot(s, leaves, 1), *own)
        found = shared(after(with_config(programs, aggregation=settings.aggregation), [0, 1, 4])[0])
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-6)
        assert not same(found, own[2])


@pytest.mark.parametrize("wrong", [[0, 6], [-1], [2, 2]])
def test_participants_that_are_none_are_refused(programs, state, wrong):
    with pytest.raises(PfedafmError, match=r"participants = .* accepted: 0 to 5, each once"):
        programs.run_round(state, 1, wrong)


def poison(state, client):
    """NaN in a client's header."""
    poisoned = state.clients.state(client)
    poisoned["header"]["kernel"][:] = np.nan
    state.clients.write(client, poisoned)
    return poisoned


def test_an_update_that_is_not_finite_is_kept_out_and_reported(programs, state):
    good, _ = after(programs, [0, 4])
    poisoned = poison(state, 1)
    state, [result] = after(programs, [0, 1, 4], state=state)
    assert result.reports["finite"].tolist() == [True, False, True]
    assert np.isfinite(result.reports["loss"]).tolist() == [True, False, True]
    chex.assert_trees_all_equal(shared(state), shared(good))
    chex.assert_trees_all_equal(state.clients.state(1), poisoned)
    chex.assert_trees_all_equal(state.clients.state(4), good.clients.state(4))


def test_an_update_that_is_not_finite_is_evaluated_with_what_was_received():
    config = small_config("fedper", learning_rate=1e6, local_epochs=9)
    programs = engine_of(config, *small_data())
    expected = programs.evaluate(programs.start(), [0, 1, 3])
    assert len(expected)
    for loop in (programs, plain_loop(programs)):
        _, result = loop.run_round(programs.start(), 1, [0, 1, 3])
        assert not result.reports["finite"].any()
        for name, values in expected.items():
            np.testing.assert_array_equal(result.reports[name], values)


def test_the_broadcast_stays_where_nobody_is_finite(programs, state):
    before = shared(state)
    poison(state, 3)
    state, [result] = after(programs, [3], state=state)
    assert not result.reports["finite"].any()
    chex.assert_trees_all_equal(shared(state), before)


def test_seeds_and_rounds_differ_in_their_starts_and_batches(programs, config, dataset, partition):
    other = engine_of(updated(config, seed=6), dataset, partition)
    assert not same(shared(programs.start()), shared(other.start()))
    assert not same(programs.start().clients.state(0), other.start().clients.state(0))
    ours, theirs = after(programs, [0])[0], after(other, [0], state=programs.start())[0]
    assert not same(ours.clients.state(0), theirs.clients.state(0))  # the same start, other batches
    one, _ = programs.run_round(programs.start(), 0, [0])
    later, _ = programs.run_round(programs.start(), 1, [0])
    assert not same(one.clients.state(0), later.clients.state(0))


def test_nothing_is_traced_after_the_first_round(programs):
    after(programs, None)
    traced = dict(TRACED)
    assert min(traced.values()) >= 1 and {"train", "evaluate", "shared", "update"} <= set(traced)
    state, _ = after(programs, None, None, [0], [1, 3], range(6), [0, 2, 4])
    programs.evaluate(state)
    programs.evaluate(state, [1])
    assert traced == TRACED


def test_clients_wait_on_disk_as_in_memory(programs, config, tmp_path):
    results = []
    for store in ("memory", "disk"):
        placed = with_config(programs, store=store)
        state = placed.start(str(tmp_path))
        assert state.clients.on_disk == (store == "disk")
        state, _ = after(placed, None, None, state=state)
        results.append((shared(state), states(state)))
    chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize(
    ("devices", "size"), [(4, 2), *(pytest.param(*p, marks=pytest.mark.slow) for p in ((1, 3), (2, 1)))]
)  # fmt: skip
def test_devices_and_clients_per_step_change_nothing(
    programs, config, dataset, partition, devices, size
):
    draws = [[4, 0, 3, 1], [2, 5, 0, 4]]
    spread = updated(config, devices=devices, clients_per_step=size)
    other = engine_of(spread, dataset, partition)
    assert len(other.devices) == devices and other.clients_per_step == size
    (one, ours), (two, theirs) = after(programs, *draws), after(other, *draws)
    for here, there in zip(ours, theirs, strict=True):
        chex.assert_trees_all_close(here.reports, there.reports, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(shared(one), shared(two), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(states(one), states(two), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(programs.evaluate(one), other.evaluate(two))


def test_too_many_devices_are_refused():
    with pytest.raises(PfedafmError, match=r"devices = 99 .*0 \(all\) to 4"):
        Devices(99)


@pytest.mark.slow
def test_one_client_of_two_architectures(config, dataset, partition):
    alone = updated(config, num_clients=1, participation=1.0)
    parts = dataclasses.replace(partition, train=partition.train[:1], test=partition.test[:1])
    programs = engine_of(alone, dataset, parts)
    state, [result] = after(programs, None)
    assert result.participants.tolist() == [0] and result.reports["finite"].all()
    assert len(programs.evaluate(state)["accuracy/mixed"]) == 1


def test_costs_follow_the_participants(programs):
    costs = [programs.federation.cost_of_visit(client) for client in (0, 1)]
    by_hand = [
        programs.method.cost(programs.federation.architectures[k], (21, 16)[k], 4) for k in (0, 1)
    ]
    assert costs == by_hand


def test_a_client_without_test_images_counts_in_no_mean(config, dataset, partition):
    untested = (partition.test[0][:0], *partition.test[1:])
    config = updated(config, participation=1.0, method="standalone", rounds=1)
    experiment = Experiment(config, dataset, dataclasses.replace(partition, test=untested))
    (record,) = experiment.rounds()
    scores = experiment.result().clients["visits/accuracy"][0]
    assert np.isnan(scores[0]) and np.isfinite(scores[1:]).all()
    assert record.mean_accuracy == pytest.approx(scores[1:].mean(), abs=1e-6)
    assert record.all_clients_accuracy == pytest.approx(scores[1:].mean(), abs=1e-6)
    assert record.not_finite == 0
    assert experiment.summary().spread_over_clients == pytest.approx(scores[1:].std(), abs=1e-6)
    plots.accuracy_by_client(scores, experiment.federation.groups, ["a", "b"])
