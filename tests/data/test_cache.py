"""Data are fetched once: the cache, what damages it, and files that are whole or not there."""

import json
import os
from typing import Any

import numpy as np
import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.files import default_cache_dir, write_atomically
from pfedafm_jax.data import load_dataset
from pfedafm_jax.data.sources import obtain, tfds


@pytest.fixture
def fetches(tiny10, monkeypatch):
    """Stands in for the network and counts how often it is asked."""
    asked = []

    def download(cifar, tfds_dir):
        asked.append(cifar.name)
        return tiny10.arrays

    monkeypatch.setattr(tfds, "download_cifar", download)
    return asked


def load(folder, said=None):
    return load_dataset("cifar10", cache_dir=folder, log=(said if said is not None else []).append)


def test_second_load_is_from_the_cache_and_says_where_it_came_from(fetches, tmp_path):
    first, second = load(tmp_path / "new" / "cache"), load(tmp_path / "new" / "cache")
    assert fetches == ["cifar10"]
    assert (first.source, second.source) == ("TFDS", "TFDS (cached)")
    assert first.digest == second.digest
    np.testing.assert_array_equal(first.images, second.images)
    assert sorted(os.listdir(tmp_path / "new" / "cache")) == ["cifar10.json", "cifar10.npz"]


def test_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "pfedafm_jax"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert default_cache_dir() == tmp_path / "home" / ".cache" / "pfedafm_jax"


@pytest.mark.parametrize("damage", [0, 20, -1, "bit in an image", "bit in a label", "pickle", "other data"])  # fmt: skip
def test_damaged_cache_is_said_removed_and_fetched_again(fetches, tiny10, tmp_path, damage):
    load(tmp_path)
    path, arrays = tmp_path / "cifar10.npz", tiny10.arrays
    content = bytearray(path.read_bytes())
    if damage == "pickle":
        objects: dict[str, Any] = {field: np.array([{}], object) for field in arrays._fields}
        np.savez(path, **objects)
    elif damage == "other data":  # well formed
        other = arrays._replace(train_images=arrays.train_images[::-1])
        obtain.store(tiny10.cifar, other, "here", tmp_path, print)
    elif isinstance(damage, str):
        member = arrays.train_images if "image" in damage else arrays.test_labels
        content[content.index(member.tobytes()) + 2] ^= 4
        path.write_bytes(content)
    else:
        path.write_bytes(content[:damage])
    said = []
    again = load(tmp_path, said)
    (line,) = [line for line in said if "damaged" in line]
    assert str(path) in line and "removing it and fetching again" in line and "\n" not in line
    np.testing.assert_array_equal(again.images[:20], arrays.train_images)
    assert load(tmp_path).source == "TFDS (cached)" and fetches == ["cifar10"] * 2
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


@pytest.mark.parametrize("note", [None, "{", "[]", "{}"])
def test_lost_note_does_not_lose_the_data(fetches, tmp_path, note):
    load(tmp_path)
    path = tmp_path / "cifar10.json"
    assert json.loads(path.read_text())["source"] == "TFDS"
    path.unlink() if note is None else path.write_text(note)
    assert load(tmp_path).source == "unknown origin (cached)" and len(fetches) == 1


def test_unwritable_cache_costs_one_line_not_the_run(fetches, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")  # root is stopped by it too
    said = []
    assert len(load(blocked / "cache", said).images) == 24
    (line,) = [line for line in said if line.startswith("warning")]
    assert line.startswith("warning: cifar10 is not cached")


def test_data_dir_fills_an_empty_cache_and_leaves_a_filled_one(fetches, tiny10, tmp_path):
    tiny10.write_folder(tmp_path / "data")
    cache = tmp_path / "cache"
    load_dataset("cifar10", tmp_path / "data", cache_dir=cache)
    assert "official folder" in load(cache).source and fetches == []
    before = os.stat(cache / "cifar10.npz").st_mtime_ns
    again = load_dataset("cifar10", tmp_path / "data", cache_dir=cache)
    assert not again.source.endswith("(cached)")
    assert os.stat(cache / "cifar10.npz").st_mtime_ns == before


def test_wrong_data_is_never_cached(fetches, tiny10, tmp_path):
    tiny10.arrays.train_labels[0] ^= 1
    with pytest.raises(PfedafmError, match="train labels are not the official ones"):
        load(tmp_path)
    assert os.listdir(tmp_path) == []


def test_failed_write_leaves_the_old_file_and_no_litter(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomically(path, fail)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
