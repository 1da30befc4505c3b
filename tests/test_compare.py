"""The comparison of methods: its arithmetic by hand, and the command on generated data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pfedafm_jax.compare import COLUMNS, collect, markdown
from pfedafm_jax.costs import to_target

ROOT = Path(__file__).parent.parent
KEYS = set(COLUMNS.values())


def summary(**values):
    return {**dict.fromkeys(KEYS, 1.0), "diverged_at_round": None, **values}


def test_rows_are_mean_and_deviation_over_seeds():
    rows = collect(
        [
            ("standalone", summary(best_mean_accuracy=0.8)),
            ("standalone", summary(best_mean_accuracy=0.9)),
            ("fd", summary(best_mean_accuracy=0.5, diverged_at_round=7, final_all_clients_accuracy=None)),
        ]
    )
    assert [row["method"] for row in rows] == ["Standalone", "FD"]
    assert rows[0]["best"]["mean"] == pytest.approx(0.85)
    assert rows[0]["best"]["deviation"] == pytest.approx(np.sqrt(0.005))
    assert rows[1]["best"] == {"mean": 0.5, "deviation": None} and rows[1]["all clients"] is None
    text = markdown(rows)
    assert "| Standalone | 85.00 ± 7.07 |" in text and "| FD (diverged at round 7) | 50.00 |" in text


def test_costs_until_a_target():
    rounds = [
        {"round": n, "mean_accuracy": accuracy, "floats_up": 10, "floats_down": 5, "flops": 100}
        for n, accuracy in ((1, 0.5), (2, None), (3, 0.91), (4, 0.95))
    ]
    reached = {"target_accuracy": 0.9, "rounds_to_target": 3, "floats_to_target": 45, "flops_to_target": 300}
    assert to_target(rounds, 0.9) == reached
    assert to_target(rounds, 0.99)["rounds_to_target"] is None
    assert to_target(rounds, None)["target_accuracy"] is None


def test_the_command_compares_methods_and_continues_where_it_stopped(tmp_path):
    settings = ["--dataset", "synthetic", "--synthetic-samples", "600", "--num-clients", "6", "--participation", "0.5",
                "--architectures", "cnn5", "--local-epochs", "1", "--rounds", "2",
                "--lg_fedavg.learning-rate", "0.007"]  # fmt: skip

    def run(methods: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
        command = [sys.executable, str(ROOT / "experiments" / "compare.py"), "--methods", methods, *settings]
        return subprocess.run(
            [*command, "--run-dir", str(tmp_path)], env=environment, capture_output=True, text=True, timeout=600
        )

    assert run("standalone").returncode == 0
    first = (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text()
    result = run("standalone,lg_fedavg")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "standalone-seed0" / "rounds.jsonl").read_text() == first  # not run again
    rows = json.loads((tmp_path / "compare.json").read_text())
    assert [row["method"] for row in rows] == ["Standalone", "LG-FedAvg"]
    assert rows[0]["floats up"]["mean"] == 0 and rows[1]["floats up"]["mean"] == 5010
    assert (tmp_path / "compare.png").stat().st_size > 10_000 and "LG-FedAvg" in (tmp_path / "compare.md").read_text()
    settings_of = json.loads((tmp_path / "lg_fedavg-seed0" / "config.json").read_text())["config"]
    assert (settings_of["learning_rate"], settings_of["lg_fedavg"]["learning_rate"]) == (0.02, 0.007)
    splits = [(tmp_path / f"{name}-seed0" / "partition.npz").read_bytes() for name in ("standalone", "lg_fedavg")]
    assert splits[0] == splits[1]
    wrong = run("standalone,fedavgg")
    assert wrong.returncode == 2 and "fedavgg" in wrong.stderr and "Traceback" not in wrong.stderr
