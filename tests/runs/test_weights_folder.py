"""Where weights are, and whose they are: nothing of others is touched, and nothing is lost without a
word."""

import json
import shutil

import numpy as np
import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.runs.checkpoints import Checkpoints, SavedHistory
from pfedafm_jax.runs.weights_folder import (
    KnownRun,
    claim,
    find_place,
    find_weights,
    known_run,
    largest_size,
    new_run,
    owner_of,
    possible_places,
)

EVERY = 5


def known(run, rounds, every=EVERY, weights="../../checkpoints/x"):
    return KnownRun(run, rounds, every, weights)


def save(folder, run, t=EVERY):
    checkpoints = Checkpoints(folder, run)
    table = np.array([0, t], np.int32)
    states = {1: {"client.a": np.ones(2)}}
    checkpoints.save(t, {"server.a": np.ones(1)}, table, states, SavedHistory({}, {}), 0.5)
    checkpoints.wait()
    checkpoints.close()


@pytest.fixture
def checkout(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "README.md").write_text("here")
    (tmp_path / "runs").mkdir()
    return tmp_path


@pytest.fixture
def run_dir(checkout):
    (checkout / "runs" / "x").mkdir()
    return checkout / "runs" / "x"


def begun(run_dir, rounds=7):
    """A run that has a checkpoint; returns what its folder says of it, and where its weights are."""
    place = find_place(run_dir, None)
    claim(place, run_dir, {"config": {"seed": 3}})
    save(place.folder, place.run)
    return known(place.run, rounds), place.folder


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_usual_place_is_beside_runs_where_there_is_one(checkout, tmp_path):
    beside, inside = checkout / "checkpoints" / "a" / "b", checkout / "runs" / "a" / "b"
    assert possible_places(inside) == [beside, inside / "checkpoints"]
    assert possible_places(tmp_path / "else") == [tmp_path / "else" / "checkpoints"]
    (checkout / "checkpoints" / "README.md").unlink()
    (checkout / "checkpoints").rmdir()
    assert possible_places(inside) == [inside / "checkpoints"]


def test_a_new_run_gets_an_id_and_its_weights_say_whose_they_are(run_dir, checkout):
    place = find_place(run_dir, None)
    assert place.state == "new" and place.folder == checkout / "checkpoints" / "x"
    assert not place.folder.exists()
    claim(place, run_dir, {"config": {"seed": 3}})
    assert owner_of(place.folder) == (place.run, "../../runs/x", {"config": {"seed": 3}})
    assert new_run() != new_run()


def test_a_run_goes_on_where_its_weights_are_also_without_its_own_folder(run_dir):
    run, folder = begun(run_dir)
    for what in (run, None):
        assert find_place(run_dir, what) == (folder, run.run, "go on")
    assert find_weights(run_dir, run) == folder


def test_weights_that_were_put_into_the_run_s_folder_are_found(run_dir):
    run, folder = begun(run_dir)
    shutil.move(folder, run_dir / "checkpoints")
    assert find_place(run_dir, run).folder == run_dir / "checkpoints"
    folder.mkdir()
    (folder / "mine").write_text("of others, in the usual place")
    assert find_place(run_dir, run).folder == run_dir / "checkpoints"
    assert find_weights(run_dir, run) == run_dir / "checkpoints"


FOREIGN = ["notes.txt", "round-000001/weights.bin", "round-000001.json", "rounds/000005/x"]


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_others_keep_in_the_place_of_weights_is_not_touched(run_dir, checkout, name, fresh):
    """As `checkpoints/x` of another program beside `runs/x`."""
    folder = checkout / "checkpoints" / "x"
    path = folder / name
    path.parent.mkdir(parents=True)
    path.write_text("theirs")
    before = content(folder)
    for what in (None, known("r1", 7), known("r1", 0)):
        with pytest.raises(PfedafmError, match=r"holds .*nothing in it is touched. Move it away"):
            find_place(run_dir, what, fresh)
    place = find_place(checkout / "runs" / "y", None)
    with pytest.raises(PfedafmError, match="nothing in it is touched"):
        claim(place._replace(folder=folder), run_dir, {})
    assert content(folder) == before


@pytest.mark.parametrize("fresh", [False, True])
def test_weights_of_another_run_are_not_touched(run_dir, fresh):
    run, folder = begun(run_dir)
    before = content(folder)
    with pytest.raises(
        PfedafmError, match=f"weights of another run.*{run.run}, not r2.*neither is"
    ):
        find_place(run_dir, known("r2", 7), fresh)
    with pytest.raises(PfedafmError, match=f"has the weights of run {run.run}"):
        claim(find_place(run_dir, run, fresh=True)._replace(run="r2"), run_dir, {})
    assert content(folder) == before


def test_fresh_starts_over_in_the_same_place_under_another_id(run_dir):
    run, folder = begun(run_dir)
    place = find_place(run_dir, run, fresh=True)
    assert place.state == "start over" and place.folder == folder and place.run != run.run
    Checkpoints(folder, place.run).clear()
    claim(place, run_dir, {})
    assert find_place(run_dir, known(place.run, 0)).state == "new"
    assert not list(folder.rglob("*.safetensors"))


def test_a_run_whose_weights_are_not_found_is_not_started_over_without_a_word(run_dir, checkout):
    run, folder = begun(run_dir)
    away = checkout / "elsewhere"
    shutil.move(folder, away)
    with pytest.raises(PfedafmError) as caught:
        find_place(run_dir, run)
    text = str(caught.value)
    assert f"{run_dir} has done 7 rounds" in text and run.run in text
    assert f"looked in {folder} and in {run_dir / 'checkpoints'}" in text
    assert "belong together" in text and "--fresh" in text
    assert find_place(run_dir, run, fresh=True).state == "start over"
    shutil.move(away, folder)  # and when they are back, it goes on
    assert find_place(run_dir, run).state == "go on"


def test_a_run_folder_that_was_carried_away_says_where_its_weights_are(run_dir, tmp_path):
    run, folder = begun(run_dir)
    carried = tmp_path / "desk" / "x"
    shutil.copytree(run_dir, carried)
    with pytest.raises(PfedafmError) as caught:
        find_weights(carried, run)
    text = str(caught.value)
    assert "written to ../../checkpoints/x, seen from the run's folder" in text
    assert f"looked in {carried / 'checkpoints'}" in text
    assert f"put that of the weights, with its run.json, to {carried / 'checkpoints'}" in text
    shutil.copytree(folder, carried / "checkpoints")
    assert find_weights(carried, run) == carried / "checkpoints"


@pytest.mark.parametrize(
    ("rounds", "every", "state"),
    [(0, 5, "new"), (4, 5, "start over"), (9, 5, "start over"), (40, 0, "start over")],
)
def test_a_run_that_was_stopped_before_its_first_checkpoint_starts_over(
    run_dir, rounds, every, state
):
    place = find_place(run_dir, None)
    claim(place, run_dir, {})
    assert find_place(run_dir, known(place.run, rounds, every)).state == state


def test_weights_that_were_emptied_are_missed(run_dir):
    run, folder = begun(run_dir, rounds=10)
    Checkpoints(folder, run.run).clear()
    with pytest.raises(PfedafmError, match="has done 10 rounds, and its weights are not there"):
        find_place(run_dir, run)
    with pytest.raises(PfedafmError, match=r"no weights to use.*--drop-checkpoints"):
        find_weights(run_dir, run)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[[[[", b"\xff", None])
def test_a_damaged_mark_is_named_and_nothing_used_or_touched(run_dir, damage):
    run, folder = begun(run_dir)
    path = folder / "run.json"
    if damage is None:
        damage = path.read_text().replace(run.run, run.run[::-1]).encode()
    path.write_bytes(damage)
    before = content(folder)
    for fresh in (False, True):
        with pytest.raises(PfedafmError, match=r"run\.json is damaged"):
            find_place(run_dir, run, fresh)
    assert content(folder) == before


def test_another_form_is_refused(run_dir):
    _, folder = begun(run_dir)
    path = folder / "run.json"
    said = json.loads(path.read_text())
    path.write_text(json.dumps(said | {"format": "pfedafm_jax weights 2"}))
    with pytest.raises(PfedafmError, match=r"is damaged|weights 2"):
        owner_of(folder)


def test_checkpoints_of_an_earlier_version_are_refused_as_such(run_dir, checkout):
    """In the place of weights, or wherever the folder of an earlier version had them."""
    (checkout / "checkpoints" / "x").mkdir()
    (checkout / "checkpoints" / "x" / "round-000010.json").write_text("{}")
    with pytest.raises(PfedafmError, match="checkpoints of an earlier version look like that"):
        find_place(run_dir, None)
    shutil.rmtree(checkout / "checkpoints" / "x")
    about = {"config": {"checkpoint_every": 5}}
    (run_dir / "config.json").write_text(json.dumps(about))
    (run_dir / "rounds.jsonl").write_text("{}\n{}\n")
    said = known_run(run_dir)
    assert said is not None and (said.run, said.rounds) == ("", 2)
    with pytest.raises(PfedafmError, match=r"written by an earlier version.*--fresh"):
        find_place(run_dir, said)
    assert find_place(run_dir, said, fresh=True).state == "start over"


def test_how_large_weights_get():
    # All 100 clients twice, 50 of them in between and 50 being written, of 6 MB; four servers.
    assert largest_size(6e6, 2e6, 100, 10, 500, 5) == 300 * 6_004_096 + 4 * 2_004_096
    assert largest_size(6e6, 2e6, 100_000, 10, 500, 5) == 10_100 * 6_004_096 + 4 * 2_004_096
