"""What a run leaves and how it is read back: the arithmetic by hand, labels, tables, damaged
files."""

import errno
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.results import records
from pfedafm_jax.results.records import RunFolder, summarize
from pfedafm_jax.results.run import Damaged, differing, read_run, read_runs
from pfedafm_jax.results.select import grouped, labels
from pfedafm_jax.results.tables import cells, markdown, over_seeds, table

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def test_each_accuracy_of_a_summary_is_what_its_name_says():
    means = [0.1, 0.9, None, *[0.4] * 8, 0.6]
    rounds = [
        record(n, value, everyone=value if n % 6 == 0 else None) for n, value in enumerate(means, 1)
    ]
    about = run_by_hand(rounds).about
    summary = summarize(rounds, about, np.array([0.5, 0.7]))
    assert (summary.best_mean_accuracy, summary.best_round) == (0.9, 2)
    assert summary.last_mean_accuracy == 0.6
    last_ten = (8 * 0.4 + 0.6) / 9  # rounds 3 to 12, one without
    assert summary.last_ten_mean_accuracy == pytest.approx(last_ten, abs=1e-6)
    assert (summary.final_all_clients_accuracy, summary.best_all_clients_accuracy) == (0.6, 0.6)
    assert summary.spread_over_clients == 0.1
    assert (summary.rounds, summary.seconds, summary.floats_up_per_client) == (12, 24.0, 0.5)
    assert (summary.floats_down_per_client, summary.flops_per_client_round) == (1.0, 2.5)
    assert (summary.diverged_at_round, summary.clients_not_finite) == (None, 0)
    diverged = [record(1), record(2, not_finite=1), record(3, None, not_finite=2)]
    summary = summarize(diverged, about)
    assert (summary.diverged_at_round, summary.clients_not_finite) == (2, 3)
    assert summary.last_mean_accuracy == 0.5
    assert summary.spread_over_clients is None and summarize([], about).best_mean_accuracy is None


def test_the_first_rounds_of_a_run_are_a_run_of_that_length(tmp_path):
    rounds = [record(n, n / 10, everyone=n / 20 if n % 2 == 0 else None) for n in range(1, 5)]
    visits = {"accuracy": np.arange(400.0).reshape(4, 100)}
    everyone = np.full(100, 0.2)
    run = run_by_hand(rounds, tmp_path / "run", last_accuracies=everyone, visits=visits)
    run.clients["evaluation_rounds"], run.clients["all_clients/accuracy"] = (  # pyright: ignore
        np.array([2, 4]),
        np.stack([np.linspace(0, 0.2, 100), everyone]),
    )
    half = run.first(3)
    assert (half.summary.rounds, half.summary.best_mean_accuracy) == (3, 0.3)
    assert half.summary.final_all_clients_accuracy == 0.1
    assert half.summary.spread_over_clients == pytest.approx(
        np.linspace(0, 0.2, 100).std(), abs=1e-6
    )
    assert [*half.clients["evaluation_rounds"]] == [2]
    assert half.clients["visits/accuracy"].shape == (3, *half.clients["num_test"].shape) == (3, 100)
    assert half.finished and half.name == "pfedafm-seed0"
    assert run.first(4) is run
    begun = run_by_hand([record(1, loss=1e30), record(2)], tmp_path / "begun", finished=False)
    assert (begun.first(1).records[0].loss, begun.first(1).summary.rounds) == (1e30, 1)


def test_a_run_is_read_back_as_it_was_written(tmp_path):
    more = {"mix_mean": 0.5, "mean_accuracy/small": None}
    rounds = [record(1, 0.25, **more), record(2, 0.5, everyone=0.75)]
    memory = run_by_hand(rounds, last_accuracies=np.full(100, 0.75))
    run = run_by_hand(rounds, tmp_path / "run", last_accuracies=np.full(100, 0.75))
    assert run.finished and run.records == rounds
    assert run.summary == replace(memory.summary, config=run.config)
    assert run.config == json.loads(json.dumps(memory.config)) and run.title == "pFedAFM"
    assert run.predictions[0] == "mixed" and run.partition is not None
    assert run.partition.num_clients == 100
    assert run.clients.keys() == memory.clients.keys()
    frame = run.per_round()
    assert frame.shape == (2, 11) and frame["mean_accuracy"].tolist() == [0.25, 0.5]
    assert frame["all_clients_accuracy"].isna().tolist() == [True, False]
    assert frame["mean_accuracy/small"].isna().all() and frame["floats_up"].dtype.kind == "i"
    assert all(kind.kind in "if" for kind in frame.dtypes)
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[0])
    assert {"round", "mean_accuracy", "loss", "seconds", *more} <= line.keys()


def test_a_run_under_way_is_read_as_far_as_it_is(tmp_path):
    run = run_by_hand([record(n, 0.1 * n) for n in (1, 2, 3)], tmp_path / "run", finished=False)
    with open(tmp_path / "run" / "rounds.jsonl", "a") as file:
        file.write('{"round": 4, "mean_ac')
    run = read_run(tmp_path / "run")
    assert not run.finished and [one.round for one in run.records] == [1, 2, 3]
    assert run.summary.best_mean_accuracy == pytest.approx(0.3) and run.clients == {}


def test_the_results_of_this_repository_are_readable():
    folders = sorted(path.parent for path in RESULTS.rglob("config.json"))
    runs = [read_run(folder) for folder in folders]
    assert len(runs) >= 35 and all(run.finished and run.clients for run in runs)
    best = read_run(RESULTS / "pfedafm-seed0").summary
    found = best.best_mean_accuracy, best.last_ten_mean_accuracy
    assert found == pytest.approx((0.9196, 0.8647), abs=5e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three methods, two seeds each; the second seed is one point better."""
    base = tmp_path_factory.mktemp("runs")
    for method in ("pfedafm", "standalone", "fd"):
        for seed in (0, 1):
            rounds = [record(n, 0.1 * n + 0.01 * seed) for n in range(1, 7)]
            run_by_hand(rounds, base / f"{method}-seed{seed}", method=method, seed=seed)
    return base


def test_runs_are_named_by_what_differs(folder):
    def named(*settings):
        return labels([run_by_hand([record(1)], **one) for one in settings])

    runs = read_runs([folder / "pfedafm-seed1", folder / "fd-seed0"])
    assert labels(runs) == ["pFedAFM, seed 1", "FD, seed 0"]
    # Not among them: what matters only to another split or method, and what changes no result.
    one = {"gamma": 0.1, "flip": True, "devices": 1}
    two = {"learning_rate": 0.5, "pfedafm": {"mix_fixed": 0.5}}
    assert named(one, two) == [
        "flip, learning rate 0.02, no mix fixed",
        "no flip, learning rate 0.5, mix fixed 0.5",
    ]
    networks = ({"architectures": ["cnn1", "cnn2"]}, {"architectures": ["cnn5"]})
    assert named(*networks) == ["cnn1+cnn2", "cnn5"]
    assert named(one) == ["pfedafm-seed0"]  # nothing differs: its name
    twice = ["pFedAFM, learning rate 0.5 (1)", "pFedAFM, learning rate 0.5 (2)"]
    assert named(two, two, {"method": "fd"})[:2] == twice


def test_a_folder_stands_for_the_runs_in_it_and_groups_for_their_runs(folder):
    runs = read_runs([folder, folder / "fd-seed0"])  # which is there once
    assert len(runs) == 6 and differing(runs) == ["method", "seed"]
    together = grouped(runs, ["method"])
    assert {name: [run.config["seed"] for run in found] for name, found in together.items()} == {
        "FD": [0, 1], "pFedAFM": [0, 1], "Standalone": [0, 1],
    }  # fmt: skip
    with pytest.raises(PfedafmError, match=r"group = 'metod' cannot be used.*did you mean method"):
        grouped(runs, ["metod"])
    frame = table(runs)
    assert frame.index.tolist()[0] == "FD, seed 0"
    assert frame["best_mean_accuracy"].tolist()[:2] == pytest.approx([0.6, 0.61])
    assert frame["seed"].tolist() == [0, 1] * 3 and frame["finished"].all()


def test_rows_are_mean_and_deviation_over_seeds():
    runs = [
        run_by_hand([record(1, 0.8)], method="standalone", last_accuracies=np.full(100, 0.5)),
        run_by_hand([record(1, 0.9)], method="standalone", seed=1),
        run_by_hand([record(1, 0.5), record(2, 0.4, not_finite=1)], method="fd"),
    ]
    frame = over_seeds(runs)
    assert frame.index.tolist() == ["Standalone", "FD"]
    assert frame["runs", "count"].tolist() == [2, 1]
    assert frame.loc["Standalone", ("best_mean_accuracy", "mean")] == pytest.approx(0.85)
    assert frame.loc["Standalone", ("best_mean_accuracy", "deviation")] == pytest.approx(
        np.sqrt(0.005)
    )
    assert np.isnan(frame.loc["FD", ("best_mean_accuracy", "deviation")])
    assert frame["diverged", "round"].tolist()[1] == 2
    text = markdown(["method", "best", "last ten"], [row[:3] for row in cells(frame)])
    assert "| Standalone | 85.00 ± 7.07 |" in text
    assert "| FD (diverged at round 2) | 50.00 | 45.00 |" in text


FILES = ("config.json", "rounds.jsonl", "clients.npz", "partition.npz", "summary.json")


def is_parsed(name: str, content: bytes) -> bool:
    """Whether a file of numbers is what JSON allows; arrays have a digest."""
    try:
        lines = content.splitlines() if name == "rounds.jsonl" else [content]
        return not name.endswith(".npz") and all(isinstance(json.loads(one), dict) for one in lines)
    except (ValueError, RecursionError):
        return False


def test_every_damage_of_a_finished_run_is_named(tmp_path):
    """Bits flipped, ends cut off, files emptied: each is told by the file's name, if the file cannot
    be parsed any more or has arrays; a flipped digit of a result may pass for another result."""
    rounds = [record(n, 0.1 * n) for n in (1, 2, 3)]
    run_by_hand(rounds, tmp_path / "run", last_accuracies=np.full(100, 0.75))
    draw = random.Random(0)
    for name in FILES:
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        contents = [b"", b"[1]", b"{}", b"null\n", b"[" * 100_000, b"\xff\xfe", whole + b"x"]
        contents.append(whole[: len(whole) // 2])
        for _ in range(25):
            flipped = bytearray(whole)
            flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
            contents.append(bytes(flipped))
        for content in contents:
            path.write_bytes(content)
            try:
                run = read_run(tmp_path / "run")
                _ = run.clients, run.partition
            except PfedafmError as error:
                names = FILES if is_parsed(name, content) else [name]
                assert any(name in str(error) for name in names)
            else:
                assert is_parsed(name, content)
        path.write_bytes(whole)
    assert read_run(tmp_path / "run").clients


def test_files_that_are_gone_or_not_ours_are_named(tmp_path):
    run_by_hand([record(1)], tmp_path / "run")
    for name in ("config.json", "rounds.jsonl", "clients.npz"):
        path = tmp_path / "run" / name
        whole = path.read_bytes()
        path.unlink()
        with pytest.raises(Damaged, match=rf"{name}.*missing"):
            _ = read_run(tmp_path / "run").clients
        path.write_bytes(whole)
    with pytest.raises(
        PfedafmError, match=r"accepted: the folder of a run.*there is no such folder"
    ):
        read_runs([tmp_path / "nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(PfedafmError, match=r"it has no config\.json"):
        read_runs([tmp_path / "empty"])


def change(path, **changes):
    """Changes a JSON file of a run."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "name", "said"),
    [
        ({"rounds": 2}, "summary.json", "does not belong to config.json and rounds.jsonl"),
        ({"colour": 3}, "summary.json", "unknown value colour; known: method, "),
        ({"files": {}}, "rounds.jsonl", "its last line is cut off"),
    ],
)
def test_files_that_no_run_writes_are_named(changes, name, said, tmp_path):
    run_by_hand([record(1)], tmp_path / "run")
    change(tmp_path / "run" / "summary.json", **changes)
    if name == "rounds.jsonl":
        (tmp_path / "run" / name).write_text("{}")
    with pytest.raises(Damaged, match=rf"{name}' is damaged \(.*{said}"):
        read_run(tmp_path / "run")


def test_what_summaries_had_before_is_left_out(tmp_path):
    run = run_by_hand([record(1)], tmp_path / "run")
    earlier = {"target_accuracy": 0.9, "rounds_to_target": 1, "floats_to_target": 3}
    earlier |= {"flops_to_target": 5, "sha256": "0" * 64}
    change(tmp_path / "run" / "summary.json", **earlier)
    change(tmp_path / "run" / "config.json", sha256="0" * 64)
    assert read_run(tmp_path / "run").summary == run.summary
    assert read_run(tmp_path / "run").about == run.about


def test_settings_that_no_run_writes_and_a_folder_in_place_of_a_file_are_named(tmp_path):
    run_by_hand([record(1)], tmp_path / "run")
    change(tmp_path / "run" / "summary.json", files={})
    (tmp_path / "run" / "clients.npz").write_bytes(b"PK")
    with pytest.raises(Damaged, match=r"clients\.npz' is damaged"):
        _ = read_run(tmp_path / "run").clients
    (tmp_path / "run" / "summary.json").unlink()
    config = (tmp_path / "run" / "config.json").read_text()
    change(tmp_path / "run" / "config.json", config={"method": "fd"})
    with pytest.raises(Damaged, match=r"config\.json' is damaged \(config\.dataset is missing\)"):
        read_run(tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(config)
    (tmp_path / "run" / "rounds.jsonl").unlink()
    (tmp_path / "run" / "rounds.jsonl").mkdir()
    with pytest.raises(Damaged, match=r"rounds\.jsonl' is damaged \(not a regular file\)"):
        read_run(tmp_path / "run")


def test_another_version_is_named_and_not_guessed_at(tmp_path):
    run_by_hand([record(1)], tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "format": 3}))
    with pytest.raises(PfedafmError, match="its format is 3, and 2 is read here"):
        read_run(tmp_path / "run")
    del content["format"]
    path.write_text(json.dumps(content))
    with pytest.raises(
        PfedafmError, match="its format is 1 or another program's, and 2 is read here"
    ):
        read_run(tmp_path / "run")


def test_a_record_that_is_not_as_a_run_writes_it_is_refused(tmp_path):
    run_by_hand([record(1)], tmp_path / "run", finished=False)
    path = tmp_path / "run" / "rounds.jsonl"
    good = json.loads(path.read_text())
    for change in ({"round": 2}, {"round": True}, {"participants": [100]}, {"participants": "01"}, {"loss": "low"},
                   {"mix_mean": {"a": 1}}, {"flops": 10**30}, {"mean_accuracy": [1]}):  # fmt: skip
        path.write_text(json.dumps(good | change) + "\n")
        with pytest.raises(Damaged, match=r"rounds\.jsonl.*line 1"):
            read_run(tmp_path / "run")
    for text in ("NaN", "1e999"):
        path.write_text(json.dumps(good).replace('"loss": 1.0', f'"loss": {text}') + "\n")
        with pytest.raises(Damaged, match=r"rounds\.jsonl.*line 1"):
            read_run(tmp_path / "run")


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    others = {"config.json": '{"model": "bert"}', "notes.txt": "mine", "summary.json": "{}"}
    for name, content in others.items():
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(content)
        with pytest.raises(PfedafmError, match=f"a new or empty folder, or that of a run .*{name}"):
            RunFolder(folder).check()
        assert [path.name for path in folder.iterdir()] == [name]
    RunFolder(tmp_path / "new").check()
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").check()
    assert not (tmp_path / "new").exists() and not list((tmp_path / "empty").iterdir())


def test_our_folder_is_known_by_its_lock_whatever_else_is_lost(tmp_path):
    run_by_hand([record(1)], tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text("[")
    (tmp_path / "run" / ".summary.json.0.tmp").write_text("half")
    RunFolder(tmp_path / "run").check()
    assert not list((tmp_path / "run").glob(".*.tmp"))  # what a killed process left


@pytest.mark.parametrize("name", ["bad\udcff", "a\0b", "x" * 300, "/dev/null/x", "/etc/hostname"])
def test_a_name_that_cannot_be_a_folder_is_refused_at_once(name, tmp_path):
    with pytest.raises(PfedafmError, match=r"^run_dir = .* cannot be used"):
        RunFolder(tmp_path / name).check()


def test_a_folder_whose_lock_is_no_file_is_refused_and_one_without_locks_is_not(
    tmp_path, monkeypatch
):
    (tmp_path / "odd" / records.LOCK).mkdir(parents=True)
    with pytest.raises(PfedafmError, match=r"accepted: a folder \(not a regular file\)"):
        RunFolder(tmp_path / "odd").check()
    for place in (tmp_path / "odd", Path("/dev/null/x")):
        with (
            pytest.raises(PfedafmError, match="accepted: a folder that can be written"),
            RunFolder(place).lock(),
        ):
            pass

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(records.fcntl, "flock", no_locks)  # as some network file systems
    with RunFolder(tmp_path / "new").lock():
        assert [path.name for path in (tmp_path / "new").iterdir()] == [records.LOCK]
