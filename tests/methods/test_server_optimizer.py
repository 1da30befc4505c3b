"""Server optimizers and the running mean of broadcasts: by hand, against the plain loop, refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    play,
    same,
    slow_but,
    small_config,
    small_data,
    start,
    with_config,
)

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.methods.server_optimizer import (
    MEMORY,
    RUNNING_MEAN,
    ServerOptimizer,
    broadcast_of,
    judged_of,
)

MOMENTUM = {"server_optimizer": "momentum", "server_momentum": 0.5, "server_mean": 0.8}


def programs(method="fedavg", **changes):
    return engine_of(small_config(method, **changes), *small_data())


CASES = {
    "fedavg": MOMENTUM,
    "fedavg_priors": MOMENTUM,
    "pfedafm": {"server_optimizer": "adam", "server_mean": 0.5},
    "fedkd": {"server_optimizer": "momentum"},
    "lg_fedavg": {"server_optimizer": "yogi", "aggregation": "median"},
    "fedper": {"server_optimizer": "yogi", "layout": "lockstep"},
    "ditto": {"server_mean": 0.5},
}


@pytest.mark.parametrize("method", slow_but(["fedavg", "pfedafm"], CASES))
def test_engine_equals_plain_loop(method):
    architectures = {} if method == "pfedafm" else {"architectures": ("dense_b",)}
    assert_equals_plain_loop(programs(method, **architectures, **CASES[method]))


def test_momentum_and_running_mean_by_hand():
    """One round is plain averaging with a rate of 1; the second adds half of the first's change."""
    rounds = [0, 1, 2], [1, 3]
    first = start(programs())[1]["shared_model"]
    after_one = play(programs(), rounds[0])[1]["shared_model"]
    made = programs(**MOMENTUM)
    state = made.start()
    state, _ = made.run_round(state, 0, rounds[0])
    server = jax.device_get(state.server)
    assert_close(server["shared_model"], after_one, rtol=1e-6, atol=1e-7)
    mean_one = jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, first, after_one)
    assert_close(server[RUNNING_MEAN]["shared_model"], mean_one, rtol=1e-6, atol=1e-7)
    # The second round's average, from the same broadcast, client states and batches.
    plain = programs().start()
    plain, _ = programs().run_round(plain, 0, rounds[0])
    plain, _ = programs().run_round(plain, 1, rounds[1])
    average = jax.device_get(plain.server)["shared_model"]
    state, _ = made.run_round(state, 1, rounds[1])
    server = jax.device_get(state.server)

    def expected(start, one, average):
        return one + (average - one) + 0.5 * (one - start)

    two = jax.tree.map(expected, first, after_one, average)
    assert_close(server["shared_model"], two, rtol=1e-5, atol=1e-6)
    mean_two = jax.tree.map(lambda old, new: 0.8 * old + 0.2 * new, mean_one, two)
    assert_close(judged_of(server)["shared_model"], mean_two, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adam", "yogi"])
def test_a_first_step_of_adam_and_yogi_by_hand(kind):
    optimizer = ServerOptimizer(kind, 0.1, 0.9, 0.99, 1e-3)
    old = {"net": {"kernel": jnp.array([1.0, 2.0])}}
    averaged = {"net": {"kernel": jnp.array([1.5, 1.9])}}
    change = np.array([0.5, -0.1])
    moved, _ = optimizer.step(optimizer.init(old)[MEMORY], old, averaged)
    # Both are unbiased, so a first step is rate · change / (|change| + ε), but that Yogi's second
    # moment starts at 1e-6.
    moment = change**2
    if kind == "yogi":
        moment = (1e-6 + 0.01 * change**2) / 0.01
    expected = np.array([1.0, 2.0]) + 0.1 * change / (np.sqrt(moment) + 1e-3)
    np.testing.assert_allclose(moved["net"]["kernel"], expected, rtol=1e-5)


def test_running_statistics_are_averaged_as_they_are():
    optimizer = ServerOptimizer("momentum", 2.0, 0.9)
    old = {"net": {"kernel": jnp.ones(2), "batch_stats": {"mean": jnp.zeros(2)}}}
    averaged = {"net": {"kernel": jnp.full(2, 2.0), "batch_stats": {"mean": jnp.ones(2)}}}
    moved, _ = optimizer.step(optimizer.init(old)[MEMORY], old, averaged)
    np.testing.assert_array_equal(moved["net"]["batch_stats"]["mean"], np.ones(2))
    np.testing.assert_array_equal(moved["net"]["kernel"], np.full(2, 3.0))


def test_clients_never_receive_what_the_server_keeps():
    made = programs(**MOMENTUM)
    server = made.start().server
    assert set(server) == {"shared_model", MEMORY, RUNNING_MEAN}
    assert set(broadcast_of(server)) == set(judged_of(server)) == {"shared_model"}
    assert set(made.programs.shapes.inputs.server) == {"shared_model"}


def test_a_running_mean_changes_evaluations_of_all_clients_and_no_training():
    rounds = [0, 1, 2], [1, 3]
    plain, averaged = programs("fedper"), programs("fedper", server_mean=0.9)
    assert same(play(plain, *rounds)[0], play(averaged, *rounds)[0])
    assert same(play(plain, *rounds)[1], broadcast_of(play(averaged, *rounds)[1]))


def test_a_round_that_everybody_leaves_moves_nothing():
    made = programs(**MOMENTUM)
    made = with_config(made, dropout=0.999)
    state = made.start()
    state, _ = programs(**MOMENTUM).run_round(state, 0, [0, 1])
    before = jax.device_get(state.server)
    state, result = made.run_round(state, 1)
    assert len(result.participants) == 0 and same(before, jax.device_get(state.server))


@pytest.mark.parametrize("method", ["standalone", "fd", "fedproto", "fedgh", "pfedafm_released"])
def test_methods_whose_server_averages_no_weights_are_refused(method):
    with pytest.raises(PfedafmError, match=r"server_optimizer = 'adam'.*averages no weights"):
        programs(method, server_optimizer="adam")
    with pytest.raises(PfedafmError, match=r"server_mean = 0\.5.*accepted: 0"):
        programs(method, server_mean=0.5)


def test_rates_are_the_usual_ones_where_none_is_named():
    config = small_config("fedavg", server_optimizer="yogi")
    assert ServerOptimizer.of(config).learning_rate == 0.01
    assert ServerOptimizer.of(updated(config, server_learning_rate=0.3)).learning_rate == 0.3
