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
from small import all_moved, engine_of

from pfedafm_jax.methods.aggregation import average, weigh
from pfedafm_jax.methods.pfedafm import (
    mix_features,
    train_end_to_end,
    train_local_model,
    train_shared_extractor,
)
from pfedafm_jax.methods.pfedafm_released import PFedAFMReleased
from pfedafm_jax.training.batches import ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.sgd import sgd
from pfedafm_jax.training.train import train


def own(method, **values):
    return dataclasses.replace(method, settings=method.settings.model_copy(update=values))


class Visit:
    """One client by hand: client 0, 21 images in batches of 8."""

    def __init__(self, config, dataset, partition):
        programs = engine_of(config, dataset, partition)
        state, self.key = programs.start(), jax.random.key(11)
        self.method, self.training = programs.method, programs.method.training
        self.architecture = programs.federation.architectures[0]
        self.client = state.clients.state(0)
        self.model = {part: self.client[part] for part in ("local_extractor", "header")}
        self.server = jax.device_get(state.server)
        self.shared = self.server["shared_extractor"]
        rows = (jnp.asarray(partition.train[0]), jnp.asarray(partition.test[0]))
        train, test = ((part, jnp.int32(len(part))) for part in rows)
        images = jnp.asarray(dataset.images), jnp.asarray(dataset.labels)
        self.data = ClientData(*images, *train, *test)

    def phase_one(self, method=None, data=None, phase=train_local_model, mix=0.5):
        """Phase 1 from a mix vector of this value."""
        client, data = {**self.client, "mix": jnp.full(12, mix)}, data or self.data
        method = method or self.method
        return phase(method, self.architecture, self.key, client, self.shared, data)


@pytest.fixture(scope="module")
def visit(config, dataset, partition):
    return Visit(config, dataset, partition)


def test_mixing_by_hand():
    mix, shared = jnp.array([0.0, 0.25, 1.0]), jnp.array([[1.0, 2.0, 3.0]])
    local = jnp.array([[5.0, 6.0, 7.0]])
    assert mix_features(mix, shared, local).tolist() == [[1.0, 3.0, 7.0]]
    assert mix_features(jnp.array([0.5]), shared, local).tolist() == [[3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("scalar", "size", "name"), [(True, 1, "mix_fixed"), (False, 12, "mix_start")]
)
def test_clients_start_from_their_own_features_or_another_mix(visit, scalar, size, name):
    np.testing.assert_array_equal(visit.client["mix"], np.ones(12))
    client = own(visit.method, mix_scalar=scalar, **{name: 0.25}).init_client
    mix = jax.jit(lambda key: client(key, visit.architecture)["mix"])(jax.random.key(0))
    np.testing.assert_array_equal(mix, np.full(size, 0.25, np.float32))


@pytest.mark.parametrize("project", [True, False])
def test_mix_stays_between_zero_and_one_where_it_is_projected(visit, project):
    fast = own(visit.method, mix_learning_rate=1000.0, mix_project=project)
    mix = visit.phase_one(fast).params["mix"]
    assert (float(jnp.min(mix)) == 0) == (float(jnp.max(mix)) == 1) == project
    assert project or (float(jnp.min(mix)) < 0 and float(jnp.max(mix)) > 1)


def test_mix_at_one_is_standalone_training(visit):
    """The same batches, F_k alone, through `train`: the same numbers."""
    result = visit.phase_one(own(visit.method, mix_fixed=1.0), mix=1.0)

    def loss(params, batch):
        features = visit.architecture.extract(params["local_extractor"], batch.images)
        logits = visit.architecture.classify(params["header"], features)
        return cross_entropy(logits, batch.labels, batch.weights)

    @jax.jit
    def alone(model, data):
        return train(visit.training, visit.key, model, loss, data, sgd(visit.training))

    expected = alone(visit.model, visit.data)
    np.testing.assert_array_equal(result.params["mix"], np.ones(12))
    assert all_moved(expected.params, visit.model)
    # 0 · R^G + 1 · R^F is R^F to the bit; what is left is how the compiler groups the rest.
    chex.assert_trees_all_close(result.params["model"], expected.params, rtol=1e-5, atol=1e-7)
    assert float(result.loss) == pytest.approx(float(expected.loss), rel=1e-6)


def test_mix_at_zero_gives_the_local_extractor_no_gradient(visit):
    """Without decay it stays to the bit, while the header learns."""
    still = dataclasses.replace(visit.training, weight_decay=0.0)
    method = dataclasses.replace(own(visit.method, mix_fixed=0.0), training=still)
    result = visit.phase_one(method, mix=0.0).params["model"]
    chex.assert_trees_all_equal(result["local_extractor"], visit.client["local_extractor"])
    assert all_moved(result["header"], visit.client["header"])


def test_phase_one_trains_all_of_the_local_model_and_phase_two_the_shared_extractor_only(visit):
    result = visit.phase_one()
    assert set(result.params) == set(result.optimizer_state) == {"model", "mix"}
    assert all_moved(result.params["model"], visit.model)
    header = visit.client["header"]
    second = train_shared_extractor(visit.method, visit.key, header, visit.shared, visit.data)
    assert all_moved(second.params, visit.shared)


@pytest.mark.parametrize("part", ["client", "shared"])
def test_updates_upload_and_keep_what_they_should(visit, part):
    rest, method = (visit.server, visit.data, jnp.float32(3)), visit.method
    if part == "client":
        jitted = jax.jit(method.client_update, static_argnums=1)
        update = jitted(visit.key, visit.architecture, visit.client, *rest)
        assert set(update.client) == {"local_extractor", "header", "mix"}
        assert update.upload == {} and update.weight == {}
    else:
        header = {"header": visit.client["header"]}
        update = jax.jit(method.shared_update)(visit.key, header, *rest)
        assert update.client == {} and set(update.upload) == {"shared_extractor"}
        assert float(update.weight["shared_extractor"]) == 3
    assert all(math.isfinite(float(value)) for value in update.info.values())


def test_end_to_end_trains_everything(visit):
    method = own(visit.method, training="end_to_end")
    assert method.shared_parts == () and visit.method.shared_parts == ("header",)
    result = visit.phase_one(method, phase=train_end_to_end)
    assert all_moved(result.params["shared_extractor"], visit.shared)
    assert all_moved(result.params["model"], visit.model)


def test_shared_features_computed_once_equal_those_of_every_batch(visit):
    """Crops of images that are one colour all over, at the mean, change nothing but switch the
    table off."""
    grey = visit.data._replace(images=jnp.full_like(visit.data.images, 128))
    results = []
    for crop in (False, True):
        training = dataclasses.replace(visit.training, mean=(128 / 255,) * 3, crop=crop)
        method = dataclasses.replace(visit.method, training=training)
        results.append(visit.phase_one(method, grey).params)
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def test_predictions_at_the_ends_of_the_mix(visit):
    images = jax.random.normal(jax.random.key(0), (4, 8, 8, 3))
    predict = partial(visit.method.predict, visit.architecture)
    ones = predict(visit.client, visit.server, images)
    zeros = predict({**visit.client, "mix": jnp.zeros(12)}, visit.server, images)
    assert next(iter(ones)) == "mixed"
    chex.assert_trees_all_close(ones["mixed"], ones["large"], rtol=1e-6)
    chex.assert_trees_all_close(zeros["mixed"], zeros["small"], rtol=1e-6)
    assert float(jnp.max(jnp.abs(ones["small"] - ones["large"]))) > 1e-3


def test_cost_by_hand(visit, config):
    cost = visit.method.cost(visit.architecture, 10, 2)
    # small_b: conv 5·5·3·3 + 3, fc1 12·10 + 10, fc2 10·12 + 12
    assert cost.floats_up == cost.floats_down == 228 + 130 + 132
    shared, local = visit.method.shared.extractor_macs, visit.architecture.extractor_macs
    header = 12 * 4
    # 10 images, 2 epochs, 2 operations per multiply-add; a trained pass costs 3, a frozen one 1
    assert cost.flops == 2 * 2 * 10 * (3 * (local + header) + shared + 3 * (shared + header))
    released = PFedAFMReleased.of(config, visit.training, visit.method.shared, [visit.architecture])
    heavier = released.cost(visit.architecture, 10, 2)  # with the header that is never trained
    assert heavier.floats_up == heavier.floats_down == cost.floats_up + 13 * 4
    assert heavier.flops == cost.flops


def averaged(old, uploads, weights):
    """From sums over clients of weighted uploads and of weights, as the engine has them."""
    weighed = [weigh(upload, weight) for upload, weight in zip(uploads, weights, strict=True)]
    total = (jax.tree.map(lambda *leaves: sum(leaves), *each) for each in (weighed, weights))
    return average(old, *total)


def test_average_by_hand_in_any_order():
    old = {"net": {"kernel": jnp.full((2, 2), 9.0), "bias": jnp.full(2, 9.0)}}
    uploads = [
        {"net": {"kernel": jnp.full((2, 2), v), "bias": jnp.full(2, -v)}} for v in (1.0, 5.0)
    ]
    weights = [{"net": jnp.float32(3)}, {"net": jnp.float32(1)}]
    expected = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.full(2, -2.0)}
    chex.assert_trees_all_equal(averaged(old, uploads, weights)["net"], expected)
    chex.assert_trees_all_equal(averaged(old, uploads[::-1], weights[::-1])["net"], expected)


def test_what_nobody_sent_keeps_its_old_value():
    table = jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    old, sent = {"net": jnp.array([7.0]), "table": table}, {"net": jnp.array([0.0])}
    sent["table"] = jnp.array([[10.0, 20.0], [0.0, 0.0], [50.0, 60.0]])
    weights = [{"net": jnp.float32(0), "table": jnp.array([n, 0.0, 0.0])} for n in (1.0, 2.0)]
    result = averaged(old, [sent] * 2, weights)
    assert result["net"].tolist() == [7.0]
    expected = jnp.array([[10.0, 20.0], [3.0, 4.0], [5.0, 6.0]])
    chex.assert_trees_all_close(result["table"], expected, rtol=1e-6)
