"""Several processes in one run, on this machine: they agree with one, and a lost one is noticed and
resumed from."""

import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_command
from tiny_command import end, rows, start

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.engine import Processes, join
from pfedafm_jax.runs.weights_folder import rounds_saved

ROUNDS = 4
NUMBERS = ("mean_accuracy", "all_clients_accuracy", "loss", "mix_mean", "shared_loss", "floats_up")


def start_pair(folder: Path, rounds: int, own=None) -> list[subprocess.Popen]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["--coordinator", address, "--num-processes", "2", "--rounds", str(rounds)]
    each = [["--process-id", str(index), *more] for index, more in enumerate(own or ([], []))]
    return [start(folder, *words, *more) for more in each]


def finish(*processes: subprocess.Popen) -> None:
    for process in processes:
        code, out, err = end(process, 180)
        assert code == 0, out + err


def assert_same(found: list[dict], expected: list[dict]) -> None:
    """Numbers alike within rounding, everything else alike."""
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for name in ("round", "participants", "dropped"):
            assert a.get(name) == b.get(name)
        for name in a.keys() & set(NUMBERS):
            assert a[name] == b[name] or np.isclose(a[name], b[name], rtol=1e-4), (name, a, b)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict]:
    """The records of one process with one device."""
    folder = tmp_path_factory.mktemp("alone") / "one"
    tiny_command.run_here(folder, "--rounds", str(ROUNDS))
    return rows(folder)


@pytest.mark.parametrize(
    "layout", [[], pytest.param(["--layout", "lockstep"], marks=pytest.mark.slow)]
)
def test_two_processes_agree_with_one_and_one_goes_on_from_them(tmp_path, alone, layout):
    finish(*start_pair(tmp_path / "two", ROUNDS - 2, (layout, layout)))
    tiny_command.run_here(tmp_path / "two", "--rounds", str(ROUNDS - 1))
    finish(*start_pair(tmp_path / "two", ROUNDS, (layout, layout)))  # and two from one
    assert_same(rows(tmp_path / "two"), alone)


def test_every_client_is_kept_by_one_process():
    several = [Processes() for _ in range(3)]
    for index, processes in enumerate(several):
        processes.count, processes.index = len(several), index
    clients = np.array([0, 1, 3, 5, 9])
    for client in clients:
        assert sum(processes.keeps(client) for processes in several) == 1


@pytest.mark.slow
@pytest.mark.parametrize("own", [["--method", "fedtgp"], ["--aggregation", "median"]])
def test_two_processes_see_the_same_single_uploads_as_one_and_lose_the_same_clients(tmp_path, own):
    own = [*own, "--dropout", "0.4"]
    finish(*start_pair(tmp_path / "two", ROUNDS, (own, own)))
    tiny_command.run_here(tmp_path / "one", "--rounds", str(ROUNDS), *own)
    assert_same(rows(tmp_path / "two"), rows(tmp_path / "one"))
    assert any("dropped" in row for row in rows(tmp_path / "one"))


@pytest.mark.faults
def test_processes_that_were_started_differently_are_refused(tmp_path):
    for process in start_pair(tmp_path / "two", 3, (["--seed", "1"], ["--seed", "2"])):
        code, out, err = end(process, 180)
        assert code == 2 and "started with different seed, data" in err and not rows(tmp_path), (
            out + err
        )


@pytest.mark.faults
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_run_which_then_goes_on(lost, tmp_path, alone):
    run = tmp_path / "two"
    processes = start_pair(run, 100_000)
    deadline = time.monotonic() + 120
    while not rounds_saved(run / "checkpoints"):
        assert time.monotonic() < deadline and processes[0].poll() is None
        time.sleep(0.1)
    processes[lost].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, out, err = end(processes[1 - lost], 60)
    assert code == 1 and "error: another process of this run is gone" in err, out + err
    assert time.monotonic() - killed < 60 and "stack trace" not in err and len(err) < 500, err
    end(processes[lost])
    done = max(rounds_saved(run / "checkpoints"))
    finish(*start_pair(run, max(done + 1, ROUNDS)))
    assert_same(rows(run)[: ROUNDS - 1], alone[: ROUNDS - 1])


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
