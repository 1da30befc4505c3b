"""The command itself, as a user runs it, on generated data with a tiny network; and its words."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tiny_command
from by_hand import record, run_by_hand
from small import command_words

from pfedafm_jax.base.errors import PfedafmError, storage_error
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.cli import main
from pfedafm_jax.cli.commands import compare
from pfedafm_jax.results import plots
from pfedafm_jax.runs.progress import print_summary

WORDS = ("--config", "hetero_cifar10", "--rounds", "3", "--eval-every", "2")
FLOATS = 12 * 8 + 8  # of the tiny network: four quarters in three colours, eight features


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "tiny"
    code, out, err = tiny_command.end(tiny_command.start(folder, *WORDS))
    assert code == 0, err
    return folder, out


def test_a_run_shows_plan_progress_and_result_in_80_columns_and_leaves_its_files(finished):
    folder, out = finished
    assert "12, 3 per round" in out and "FLOP" in out and "round 3/3" in out
    assert "best mean of participants" in out
    assert max(len(line) for line in out.splitlines()) <= 80 + len(str(folder))
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "rounds.jsonl", "summary.json", "clients.npz", "partition.npz"} <= names
    assert {"accuracy.png", "clients.png", "mix.png", "split.png"} <= names


def test_rounds_and_summary_have_what_users_read(finished):
    folder, _ = finished
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2, 3]
    names = {"mean_accuracy", "all_clients_accuracy", "loss", "seconds", "floats_up", "flops"}
    for row in rows:
        assert names <= row.keys() and len(set(row["participants"])) == 3
    assert [row["all_clients_accuracy"] is None for row in rows] == [True, False, False]
    assert rows[0]["floats_up"] == 3 * FLOATS
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["best_mean_accuracy"] == max(row["mean_accuracy"] for row in rows)
    assert summary["final_all_clients_accuracy"] == rows[2]["all_clients_accuracy"]
    found = [summary[name] for name in ("method", "dataset", "rounds", "floats_up_per_client")]
    assert found == ["pfedafm", "synthetic", 3, FLOATS]
    assert summary["config"]["num_clients"] == 12 and summary["data_source"].startswith("synthetic")
    assert summary["diverged_at_round"] is None
    with np.load(folder / "clients.npz") as table:
        assert table["visits/mix_mean"].shape == (3, 12)
        assert np.isfinite(table["visits/mix_mean"]).sum() == 9
        assert table["all_clients/accuracy"].shape == (2, 12)


def test_starting_a_finished_run_again_says_so_and_changes_nothing(finished, capsys):
    folder, _ = finished
    before = (folder / "rounds.jsonl").read_text()
    assert tiny_command.run_here(folder, *WORDS) == 0
    assert "finished already" in capsys.readouterr().out
    assert (folder / "rounds.jsonl").read_text() == before


def test_a_reader_who_leaves_ends_a_command_in_silence(finished, tmp_path):
    read, write = os.pipe()
    os.close(read)  # as after `| head`
    plot = ["plot", str(finished[0]), "--out", str(tmp_path / "plot.png")]
    command = [sys.executable, "-m", "pfedafm_jax", *plot]
    asked = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    assert (asked.returncode, asked.stderr) == (141, b"")
    os.close(write)


@pytest.mark.parametrize(
    ("words", "said"),
    [(["run", "--config", "hetero_cifar10", "--data-dir", "/nowhere/at/all"], "/nowhere/at/all")],
)
def test_a_refused_command_ends_with_code_2_and_no_traceback(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pfedafm", *words])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "place", "said"),
    [
        (errno.EIO, ".", r"^x could not be written \(Input/output error\)$"),
        (
            errno.ENOSPC,
            ".",
            r"no space left on the disk of \. \(\d+\.\d MB free\)\. Free some, .* resu",
        ),
        (errno.EDQUOT, "/no/where", r"no space left on the disk of /no/where \(full\)\. Free some"),
        (
            errno.EFBIG,
            ".",
            r"files may not grow so large here\. Raise the limit \(ulimit -f\), the",
        ),
    ],
)
def test_a_failed_write_says_why_and_what_to_do(number, place, said):
    error = storage_error("x", Path(place), OSError(number, os.strerror(number)))
    assert re.search(said, str(error)) and error.exit_code == 1


def test_the_result_tells_the_best_round_and_what_diverged(capsys):
    rounds = [record(1, 0.5), record(2, 0.91, not_finite=2), record(3, 0.6, not_finite=1)]
    print_summary(run_by_hand(rounds, dataset="cifar10").summary, [])
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "best mean of participants 91.00 %" in lines[0]
    assert "diverged round 2 3 updates not finite, kept out" in lines


def test_lapack_has_one_thread_for_each_device():
    # In a process of its own: here it is loaded already.
    code = """
from threadpoolctl import threadpool_info
from pfedafm_jax import setup_devices
import jax
setup_devices(1, cache=False)
jax.numpy.linalg.eigh(jax.numpy.eye(2))
print(*sorted({one["num_threads"] for one in threadpool_info()}))
"""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    command = [sys.executable, "-c", code]
    asked = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert asked.stdout.split() == ["1"]


def test_names_may_be_as_long_as_names_can_be_and_no_longer(tmp_path, monkeypatch, capsys):
    write_atomically(tmp_path / ("x" * 255), "whole")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["whole"]
    monkeypatch.setattr(sys, "argv", ["pfedafm", "report", "x" * 256])
    with pytest.raises(SystemExit, match="2"):
        main.main()
    assert capsys.readouterr().err.startswith("error: [Errno 36] File name too long: 'xxx")


def test_the_command_compares_methods_and_leaves_finished_runs_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(plots, "draw_all", lambda *arguments: None)  # each run's own, seconds each

    def compared(methods: str) -> str:
        words = command_words(rounds=2, methods=methods, run_dir=tmp_path)
        assert compare.main([*words, "--lg_fedavg.learning-rate", "0.007"]) == 0
        return capsys.readouterr().out

    assert "round 2/2" in compared("standalone")
    first = (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text()
    assert "run 1 of 1: LG-FedAvg" in compared("standalone,lg_fedavg")
    assert (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text() == first
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["method"] for row in rows] == ["standalone", "lg_fedavg"]
    assert [row["floats_up_per_client"] for row in rows] == [0, 130]  # a header of 12 x 10 and 10
    assert (tmp_path / "compare.png").stat().st_size > 10_000
    assert "LG-FedAvg" in (tmp_path / "compare.md").read_text()
    config = json.loads((tmp_path / "lg_fedavg-seed0" / "config.json").read_text())["config"]
    assert (config["learning_rate"], config["lg_fedavg"]["learning_rate"]) == (0.02, 0.007)
    splits = [path.read_bytes() for path in tmp_path.glob("*/partition.npz")]
    assert len(splits) == 2 and splits[0] == splits[1]
    with pytest.raises(PfedafmError, match="fedavgg"):
        compared("standalone,fedavgg")
