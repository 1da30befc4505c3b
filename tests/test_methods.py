"""One contract suite for all methods, and each method's own rules worked out by hand."""

import copy
import dataclasses
from functools import cache

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import slow_but

from pfedafm_jax.config import Config, presets, updated, with_preset
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.engine import Federation
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import PAPER_METHODS, chosen_methods, find_method, method_names
from pfedafm_jax.methods.base import Method, average, weigh
from pfedafm_jax.methods.fedapen import FedAPEN, split_adaptability
from pfedafm_jax.methods.fedkd import FedKD, code_matrix, send
from pfedafm_jax.methods.fedproto import nearest_prototype
from pfedafm_jax.models import describe, register_extractor
from pfedafm_jax.reference import ALGORITHMS, Reference
from pfedafm_jax.training import ClientData, LocalTraining

METHODS = ["pfedafm", "standalone", "lg_fedavg", "fd", "fedproto", "fml", "fedkd", "fedapen", "fedper", "fedrep"]
# Uneven clients: 2 has a single, partial batch of a single class, and nobody has class 3.
SIZES, SEEN = (11, 15, 3, 7), ((0, 1), (0, 1, 2), (2,), (1, 2))
CLASSES, ABSENT, WIDTH = 4, 3, 6
# Three of four; two, one of them new; one by itself, which lacks class 2.
ROUNDS = ([2, 0, 1], [1, 3], [0])
# Settings under which more happens than by default: strong coding, a weight that moves, unlike halves of a loss.
OWN = {
    "fd": {"temperature": 0.5, "gamma": 0.5},
    "fedproto": {"lambda_mse": 10.0},
    "fml": {"alpha": 0.3, "beta": 0.8},
    "fedkd": {"t_start": 0.5, "t_end": 0.8},
    "fedapen": {"lambda_learning_rate": 0.5, "lambda_epochs": 3, "adaptability_fraction": 0.3},
    "fedrep": {"head_epochs": 3},
}


class Dense(nn.Module):
    """Two dense layers: the smallest thing that is an extractor."""

    hidden: int
    features: int = WIDTH

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(nn.Dense(self.hidden, name="fc1")(images.reshape(images.shape[0], -1)))
        return nn.relu(nn.Dense(self.features, name="fc2")(hidden))


register_extractor("dense_a", Dense(hidden=8))
register_extractor("dense_b", Dense(hidden=5))


def base_config(method: str, preset: str | None = None, **changes) -> Config:
    """Two architectures, three of four clients a round, batches of 4."""
    settings = {
        "method": method,
        "num_clients": 4,
        "participation": 0.75,
        "architectures": ("dense_a", "dense_b"),
        "shared_extractor": "dense_b",
        "feature_size": WIDTH,
        "local_epochs": 2,
        "batch_size": 4,
        "rounds": 4,
        "devices": 1,
    }
    own = {method: OWN[method]} if method in OWN else {}
    config = with_preset(Config(), preset) if preset else updated(Config(), own)
    return updated(config, {**settings, **changes}).check()


@cache
def small_data():
    rng = np.random.default_rng(0)
    labels = np.arange(120) % CLASSES
    images = (rng.integers(0, 60, (120, 3, 3, 1)) + 60 * labels[:, None, None, None]).astype(np.uint8)
    dataset = dataset_from_arrays("small", images, labels, images[:1], labels[:1], num_classes=CLASSES)
    rows, train, test = np.arange(120, dtype=np.int32), [], []
    for size, seen in zip(SIZES, SEEN, strict=True):
        mine = rows[np.isin(labels[rows], seen)][: size + 5]
        train.append(mine[:size])
        test.append(mine[size:])
        rows = np.setdiff1d(rows, mine)
    return dataset, Partition(tuple(train), tuple(test), tuple(np.zeros(0, np.int32) for _ in SIZES))


class Runner:
    """A compiled federation that can be set back to its start."""

    def __init__(self, config: Config):
        self.federation = Federation(config, *small_data())
        self._start = copy.deepcopy(self.federation.store), self.federation.server

    def run(self, *rounds):
        """(clients' states, server, numbers of each round) after these rounds, given as lists of participants."""
        federation = self.federation
        federation.store, federation.server = copy.deepcopy(self._start[0]), self._start[1]
        info = [federation.run_round(number, participants).info for number, participants in enumerate(rounds)]
        return self.states(), jax.device_get(federation.server), info

    def states(self):
        store = self.federation.store
        return [store.state(client) for client in range(4)]

    def start(self):
        self.federation.store, self.federation.server = copy.deepcopy(self._start[0]), self._start[1]
        return self.states(), jax.device_get(self._start[1])


@cache
def runner(method: str, chunk: int = 1) -> Runner:
    return Runner(base_config(method, clients_per_step=chunk))


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def assert_close(one, other, **tolerance) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **{"rtol": 1e-4, "atol": 1e-5, **tolerance}), one, other)


# ---------------------------------------------------------------------------------------------- the contract


def test_all_are_registered_and_all_means_those_of_the_paper():
    assert sorted(METHODS) == sorted(set(METHODS) & set(method_names())) == sorted(ALGORITHMS)
    assert chosen_methods("all") == METHODS[:8] == list(PAPER_METHODS)
    assert chosen_methods("all,fedper,pfedafm,fedrep") == METHODS
    with pytest.raises(PfedafmError, match="did you mean fedrep"):
        chosen_methods("all,fedpre")


@pytest.mark.parametrize("method", METHODS)
def test_shapes_stay_numbers_are_finite_and_runs_repeat(method):
    start_clients, start_server = runner(method).start()
    clients, server, info = runner(method).run([0, 1, 3], [2, 0])
    for old, new in [(start_clients, clients), (start_server, server)]:
        assert jax.tree.map(lambda a: (a.shape, a.dtype), old) == jax.tree.map(lambda a: (a.shape, a.dtype), new)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((clients, server)))
    for numbers in info:
        assert numbers["finite"].all() and all(np.all(np.isfinite(values)) for values in numbers.values())
    again = runner(method).run([0, 1, 3], [2, 0])
    assert same((clients, server, info), again)


@pytest.mark.parametrize("method", METHODS)
def test_clients_that_take_no_part_are_untouched(method):
    start, _ = runner(method).start()
    clients, _, _ = runner(method).run([1, 3], [3])
    assert same(clients[0], start[0]) and same(clients[2], start[2])
    assert not same(clients[1], start[1]) and not same(clients[3], start[3])


@pytest.mark.parametrize("method", METHODS)
def test_order_of_participants_does_not_matter(method):
    clients, server, _ = runner(method).run([0, 1, 2])
    other_clients, other_server, _ = runner(method).run([2, 0, 1])
    assert_close((clients, server), (other_clients, other_server))


def assert_alike(engine, plain, **tolerance) -> None:
    """The engine's state, where counts are arrays too, against the plain loop's, which may hold more."""
    plain = jax.tree.map(
        lambda there, here: np.asarray(here, there.dtype), engine, {name: plain[name] for name in engine}
    )
    chex.assert_trees_all_close(engine, plain, **{"rtol": 2e-3, "atol": 2e-5, **tolerance})


def assert_equals_plain_loop(config: Config, *runners: Runner) -> None:
    """Start, every round's numbers and server, clients at the end and their evaluation.

    FedKD: the engine codes by eigenvalues in 32 bits, the plain loop by an SVD in 64; ranks, so floats, are the same.
    """
    reference = Reference(config, *small_data())
    starts = [dict(state) for state in (*reference.clients, reference.server)]
    numbers, servers = [], []
    for index, participants in enumerate(ROUNDS):
        numbers.append(reference.run_round(index, participants))
        servers.append(reference.server)
    for one in runners:
        clients, server = one.start()
        for engine, plain in zip([*clients, server], starts, strict=True):  # bit for bit
            assert_alike(engine, plain, rtol=0, atol=0)
        for index in range(len(ROUNDS)):
            clients, server, info = one.run(*ROUNDS[: index + 1])
            assert set(info[index]) == {*numbers[index], "finite"} and np.all(info[index].pop("finite"))
            assert_alike(info[index], numbers[index], rtol=5e-4)
            assert_alike(server, servers[index])
        for engine, plain in zip(clients, reference.clients, strict=True):
            assert_alike(engine, plain)
        scores, plain = one.federation.evaluate(), reference.evaluate()
        assert set(scores) == set(plain)
        assert_alike(scores, plain)


PAIRED = ("pfedafm", "fd", "fedkd", "fedapen")


@pytest.mark.parametrize("method", METHODS)
def test_engine_equals_plain_loop(method):
    """One client at a time, and two, with empty slots."""
    both = (runner(method), runner(method, 2)) if method in PAIRED else (runner(method),)
    assert_equals_plain_loop(base_config(method), *both)


@pytest.mark.slow
@pytest.mark.parametrize("method", [method for method in METHODS if method not in PAIRED])
def test_engine_equals_plain_loop_two_at_a_time(method):
    assert_equals_plain_loop(base_config(method), runner(method, 2))


# With one architecture. The flips must not reach the clean pass that yields the rows.
OPTIONS = {
    "lg_fedavg, other layers": {"lg_fedavg": {"shared_layers": ("fc2", "header")}, "aggregation": "uniform"},
    "fd, logits": {"fd": {"outputs": "logits", "temperature": 2.0}, "aggregation": "uniform", "flip": True},
    "fedproto, nearest": {"preset": "fedproto_htfllib", "aggregation": "last"},
    "fml, sum of both losses": {"preset": "fml_htfllib"},
    "fedkd, weights": {"preset": "fedkd_htfllib"},
    "fedrep, flipped": {"fedrep": {"head_epochs": 1}, "flip": True},
    "fedkd, no coding": {"fedkd": {"coding": "none", "detach_targets": True, "mentee_learning_rate": 0.02}},
}


USUAL = ("fd, logits", "fedproto, nearest", "fml, sum of both losses")


@pytest.mark.parametrize("name", slow_but(USUAL, OPTIONS))
def test_engine_equals_plain_loop_with_options(name):
    config = base_config(name.split(",")[0], architectures=("dense_b",), **OPTIONS[name])
    assert_equals_plain_loop(config, Runner(config))


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
    part = SUMMED[method]
    alone = [runner(method).run([client])[1][part] for client in (0, 1)]
    together = runner(method).run([0, 1])[1][part]
    expected = jax.tree.map(lambda a, b: (SIZES[0] * a + SIZES[1] * b) / (SIZES[0] + SIZES[1]), *alone)
    assert_close(together, expected)
    assert not np.allclose(jax.tree.leaves(together)[-1], jax.tree.leaves(alone[1])[-1], atol=1e-6)


@pytest.mark.parametrize(
    ("method", "rows", "known"),
    [
        ("fd", "class_scores", "class_known"),
        ("fedproto", "prototypes", "prototype_known"),
    ],
)
def test_rows_are_averaged_by_class_counts_and_absent_classes_stay_unknown(method, rows, known):
    dataset, partition = small_data()
    alone = [runner(method).run([client])[1][rows] for client in (0, 1)]
    _, server, _ = runner(method).run([0, 1])
    count = np.stack([np.bincount(dataset.labels[partition.train[client]], minlength=CLASSES) for client in (0, 1)])
    total = count.sum(0)
    # A plain mean weighted by counts: not divided by the number of owners once more.
    expected = sum(count[k][:, None] * alone[k] for k in (0, 1)) / np.maximum(total, 1)[:, None]
    np.testing.assert_allclose(server[rows], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(server[known], [1, 1, 1, 0])
    assert not np.any(server[rows][ABSENT])
    np.testing.assert_allclose(server[rows][2], alone[1][2], rtol=1e-5, atol=1e-6)  # its only owner's own row


def test_a_row_that_nobody_sends_keeps_its_value():
    server = {"rows": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "known": jnp.array([1.0, 0.0])}
    upload, weight = {"rows": jnp.full((2, 2), 9.0), "known": jnp.ones(2)}, jnp.array([0.0, 5.0])
    new = average(server, weigh(upload, dict.fromkeys(upload, weight)), dict.fromkeys(upload, weight))
    np.testing.assert_array_equal(new["rows"], [[1, 2], [9, 9]])
    np.testing.assert_array_equal(new["known"], [1, 1])


# ---------------------------------------------------------------------------------------------- what it costs

HOW = LocalTraining(64, 64, 10, 0.01, 0.9, 1e-3, 50.0, mean=(0.5,) * 3, std=(0.25,) * 3)


def real(name: str, classes: int, **changes) -> Method:
    """A method on the paper's networks."""
    config = updated(Config(), {"method": name, "local_epochs": 10, **changes})
    return find_method(name)(config, HOW, describe("cnn5", classes))


@pytest.mark.parametrize("architecture", ["cnn1", "cnn3", "cnn5"])
@pytest.mark.parametrize(
    ("method", "up10", "up100"),
    [
        ("standalone", 0, 0),
        ("lg_fedavg", 5_010, 50_100),
        ("fd", 20, 1_000),
        ("fedproto", 1_000, 5_000),
        ("fml", 670_058, 715_148),
        ("fedkd", 670_058, 715_148),
        ("fedapen", 670_058, 715_148),
        ("pfedafm", 665_048, 665_048),
        ("fedper", 665_048, 665_048),
        ("fedrep", 665_048, 665_048),
    ],
)
def test_floats_of_a_visit(method, architecture, up10, up100):
    for classes, seen, floats in [(10, 2, up10), (100, 10, up100)]:
        cost = real(method, classes).cost(describe(architecture, classes), 400.0, seen)
        assert (cost.floats_up, cost.floats_down) == (floats, floats)


def test_floats_of_whole_tables_and_other_shared_layers():
    cnn1 = {classes: describe("cnn1", classes) for classes in (10, 100)}
    for method, table in [("fd", {10: 100, 100: 10_000}), ("fedproto", {10: 5_000, 100: 50_000})]:
        for classes, floats in table.items():
            whole = real(method, classes, **{method: {"whole_table": True}})
            assert whole.cost(cnn1[classes], 400.0, 2).floats_down == floats
    by_prototype = real("fedproto", 10, fedproto={"judged": "prototype"})
    assert by_prototype.cost(cnn1[10], 400.0, 2).floats_down == 5_000
    for layers, floats in [(("fc2", "header"), {10: 1_005_510, 100: 1_050_600}), (("conv1", "conv2"), {10: 14_048})]:
        for classes, expected in floats.items():
            method = real("lg_fedavg", classes, lg_fedavg={"shared_layers": layers})
            assert method.cost(cnn1[classes], 400.0, 2).floats_up == expected


def test_flops_of_a_visit():
    f, g, n, epochs = 4_826_000, 2_876_000, 400.0, 10
    macs = {
        "standalone": 3 * f * n * epochs,
        "lg_fedavg": 3 * f * n * epochs,
        "fd": (3 * epochs + 1) * f * n,
        "fedproto": (3 * epochs + 1) * f * n,
        "fml": 3 * (f + g) * n * epochs,
        "fedkd": 3 * (f + g) * n * epochs,
        "fedapen": 3 * (f + g) * (n - 20) * epochs + (f + g) * 20 * 10,
        "pfedafm": (3 * f + 4 * g) * n * epochs,
        "fedper": 3 * g * n * epochs,
        "fedrep": 3 * g * n * epochs + (g - 5_000 + 3 * 5_000) * n * 10,
    }
    for method, expected in macs.items():
        cost = real(method, 10).cost(describe("cnn1", 10), n, 2)
        np.testing.assert_allclose(cost.flops, 2 * expected, rtol=1e-3)


# ---------------------------------------------------------------------------------------------- LG-FedAvg


def test_lg_fedavg_starts_from_the_received_header_and_judges_both():
    clients, server, _ = runner("lg_fedavg").run([0, 1])
    method, architecture = runner("lg_fedavg").federation.method, runner("lg_fedavg").federation.architectures[0]
    scores = method.predict(architecture, clients[0], server, jnp.ones((1, 3, 3, 1)))
    assert list(scores) == ["own", "aggregated"] and not np.allclose(scores["own"], scores["aggregated"])
    swapped = method.predict(architecture, {**clients[0], "header": server["header"]}, server, jnp.ones((1, 3, 3, 1)))
    np.testing.assert_array_equal(swapped["own"], scores["aggregated"])


def test_lg_fedavg_shares_other_layers_where_shapes_allow():
    layers = {"shared_layers": ("fc2", "header")}
    homogeneous = real("lg_fedavg", 10, architectures=("cnn1",), lg_fedavg=layers)
    shapes = jax.eval_shape(homogeneous.init_server, jax.random.key(0))
    assert shapes["fc2"]["kernel"].shape == (2000, 500)
    with pytest.raises(PfedafmError, match=r"shared_layers.*fc2 differs in cnn1 and cnn3"):
        real("lg_fedavg", 10, architectures=("cnn1", "cnn3"), lg_fedavg=layers).init_server(jax.random.key(0))
    with pytest.raises(PfedafmError, match=r"fc9.*accepted: layers of cnn1: header, conv1"):
        real("lg_fedavg", 10, lg_fedavg={"shared_layers": ("fc9",)}).init_server(jax.random.key(0))


# ---------------------------------------------------------------------------------------------- FD and FedProto


def test_fd_rows_are_probabilities_and_logits_become_probabilities():
    _, server, _ = runner("fd").run([0, 1, 3])
    np.testing.assert_allclose(server["class_scores"][:3].sum(-1), 1.0, rtol=1e-5)
    by_logits = real("fd", 10, fd={"outputs": "logits", "temperature": 2.0})
    table = jnp.array([[2.0, 0.0], [0.0, -2.0]])
    expected = np.exp(1) / (1 + np.exp(1))
    np.testing.assert_allclose(by_logits.targets(table), [[expected, 1 - expected]] * 2, rtol=1e-6)  # pyright: ignore


@pytest.mark.parametrize("aggregation", slow_but(["samples"], ["samples", "last"]))
def test_fd_leaves_a_client_out_of_the_rows_it_receives(aggregation):
    """Against a loop that averages the others' rows; at last client 0 alone is behind its rows, and they are masked."""
    own = {"leave_one_out": True, "gamma": 2.0}
    config = base_config("fd", architectures=("dense_b",), fd=own, aggregation=aggregation, rounds=5)
    rounds = ([2, 0, 1], [1, 3], [0], [0], [3, 1])
    reference, engine = Reference(config, *small_data()), Runner(config)
    numbers = [reference.run_round(index, participants) for index, participants in enumerate(rounds)]
    clients, server, info = engine.run(*rounds)
    for here, there in zip(info, numbers, strict=True):
        np.testing.assert_allclose(here["loss"], there["loss"], rtol=5e-4)
    for name in ("class_scores", "class_known"):
        assert_alike({name: server[name]}, reference.server)
    for here, there in zip(clients, reference.clients, strict=True):
        assert_alike({name: here[name] for name in ("local_extractor", "header")}, there)


def test_a_row_of_a_single_owner_is_masked():
    method = real("fd", CLASSES, fd={"leave_one_out": True})
    server = {
        "class_scores": jnp.full((CLASSES, CLASSES), 0.25),
        "class_known": jnp.ones(CLASSES),
        "class_weight": jnp.array([5.0, 9.0, 4.0, 7.0]),
        "class_renewal": jnp.array([1.0, 1.0, 2.0, 1.0]),
    }
    sent = {
        "rows": jnp.tile(jnp.array([[1.0, 0.0, 0.0, 0.0]]), (CLASSES, 1)),
        "weight": jnp.array([5.0, 3.0, 4.0, 0.0]),
        "renewal": jnp.ones(CLASSES),
    }
    rows, known = method.received({"sent": sent}, server)
    assert known.tolist() == [0.0, 1.0, 1.0, 1.0]  # all of row 0 is the client's own; row 2 was renewed without it
    np.testing.assert_allclose(rows[1], (9 * 0.25 - 3 * np.array([1.0, 0, 0, 0])) / 6, rtol=1e-6)
    np.testing.assert_allclose(rows[2:], 0.25)


def test_without_known_rows_fd_and_fedproto_train_like_standalone():
    alone, _, _ = runner("standalone").run([0, 1, 2])
    for method in ("fd", "fedproto"):
        clients, _, _ = runner(method).run([0, 1, 2])
        assert_close(clients, alone, rtol=1e-5, atol=1e-6)
        later, _, _ = runner(method).run([0, 1], [0])
        plain, _, _ = runner("standalone").run([0, 1], [0])
        assert not np.allclose(later[0]["header"]["kernel"], plain[0]["header"]["kernel"], atol=1e-6)


def test_nearest_prototype_by_hand():
    prototypes = jnp.array([[0.0, 0.0], [1.0, 1.0], [3.0, 0.0]])
    features = jnp.array([[0.9, 0.8], [2.5, 0.1], [0.1, 0.0]])
    assert nearest_prototype(features, prototypes, jnp.ones(3)).argmax(-1).tolist() == [1, 2, 0]
    assert nearest_prototype(features, prototypes, jnp.array([0.0, 1.0, 1.0])).argmax(-1).tolist() == [1, 2, 1]


@pytest.mark.parametrize("judged", ["header", "prototype"])
def test_fedproto_judges_both_ways_and_falls_back_to_the_header(judged):
    federation = runner("fedproto").federation
    method = dataclasses.replace(federation.method, config=base_config("fedproto", fedproto={"judged": judged}))
    clients, server = runner("fedproto").start()
    scores = method.predict(federation.architectures[0], clients[0], server, jnp.ones((2, 3, 3, 1)))
    assert next(iter(scores)) == judged and set(scores) == {"header", "prototype"}
    np.testing.assert_array_equal(scores["prototype"], scores["header"])


# ---------------------------------------------------------------------------------------------- FedKD


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
    leaf = jax.random.normal(jax.random.key(3), shape) * decay.reshape((1,) * (len(shape) - 1) + (-1,))
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
        np.testing.assert_allclose(method.energy({"round": jnp.float32(number)}), expected, rtol=1e-6)


def test_a_returning_client_receives_what_it_missed_or_the_whole_model():
    method = real("fedkd", 10)
    assert isinstance(method, FedKD)

    def received(visited, had, sent):
        client = {"visited": jnp.float32(visited), "floats_received": jnp.uint32(had)}
        return int(method.floats_down(client, {"floats_sent": jnp.uint32(sent), "floats_last": jnp.uint32(5)}))

    assert received(0, 0, 0) == 670_058
    assert received(1, 1_000, 301_000) == 300_000
    assert received(1, 0, 900_000) == 670_058
    assert received(1, 2**32 - 100, 200) == 300  # the counter has wrapped around


def test_fedkd_counts_what_travels_and_the_server_moves_by_the_coded_mean():
    _, server, info = runner("fedkd").run([0, 1], [0, 3])
    whole = describe("dense_b", CLASSES, (3, 3, 1), WIDTH).params
    np.testing.assert_array_equal(info[0]["floats_down"], whole)
    assert info[1]["floats_down"][1] == whole  # a first visit
    assert info[1]["floats_down"][0] <= whole and server["round"] == 2
    assert all(np.all((numbers["floats_up"] > 0) & (numbers["floats_up"] <= whole)) for numbers in info)


# ---------------------------------------------------------------------------------------------- FedAPEN


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
    """λ after learning on two samples of class 0, where the shared model scores both classes alike."""
    config = base_config("fedapen", fedapen={"lambda_learning_rate": learning_rate, "lambda_epochs": epochs})
    federation = runner("fedapen").federation
    method = dataclasses.replace(federation.method, config=config)
    assert isinstance(method, FedAPEN)
    zero = jax.tree.map(jnp.zeros_like, federation.server["shared_model"])
    clients, _ = runner("fedapen").start()
    client = jax.tree.map(jnp.zeros_like, clients[0])
    client["header"]["bias"] = jnp.array(private_scores, jnp.float32)
    client["ensemble_weight"] = jnp.float32(start)
    images, labels = jnp.zeros((2, 3, 3, 1), jnp.uint8), jnp.zeros(2, jnp.int32)
    rows = jnp.arange(2, dtype=jnp.int32)
    data = ClientData(images, labels, rows, jnp.int32(2), rows, jnp.int32(2))
    key = jax.random.key(0)
    return float(method.learn_weight(key, federation.architectures[0], client, {"shared_model": zero}, data))


def test_one_step_of_the_ensemble_weight_by_hand():
    # Scores (2λ, 0, 0, 0) for class 0: dCE/dλ = -2 (1 - p), p = e^{2λ} / (e^{2λ} + 3); two batches of one sample.
    weight = 0.5
    for _ in range(2):
        share = np.exp(2 * weight) / (np.exp(2 * weight) + 3)
        weight += 0.01 * 2 * (1 - share)
    np.testing.assert_allclose(learned_weight([2.0, 0, 0, 0], 0.5, 0.01, 1), weight, rtol=1e-5)


def test_the_ensemble_weight_stays_between_zero_and_one():
    assert learned_weight([9.0, 0, 0, 0], 0.5, 1000.0, 3) == 1.0
    assert learned_weight([-9.0, 0, 0, 0], 0.5, 1000.0, 3) == 0.0


def test_the_ensemble_weight_is_learned_from_the_second_visit_on():
    clients, _, info = runner("fedapen").run([0, 1], [1, 3], [1])
    assert info[0]["ensemble_weight"].tolist() == [0.5, 0.5]
    assert info[1]["ensemble_weight"][0] != 0.5 and info[1]["ensemble_weight"][1] == 0.5
    assert clients[1]["ensemble_weight"] == info[2]["ensemble_weight"][0] and clients[0]["ensemble_weight"] == 0.5


def test_fedapen_predicts_with_the_ensemble_first():
    federation = runner("fedapen").federation
    clients, server, _ = runner("fedapen").run([0, 1])
    client = {**clients[0], "ensemble_weight": jnp.float32(0.25)}
    scores = federation.method.predict(federation.architectures[0], client, server, jnp.ones((1, 3, 3, 1)))
    assert list(scores) == ["ensemble", "private", "shared", "equal"]
    np.testing.assert_allclose(scores["ensemble"], 0.25 * scores["private"] + 0.75 * scores["shared"], rtol=1e-5)
    np.testing.assert_allclose(scores["equal"], 0.5 * scores["private"] + 0.5 * scores["shared"], rtol=1e-5)


# ---------------------------------------------------------------------------------------------- settings


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
