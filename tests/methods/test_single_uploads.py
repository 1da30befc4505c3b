"""A server that sees single uploads: whose they are and where, in every layout, and the median."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    ABSENT,
    ROUNDS,
    algorithm_1,
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    play,
    same,
    slow_but,
    small_config,
    small_data,
)

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.methods import register_method
from pfedafm_jax.methods.aggregation import median
from pfedafm_jax.methods.base import Uploads, combined, next_broadcast
from pfedafm_jax.methods.standalone import Standalone


@dataclass(frozen=True)
class Ledger(Standalone):
    """The server keeps what every client last sent, a row each, and the order of the last round."""

    name = "ledger"

    def init_server(self, key):
        size = self.num_clients
        return {"sums": jnp.zeros((size, 2)), "order": jnp.full((3,), -1), "draw": jnp.zeros(())}

    def client_update(self, key, architecture, client, server, data, weight):
        update = super().client_update(key, architecture, client, server, data, weight)
        own = server["sums"][data.client, 0] + 1  # how often it was here
        row = jnp.stack([own, update.client["header"]["bias"][0]])
        number = jnp.asarray(data.client, jnp.float32)
        sent = {"row": row, "number": number, "classes": jnp.zeros((4, 1)) + number}
        rows = jnp.arange(4.0) * jnp.minimum(number, 1.0)  # weights by row; client 0 has none
        return update._replace(
            upload=sent, weight={"row": weight, "number": weight, "classes": rows}
        )

    def uploads_update(self, server, uploads):
        rows = server["sums"].at[uploads.client].set(uploads.parts["row"])
        there = uploads.weight["row"] > 0
        order = jnp.where(there, uploads.parts["number"].astype(jnp.int32), -1)
        return {"sums": rows, "order": order, "draw": jax.random.uniform(uploads.key)}


@pytest.fixture(autouse=True)
def ledger(registered):
    register_method(Ledger)


def programs(method="ledger", **changes):
    changes = {"architectures": ("dense_b",), **changes}
    return engine_of(small_config(method, **changes), *small_data())


@pytest.mark.parametrize("layout", slow_but(["loop"], ["loop", "lockstep"]))
def test_uploads_are_in_the_order_drawn_on_any_device_with_the_numbers_of_their_clients(layout):
    made = programs(layout=layout, devices=2)
    assert_equals_plain_loop(made)
    _, server, _ = play(made, *ROUNDS)  # [2, 0, 1], [1, 3], [0]
    assert server["order"].tolist() == [0, -1, -1]
    assert server["sums"][:, 0].tolist() == [2, 2, 1, 1]
    assert play(made, [2, 0, 1])[1]["order"].tolist() == [2, 0, 1]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_server_sees_those_who_stayed(dropout):
    made = programs(layout="lockstep", dropout=dropout, seed=1)
    state = made.start()
    visits, lost = np.zeros(4), set()
    for number in range(1, 13):
        state, result = made.run_round(state, number)
        stayed, dropped = participants_of(made.federation.config, number)
        assert (result.participants.tolist(), list(result.dropped)) == (stayed, dropped)
        assert all(len(values) == len(stayed) for values in result.reports.values())
        if stayed:  # else the server stays as it was
            assert state.server["order"].tolist() == [*stayed, -1, -1, -1][:3]
        visits[stayed] += 1
        lost.add(len(dropped))
        assert state.server["sums"][:, 0].tolist() == visits.tolist()
    assert lost == ({0} if dropout == 0 else {0, 1, 2, 3})


def test_whoever_is_not_finite_has_no_row():
    made = programs()
    state = made.start()
    state.clients.write(
        0, jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), state.clients.state(0))
    )
    state, result = made.run_round(state, 1, [1, 0, 2])
    assert result.reports["finite"].tolist() == [True, False, True]
    assert np.asarray(state.server["order"]).tolist() == [1, -1, 2]
    assert np.asarray(state.server["sums"])[:, 0].tolist() == [0, 1, 1, 0]


def test_more_participants_than_the_settings_say_are_refused():
    with pytest.raises(PfedafmError, match="participants = 4 cannot be used; accepted: 3 at most"):
        play(programs(), [0, 1, 2, 3])


def uploads(values, weight):
    rows = {"a": jnp.asarray(values, jnp.float32)}
    return Uploads(jnp.arange(len(values)), rows, {"a": jnp.asarray(weight)}, jax.random.key(0))


def test_the_median_by_hand():
    """Of 1, 2, 9 it is 2; of 1, 9, the second having sent nothing, 5; rows nobody sent stay."""
    values = [[[1.0], [4.0]], [[2.0], [5.0]], [[9.0], [6.0]]]
    server = {"a": jnp.array([[7.0], [7.0]])}
    for weight, expected in (
        ([5.0, 1.0, 1.0], [[2.0], [5.0]]),
        ([5.0, 0.0, 1.0], [[5.0], [5.0]]),
        ([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [[2.0], [7.0]]),
        ([0.0, 0.0, 0.0], [[7.0], [7.0]]),
    ):
        found = combined("median", server, uploads(values, weight))
        np.testing.assert_array_equal(found["a"], expected)
    mean = combined("samples", server, uploads(values, [2.0, 0.0, 1.0]))
    np.testing.assert_allclose(mean["a"], [[11 / 3], [14 / 3]], rtol=1e-6)
    np.testing.assert_array_equal(median(jnp.zeros(()), jnp.array([3.0, 1.0]), jnp.ones(2)), 2.0)


def test_where_nobody_sends_the_server_stays():
    made = programs()
    server = made.method.init_server(jax.random.key(0))
    none = {"row": jnp.zeros(3), "number": jnp.zeros(3), "classes": jnp.zeros((3, 4))}
    parts = {"row": jnp.ones((3, 2)), "number": jnp.ones(3), "classes": jnp.ones((3, 4, 1))}
    key = jax.random.key(1)
    assert same(next_broadcast(made.method, server, np.arange(3), parts, none, key), server)
    one = {**none, "number": jnp.array([0.0, 1.0, 0.0])}
    new = next_broadcast(made.method, server, np.arange(3), parts, one, key)
    np.testing.assert_array_equal(new["sums"], [[0, 0], [1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("method", slow_but([], ["fd", "pfedafm"]))
def test_the_median_equals_the_plain_loop(method):
    """By rows, and of a second stage."""
    about = {"layout": "loop" if method == "fd" else "lockstep", "devices": 2}
    made = programs(method, aggregation="median", **about)
    assert_equals_plain_loop(made)
    if method == "pfedafm":  # and Algorithm 1, written out
        _, server, _ = play(made, [0, 1, 2])
        written, _ = algorithm_1(made).run_round(made.start(), 0, [0, 1, 2])
        assert_close(jax.device_get(written.server), server, rtol=2e-3, atol=2e-5)
    else:
        _, server, _ = play(made, [0, 1, 2])
        assert server["class_known"].tolist() == [1, 1, 1, 0]
        assert not np.any(server["class_scores"][ABSENT])
    single = play(made, [1])[1]
    mean = play(programs(method, **about), [1])[1]
    assert_close(single, mean, rtol=1e-5, atol=1e-6)  # of one it is its own
