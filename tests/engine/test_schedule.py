"""Who trains where: everyone exactly once, within the slots, evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedafm_jax.engine import draw_participants
from pfedafm_jax.engine.schedule import schedule, slots_per_device


@st.composite
def problems(draw):
    num_clients, num_groups = draw(st.integers(1, 40)), draw(st.integers(1, 5))
    devices, chunk = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    work = draw(st.lists(st.integers(0, 100), min_size=num_clients, max_size=num_clients))
    clients = draw(st.lists(st.integers(0, num_clients - 1), unique=True))
    slots = chunk * draw(st.integers(1, 4))
    groups, work = np.arange(num_clients) % num_groups, np.array(work, float)
    sizes = {"clients_per_step": [chunk] * num_groups, "slots": [slots] * num_groups}
    calls = schedule(clients, groups, work, num_devices=devices, **sizes)
    return clients, groups, work, devices, chunk, slots, calls


@given(problems())
@settings(max_examples=100, deadline=None)
def test_every_client_is_covered_once_in_a_chunk_of_its_group(problem):
    """And only the last chunk of a group is padded."""
    clients, groups, _, devices, chunk, slots, calls = problem
    placed = [int(client) for call in calls for client in call.clients.reshape(-1) if client >= 0]
    assert sorted(placed) == sorted(clients)
    for call in calls:
        assert call.clients.shape == (devices, slots)
        assert call.num_steps.shape == (devices,) and call.num_steps.dtype == np.int32
        assert call.num_steps.max() >= 1, "a call in which nobody works"
        for row, trips in zip(call.clients, call.num_steps, strict=True):
            assert np.all(row[trips * chunk :] == -1), "a client that no trip reaches"
            assert all(np.any(row[trip * chunk : (trip + 1) * chunk] >= 0) for trip in range(trips))
            assert all(groups[client] == call.program for client in row if client >= 0)
    for group in set(groups[clients].tolist()) if clients else ():
        trips = sum(int(call.num_steps.sum()) for call in calls if call.program == group)
        assert trips == -(-int(np.sum(groups[clients] == group)) // chunk)


@given(problems())
@settings(max_examples=100, deadline=None)
def test_no_device_waits_longer_than_one_chunk(problem):
    _, _, work, devices, chunk, slots, calls = problem
    load, largest = np.zeros(devices), 0.0
    for call in calls:
        for device, row in enumerate(call.clients):
            for place in range(0, slots, chunk):
                members = [client for client in row[place : place + chunk] if client >= 0]
                cost = chunk * max((work[client] for client in members), default=0.0)
                load[device] += cost
                largest = max(largest, cost)
    # Whoever ends last took its last chunk when it had the least to do.
    assert load.max() - load.min() <= largest


@pytest.mark.parametrize(
    ("clients", "devices", "slots", "trips"),
    [(8, 4, 4, [[2, 2, 2, 2]]), (7, 1, 3, [[3], [3], [1]])],  # evenly; in several calls
)
def test_trips_of_equal_clients(clients, devices, slots, trips):
    options = {"num_devices": devices, "clients_per_step": [1], "slots": [slots]}
    calls = schedule(range(clients), np.zeros(clients, int), np.ones(clients), **options)
    assert [call.num_steps.tolist() for call in calls] == trips


def test_the_order_of_participants_does_not_matter():
    groups, work = np.arange(9) % 2, np.arange(9.0)
    options = {"num_devices": 2, "clients_per_step": [2, 2], "slots": [4, 4]}
    one = schedule([3, 1, 8, 5], groups, work, **options)
    other = schedule([8, 5, 3, 1], groups, work, **options)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.clients, b.clients)


@pytest.mark.parametrize(
    ("participants", "groups", "devices", "chunk"), [(10, 5, 2, 1), (100, 1, 4, 3), (1, 5, 4, 2)]
)
def test_slots_hold_an_even_share_twice_in_whole_chunks(participants, groups, devices, chunk):
    slots = slots_per_device(participants, groups, devices, chunk)
    assert slots % chunk == 0
    assert slots * groups * devices >= 2 * participants


def test_draws_have_no_repetition_and_depend_on_seed_and_round_only():
    first = draw_participants(3, 7, 100, 10)
    assert len(set(first.tolist())) == 10 and first.min() >= 0 and first.max() < 100
    np.testing.assert_array_equal(first, draw_participants(3, 7, 100, 10))
    assert first.tolist() != draw_participants(3, 8, 100, 10).tolist()
    assert first.tolist() != draw_participants(4, 7, 100, 10).tolist()


def test_draws_are_uniform_and_everyone_is_drawn_at_full_participation():
    assert sorted(draw_participants(0, 0, 10, 10).tolist()) == list(range(10))
    drawn = [draw_participants(0, index, 20, 5) for index in range(2000)]
    counts = np.bincount(np.concatenate(drawn), minlength=20)
    # Mean 500, deviation √(2000 · ¼ · ¾) = 19.4: five deviations either way.
    assert np.all(np.abs(counts - 500) < 97)
