"""Five campaigns: kills, damaged files, random command lines, hostile data, a long run.

`python -m pytest -m faults tests/test_campaigns.py`; with `CAMPAIGN=0.05` a twentieth of each,
`SEED=1` has others drawn.
"""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tiny_command
from hostile import hostile_source
from random_lines import random_line, random_toml
from small import METHODS
from test_faults import assert_same_run
from tiny_command import SETTINGS, rows, run_here

from pfedafm_jax import PfedafmError, load_run
from pfedafm_jax.base.array_files import DamagedFile
from pfedafm_jax.cli import main
from pfedafm_jax.cli.commands import compare, plot, predict, report
from pfedafm_jax.results.run import read_run
from pfedafm_jax.runs.drive import run_all
from pfedafm_jax.runs.observers import Observer
from pfedafm_jax.runs.weights_folder import rounds_saved

pytestmark = pytest.mark.faults
SHARE, SEED = float(os.environ.get("CAMPAIGN", "1")), int(os.environ.get("SEED", "0"))


def size(full: int) -> int:
    return max(4, round(full * SHARE))


@pytest.fixture
def told(capfd):
    """Prints what a campaign counted, past pytest's capture."""
    start = time.monotonic()

    def tell(words: str) -> None:
        with capfd.disabled():
            print(f"\n{words}; {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)

    return tell


# --------------------------------------------------------------------------------------------- kills

KILLS = 200
ROUNDS = ("--rounds", "10", "--checkpoint-every", "2")


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def test_kills_change_no_bit(tmp_path, told, monkeypatch):
    """Real processes, forked from one that has imported everything; SIGKILL at a random moment or
    by the process itself at its n-th file operation."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tiny_command", "orbax.checkpoint"])
    draw, seen, lasts = random.Random(SEED), Counter(), {}

    def start(folder, words, processes, calls=0):
        meeting = [["--coordinator", free_address(), "--num-processes", "2"]] * (processes == 2)
        group = []
        for index in range(processes):
            more = [*meeting[0], "--process-id", str(index)] if meeting else []
            said = (folder, [*words, *more], 0 if index else calls)
            group.append(context.Process(target=tiny_command.run_and_leave, args=said))
            group[-1].start()
        return group

    def ended(group, patience=120):
        for process in group:
            process.join(patience)
            assert process.exitcode is not None or patience < 120, "it hangs"
            process.kill()  # where another one was killed before they met, it waits for two minutes
            process.join()
        return [process.exitcode for process in group]

    kinds = [(m, s, 1) for m in METHODS for s in ("memory", "disk")]
    kinds += [(m, "memory", 2) for m in ("pfedafm", "fedproto")]
    draw.shuffle(kinds)
    while sum(seen.values()) < size(KILLS):
        method, store, processes = kinds.pop(0)
        kinds.append((method, store, processes))
        words = [*ROUNDS, "--method", method, "--store", store]
        whole, work = tmp_path / f"{method}{processes}", tmp_path / "work"
        began = time.monotonic()
        if not whole.exists():
            assert set(ended(start(whole, words, processes))) == {0}, (method, processes)
        lasts.setdefault(whole, time.monotonic() - began)
        for _ in range(9):
            calls = draw.choice([0, draw.randrange(1, 150)])
            group = start(work, words, processes, calls)
            if not calls:
                group[0].join(draw.uniform(0.1, lasts[whole]))
                draw.choice(group).kill()
            codes = ended(group, 20 if processes == 2 and not calls else 120)
            seen[f"{method}, {store}, {processes}"] += -signal.SIGKILL in codes
            assert set(codes) <= {0, 1, -signal.SIGKILL}, (codes, method, store)
            if codes[0] == 0:
                lasts[whole] /= 2  # it ended before: the first one had to compile
                assert_same_run(work, whole)
                shutil.rmtree(work)
        assert set(ended(start(work, words, processes))) == {0}, (method, store, processes)
        assert_same_run(work, whole)
        assert not list(work.rglob(".*.tmp")) and not list(work.rglob(".space*"))
        shutil.rmtree(work)
    told(f"{sum(seen.values())} kills ({dict(seen)}): all ended with the same bits")


# ------------------------------------------------------------------------------------ damaged files

DAMAGES = 500


def damage(path: Path, other: Path, draw: random.Random) -> str:
    kind = draw.choice(
        ["flip", "cut", "empty", "gone", "garbage", "folder", "swapped", "longer", "pipe"]
    )
    content = bytearray(path.read_bytes())
    at = draw.randrange(max(1, len(content)))
    if kind == "flip" and content:
        content[at] ^= 1 << draw.randrange(8)
    garbage = draw.choice([draw.randbytes(at + 1), b"[" * 100_000, b"null", b"\xff\xfe", b"{}\n"])
    new = {"cut": content[:at], "empty": b"", "garbage": garbage, "longer": content + b"x"}
    new["swapped"] = other.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind != "gone":
        path.write_bytes(new.get(kind, content))
    return kind


RESULTS = ("config.json", "summary.json", "rounds.jsonl")  # without digests


def parses(path: Path) -> bool:
    try:
        lines = path.read_bytes().splitlines() if path.suffix == ".jsonl" else [path.read_bytes()]
        return all(json.loads(line) is not None for line in lines)
    except ValueError:
        return False


def test_damaged_files_are_named_or_harmless(tmp_path, told, monkeypatch, capfd):
    draw, seen, base = random.Random(SEED), Counter(), tmp_path / "base"
    monkeypatch.chdir(tmp_path)
    words = ["--rounds", "6", "--checkpoint-every", "2"]
    run_here(base / "pfedafm-seed0", *words)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    np.save(tmp_path / "images.npy", images)
    shutil.copytree(base, tmp_path / "running")
    for name in ("summary.json", "clients.npz"):
        (tmp_path / "running" / "pfedafm-seed0" / name).unlink()
    shutil.rmtree(tmp_path / "running" / "pfedafm-seed0" / "checkpoints" / "rounds" / "000006")
    whole = [read_run(place / "pfedafm-seed0") for place in (base, tmp_path / "running")]
    logits = [load_run(one.folder).client(3).predict(images)["mixed"] for one in whole]
    for number in range(size(DAMAGES)):
        shutil.rmtree(tmp_path / "work", ignore_errors=True)
        running = draw.random() < 0.5
        shutil.copytree(tmp_path / "running" if running else base, tmp_path / "work")
        folder = tmp_path / "work" / "pfedafm-seed0"
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        mine = [path for path in files if path.parent == folder and path.name != ".lock"]
        path = draw.choice(mine if draw.random() < 0.4 else files)
        kind = damage(path, draw.choice(files), draw)
        command = draw.choice(["run", "compare", "plot", "report", "predict"])
        capfd.readouterr()
        what = f"{command}: {path.relative_to(folder)} {kind}, {running=}, number {number}"
        if kind == "flip" and path.name in RESULTS and parses(path):
            seen["another result"] += 1
            continue
        try:
            if command == "run":
                assert run_here(folder, *words) == 0
            elif command == "compare":
                more = ["--methods", "pfedafm", "--run-dir", str(folder.parent)]
                assert compare.main([*SETTINGS, *words, *more]) == 0
            elif command == "plot":
                assert plot.main([str(folder), "--out", "plot.png"]) == 0
            elif command == "report":
                assert report.main([str(folder), "--out", "report.html"]) == 0
            else:
                options = ["--client", "3", "--images", "images.npy", "--out", "y.npz"]
                assert predict.main([str(folder), *options]) == 0
        except PfedafmError as error:
            assert len(str(error)) > 20, what
            seen["named"] += 1
            continue
        except BaseException as error:
            raise AssertionError(what) from error
        seen["harmless"] += 1
        if command in ("run", "compare"):
            assert rows(folder) == rows(base / "pfedafm-seed0"), what
            if 6 in rounds_saved(folder / "checkpoints"):
                with contextlib.suppress(DamagedFile):  # a finished run looks at no weights
                    assert_same_run(folder, base / "pfedafm-seed0")
        elif command == "predict":
            with np.load("y.npz") as found:
                same = np.array_equal(found["logits/mixed"], logits[running])
            told_of, out = ("is skipped", "stands after round"), capfd.readouterr().out
            assert same or any(words in out for words in told_of[: 1 + (kind == "gone")]), what
        else:  # nothing vouches for the lines of a run under way but its checkpoints
            found = read_run(folder)
            assert found.config == whole[0].config, what
            assert found.records == whole[0].records or running, what
    told(f"{sum(seen.values())} damaged files: {dict(seen)}, no other exception, no wrong bits")


# ------------------------------------------------------------------------------------ command lines

LINES = 3000


class Accepted(Exception):
    """A command would load its data now, and start its runs."""


def accepted(*settings):
    raise Accepted


def test_command_lines_end_as_they_should(tmp_path, told, monkeypatch, capfd):
    draw, seen, trained = random.Random(SEED), Counter(), tmp_path / "trained"
    run_here(trained, "--rounds", "2")
    random_pixels = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), np.uint8)
    np.save(tmp_path / "images.npy", random_pixels)
    np.savez(tmp_path / "mine.npz", images=random_pixels, labels=np.arange(40) % 10)
    for number in range(size(LINES)):
        words, carried_out = random_line(draw, trained)
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path / "here")
        Path("own.toml").write_bytes(random_toml(draw))
        before = sorted(tmp_path.rglob("*"))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            patch.setattr(sys, "argv", ["pfedafm", *words])
            if not carried_out:
                patch.setitem(run_all.__globals__, "load_data", accepted)
            try:
                main.main()
            except SystemExit as leaving:
                code = leaving.code or 0
            except Accepted:
                code = "accepted"
            except BaseException as error:
                raise AssertionError(f"number {number}: {words!r}") from error
        err = capfd.readouterr().err
        assert code in (0, 1, 2, 130, 143, "accepted"), (code, words)
        assert code not in (1, 2) or (err.strip() and "Traceback" not in err), (code, words, err)
        assert code != 1 or (err.startswith("error: ") and err.count("\n") == 1), (words, err)
        if code == 2:
            assert sorted(tmp_path.rglob("*")) == before, (number, words, err)
        seen[code] += 1
    told(f"{sum(seen.values())} command lines: {dict(seen)}; nothing written where refused")


# --------------------------------------------------------------------------------------- hostile data

SOURCES = 200
CONSTANT = 150 * 2**20  # bytes


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


class TooLate(BaseException):
    """Longer than 10 s; not an `Exception`, which readers may catch. Its own handler."""

    def __init__(self, number, frame):
        raise self


def test_hostile_data_is_refused(tmp_path, told, monkeypatch):
    draw, most, slowest, seen = random.Random(SEED), 0, 0.0, Counter()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    signal.signal(signal.SIGALRM, TooLate)
    for number in range(size(SOURCES)):
        place = tmp_path / "place"
        place.mkdir()
        name, load = hostile_source(draw, place)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before, start = memory("VmRSS"), time.monotonic()
        honest = sum(path.lstat().st_size for path in place.rglob("*"))
        signal.alarm(10)
        try:
            found = load()
            raise AssertionError(f"number {number}: {name} was believed: {found!r:.300}")
        except PfedafmError as error:
            seen["refused"] += 1
            assert len(str(error)) < 3000, error
        finally:
            signal.alarm(0)
        slowest, most = max(slowest, time.monotonic() - start), max(most, memory("VmHWM") - before)
        assert memory("VmHWM") - before < 2 * honest + CONSTANT, (number, name)
        assert not (tmp_path / "executed").exists(), name
        shutil.rmtree(place)
    words = f"slowest {slowest:.1f} s, at most {most / 2**20:.0f} MB"
    told(f"{sum(seen.values())} hostile sources refused, {words}")


# ----------------------------------------------------------------------------------------- a long run


class Watch(Observer):
    def __init__(self):
        self.seen = []

    def round(self, observation):
        counts = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
        self.seen.append((memory("VmRSS"), *counts))


def test_hundreds_of_checkpoints_leave_memory_and_files_as_they_were(tmp_path, told, monkeypatch):
    watch = Watch()
    monkeypatch.setattr("pfedafm_jax.cli.options.Options.observers", lambda options: [watch])
    rounds = max(60, size(500))
    run_here(tmp_path / "run", "--rounds", str(rounds), "--checkpoint-every", "1")
    early, late = watch.seen[rounds // 5 : 2 * rounds // 5], watch.seen[-rounds // 5 :]
    before, after = (np.max(part, axis=0) for part in (early, late))
    (a, *counts), (b, *later) = before.tolist(), after.tolist()
    words = f"{a / 2**20:.0f} → {b / 2**20:.0f} MB, descriptors and threads {counts} → {later}"
    told(f"{rounds} rounds and checkpoints: {words}")
    assert b < a + 40 * 2**20 and np.all(after[1:] <= before[1:] + 3)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == rounds
