"""Data of one's own: arrays, a folder of images, a file, anything that TFDS has prepared, and what
is wrong with it."""

import io
import json
import os
import struct
import sys
import zlib
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import dataset_from_arrays, load_dataset
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.runs.experiment import Experiment


def digits(num: int = 60, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Grey images of 28x28 pixels and their labels."""
    arrays = make_synthetic(classes, num, seed=1, image_size=28)
    images, labels = (np.concatenate([arrays[part], arrays[part + 2]]) for part in (0, 1))
    return images[..., 0], labels


def picture(path: Path, size: tuple[int, int] = (8, 6), grey: bool = False, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = size[::-1] if grey else (*size[::-1], 3)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)).save(path)
    return path


def test_a_folder_with_one_subfolder_for_each_class(tmp_path):
    for label, name in enumerate(["dog", "cat", "eel"]):
        for number in range(2):
            picture(tmp_path / name / f"{number}.png", seed=10 * label + number)
    (tmp_path / "cat" / "notes.txt").write_text("not an image")
    found = load_dataset(f"folder:{tmp_path}")
    assert found.images.shape == (6, 6, 8, 3) and found.num_train == 6 and found.num_classes == 3
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]  # cat, dog, eel
    dog = np.asarray(Image.open(tmp_path / "dog" / "0.png").convert("RGB"))
    np.testing.assert_array_equal(found.images[2], dog)
    before = found.digest
    picture(tmp_path / "dog" / "0.png", seed=99)
    assert load_dataset(f"folder:{tmp_path}").digest != before
    assert load_dataset("folder:.", tmp_path).image_shape == (6, 8, 3)


def test_a_folder_with_train_and_test(tmp_path):
    for part, num in (("train", 2), ("test", 1), ("extra", 1)):
        for name in ("a", "b"):
            for number in range(num):
                picture(tmp_path / part / name / f"{number}.bmp", grey=True)
    found = load_dataset(f"folder:{tmp_path}")
    assert found.images.shape == (6, 6, 8, 1) and found.num_train == 4
    assert found.labels.tolist() == [0, 0, 1, 1, 0, 1]
    assert "4 training and 2 test images of 2 classes (extra not used)" in found.source


def test_pictures_of_different_sizes_are_resized_if_asked(tmp_path):
    picture(tmp_path / "a" / "0.png"), picture(tmp_path / "b" / "0.png", (5, 5), grey=True)
    with pytest.raises(PfedafmError, match=r"0\.png is 8x6, .*0\.png is 5x5; .*--image-size"):
        load_dataset(f"folder:{tmp_path}")
    assert load_dataset(f"folder:{tmp_path}", image_size=4).images.shape == (2, 4, 4, 3)


def spoil(path: Path, how: str) -> None:
    for name in ("a", "b"):
        picture(path / name / "0.png")
    if how == "empty":
        for file in path.rglob("*.png"):
            file.unlink()
    elif how == "damaged":
        (path / "b" / "0.png").write_bytes((path / "b" / "0.png").read_bytes()[:60])
    elif how == "one":
        (path / "b").rename(path / ".b")
    elif how == "deep":
        Image.fromarray(np.zeros((6, 8), np.uint16)).save(path / "b" / "1.png")
    elif how == "deep colours":  # 16 bits of red, green and blue, of which Pillow shows the upper 8
        (path / "b" / "1.ppm").write_bytes(b"P6 8 6 65535 " + bytes(2 * 3 * 48))
    elif how == "program":  # PostScript, for which Pillow would start another program
        (path / "b" / "1.png").write_bytes(
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 6\n%%EndComments\n"
        )
    elif how == "half":
        (path / "a").rename(path / "train")
    else:
        (path / "a" / "0.png").rename(path / "0.png")
        for name in ("a", "b"):
            (path / name).rename(path / f".{name}")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("empty", "class a has no images"),
        ("damaged", r"b.0\.png is not a readable image"),
        ("deep", r"a.0\.png is 8x6, .*b.1\.png is 8x6 with more than 8 bits"),
        ("deep colours", r"b.1\.ppm has colours of more than 8 bits"),
        ("program", r"b.1\.png is not a readable image"),
        ("half", "train/ and no test/"),
        ("flat", "has no subfolders"),
    ],
)
def test_folders_that_cannot_be_used_are_named(how, said, tmp_path):
    spoil(tmp_path / "data", how)
    with pytest.raises(PfedafmError, match=said):
        load_dataset(f"folder:{tmp_path / 'data'}")


def test_a_run_needs_two_classes_or_more(tmp_path):
    spoil(tmp_path / "data", "one")
    config = Config(dataset=f"folder:{tmp_path / 'data'}")
    with pytest.raises(PfedafmError, match=r"dataset = 'folder:.*one class only"):
        check_names(config, load_dataset(config.dataset))
    dataset = dataset_from_arrays("one", *(np.zeros((4, 8, 8), np.uint8), np.zeros(4, int)) * 2)
    with pytest.raises(PfedafmError, match="one class only"):
        Experiment(Config(num_clients=2, participation=1.0), dataset)


def test_arrays_in_a_file_under_three_sets_of_names(tmp_path):
    images, labels = digits()
    path = tmp_path / "digits.npz"
    np.savez(path, images=images, labels=labels)
    found = load_dataset(f"npz:{path}")
    assert found.images.shape == (60, 28, 28, 1) and found.num_train == 60
    assert found.num_classes == 3
    parts = images[:50], labels[:50], images[50:], labels[50:]
    for names in (
        "train_images train_labels test_images test_labels",
        "x_train y_train x_test y_test",
    ):
        np.savez(path, **dict(zip(names.split(), parts, strict=True)))
        other = load_dataset("npz:digits.npz", tmp_path)
        np.testing.assert_array_equal(other.images, found.images)
        assert other.num_train == 50 and other.digest != found.digest


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"labels": np.arange(60) % 3 + 1}, "no image has label 0; accepted: 0 to 2"),
        ({"labels": np.arange(59) % 3}, "60 integers, one per image"),
        ({"images": np.zeros((60, 4), "U1")}, "train_images is <U1"),
        ({"images": np.array(3, np.uint8)}, r"train_images is uint8 \(1,\)"),
        ({"test_images": np.zeros((1, 4, 4), np.uint8)}, "holds images, labels, test_images;"),
        (
            {"test_images": np.zeros((1, 5, 4), np.uint8), "test_labels": np.zeros(1, int)},
            "both must be the same",
        ),
    ],
)
def test_arrays_that_cannot_be_used_are_named(content, said, tmp_path):
    good = {"images": np.zeros((60, 4, 4), np.uint8), "labels": np.arange(60) % 3}
    np.savez(tmp_path / "x.npz", **{**good, **content})
    with pytest.raises(PfedafmError, match=said):
        load_dataset(f"npz:{tmp_path / 'x.npz'}")


UNREADABLE = ["npz:{}/absent.npz", "npz:{}", "npz:{}/text.npz", "npz:{}/pipe", "npz:/dev/zero", "npz:a\0b",
              "folder:{}/absent", "folder:a\0b"]  # fmt: skip


@pytest.mark.parametrize("name", UNREADABLE)
def test_files_that_cannot_be_read_are_named(name, tmp_path):
    (tmp_path / "text.npz").write_text("hello")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(PfedafmError, match="cannot be read"):
        load_dataset(name.format(tmp_path))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("height", [90_000, 180_000])
def test_pictures_that_would_take_all_memory_are_refused(height, tmp_path, recwarn):
    for name in ("a/1.png", "b/1.png"):
        (tmp_path / name).parent.mkdir()
        Image.new("L", (1, 1)).save(tmp_path / name)
    pixels = bytearray((tmp_path / "a/1.png").read_bytes())
    pixels[16:24] = struct.pack(">II", 1000, height)
    pixels[29:33] = struct.pack(">I", zlib.crc32(pixels[12:29]))
    (tmp_path / "a/1.png").write_bytes(pixels)
    with pytest.raises(PfedafmError, match=f"a/1.png is not .*{height}000 pixels.* exceeds limit"):
        load_dataset(f"folder:{tmp_path}")
    assert not recwarn


def prepared_tfds(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    import tensorflow_datasets as tfds

    class Shades(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # pyright: ignore
        name, VERSION = "shades", tfds.core.Version("1.0.0")

        def _info(self):
            image = tfds.features.Image(shape=(28, 28, 1))
            label = tfds.features.ClassLabel(num_classes=3)
            features = tfds.features.FeaturesDict({"image": image, "label": label})
            names = ("image", "label")
            return tfds.core.DatasetInfo(builder=self, features=features, supervised_keys=names)

        def _split_generators(self, dl_manager):
            train, test = self._generate_examples(0, 50), self._generate_examples(50, 60)
            return {"train": train, "test": test}

        def _generate_examples(self, first, last):
            for number in range(first, last):
                image = Image.fromarray(images[number])
                yield number, {"image": image, "label": int(labels[number])}

    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        Shades(data_dir=str(folder), file_format="array_record").download_and_prepare()


def test_any_dataset_that_tfds_has_prepared(tmp_path):
    def by_content(images, labels):
        return {one.tobytes(): int(label) for one, label in zip(images, labels, strict=True)}

    images, labels = digits()
    prepared_tfds(tmp_path, images, labels)
    for given in (tmp_path, tmp_path / "shades" / "1.0.0"):
        found = load_dataset("tfds:shades", given)
        assert found.image_shape == (28, 28, 1) and found.num_train == 50 and found.num_classes == 3
        assert by_content(found.images[..., 0], found.labels) == by_content(images, labels)
    assert load_dataset("tfds:shades", tmp_path, image_size=8).image_shape == (8, 8, 1)
    with pytest.raises(PfedafmError, match=r"1\.0\.0 has the dataset shades, not mnist"):
        load_dataset("tfds:mnist", tmp_path / "shades" / "1.0.0")
    with pytest.raises(PfedafmError, match=r"not prepared in .*tfds.builder\('absent'.*--data-dir"):
        load_dataset("tfds:absent", tmp_path, offline=True)
    with pytest.raises(PfedafmError, match="TFDS has no dataset 'absent'"):
        load_dataset("tfds:absent", tmp_path, log=lambda line: None)
    for name in ("features.json", "shades-test.array_record-00000-of-00001"):
        pipe = tmp_path / "shades" / "1.0.0" / name
        pipe.unlink()
        os.mkfifo(pipe)  # which TFDS would wait for
        with pytest.raises(PfedafmError, match=f"{name} cannot be read .*not a regular file"):
            load_dataset("tfds:shades", tmp_path)
        pipe.unlink()


def test_damaged_array_records_are_named(tmp_path):
    images, labels = digits()
    prepared_tfds(tmp_path, images, labels)
    path = next(tmp_path.glob("shades/1.0.0/*-train.array_record*"))
    content = path.read_bytes()
    for damaged in (b"", content[:-5], content[: len(content) // 2]):
        path.write_bytes(damaged)
        with pytest.raises(PfedafmError, match="tfds:shades in "):
            load_dataset("tfds:shades", tmp_path)


SPY = "open('the-spy-was-here', 'w').close()"
EVIL = "evil_features.Spy"
ORDINARY = "tensorflow_datasets.core.features.features_dict.FeaturesDict"


@pytest.mark.parametrize(
    "features",
    [
        {"pythonClassName": EVIL},
        {"python_class_name": EVIL},
        {"type": EVIL, "content": {}},
        {"pythonClassName": ORDINARY, "featuresDict": {"features": {"x": {"pythonClassName": EVIL}}}},
        {"pythonClassName": ORDINARY, "jsonFeature": {"json": json.dumps({"x": {"type": EVIL, "content": {}}})}},
        {"type": ORDINARY, "content": {"x": {"type": EVIL, "content": {}}}},
        {"type": ORDINARY, "proto_cls": "tensorflow_datasets.FeaturesDict",
         "content": json.dumps({"features": {"x": {"pythonClassName": EVIL}}})},
    ],
    ids=["camel case", "snake case", "older", "nested", "as text", "older, nested", "older, as text"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["tfds:shades", "tfds:shades:1.0.0", "cifar10"])
def test_a_prepared_folder_cannot_name_code_that_tfds_would_run(
    name, features, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "evil_features", raising=False)
    (tmp_path / "evil_features.py").write_text(SPY)
    dataset, version = ("cifar10", "3.0.2") if name == "cifar10" else ("shades", "1.0.0")
    folder = tmp_path / "tfds" / dataset / version
    folder.mkdir(parents=True)
    about = {"name": dataset, "version": version, "fileFormat": "array_record"}
    (folder / "dataset_info.json").write_text(json.dumps(about))
    (folder / "features.json").write_text(json.dumps(features))
    with pytest.raises(PfedafmError) as caught:
        load_dataset(name, tmp_path / "tfds", log=lambda line: None)
    assert not (tmp_path / "the-spy-was-here").exists()
    if ":1.0.0" in name:  # no such folder, and nothing of TFDS's own
        assert "TFDS has no dataset" in str(caught.value)
    else:
        accepted = "accepted: TFDS's own features (tensorflow_datasets.core.features."
        for said in (str(folder / "features.json"), f"names the class {EVIL}", accepted):
            assert said in str(caught.value)


def test_own_arrays_grey_of_any_size():
    train = np.zeros((4, 5, 7), np.uint8)
    train[:2] = 255
    dataset = dataset_from_arrays("mine", train, np.array([0, 1, 2, 0]), train[:1], np.array([1]))
    assert dataset.images.shape == (5, 5, 7, 1) and dataset.num_train == 4
    assert dataset.num_classes == 3
    assert dataset.mean == (0.5,) and dataset.std == (0.5,)
    assert not dataset.images.flags.writeable
    other = dataset_from_arrays("mine", train, np.array([0, 1, 2, 1]), train[:1], np.array([1]))
    assert dataset.digest != other.digest and len(dataset.digest) == 64
    labels = np.zeros(0, int)
    names, values = np.unique([30, 20, 10]), np.full(1, 0.25, np.float32)
    own = {"class_names": names, "mean": values, "std": values}
    dataset = dataset_from_arrays("mine", train, np.array([0, 1, 2, 0]), train[:0], labels, **own)
    found = (dataset.class_names, dataset.mean, dataset.std)
    assert json.loads(json.dumps(found)) == [["10", "20", "30"], [0.25], [0.25]]
    # A channel that is constant has a usable deviation.
    images = np.full((3, 4, 4, 2), 51, np.uint8)
    dataset = dataset_from_arrays("flat", images, np.zeros(3, int), images[:0], np.zeros(0, int))
    np.testing.assert_allclose(dataset.mean, (0.2, 0.2))
    assert dataset.std == (1 / 255, 1 / 255)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train_images": np.zeros((2, 4, 4, 3), np.float32)}, "float32 .* both must be the same"),
        ({"train_images": np.zeros((2, 5, 4, 3), np.uint8)}, "both must be the same"),
        ({"test_labels": np.zeros(3, int)}, "2 integers, one per image"),
        ({"test_labels": np.array([0.0, 1.0])}, "2 integers, one per image"),
        ({"train_labels": np.array([-1, 0])}, "first class must be 0"),
        ({"num_classes": 2, "train_labels": np.array([0, 2])}, "label 2 needs num_classes above 2"),
        ({"mean": (0.5,)}, "one number per channel"),
        ({"std": (0.5, 0.0, 0.5)}, "std above 0"),
        ({"mean": np.full(3, np.nan)}, "finite"),
    ],
)
def test_own_arrays_that_do_not_fit_are_refused(change, message):
    images, labels = np.zeros((2, 4, 4, 3), np.uint8), np.array([0, 1])
    good = {"train_images": images, "train_labels": labels}
    good |= {"test_images": images, "test_labels": labels}
    with pytest.raises(PfedafmError, match=message):
        dataset_from_arrays("mine", **{**good, **change})
