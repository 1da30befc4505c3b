"""Local training of one client: batches, SGD, the last partial batch, clients in lockstep."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedafm_jax.config.config import Config
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.training.accuracy import accuracy
from pfedafm_jax.training.batches import ClientData, LocalTraining, epoch_order, rest_batch_size
from pfedafm_jax.training.losses import cross_entropy, mean_over
from pfedafm_jax.training.sgd import Partitioned, sgd
from pfedafm_jax.training.train import extract_all, train

SIZES = {"batch_size": 4, "rest_size": 4, "local_epochs": 2, "mean": (0.5,), "std": (0.25,)}
RATES = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip_norm": 50.0}
TRAINING = LocalTraining(**SIZES, **RATES)


def make_data(num: int, longest: int | None = None, num_test: int = 3) -> ClientData:
    """A client with `num` of 40 one-pixel images, its rows padded to `longest`."""
    rng = np.random.default_rng(0)
    longest = longest or num
    rows = rng.permutation(40).astype(np.int32)
    return ClientData(
        jnp.asarray(rng.integers(256, size=(40, 1, 1, 1), dtype=np.uint8)),
        jnp.asarray(rng.integers(3, size=40, dtype=np.int32)),
        jnp.asarray(np.pad(rows[:num], (0, longest - num))),
        jnp.int32(num),
        jnp.asarray(np.pad(rows[num : num + num_test], (0, 4))),
        jnp.int32(num_test),
    )


def linear_loss(params, batch):
    logits = batch.images.reshape(-1, 1) @ params["kernel"] + params["bias"][None, :]
    return cross_entropy(logits, batch.labels, batch.weights)


PARAMS = {"kernel": jnp.array([[0.3, -0.2, 0.1]]), "bias": jnp.array([0.0, 0.5, -0.5])}


def plain_train(training: LocalTraining, key, data: ClientData, params):
    """The same in numpy: true batch sizes, gradients of softmax regression and SGD by hand."""
    weight, bias = (np.asarray(params[name], np.float64) for name in ("kernel", "bias"))
    moved = [np.zeros_like(weight), np.zeros_like(bias)]
    pixels = np.asarray(data.images, np.float64)[..., 0, 0, :] / 255
    images = (pixels - training.mean[0]) / training.std[0]
    num, total = int(data.num_train), 0.0
    for epoch in range(training.local_epochs):
        order_key = jax.random.fold_in(jax.random.fold_in(key, epoch), 2**20)
        order = np.asarray(ordered(order_key, np.int32(num), 64))[:num]
        for start in range(0, num, training.batch_size):
            rows = np.asarray(data.train)[order[start : start + training.batch_size]]
            x, y = images[rows], np.asarray(data.labels)[rows]
            logits = x @ weight + bias
            shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            total -= np.log(shares[np.arange(len(y)), y]).sum()
            error = (shares - np.eye(3)[y]) / len(y)
            gradients = [x.T @ error, error.sum(0)]
            kept = min(1, training.clip_norm / np.sqrt(sum((g**2).sum() for g in gradients)))
            for index, (gradient, param) in enumerate(zip(gradients, (weight, bias), strict=True)):
                decayed = kept * gradient + training.weight_decay * param
                moved[index] = training.momentum * moved[index] + decayed
            weight = weight - training.learning_rate * moved[0]
            bias = bias - training.learning_rate * moved[1]
    return {"kernel": weight, "bias": bias}, total / (num * training.local_epochs)


def trained(training: LocalTraining, key, data: ClientData, **options):
    return train(training, key, PARAMS, linear_loss, data, sgd(training), **options)


def assert_equals_plain(training: LocalTraining, data: ClientData):
    key = jax.random.key(1)
    result = jax.jit(trained, static_argnums=0)(training, key, data)
    params, loss = plain_train(training, key, data, PARAMS)
    expected = jax.tree.map(np.float32, params)
    chex.assert_trees_all_close(result.params, expected, rtol=1e-4, atol=1e-6)
    assert float(result.loss) == pytest.approx(loss, rel=1e-5)


ordered = jax.jit(epoch_order, static_argnums=2)


@given(st.integers(0, 20), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_epoch_order_is_a_permutation_that_does_not_depend_on_padding(num, seed):
    key = jax.random.key(seed)
    orders = [np.asarray(ordered(key, np.int32(num), longest)) for longest in (20, 27, 64)]
    for order in orders:
        assert sorted(order) == list(range(len(order)))
        assert sorted(order[:num]) == list(range(num))
        np.testing.assert_array_equal(order[:num], orders[0][:num])


def test_epochs_differ_in_order():
    orders = [ordered(jax.random.key(seed), np.int32(20), 20).tolist() for seed in range(3)]
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("num", [1, 2, 4, 8, 9, 10, 11])
@pytest.mark.parametrize("rest_size", [2, 4])  # a smaller program for 1 and 2 that are left, not 3
def test_training_equals_the_plain_loop(num, rest_size):
    training = dataclasses.replace(TRAINING, rest_size=rest_size)
    assert_equals_plain(training, make_data(num, longest=12))


@pytest.mark.parametrize(
    "change",
    [{"clip_norm": 0.2, "momentum": 0.0}, {"weight_decay": 0.0}, {"batch_size": 1, "rest_size": 1}],
    ids=str,
)
def test_sgd_settings_equal_the_plain_loop(change):
    assert_equals_plain(dataclasses.replace(TRAINING, **change), make_data(7))


@pytest.mark.parametrize("rest_size", [2, 4])
def test_clients_in_lockstep_equal_clients_alone(rest_size):
    training = dataclasses.replace(TRAINING, rest_size=rest_size)
    together = dataclasses.replace(training, axis="clients")
    sizes = (11, 0, 3, 8, 10)
    clients = [make_data(num, longest=12) for num in sizes]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *clients)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    lockstep = jax.jit(jax.vmap(partial(trained, together), axis_name="clients"))
    mapped, one = lockstep(keys, stacked), jax.jit(partial(trained, training))
    for index, data in enumerate(clients):
        found = jax.tree.map(lambda leaf, row=index: leaf[row], mapped)
        chex.assert_trees_all_close(found, one(keys[index], data), rtol=1e-5, atol=1e-6)
    # Nobody: nothing moves.
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[1], mapped.params), PARAMS)


def test_the_last_batch_divides_by_its_true_size():
    values, weights = jnp.array([1.0, 2.0, 3.0, 100.0]), jnp.array([1.0, 1.0, 1.0, 0.0])
    assert float(mean_over(values, weights)) == 2
    assert float(mean_over(values, jnp.zeros(4))) == 0
    logits = jnp.zeros((4, 5))
    labels = jnp.zeros(4, jnp.int32)
    loss, gradient = jax.value_and_grad(cross_entropy)(logits, labels, weights)
    assert float(loss) == pytest.approx(np.log(5), rel=1e-6)
    assert float(gradient[0, 0]) == pytest.approx(-0.8 / 3, rel=1e-6)  # (softmax - 1) / 3 samples
    assert not np.any(gradient[3])


@given(st.integers(1, 600), st.lists(st.integers(1, 600), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_rest_programs_are_smaller_and_worth_it(batch_size, sizes):
    rest_size = rest_batch_size(batch_size, sizes)
    assert 1 <= rest_size <= batch_size
    if rest_size < batch_size:
        rests = [size % batch_size for size in sizes if size % batch_size]
        padded = sum(rest_size if rest <= rest_size else batch_size for rest in rests)
        whole = sum(sizes) - sum(rests)
        assert whole + padded < 0.9 * (whole + batch_size * len(rests))


def test_rest_programs_by_hand():
    assert rest_batch_size(512, [530]) == 64  # 18 left: an eighth of 512 holds them
    assert rest_batch_size(64, [640, 320]) == 64  # nothing left over
    assert rest_batch_size(64, [1000] * 3) == 64  # 40 left of 1000: 1024 → 1000 is not a tenth
    # Batches are never larger than the largest client.
    training = LocalTraining.of(Config(batch_size=512), (0.5,), (0.5,), [30, 7])
    assert training.batch_size == 32  # of a size that other splits have as well


def test_each_part_has_its_own_norm():
    rates = {"clip_norm": 1.0, "weight_decay": 0.0, "momentum": 0.0, "learning_rate": 1.0}
    training = dataclasses.replace(TRAINING, **rates)
    optimizer = Partitioned({"a": sgd(training), "b": sgd(training, learning_rate=0.5, clip=False)})
    params = {"a": jnp.zeros(2), "b": jnp.zeros(1)}
    gradient = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([10.0])}
    moved, state = optimizer.step(params, optimizer.init(params), gradient)
    expected = {"a": jnp.array([-0.6, -0.8]), "b": jnp.array([-5.0])}
    chex.assert_trees_all_close(moved, expected, rtol=1e-6)
    assert set(state) == {"a", "b"}


def test_projection_follows_every_step():
    training, data = dataclasses.replace(TRAINING, learning_rate=100.0), make_data(7)

    def project(params):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -1.0, 1.0), params)

    result = jax.jit(partial(trained, training, project=project))(jax.random.key(0), data)
    values = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.params)])
    assert np.all(np.abs(values) <= 1) and np.any(np.abs(values) == 1)


@pytest.mark.parametrize("num", [3, 4, 11])
def test_features_of_all_images_by_position(num):
    data = make_data(num, longest=12)
    table = extract_all(TRAINING, lambda images: images.reshape(-1, 1) * 2.0, data)
    rows = data.train[:num]
    expected = 2.0 * normalise(data.images[rows], TRAINING.mean, TRAINING.std).reshape(-1, 1)
    chex.assert_trees_all_close(table[:num], expected, rtol=1e-6)


@pytest.mark.parametrize("num_test", [0, 1, 5, 20])
def test_accuracy_counts_real_images_only(num_test, monkeypatch):
    monkeypatch.setattr("pfedafm_jax.training.accuracy.EVALUATION_BATCH", 8)
    data = make_data(10, num_test=num_test)

    def predict(images):
        scores = images.reshape(-1, 1)
        return {"sign": jnp.concatenate([scores, -scores, jnp.zeros_like(scores)], axis=1)}

    pixels = np.asarray(data.images).ravel()[np.asarray(data.test)[:num_test]]
    guess = np.where(pixels > 127, 0, 1)  # the mean is ½
    right = guess == np.asarray(data.labels)[np.asarray(data.test)[:num_test]]
    expected = right.sum() / num_test if num_test else np.nan
    found = float(accuracy(TRAINING, predict, data)["sign"])
    assert found == pytest.approx(expected, nan_ok=True)
