"""States between visits: the same in memory and on disk, and the start where nobody has been."""

import gc
import os
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from pfedafm_jax.base.client_files import ClientFiles
from pfedafm_jax.engine import ClientStore
from pfedafm_jax.engine.devices import usable_cores, usable_memory
from pfedafm_jax.engine.store import stacked

GROUPS = np.array([0, 1, 0, 1, 0])


def start(group: int) -> dict:
    width = (3, 5)[group]
    kernel, bias = np.full((width, 2), group + 1.0, np.float32), np.zeros(width, np.float32)
    header = np.full(4, 10.0 + group, np.float32)
    return {"net": {"kernel": kernel, "bias": bias}, "header": header, "count": np.int32(group)}


def filled(state: dict, value: float) -> dict:
    return jax.tree.map(lambda leaf: np.full_like(leaf, value)[()], state)


@pytest.fixture(params=["memory", "disk"])
def store(request, tmp_path):
    made = ClientStore([start(0), start(1)], GROUPS, place=request.param, folder=tmp_path)
    assert made.on_disk == (request.param == "disk") and not any(tmp_path.iterdir())
    return made


def test_unvisited_clients_equal_their_start(store):
    for client, group in enumerate(GROUPS):
        chex.assert_trees_all_equal(store.state(client), start(group))
    assert not store.visited.any()


def test_what_is_written_is_read_and_nobody_else_changes(store):
    store.write(4, filled(start(0), 7), 1)
    store.write(0, filled(start(0), 8), 1)
    chex.assert_trees_all_equal(store.state(4), filled(start(0), 7))
    chex.assert_trees_all_equal(store.state(0), filled(start(0), 8))
    chex.assert_trees_all_equal(store.state(2), start(0))
    chex.assert_trees_all_equal(store.state(1), start(1))
    assert store.visited.tolist() == [True, False, False, False, True]
    store.write(3, filled(start(1), 0), 1)  # zeros are not taken for unvisited
    chex.assert_trees_all_equal(store.state(3), filled(start(1), 0))


def test_several_are_stacked_as_rows_with_zeros_for_empty_slots(store):
    store.write(2, filled(start(0), 6), 1)
    read = stacked([None, store.state(2), store.state(0)], start(0))
    expected = [filled(start(0), 0), filled(start(0), 6), start(0)]
    chex.assert_trees_all_equal(read, jax.tree.map(lambda *rows: np.stack(rows), *expected))


def test_reading_gives_copies(store):
    store.write(0, filled(start(0), 1), 1)
    for client in (0, 2):
        store.state(client)["header"][:] = 99
        store.state(client, ["header"])["header"][:] = 99
    chex.assert_trees_all_equal(store.state(0), filled(start(0), 1))
    chex.assert_trees_all_equal(store.state(2), start(0))


def test_parts_are_read_by_name(store):
    store.write(1, filled(start(1), 3), 1)
    found = [store.state(client, ["header"]) for client in (0, 1, 3)]
    assert [list(one) for one in found] == [["header"]] * 3
    assert [one["header"][0] for one in found] == [10, 3, 11]


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_own_starts(place, tmp_path):
    def start_of(client):
        return filled(start(GROUPS[client]), 100 + client)

    options = {"place": place, "folder": tmp_path, "start_of": start_of}
    store = ClientStore([start(0), start(1)], GROUPS, **options)
    chex.assert_trees_all_equal(store.state(2), filled(start(0), 102))
    assert store.state(1, ["header"])["header"][0] == 101
    store.write(2, filled(start(0), 1), 1)
    chex.assert_trees_all_equal(store.state(2), filled(start(0), 1))
    chex.assert_trees_all_equal(store.state(4), filled(start(0), 104))


def test_a_group_without_clients(tmp_path):
    for place in ("memory", "disk"):
        store = ClientStore([start(0), start(1)], np.zeros(2, int), place=place, folder=tmp_path)
        chex.assert_trees_all_equal(store.state(1), start(0))


def test_small_states_stay_in_memory_by_default_and_the_folder_goes_with_the_store(tmp_path):
    store = ClientStore([start(0), start(1)], GROUPS, folder=tmp_path)
    assert not store.on_disk and not any(tmp_path.iterdir())
    # 3 clients of 6 + 3 + 4 numbers and a count, 2 of 10 + 5 + 4 and a count, 4 bytes each
    assert store.nbytes == 4 * (3 * 14 + 2 * 20)

    store = ClientStore([start(0), start(1)], GROUPS, place="disk", folder=tmp_path)
    store.write(1, start(1), 1)
    assert any(tmp_path.iterdir())
    del store  # and its folder goes with it
    gc.collect()
    assert not any(tmp_path.iterdir())


def test_memory_is_that_of_the_job(tmp_path):
    """Limits of a group and of those around it, in both versions of control groups."""
    own, groups = tmp_path / "own", tmp_path / "groups"
    machine = usable_memory(groups, own)
    limits = {"slurm/memory.max": "4096", "slurm/job/memory.max": "max"}
    limits |= {"memory/docker/memory.limit_in_bytes": "2048"}
    for name, limit in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(f"{limit}\n")
    for text, limit in (("0::/slurm/job", 4096), ("1:cpu:/\n4:memory:/docker\n0::/", 2048)):
        own.write_text(text)
        assert usable_memory(groups, own) == limit
    assert usable_memory() <= machine
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory of a process is read from /proc"
)
def test_ten_thousand_clients_take_room_only_for_those_that_were_drawn(tmp_path):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    clients = 10_000
    # 1 MiB each, 10 GiB in all.
    starts = [{"weights": np.full(2**18, group, np.float32)} for group in range(5)]
    before = resident()
    store = ClientStore(starts, np.arange(clients) % 5, place="disk", folder=tmp_path)
    drawn = np.array([3, 4_998, 9_998])
    for client in drawn:
        store.write(client, {"weights": store.state(client)["weights"] + 1}, 1)
    assert store.nbytes == clients * 2**20 and store.on_disk
    assert np.all(store.state(4_998)["weights"] == 4)
    assert np.all(store.state(4_993)["weights"] == 3)
    assert np.flatnonzero(store.visited).tolist() == drawn.tolist()
    assert resident() - before < 100 * 2**20


def test_a_state_written_elsewhere_is_noted_but_not_there(store):
    store.write(0, filled(start(0), 8), 1)
    store.written_elsewhere([1, 4], 2)
    assert store.visited.tolist() == [True, True, False, False, True]
    assert store.rounds.tolist() == [1, 2, 0, 0, 2]
    store.written_elsewhere([], 3)
    chex.assert_trees_all_equal(store.state(0), filled(start(0), 8))
    assert not {1, 4} & store.hand_over(2).keys()  # their process does that


def test_a_second_stage_of_the_same_round_replaces_the_first(store):
    for value in (3, 5):
        store.write(1, filled(start(1), value), 4)
    chex.assert_trees_all_equal(store.state(1), filled(start(1), 5))


def values_of(files: ClientFiles, client: int, t: int) -> float:
    return float(files.read(client, t).arrays["client.header"][0])


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_checkpoint_gets_who_was_visited_since_the_last_one_unless_it_is_in_a_file(
    place, tmp_path
):
    store = ClientStore([start(0), start(1)], GROUPS, place=place)
    store.keep_in(ClientFiles(tmp_path, "run"))
    for t, visited, expected in ((2, (1, 2), [1, 2]), (3, (2,), [2])):
        for client in visited:
            store.write(client, filled(start(int(GROUPS[client])), t), t)
        assert sorted(store.hand_over(t)) == (expected if place == "memory" else [])


def test_what_is_handed_over_does_not_change_any_more():
    store = ClientStore([start(0), start(1)], GROUPS, place="memory")
    store.write(0, filled(start(0), 1), 1)
    handed = store.hand_over(1)
    store.write(0, filled(start(0), 2), 2)
    assert handed[0]["client.header"].tolist() == [1] * 4


def test_on_disk_there_is_one_file_a_client_beside_those_of_checkpoints(tmp_path):
    files = ClientFiles(tmp_path, "run")
    store = ClientStore([start(0), start(1)], GROUPS, place="disk")
    store.keep_in(files)
    for t in (1, 2, 3):
        store.write(4, filled(start(0), t), t)
    assert files.visits().tolist() == [[4, 3]]
    store.hand_over(3)
    for t in (4, 5):
        store.write(4, filled(start(0), t), t)
    assert sorted(files.visits().tolist()) == [[4, 3], [4, 5]]  # a checkpoint has the first


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_it_goes_on_from_a_checkpoint_and_reads_what_is_drawn(place, tmp_path):
    files = ClientFiles(tmp_path, "run")
    before = ClientStore([start(0), start(1)], GROUPS, place="memory")
    before.write(2, filled(start(0), 7), 7)
    files.write_all(before.hand_over(7), before.rounds)
    store = ClientStore([start(0), start(1)], GROUPS, place=place)
    store.keep_in(files, before.rounds, 7)
    chex.assert_trees_all_equal(store.state(2), filled(start(0), 7))
    chex.assert_trees_all_equal(store.state(1), start(1))
    assert store.hand_over(8) == {}
    store.write(2, filled(start(0), 9), 9)
    chex.assert_trees_all_equal(store.state(2), filled(start(0), 9))
    assert values_of(files, 2, 7) == 7
