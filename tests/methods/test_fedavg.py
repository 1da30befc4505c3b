"""FedAvg and what is made of it: equal to the plain loop, relations, and steps by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    CLASSES,
    SEEN,
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    plain_loop,
    play,
    same,
    small_config,
    small_data,
    start,
    states,
)

from pfedafm_jax.engine.reference import plain
from pfedafm_jax.methods.two_models import shared_logits
from pfedafm_jax.training.losses import cross_entropy


def programs(method, **changes):
    return engine_of(small_config(method, **changes), *small_data())


CASES = {
    "fedavg": ("fedavg", {}),
    "fedprox": ("fedprox", {"layout": "lockstep", "fedprox": {"mu": 0.5}}),
    "priors": ("fedavg_priors", {}),
    "fine-tuned": ("fedavg_finetuned", {}),
    "fine-tuned header": ("fedavg_finetuned", {"fedavg_finetuned": {"finetune": "header"}}),
    "ditto": ("ditto", {"layout": "lockstep", "ditto": {"lambda_near": 0.5}}),
}


@pytest.mark.parametrize("case", CASES)
def test_all_equal_the_plain_loop(case):
    method, settings = CASES[case]
    assert_equals_plain_loop(programs(method, **settings))


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

    slope, rate = jax.grad(loss), made.federation.config.rate
    once = jax.tree.map(lambda w, g: w - rate * g, received, slope(received))
    pull = jax.tree.map(lambda w, w0: 3.0 * (w - w0), once, received)
    twice = jax.tree.map(lambda w, g, p: w - rate * (g + p), once, slope(once), pull)
    assert_close(server["shared_model"], twice, rtol=1e-4, atol=1e-6)
    apart = jax.tree.map(lambda a, b: float(jnp.sum(jnp.square(a - b))), once, received)
    far = sum(jax.tree.leaves(apart))
    expected = (loss(received) + loss(once) + 1.5 * far) / 2
    np.testing.assert_allclose(info[0]["loss"], [expected], rtol=1e-4)


# ------------------------------------------------------------------------------------ class priors


def test_priors_are_the_class_shares_of_training_data_and_uniform_before_a_visit():
    dataset, partition = small_data()
    clients, _, _ = play(programs("fedavg_priors"), [0, 2])
    for client in (0, 2):
        labels = dataset.labels[partition.train[client]]
        shares = np.bincount(labels, minlength=CLASSES) / len(labels)
        assert set(np.flatnonzero(shares)) == set(SEEN[client])
        expected = np.log(np.maximum(shares, 1e-4))
        np.testing.assert_allclose(clients[client]["log_prior"], expected, rtol=1e-5)
    np.testing.assert_allclose(clients[1]["log_prior"], np.full(CLASSES, -np.log(CLASSES)))


def test_priors_move_the_loss_and_the_prediction_by_hand():
    """At a rate of 0 every batch meets the same model: the loss is CE(z + log π, y)."""
    dataset, partition = small_data()
    made = programs("fedavg_priors", learning_rate=0.0)
    clients, server, info = play(made, [2])
    rows = partition.train[2]
    scores = plain.predict(
        made.method, made.method.shared, clients[2], server, dataset.images[rows]
    )
    np.testing.assert_allclose(
        scores["under_priors"], scores["shared"] + clients[2]["log_prior"][None, :]
    )
    log_softmax = jax.nn.log_softmax(scores["under_priors"])
    picked = np.take_along_axis(np.asarray(log_softmax), dataset.labels[rows][:, None], 1)
    np.testing.assert_allclose(info[0]["loss"], [-picked.mean()], rtol=1e-4)


def test_with_equal_class_shares_priors_change_nothing():
    """A floor above every share makes all of them equal, and the scores shift by one number."""
    flat = {"fedavg_priors": {"prior_floor": 0.999}}
    with_priors = play(programs("fedavg_priors", **flat), [2], [2])[1]
    assert_close(with_priors, play(programs("fedavg"), [2], [2])[1], rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- fine-tuning


@pytest.mark.parametrize("part", ["model", "header"])
def test_fine_tuning_changes_nothing_but_what_is_judged(part):
    rounds = [0, 1, 2], [3]
    tuned = programs("fedavg_finetuned", fedavg_finetuned={"finetune": part})
    clients, server, info = play(tuned, *rounds)
    plain_clients, plain_server, plain_info = play(programs("fedavg"), *rounds)
    assert same((clients, server), (plain_clients, plain_server))
    for one, other in zip(info, plain_info, strict=True):
        np.testing.assert_array_equal(one["accuracy/finetuned"], other["accuracy/shared"])
    state = tuned.start()
    state, _ = tuned.run_round(state, 0, rounds[0])
    before = states(state), jax.device_get(state.server)
    assert same(tuned.evaluate(state), tuned.evaluate(state))
    assert same(before, (states(state), jax.device_get(state.server)))


def test_a_fine_tuned_header_leaves_the_extractor_and_costs_a_third_of_its_passes():
    made = programs("fedavg_finetuned", fedavg_finetuned={"finetune": "header"})
    _, server, _ = play(made, [0, 1, 2])
    data = plain_loop(made).data_of(1)
    key = jax.random.key(5)
    _, tuned = plain.adapt(made.method, made.method.shared, key, {}, server, data)
    assert same(tuned["shared_model"]["extractor"], server["shared_model"]["extractor"])
    assert not same(tuned["shared_model"]["header"], server["shared_model"]["header"])
    shared, epochs = made.method.shared, made.federation.config.local_epochs
    flops = 2 * (shared.extractor_macs + 3 * shared.header_macs) * 15 * epochs
    assert made.method.adaptation_flops(shared, 15) == flops


# -------------------------------------------------------------------------------------------- Ditto


def test_without_a_pull_ditto_is_standalone():
    everyone = {"architectures": ("dense_b",)}
    free = play(programs("ditto", ditto={"lambda_near": 0.0}, **everyone), [0, 1, 2], [3, 0])
    alone = play(programs("standalone", **everyone), [0, 1, 2], [3, 0])
    for private, own in zip(free[0], alone[0], strict=True):
        assert_close(private["extractor"], own["local_extractor"], rtol=1e-6, atol=1e-7)
        assert_close(private["header"], own["header"], rtol=1e-6, atol=1e-7)
    drawn = play(programs("ditto", ditto={"lambda_near": 5.0}, **everyone), [0, 1, 2], [3, 0])
    assert not same(drawn[0], free[0]) and same(drawn[1], free[1])


def test_ditto_pulls_private_models_towards_the_received_one():
    def distance(pull):
        clients, _, _ = play(programs("ditto", ditto={"lambda_near": pull}), [0], [0])
        received = play(programs("ditto", ditto={"lambda_near": pull}), [0])[1]["shared_model"]
        apart = jax.tree.map(lambda a, b: np.sum((a - b) ** 2), clients[0], received)
        return sum(jax.tree.leaves(apart))

    assert distance(20.0) < distance(0.0)
