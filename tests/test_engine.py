"""Rounds of many clients: who changes and who does not, in which order, on how many devices, at what size of step."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from pfedafm_jax.config import updated
from pfedafm_jax.engine import Devices, Federation
from pfedafm_jax.errors import PfedafmError


@pytest.fixture(scope="module")
def compiled(config, dataset, partition):
    made = Federation(config, dataset, partition)
    made.compile()
    return made


@pytest.fixture
def federation(compiled, monkeypatch):
    """A federation at its start; compiled once for all tests."""
    monkeypatch.setattr(compiled, "config", compiled.config)  # tests may change it; it comes back
    compiled.store, compiled.server = compiled._start(None)
    return compiled


def restart(federation, folder=None, **settings):
    """Back to the start, with settings that need no other program."""
    federation.config = dataclasses.replace(federation.config, **settings)
    federation.store, federation.server = federation._start(folder)
    return federation


def shared(federation):
    return jax.device_get(federation.server["shared_extractor"])


def states(federation):
    return [federation.store.state(client) for client in range(federation.config.num_clients)]


def moved(one, other) -> bool:
    return any(not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


# ---------------------------------------------------------------------------------------------- who changes


def test_clients_that_were_not_drawn_are_untouched(federation):
    before, server = states(federation), shared(federation)
    result = federation.run_round(0, [4, 1])
    assert result.participants.tolist() == [4, 1]
    for client, (old, new) in enumerate(zip(before, states(federation), strict=True)):
        if client in (1, 4):
            assert all(moved(old[part], new[part]) for part in ("local_extractor", "header", "mix"))
        else:
            chex.assert_trees_all_equal(old, new)
    assert moved(server, shared(federation))
    assert federation.store.visited.tolist() == [False, True, False, False, True, False]


def test_each_phase_leaves_what_is_frozen(federation, monkeypatch):
    program, seen = federation._programs["shared"], {}

    def watched(common, *rest):
        seen["server"], seen["clients"] = jax.device_get(common.server["shared_extractor"]), states(federation)
        return program(common, *rest)

    monkeypatch.setitem(federation._programs, "shared", watched)
    received, start = shared(federation), states(federation)
    federation.run_round(0, [0, 1, 2])
    chex.assert_trees_all_equal(seen["server"], received)  # phase 1 left the shared extractor
    assert all(moved(start[client]["header"], seen["clients"][client]["header"]) for client in (0, 1, 2))
    chex.assert_trees_all_equal(seen["clients"], states(federation))  # phase 2 left everything else


def test_participants_are_judged_with_what_they_received(federation):
    received = federation.server
    result = federation.run_round(0, [2, 3, 5])
    federation.server = received
    scores = federation.evaluate([2, 3, 5])
    for name, values in scores.items():
        np.testing.assert_array_equal(result.info[name], values)


def test_evaluation_of_some_equals_theirs_among_all(federation):
    federation.run_round(0)
    before = states(federation)
    everyone, some = federation.evaluate(), federation.evaluate([5, 0, 4])
    assert set(everyone) == {"accuracy/mixed", "accuracy/small", "accuracy/large"}
    for name in everyone:
        np.testing.assert_array_equal(everyone[name][[5, 0, 4]], some[name])
        assert np.all((everyone[name] >= 0) & (everyone[name] <= 1))
    chex.assert_trees_all_equal(before, states(federation))


def test_mix_stays_between_zero_and_one(federation):
    for index in range(3):
        result = federation.run_round(index)
        assert np.all((result.info["mix_mean"] >= 0) & (result.info["mix_mean"] <= 1))
    mixes = np.stack([state["mix"] for state in states(federation)])
    assert mixes.min() >= 0 and mixes.max() == 1 and mixes.min() < 1


def test_a_group_without_participants(federation):
    result = federation.run_round(0, [0, 2])  # both of the first architecture
    assert np.all(result.info["finite"]) and len(result.info["loss"]) == 2
    assert not federation.store.visited[[1, 3, 5]].any()


def test_more_participants_than_slots_take_more_calls(federation):
    alone = {}
    for client in range(6):
        restart(federation).run_round(0, [client])
        alone[client] = federation.store.state(client)
    result = restart(federation).run_round(0, range(6))
    assert result.participants.tolist() == list(range(6))
    chex.assert_trees_all_equal(states(federation), list(alone.values()))  # nobody depends on who else is there


# ---------------------------------------------------------------------------------------------- the average


def test_the_order_of_participants_does_not_matter(federation):
    federation.run_round(0, [0, 1, 4])
    one, clients = shared(federation), states(federation)
    restart(federation).run_round(0, [4, 0, 1])
    chex.assert_trees_all_close(one, shared(federation), rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(clients, states(federation))


def test_the_average_is_by_samples_and_not_the_last_client(federation):
    own = {}
    for client in (0, 1, 4):
        restart(federation).run_round(0, [client])
        own[client] = shared(federation)
    expected = jax.tree.map(lambda a, b, c: (21 * a + 16 * b + 19 * c) / np.float32(56), *own.values())
    restart(federation).run_round(0, [0, 1, 4])
    chex.assert_trees_all_close(shared(federation), expected, rtol=1e-4, atol=1e-6)
    assert moved(shared(federation), own[4])

    restart(federation, aggregation="uniform").run_round(0, [0, 1, 4])
    expected = jax.tree.map(lambda a, b, c: (a + b + c) / np.float32(3), *own.values())
    chex.assert_trees_all_close(shared(federation), expected, rtol=1e-4, atol=1e-6)

    restart(federation, aggregation="last").run_round(0, [0, 1, 4])
    chex.assert_trees_all_close(shared(federation), own[4], rtol=1e-6, atol=1e-7)


def test_with_one_participant_all_averages_agree(federation):
    results = []
    for aggregation in ("samples", "uniform", "last"):
        restart(federation, aggregation=aggregation).run_round(0, [2])
        results.append(shared(federation))
    chex.assert_trees_all_close(*results, rtol=1e-6, atol=1e-7)


def poison(federation, client):
    state = jax.tree.map(np.array, federation.store.state(client))
    state["header"]["kernel"][:] = np.nan
    federation.store.write(int(federation.groups[client]), [client], jax.tree.map(lambda leaf: leaf[None], state))
    return state


def test_an_update_that_is_not_finite_is_kept_out_and_reported(federation):
    federation.run_round(0, [0, 4])
    expected, clients = shared(federation), states(federation)
    poisoned = poison(restart(federation), 1)
    result = federation.run_round(0, [0, 1, 4])
    assert result.info["finite"].tolist() == [True, False, True]
    assert np.isfinite(result.info["loss"]).tolist() == [True, False, True]
    chex.assert_trees_all_equal(shared(federation), expected)
    chex.assert_trees_all_equal(federation.store.state(1), poisoned)
    chex.assert_trees_all_equal(federation.store.state(4), clients[4])


def test_the_broadcast_stays_where_nobody_is_finite(federation):
    before = shared(federation)
    poison(federation, 3)
    result = federation.run_round(0, [3])
    assert not result.info["finite"].any()
    chex.assert_trees_all_equal(shared(federation), before)


# ---------------------------------------------------------------------------------------------- the same again


def test_the_same_seed_gives_the_same_bits(federation):
    results = []
    for _ in range(2):
        restart(federation)
        rounds = [federation.run_round(index) for index in range(2)]
        results.append((shared(federation), states(federation), [round_.info for round_ in rounds]))
    chex.assert_trees_all_equal(*results)


def test_another_seed_gives_other_bits(federation, dataset, partition):
    other = Federation(dataclasses.replace(federation.config, seed=6), dataset, partition)
    assert moved(shared(federation), shared(other))
    assert moved(federation.store.state(0), other.store.state(0))
    other.server, other.store = federation.server, restart(federation).store
    other.run_round(0, [0])  # the same start, but other batches
    ours = restart(federation)
    ours.run_round(0, [0])
    assert moved(ours.store.state(0), other.store.state(0))


def test_rounds_differ_in_their_batches(federation):
    federation.run_round(0, [0])
    one = federation.store.state(0)
    restart(federation).run_round(1, [0])
    assert moved(one, federation.store.state(0))


def test_nothing_is_traced_after_the_first_round(federation):
    federation.run_round(0)
    traces = federation.traces
    assert traces >= 6  # two architectures, each trained and judged; the shared stage; the average
    for index, participants in enumerate([None, None, [0], [1, 3], range(6), [0, 2, 4]]):
        federation.run_round(index + 1, participants)
    federation.evaluate()
    federation.evaluate([1])
    assert federation.traces == traces


def test_clients_wait_on_disk_as_in_memory(federation, tmp_path):
    results = []
    for store in ("memory", "disk"):
        restart(federation, folder=str(tmp_path), store=store)
        assert federation.store.on_disk == (store == "disk")
        for index in range(2):
            federation.run_round(index)
        results.append((shared(federation), states(federation)))
    chex.assert_trees_all_equal(*results)


# ---------------------------------------------------------------------------------------------- devices and steps


@pytest.mark.parametrize(("devices", "chunk"), [(4, 2), (1, 3), pytest.param(2, 1, marks=pytest.mark.slow)])
def test_devices_and_clients_per_step_change_nothing(federation, dataset, partition, devices, chunk):
    draws = [[4, 0, 3, 1], [2, 5, 0, 4]]
    other = Federation(
        dataclasses.replace(federation.config, devices=devices, clients_per_step=chunk), dataset, partition
    )
    assert len(other.devices) == devices and other.chunk == chunk
    for index, participants in enumerate(draws):
        ours, theirs = federation.run_round(index, participants), other.run_round(index, participants)
        chex.assert_trees_all_close(ours.info, theirs.info, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(shared(federation), shared(other), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(states(federation), states(other), rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(federation.evaluate(), other.evaluate())


def test_clients_that_follow_each_other_go_one_at_a_time(config, dataset, partition):
    relay = updated(config, {"pfedafm": {"mix_relay": True}, "clients_per_step": 3})
    assert Federation(relay, dataset, partition).chunk == 1


def test_too_many_devices_are_refused():
    with pytest.raises(PfedafmError, match=r"devices = 99 .*0 \(all\) to 4"):
        Devices(99)


def test_one_client_of_two_architectures(config, dataset, partition):
    alone = dataclasses.replace(config, num_clients=1, participation=1.0)
    parts = dataclasses.replace(partition, train=partition.train[:1], test=partition.test[:1])
    federation = Federation(alone, dataset, parts)
    result = federation.run_round(0)
    assert result.participants.tolist() == [0] and result.info["finite"].all()
    assert len(federation.evaluate()["accuracy/mixed"]) == 1


def test_costs_follow_the_participants(federation):
    costs = federation.costs([0, 1])
    by_hand = [federation.method.cost(federation.architectures[k], (21, 16)[k], 4) for k in (0, 1)]
    assert costs == by_hand
