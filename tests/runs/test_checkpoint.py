"""Checkpoints by themselves: what comes back, what a save writes, what is kept, what damage, a full
disk and a kill do."""

import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.client_files import ClientFiles, visits_in
from pfedafm_jax.base.errors import PfedafmError, StorageError
from pfedafm_jax.engine import ClientStore
from pfedafm_jax.runs.checkpoints import Checkpoints, SavedHistory

CLIENTS = 20


FIRST = {"a": np.full(3, 0.5, np.float32), "none": np.zeros((0, 3))}


def store_of(on_disk=False):
    return ClientStore([FIRST], np.zeros(CLIENTS, int), place="disk" if on_disk else "memory")


class Play:
    """A run of rounds without networks: client k is left with values that tell of k and the round."""

    def __init__(self, folder, on_disk=False, run="r1", **options):
        self.checkpoints = Checkpoints(folder, run, **options)
        files = self.checkpoints.files
        self.store = store_of(on_disk)
        self.store.keep_in(files)
        self.saved = self.checkpoints.resume()
        self.round = 0
        if self.saved:
            self.round = self.saved.server.round
            self.store.keep_in(files, self.saved.server.table, self.round)

    def visit(self, *clients):
        self.round += 1
        for client in clients:
            value = np.full(3, 1000 * self.round + client, np.float32)
            self.store.write(client, {**FIRST, "a": value}, self.round)

    def save(self, score=0.5, wait=True):
        history = SavedHistory(
            {"records": list(range(self.round))}, {"x": np.ones((self.round, 2))}
        )
        server = {"server.w": np.full(4, self.round, np.float32)}
        states = self.store.hand_over(self.round)
        self.checkpoints.save(self.round, server, self.store.rounds, states, history, score)
        if wait:
            self.checkpoints.wait()

    def end(self):
        self.checkpoints.close()


def values(store):
    return [float(store.state(client)["a"][0]) for client in range(CLIENTS)]


def assert_holds(folder, t, expected, warnings=0):
    """The newest good checkpoint is of this round, in memory and on disk, and for who only reads."""
    for on_disk in (False, True):
        said = []
        work = folder.with_name(f"{folder.name}-copy")
        shutil.copytree(folder, work)
        play = Play(work, on_disk, log=said.append)
        assert play.saved is not None and play.round == t and len(said) == warnings, said
        assert play.saved.server.arrays["server.w"].tolist() == [t] * 4
        assert play.saved.history.details == {"records": list(range(t))}
        assert play.saved.history.arrays["x"].shape == (t, 2)
        assert values(play.store) == expected
        play.end()
        shutil.rmtree(work)


def file_names(folder):
    return {path.name for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "[red] *? b\\c"


@pytest.fixture(params=[False, True], ids=["memory", "disk"])
def on_disk(request):
    return request.param


def test_what_is_saved_comes_back_from_a_folder_of_any_name(folder, on_disk):
    play = Play(folder, on_disk)
    assert play.saved is None and play.checkpoints.newest_server() is None
    assert not folder.exists()
    for clients in ((3, 4, 7), (4, 10)):
        play.visit(*clients)
        play.save()
        assert_holds(folder, play.round, values(play.store))


def test_a_save_writes_who_was_visited_since_the_last_and_rounds_go_on_meanwhile(folder, on_disk):
    play = Play(folder, on_disk)
    play.visit(*range(20))
    play.save()
    old = {path: path.stat().st_mtime_ns for path in folder.rglob("client-*")}
    play.visit(5)
    expected = values(play.store)
    play.save(wait=False)
    play.visit(5, 6)  # while the save may still be under way
    play.checkpoints.wait()
    assert_holds(folder, 2, expected)
    assert all(path.stat().st_mtime_ns == time for path, time in old.items())
    assert play.checkpoints.files.path(5, 2).exists()
    assert len(list(folder.rglob("client-*"))) == (23 if on_disk else 21)


def test_the_last_two_and_the_best_are_kept_and_only_what_they_name(folder, on_disk):
    play = Play(folder, on_disk)
    for score in (0.1, 0.2, 0.9, 0.3, None, 0.9, 0.2):
        play.visit(play.round % 3, 10 + play.round)
        play.save(score)
    assert play.checkpoints.rounds() == [3, 6, 7]  # of two equal scores the first is the best
    tables = [play.checkpoints.server(t).table for t in (3, 6, 7)]
    named = {visit for table in tables for visit in visits_in(table)}
    assert set(map(tuple, play.checkpoints.files.visits().tolist())) == named
    assert_holds(folder, 7, values(play.store))
    again = Play(folder, on_disk)  # the scores are known after a restart
    again.visit(1)
    again.save(0.1)
    assert again.checkpoints.rounds() == [3, 7, 8]


def test_one_client_is_read_from_two_files(folder, monkeypatch):
    play = Play(folder)
    play.visit(3)
    play.save()
    opened = []
    monkeypatch.setattr(
        "pfedafm_jax.base.array_files.read_bytes",
        lambda path: opened.append(path) or Path(path).read_bytes(),
    )
    reader = Checkpoints(folder, "r1")
    server = reader.newest_server()
    state = reader.client(3, server)
    assert state.arrays["client.a"][0] == 1003 and server.arrays.keys() == {"server.w"}
    assert [path.parent.name for path in opened] == ["server", "000"]
    assert reader.client(4, server) is None  # in its first state
    play.visit(3)
    for _ in range(3):
        play.visit(3)
        play.save(play.round)
    with pytest.raises(PfedafmError, match="the run went on after it was opened"):
        reader.client(3, server)


def test_files_of_rounds_that_were_not_saved_go_when_the_run_goes_on(folder, on_disk):
    play = Play(folder, on_disk)
    play.visit(1, 2)
    play.save()
    expected, before = values(play.store), file_names(folder)
    play.visit(2, 3)
    play.checkpoints.files.write(5, 2, {"client.a": FIRST["a"]})
    (folder / "clients" / "000" / f".{'a' * 32}.tmp").write_bytes(b"half")
    (folder / "rounds" / "000002.orbax-checkpoint-tmp" / "server").mkdir(parents=True)
    assert_holds(folder, 1, expected)
    Play(folder, on_disk)
    assert file_names(folder) == before and len(list((folder / "rounds").iterdir())) == 1


def test_checkpoints_of_another_run_are_not_used(folder):
    play = Play(folder)
    play.visit(1)
    play.save()
    with pytest.raises(PfedafmError, match="all are damaged; --fresh"):
        Play(folder, run="r2")
    assert_holds(folder, 1, values(play.store))


def test_clear_removes_checkpoints_and_clients_and_nothing_else(folder):
    play = Play(folder)
    play.visit(1, 2)
    play.save()
    mine = [folder / "notes", folder / "rounds" / "round-000001", folder / "clients" / "me.txt"]
    for path in mine:
        path.write_text("mine")
    play.checkpoints.clear()
    assert {path for path in folder.rglob("*") if path.is_file()} == set(mine)
    again = Play(folder)
    again.visit(3)
    again.save()
    assert again.checkpoints.rounds() == [1]


def test_a_failed_save_makes_room_and_leaves_the_one_before(folder, on_disk, monkeypatch):
    play = Play(folder, on_disk)
    play.visit(1, 2)
    play.save()
    expected = values(play.store)
    play.visit(2, 3)
    before = file_names(folder)

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pfedafm_jax.runs.orbax_manager.write_arrays", full)
        with pytest.raises(StorageError, match=r"no space left on the disk of .* Free some"):
            play.save()
    assert file_names(folder) == before
    assert not list(folder.rglob("*orbax-checkpoint-tmp*"))
    assert_holds(folder, 1, expected)
    play = Play(folder, on_disk)
    play.visit(2, 3)
    play.save()
    assert_holds(folder, 2, values(play.store))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Checkpoints of rounds 1 (the best), 3 and 4, the clients at each, and the folder."""
    folder, expected = tmp_path_factory.mktemp("good") / "w", {}
    play = Play(folder)
    for score in (0.9, 0.2, 0.3, 0.4):
        play.visit(play.round, play.round + 1, 15)
        play.save(score)
        expected[play.round] = values(play.store)
    play.end()
    return folder, expected


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damage_is_named_and_the_newest_good_checkpoint_used(good, data, tmp_path_factory):
    folder, expected = good
    work = tmp_path_factory.mktemp("damaged") / "w"
    shutil.copytree(folder, work)
    ours = sorted(path.relative_to(work) for path in work.rglob("*.safetensors"))
    path = work / data.draw(st.sampled_from(ours))
    kind = data.draw(st.sampled_from(["flip", "cut", "gone", "longer", "swapped"]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "gone":
        path.unlink()
    elif kind == "swapped":
        other = work / data.draw(st.sampled_from(ours))
        path.write_bytes(other.read_bytes())
    else:
        if kind == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes({"flip": content, "cut": content[:at], "longer": content + b"x"}[kind])
    reader = Checkpoints(folder, "r1")
    whole = []
    for t in (4, 3, 1):
        visits = visits_in(reader.server(t).table)
        needed = [reader.files.path(*visit) for visit in visits]
        needed += [
            folder / "rounds" / f"{t:06d}" / item / "arrays.safetensors"
            for item in ("server", "history")
        ]
        if folder / path.relative_to(work) not in needed:
            whole.append(t)
    said = []
    work_copy = work.with_name("v")
    shutil.copytree(work, work_copy)
    play = None
    try:
        play = Play(work, log=said.append)
    except PfedafmError as error:
        assert not whole and "--fresh" in str(error)
    if not said:  # nothing was changed after all, or only what the newest does not need
        assert play.round == 4
    else:
        assert path.name in said[0] and said[0].startswith("warning: the checkpoint of round 4")
    if play:
        assert play.round == (whole[0] if said else 4)
        assert values(play.store) == expected[play.round]
        play.visit(3, 15)
        play.save(0.1)
        after = values(play.store)
        play.end()
        assert_holds(work, play.round, after)
    else:
        assert file_names(work) == file_names(work_copy)  # nothing is removed then
    shutil.rmtree(work.parent)


def test_nothing_is_said_on_the_terminal(good, capfd, tmp_path):
    shutil.copytree(good[0], tmp_path / "w")
    play = Play(tmp_path / "w")
    play.visit(1)
    play.save()
    play.end()
    assert capfd.readouterr() == ("", "")


# ------------------------------------------------------------------------------------- real processes


def play_on(folder, rounds, on_disk, calls=0):
    """Goes on to a round with a save every second one; SIGKILL at its file operation number `calls`."""
    left = [calls]

    def deadly(operation):
        def call(*words, **options):
            left[0] -= 1
            if left[0] == 0 and calls % 2:
                os.kill(os.getpid(), signal.SIGKILL)
            done = operation(*words, **options)
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return call

    import pfedafm_jax.runs.orbax_manager  # noqa: F401, it takes its functions of `os` before they are deadly

    for name in ("replace", "rename", "fsync", "unlink", "rmdir", "mkdir", "remove", "scandir"):
        setattr(os, name, deadly(getattr(os, name)))
    play = Play(folder, on_disk)
    while play.round < rounds:
        t = play.round + 1
        play.visit(t % 5, t % 7, 19)
        if t % 2 == 0:
            play.save(np.sin(t))
    play.end()


def run_process(*words):
    """`play_on` in a process of its own, forked from one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_checkpoint", "pfedafm_jax.runs.orbax_manager"])
    process = context.Process(target=play_on, args=words)
    process.start()
    process.join(120)
    return process.exitcode


@pytest.mark.faults
def test_kills_at_any_file_operation_lose_nothing_and_leave_nothing(tmp_path, on_disk):
    draw = random.Random(int(os.environ.get("SEED", "0")))
    count = int(os.environ.get("KILLS", "10"))
    assert run_process(tmp_path / "whole", 10, on_disk) == 0
    kills = 0
    folder = tmp_path / "work"
    while kills < count:
        code = run_process(folder, 10, on_disk, draw.randrange(1, 220))
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if code == 0:
            assert_same(folder, tmp_path / "whole", on_disk)
            shutil.rmtree(folder)
    assert run_process(folder, 10, on_disk) == 0
    assert_same(folder, tmp_path / "whole", on_disk)
    print(f"{kills} kills")


def assert_same(folder, whole, on_disk):
    stores = [Play(place, on_disk) for place in (folder, whole)]
    assert stores[0].round == stores[1].round == 10
    assert values(stores[0].store) == values(stores[1].store)
    assert file_names(folder) == file_names(whole)
    assert not list(folder.rglob("*tmp*"))


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,size=50m", str(place)], check=True)
    subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("room", [0, 4096, 20_480, 40_960, 65_536, 81_920, 102_400])
def test_a_full_disk_at_any_moment_leaves_the_last_checkpoint(small_disk, on_disk, room):
    """With so many bytes left when the save begins; each file takes 4 kB."""
    place, enlarge = small_disk
    play = Play(place / "w", on_disk)
    play.visit(1, 2, 3)
    play.save(0.9)
    expected = values(play.store)
    with pytest.raises(OSError), (place / "filled").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    os.truncate(place / "filled", (place / "filled").stat().st_size - room)
    saved = 1
    try:
        play.visit(1, 4, 5)
        play.save()
        saved, expected = 2, values(play.store)
    except StorageError as error:
        assert "no space left" in str(error), error
    play.end()
    copy = place.parent / "copy"
    shutil.copytree(place / "w", copy)
    assert_holds(copy, saved, expected)
    again = Play(place / "w", on_disk)  # still full
    assert again.round == saved
    assert not list((place / "w").rglob("*tmp*"))
    enlarge()
    again.visit(1, 6)
    again.save()
    assert_holds(place / "w", saved + 1, values(again.store))


TWO = """
import sys, numpy as np, jax
from pathlib import Path
index, port, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.config.update("jax_enable_preemption_service", False)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, index)
from jax.experimental import multihost_utils
import test_checkpoint as t
class Two:
    count = 2
    def __init__(self): self.index = index
    def any(self, here): return bool(multihost_utils.process_allgather(np.array([here])).any())
play = t.Play(folder, processes=Two())
print(index, "resumed after", play.round)
for _ in range(4):
    play.round += 1
    clients = [play.round, play.round + 1, 12]
    for client in clients:
        if client % 2 == index:
            value = np.full(3, 1000 * play.round + client, np.float32)
            play.store.write(client, {**t.FIRST, "a": value}, play.round)
    play.store.written_elsewhere([k for k in clients if k % 2 != index], play.round)
    try:
        play.save(-play.round)
    except Exception as error:
        print(index, "failed:", type(error).__name__, error)
        sys.exit(1)
play.end()
"""


def run_two(tmp_path, folder):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    (tmp_path / "two.py").write_text(TWO)
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *sys.path])}
    environment |= {"JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    words = [[sys.executable, tmp_path / "two.py", str(i), str(port), str(folder)] for i in (0, 1)]
    both = [subprocess.Popen(w, env=environment, text=True, stdout=-1, stderr=-1) for w in words]
    return [(*process.communicate(timeout=180), process.returncode) for process in both]


@pytest.mark.faults
def test_two_processes_write_one_checkpoint_and_one_process_goes_on(tmp_path):
    folder = tmp_path / "w"
    for start in (0, 4):
        for index, (out, err, code) in enumerate(run_two(tmp_path, folder)):
            assert code == 0 and f"{index} resumed after {start}" in out, out + err
    expected = [0.5] * CLIENTS
    for t in range(1, 9):
        for client in (t, t + 1, 12):
            expected[client] = 1000 * t + client
    assert Checkpoints(folder, "r1").rounds() == [1, 7, 8]
    assert_holds(folder, 8, expected)


@pytest.mark.faults
def test_a_process_that_cannot_write_ends_the_save_of_both(tmp_path):
    folder = tmp_path / "w"
    play = Play(folder)
    play.visit(1)
    play.save()
    play.end()
    blocked = ClientFiles(folder / "clients", "r1").path(3, 2)
    blocked.mkdir()  # client 3 is kept by process 1
    found = run_two(tmp_path, folder)
    assert [code for _, _, code in found] == [1, 1], found
    assert "another process could not write" in found[0][0]
    assert "Is a directory" in found[1][0]
    blocked.rmdir()
    assert_holds(folder, 1, values(play.store))
