"""What observers are told, and that TensorBoard and Weights & Biases get all of it, once."""

import json
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.options import RunOptions, observers, parse
from pfedafm_jax.config.config import updated
from pfedafm_jax.engine import Federation
from pfedafm_jax.results import plots
from pfedafm_jax.results.run import read_run
from pfedafm_jax.runs.drive import run
from pfedafm_jax.runs.observers import Observation, Observer, TensorBoard, WeightsAndBiases, scalars
from pfedafm_jax.runs.progress import print_plan, print_table

ROUNDS = 5
SEEN = {"c": np.array([np.nan]), "d": np.array([np.inf, 7.0])}
ROWS = [Observation(record(number), SEEN) for number in range(1, ROUNDS + 1)]
SUMMARY = run_by_hand([row.record for row in ROWS]).summary


class Notes(Observer):
    """Notes what it is told; `stop` is the round after which it fails."""

    def __init__(self, stop: int = 0):
        self.heard, self.seen, self.stop = [], [], stop

    def start(self, run_dir, config, past):
        self.heard.append(("start", len(past)))
        self.seen = list(past)

    def round(self, observation):
        self.seen.append(observation)
        if observation.record.round == self.stop:
            raise KeyboardInterrupt

    def finish(self, summary):
        self.heard.append(("finish", summary.rounds))

    def close(self):
        self.heard.append("close")


@pytest.fixture(scope="module")
def observed(config, dataset, partition):
    """Runs with observers, without pictures."""
    settings = updated(config, rounds=ROUNDS, eval_every=2, checkpoint_every=2)
    data = settings, dataset, partition

    def observed(folder, *observers):
        return run(*data, run_dir=folder, observers=observers, progress=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *arguments: None)
        yield observed


@pytest.fixture(scope="module")
def straight(observed, tmp_path_factory):
    """A run with nothing in its way, observed by notes and TensorBoard."""
    folder, notes = tmp_path_factory.mktemp("straight") / "run", Notes()
    return folder, notes, observed(folder, notes, TensorBoard())


def shown(folder):
    """What TensorBoard itself shows of a folder: rounds and values by tag, and histograms."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]}
    told = {tag: found.Histograms(tag) for tag in tags["histograms"]}
    return scalars, {tag: [(e.step, e.histogram_value) for e in all_] for tag, all_ in told.items()}


def test_an_observer_is_told_everything(straight):
    folder, notes, experiment = straight
    assert notes.heard == [("start", 0), ("finish", ROUNDS), "close"]
    assert [seen.record for seen in notes.seen] == read_run(folder).records
    for index, seen in enumerate(notes.seen):
        expected = experiment.result().clients["visits/accuracy"][index, seen.record.participants]
        np.testing.assert_array_equal(seen.clients["participants/accuracy"], expected)
        vectors, means = seen.clients["vectors/mix"], seen.clients["participants/mix_mean"]
        assert vectors.shape == (3, 12)
        np.testing.assert_allclose(vectors.mean(axis=1), means, 1e-6)
        evaluated = seen.record.all_clients_accuracy is not None
        assert ("all_clients/accuracy" in seen.clients) == evaluated


def test_the_plan_says_where_the_users_of_the_data_are_not_used(straight, dataset, capsys):
    experiment = straight[2]
    of_three = replace(dataset, users=np.arange(len(dataset.images)) % 3)
    parts = experiment.config, of_three, experiment.partition
    print_plan(Federation.of_partition(*parts), experiment.executor)
    said = " ".join(capsys.readouterr().out.split())
    assert "the data's 3 users are not used (--partition natural)" in said


@pytest.mark.parametrize("name", ["CIFAR-10", "a name of a dataset that is far too long"])
def test_a_table_has_all_its_numbers_at_80_columns(name, capsys, monkeypatch):
    monkeypatch.setattr(console, "width", 80)
    headings = ["dataset", "rate", "method", "best, %", "last ten, %", "all clients, %"]
    row = [name, "0.001", "pFedAFM", "93.41 ± 0.85", "89.70 ± 0.80", "88.63 ± 1.48", "100", "3"]
    print_table([*headings, "rounds", "seeds"], [row])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.split()[-13:] == " ".join(row[1:]).split() for line in lines)


def test_a_resumed_run_is_one_run_and_has_no_round_twice(straight, observed, tmp_path):
    first, second = Notes(stop=3), Notes()
    with pytest.raises(KeyboardInterrupt):
        observed(tmp_path / "run", first, TensorBoard())
    assert first.heard == [("start", 0), "close"]
    (path,) = (tmp_path / "run").glob("*tfevents*")
    path.write_bytes(path.read_bytes() + path.read_bytes()[-200:-7])  # cut off by a sudden end
    observed(tmp_path / "run", second, TensorBoard())
    assert second.heard == [("start", 2), ("finish", ROUNDS), "close"]
    for ours, theirs in zip(second.seen, straight[1].seen, strict=True):
        assert replace(ours.record, seconds=0) == replace(theirs.record, seconds=0)
        for name in theirs.clients.keys() - {"vectors/mix"}:
            np.testing.assert_array_equal(ours.clients[name], theirs.clients[name])
    ours, theirs = shown(tmp_path / "run"), shown(straight[0])  # the mix vectors of all rounds too
    assert {**ours[0], "seconds": 0} == {**theirs[0], "seconds": 0} and ours[1] == theirs[1]


def test_tensorboard_reads_the_same_numbers(straight):
    folder, notes, _ = straight
    numbers, distributions = shown(folder)
    assert numbers.keys() == {tag for seen in notes.seen for tag in scalars(seen.record)}
    for tag, found in numbers.items():
        records = [seen.record for seen in notes.seen if tag in scalars(seen.record)]
        assert found == [(one.round, pytest.approx(scalars(one)[tag], rel=1e-6)) for one in records]
    for (number, told), seen in zip(distributions["vectors/mix"], notes.seen, strict=True):
        values = seen.clients["vectors/mix"]
        assert number == seen.record.round and told.num == sum(told.bucket) == values.size
        assert (told.min, told.max, told.bucket_limit[-1]) == (values.min(), values.max(), 1.0)


def test_a_run_that_starts_over_replaces_what_tensorboard_had(tmp_path):
    board = TensorBoard()  # one observer for several starts
    for past, new in (([], ROWS[:3]), ([], ROWS[:2]), (ROWS[:1], ROWS[1:3])):
        board.start(tmp_path, {}, past)
        for row in new:
            board.round(row)
        board.close()
    numbers, distributions = shown(tmp_path)
    assert numbers["loss"] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert list(distributions) == ["d"] and distributions["d"][0][1].num == 1  # what is finite


def test_a_last_round_that_was_lost_with_the_process_is_written_again(tmp_path):
    board = TensorBoard()
    for past, new in (([], ROWS[:1]), (ROWS[:2], ROWS[2:4])):  # the second round is in no file
        board.start(tmp_path, {}, past)
        for row in new:
            board.round(row)
        board.close()
    assert [step for step, _ in shown(tmp_path)[0]["loss"]] == [1, 2, 3, 4]


def pretended(mode="online", known=0):
    """A module that does what we use of wandb; `known` is how many rounds the server has."""
    module = types.SimpleNamespace(inits=[], logs=[], logins=0, finished=[], summary={})
    module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    module.Settings, module.Histogram = dict, lambda values: ("histogram", len(values))
    module.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
    module.login = lambda verify: setattr(module, "logins", module.logins + 1)

    def init(**options):
        module.inits.append(options)
        return types.SimpleNamespace(
            url="somewhere",
            starting_step=known + 1 if known else 0,
            log=lambda values, step: module.logs.append((step, values)),
            summary=module.summary,
            finish=lambda exit_code=0: module.finished.append(exit_code),
        )

    module.init = init
    return module


def test_wandb_stays_one_run_and_gets_each_round_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", first := pretended())
    observer = WeightsAndBiases("project")
    observer.start(tmp_path, {"rounds": ROUNDS}, [])
    for row in ROWS[:3]:
        observer.round(row)
    observer.close()
    assert first.logins == 1 and [step for step, _ in first.logs] == [1, 2, 3]
    assert first.finished == [1]
    assert first.logs[1][1] == {**scalars(ROWS[1].record), "d": ("histogram", 1)}
    monkeypatch.setitem(sys.modules, "wandb", second := pretended(known=3))
    observer = WeightsAndBiases("project")
    observer.start(tmp_path, {"rounds": ROUNDS}, ROWS[:2])  # its checkpoint was one round behind
    for row in ROWS[2:]:
        observer.round(row)
    observer.finish(SUMMARY)
    observer.close()
    assert [step for step, _ in second.logs] == [4, 5] and second.finished == [0]
    assert second.summary["rounds"] == ROUNDS
    one, two = first.inits[0], second.inits[0]
    assert one["id"] == two["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert (two["resume"], two["project"]) == ("allow", "project")
    monkeypatch.setitem(sys.modules, "wandb", third := pretended("offline"))
    WeightsAndBiases("project", fresh=True).start(tmp_path, {}, [])
    assert third.inits[0]["id"] != one["id"] and third.inits[0]["resume"] is None
    assert third.logins == 0


def test_wandb_that_cannot_be_used_is_told_before_any_work(monkeypatch):
    options = parse(["--wandb", "project", "--tensorboard"], "run", "", RunOptions).options
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PfedafmError, match="pip install wandb"):
        observers(options)
    monkeypatch.setitem(sys.modules, "wandb", module := pretended())

    def login(verify):
        raise module.errors.Error("no key")

    module.login = login
    with pytest.raises(PfedafmError, match=r"wandb = 'project' .*\(no key\).*WANDB_MODE=offline"):
        observers(options)
    monkeypatch.setitem(sys.modules, "wandb", pretended("offline"))
    assert [type(each) for each in observers(options)] == [TensorBoard, WeightsAndBiases]
