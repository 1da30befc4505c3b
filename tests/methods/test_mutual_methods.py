"""FedKD: what coding keeps and what travels; FedAPEN: the adaptability set and the weight learned
on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    CLASSES,
    WIDTH,
    assert_close,
    engine_of,
    play,
    real,
    small_config,
    small_data,
    small_programs,
)
from small import start as start_of

from pfedafm_jax.methods.fedapen import FedAPEN, split_adaptability
from pfedafm_jax.methods.fedkd import FedKD, code_matrix, send
from pfedafm_jax.models.architecture import describe
from pfedafm_jax.training.batches import ClientData


@pytest.mark.parametrize("energy", [0.95, 0.98])
def test_a_fresh_header_of_ten_classes_is_sent_raw_and_not_as_zeros(energy):
    header = jax.random.uniform(jax.random.key(0), (500, 10), minval=-0.04, maxval=0.04)
    decoded, floats = code_matrix(header, jnp.float32(energy))
    np.testing.assert_array_equal(decoded, header)
    assert floats == 5_000


@pytest.mark.parametrize(("energy", "rank"), [(0.5, 1), (0.64, 1), (0.9, 2), (0.95, 3), (0.999, 3)])
def test_the_smallest_rank_that_holds_the_energy(energy, rank):
    # Squared singular values 9, 4, 1 of 14: one holds 64.3 %, two hold 92.9 %.
    matrix = np.zeros((20, 30), np.float32)
    matrix[[0, 1, 2], [5, 3, 9]] = 3, 2, 1
    decoded, floats = code_matrix(jnp.array(matrix), jnp.float32(energy))
    expected = np.where(matrix >= 4 - rank, matrix, 0)
    np.testing.assert_allclose(decoded, expected, atol=1e-5)
    assert floats == rank * 51


def test_coding_of_biases_kernels_and_nothing_at_all():
    bias, zero = jnp.arange(7.0), jnp.zeros((20, 30))
    decoded, floats = code_matrix(bias, jnp.float32(0.5))
    np.testing.assert_array_equal(decoded, bias)
    assert floats == 7
    decoded, floats = code_matrix(zero, jnp.float32(0.95))
    assert not np.any(decoded) and floats == 51  # rank one, and no division by zero
    outer = jnp.outer(jnp.arange(75.0), jnp.arange(16.0))
    decoded, floats = code_matrix(1e-25 * outer.reshape(5, 5, 3, 16), jnp.float32(0.95))
    assert floats == 75 + 16 + 1
    np.testing.assert_allclose(1e25 * decoded.reshape(75, 16), outer, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("shape", [(40, 12), (12, 40), (5, 5, 3, 16)])
def test_coding_equals_a_truncated_svd(shape):
    decay = 0.7 ** jnp.arange(shape[-1], dtype=jnp.float32)
    leaf = jax.random.normal(jax.random.key(3), shape)
    leaf = leaf * decay.reshape((1,) * (len(shape) - 1) + (-1,))
    matrix = np.asarray(leaf, np.float64).reshape(-1, shape[-1])
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    rank = 1 + int(np.searchsorted(np.cumsum(values**2) / np.sum(values**2), 0.95))
    decoded, floats = code_matrix(leaf, jnp.float32(0.95))
    assert floats == rank * (sum(matrix.shape) + 1) < matrix.size
    truncated = (left[:, :rank] * values[:rank]) @ right[:rank]
    np.testing.assert_allclose(decoded.reshape(matrix.shape), truncated, rtol=1e-3, atol=1e-4)


def test_updates_are_coded_and_not_weights():
    known = {"kernel": jax.random.normal(jax.random.key(1), (20, 30)), "bias": jnp.zeros(30)}
    update = jnp.outer(jnp.arange(20.0), jnp.arange(30.0)) / 100
    model = {"kernel": known["kernel"] + update, "bias": jnp.ones(30)}
    energy = jnp.float32(0.9)
    received, floats = send("update", known, model, energy)
    assert_close(received, model)
    assert floats == 51 + 30
    received, floats = send("none", known, model, energy)
    assert received is model and floats == 630
    received, floats = send("weight", known, model, jnp.float32(0.5))
    assert floats < 630 and not np.allclose(received["kernel"], model["kernel"], atol=1e-2)


def test_the_threshold_rises_to_its_end():
    method = real("fedkd", 10, rounds=10)
    assert isinstance(method, FedKD)
    for number, expected in [(0, 0.953), (4, 0.965), (9, 0.98), (50, 0.98)]:
        found = method.energy({"round": jnp.float32(number)})
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_returning_client_receives_what_it_missed_or_the_whole_model():
    method = real("fedkd", 10)
    assert isinstance(method, FedKD)

    def received(visited, had, sent):
        client = {"visited": jnp.float32(visited), "floats_received": jnp.uint32(had)}
        server = {"floats_sent": jnp.uint32(sent), "floats_last": jnp.uint32(5)}
        return int(method.floats_down(client, server))

    assert received(0, 0, 0) == 670_058
    assert received(1, 1_000, 301_000) == 300_000
    assert received(1, 0, 900_000) == 670_058
    assert received(1, 2**32 - 100, 200) == 300  # the counter has wrapped around


def test_fedkd_counts_what_travels_and_the_server_moves_by_the_coded_mean():
    _, server, info = play(small_programs("fedkd"), [0, 1], [0, 3])
    whole = describe("dense_b", CLASSES, (3, 3, 1), WIDTH).params
    np.testing.assert_array_equal(info[0]["floats_down"], whole)
    assert info[1]["floats_down"][1] == whole  # a first visit
    assert info[1]["floats_down"][0] <= whole and server["round"] == 2
    sent = np.concatenate([numbers["floats_up"] for numbers in info])
    assert np.all((sent > 0) & (sent <= whole))


def numbered_data(num: int, longest: int) -> ClientData:
    rows = jnp.zeros(longest, jnp.int32).at[:num].set(jnp.arange(100, 100 + num, dtype=jnp.int32))
    images, labels = jnp.zeros((200, 1, 1, 1), jnp.uint8), jnp.zeros(200, jnp.int32)
    return ClientData(images, labels, rows, jnp.int32(num), rows, jnp.int32(num))


@pytest.mark.parametrize(("num", "apart"), [(60, 3), (5, 1), (2, 1), (1, 0), (0, 0)])
def test_the_adaptability_set_is_apart_and_does_not_depend_on_padding(num, apart):
    found = []
    for longest in (max(num, 1), 70):
        small, rest = split_adaptability(7, 0.05, numbered_data(num, longest))
        assert (int(small.num_train), int(rest.num_train)) == (apart, num - apart)
        ours, theirs = set(small.train[:apart].tolist()), set(rest.train[: num - apart].tolist())
        assert not ours & theirs and ours | theirs == set(range(100, 100 + num))
        found.append(ours)
    assert found[0] == found[1]  # the same at any length


def learned_weight(private_scores, start: float, learning_rate: float, epochs: int) -> float:
    """λ after learning on two samples of class 0, where the shared model scores both classes
    alike."""
    own = {"lambda_learning_rate": learning_rate, "lambda_epochs": epochs}
    programs = engine_of(small_config("fedapen", fedapen=own), *small_data())
    method, ((client, *_), server) = programs.method, start_of(programs)
    assert isinstance(method, FedAPEN)
    client, server = jax.tree.map(jnp.zeros_like, (client, server))
    client["header"]["bias"] = jnp.array(private_scores, jnp.float32)
    client["ensemble_weight"] = jnp.float32(start)
    images, labels = jnp.zeros((2, 3, 3, 1), jnp.uint8), jnp.zeros(2, jnp.int32)
    rows = jnp.arange(2, dtype=jnp.int32), jnp.int32(2)
    work = (
        programs.federation.architectures[0],
        client,
        server,
        ClientData(images, labels, *rows, *rows),
    )
    return float(method.learn_weight(jax.random.key(0), *work))


def test_one_step_of_the_ensemble_weight_by_hand():
    # Scores (2λ, 0, 0, 0) for class 0: dCE/dλ = -2 (1 - p), p = e^{2λ} / (e^{2λ} + 3); two epochs
    # of one batch.
    weight = 0.5
    for _ in range(2):
        share = np.exp(2 * weight) / (np.exp(2 * weight) + 3)
        weight += 0.01 * 2 * (1 - share)
    np.testing.assert_allclose(learned_weight([2.0, 0, 0, 0], 0.5, 0.01, 2), weight, rtol=1e-5)
    # It stays between zero and one.
    assert learned_weight([9.0, 0, 0, 0], 0.5, 1000.0, 3) == 1.0
    assert learned_weight([-9.0, 0, 0, 0], 0.5, 1000.0, 3) == 0.0


def test_the_ensemble_weight_is_learned_from_the_second_visit_on():
    clients, _, info = play(small_programs("fedapen"), [0, 1], [1, 3], [1])
    assert info[0]["ensemble_weight"].tolist() == [0.5, 0.5]
    assert info[1]["ensemble_weight"][0] != 0.5 and info[1]["ensemble_weight"][1] == 0.5
    assert clients[1]["ensemble_weight"] == info[2]["ensemble_weight"][0]
    assert clients[0]["ensemble_weight"] == 0.5


def test_fedapen_predicts_with_the_ensemble_first():
    programs = small_programs("fedapen")
    clients, server, _ = play(programs, [0, 1])
    client = {**clients[0], "ensemble_weight": jnp.float32(0.25)}
    work = programs.federation.architectures[0], client, server, jnp.ones((1, 3, 3, 1))
    scores = programs.method.predict(*work)
    assert list(scores) == ["ensemble", "private", "shared", "equal"]
    for name, weight in (("ensemble", 0.25), ("equal", 0.5)):
        mixed = weight * scores["private"] + (1 - weight) * scores["shared"]
        np.testing.assert_allclose(scores[name], mixed, rtol=1e-5)


@pytest.mark.parametrize(("platform", "shape"), [("cpu", "64x64"), ("cuda", "3x64x64")])
def test_clients_together_are_decomposed_one_by_one_on_a_cpu(platform, shape):
    """Batched calls of LAPACK in one program can wait for one another for ever."""
    code = jax.jit(jax.vmap(lambda one: code_matrix(one, jnp.float32(0.9))))
    program = code.trace(jnp.ones((3, 80, 64))).lower(lowering_platforms=(platform,)).as_text()
    calls = [line for line in program.splitlines() if "syevd" in line and "custom_call" in line]
    assert len(calls) == 1 and f"(tensor<{shape}xf32>) ->" in calls[0]
