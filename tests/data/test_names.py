"""Names of classes, and clients that are kept out of training."""

import numpy as np
import pytest
from PIL import Image

from pfedafm_jax import Config, PfedafmError, dataset_from_arrays, load_dataset, split
from pfedafm_jax.data.load import held_out
from pfedafm_jax.data.sources.cifar import CIFARS


def test_classes_have_the_names_of_their_folders_or_of_the_caller_or_their_numbers(tmp_path):
    for name in ("cat", "ant"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    assert load_dataset(f"folder:{tmp_path}").class_names == ("ant", "cat")
    images, labels = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
    given = dataset_from_arrays("mine", images, labels, images, labels, class_names=["a", "b"])
    assert given.class_names == ("a", "b")
    assert dataset_from_arrays("mine", images, labels, images, labels).class_names == ("0", "1")
    with pytest.raises(PfedafmError, match="3 class_names for 2 classes"):
        dataset_from_arrays("mine", images, labels, images, labels, class_names="abc")
    for cifar in CIFARS.values():
        assert len(set(cifar.class_names)) == cifar.num_classes == len(cifar.class_names)


def test_held_out_clients_get_shares_that_nobody_else_has():
    config = Config(dataset="synthetic", num_clients=9, held_out_clients=3)
    dataset = load_dataset("synthetic")
    inside, outside = split(config, dataset), held_out(config, dataset)
    assert (inside.num_clients, outside.num_clients) == (9, 3)
    rows = [np.concatenate((*one.train, *one.test)) for one in (inside, outside)]
    assert not set(rows[0]) & set(rows[1]) and len(np.concatenate(rows)) == 6000
    with pytest.raises(PfedafmError, match="; 5000 clients and held_out_clients = 2000"):
        split(Config(dataset="synthetic", num_clients=5000, held_out_clients=2000), dataset)
