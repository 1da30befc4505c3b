"""Several processes in one run, on this machine: they agree with one, and a lost one is noticed and
resumed from."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from pfedafm_jax.engine import join
from pfedafm_jax.errors import PfedafmError

COMMAND = Path(__file__).parent / "tiny_command.py"
ROUNDS = 8


def start(folder: Path, run: str, *more: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(COMMAND.parent.parent)}
    arguments = [sys.executable, str(COMMAND), "--run-dir", run, *more]
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start_all(folder: Path, run: str, count: int, *more: str) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meeting = ("--coordinator", address, "--num-processes", str(count))
    return [
        start(folder, run, *meeting, "--process-id", str(index), *more) for index in range(count)
    ]


def finish(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output


def records(folder: Path, run: str) -> list[dict]:
    return [json.loads(line) for line in (folder / run / "rounds.jsonl").read_text().splitlines()]


def assert_same(found: list[dict], expected: list[dict]) -> None:
    """Numbers alike within rounding, everything else alike."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a["round"], a["participants"]) == (b["round"], b["participants"])
        for name in (
            "mean_accuracy",
            "all_clients_accuracy",
            "loss",
            "mix_mean",
            "shared_loss",
            "floats_up",
            "flops",
        ):
            assert a[name] == b[name] or np.isclose(a[name], b[name], rtol=1e-4), (name, a, b)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """The records of one process with one device."""
    folder = tmp_path_factory.mktemp("alone")
    finish([start(folder, "one", "--rounds", str(ROUNDS))])
    return records(folder, "one")


def test_two_processes_agree_with_one_and_one_goes_on_from_them(tmp_path, alone):
    finish(start_all(tmp_path, "two", 2, "--rounds", str(ROUNDS - 2)))
    finish([start(tmp_path, "two", "--rounds", str(ROUNDS))])
    assert_same(records(tmp_path, "two"), alone)


@pytest.mark.faults
def test_a_killed_process_ends_the_run_which_then_goes_on(tmp_path, alone):
    processes = start_all(tmp_path, "two", 2, "--rounds", "100000")
    deadline = time.monotonic() + 120
    while not list((tmp_path / "two" / "checkpoints").glob("round-*.json")):
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output, _ = processes[0].communicate(timeout=60)
    assert processes[0].returncode not in (0, 2), output
    assert re.search("another (process|task)", output), output
    assert time.monotonic() - killed < 60
    processes[1].communicate()
    done = max(
        int(path.stem[6:]) for path in (tmp_path / "two" / "checkpoints").glob("round-*.json")
    )
    goal = str(max(done + 1, ROUNDS))
    finish(start_all(tmp_path, "two", 2, "--rounds", goal))
    assert_same(records(tmp_path, "two")[: ROUNDS - 1], alone[: ROUNDS - 1])


@pytest.mark.parametrize(
    ("meeting", "setting"),
    [
        (("nowhere", 2, 0), "coordinator"),
        (("127.0.0.1:99999", 2, 0), "coordinator"),
        (("127.0.0.1:1234", 0, 0), "num_processes"),
        (("127.0.0.1:1234", 2, 2), "process_id"),
        (("127.0.0.1:1234", None, None), "num_processes"),
    ],
)
def test_a_meeting_that_cannot_be_is_refused(meeting, setting):
    with pytest.raises(PfedafmError, match=f"^{setting} = .* accepted: "):
        join(*meeting)
