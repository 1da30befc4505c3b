"""The plain loop itself, by hand, and the engine against it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_but

from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.data.synthetic import make_synthetic
from pfedafm_jax.engine import Federation
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.reference import Reference, aggregation_shares, clipped, cross_entropy, sgd, weighted_sum
from pfedafm_jax.reference.mutual import coded

PARTS = ("local_extractor", "header", "mix")


def changed(config: Config, **values) -> Config:
    """`config` with some settings changed; those of pFedAFM's own by their names too."""
    own = {f.name for f in dataclasses.fields(config.pfedafm)}
    mine = {name: values.pop(name) for name in list(values) if name in own}
    return updated(config, {"pfedafm": mine, **values})


SETTINGS = {
    "paper": {},
    "end_to_end": {"training": "end_to_end", "aggregation": "uniform"},
    "mix": {"mix_scalar": True, "mix_project": False, "mix_learning_rate": 0.1, "mix_weight_decay": 0.1},
    "mix_fixed": {"mix_fixed": 0.25, "aggregation": "last", "same_start": False, "momentum": 0.0, "weight_decay": 0.0},
    "clipping": {"clip_norm": 0.05, "initialisation": "flax", "normalisation": "imagenet", "batch_size": 512},
    "several_at_a_time": {"devices": 2, "clients_per_step": 2, "flip": True, "erase": True, "crop": True},
    "released_code": {
        "mix_relay": True,
        "leak_momentum": True,
        "mix_weight_decay": 1e-3,
        "aggregation": "last",
        "mix_learning_rate": 0.1,
        "flip": True,
        "erase": True,
        "crop": True,
    },
    "relay_asked_for_two_at_a_time": {"mix_relay": True, "leak_momentum": True, "devices": 2, "clients_per_step": 2},
    "relay_end_to_end": {"mix_relay": True, "leak_momentum": True, "training": "end_to_end"},
    "relay_fixed": {"mix_relay": True, "mix_fixed": 0.25},
}


USUAL = ("paper", "end_to_end", "mix", "several_at_a_time", "released_code")


@pytest.mark.parametrize("name", slow_but(USUAL, SETTINGS))
def test_engine_equals_plain_loop(config, dataset, partition, name):
    settings = SETTINGS[name]
    config = changed(config, **settings).check()
    federation, reference = Federation(config, dataset, partition), Reference(config, dataset, partition)
    for client in range(config.num_clients):  # the same start, bit for bit
        start, other = federation.store.state(client), reference.clients[client]
        chex.assert_trees_all_equal({p: start[p] for p in PARTS}, {p: other[p] for p in PARTS})
    # Drawn for three rounds, or chosen so that two come back in another order.
    draws = [None] * 3 if not settings else [[2, 0, 3], [3, 1, 0]]
    for index, participants in enumerate(draws):
        result, plain = federation.run_round(index, participants), reference.run_round(index, participants)
        assert set(plain) == set(result.info) - {"finite"}
        assert np.all(result.info["finite"])
        for name, values in plain.items():
            chex.assert_trees_all_close(result.info[name], np.float32(values), rtol=2e-4, atol=2e-5)
        shared = federation.server["shared_extractor"]
        chex.assert_trees_all_close(shared, reference.server["shared_extractor"], rtol=2e-3, atol=2e-5)
    for client in range(config.num_clients):
        state, other = federation.store.state(client), reference.clients[client]
        chex.assert_trees_all_close({p: state[p] for p in PARTS}, {p: other[p] for p in PARTS}, rtol=2e-3, atol=2e-5)
    scores, plain = federation.evaluate(), reference.evaluate()
    assert set(scores) == set(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(scores[name], values, rtol=1e-5, err_msg=name)


@pytest.mark.optimised
def test_engine_equals_plain_loop_with_a_network_of_the_paper(config):
    dataset = dataset_from_arrays("large", *make_synthetic(4, 60, seed=1), num_classes=4)
    rows = np.arange(60, dtype=np.int32)
    partition = Partition((rows[:12], rows[12:24]), (rows[24:40], rows[40:56]), (rows[:0],) * 2)
    config = changed(
        config, num_clients=2, participation=1.0, architectures=("cnn5",), shared_extractor="cnn5", local_epochs=1
    )
    config = dataclasses.replace(config, feature_size=500, learning_rate=0.01)
    federation, reference = Federation(config, dataset, partition), Reference(config, dataset, partition)
    result, plain = federation.run_round(0), reference.run_round(0)
    for name in ("loss", "shared_loss", "mix_mean"):
        chex.assert_trees_all_close(result.info[name], np.float32(plain[name]), rtol=1e-4)
    shared = federation.server["shared_extractor"]
    chex.assert_trees_all_close(shared, reference.server["shared_extractor"], rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------------------------------------- the loop by hand


def test_cross_entropy_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
    assert float(cross_entropy(logits, jnp.array([1, 1]))) == pytest.approx((np.log(4) - np.log(0.8)) / 2, rel=1e-6)


def test_sgd_and_clipping_by_hand():
    gradient = clipped({"a": jnp.array([3.0]), "b": jnp.array([4.0])}, 1.0)
    chex.assert_trees_all_close(gradient, {"a": jnp.array([0.6]), "b": jnp.array([0.8])}, rtol=1e-6)
    short = {"a": jnp.array([0.3])}
    chex.assert_trees_all_equal(clipped(short, 1.0), short)
    param, velocity = sgd(jnp.array([1.0]), jnp.array([2.0]), jnp.array([4.0]), 0.1, 0.5, 0.5)
    assert velocity.tolist() == [4.5]  # ½ · 4 + 2 + ½ · 1
    assert param.tolist() == pytest.approx([0.55])


@pytest.mark.parametrize(
    ("aggregation", "shares"), [("samples", [0.1, 0.3, 0.6]), ("uniform", [1 / 3] * 3), ("last", [0, 0, 1])]
)
def test_shares_of_the_average(aggregation, shares):
    config = dataclasses.replace(Config(), aggregation=aggregation)
    assert aggregation_shares(config, [10, 30, 60]) == pytest.approx(shares)


def test_weighted_sum_by_hand():
    trees = [{"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([3.0, 6.0])}]
    assert weighted_sum([0.25, 0.75], trees)["a"].tolist() == [2.5, 5.0]


def test_coding_by_hand():
    # Squared singular values 9, 4, 1 of 14: one holds 64.3 %, two hold 92.9 %.
    matrix = np.zeros((20, 30), np.float32)
    matrix[[0, 1, 2], [5, 3, 9]] = 3, 2, 1
    for energy, rank in [(0.64, 1), (0.9, 2), (0.95, 3)]:
        decoded, floats = coded(matrix, energy)
        assert floats == rank * 51
        np.testing.assert_allclose(decoded, np.where(matrix >= 4 - rank, matrix, 0), atol=1e-6)
    everything = np.eye(10, 12, dtype=np.float32)  # needs every rank: sent as it is, and never as nothing
    decoded, floats = coded(everything, 0.98)
    assert floats == 120
    np.testing.assert_array_equal(decoded, everything)


def test_batches_cover_each_epoch_once_and_end_short(config, dataset, partition):
    batches = list(Reference(config, dataset, partition).batches(partition.train[0], jax.random.key(0)))
    assert [len(labels) for _, labels in batches] == [8, 8, 5, 8, 8, 5]
    for epoch in (batches[:3], batches[3:]):
        labels = np.concatenate([labels for _, labels in epoch])
        assert sorted(labels) == sorted(dataset.labels[partition.train[0]])


def test_other_methods_are_refused(config, dataset, partition):
    with pytest.raises(PfedafmError, match=r"method = 'nothing' .*pfedafm"):
        Reference(dataclasses.replace(config, method="nothing"), dataset, partition)
