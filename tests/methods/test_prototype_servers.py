"""FedGH and FedTGP: what the server makes of single prototypes, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    CLASSES,
    WIDTH,
    assert_close,
    engine_of,
    real,
    same,
    small_config,
    small_data,
    start,
)

from pfedafm_jax.methods.base import Uploads
from pfedafm_jax.methods.fedgh import train_on_prototypes
from pfedafm_jax.methods.fedtgp import adaptive_margin, contrastive_loss
from pfedafm_jax.models.architecture import describe


def programs(method, **changes):
    changes = {"architectures": ("dense_b",), **changes}
    return engine_of(small_config(method, **changes), *small_data())


def uploads(rows, weight, clients=(0, 1)):
    weights = {"prototypes": jnp.asarray(weight, jnp.float32)}
    parts = {"prototypes": jnp.asarray(rows, jnp.float32)}
    return Uploads(jnp.array(clients), parts, weights, jax.random.key(5))


def test_a_server_goes_once_an_epoch_over_what_was_sent_and_over_nothing_else():
    """The slope of a linear loss is the sum of what it was given: 1, 2 and 8, and not 4."""
    sent = uploads([[[1.0], [2.0]], [[4.0], [8.0]]], [[3, 1], [0, 5]])

    def loss(params, prototypes, classes, weights):
        return -params * jnp.sum(weights * prototypes[:, 0])

    for size in (1, 2, 3, 10):
        found = train_on_prototypes(loss, jnp.zeros(()), sent, 0.5, 3, size)
        assert float(found) == 0.5 * 3 * 11


def test_the_order_of_an_epoch_does_not_depend_on_the_place_of_a_client():
    table, weight = np.arange(8.0).reshape(2, 4, 1), np.ones((2, 4))

    def loss(params, prototypes, classes, weights):  # where the order counts
        return jnp.sum(weights * (params - prototypes[:, 0]) ** 2)

    one = train_on_prototypes(loss, jnp.zeros(()), uploads(table, weight), 0.3, 2, 1)
    other = uploads(table[::-1], weight, clients=(1, 0))
    assert same(one, train_on_prototypes(loss, jnp.zeros(()), other, 0.3, 2, 1))


def test_fedgh_trains_the_header_on_single_prototypes():
    """One step over all of a round's prototypes: the header moves by the mean slope of their CE."""
    own = {"server_learning_rate": 0.5, "server_epochs": 1, "server_batch_size": 99}
    made = programs("fedgh", fedgh=own)
    header = start(made)[1]["header"]
    method = made.method
    rng = np.random.default_rng(0)
    table, weight = rng.normal(size=(3, CLASSES, WIDTH)), np.array(rng.random((3, CLASSES)) < 0.6)
    found = method.uploads_update({"header": header}, uploads(table, weight, (0, 1, 2)))["header"]
    rows, labels = table[weight], np.tile(np.arange(CLASSES), (3, 1))[weight]
    logits = rows @ np.float64(header["kernel"]) + header["bias"]
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    slope = (softmax - np.eye(CLASSES)[labels]) / len(rows)
    expected = {"kernel": header["kernel"] - 0.5 * rows.T @ slope}
    expected["bias"] = header["bias"] - 0.5 * slope.sum(0)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_fedgh_predicts_with_its_own_header_and_with_that_of_all():
    made = programs("fedgh")
    (client, *_), server = start(made)
    assert made.federation.prediction_names == ["own", "global"]
    images = np.ones((2, 3, 3, 1), np.float32)
    scores = made.method.predict(made.federation.architectures[0], client, server, images)
    same_header = {**client, "header": server["header"]}
    again = made.method.predict(made.federation.architectures[0], same_header, server, images)
    assert same(scores["global"], again["own"]) and not same(scores["own"], scores["global"])
    cost = real("fedgh", 10).cost(describe("cnn1", 10), 400.0, 2)
    assert (cost.floats_up, cost.floats_down) == (2 * 500, 5_010)
    assert cost.flops == real("fedproto", 10).cost(describe("cnn1", 10), 400.0, 2).flops


def test_the_margin_is_the_largest_distance_to_the_nearest_class_that_was_sent():
    means = jnp.array([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0], [90.0, 90.0]])
    sent = jnp.array([True, True, True, False])
    # 0 is 5 from 1, which is 1 from 2.
    assert float(adaptive_margin(means, sent, 100.0)) == pytest.approx(5.0)
    assert float(adaptive_margin(means, sent, 2.0)) == 2.0
    one = jnp.array([False, True, False, False])
    assert float(adaptive_margin(means, one, 7.0)) == 7.0  # there is no other


def test_the_contrastive_loss_by_hand():
    """Distances 5 and 0 of a prototype of class 0, with a margin of 2: -log softmax₀(-7, 0)."""
    made, weights = jnp.array([[3.0, 4.0], [0.0, 0.0]]), jnp.array([1.0, 0.0])
    rows = jnp.array([[0.0, 0.0], [9.0, 9.0]])
    found = contrastive_loss(made, jnp.float32(2.0), rows, jnp.array([0, 1]), weights)
    assert float(found) == pytest.approx(np.log(1 + np.exp(7.0)), rel=1e-5)
    slope = jax.grad(contrastive_loss)(made, jnp.float32(2.0), rows, jnp.array([0, 1]), weights)
    share = 1 / (1 + np.exp(-7.0))  # of class 1; where two meet, the slope is 0
    assert_close(slope, np.array([[0.6 * share, 0.8 * share], [0.0, 0.0]]))


def test_fedtgp_broadcasts_what_the_generator_makes_and_pulls_it_to_the_clients():
    own = {"server_learning_rate": 0.05, "server_epochs": 200, "server_batch_size": 10}
    made = programs("fedtgp", fedtgp=own)
    method, server = made.method, start(made)[1]
    rng = np.random.default_rng(0)
    centres = np.eye(CLASSES, WIDTH) * 4
    table = centres + 0.1 * rng.normal(size=(3, CLASSES, WIDTH))
    weight = np.ones((3, CLASSES))
    weight[:, 3] = 0  # nobody has class 3
    sent = uploads(table, weight, (0, 1, 2))
    sent.parts["prototype_known"] = jnp.ones((3, CLASSES))
    sent.weight["prototype_known"] = sent.weight["prototypes"]
    new = jax.jit(lambda server: method.uploads_update(server, sent))(server)
    assert_close(new["prototypes"], method.generator.apply({"params": new["generator"]}))
    assert new["prototype_known"].tolist() == [1, 1, 1, 0]
    apart = np.linalg.norm(np.asarray(new["prototypes"])[:, None] - centres[None], axis=-1)[:3, :3]
    assert (np.argmin(apart, axis=0) == np.arange(3)).all()  # nearest to each class: its own
    least = apart + 1e9 * np.eye(3)
    assert (np.diag(apart) < least.min(axis=0)).all()
    floats = real("fedtgp", 10).cost(describe("cnn1", 10), 400.0, 2)
    assert (floats.floats_up, floats.floats_down) == (1_000, 1_000)
