"""One suite for all methods: the contract, the engine against a plain loop, every loss by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_but
from small import (
    ABSENT,
    CLASSES,
    METHODS,
    SIZES,
    assert_close,
    play,
    same,
    small_config,
    small_data,
    small_programs,
)
from small import start as start_of

from pfedafm_jax import engine
from pfedafm_jax.config import Config, updated
from pfedafm_jax.engine import build
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import PAPER_METHODS, chosen_methods, method_names
from pfedafm_jax.methods.base import average, weigh
from pfedafm_jax.methods.fedapen import split_adaptability
from pfedafm_jax.presets import presets, with_preset
from pfedafm_jax.reference import plain


def test_all_are_registered_and_all_means_those_of_the_paper():
    assert set(METHODS) <= set(method_names())
    assert chosen_methods("all") == METHODS[:8] == list(PAPER_METHODS)
    assert chosen_methods("all,fedper,pfedafm,fedrep") == METHODS
    with pytest.raises(PfedafmError, match="did you mean fedrep"):
        chosen_methods("all,fedpre")


@pytest.mark.parametrize("method", METHODS)
def test_shapes_stay_numbers_are_finite_and_runs_repeat(method):
    start_clients, start_server = start_of(small_programs(method))
    clients, server, info = play(small_programs(method), [0, 1, 3], [2, 0])
    for old, new in [(start_clients, clients), (start_server, server)]:
        assert jax.tree.map(lambda a: (a.shape, a.dtype), old) == jax.tree.map(
            lambda a: (a.shape, a.dtype), new
        )
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((clients, server)))
    for numbers in info:
        assert numbers["finite"].all()
        assert all(np.all(np.isfinite(values)) for values in numbers.values())
    assert same((clients, server, info), play(small_programs(method), [0, 1, 3], [2, 0]))


@pytest.mark.parametrize("method", METHODS)
def test_clients_that_take_no_part_are_untouched(method):
    start, _ = start_of(small_programs(method))
    clients, _, _ = play(small_programs(method), [1, 3], [3])
    assert same(clients[0], start[0]) and same(clients[2], start[2])
    assert not same(clients[1], start[1]) and not same(clients[3], start[3])


@pytest.mark.parametrize("method", METHODS)
def test_order_of_participants_does_not_matter(method):
    clients, server, _ = play(small_programs(method), [0, 1, 2])
    other_clients, other_server, _ = play(small_programs(method), [2, 0, 1])
    assert_close((clients, server), (other_clients, other_server))


# ----------------------------------------------------------------------------- against a plain loop

# Three of four; two, one of them new; one by itself, which lacks class 2.
ROUNDS = ([2, 0, 1], [1, 3], [0])


def assert_equals_plain_loop(*several) -> None:
    """States, server, numbers of every round and evaluation, of programs that differ in clients a
    step alone."""
    state, results = engine.start(several[0]), []
    for number, participants in enumerate(ROUNDS):
        state, result = plain.run_round(several[0], state, number, participants)
        results.append((jax.device_get(state.server), result.info))
    expected = [state.store.state(client) for client in range(4)], plain.evaluate(several[0], state)
    for programs in several:
        state = engine.start(programs)
        for number, (participants, (server, info)) in enumerate(zip(ROUNDS, results, strict=True)):
            state, result = engine.run_round(programs, state, number, participants)
            assert set(result.info) == set(info)
            assert_close(result.info, info, rtol=5e-4, atol=2e-5)
            assert_close(jax.device_get(state.server), server, rtol=2e-3, atol=2e-5)
        clients = [state.store.state(client) for client in range(4)]
        assert_close((clients, engine.evaluate(programs, state)), expected, rtol=2e-3, atol=2e-5)


PAIRED = ("pfedafm", "fd", "fedkd", "fedapen")


@pytest.mark.parametrize("method", METHODS)
def test_engine_equals_plain_loop(method):
    """One client at a time, and two, with empty slots."""
    both = (
        [small_programs(method), small_programs(method, 2)]
        if method in PAIRED
        else [small_programs(method)]
    )
    assert_equals_plain_loop(*both)


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method not in PAIRED])
def test_engine_equals_plain_loop_two_at_a_time(method):
    assert_equals_plain_loop(small_programs(method, 2))


# With one architecture. The flips must not reach the clean pass that yields the rows.
OPTIONS = {
    "fd, logits": {
        "fd": {"outputs": "logits", "temperature": 2.0},
        "aggregation": "uniform",
        "flip": True,
    },
    "fedproto, nearest": {"preset": "fedproto_htfllib"},
    "fml, sum of both losses": {"preset": "fml_htfllib"},
    "lg_fedavg, other layers": {
        "lg_fedavg": {"shared_layers": ("fc2", "header")},
        "aggregation": "uniform",
    },
    "fedkd, weights": {"preset": "fedkd_htfllib"},
    "fedrep, flipped": {"fedrep": {"head_epochs": 1}, "flip": True},
    "fedkd, no coding": {
        "fedkd": {"coding": "none", "detach_targets": True, "mentee_learning_rate": 0.02}
    },
}


@pytest.mark.parametrize("name", slow_but(["fd, logits"], OPTIONS))
def test_engine_equals_plain_loop_with_options(name):
    config = small_config(name.split(",")[0], architectures=("dense_b",), **OPTIONS[name])
    assert_equals_plain_loop(build(config, *small_data()))


# ----------------------------------------------------------------------------------- losses by hand


def ce(logits, labels):
    """Cross-entropy, mean over samples, in 64 bits."""
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]))


def kl(target, logits):
    """KL(softmax target ‖ softmax logits), mean over samples."""
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (target, logits))
    return float(np.mean(np.sum(p * np.log(p / q), -1)))


def net(architecture, extractor, header, images):
    """(features, logits) in 64 bits."""
    features = np.asarray(architecture.extract(extractor, images), np.float64)
    return features, np.asarray(
        architecture.classify(header, jnp.asarray(features, jnp.float32)), np.float64
    )


def first_loss(method, client, server, update, private, shared, labels):
    """What the first batch of a visit should cost, from (extractor, header, images) -> (features,
    logits)."""
    if method in ("standalone", "lg_fedavg"):
        header = server["header"] if method == "lg_fedavg" else client["header"]
        return ce(private(client["local_extractor"], header)[1], labels)
    if method in (
        "fedper",
        "fedrep",
    ):  # FedRep: of the second phase, under the header that the first one left
        header = client["header"] if method == "fedper" else update.client["header"]
        return ce(shared(server["shared_extractor"], header)[1], labels)
    if method == "pfedafm":
        (mine, _), (theirs, _) = (
            private(client["local_extractor"], client["header"]),
            shared(server["shared_extractor"], client["header"]),
        )
        mixed = 0.25 * mine + 0.75 * theirs
        return ce(
            mixed @ np.asarray(client["header"]["kernel"], np.float64) + client["header"]["bias"],
            labels,
        )
    features, logits = private(client["local_extractor"], client["header"])
    if method == "fd":  # γ = ½; the row of class 0 is known, that of class 1 is not
        rows = np.asarray(server["class_scores"], np.float64)[labels]
        soft = np.log(np.exp(logits).sum(-1)) - np.sum(rows * logits, -1)
        return ce(logits, labels) + 0.5 * np.mean((labels == 0) * soft)
    if method == "fedproto":  # λ = 10
        apart = np.mean((features - np.asarray(server["prototypes"])[labels]) ** 2, -1)
        return ce(logits, labels) + 10 * np.mean((labels == 0) * apart)
    theirs, other = shared(server["shared_model"]["extractor"], server["shared_model"]["header"])
    if method == "fml":  # α = 0.3, β = 0.8
        return (
            0.3 * ce(logits, labels)
            + 0.7 * kl(other, logits)
            + 0.8 * ce(other, labels)
            + 0.2 * kl(logits, other)
        )
    both = ce(logits, labels) + ce(other, labels)
    if method == "fedkd":
        hidden = np.mean((features - theirs @ np.asarray(client["projection"], np.float64)) ** 2)
        return both + (kl(other, logits) + kl(logits, other) + 2 * hidden) / both
    return (
        both + kl(other, logits) + kl(logits, other) + 2 * ce(0.5 * logits + 0.5 * other, labels)
    )  # FedAPEN, λ = ½


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_a_visit_of_one_batch_by_hand(method):
    programs = build(small_config(method, batch_size=64, local_epochs=1), *small_data())
    (client, *_), server = start_of(programs)
    rng = np.random.default_rng(1)
    if method == "pfedafm":
        client["mix"] = np.full_like(client["mix"], 0.25)
    for name in {"class_scores", "prototypes"} & set(server):
        server[name] = rng.dirichlet(np.ones(server[name].shape[1]), CLASSES).astype(np.float32)
        server[{"class_scores": "class_known", "prototypes": "prototype_known"}[name]] = np.float32(
            [1, 0, 1, 0]
        )
    data, architecture, key = (
        plain.data_of(programs, 0),
        programs.architectures[0],
        jax.random.key(3),
    )
    update = plain.client_update(
        programs.method, architecture, key, client, server, data, np.float32(1)
    )
    used = split_adaptability(programs.config.seed, 0.3, data)[1] if method == "fedapen" else data
    rows = np.asarray(used.train)[: int(used.num_train)]
    images = (
        programs.dataset.images[rows] / np.float32(255) - np.float32(programs.dataset.mean)
    ) / np.float32(programs.dataset.std)

    def private(extractor, header):
        return net(architecture, extractor, header, images)

    def shared(extractor, header):
        return net(programs.method.shared, extractor, header, images)

    labels = programs.dataset.labels[rows]
    expected = first_loss(method, client, server, update, private, shared, labels)
    np.testing.assert_allclose(update.info["loss"], expected, rtol=1e-4)
    if (
        method == "pfedafm"
    ):  # the second phase: the small model under the header that the first one left
        header = update.client["header"]
        second = plain.shared_update(
            programs.method, key, {"header": header}, server, data, np.float32(1)
        )
        logits = shared(server["shared_extractor"], header)[1]
        np.testing.assert_allclose(second.info["shared_loss"], ce(logits, labels), rtol=1e-4)


# ----------------------------------------------------------------------------------------- averages

SUMMED = {
    "fedper": "shared_extractor",
    "fedrep": "shared_extractor",
    "pfedafm": "shared_extractor",
    "lg_fedavg": "header",
    "fml": "shared_model",
    "fedapen": "shared_model",
}


@pytest.mark.parametrize("method", SUMMED)
def test_the_average_is_weighted_by_samples_and_of_one_is_its_own(method):
    part, programs = SUMMED[method], small_programs(method)
    alone = [play(programs, [client])[1][part] for client in (0, 1)]
    together = play(programs, [0, 1])[1][part]
    expected = jax.tree.map(
        lambda a, b: (SIZES[0] * a + SIZES[1] * b) / (SIZES[0] + SIZES[1]), *alone
    )
    assert_close(together, expected)
    assert not np.allclose(jax.tree.leaves(together)[-1], jax.tree.leaves(alone[1])[-1], atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rows", "known"),
    [("fd", "class_scores", "class_known"), ("fedproto", "prototypes", "prototype_known")],
)
def test_rows_are_averaged_by_class_counts_and_absent_classes_stay_unknown(method, rows, known):
    (dataset, partition), programs = small_data(), small_programs(method)
    alone = [play(programs, [client])[1][rows] for client in (0, 1)]
    _, server, _ = play(programs, [0, 1])
    count = np.stack(
        [
            np.bincount(dataset.labels[partition.train[client]], minlength=CLASSES)
            for client in (0, 1)
        ]
    )
    total = count.sum(0)
    # A plain mean weighted by counts: not divided by the number of owners once more.
    expected = sum(count[k][:, None] * alone[k] for k in (0, 1)) / np.maximum(total, 1)[:, None]
    np.testing.assert_allclose(server[rows], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(server[known], [1, 1, 1, 0])
    assert not np.any(server[rows][ABSENT])
    np.testing.assert_allclose(
        server[rows][2], alone[1][2], rtol=1e-5, atol=1e-6
    )  # its only owner's own row


def test_a_row_that_nobody_sends_keeps_its_value():
    server = {"rows": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "known": jnp.array([1.0, 0.0])}
    upload, weight = {"rows": jnp.full((2, 2), 9.0), "known": jnp.ones(2)}, jnp.array([0.0, 5.0])
    new = average(
        server, weigh(upload, dict.fromkeys(upload, weight)), dict.fromkeys(upload, weight)
    )
    np.testing.assert_array_equal(new["rows"], [[1, 2], [9, 9]])
    np.testing.assert_array_equal(new["known"], [1, 1])


# ----------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize("preset", presets())
def test_presets_are_valid_and_name_a_method(preset):
    config = with_preset(Config(), preset).check()
    assert config.method in method_names()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"fml": {"alpha": 1.5}}, "fml.alpha = 1.5 cannot be used; accepted: a number from 0 to 1"),
        ({"fedkd": {"t_start": 0.0}}, "fedkd.t_start"),
        ({"fedkd": {"coding": "updates"}}, "did you mean update"),
        ({"fedapen": {"adaptability_fraction": 1.0}}, "fedapen.adaptability_fraction"),
        ({"lg_fedavg": {"shared_layers": ()}}, "lg_fedavg.shared_layers"),
        ({"fd": {"temperature": 0.0}}, "fd.temperature"),
    ],
)
def test_settings_out_of_range_are_refused(own, message):
    with pytest.raises(PfedafmError, match=message):
        updated(Config(), own).check()
