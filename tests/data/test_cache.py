"""A dataset is fetched once; what is kept is checked at every load and replaced when it is not what it was."""

import json
import os
from typing import Any

import numpy as np
import pytest

from pfedafm_jax.data import load_dataset, tfds
from pfedafm_jax.data import sources as cache
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import default_cache_dir, write_atomically


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


@pytest.mark.parametrize("damage", ["empty", "header", "half", "tail", "bit in an image", "bit in a label", "pickle"])
def test_damaged_cache_is_said_removed_and_fetched_again(fetches, tiny10, tmp_path, damage):
    load(tmp_path)
    path = tmp_path / "cifar10.npz"
    content = bytearray(path.read_bytes())
    if damage == "pickle":
        objects: dict[str, Any] = {field: np.array([{}], object) for field in tiny10.arrays._fields}
        np.savez(path, **objects)
    elif damage.startswith("bit"):
        member = tiny10.arrays.train_images if "image" in damage else tiny10.arrays.test_labels
        content[content.index(member.tobytes()) + 2] ^= 4
        path.write_bytes(content)
    else:
        keep = {"empty": 0, "header": 20, "half": len(content) // 2, "tail": len(content) - 1}[damage]
        path.write_bytes(content[:keep])
    said = []
    again = load(tmp_path, said)
    assert fetches == ["cifar10"] * 2
    (line,) = [line for line in said if "damaged" in line]
    assert str(path) in line and "removing it and fetching again" in line and "\n" not in line
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    np.testing.assert_array_equal(again.images[:20], tiny10.arrays.train_images)
    assert load(tmp_path).source == "TFDS (cached)"
    assert len(fetches) == 2


def test_other_but_well_formed_data_in_the_cache_is_not_used(fetches, tiny10, tmp_path):
    swapped = tiny10.arrays._replace(train_images=tiny10.arrays.train_images[::-1])
    cache.store(tiny10.cifar, swapped, "elsewhere", tmp_path, print)
    assert load(tmp_path).source == "TFDS"


@pytest.mark.parametrize("note", [None, "{", "[]", "{}"])
def test_lost_note_does_not_lose_the_data(fetches, tmp_path, note):
    load(tmp_path)
    path = tmp_path / "cifar10.json"
    assert json.loads(path.read_text())["source"] == "TFDS"
    path.unlink() if note is None else path.write_text(note)
    assert load(tmp_path).source == "unknown origin (cached)"
    assert len(fetches) == 1


def test_unwritable_cache_costs_one_line_not_the_run(fetches, tiny10, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")  # works for root too, unlike permissions
    said = []
    dataset = load(blocked / "cache", said)
    assert len(dataset.images) == 24
    (line,) = [line for line in said if line.startswith("warning")]
    assert line.startswith("warning: cifar10 is not cached")


def test_data_dir_fills_an_empty_cache_and_leaves_a_filled_one(fetches, tiny10, tmp_path):
    tiny10.write_folder(tmp_path / "data", "python")
    load_dataset("cifar10", tmp_path / "data", cache_dir=tmp_path / "cache")
    assert "official folder" in load(tmp_path / "cache").source and fetches == []
    before = os.stat(tmp_path / "cache" / "cifar10.npz").st_mtime_ns
    assert not load_dataset("cifar10", tmp_path / "data", cache_dir=tmp_path / "cache").source.endswith("(cached)")
    assert os.stat(tmp_path / "cache" / "cifar10.npz").st_mtime_ns == before


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
