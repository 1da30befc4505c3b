"""A run that stops and is resumed is the same run, to the last bit."""

import json
import re
import shutil
import signal
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest
from small import METHODS, slow_but, states

from pfedafm_jax import compare, load_run
from pfedafm_jax.base.errors import Interrupted, PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.results import plots
from pfedafm_jax.results.records import RunFolder
from pfedafm_jax.results.run import read_run
from pfedafm_jax.runs.existing import Task, differences, find_existing
from pfedafm_jax.runs.experiment import Experiment
from pfedafm_jax.runs.observers import Observer
from pfedafm_jax.runs.signals import Signals
from pfedafm_jax.runs.train import train
from pfedafm_jax.runs.weights_folder import owner_of, rounds_saved, usual_place

ROUNDS = 7
TIMING = {"seconds", "compile_seconds", "checkpoint_seconds", "checkpoint_background_seconds"}


@pytest.fixture(autouse=True, scope="module")
def no_pictures():
    """Pictures take longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *arguments: None)
        yield


@pytest.fixture(scope="module")
def settings(config):
    return updated(config, rounds=ROUNDS, eval_every=3, checkpoint_every=2)


@pytest.fixture(scope="module")
def make(dataset, partition):
    """Experiments with these settings."""
    return lambda settings: Experiment(settings, dataset, partition)


@pytest.fixture(scope="module")
def straight(make, settings, tmp_path_factory):
    """The run that nothing interrupts, with its folder."""
    experiment, folder = make(settings), tmp_path_factory.mktemp("straight") / "run"
    train_in(folder, experiment)
    return experiment, folder


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


class Notes(Observer):
    """Notes how many rounds a run had behind it, and ends it where `after` says so."""

    def __init__(self, end=None, after=0):
        self.end, self.after, self.before = end, after, None

    def start(self, run_dir, config, past):
        self.before = len(past)

    def round(self, observation):
        if observation.record.round == self.after:
            self.end()


def train_in(folder, experiment, *, fresh=False, notes=None, **options):
    """Runs an experiment in a folder, as `run` does; returns how many rounds it was resumed
    after."""
    notes = notes or Notes()
    task = find_existing(Task(experiment.config, folder), fresh=fresh)
    experiment.history, experiment.state = train(
        experiment.federation,
        experiment.executor,
        task.folder,
        partition=experiment.partition,
        restart=task.state == "again",
        observers=[notes],
        **options,
    )
    return notes.before


def state(settings, folder, **options):
    return find_existing(Task(settings, folder), **options).state


def weights(experiment):
    """Weights of all clients and of the server, as bits."""
    trees = states(experiment.state), jax.device_get(experiment.state.server)
    return [(leaf.dtype, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(trees)]


def rows(folder):
    return [{**record.as_dict(), "seconds": 0} for record in read_run(folder).records]


def assert_same_run(one, folder, other, other_folder):
    assert weights(one) == weights(other)
    assert rows(folder) == rows(other_folder)
    assert [row["round"] for row in rows(folder)] == list(range(1, one.config.rounds + 1))
    ours, theirs = read_run(folder), read_run(other_folder)
    assert ours.finished and theirs.finished and ours.clients.keys() == theirs.clients.keys()
    for name in ours.clients:
        np.testing.assert_array_equal(ours.clients[name], theirs.clients[name])
    a, b = ours.summary.as_dict(), theirs.summary.as_dict()
    assert {k for k in a.keys() | b.keys() if a.get(k) != b.get(k)} <= TIMING | {"config"}


class Crash(Exception):
    """The process dies here."""


def crashed(folder, experiment, number):
    """Runs until after the record of a round, and leaves everything as a sudden end would; returns
    how many rounds it was resumed after."""

    def crash():
        raise Crash

    notes = Notes(crash, number)
    with pytest.raises(Crash):
        train_in(folder, experiment, notes=notes)
    return notes.before


def test_a_run_that_ends_after_any_round_goes_on_to_the_same_bits(make, settings, straight, folder):
    saved = 0
    for number in range(1, ROUNDS + 1):
        assert crashed(folder, make(settings), number) == saved
        saved = (number - 1) // 2 * 2  # it ended before the save of its own round
        with open(folder / "rounds.jsonl", "a") as file:
            file.write('{"round": 99, "mean_ac')  # a line cut off in the middle
    resumed = make(settings)
    assert train_in(folder, resumed) == saved == 6
    assert_same_run(resumed, folder, *straight)


def test_a_finished_run_with_more_rounds_is_the_longer_run(make, settings, straight, folder):
    """Begun in memory, and ended with the clients on disk."""
    train_in(folder, make(updated(settings, rounds=4, store="memory")))
    assert rows(folder)[3]["all_clients_accuracy"] is not None  # it was the last round
    assert state(updated(settings, rounds=4), folder) == "done"
    assert state(settings, folder) == "started"
    longer = make(updated(settings, store="disk"))
    train_in(folder, longer)
    assert_same_run(longer, folder, *straight)


def test_an_unfinished_run_with_fewer_rounds_is_the_shorter_run(make, settings, folder):
    crashed(folder, make(settings), 5)
    shorter, whole = make(updated(settings, rounds=4)), make(updated(settings, rounds=4))
    train_in(folder, shorter)
    train_in(folder.with_name("whole"), whole)
    assert_same_run(shorter, folder, whole, folder.with_name("whole"))


def test_fresh_starts_over(make, settings, straight, folder):
    crashed(folder, make(updated(settings, seed=6)), 5)
    again = make(settings)
    assert train_in(folder, again, fresh=True) == 0
    assert_same_run(again, folder, *straight)


OTHERS = {name: {"method": name} for name in METHODS[1:]}
OTHERS["released code"] = {"method": "pfedafm_released", "same_start": False}


@pytest.mark.parametrize("name", slow_but(("standalone", "released code"), OTHERS))
def test_other_methods_and_the_released_code_go_on_too(name, make, settings, folder):
    short = {"rounds": 3, "checkpoint_every": 1, "architectures": ("small_b",)}
    own = updated(settings, {**OTHERS[name], **short})
    whole = make(own)
    train_in(folder.with_name("whole"), whole)
    crashed(folder, make(own), 2)
    resumed = make(own)
    train_in(folder, resumed)
    assert_same_run(resumed, folder, whole, folder.with_name("whole"))


def test_a_signal_ends_the_run_after_its_round_and_saves_it(make, settings, straight, folder):
    signals = Signals()
    notes = Notes(lambda: setattr(signals, "received", 15), 3)
    with pytest.raises(Interrupted, match="stopped after round 3 of 7") as caught:
        train_in(folder, make(settings), notes=notes, signals=signals)
    assert caught.value.exit_code == 143
    resumed = make(settings)
    assert train_in(folder, resumed) == 3
    assert_same_run(resumed, folder, *straight)


def newest_of(folder, what):
    """The newest file of the server's parts, of the histories or of the clients of a run."""
    found = usual_place(folder).rglob(
        f"{what}*/arrays.safetensors" if what != "client" else "client-*"
    )
    return max(found, key=lambda path: (re.findall(r"\d{6}", str(path))[-1], str(path)))


@pytest.mark.parametrize("what", ["server", "history", "client"])
def test_a_damaged_last_checkpoint_is_named_and_the_one_before_used(
    what, make, settings, straight, folder
):
    crashed(folder, make(settings), 7)  # checkpoints of rounds 2, 4 and 6
    path = newest_of(folder, what)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    said: list = []
    resumed = make(settings)
    assert train_in(folder, resumed, log=said.append) == 4
    assert len(said) == 1 and str(path) in said[0] and said[0].startswith("warning:")
    assert_same_run(resumed, folder, *straight)


def test_neither_checkpoints_nor_evaluations_change_a_weight(make, settings, straight, folder):
    often = make(updated(settings, eval_every=1, checkpoint_every=0))
    train_in(folder, often)
    assert len(often.history.evaluations) == ROUNDS and len(straight[0].history.evaluations) == 3
    assert weights(often) == weights(straight[0])
    kept = {"mean_accuracy", "loss", "participants", "floats_up"}
    for one, other in zip(rows(folder), rows(straight[1]), strict=True):
        assert all(one[name] == other[name] for name in kept)


def test_another_number_of_devices_may_go_on(make, settings, straight, folder):
    """Within tolerance of the run on one device, and the same bits each time."""
    crashed(folder, make(settings), 6)
    shutil.copytree(folder, folder.with_name("again"))
    pair = [make(updated(settings, devices=2)) for _ in range(2)]
    for experiment, name in zip(pair, ("run", "again"), strict=True):
        train_in(folder.with_name(name), experiment)
    assert_same_run(pair[0], folder, pair[1], folder.with_name("again"))
    ours, theirs = states(pair[0].state), states(straight[0].state)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_updates_that_are_not_finite_are_counted_and_survive_a_restart(make, settings, folder):
    experiment = make(settings)
    store = experiment.state.clients
    first = draw_participants(settings.seed, 1, settings.num_clients, settings.num_participants)[0]
    spoilt = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), store.state(first))
    store.write(first, spoilt, 1)
    experiment.executor.start = lambda: experiment.state
    crashed(folder, experiment, 4)
    assert rows(folder)[0]["not_finite"] == 1
    train_in(folder, make(settings))
    summary, counted = read_run(folder).summary, [row["not_finite"] for row in rows(folder)]
    assert summary.diverged_at_round == 1 and summary.clients_not_finite == sum(counted) >= 1


def test_a_finished_run_is_known_as_such_and_no_round_is_taken_from_it(settings, straight):
    _, folder = straight
    assert state(updated(settings, devices=2, store="disk", eval_every=1), folder) == "done"
    assert state(settings, folder, fresh=True) == "again"
    with pytest.raises(PfedafmError, match="rounds = 3 cannot be used; accepted: 7 or more"):
        find_existing(Task(updated(settings, rounds=3), folder))
    assert state(updated(settings, rounds=3), folder, longer=True) == "done"


def test_other_settings_are_refused_with_the_differences(make, settings, folder):
    crashed(folder, make(settings), 3)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    other = updated(settings, learning_rate=0.5, seed=6, rounds=9)
    with pytest.raises(PfedafmError) as caught:
        find_existing(Task(other, folder))
    text = str(caught.value)
    assert "learning_rate: 0.05 → 0.5\n" in text and "seed: 5 → 6\n" in text
    assert "rounds:" not in text and "--fresh" in text and "--run-dir" in text
    with pytest.raises(PfedafmError, match="seed: 5 → 6"):
        train_in(folder, make(updated(settings, seed=6)))
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_other_data_is_refused(make, settings, dataset, partition, folder):
    crashed(folder, make(settings), 3)
    with pytest.raises(PfedafmError, match="data: sha256"):
        train_in(folder, Experiment(settings, replace(dataset, digest="0" * 64), partition))
    swapped = replace(partition, train=partition.train[::-1])
    with pytest.raises(PfedafmError, match="split: sha256"):
        train_in(folder, Experiment(settings, dataset, swapped))


def test_a_checkpoint_of_an_earlier_version_is_refused(make, settings):
    with pytest.raises(PfedafmError, match="written by an earlier version; --fresh"):
        make(settings).history.restore({"records": [], "evaluation_rounds": []}, {})


def test_a_finished_run_without_checkpoints_is_not_thrown_away(make, settings, folder):
    train_in(folder, make(updated(settings, rounds=2, checkpoint_every=0)))
    assert not usual_place(folder).exists()
    with pytest.raises(
        PfedafmError, match=r"no checkpoint to resume from: no weights .* were written .*; --fresh"
    ):
        find_existing(Task(settings, folder))
    assert state(settings, folder, longer=True) == "again"


def test_the_number_of_rounds_is_part_of_fedkd(config):
    fedkd = updated(config, method="fedkd", rounds=10)
    stored = json.loads(json.dumps(fedkd.as_dict()))
    assert differences(stored, fedkd) == []
    assert differences(stored, updated(fedkd, rounds=20)) == ["rounds: 10 → 20"]
    assert differences(stored | {"no_such_setting": 3}, fedkd) == ["no_such_setting: 3 → (unknown)"]
    assert differences({k: v for k, v in stored.items() if k != "checkpoint_every"}, fedkd) == []


def test_a_folder_in_use_is_refused(settings, straight):
    more = updated(settings, rounds=ROUNDS + 1)
    with RunFolder(straight[1]).lock(), pytest.raises(PfedafmError, match="in use by another run"):
        find_existing(Task(more, straight[1]))
    assert state(more, straight[1]) == "started"


def test_a_finished_run_keeps_its_last_and_its_best(straight):
    experiment, folder = straight
    best = max([2, 4, 6, 7], key=lambda n: (experiment.records[n - 1].mean_accuracy, -n))
    assert set(rounds_saved(usual_place(folder))) == {6, 7, best}
    owner = owner_of(usual_place(folder))
    assert owner is not None and owner.run == read_run(folder).about["run"]
    assert not list(folder.rglob("*.pkl")) and not list(folder.rglob("*tmp*"))


@pytest.fixture
def checkout(tmp_path):
    """A folder with `runs` and `checkpoints`, as this repository; the run is `runs/x`."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def content(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_of_another_program_in_the_place_of_weights_is_not_touched(
    fresh, make, settings, checkout
):
    theirs = checkout / "checkpoints" / "x" / "round-000002" / "weights.bin"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"of another program")
    with pytest.raises(PfedafmError, match="nothing in it is touched"):
        train_in(checkout / "runs" / "x", make(settings), fresh=fresh)
    assert content(checkout) == {theirs: b"of another program"}


def test_a_run_whose_weights_are_not_found_is_left_as_it_is_until_they_are_back(
    make, settings, straight, checkout
):
    folder = checkout / "runs" / "x"
    crashed(folder, make(settings), 5)
    shutil.move(checkout / "checkpoints" / "x", checkout / "elsewhere")
    before = content(folder)
    for _ in range(2):
        with pytest.raises(PfedafmError, match=r"has done 5 rounds, and its weights are not there"):
            train_in(folder, make(settings))
    assert content(folder) == before
    assert state(settings, folder, fresh=True) == "again"
    shutil.move(checkout / "elsewhere", checkout / "checkpoints" / "x")
    resumed = make(settings)
    assert train_in(folder, resumed) == 4
    assert_same_run(resumed, folder, *straight)


def test_a_run_that_was_stopped_before_its_first_checkpoint_says_that_it_starts_over(
    make, settings, folder
):
    crashed(folder, make(settings), 2)  # before the save of this round
    said: list[str] = []
    task = find_existing(Task(settings, folder), log=said.append)
    assert task.state == "new" and "had done 2 rounds and saved none: it starts over" in said[0]


def test_a_run_folder_that_was_carried_away_says_where_its_weights_are(make, settings, checkout):
    folder, carried = checkout / "runs" / "x", checkout / "desk" / "x"
    train_in(folder, make(updated(settings, rounds=2)))
    shutil.copytree(folder, carried)
    with pytest.raises(PfedafmError) as caught:
        load_run(carried)
    text = str(caught.value)
    assert (
        "written to ../../checkpoints/x" in text and f"looked in {carried / 'checkpoints'}" in text
    )
    shutil.copytree(checkout / "checkpoints" / "x", carried / "checkpoints")
    assert load_run(carried).round == load_run(folder).round == 2


def test_a_comparison_that_is_stopped_goes_on_to_the_same_records(
    settings, dataset, partition, tmp_path
):
    short = updated(settings, rounds=3)
    signals = Signals()

    def stop():
        signals.received = signal.SIGTERM

    def compared(folder, **options):
        share = {"seeds": (3, 4), "dataset": dataset, "partition": partition, "progress": False}
        return compare(short, "standalone", run_dir=tmp_path / folder, **share, **options)

    with pytest.raises(Interrupted, match="stopped after round 2"):
        compared("stopped", signals=signals, observers=[Notes(stop, after=2)])
    assert not (tmp_path / "stopped" / "standalone-seed4").exists()
    compared("stopped")
    compared("straight")
    for seed in (3, 4):
        name = f"standalone-seed{seed}"
        assert rows(tmp_path / "stopped" / name) == rows(tmp_path / "straight" / name)
