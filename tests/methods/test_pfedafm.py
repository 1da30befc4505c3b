"""The method by itself: what each phase trains and leaves, the mix vector at its ends, the
average."""

import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedafm_jax.engine import build, start
from pfedafm_jax.methods.base import average, weigh
from pfedafm_jax.methods.pfedafm import (
    mix_features,
    train_end_to_end,
    train_local_model,
    train_shared_extractor,
)
from pfedafm_jax.training import ClientData, cross_entropy, sgd, train

pytestmark = pytest.mark.optimised


def own(method, **values):
    return dataclasses.replace(method, settings=dataclasses.replace(method.settings, **values))


class Visit:
    """One client by hand: client 0, 21 images in batches of 8."""

    def __init__(self, config, dataset, partition, client=0):
        programs = build(config, dataset, partition)
        state = start(programs)
        self.method, self.training = programs.method, programs.method.training
        self.architecture = programs.architectures[client % 2]
        self.client, self.server = state.store.state(client), jax.device_get(state.server)
        self.data = ClientData(
            jnp.asarray(dataset.images),
            jnp.asarray(dataset.labels),
            jnp.asarray(partition.train[client]),
            jnp.int32(len(partition.train[client])),
            jnp.asarray(partition.test[client]),
            jnp.int32(len(partition.test[client])),
        )
        self.key = jax.random.key(11)

    def phase_one(self, **client):
        state = {**self.client, **client}
        shared = self.server["shared_extractor"]
        return train_local_model(self.method, self.architecture, self.key, state, shared, self.data)


@pytest.fixture(scope="module")
def visit(config, dataset, partition):
    return Visit(config, dataset, partition)


def moved(one, other) -> list[bool]:
    return [
        not np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    ]


# ------------------------------------------------------------------------------------------ the mix


def test_mixing_by_hand():
    mix, shared, local = (
        jnp.array([0.0, 0.25, 1.0]),
        jnp.array([[1.0, 2.0, 3.0]]),
        jnp.array([[5.0, 6.0, 7.0]]),
    )
    assert mix_features(mix, shared, local).tolist() == [[1.0, 3.0, 7.0]]
    assert mix_features(jnp.array([0.5]), shared, local).tolist() == [[3.0, 4.0, 5.0]]


def test_clients_start_from_their_own_features(visit):
    np.testing.assert_array_equal(visit.client["mix"], np.ones(12))


@pytest.mark.parametrize(("scalar", "size"), [(True, 1), (False, 12)])
def test_start_of_a_fixed_mix(visit, scalar, size):
    client = own(visit.method, mix_fixed=0.25, mix_scalar=scalar).init_client
    shapes = jax.eval_shape(partial(client, architecture=visit.architecture), jax.random.key(0))
    assert shapes["mix"].shape == (size,)
    mix = jax.jit(lambda key: client(key, visit.architecture)["mix"])(jax.random.key(0))
    np.testing.assert_array_equal(mix, np.full(size, 0.25, np.float32))


def test_mix_stays_between_zero_and_one(visit):
    method = own(visit.method, mix_learning_rate=1000.0)
    shared = visit.server["shared_extractor"]
    start = {**visit.client, "mix": jnp.full(12, 0.5)}
    mix = train_local_model(
        method, visit.architecture, visit.key, start, shared, visit.data
    ).params["mix"]
    assert float(jnp.min(mix)) == 0 and float(jnp.max(mix)) == 1
    free = own(method, mix_project=False)
    mix = train_local_model(free, visit.architecture, visit.key, start, shared, visit.data).params[
        "mix"
    ]
    assert float(jnp.min(mix)) < 0 and float(jnp.max(mix)) > 1


def test_mix_at_one_is_standalone_training(visit):
    """The same batches, F_k alone, through `train`: the same numbers."""
    method = own(visit.method, mix_fixed=1.0)
    result = train_local_model(
        method,
        visit.architecture,
        visit.key,
        visit.client,
        visit.server["shared_extractor"],
        visit.data,
    )

    def loss(params, batch):
        features = visit.architecture.extract(params["local_extractor"], batch.images)
        return cross_entropy(
            visit.architecture.classify(params["header"], features), batch.labels, batch.weights
        )

    @jax.jit
    def alone(model, data):
        return train(visit.training, visit.key, model, loss, data, sgd(visit.training))

    model = {part: visit.client[part] for part in ("local_extractor", "header")}
    expected = alone(model, visit.data)
    np.testing.assert_array_equal(result.params["mix"], np.ones(12))
    assert all(moved(expected.params, model))
    # 0 · R^G + 1 · R^F is R^F to the bit; what is left is how the compiler groups the rest.
    chex.assert_trees_all_close(result.params["model"], expected.params, rtol=1e-5, atol=1e-7)
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-6)


def test_mix_at_zero_gives_the_local_extractor_no_gradient(visit):
    """Without decay it stays to the bit, while the header learns."""
    still = dataclasses.replace(visit.training, weight_decay=0.0)
    method = dataclasses.replace(own(visit.method, mix_fixed=0.0), training=still)
    start = {**visit.client, "mix": jnp.zeros(12)}
    shared = visit.server["shared_extractor"]
    result = train_local_model(
        method, visit.architecture, visit.key, start, shared, visit.data
    ).params["model"]
    chex.assert_trees_all_equal(result["local_extractor"], visit.client["local_extractor"])
    assert all(moved(result["header"], visit.client["header"]))


# --------------------------------------------------------------------------------------- the phases


def test_phase_one_trains_all_of_the_local_model(visit):
    result = visit.phase_one(mix=jnp.full(12, 0.5))
    assert set(result.params) == {"model", "mix"}, (
        "the shared extractor is not even among the trained"
    )
    assert all(
        moved(result.params["model"], {p: visit.client[p] for p in ("local_extractor", "header")})
    )
    assert set(result.optimizer_state) == {"model", "mix"}


def test_phase_two_trains_the_shared_extractor_only(visit):
    shared, header = visit.server["shared_extractor"], visit.client["header"]
    result = train_shared_extractor(visit.method, visit.key, header, shared, visit.data)
    assert jax.tree.structure(result.params) == jax.tree.structure(shared)
    assert all(moved(result.params, shared))


@pytest.mark.parametrize("part", ["client", "shared"])
def test_updates_upload_and_keep_what_they_should(visit, part):
    weight = jnp.float32(3)
    if part == "client":
        update = jax.jit(
            lambda key, *rest: visit.method.client_update(key, visit.architecture, *rest)
        )(visit.key, visit.client, visit.server, visit.data, weight)
        assert set(update.client) == {"local_extractor", "header", "mix"}
        assert update.upload == {} and update.weight == {}
    else:
        header = {"header": visit.client["header"]}
        update = jax.jit(visit.method.shared_update)(
            visit.key, header, visit.server, visit.data, weight
        )
        assert update.client == {} and set(update.upload) == {"shared_extractor"}
        assert float(update.weight["shared_extractor"]) == 3
    assert all(math.isfinite(float(value)) for value in update.info.values())


def test_end_to_end_trains_everything(visit):
    method = own(visit.method, training="end_to_end")
    assert method.shared_parts == () and visit.method.shared_parts == ("header",)
    start = {**visit.client, "mix": jnp.full(12, 0.5)}
    shared = visit.server["shared_extractor"]
    result = train_end_to_end(method, visit.architecture, visit.key, start, shared, visit.data)
    assert all(moved(result.params["shared_extractor"], shared))
    assert all(
        moved(result.params["model"], {p: visit.client[p] for p in ("local_extractor", "header")})
    )


def test_shared_features_computed_once_equal_those_of_every_batch(visit):
    """Crops of images that are one colour all over, at the mean, change nothing but switch the
    table off."""
    grey = visit.data._replace(images=jnp.full_like(visit.data.images, 128))
    training = dataclasses.replace(visit.training, mean=(128 / 255,) * 3)
    start = {**visit.client, "mix": jnp.full(12, 0.5)}
    results = []
    for crop in (False, True):
        method = dataclasses.replace(
            visit.method, training=dataclasses.replace(training, crop=crop)
        )
        shared = visit.server["shared_extractor"]
        results.append(
            train_local_model(method, visit.architecture, visit.key, start, shared, grey).params
        )
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def test_predictions_at_the_ends_of_the_mix(visit):
    images = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    predict = jax.jit(
        lambda client: visit.method.predict(visit.architecture, client, visit.server, images)
    )
    ones, zeros = predict(visit.client), predict({**visit.client, "mix": jnp.zeros(12)})
    assert (
        next(iter(visit.method.predict(visit.architecture, visit.client, visit.server, images)))
        == "mixed"
    )
    chex.assert_trees_all_close(ones["mixed"], ones["large"], rtol=1e-6)
    chex.assert_trees_all_close(zeros["mixed"], zeros["small"], rtol=1e-6)
    assert float(jnp.max(jnp.abs(ones["small"] - ones["large"]))) > 1e-3


# -------------------------------------------------------------------------------------------- costs


def test_cost_by_hand(visit):
    cost = visit.method.cost(visit.architecture, 10, 2)
    # small_b: conv 5·5·3·3 + 3, fc1 12·10 + 10, fc2 10·12 + 12
    assert cost.floats_up == cost.floats_down == 228 + 130 + 132
    shared, local, header = (
        visit.method.shared.extractor_macs,
        visit.architecture.extractor_macs,
        12 * 4,
    )
    # 10 images, 2 epochs, 2 operations per multiply-add; a trained pass costs 3, a frozen one 1
    assert cost.flops == 2 * 2 * 10 * (3 * (local + header) + shared + 3 * (shared + header))
    heavier = own(visit.method, send_header=True)
    assert heavier.cost(visit.architecture, 10, 2).floats_up == cost.floats_up + 13 * 4


# -------------------------------------------------------------------------------------- the average


def summed(uploads, weights):
    """What the engine hands to `average`: sums over clients of weighted uploads and of weights."""
    weighed = [weigh(upload, weight) for upload, weight in zip(uploads, weights, strict=True)]
    return jax.tree.map(lambda *leaves: sum(leaves), *weighed), jax.tree.map(
        lambda *leaves: sum(leaves), *weights
    )


def test_average_by_hand():
    old = {"net": {"kernel": jnp.full((2, 2), 9.0), "bias": jnp.full(2, 9.0)}}
    uploads = [
        {"net": {"kernel": jnp.full((2, 2), v), "bias": jnp.full(2, -v)}} for v in (1.0, 5.0)
    ]
    weights = [{"net": jnp.float32(3)}, {"net": jnp.float32(1)}]
    result = average(old, *summed(uploads, weights))["net"]
    chex.assert_trees_all_equal(
        result, {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, -2.0)}
    )


def test_what_nobody_sent_keeps_its_old_value():
    old = {"net": jnp.array([7.0]), "table": jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])}
    uploads = [
        {"net": jnp.array([0.0]), "table": jnp.array([[10.0, 20.0], [0.0, 0.0], [50.0, 60.0]])}
    ] * 2
    weights = [
        {"net": jnp.float32(0), "table": jnp.array([1.0, 0.0, 0.0])},
        {"net": jnp.float32(0), "table": jnp.array([2.0, 0.0, 0.0])},
    ]
    result = average(old, *summed(uploads, weights))
    assert result["net"].tolist() == [7.0]
    chex.assert_trees_all_close(
        result["table"], jnp.array([[10.0, 20.0], [3.0, 4.0], [5.0, 6.0]]), rtol=1e-6
    )


def test_average_does_not_depend_on_the_order_and_is_not_the_last():
    rng = np.random.default_rng(0)
    uploads = [{"net": jnp.asarray(rng.normal(size=5), jnp.float32)} for _ in range(4)]
    weights = [{"net": jnp.float32(n)} for n in (5, 1, 2, 8)]
    old = {"net": jnp.zeros(5)}
    forward = average(old, *summed(uploads, weights))["net"]
    backward = average(old, *summed(uploads[::-1], weights[::-1]))["net"]
    chex.assert_trees_all_close(forward, backward, rtol=1e-5)
    by_hand = sum(
        n / 16 * np.asarray(upload["net"]) for n, upload in zip((5, 1, 2, 8), uploads, strict=True)
    )
    chex.assert_trees_all_close(forward, jnp.asarray(by_hand), rtol=1e-5)
    assert all(float(jnp.max(jnp.abs(forward - upload["net"]))) > 0.1 for upload in uploads)
