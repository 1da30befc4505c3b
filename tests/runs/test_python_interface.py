"""Runs and comparisons as calls, and their results as tables."""

import contextlib
import io
import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest
from small import states

from pfedafm_jax import PfedafmError, compare, read_run, run
from pfedafm_jax.base.terminal import clean
from pfedafm_jax.config.config import updated
from pfedafm_jax.results import plots
from pfedafm_jax.results.tables import table
from pfedafm_jax.runs.experiment import Experiment

ROUNDS = 3


@pytest.fixture(scope="module")
def settings(config):
    return updated(config, rounds=ROUNDS, eval_every=2, checkpoint_every=2)


@pytest.fixture(scope="module")
def in_memory(settings, dataset, partition):
    return run(settings, dataset, partition, progress=False)


@pytest.fixture(scope="module")
def in_folder(settings, dataset, partition, tmp_path_factory):
    """The same run in a folder; without progress nothing is said."""
    folder, said = tmp_path_factory.mktemp("run") / "small", io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        experiment = run(settings, dataset, partition, run_dir=folder, progress=False)
    assert said.getvalue() == ""
    return experiment, folder


@pytest.fixture(scope="module")
def short(settings):
    """One round of the cheapest method with the smallest network."""
    return updated(settings, rounds=1, architectures=("small_b",), method="standalone")


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *arguments: None)


def rows(experiment):
    return [replace(record, seconds=0) for record in experiment.records]


def weights(experiment):
    leaves = jax.tree.leaves((states(experiment.state), experiment.state.server))
    return [np.asarray(leaf).tobytes() for leaf in leaves]


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_call_is_the_same_run_in_memory_and_in_a_folder(in_memory, in_folder):
    experiment, folder = in_folder
    assert len(in_memory.records) == ROUNDS and rows(in_memory) == rows(experiment)
    assert weights(in_memory) == weights(experiment)
    names = {path.name for path in folder.iterdir()}
    assert {"summary.json", "rounds.jsonl", "accuracy.png", "checkpoints"} <= names
    read, live = read_run(folder), experiment.result()
    assert read.records == live.records and read.clients.keys() == live.clients.keys()
    assert read.predictions == live.predictions == ["mixed", "small", "large"]
    for name, array in live.clients.items():
        np.testing.assert_array_equal(read.clients[name], array)
    timing = ("seconds", "compile_seconds", "checkpoint_seconds", "checkpoint_background_seconds")
    zeros = dict.fromkeys(timing, 0)
    same = [replace(run.summary, config={}, **zeros) for run in (read, live, in_memory.result())]
    assert same[0] == same[1] == same[2]


def test_the_same_call_loads_a_finished_run(in_folder, settings, dataset, partition, capsys):
    experiment, folder = in_folder
    before = files(folder)
    again = run(settings, dataset, partition, run_dir=folder)
    said = capsys.readouterr().out.replace("\n", "")
    assert "is finished already; " in said and "fresh=True) starts over" in said
    assert again.records == experiment.records and weights(again) == weights(experiment)
    accuracies = [one.per_client()["accuracy"] for one in (again, experiment)]
    np.testing.assert_array_equal(*accuracies)
    assert files(folder) == before


def test_a_finished_run_without_checkpoints_cannot_be_loaded(
    in_folder, settings, dataset, partition, tmp_path
):
    shutil.copytree(in_folder[1], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(PfedafmError, match="no checkpoint of its last round"):
        run(settings, dataset, partition, run_dir=tmp_path / "run", progress=False)


def test_the_table_by_round_has_numbers_only(in_memory):
    table = in_memory.per_round()
    assert len(table) == ROUNDS and all(kind.kind in "if" for kind in table.dtypes)
    assert table["round"].tolist() == [1, 2, 3] and table["floats_up"].dtype.kind == "i"
    records = in_memory.records
    assert table["mean_accuracy"].tolist() == [record.mean_accuracy for record in records]
    small = [record.more["mean_accuracy/small"] for record in records]
    assert table["mean_accuracy/small"].tolist() == small
    for name in ("all_clients_accuracy", "all_clients_accuracy/large"):
        assert table[name].isna().tolist() == [True, False, False]  # evaluated after rounds 2 and 3
    assert "participants" not in table
    assert "mean_accuracy/mixed" not in table  # which is mean_accuracy


def test_the_table_by_client_says_who_it_is_and_how_it_did(in_memory, partition, dataset):
    table = in_memory.per_client()
    assert len(table) == 6 and table["architecture"].tolist() == ["small_a", "small_b"] * 3
    assert table["num_train"].tolist() == [21, 16, 29, 5, 19, 24]
    assert table["num_test"].tolist()[4] == 70
    held = np.concatenate([partition.train[3], partition.test[3]])
    assert table["num_classes"][3] == len(set(dataset.labels[held].tolist()))
    drawn = [record.participants for record in in_memory.records]
    for client in range(6):
        took_part = [number for number, clients in enumerate(drawn, start=1) if client in clients]
        assert table["visits"][client] == len(took_part)
        assert table["last_round"][client] == max(took_part, default=0)
        assert np.isnan(table["mix_mean"][client]) == (not took_part)
        if took_part:
            last = in_memory.result().clients["visits/mix_mean"][max(took_part) - 1, client]
            assert table["mix_mean"][client] == last
    for name in ("accuracy", "accuracy/large"):
        np.testing.assert_array_equal(table[name], in_memory.history.evaluations[3][name])


def test_tables_before_the_first_round(settings, dataset, partition):
    experiment = Experiment(settings, dataset, partition)
    assert experiment.per_round().empty and experiment.summary().rounds == 0
    table = experiment.per_client()
    assert table["visits"].tolist() == [0] * 6 and np.isnan(table["accuracy"]).all()


def test_figures_show_themselves_in_notebooks(in_memory):
    figure = plots.accuracy_by_round(in_memory.per_round(), in_memory.predictions)
    assert figure._repr_png_().startswith(b"\x89PNG")  # pyright: ignore
    assert "participants, mixed model" in {line.get_label() for line in figure.axes[0].lines}


def test_a_picture_that_cannot_be_drawn_costs_a_line_and_not_the_run(
    short, dataset, partition, tmp_path, monkeypatch, capsys
):
    def fails(*arguments, **options):
        assert (tmp_path / "run" / "summary.json").exists()  # on disk before any picture
        raise RuntimeError("no such font")

    monkeypatch.setattr(plots, "save", fails)
    assert run(short, dataset, partition, run_dir=tmp_path / "run", progress=False).round == 1
    said = capsys.readouterr().err
    assert "accuracy.png could not be drawn (RuntimeError: no such font)" in said
    assert "Traceback" not in said
    assert read_run(tmp_path / "run").finished


def test_a_damaged_file_of_a_finished_run_is_written_anew_from_its_checkpoint(
    in_folder, settings, dataset, partition, tmp_path, no_pictures, capsys
):
    for name in ("rounds.jsonl", "clients.npz", "summary.json", "config.json"):
        shutil.copytree(in_folder[1], tmp_path / name)
        (tmp_path / name / name).write_bytes(b"?")
        again = run(settings, dataset, partition, run_dir=tmp_path / name, progress=False)
        assert f"{name}' is damaged" in capsys.readouterr().err
        assert again.records == in_folder[0].records and read_run(tmp_path / name).finished
        shutil.rmtree(tmp_path / name / "checkpoints")
        (tmp_path / name / name).write_bytes(b"?")
        with pytest.raises(PfedafmError, match=f"{name}' is damaged"):  # nothing to write it from
            run(settings, dataset, partition, run_dir=tmp_path / name, progress=False)


@pytest.mark.parametrize(
    "name",
    ["$a_b$", "[/bold][red]", "\\%s {x} <b>&amp;", ":smile: é \u202e", "line\nbreak", "a" * 200],
)
def test_any_name_is_only_a_name(name, short, dataset, partition, tmp_path, no_pictures, capsys):
    for _ in range(2):
        named = updated(short, dataset=name)
        run(named, dataset, partition, run_dir=tmp_path / name, name=name)
    said = "".join(capsys.readouterr().out.split())  # however lines are broken
    assert "".join(clean(name).split()) in said and "finishedalready" in said


def test_a_comparison_is_the_same_in_memory_and_in_a_folder(
    short, dataset, partition, tmp_path, no_pictures, capsys
):
    share = {"dataset": dataset, "partition": partition}
    live = compare(short, ["standalone", "lg_fedavg"], **share, progress=False)
    kept = compare(short, "standalone", [5, 6], **share, run_dir=tmp_path, progress=False)
    again = compare(short, ["standalone"], [5, 6], **share, run_dir=tmp_path)
    said = capsys.readouterr().out
    assert "Standalone" in said and str(tmp_path / "compare.png") in said.replace("\n", "")
    expected = [("standalone", 5), ("standalone", 6)]
    assert [(run.config["method"], run.config["seed"]) for run in kept] == expected
    assert [run.records for run in kept] == [run.records for run in again]
    assert table(kept).equals(table(again))
    assert replace(live[0].records[0], seconds=0) == replace(kept[0].records[0], seconds=0)
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [(row["method"], row["seed"]) for row in rows] == expected
    best = [run.summary.best_mean_accuracy for run in kept]
    assert [row["best_mean_accuracy"] for row in rows] == best
    assert len(plots.compare_runs(live).axes[0].lines) == 2
    texts = plots.accuracy_by_floats(live).axes[0].texts
    assert [text.get_text() for text in texts] == ["Standalone", "LG-FedAvg"]


@pytest.mark.parametrize(
    ("methods", "seeds", "said"),
    [
        (["standalone", "fedavgg"], None, "fedavgg"),
        ([], None, "methods = "),
        (["standalone"], [], "seeds = "),
        (["standalone"], ["one"], "seed = 'one'"),
    ],
)
def test_bad_comparisons_are_refused_before_any_work(methods, seeds, said, settings):
    with pytest.raises(PfedafmError, match=said):
        compare(settings, methods, seeds, progress=False)
