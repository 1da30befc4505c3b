"""Networks of all kinds: BatchNorm's statistics, dropout, NNX."""

from dataclasses import replace
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from nets import HIDDEN, IMAGE, MEAN, PIXELS, VAR, model_of, network, programs
from small import (
    METHODS,
    SIZES,
    TRAINING,
    WIDTH,
    assert_close,
    assert_equals_plain_loop,
    play,
    released_loop,
    same,
    slow_but,
    small_config,
    small_data,
    start,
)

from pfedafm_jax import export_client, load_client, load_run, run
from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.engine.visit import PRIVATE_STATISTICS
from pfedafm_jax.models.batch_stats import statistics_of
from pfedafm_jax.models.flax_modules import training
from pfedafm_jax.runs.experiment import Experiment
from pfedafm_jax.training.batches import ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.sgd import sgd
from pfedafm_jax.training.train import train

# ------------------------------------------------------------------------------------------ a step


def steps(one, model, images, labels, batch_size=4, seeds=(0,), **settings):
    """A model after one epoch on these images, with its loss; of several seeds, of each."""
    plain = {"batch_size": batch_size, "rest_size": batch_size, "local_epochs": 1, "mean": (0.0,), "std": (1.0,)}  # fmt: skip
    training = replace(TRAINING, **(plain | settings))
    rows, count = jnp.arange(len(images), dtype=jnp.int32), jnp.int32(len(images))
    pixels, classes = jnp.asarray(images, jnp.uint8), jnp.asarray(labels, jnp.int32)
    data = ClientData(pixels, classes, rows, count, rows, count)

    def loss(params, batch):
        features = one.extract(params["extractor"], batch.images)
        logits = one.classify(params["header"], features)
        return cross_entropy(logits, batch.labels, batch.weights)

    @jax.jit
    def trained(model, key):
        return train(training, key, model, loss, data, sgd(training))

    found = [trained(model, jax.random.key(seed)) for seed in seeds]
    return found[0] if len(found) == 1 else found


def three():
    """Three images and their classes."""
    return np.random.default_rng(1).integers(0, 256, (3, *IMAGE), np.uint8), np.array([0, 1, 2])


@pytest.mark.parametrize("name", ["normed", "nnx_normed"])
def test_a_step_moves_statistics_by_those_of_the_real_samples_alone(name):
    """Three samples in a batch of four; decay, momentum and clipping do not reach statistics."""
    one, (images, labels) = network(name), three()
    assert one.statistics == 2 * HIDDEN
    assert one.extractor_params == 50 + 2 * HIDDEN + 24 + 4 * WIDTH + WIDTH
    model = model_of(one)
    trained = steps(one, model, images, labels, weight_decay=0.5, clip_norm=0.01)
    start = jax.tree.map(np.float64, model)
    inner = start["extractor"]["extractor"]
    names = (
        ("Dense_0", "BatchNorm_0", "Dense_1") if name == "normed" else ("first", "norm", "second")
    )
    first, norm, second = (inner[layer] for layer in names)
    hidden = images.reshape(3, PIXELS) / 255 @ first["kernel"] + first["bias"]
    mean, var = hidden.mean(0), hidden.var(0)
    after = {path.split(".")[-1]: leaf for path, leaf in statistics_of(trained.params).items()}
    np.testing.assert_allclose(after["mean"], 0.8 * 0 + 0.2 * mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after["var"], 0.8 * 1 + 0.2 * var, rtol=1e-5)
    scaled = (hidden - mean) / np.sqrt(var + 1e-5) * norm["scale"] + norm["bias"]
    features = np.maximum(np.maximum(scaled, 0) @ second["kernel"] + second["bias"], 0)
    match, header = start["extractor"]["match"], start["header"]
    features = features @ match["kernel"] + match["bias"]
    logits = features @ header["kernel"] + header["bias"]
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(3), labels])
    np.testing.assert_allclose(trained.loss, expected, rtol=1e-4)
    # And the weights are those of a batch of three.
    whole = steps(one, model, images, labels, 3, weight_decay=0.5, clip_norm=0.01)
    assert_close(trained.params, whole.params)


def test_nnx_equals_linen_with_the_same_weights():
    linen, other = network("normed"), network("nnx_normed")
    model = model_of(linen)
    inner, norm = model["extractor"]["extractor"], model["extractor"]["batch_stats"]["extractor"]
    names = {"first": "Dense_0", "norm": "BatchNorm_0", "second": "Dense_1"}
    extractor = {
        "extractor": {new: inner[old] for new, old in names.items()},
        "match": model["extractor"]["match"],
        "batch_stats": {"extractor": {"norm": norm["BatchNorm_0"]}},
    }
    images, labels = small_data()[0].images[:11], small_data()[0].labels[:11]
    shape = jax.eval_shape(other.init_extractor, jax.random.key(0))
    chex.assert_trees_all_equal_shapes_and_dtypes(extractor, shape)
    expected = steps(linen, model, images, labels, local_epochs=3)
    found = steps(other, {**model, "extractor": extractor}, images, labels, local_epochs=3)
    assert_close(found.loss, expected.loss)
    assert_close(
        jax.tree.leaves(found.params["header"]), jax.tree.leaves(expected.params["header"])
    )
    for new, old in names.items():
        layers = found.params["extractor"]["extractor"][new], expected.params["extractor"]["extractor"][old]  # fmt: skip
        assert_close(*layers)
    pixels = jnp.asarray(images, jnp.float32)
    scores = [
        one.extract(trained.params["extractor"], pixels)
        for one, trained in ((linen, expected), (other, found))
    ]
    assert_close(*scores, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["dropped", "nnx_dropped"])
def test_dropout_is_drawn_by_key_in_training_and_off_in_evaluation(name):
    one, (images, labels) = network(name), three()
    assert one.random and not network("normed").random
    model, pixels = model_of(one), jnp.ones((2, *IMAGE))
    losses = [one.loss for one in steps(one, model, images, labels, seeds=(0, 0, 1))]
    assert losses[0] == losses[1] != losses[2]
    extract = partial(one.extract, model["extractor"])
    chex.assert_trees_all_equal(extract(pixels), extract(pixels))


def test_a_frozen_network_in_a_loss_is_in_evaluation():
    """With the statistics it has, and without dropout, beside one that is trained."""
    one, (images, _) = network("dropped"), three()
    frozen, params = model_of(one, 1)["extractor"], model_of(one)["extractor"]
    pixels, weights = jnp.asarray(images, jnp.float32), jnp.ones(3)
    with training(params, jax.random.key(0), weights) as step:
        chex.assert_trees_all_equal(one.extract(frozen, pixels), one.extract(frozen, pixels))
        with pytest.raises(PfedafmError, match="a loss has not called `extract`"):
            step.statistics()
        first, second = one.extract(params, pixels), one.extract(params, pixels)
        assert not np.allclose(first, second)  # each with a key of its own
        after = step.statistics()
    # What two calls in a step do to a mean.
    hidden = pixels.reshape(3, PIXELS) @ params["extractor"]["Dense_0"]["kernel"]
    np.testing.assert_allclose(after[MEAN], 0.36 * hidden.mean(0), rtol=1e-4)


# ------------------------------------------------------------------------------------------ rounds

EQUAL = [f"{method}, dropped" for method in (*METHODS, "fedprox")]
EQUAL += [f"{method}, nnx_dropped" for method in ("pfedafm", "fedrep", "fml", "standalone")]


@pytest.mark.parametrize("pair", slow_but(["pfedafm, dropped"], EQUAL))
def test_engine_equals_plain_loop(pair):
    assert_equals_plain_loop(programs(*pair.split(", ")))


LAYOUTS = {
    "two at a time": {"clients_per_step": 2},
    "averaged": {"statistics": "averaged"},
    "lockstep, two devices": {"layout": "lockstep", "devices": 2},
    "a family": {"layout": "lockstep", "architectures": ("flagged", "flagged_wide")},
    "no family": {"layout": "lockstep", "architectures": ("dropped", "normed", "dense_a")},
    "own start": {"same_start": False, "store": "disk"},
}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfedafm", "fml"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_engine_equals_plain_loop_in_all_layouts(method, name):
    assert_equals_plain_loop(programs(method, **LAYOUTS[name]))


def moved(client, first):
    """Whether a client's own statistics of what it shares are others than at first."""
    return not same(client[PRIVATE_STATISTICS], first[PRIVATE_STATISTICS])


def test_private_statistics_stay_with_their_client():
    """pFedAFM's are those of phase 2, which all architectures go through together."""
    one = programs("pfedafm")
    first, server = start(one)
    assert set(first[0][PRIVATE_STATISTICS]) == {
        f"shared_extractor.{MEAN}",
        f"shared_extractor.{VAR}",
    }
    clients, after, _ = play(one, [0, 1], [1])
    assert [moved(*pair) for pair in zip(clients, first, strict=True)] == [True, True, False, False]
    assert same(clients[2:], first[2:])
    # Nothing of them is in the average.
    assert same(statistics_of(after), statistics_of(server))
    assert not same(after, server)
    # What one client has seen has no part in another's.
    alone, _, _ = play(one, [0])
    assert same(alone[0][PRIVATE_STATISTICS], clients[0][PRIVATE_STATISTICS]) and not same(
        clients[0][PRIVATE_STATISTICS], clients[1][PRIVATE_STATISTICS]
    )


def test_averaged_statistics_are_weighted_like_weights_and_counted():
    one = programs("fedper", "normed", statistics="averaged")
    (first, *_), _ = start(one)
    assert PRIVATE_STATISTICS not in first
    alone = [play(one, [client])[1]["shared_extractor"] for client in (0, 1)]
    together = play(one, [0, 1])[1]["shared_extractor"]
    shares = SIZES[0] / sum(SIZES[:2]), SIZES[1] / sum(SIZES[:2])
    expected = jax.tree.map(lambda a, b: shares[0] * a + shares[1] * b, *alone)
    assert_close(together, expected)
    private = programs("fedper", "normed")
    assert one.method.shared.extractor_params == private.federation.cost_of_visit(0).floats_up
    assert (
        one.federation.cost_of_visit(0).floats_up
        == private.federation.cost_of_visit(0).floats_up + 2 * HIDDEN
    )
    assert (
        one.federation.cost_of_visit(0).floats_down
        == private.federation.cost_of_visit(0).floats_down + 2 * HIDDEN
    )


@pytest.mark.slow
def test_coded_updates_leave_statistics_out_and_count_them_where_they_are_averaged():
    found = {}
    for kind in ("private", "averaged"):
        changes = {"architectures": ("normed",), "shared_extractor": "normed", "rounds": 1}
        config = small_config("fedkd", statistics=kind, **changes)
        experiment = Experiment(config, *small_data())
        found[kind] = next(iter(experiment.rounds()))
    difference = found["averaged"].floats_up - found["private"].floats_up
    assert difference == 3 * 2 * HIDDEN  # three participants


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfedafm", "fedrep"])
def test_a_run_is_resumed_opened_exported_and_joined(method, tmp_path):
    changes = {"architectures": ("dropped", "nnx_dropped"), "shared_extractor": "normed"}
    config = small_config(method, rounds=3, checkpoint_every=1, **changes)
    dataset, partition = small_data()
    whole = run(config, dataset, partition, run_dir=tmp_path / "whole", progress=False)
    short = updated(config, rounds=2)
    run(short, dataset, partition, run_dir=tmp_path / "short", progress=False)
    again = run(config, dataset, partition, run_dir=tmp_path / "short", progress=False)
    for client in range(4):
        pair = (one.state.clients.state(client) for one in (whole, again))
        chex.assert_trees_all_equal(*pair)
    opened = load_run(tmp_path / "whole")
    for number in range(4):
        client, rows = opened.client(number), partition.test[number]
        logits = client.predict(dataset.images[rows])[client.predictions[0]]
        right = np.mean(logits.argmax(axis=1) == dataset.labels[rows], dtype=np.float32)
        assert right == whole.history.evaluations[3]["accuracy"][number]
    export_client(client, tmp_path / "client")
    loaded = load_client(tmp_path / "client")
    chex.assert_trees_all_equal(
        loaded.predict(dataset.images[:9]), client.predict(dataset.images[:9])
    )
    rows = partition.train[1]
    newcomer = opened.join(dataset.images[rows], dataset.labels[rows], visits=1)
    fresh = opened.join(dataset.images[rows], dataset.labels[rows], visits=0)
    assert moved(newcomer.params, fresh.params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(newcomer.params))


def test_the_released_codes_method_is_refused_with_such_networks():
    with pytest.raises(PfedafmError, match=r"architectures = 'normed' .* without BatchNorm or Dr"):
        released_loop(programs("pfedafm_released", "normed")).start()
