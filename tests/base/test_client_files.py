"""A client's state is one file: what comes back, and what damage does."""

import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from pfedafm_jax.base.array_files import DamagedFile, read_arrays, write_arrays
from pfedafm_jax.base.client_files import (
    ClientFile,
    ClientFiles,
    read_client,
    visits_in,
    write_client,
)
from pfedafm_jax.base.errors import PfedafmError

ARRAYS = {
    "client.kernel": np.arange(6, dtype=np.float32).reshape(2, 3),
    "client.count": np.int32(7),
    "client.nothing": np.zeros((0, 3), np.float32),
    "client.mask": np.array([True, False]),
    "client.key": np.array([1, 2**31], np.uint32),
    "client.half": np.ones((2, 2), ml_dtypes.bfloat16),
}


def same(one, other):
    return one.keys() == other.keys() and all(
        np.shape(one[name]) == np.shape(other[name])
        and np.asarray(one[name]).dtype == np.asarray(other[name]).dtype
        and np.array_equal(one[name], other[name])
        for name in one
    )


def test_arrays_of_all_types_and_shapes_come_back_and_may_be_changed(tmp_path):
    about = {"kind": "test", "of": [1, None, {"a": 0.1}]}
    write_arrays(tmp_path / "[a] *?" / "x.safetensors", ARRAYS, about)
    arrays, said = read_arrays(tmp_path / "[a] *?" / "x.safetensors")
    assert same(arrays, ARRAYS) and said == about
    arrays["client.kernel"][:] = 0
    write_arrays(tmp_path / "none.safetensors", {}, {})
    assert read_arrays(tmp_path / "none.safetensors") == ({}, {})


def test_other_programs_read_the_arrays(tmp_path):
    plain = {name: array for name, array in ARRAYS.items() if name != "client.half"}
    write_arrays(tmp_path / "x.safetensors", plain, {})
    assert same(load_file(tmp_path / "x.safetensors"), plain)


def test_arrays_that_are_not_contiguous_are_written_as_they_look(tmp_path):
    turned = np.arange(6).reshape(2, 3).T
    write_arrays(tmp_path / "x.safetensors", {"a": turned}, {})
    assert np.array_equal(read_arrays(tmp_path / "x.safetensors")[0]["a"], turned)


def test_a_type_that_could_not_be_read_back_is_refused(tmp_path):
    for array in (np.array(["text"]), np.ones(2, ml_dtypes.float8_e4m3fn), np.array([object()])):
        with pytest.raises(PfedafmError, match="no file of ours can hold"):
            write_arrays(tmp_path / "x.safetensors", {"a": array}, {})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_what_was_there_and_nothing_else(tmp_path, monkeypatch):
    files = ClientFiles(tmp_path, "run")
    files.write(3, 1, {"client.a": np.zeros(2)})

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(3, 1, {"client.a": np.ones(2)})
    assert [path.name for path in (tmp_path / "000").iterdir()] == [files.path(3, 1).name]
    assert not files.read(3, 1).arrays["client.a"].any()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "x.safetensors"
    write_client(path, ClientFile(ARRAYS, "run", 3, 5, {"method": "pfedafm"}))
    return path


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_damage_is_noticed_or_changes_nothing(good, data, tmp_path_factory):
    content = bytearray(good.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "zeros", "gone", "folder"]))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    changed = {"cut": content[:at], "longer": content + b"x", "zeros": bytes(len(content))}
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    if kind == "folder":
        path.mkdir()
    elif kind != "gone":
        path.write_bytes(changed.get(kind, content))
    try:
        state = read_client(path)
    except DamagedFile as error:
        assert str(path) in str(error) and error.path == path
    else:
        assert kind == "flip"  # such as a bit of the header that nobody reads
        assert same(state.arrays, ARRAYS) and state[1:] == ("run", 3, 5, {"method": "pfedafm"})


def test_a_file_of_another_run_client_or_round_is_not_taken(tmp_path):
    files, others = ClientFiles(tmp_path, "mine"), ClientFiles(tmp_path, "yours")
    others.write(1, 5, {})
    with pytest.raises(DamagedFile, match="belongs to run yours, not to mine"):
        files.read(1, 5)
    files.write(1, 5, {})
    for client, t in ((2, 5), (1, 6)):
        shutil.copy(files.path(1, 5), files.path(client, t))
        with pytest.raises(DamagedFile, match="holds client 1 after round 5"):
            files.read(client, t)
    write_arrays(files.path(3, 5), {}, {"kind": "server"})
    with pytest.raises(DamagedFile, match="holds no client's state"):
        files.read(3, 5)


def test_many_are_written_and_read_and_the_folder_is_known(tmp_path):
    files, rounds = ClientFiles(tmp_path, "run"), np.zeros(2500, np.int32)
    clients = [0, 7, 999, 1000, 2499]
    rounds[clients] = [1, 2, 3, 4, 12]
    files.write_all({client: {"client.a": np.full(2, client)} for client in clients}, rounds)
    files.flush(visits_in(rounds))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000", "001", "002"]
    assert sorted(map(tuple, files.visits().tolist())) == visits_in(rounds)
    files.check_all(visits_in(rounds))
    for client, t in visits_in(rounds):
        assert files.read(client, t).arrays["client.a"][0] == client
    assert visits_in(rounds, np.array([5, 7, 1000])) == [(7, 2), (1000, 4)]


def test_a_damaged_one_of_many_is_named(tmp_path):
    files, rounds = ClientFiles(tmp_path, "run"), np.ones(200, np.int32)
    files.write_all({client: {} for client in range(200)}, rounds)
    files.path(120, 1).unlink()
    with pytest.raises(DamagedFile, match=r"client-000120-round-000001.* it is missing"):
        files.check_all(visits_in(rounds))


def test_only_files_of_ours_that_no_table_names_are_removed(tmp_path):
    files = ClientFiles(tmp_path, "run")
    for client, t in ((1, 1), (1, 2), (1, 3), (2, 2), (9, 1)):
        files.write(client, t, {})
    names = {"notes.txt", ".hidden", "client-000001-round-000001.safetensors.bak"}
    for name in names:
        (tmp_path / "000" / name).write_text("mine")
    (tmp_path / "000" / f".{'0' * 32}.tmp").write_text("half")
    files.path(3, 3).mkdir()
    (tmp_path / "other").mkdir()
    shutil.copy(files.path(1, 1), tmp_path / "other")
    files.remove_all_but([np.array([0, 2, 0]), np.array([0, 3, 2])])  # client 9 is in neither
    left = {path.name for path in (tmp_path / "000").iterdir()}
    assert left == names | {files.path(*visit).name for visit in ((1, 2), (1, 3), (2, 2), (3, 3))}
    assert len(list((tmp_path / "other").iterdir())) == 1


def test_a_node_and_an_export_use_the_same_file(tmp_path):
    arrays = {"client.a": np.ones(2), "server.b": np.zeros(3)}
    node = ClientFiles(tmp_path / "state", "federation")
    node.write(4, 9, arrays, card={"method": "fedavg"})
    path: Path = tmp_path / "export" / "client.safetensors"
    write_client(path, node.read(4, 9))
    assert path.read_bytes() != b"" and same(read_client(path).arrays, arrays)
    assert read_client(path).card == {"method": "fedavg"}
    write_client(path, ClientFile(arrays, "run", None, 9, {}))  # a newcomer
    assert read_client(path).client is None
