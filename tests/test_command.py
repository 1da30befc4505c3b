"""The command itself, as a user runs it, on generated data and small networks where nothing else is asked."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
SMALL = ["--dataset", "synthetic", "--synthetic-samples", "600", "--num-clients", "10", "--participation", "0.4",
         "--architectures", "cnn5", "--local-epochs", "1", "--eval-every", "2"]  # fmt: skip


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    environment.pop("XLA_FLAGS", None)
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "small"
    result = run("--config", "hetero_cifar10", *SMALL, "--rounds", "3", "--run-dir", str(folder))
    return result, folder


def test_a_run_ends_well_and_leaves_its_files(finished):
    result, folder = finished
    assert result.returncode == 0, result.stderr
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "rounds.jsonl", "summary.json", "clients.npz", "partition.npz"} <= names
    assert {"accuracy.png", "clients.png", "mix.png", "split.png"} <= names


def test_the_terminal_shows_plan_progress_and_result_in_80_columns(finished):
    result, _ = finished
    assert "10, 4 a round" in result.stdout and "FLOP" in result.stdout and "CNN-5" in result.stdout
    assert "round 3/3" in result.stdout and "best mean of participants" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80 + len(str(finished[1]))


def test_rounds_and_summary_have_what_users_read(finished):
    _, folder = finished
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert {"mean_accuracy", "all_clients_accuracy", "loss", "seconds", "floats_up", "flops"} <= row.keys()
        assert len(set(row["participants"])) == 4
    assert rows[0]["all_clients_accuracy"] is None
    assert rows[1]["all_clients_accuracy"] is not None and rows[2]["all_clients_accuracy"] is not None
    assert rows[0]["floats_up"] == 4 * 665_048
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_mean_accuracy"] == max(row["mean_accuracy"] for row in rows)
    assert summary["final_all_clients_accuracy"] == rows[2]["all_clients_accuracy"]
    assert summary["method"] == "pfedafm" and summary["dataset"] == "synthetic" and summary["rounds"] == 3
    assert summary["config"]["num_clients"] == 10 and summary["data_source"].startswith("synthetic")
    assert summary["floats_up_per_client"] == 665_048 and summary["diverged_at_round"] is None
    with np.load(folder / "clients.npz") as table:
        assert table["visits/mix_mean"].shape == (3, 10)
        assert np.isfinite(table["visits/mix_mean"]).sum() == 12
        assert table["all_clients/mixed"].shape == (2, 10)


def test_starting_a_finished_run_again_says_so_and_changes_nothing(finished):
    _, folder = finished
    before = (folder / "rounds.jsonl").read_text()
    again = run("--config", "hetero_cifar10", *SMALL, "--rounds", "3", "--run-dir", str(folder))
    assert again.returncode == 0 and "finished already" in again.stdout
    assert (folder / "rounds.jsonl").read_text() == before


def test_the_same_seed_gives_the_same_rounds(finished, tmp_path):
    _, folder = finished
    result = run("--config", "hetero_cifar10", *SMALL, "--rounds", "3", "--run-dir", str(tmp_path / "again"))
    assert result.returncode == 0, result.stderr

    def rows(path):
        lines = (path / "rounds.jsonl").read_text().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    assert rows(folder) == rows(tmp_path / "again")


def test_config_alone_lists_the_configurations():
    result = run("--config")
    assert result.returncode == 0
    for name in ("hetero_cifar10", "homo_cifar10", "hetero_cifar100", "homo_cifar100"):
        assert name in result.stdout


def test_help_shows_every_setting_with_its_default():
    result = run("--help")
    assert result.returncode == 0
    for flag in ("--config", "--paper", "--run-dir", "--data-dir", "--method", "--rounds", "--seed", "--batch-size",
                 "--pfedafm.mix-learning-rate", "--participation"):  # fmt: skip
        assert flag in result.stdout
    assert "default: 0.1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config", "hetero_cifar11"], "did you mean hetero_cifar10"),
        (["--dataset", "cifar11"], "dataset = 'cifar11'"),
        (["--method", "pfedafn"], "did you mean pfedafm"),
        (["--batch-size", "0"], "batch_size = 0"),
        (["--participation", "0.001"], "participation = 0.001"),
        (["--classes-per-client", "11"], "classes_per_client = 11"),
        (["--preset", "author_code"], "did you mean authors_code"),
        (["--paper", "20"], "10, 50 or 100"),
        (["--rounds", "many"], "rounds"),
        (["--no-such-flag"], "no-such-flag"),
        (["--data-dir", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_bad_input_ends_with_code_2_one_message_and_nothing_written(arguments, said, tmp_path):
    result = run(*arguments, cwd=tmp_path)
    assert result.returncode == 2, result.stdout + result.stderr
    assert said in result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
