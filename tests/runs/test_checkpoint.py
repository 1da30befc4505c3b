"""Checkpoints by themselves: what comes back, what a save costs, what is kept, and what damage
does."""

import json
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.errors import PfedafmError, StorageError
from pfedafm_jax.base.trees import fitted, named
from pfedafm_jax.engine import ClientStore, State
from pfedafm_jax.runs.checkpoint_files import read_manifest, signed
from pfedafm_jax.runs.checkpoints import Checkpoints

GROUPS = np.arange(20) % 2


def start(group: int) -> dict:
    kernel, none = np.full((3 + group, 2), 0.5, np.float32), np.zeros((0, 3), np.float32)
    return {"net": {"kernel": kernel, "none": none}, "count": np.int32(group)}


def make_store(num_clients: int = 20) -> ClientStore:
    return ClientStore([start(0), start(1)], np.arange(num_clients) % 2)


def visit(store: ClientStore, number: int, clients) -> None:
    """Client c is left with values that tell of it and of the round."""
    for client in clients:
        value, first = 1000 * number + client, start(int(store.groups[client]))
        store.write(client, jax.tree.map(lambda leaf, v=value: np.full_like(leaf, v), first))


def server_of(number: int) -> dict:
    return {"extractor": {"kernel": np.full((2, 2), number, np.float32)}, "round": np.int32(number)}


def state_of(store: ClientStore, number: int = 0) -> State:
    return State(server_of(number), store)


def save(
    checkpoints: Checkpoints, store: ClientStore, number: int, score: float | None = 0.5
) -> None:
    arrays = {"visits": np.full((number, 2), 1.5, np.float32), "nothing": np.zeros((0, 4))}
    details = {"records": [{"round": number, "loss": 0.1}]}
    checkpoints.save(number, state_of(store, number), arrays, details, score)
    checkpoints.wait()


def assert_holds(folder: Path, store: ClientStore, number: int, warnings: int = 0) -> None:
    """The newest good checkpoint is this round, and gives the clients of this store."""
    said: list[str] = []
    again = make_store(len(store.groups))
    saved = Checkpoints(folder, log=said.append).load(state_of(again))
    assert saved is not None and len(said) == warnings, said
    state, details, arrays = saved
    chex.assert_trees_all_equal(jax.device_get(state.server), server_of(number))
    assert state.clients is again and arrays["round"] == number
    assert details["records"] == [{"round": number, "loss": 0.1}]
    assert arrays["visits"].shape == (number, 2) and "nothing" not in arrays
    assert again.visited.tolist() == store.visited.tolist() and not again.changed.any()
    for client in range(len(store.groups)):
        chex.assert_trees_all_equal(again.state(client), store.state(client))


def test_what_is_saved_comes_back_from_a_folder_of_any_name(tmp_path):
    folder = tmp_path / "[red] *?"
    store, checkpoints = make_store(), Checkpoints(folder)
    assert checkpoints.load(state_of(make_store())) is None and not folder.exists()
    for number, clients in ((1, [3, 4, 7]), (2, [4, 10])):
        visit(store, number, clients)
        save(checkpoints, store, number)
        assert_holds(folder, store, number)


def test_a_save_holds_what_changed_and_the_store_may_change_meanwhile(tmp_path):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    visit(store, 1, range(20))
    save(checkpoints, store, 1)
    visit(store, 2, [5])
    checkpoints.save(2, state_of(store, 2), {}, {})
    visit(store, 3, [5, 6])  # while the save may still be under way
    checkpoints.wait()
    again = make_store()
    Checkpoints(tmp_path).load(state_of(again))
    assert again.state(5)["count"] == 2005 and again.state(6)["count"] == 1006
    assert checkpoints.chain == ((1, 2), 20, 1)
    assert np.flatnonzero(store.changed).tolist() == [5, 6]


def test_the_last_two_the_best_and_one_apart_are_kept(tmp_path):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    scores = [0.1, 0.2, 0.9, 0.3, None, 0.9, 0.2]
    for number, score in enumerate(scores, start=1):
        visit(store, number, [number])
        save(checkpoints, store, number, score)
    # All of 1, 2 and 4 were whole; of two equal scores the earlier is the best.
    parts = {number: manifest["parts"] for number, manifest in checkpoints.manifests().items()}
    assert parts == {7: [4, 5, 6, 7], 6: [4, 5, 6], 3: [2, 3], 2: [2]}
    checkpoints.finish()
    assert list(checkpoints.manifests()) == [7, 3, 2]
    assert_holds(tmp_path, store, 7)


def test_saves_share_no_file_and_write_a_client_about_twice_as_often_as_it_changes(tmp_path):
    """No file is part of all checkpoints that are kept."""
    store, checkpoints, random = make_store(), Checkpoints(tmp_path), np.random.default_rng(0)
    changed = written = 0
    for number in range(1, 21):
        visit(store, number, random.choice(20, 2, replace=False))
        changed += store.changed.sum()
        save(checkpoints, store, number, score=float(number))
        chain = checkpoints.chain
        written += chain.first if chain.parts == (number,) else 2
        assert chain.first + chain.later <= 2 * store.visited.sum()
        files = [set(manifest["files"]) for manifest in checkpoints.manifests().values()]
        assert number == 1 or not set.intersection(*files)
    assert written <= 2.2 * changed
    assert len(list(tmp_path.glob("round-*/"))) <= 20
    assert_holds(tmp_path, store, 20)


def test_clients_are_written_in_blocks(tmp_path, monkeypatch):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    monkeypatch.setattr("pfedafm_jax.runs.checkpoints.BLOCK_BYTES", 7 * int(store.row_bytes.max()))
    visit(store, 1, range(20))
    save(checkpoints, store, 1)
    assert len(list((tmp_path / "round-000001" / "clients").iterdir())) == 3
    assert_holds(tmp_path, store, 1)


def test_clients_that_keep_nothing_are_saved_as_visited(tmp_path):
    store = ClientStore([{}], np.zeros(3, int))
    store.write(1, {})
    save(Checkpoints(tmp_path), store, 1)
    again = ClientStore([{}], np.zeros(3, int))
    assert Checkpoints(tmp_path).load(state_of(again)) is not None
    assert again.visited.tolist() == [False, True, False]


def test_saving_goes_on_after_loading(tmp_path):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    for number in range(1, 4):
        visit(store, number, [number, 9])
        save(checkpoints, store, number)
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    checkpoints.load(state_of(store))
    for number in range(4, 9):
        visit(store, number, [number, 9])
        save(checkpoints, store, number)
        assert_holds(tmp_path, store, number)


def test_what_a_save_that_was_cut_off_left_is_ignored_and_goes(tmp_path):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    visit(store, 1, [1])
    save(checkpoints, store, 1)
    shutil.copytree(tmp_path / "round-000001", tmp_path / "round-000002")
    shutil.copytree(tmp_path / "round-000001", tmp_path / "round-000003.orbax-checkpoint-tmp")
    for name in (".round-000002.json.0.tmp", ".space.1"):
        (tmp_path / name).write_bytes(b"half")
    assert_holds(tmp_path, store, 1)
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    checkpoints.load(state_of(store))
    visit(store, 2, [2])
    save(checkpoints, store, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        "round-000001", "round-000001.json", "round-000002", "round-000002.json"
    }  # fmt: skip
    assert_holds(tmp_path, store, 2)


def test_a_failed_save_leaves_the_one_before_and_can_be_done_again(tmp_path, monkeypatch):
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    visit(store, 1, [1, 2])
    save(checkpoints, store, 1)
    visit(store, 2, [2, 3])

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pfedafm_jax.runs.checkpoint_files.write_tree", full)
        with pytest.raises(StorageError, match=r"no space left on the disk of .* Free some"):
            save(checkpoints, store, 2)
    store, checkpoints = make_store(), Checkpoints(tmp_path)
    saved = checkpoints.load(state_of(store))
    assert saved is not None and saved[2]["round"] == 1 and store.state(2)["count"] == 1002
    visit(store, 2, [2, 3])
    save(checkpoints, store, 2)
    assert_holds(tmp_path, store, 2)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Three checkpoints, the stores of the last two, and the folder."""
    folder = tmp_path_factory.mktemp("good")
    store, checkpoints, stores = make_store(), Checkpoints(folder), {}
    for number in (1, 2, 3):
        visit(store, number, [number, number + 1])
        save(checkpoints, store, number)
        stores[number] = make_store()
        Checkpoints(folder).load(state_of(stores[number]))
    return folder, stores


@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_damage_is_named_and_the_newest_good_checkpoint_used(good, data, tmp_path_factory):
    folder, stores = good
    work = tmp_path_factory.mktemp("damaged") / "c"
    shutil.copytree(folder, work)
    files = sorted(path.relative_to(work).as_posix() for path in work.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(files))
    path, kind = work / name, data.draw(st.sampled_from(["flip", "cut", "remove", "longer"]))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, max(len(content) - 1, 0)))
    if kind == "remove":
        path.unlink()
    else:
        if kind == "flip" and content:
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        path.write_bytes({"flip": content, "cut": content[:at], "longer": content + b"x"}[kind])
    hit = [n for n in (1, 2, 3) if name in (f"round-{n:06d}.json", *manifest_files(folder, n))]
    if path.exists() and path.read_bytes() == (folder / name).read_bytes():
        hit = []  # nothing was changed after all
    left = [n for n in (3, 2, 1) if n not in hit]
    said: list[str] = []
    if not left:
        with pytest.raises(PfedafmError, match="--fresh"):
            Checkpoints(work, log=said.append).load(state_of(make_store()))
    else:
        again = make_store()
        saved = Checkpoints(work, log=said.append).load(state_of(again))
        assert saved is not None and saved[2]["round"] == left[0], (name, kind, said)
        for client in range(20):
            chex.assert_trees_all_equal(again.state(client), stores[left[0]].state(client))
    # A manifest that is gone altogether leaves nothing to name.
    skipped = [n for n in hit if not left or n > left[0]]
    unnamed = len(skipped) if kind == "remove" and name.endswith(".json") else 0
    assert len(said) == len(skipped) - unnamed, (said, name)
    assert not said or Path(name).name in said[0], (said, name)
    shutil.rmtree(work.parent)


def manifest_files(folder: Path, number: int) -> list[str]:
    return list(json.loads((folder / f"round-{number:06d}.json").read_text())["manifest"]["files"])


def test_a_manifest_of_another_round_or_format_is_named_and_refused(good, tmp_path):
    manifest = read_manifest(good[0] / "round-000003.json")
    edited = json.loads(signed(manifest))
    edited["manifest"]["score"] = 1.0  # with the digest of before
    (tmp_path / "round-000003.json").write_text(json.dumps(edited))
    with pytest.raises(ValueError, match=r"round-000003\.json is damaged"):
        read_manifest(tmp_path / "round-000003.json")
    for changes, said in (
        ({"round": 2}, "is damaged"),
        ({"format": 1, "round": None}, "has format 1; this version reads format 2"),
    ):
        (tmp_path / "round-000003.json").write_bytes(signed(manifest | changes))
        with pytest.raises(ValueError, match=f"round-000003.json {said}"):
            read_manifest(tmp_path / "round-000003.json")


def test_no_pickles_and_no_noise(good, capfd):
    folder, _ = good
    Checkpoints(folder).load(state_of(make_store()))
    assert capfd.readouterr() == ("", "")
    for path in folder.rglob("*"):
        if path.is_file():
            assert path.suffix not in (".pkl", ".pickle")
            assert not path.read_bytes().startswith(b"\x80")


def test_trees_that_do_not_fit_are_refused():
    assert named(start(0)).keys() == {"net.kernel", "net.none", "count"}
    kept = {name: leaf for name, leaf in named(start(0)).items() if leaf.size}
    chex.assert_trees_all_equal(fitted(start(0), kept), start(0))
    for other in (named(start(1)), {}):
        with pytest.raises(PfedafmError, match="other networks"):
            fitted(start(0), other)
