"""Algorithm 1 by hand, the engine against it, and what the released code does instead."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import algorithm_1, engine_of, plain_loop, released_loop, slow_but, states

from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.engine.reference.algorithm1 import (
    Batch,
    clipped,
    cross_entropy,
    sgd,
    weighted_mean,
)
from pfedafm_jax.engine.round import weights_of


def changed(config: Config, method="pfedafm", **values) -> Config:
    """`config` with some settings changed; those of pFedAFM by their names too."""
    own = type(getattr(config, method)).model_fields.keys()
    mine = {name: values.pop(name) for name in list(values) if name in own}
    return updated(config, {"method": method, method: mine, **values})


# As released, with nothing of what the released code has instead of the paper's.
AS_IN_THE_PAPER = {"method": "pfedafm_released", "mix_relay": False, "leak_momentum": False,
                   "last_alone": False, "mix_weight_decay": 0.0, "mix_learning_rate": 1.0}  # fmt: skip


def play(loop, draws, state=None):
    """(state, results) after rounds of the engine, or of a plain loop."""
    state, results = state or loop.start(), []
    for t, participants in enumerate(draws):
        state, result = loop.run_round(state, t, participants)
        results.append(result)
    return state, results


# One architecture where two would show no more: it is compiled in half the time.
ONE = {"architectures": ("small_b",)}
MIX = {"mix_scalar": True, "mix_project": False, "mix_start": 0.5, "mix_learning_rate": 0.1}
SETTINGS = {
    "paper": {},
    "end_to_end": {"training": "end_to_end", "aggregation": "uniform", **ONE},
    "mix": MIX,
    "mix_fixed": {"mix_fixed": 0.25, "same_start": False, "momentum": 0.0, "weight_decay": 0.0},
    "clipping": {"clip_norm": 0.05, "initialisation": "flax", "normalisation": "imagenet"},
    "one_batch": {"batch_size": 512},
    "several": {"devices": 2, "clients_per_step": 2, "flip": True, "erase": True, "crop": True, **ONE},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(("paper",), SETTINGS))
def test_engine_equals_algorithm_1(config, dataset, partition, name):
    programs = engine_of(changed(config, **SETTINGS[name]), dataset, partition)
    # Drawn for three rounds, or chosen so that two come back in another order.
    draws = [None] * 3 if name == "paper" else [[2, 0, 3], [3, 1, 0]]
    (one, ours), (two, theirs) = play(programs, draws), play(algorithm_1(programs), draws)
    for here, there in zip(ours, theirs, strict=True):
        assert set(here.reports) == set(there.reports)
        assert np.all(here.reports["finite"] & there.reports["finite"])
        chex.assert_trees_all_close(here.reports, there.reports, rtol=2e-4, atol=2e-5)
    ours, theirs = ((jax.device_get(state.server), states(state)) for state in (one, two))
    chex.assert_trees_all_close(ours, theirs, rtol=2e-3, atol=2e-5)
    scores = programs.evaluate(one), plain_loop(programs).evaluate(two)
    chex.assert_trees_all_close(*scores, rtol=1e-5)


def test_engine_equals_algorithm_1_with_a_network_of_the_paper(config):
    dataset = dataset_from_arrays("large", *make_synthetic(4, 60, seed=1), num_classes=4)
    rows = np.arange(60, dtype=np.int32)
    partition = Partition((rows[:12], rows[12:24]), (rows[24:40], rows[40:56]), (rows[:0],) * 2)
    networks = {"architectures": ("cnn5",), "shared_extractor": "cnn5", "feature_size": 500}
    config = changed(config, num_clients=2, participation=1.0, batch_size=6, **networks)
    config = updated(config, local_epochs=1, learning_rate=0.01)
    programs = engine_of(config, dataset, partition)
    one, [ours] = play(programs, [None])
    two, [theirs] = play(algorithm_1(programs), [None])
    for name in ("loss", "shared_loss", "mix_mean"):
        chex.assert_trees_all_close(ours.reports[name], theirs.reports[name], rtol=1e-4)
    servers = jax.device_get((one.server, two.server))
    chex.assert_trees_all_close(*servers, rtol=1e-3, atol=1e-5)


@pytest.fixture(scope="module")
def still(config, dataset, partition):
    """Rates of 0, one epoch: whatever a client starts from is what it leaves."""
    settings = {"learning_rate": 0.0, "mix_learning_rate": 0.0, "local_epochs": 1, "batch_size": 64}
    return changed(config, **(AS_IN_THE_PAPER | settings)), dataset, partition


def relayed(programs, **relay):
    """A start at which somebody has left this for the next client."""
    state = released_loop(programs).start()
    left = {**state.server["relay"], **relay}
    return state._replace(server={**state.server, "relay": left})


def test_a_mix_vector_is_handed_on_but_not_to_a_first_visit(still):
    config, *data = still
    programs = engine_of(changed(config, "pfedafm_released", mix_relay=True), *data)
    state = relayed(programs, mix=np.full(12, 0.25, np.float32))
    state, _ = play(released_loop(programs), [[3]], state)
    np.testing.assert_array_equal(state.clients.state(3)["mix"], np.ones(12))  # its first visit
    np.testing.assert_array_equal(state.server["relay"]["mix"], np.ones(12))
    state = relayed(programs, mix=np.full(12, 0.25, np.float32))._replace(clients=state.clients)
    state, _ = play(released_loop(programs), [[3]], state)
    np.testing.assert_array_equal(state.clients.state(3)["mix"], np.full(12, 0.25))
    np.testing.assert_array_equal(state.clients.state(4)["mix"], np.ones(12))


def test_momentum_leaks_from_client_to_client(still):
    """One batch: v = 0.9 · (what was left) + gradient, so a left 2 moves the mix by another -0.1 ·
    0.9 · 2."""
    config, *data = still
    rates = {"mix_learning_rate": 0.1, "mix_project": False, "learning_rate": 0.1}
    programs = engine_of(changed(config, "pfedafm_released", leak_momentum=True, **rates), *data)
    shared = jax.device_get(released_loop(programs).start().server["shared_extractor"])
    found = []
    for left in (0.0, 2.0):
        velocity = jax.tree.map(lambda leaf, left=left: np.full_like(leaf, left), shared)
        start = {"mix_velocity": np.full(12, left, np.float32), "shared_velocity": velocity}
        state, _ = play(released_loop(programs), [[0]], relayed(programs, **start))
        extractor = jax.device_get(state.server["shared_extractor"])
        found.append({"mix": state.clients.state(0)["mix"], "extractor": extractor})
    expected = jax.tree.map(lambda leaf: leaf - np.float32(0.18), found[0])
    chex.assert_trees_all_close(found[1], expected, rtol=1e-3, atol=1e-4)


def test_a_decayed_mix_vector_shrinks(still):
    """One step from 1 with rate 0.1: less by 0.1 · 0.5 than without decay."""
    config, *data = still
    rates = {"mix_learning_rate": 0.1, "mix_project": False}
    found = []
    for decay in (0.0, 0.5):
        own = changed(config, "pfedafm_released", mix_weight_decay=decay, **rates)
        programs = engine_of(own, *data)
        state, _ = play(released_loop(programs), [[0]], released_loop(programs).start())
        found.append(state.clients.state(0)["mix"])
    np.testing.assert_allclose(found[1], found[0] - 0.05, rtol=1e-5)


def test_without_its_switches_the_released_code_is_algorithm_1_and_else_the_last_alone_counts(
    config, dataset, partition
):
    def released_round(**settings):
        programs = engine_of(changed(config, **(AS_IN_THE_PAPER | settings)), dataset, partition)
        state, _ = play(released_loop(programs), [[0, 1, 4], []], released_loop(programs).start())
        return jax.device_get(state.server["shared_extractor"])

    def paper_round(*participants):
        state, _ = play(algorithm_1(engine_of(config, dataset, partition)), [participants])
        return jax.device_get(state.server["shared_extractor"])

    chex.assert_trees_all_equal(released_round(), paper_round(0, 1, 4))
    chex.assert_trees_all_equal(released_round(last_alone=True), paper_round(4))


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.9, 0.05, 0.05]]))
    batch = Batch(logits, jnp.array([1, 1, 0]), jnp.array([1.0, 1.0, 0.0]))  # the third fills it
    expected = (np.log(4) - np.log(0.8)) / 2
    assert float(cross_entropy(logits, batch)) == pytest.approx(expected, rel=1e-6)


def test_sgd_and_clipping_by_hand():
    gradient = clipped({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
    chex.assert_trees_all_close(gradient, {"a": jnp.array([0.6]), "b": jnp.array([0.8])}, rtol=1e-6)
    short = {"a": jnp.array([0.3])}
    chex.assert_trees_all_equal(clipped(short, 1.0), short)
    param, velocity = sgd(jnp.array([1.0]), jnp.array([2.0]), jnp.array([4.0]), 0.1, 0.5, 0.5)
    assert velocity.tolist() == [4.5]  # ½ · 4 + 2 + ½ · 1
    assert param.tolist() == pytest.approx([0.55])


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("samples", [21, 5, 29]), ("uniform", [1, 1, 1])]
)
def test_weights_of_the_average(config, dataset, partition, aggregation, expected):
    programs = engine_of(updated(config, aggregation=aggregation), dataset, partition)
    assert weights_of(programs.federation, [0, 3, 2]) == expected


def test_means_by_hand():
    trees = [{"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([3.0, 6.0])}]
    mean = weighted_mean(list(zip([1.0, 3.0], trees, strict=True)), None)["a"]
    assert mean.tolist() == [2.5, 5.0]
    assert weighted_mean([], trees[0]) is trees[0]


def test_batches_cover_each_epoch_once_and_end_short(config, dataset, partition):
    programs = engine_of(config, dataset, partition)
    found = list(algorithm_1(programs).batches(0, jax.random.key(0)))
    assert [len(batch.labels) for batch in found] == [8, 8, 5, 8, 8, 5]
    for epoch in (found[:3], found[3:]):
        labels = np.concatenate([batch.labels for batch in epoch])
        assert sorted(labels) == sorted(dataset.labels[partition.train[0]])
