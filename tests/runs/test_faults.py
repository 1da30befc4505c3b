"""What goes wrong in life, done for real: signals, a full disk, two runs at once.

The command is `experiments/run.py` with a tiny network. The long ones: `python -m pytest -m
faults`.
"""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from test_observers import shown
from tiny_command import end, rows
from tiny_command import start as command

from pfedafm_jax.runs.checkpoints import Checkpoints
from pfedafm_jax.runs.weights_folder import known_run

AT_ONCE = 15  # seconds, on a busy machine
LONG = ("--rounds", "100000", "--checkpoint-every", "1000")


def wait_until(ready, process: subprocess.Popen, timeout: float = 120) -> None:
    start = time.monotonic()
    while not ready() and process.poll() is None:
        assert time.monotonic() - start < timeout
        time.sleep(0.01)


def final_state(folder: Path) -> tuple[dict, dict]:
    """Weights of the last checkpoint, straight from the files: those of each client, and those of
    the server."""
    run = known_run(folder)
    assert run is not None
    checkpoints = Checkpoints(folder / "checkpoints", run.run)
    server = checkpoints.server(max(checkpoints.rounds()))
    clients = {}
    for client in np.flatnonzero(server.table).tolist():
        state = checkpoints.client(client, server)
        assert state is not None
        clients[client] = {name: leaf.tobytes() for name, leaf in state.arrays.items()}
    return clients, {name: leaf.tobytes() for name, leaf in server.arrays.items()}


def assert_same_run(folder: Path, other: Path) -> None:
    assert rows(folder) == rows(other)
    assert final_state(folder) == final_state(other)
    with np.load(folder / "clients.npz") as a, np.load(other / "clients.npz") as b:
        assert sorted(a.files) == sorted(b.files)
        for name in a.files:
            np.testing.assert_array_equal(a[name], b[name])


FAULTS = pytest.mark.faults


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=FAULTS)])
def test_a_signal_saves_and_the_same_command_resumes(number, tmp_path):
    process = command(tmp_path / "run", *LONG)
    wait_until(lambda: len(rows(tmp_path / "run")) >= 3, process)
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 128 + number and "finishing this round" in err and "saved in" in err, err
    assert "stopped after round" in err and "Traceback" not in err, err
    done = len(rows(tmp_path / "run"))
    code, out, err = end(command(tmp_path / "run", "--rounds", str(done + 2)))
    assert code == 0 and f"resumed after round {done}" in out, out + err
    assert [row["round"] for row in rows(tmp_path / "run")] == list(range(1, done + 3))


@pytest.mark.faults
def test_a_second_ctrl_c_leaves_at_once(tmp_path):
    # A round without end.
    process = command(tmp_path / "run", "--rounds", "5", "--local-epochs", "1000000")
    wait_until((tmp_path / "run" / "rounds.jsonl").exists, process)
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    time.sleep(2)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    code, _, err = end(process, 60)
    assert code == 130 and time.monotonic() - start < AT_ONCE and "Traceback" not in err, err


@pytest.mark.faults
def test_ctrl_c_before_the_first_round_leaves_at_once(tmp_path):
    process = command(tmp_path / "run", "--synthetic-samples", "1000000")  # a long start
    assert process.stdout is not None and "imported" in process.stdout.readline()
    time.sleep(5)
    process.send_signal(signal.SIGINT)
    start = time.monotonic()
    code, _, err = end(process, 60)
    assert code == 130 and time.monotonic() - start < AT_ONCE and "Traceback" not in err, err
    assert not (tmp_path / "run").exists()


@pytest.mark.faults
def test_two_runs_in_one_folder(tmp_path):
    first = command(tmp_path / "run", *LONG)
    wait_until(lambda: len(rows(tmp_path / "run")) >= 1, first)
    code, _, err = end(command(tmp_path / "run", "--rounds", "100000"))
    assert code == 2 and "in use by another run" in err and "Traceback" not in err, err
    assert first.poll() is None
    first.kill()  # and the lock goes with it
    end(first)
    code, _, err = end(command(tmp_path / "run", "--rounds", "3", "--fresh"))
    assert code == 0, err


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1.5 MB, and a function that makes it large."""
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    enlarge = ["mount", "-o", "remount,size=500m", str(place)]
    yield place, lambda: subprocess.run(enlarge, check=True)
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path) -> None:
    with pytest.raises(OSError), (place / "filled").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


@pytest.mark.faults
@pytest.mark.parametrize("name", ["XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"])
def test_a_full_cache_folder_costs_one_line(small_disk, tmp_path, name):
    fill(small_disk[0])
    there = ["env", f"{name}={small_disk[0]}"]
    code, out, err = end(command(tmp_path / "run", "--rounds", "2", before=there))
    assert code == 0 and err.count("\n") == 1, err
    assert "compiled programs are not kept" in err and "(No space left on device)" in err
    native = " ".join(out.partition("\nkernels ")[2].split()[:1])
    assert native == ("xla" if name == "XDG_CACHE_HOME" else "native") or not shutil.which("c++")


@pytest.mark.faults
def test_a_full_disk_is_told_and_the_run_resumes_when_there_is_space(small_disk, tmp_path):
    place, enlarge = small_disk
    (place / "filled").write_bytes(bytes(1_100_000))  # what is left is full within 400 rounds
    code, out, err = end(command(place / "run", "--rounds", "400"))
    assert code == 1 and "no space left" in err and "Free some" in err, (code, err)
    assert "Traceback" not in err, err
    done = len(rows(place / "run"))
    code, out, err = end(command(place / "run", "--rounds", "400"))  # still full
    assert code in (1, 2) and "o space left" in err and "Traceback" not in err, (code, err)
    enlarge()
    code, out, err = end(command(place / "run", "--rounds", str(done + 5)))
    assert code == 0 and "resumed after round" in out and "skipped" not in out, out + err
    assert end(command(tmp_path / "whole", "--rounds", str(done + 5)))[0] == 0
    assert_same_run(place / "run", tmp_path / "whole")


@pytest.mark.faults
def test_a_full_disk_is_told_beside_tensorboard_and_no_round_is_shown_twice(small_disk):
    place, enlarge = small_disk
    words = "--rounds", "400", "--tensorboard", "--checkpoint-every", "100"
    code, _, err = end(command(place / "run", *words))
    assert code == 1 and "no space left on the disk" in err and "Free some" in err, (code, err)
    done = len(rows(place / "run"))
    enlarge()
    code, out, err = end(command(place / "run", "--rounds", str(done + 5), *words[2:]))
    assert code == 0, out + err
    steps = [step for step, _ in shown(place / "run")[0]["loss"]]
    assert steps == list(range(1, done + 6))


@pytest.mark.faults
def test_states_that_do_not_fit_on_disk_are_told_and_the_run_resumes_elsewhere(
    small_disk, tmp_path
):
    place, _ = small_disk
    fill(place)
    os.truncate(place / "filled", (place / "filled").stat().st_size - 4096)  # tempfile tries it
    words = "--rounds", "5", "--store", "disk", "--checkpoint-every", "0"
    there = ["env", f"TMPDIR={place}"]
    code, _, err = end(command(tmp_path / "run", *words, before=there))
    assert code == 1 and str(place) in err and "free some space" in err, err
    assert "Traceback" not in err, err
    words = "--rounds", "5", "--store", "disk"
    assert end(command(tmp_path / "run", *words))[0] == 0
    assert end(command(tmp_path / "whole", "--rounds", "5"))[0] == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.faults
def test_files_that_may_not_grow_are_told(tmp_path):
    """As a quota does it."""
    limited = ["bash", "-c", 'ulimit -f 6; exec "$@"', "bash"]  # kilobytes
    words = "--rounds", "400", "--checkpoint-every", "0"
    code, _, err = end(command(tmp_path / "run", *words, before=limited))
    assert code == 1 and "ulimit -f" in err and len(err.splitlines()) == 1, (code, err)


@pytest.mark.faults
@pytest.mark.parametrize("megabytes", [1700, 1900, 2200])
def test_too_little_memory_is_told(tmp_path, megabytes):
    limited = ["bash", "-c", f'ulimit -v {1000 * megabytes}; exec "$@"', "bash"]
    words = "--rounds", "2", "--synthetic-samples", str(100_000 if megabytes > 2000 else 240)
    code, _, err = end(command(tmp_path / "run", *words, before=limited))
    assert code in (0, 1) and "Traceback" not in err, err
    assert code == 0 or "error: not enough memory" in err.splitlines()[-1], err


@pytest.mark.faults
def test_output_and_cache_that_cannot_be_written_cost_one_line(tmp_path):
    full, shut = (["bash", "-c", f'exec "$@" >{where}', "bash"] for where in ("/dev/full", "&-"))
    code, _, err = end(command(tmp_path / "full", "--rounds", "2", before=full))
    assert code == 1 and len(err.splitlines()) == 1, err
    assert "standard output cannot be written (No space left" in err
    code, _, err = end(command(tmp_path / "shut", "--rounds", "2", before=shut))
    assert code == 0, err
    there = ["env", "XDG_CACHE_HOME=/proc/nothing"]
    code, _, err = end(command(tmp_path / "cache", "--rounds", "2", before=there))
    assert code == 0 and "compiled programs are not kept" in err, err
    assert all(line.startswith("warning: ") for line in err.splitlines()), err
