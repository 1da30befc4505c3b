"""The synthetic dataset: quick, repeatable, balanced, and neither trivial nor hopeless to learn."""

import numpy as np
import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.data import load_dataset
from pfedafm_jax.data.sources.synthetic import make_synthetic


def test_shapes_and_five_sixths_to_one_sixth():
    dataset = load_dataset("synthetic")
    assert dataset.images.shape == (6000, 32, 32, 3) and dataset.images.dtype == np.uint8
    assert dataset.num_train == 5000 and dataset.num_classes == 10
    assert dataset.labels.dtype == np.int32
    assert "synthetic" in dataset.source and "seed 0" in dataset.source
    pixels = dataset.images[:5000] / 255
    np.testing.assert_allclose(dataset.mean, pixels.mean(axis=(0, 1, 2)), atol=1e-9)
    np.testing.assert_allclose(dataset.std, pixels.std(axis=(0, 1, 2)), atol=1e-9)


@pytest.mark.parametrize(
    ("num_classes", "num_samples"), [(2, 4), (3, 100), (100, 1200), (137, 301)]
)
def test_any_number_of_classes_as_equal_as_can_be(num_classes, num_samples):
    arrays = make_synthetic(num_classes, num_samples)
    for labels in (arrays.train_labels, arrays.test_labels):
        counts = np.bincount(labels, minlength=num_classes)
        assert len(counts) == num_classes and counts.max() - counts.min() <= 1
    assert len(arrays.train_images) + len(arrays.test_images) == num_samples


def test_same_seed_same_images_another_seed_others():
    first, same, other = (
        load_dataset("synthetic", num_samples=60, seed=seed) for seed in (5, 5, 6)
    )
    assert first.digest == same.digest != other.digest
    assert make_synthetic(2, 12, image_size=9).train_images.shape == (10, 9, 9, 3)
    # All integer arithmetic on a fixed random stream: this sum is the same on every machine.
    digest = load_dataset("synthetic", num_classes=3, num_samples=30, seed=1).digest
    assert digest.startswith("0ce048d5f6a12171")


def test_nearest_mean_is_above_chance_and_far_from_perfect():
    arrays = make_synthetic()
    train = arrays.train_images.reshape(5000, -1).astype(np.float32)
    test = arrays.test_images.reshape(1000, -1).astype(np.float32)
    means = np.stack([train[arrays.train_labels == cls].mean(axis=0) for cls in range(10)])
    scores = test @ means.T - (means**2).sum(axis=1) / 2
    accuracy = (scores.argmax(axis=1) == arrays.test_labels).mean()
    assert 0.2 < accuracy < 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 1}, "num_classes = 1"),
        ({"num_samples": 19}, "num_samples = 19 cannot be used; accepted: 20"),
        ({"seed": -1}, "seed = -1"),
        ({"image_size": 3}, "image_size = 3"),
    ],
)
def test_impossible_settings_are_refused_by_name(options, message):
    with pytest.raises(PfedafmError, match=message):
        make_synthetic(**options)
