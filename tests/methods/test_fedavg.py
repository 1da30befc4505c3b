"""FedAvg and FedProx: equal to the plain loop, and a step by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    assert_close,
    assert_equals_plain_loop,
    play,
    same,
    small_config,
    small_data,
    start,
)

from pfedafm_jax.engine import build
from pfedafm_jax.methods.fml import shared_logits
from pfedafm_jax.training import cross_entropy


def programs(method, **changes):
    return build(small_config(method, **changes), *small_data())


@pytest.mark.parametrize(("method", "layout"), [("fedavg", "loop"), ("fedprox", "lockstep")])
def test_both_equal_the_plain_loop(method, layout):
    own = {"fedprox": {"mu": 0.5}}
    assert_equals_plain_loop(programs(method, layout=layout, **own))


def test_without_a_pull_fedprox_is_fedavg():
    free = play(programs("fedprox", fedprox={"mu": 0.0}), [0, 1, 2], [3])
    assert_close(free, play(programs("fedavg"), [0, 1, 2], [3]), rtol=1e-6, atol=1e-7)
    assert not same(free[1], play(programs("fedprox", fedprox={"mu": 5.0}), [0, 1, 2], [3])[1])


def test_two_epochs_of_one_batch_by_hand():
    """Client 2 has three images: a batch. Its model moves by the slope, then by slope and pull."""
    made = programs("fedprox", fedprox={"mu": 3.0}, momentum=0.0, weight_decay=0.0, clip_norm=1e9)
    _, server, info = play(made, [2])
    dataset, partition = small_data()
    rows = partition.train[2]
    scaled = dataset.images[rows].astype(np.float32) / 255
    images = (scaled - np.array(dataset.mean, np.float32)) / np.array(dataset.std, np.float32)
    labels, ones = jnp.asarray(dataset.labels[rows]), jnp.ones(len(rows))
    shared = made.method.shared
    received = start(made)[1]["shared_model"]

    def loss(model):
        return cross_entropy(shared_logits(shared, model, jnp.asarray(images)), labels, ones)

    slope, rate = jax.grad(loss), made.config.rate
    once = jax.tree.map(lambda w, g: w - rate * g, received, slope(received))
    pull = jax.tree.map(lambda w, w0: 3.0 * (w - w0), once, received)
    twice = jax.tree.map(lambda w, g, p: w - rate * (g + p), once, slope(once), pull)
    assert_close(server["shared_model"], twice, rtol=1e-4, atol=1e-6)
    apart = jax.tree.map(lambda a, b: float(jnp.sum(jnp.square(a - b))), once, received)
    far = sum(jax.tree.leaves(apart))
    expected = (loss(received) + loss(once) + 1.5 * far) / 2
    np.testing.assert_allclose(info[0]["loss"], [expected], rtol=1e-4)
