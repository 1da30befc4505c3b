"""Data that are not 8-bit images: features, sensor windows, token ids, 16-bit images."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from PIL import Image
from small import CLASSES, WIDTH, assert_equals_plain_loop, engine_of, small_config, small_data

from pfedafm_jax import Config, PfedafmError, dataset_from_arrays, load_dataset, run
from pfedafm_jax.inference.export import PROGRAM, export_client, load_client
from pfedafm_jax.inference.opened import load_run
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models.architecture import describe, register_extractor

LABELS = np.array([0, 1, 0, 1])


class Words(nn.Module):
    """The mean of what 60 token ids stand for."""

    features: int = WIDTH

    @nn.compact
    def __call__(self, ids):
        return nn.relu(nn.Dense(self.features)(nn.Embed(60, 5)(ids).mean(axis=1)))


register_extractor("words", Words())


def of(train, test=None, **more):
    train = np.asarray(train)
    test = train[:0] if test is None else np.asarray(test)
    labels = np.resize(LABELS, len(train)), np.resize(LABELS, len(test))
    return dataset_from_arrays("mine", train, labels[0], test, labels[1], **more)


def test_features_are_normalised_by_the_training_rows_and_constant_ones_are_left():
    # Means 2, 1e9 + 1 and 7 of the training rows; deviations 2, 1 and none.
    train = np.array([[0, 1e9, 7], [4, 1e9 + 2, 7]] * 2)
    found = of(train, [[6, 1e9 + 4, 8]])
    assert found.dtype == "float32" and found.image_shape == (3,) and found.noun == "samples"
    assert found.mean == (2.0, 1e9 + 1, 7.0) and found.std == (2.0, 1.0, 1.0)
    rows = [[-1, -1, 0], [1, 1, 0]] * 2 + [[2, 3, 1]]
    np.testing.assert_array_equal(found.images, np.float32(rows))
    given = of(train, mean=np.zeros(3), std=np.ones(3))
    np.testing.assert_array_equal(given.images, np.float32(train))
    assert len({found.digest, given.digest, of(train).digest}) == 3
    # Windows of two sensors: each sensor over all times.
    windows = np.array([[[1, 0], [3, 0]], [[1, 5], [3, 5]]] * 2, np.float16)
    assert of(windows).mean == (2.0, 2.5) and of(windows).std == (1.0, 2.5)


def test_what_arrays_are_taken_for():
    for values, dtype, shape in [
        (np.zeros((4, 5, 5), np.uint8), "uint8", (5, 5, 1)),
        (np.zeros((4, 2, 5, 5, 3), np.uint8), "uint8", (2, 5, 5, 3)),
        (np.zeros((4, 5, 5), np.uint16), "float32", (5, 5, 1)),
        (np.zeros((4, 5), np.uint16), "int32", (5,)),
        (np.zeros((4, 5), np.uint8), "int32", (5,)),
        (np.zeros((4, 2, 3), np.int64), "int32", (2, 3)),
        (np.zeros((4, 6), bool), "float32", (6,)),
    ]:
        found = of(values)
        assert (found.dtype, found.image_shape) == (dtype, shape)
    tokens = of(np.array([[3, 1], [2**31 - 1, 0]] * 2))
    assert tokens.images.tolist() == [[3, 1], [2**31 - 1, 0]] * 2 and tokens.mean == ()
    deep = np.zeros((4, 2, 2), np.uint16)
    deep[:2] = 65535
    assert of(deep).mean == (32767.5,) and of(deep).images[0, 0, 0, 0] == 1.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            [[0.0, 1.0]] * 600 + [[0.0, np.nan]],
            r"train_images\[600, 1\] is nan; accepted: finite numbers",
        ),
        ([[[0.0], [np.inf]]], r"train_images\[0, 1, 0\] is inf"),
        ([[1, 2], [-3, 4]], r"train_images\[1, 0\] is -3; accepted: token ids .*as floats"),
        ([[2**31]], r"\[0, 0\] is 2147483648; accepted: token ids"),
        ([[1e300], [0.0]], r"\[0, 0\] is 1e\+300; accepted: finite numbers up to 1e\+30"),
        ([1.0, 2.0], r"is float64 \(2,\); accepted is uint8 pixels .*, floats"),
        ([["a"], ["b"]], "is <U1"),
        (np.zeros((2, 0)), r"float64 \(2, 0\)"),
        (np.zeros((2, 3), complex), "complex128"),
    ],
)
def test_arrays_that_cannot_be_used_are_named_with_their_row(values, said):
    with pytest.raises(PfedafmError, match=said):
        of(values)


def test_training_and_test_rows_are_of_one_kind():
    with pytest.raises(PfedafmError, match=r"train_images are int32 .* both must be the same"):
        of(np.zeros((4, 2), int), np.zeros((4, 2)))
    with pytest.raises(PfedafmError, match=r"one number per channel \(0\)"):
        of(np.zeros((4, 2), int), mean=(0.0, 0.0))


def test_settings_and_networks_for_images_are_refused_where_there_are_none():
    table = of(np.eye(4))
    for name in ("flip", "erase", "crop"):
        with pytest.raises(PfedafmError, match=rf"{name} = True .* no images but float32 \[4\]"):
            check_names(Config(**{name: True}), table)
    with pytest.raises(PfedafmError, match=r"'imagenet' .* dataset, for float32"):
        check_names(Config(normalisation="imagenet"), of(np.zeros((4, 8, 8, 3))))
    assert check_names(Config(flip=True), of(np.zeros((4, 8, 8, 3))))
    for shape, dtype in (((4,), "float32"), ((28, 28), "float32"), ((16, 16, 3), "int32")):
        with pytest.raises(PfedafmError, match=f"'cnn1' needs images .* these data are {dtype}"):
            describe("cnn1", 2, shape, dtype=dtype)
    assert describe("cnn1", 2, (28, 28, 1), dtype="float32").dtype == "float32"
    with pytest.raises(
        PfedafmError, match=r"'resnet_small' does not accept float32 data of shape \(4,\)"
    ):
        describe("resnet_small", 2, (4,), dtype="float32")


def test_grey_pictures_of_16_bits_are_read_whole(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 65536, (4, 6, 8), np.uint16)
    for number, one in enumerate(pixels):
        (tmp_path / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(one).save(
            tmp_path / "ab"[number % 2] / f"{number}.{['png', 'tif'][number > 1]}"
        )
    found = load_dataset(f"folder:{tmp_path}")
    ordered = pixels[[0, 2, 1, 3], ..., None].astype(float)
    assert found.dtype == "float32" and found.image_shape == (6, 8, 1)
    np.testing.assert_allclose(found.images * found.std[0] + found.mean[0], ordered, atol=0.01)
    assert load_dataset(f"folder:{tmp_path}", image_size=4).image_shape == (4, 4, 1)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("fedavg", "int32"),
        *(pytest.param(*both, marks=pytest.mark.slow)
          for both in (("pfedafm", "int32"), ("pfedafm", "float32"), ("fedrep", "float32"))),
    ],
)  # fmt: skip
def test_rounds_on_features_and_on_token_ids_equal_the_plain_loop(method, what):
    images, partition = small_data()
    rows = images.images[:120].reshape(120, 9) // 5
    values = rows.astype(np.int64) if what == "int32" else rows / 7
    dataset = dataset_from_arrays(
        "small", values, images.labels[:120], values[:1], images.labels[:1], num_classes=CLASSES
    )
    assert dataset.dtype == what
    networks = ("words",) if what == "int32" else ("dense_a", "dense_b")
    config = small_config(method, architectures=networks, shared_extractor=networks[-1])
    assert_equals_plain_loop(engine_of(config, dataset, partition))


@pytest.mark.slow
def test_a_client_of_tabular_data_predicts_is_exported_and_is_joined(tmp_path):
    random = np.random.default_rng(0)
    labels = np.arange(120) % 3
    values = 100 + random.normal(size=(120, 4)) + 4 * np.eye(4)[labels]
    dataset = dataset_from_arrays("table", values, labels, values[:0], labels[:0])
    networks = {"architectures": ("dense_b",), "shared_extractor": "dense_b", "feature_size": WIDTH}
    config = Config(dataset="table", method="fedavg", num_clients=4, participation=1.0, rounds=4,
                    partition="iid", learning_rate=0.1, devices=1, **networks)  # fmt: skip
    experiment = run(config, dataset, progress=False, run_dir=tmp_path / "run")
    assert experiment.summary().best_mean_accuracy > 0.8
    trained = load_run(tmp_path / "run")
    client, rows = trained.client(1), experiment.partition.test[1]
    scores = next(iter(client.predict(values[rows]).values()))
    right = np.mean(scores.argmax(axis=1) == labels[rows])
    assert right == pytest.approx(experiment.per_client()["accuracy"][1])
    export_client(client, tmp_path / "out")
    again = next(iter(load_client(tmp_path / "out").predict(values[rows]).values()))
    np.testing.assert_array_equal(again, scores)
    program = jax.export.deserialize(bytearray((tmp_path / "out" / PROGRAM).read_bytes()))
    alone = next(iter(program.call(values[rows].astype(np.float32)).values()))
    np.testing.assert_allclose(alone, scores, atol=1e-3)
    assert "float32 [num, 4]; normalised inside" in (tmp_path / "out" / "README.md").read_text()
    assert trained.join(values[:40], labels[:40], visits=1).history[-1]["shared"] > 0.7
    with pytest.raises(
        PfedafmError, match=r"images: int64 \[120, 4\]; accepted: float32 \[num, 4\]"
    ):
        client.predict(values.astype(int))
    with pytest.raises(PfedafmError, match=r"images\[1, 2\] is nan"):
        client.predict(np.where(np.arange(8).reshape(2, 4) == 6, np.nan, 1.0))
    Image.new("L", (4, 4)).save(tmp_path / "x.png")
    with pytest.raises(PfedafmError, match=r"image files.* an array float32 \[num, 4\]"):
        client.predict(tmp_path / "x.png")
