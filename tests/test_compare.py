"""The command that compares methods, on generated data."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
    assert [row["method"] for row in rows] == ["standalone", "lg_fedavg"]
    assert [row["floats_up_per_client"] for row in rows] == [0, 5010]
    assert (tmp_path / "compare.png").stat().st_size > 10_000 and "LG-FedAvg" in (tmp_path / "compare.md").read_text()
    settings_of = json.loads((tmp_path / "lg_fedavg-seed0" / "config.json").read_text())["config"]
    assert (settings_of["learning_rate"], settings_of["lg_fedavg"]["learning_rate"]) == (0.02, 0.007)
    splits = [(tmp_path / f"{name}-seed0" / "partition.npz").read_bytes() for name in ("standalone", "lg_fedavg")]
    assert splits[0] == splits[1]
    wrong = run("standalone,fedavgg")
    assert wrong.returncode == 2 and "fedavgg" in wrong.stderr and "Traceback" not in wrong.stderr
