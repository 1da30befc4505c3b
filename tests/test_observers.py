"""What observers are told, and that TensorBoard and Weights & Biases get all of it, once, whatever happens to the run."""

import json
import shutil
import struct
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax import cli, plots
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.observers import Observation, Observer, TensorBoard, WeightsAndBiases, replay, scalars
from pfedafm_jax.results import read_run
from pfedafm_jax.run import Task, look, train

ROUNDS = 5
SUMMARY = run_by_hand([record(n) for n in range(1, ROUNDS + 1)]).summary


@pytest.fixture(autouse=True, scope="module")
def no_pictures():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "draw_all", lambda *arguments: [])
        yield


@pytest.fixture(scope="module")
def make(config, dataset, partition):
    """Experiments of one kind."""
    settings = replace(config, architectures=("small_b",), rounds=ROUNDS, eval_every=2, checkpoint_every=2)

    def made() -> Experiment:
        return Experiment(settings, dataset, partition)

    return made


def run_into(folder, experiment, observers):
    train(experiment, look(Task(experiment.config, folder)), observers=observers)


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
def straight(make, tmp_path_factory):
    """A run with nothing in its way, observed by notes and TensorBoard."""
    folder, notes = tmp_path_factory.mktemp("straight") / "run", Notes()
    experiment = make()
    run_into(folder, experiment, observers=[notes, TensorBoard()])
    return folder, notes, experiment


def shown(folder):
    """What TensorBoard itself shows of a folder: rounds and values by tag, scalars and histograms."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in tags["scalars"]}
    return scalars, {tag: found.Histograms(tag) for tag in tags["histograms"]}


def test_an_observer_is_told_everything(straight):
    folder, notes, experiment = straight
    assert notes.heard == [("start", 0), ("finish", ROUNDS), "close"]
    assert [seen.record for seen in notes.seen] == read_run(folder).records
    for index, seen in enumerate(notes.seen):
        mixed = seen.clients["participants/accuracy"]
        np.testing.assert_array_equal(mixed, experiment.visits["accuracy"][index, seen.record.participants])
        assert seen.clients["vectors/mix"].shape == (3, 12)
        np.testing.assert_allclose(
            seen.clients["vectors/mix"].mean(axis=1), seen.clients["participants/mix_mean"], 1e-6
        )
        evaluated = seen.record.all_clients_accuracy is not None
        assert ("all_clients/accuracy" in seen.clients) == ("all_clients/accuracy/small" in seen.clients) == evaluated


def test_a_run_that_goes_on_tells_what_was_before(straight, make, tmp_path):
    first, second = Notes(stop=3), Notes()
    with pytest.raises(KeyboardInterrupt):
        run_into(tmp_path / "run", make(), observers=[first, TensorBoard()])
    assert first.heard == [("start", 0), "close"]
    (path,) = (tmp_path / "run").glob("*tfevents*")
    path.write_bytes(path.read_bytes() + path.read_bytes()[-200:-7])  # cut off by a sudden end
    run_into(tmp_path / "run", make(), observers=[second, TensorBoard()])
    assert second.heard == [("start", 2), ("finish", ROUNDS), "close"]
    for ours, theirs in zip(second.seen, straight[1].seen, strict=True):
        assert replace(ours.record, seconds=0) == replace(theirs.record, seconds=0)
        for name in theirs.clients.keys() - {"vectors/mix"}:
            np.testing.assert_array_equal(ours.clients[name], theirs.clients[name])
    # TensorBoard shows every round once, the mix vectors of those before the checkpoint too.
    ours, theirs = shown(tmp_path / "run"), shown(straight[0])
    assert ours[0].keys() == theirs[0].keys() and ours[1].keys() == theirs[1].keys()
    for tag in theirs[0].keys() - {"seconds"}:
        assert ours[0][tag] == theirs[0][tag]
    for tag, events in theirs[1].items():
        assert [(e.step, e.histogram_value) for e in ours[1][tag]] == [(e.step, e.histogram_value) for e in events]


def test_tensorboard_reads_the_same_numbers(straight):
    folder, notes, _ = straight
    numbers, distributions = shown(folder)
    assert numbers.keys() == {tag for seen in notes.seen for tag in scalars(seen.record)}
    for tag, found in numbers.items():
        records = [seen.record for seen in notes.seen if tag in scalars(seen.record)]
        assert found == [(r.round, pytest.approx(scalars(r)[tag], rel=1e-6)) for r in records]
    for event, seen in zip(distributions["vectors/mix"], notes.seen, strict=True):
        values, told = seen.clients["vectors/mix"], event.histogram_value
        assert event.step == seen.record.round and told.num == sum(told.bucket) == values.size
        assert (told.min, told.max) == (values.min(), values.max())
        assert told.sum == pytest.approx(values.sum()) and told.bucket_limit[-1] == 1.0


def test_what_is_not_finite_is_left_out(tmp_path):
    board, clients = TensorBoard(), {"c": np.array([np.nan]), "d": np.array([np.inf, 7.0])}
    board.start(tmp_path, {}, [])
    board.round(Observation(replace(record(300, None), loss=float("nan")), clients))
    board.close()
    numbers, distributions = shown(tmp_path)
    assert numbers["seconds"] == [(300, 2.0)] and list(distributions) == ["d"]
    assert numbers.keys() == {"seconds", "not_finite", "floats_up", "floats_down", "flops"}
    assert distributions["d"][0].histogram_value.num == 1


def test_a_run_that_starts_over_replaces_what_tensorboard_had(tmp_path):
    def row(number, value):
        return Observation(replace(record(number), loss=value), {})

    board = TensorBoard()  # one observer for several starts
    for past, new in (([], [1, 2, 3]), ([], [1, 2]), ([row(1, 2.0)], [2, 3])):
        board.start(tmp_path, {}, past)
        for number in new:
            board.round(row(number, 2.0 * number))
        board.close()
    assert shown(tmp_path)[0]["loss"] == [(1, 2.0), (2, 4.0), (3, 6.0)]
    assert board.has(tmp_path, 3) and not board.has(tmp_path, 4)


def test_a_finished_run_can_be_told_later_and_is_told_once(straight, make, tmp_path):
    folder, seen = straight[0], straight[1].seen
    notes = Notes()
    replay(read_run(folder), [notes])
    assert notes.heard == [("start", ROUNDS), ("finish", ROUNDS), "close"]
    for ours, theirs in zip(notes.seen, seen, strict=True):
        assert ours.record == theirs.record and ours.clients.keys() == theirs.clients.keys() - {"vectors/mix"}
    before = sorted(folder.glob("*tfevents*"))
    assert TensorBoard().has(folder, ROUNDS)
    replay(read_run(folder), [TensorBoard()])
    assert sorted(folder.glob("*tfevents*")) == before
    shutil.copytree(folder, unseen := tmp_path / "unseen", ignore=shutil.ignore_patterns("*tfevents*"))
    replay(read_run(unseen), [TensorBoard()])
    assert shown(unseen)[0] == shown(folder)[0]


# ---------------------------------------------------------------------------------------------- Weights & Biases


def pretended(mode="online", known=0):
    """A module that does what we use of wandb; `known` is how many rounds the server has of a run."""
    module = types.SimpleNamespace(inits=[], logs=[], logins=0, finished=[])
    module.errors = types.SimpleNamespace(Error=type("Error", (Exception,), {}))
    module.Settings, module.Histogram = dict, lambda values: ("histogram", len(values))
    module.setup = lambda: types.SimpleNamespace(settings=types.SimpleNamespace(mode=mode))
    module.login = lambda verify: setattr(module, "logins", module.logins + 1)

    def init(**options):
        module.inits.append(options)
        module.summary = {}
        return types.SimpleNamespace(
            url="somewhere",
            starting_step=known + 1 if known else 0,
            log=lambda values, step: module.logs.append((step, values)),
            summary=module.summary,
            finish=lambda exit_code=0: module.finished.append(exit_code),
        )

    module.init = init
    return module


def test_wandb_stays_one_run_and_gets_each_round_once(straight, tmp_path, monkeypatch):
    config, seen = {"rounds": ROUNDS}, straight[1].seen
    monkeypatch.setitem(sys.modules, "wandb", first := pretended())
    observer = WeightsAndBiases("project")
    observer.start(tmp_path, config, [])
    for observation in seen[:3]:
        observer.round(observation)
    observer.close()
    assert first.logins == 1 and [step for step, _ in first.logs] == [1, 2, 3] and first.finished == [1]
    assert first.logs[1][1] == {
        **scalars(seen[1].record),
        **{name: ("histogram", values.size) for name, values in seen[1].clients.items() if "finite" not in name},
    }
    monkeypatch.setitem(sys.modules, "wandb", second := pretended(known=3))
    observer = WeightsAndBiases("project")
    observer.start(tmp_path, config, seen[:2])  # its checkpoint was one round behind
    for observation in seen[2:]:
        observer.round(observation)
    assert not observer.has(tmp_path, ROUNDS)
    observer.finish(SUMMARY)
    observer.close()
    assert [step for step, _ in second.logs] == [4, 5] and second.finished == [0]
    assert (
        second.summary["best_mean_accuracy"] == 0.5
        and "config" not in second.summary
        and observer.has(tmp_path, ROUNDS)
    )
    one, two = first.inits[0], second.inits[0]
    assert one["id"] == two["id"] == json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert two["resume"] == "allow" and two["config"] == config and two["project"] == "project"
    monkeypatch.setitem(sys.modules, "wandb", third := pretended("offline"))
    WeightsAndBiases("project", fresh=True).start(tmp_path, config, [])
    assert third.inits[0]["id"] != one["id"] and third.inits[0]["resume"] is None and third.logins == 0


def test_wandb_that_cannot_be_used_is_told_before_any_work(monkeypatch):
    _, options = cli.parse(["--wandb", "project", "--tensorboard"], "run.py", "")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(PfedafmError, match="pip install wandb"):
        options.observers()
    module = pretended()

    def login(verify):
        raise module.errors.Error("no key")

    module.login = login
    monkeypatch.setitem(sys.modules, "wandb", module)
    with pytest.raises(
        PfedafmError, match=r"wandb = 'project' cannot be used \(no key\); accepted: .*WANDB_MODE=offline"
    ):
        options.observers()
    monkeypatch.setitem(sys.modules, "wandb", pretended("offline"))
    assert [type(each) for each in options.observers()] == [TensorBoard, WeightsAndBiases]


def wandb_records(path):
    """The records of an offline run: a LevelDB log of protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, content = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if place % 32768 > 32768 - 7:  # the rest of a block is too small for a header
            place += 32768 - place % 32768
        length, kind = struct.unpack_from("<HB", data, place + 4)
        content += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(content)
            content = b""


def test_the_real_wandb_writes_it_all_offline(straight, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    observer = WeightsAndBiases("project")
    observer.start(tmp_path, {"rounds": ROUNDS}, straight[1].seen)
    observer.finish(SUMMARY)
    observer._wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = list(wandb_records(path))
    history = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    assert [row.step.num for row in history] == list(range(1, ROUNDS + 1))
    for row, seen in zip(history, straight[1].seen, strict=True):
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for name, value in scalars(seen.record).items():
            assert values[name] == pytest.approx(value)
        assert sum(values["vectors/mix/values"]) == 36, sorted(values)
    (run,) = (record.run for record in found if record.WhichOneof("record_type") == "run")
    assert run.project == "project" and run.run_id == json.loads((tmp_path / "wandb.json").read_text())["id"]
