"""What is particular to LG-FedAvg, FD, FedProto and FedRep, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    assert_close,
    engine_of,
    plain_loop,
    play,
    real,
    small_config,
    small_data,
    small_programs,
)
from small import start as start_of

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.engine.reference import plain
from pfedafm_jax.methods.fedproto import nearest_prototype


def test_lg_fedavg_starts_from_the_received_header_and_evaluates_both():
    programs = small_programs("lg_fedavg")
    clients, server, _ = play(programs, [0, 1])
    method, architecture = programs.method, programs.federation.architectures[0]
    scores = method.predict(architecture, clients[0], server, jnp.ones((1, 3, 3, 1)))
    assert list(scores) == ["own", "aggregated"]
    assert not np.allclose(scores["own"], scores["aggregated"])
    received = {**clients[0], "header": server["header"]}
    swapped = method.predict(architecture, received, server, jnp.ones((1, 3, 3, 1)))
    np.testing.assert_array_equal(swapped["own"], scores["aggregated"])


def test_lg_fedavg_shares_other_layers_where_shapes_allow():
    layers = {"shared_layers": ("fc2", "header")}
    homogeneous = real("lg_fedavg", 10, architectures=("cnn1",), lg_fedavg=layers)
    shapes = jax.eval_shape(homogeneous.init_server, jax.random.key(0))
    assert shapes["fc2"]["kernel"].shape == (2000, 500)
    with pytest.raises(PfedafmError, match=r"shared_layers.*fc2 differs in cnn1 and cnn3"):
        real("lg_fedavg", 10, architectures=("cnn1", "cnn3"), lg_fedavg=layers).init_server(
            jax.random.key(0)
        )
    with pytest.raises(PfedafmError, match=r"fc9.*accepted: layers of cnn1: header, conv1"):
        real("lg_fedavg", 10, lg_fedavg={"shared_layers": ("fc9",)}).init_server(jax.random.key(0))


def test_fd_rows_are_probabilities_and_logits_become_probabilities():
    _, server, _ = play(small_programs("fd"), [0, 1, 3])
    np.testing.assert_allclose(server["class_scores"][:3].sum(-1), 1.0, rtol=1e-5)
    by_logits = real("fd", 10, fd={"outputs": "logits", "temperature": 2.0})
    table = jnp.array([[2.0, 0.0], [0.0, -2.0]])
    expected = np.exp(1) / (1 + np.exp(1))
    np.testing.assert_allclose(by_logits.targets(table), [[expected, 1 - expected]] * 2, rtol=1e-6)  # pyright: ignore


def test_without_known_rows_fd_and_fedproto_train_like_standalone():
    alone, _, _ = play(small_programs("standalone"), [0, 1, 2])
    plainly, _, _ = play(small_programs("standalone"), [0, 1], [0])
    for method in ("fd", "fedproto"):
        clients, _, _ = play(small_programs(method), [0, 1, 2])
        assert_close(clients, alone, rtol=1e-5, atol=1e-6)
        later, _, _ = play(small_programs(method), [0, 1], [0])
        kernels = later[0]["header"]["kernel"], plainly[0]["header"]["kernel"]
        assert not np.allclose(*kernels, atol=1e-6)


def test_nearest_prototype_by_hand():
    prototypes = jnp.array([[0.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    features = jnp.array([[0.9, 0.8], [2.5, 0.1], [0.1, 0.0]])
    for known, expected in (([1.0, 1.0, 1.0], [1, 2, 0]), ([0.0, 1.0, 1.0], [1, 2, 1])):
        scores = nearest_prototype(features, prototypes, jnp.array(known))
        assert scores.argmax(-1).tolist() == expected


@pytest.mark.parametrize("by", ["header", "prototype"])
def test_fedproto_evaluates_both_ways_and_falls_back_to_the_header(by):
    programs = engine_of(small_config("fedproto", fedproto={"evaluated_by": by}), *small_data())
    (client, *_), server = start_of(programs)
    work = programs.federation.architectures[0], client, server, jnp.ones((2, 3, 3, 1))
    scores = programs.method.predict(*work)
    assert next(iter(scores)) == by and set(scores) == {"header", "prototype"}
    np.testing.assert_array_equal(scores["prototype"], scores["header"])


def test_the_header_of_fedrep_is_trained_by_sgd_on_frozen_features():
    """Three epochs of one batch: softmax regression with momentum and decay, in 64 bits. And the
    extractor is trained under the header that this leaves."""
    one_batch = {"batch_size": 64, "local_epochs": 1, "clip_norm": 1e30}
    programs = engine_of(small_config("fedrep", **one_batch), *small_data())
    (client, *_), server = start_of(programs)
    data, config, shared = (
        plain_loop(programs).data_of(0),
        programs.federation.config,
        programs.method.shared,
    )
    work = jax.random.key(0), client, server, data, np.float32(1)
    update = plain.client_update(programs.method, shared, *work)
    rows = programs.partition.train[0]
    dataset = programs.dataset
    images = np.float32((dataset.images[rows] / np.float32(255) - dataset.mean) / dataset.std)
    features = np.asarray(shared.extract(server["shared_extractor"], images), np.float64)
    inputs = np.column_stack([features, np.ones(len(rows))])
    weights = np.float64(np.vstack([client["header"]["kernel"], client["header"]["bias"]]))
    one_hot, velocity = np.eye(4)[programs.dataset.labels[rows]], 0.0
    for _ in range(3):
        scores = np.exp(inputs @ weights)
        gradient = inputs.T @ (scores / scores.sum(-1, keepdims=True) - one_hot) / len(rows)
        velocity = config.momentum * velocity + gradient + config.weight_decay * weights
        weights = weights - config.learning_rate * velocity
    header = update.client["header"]
    found = np.vstack([header["kernel"], header["bias"]])
    np.testing.assert_allclose(found, weights, rtol=1e-4, atol=1e-6)
    scores, labels = inputs @ weights, programs.dataset.labels[rows]
    losses = np.log(np.exp(scores).sum(-1)) - scores[np.arange(len(rows)), labels]
    np.testing.assert_allclose(update.info["loss"], losses.mean(), rtol=1e-4)
