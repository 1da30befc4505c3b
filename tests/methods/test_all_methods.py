"""One suite for all methods: the contract, the engine against a plain loop, every loss by hand."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from small import (
    ABSENT,
    CLASSES,
    METHODS,
    SIZES,
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    plain_loop,
    play,
    same,
    slow_but,
    small_config,
    small_data,
    small_programs,
    states,
    with_config,
)
from small import start as start_of

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.engine.reference import plain
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.methods import PAPER_METHODS, chosen_methods, method_names
from pfedafm_jax.methods.fedapen import split_adaptability


def test_all_are_registered_and_three_names_stand_for_several():
    assert set(METHODS) <= set(method_names())
    assert chosen_methods("paper") == METHODS[:8] == list(PAPER_METHODS)
    assert chosen_methods(["paper", "pfedafm", *METHODS[8:]]) == METHODS
    assert chosen_methods("controls") == ["fedavg", "fedavg_priors", "fedper", "fedrep"]
    assert chosen_methods("all") == method_names()
    with pytest.raises(PfedafmError, match=r"paper, controls, all, pfedafm.*did you mean fedrep"):
        chosen_methods("paper,fedpre")


@pytest.fixture(scope="module", params=METHODS)
def method(request):
    """Each method in turn, through all tests, so that its programs are compiled once."""
    return request.param


@pytest.fixture(scope="module")
def programs(method):
    return small_programs(method)


def test_shapes_stay_numbers_are_finite_and_runs_repeat(programs):
    def shapes(tree):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

    clients, server, info = play(programs, [0, 1, 3], [2, 0])
    assert shapes(start_of(programs)) == shapes((clients, server))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((clients, server, info)))
    assert all(numbers["finite"].all() for numbers in info)
    assert same((clients, server, info), play(programs, [0, 1, 3], [2, 0]))


def test_who_takes_no_part_is_untouched_and_the_order_of_the_others_does_not_matter(programs):
    start, _ = start_of(programs)
    clients, _, _ = play(programs, [1, 3], [3])
    assert [same(old, new) for old, new in zip(start, clients, strict=True)] == [
        True, False, True, False
    ]  # fmt: skip
    assert_close(play(programs, [0, 1, 2])[:2], play(programs, [2, 0, 1])[:2])


def test_engine_equals_plain_loop(programs):
    assert_equals_plain_loop(programs)


@pytest.mark.slow
def test_engine_equals_plain_loop_two_at_a_time(method):
    assert_equals_plain_loop(small_programs(method, 2))


def rounds_of(config):
    """A round from which one or two of three drop out, and one from which all do."""
    lost = {t: len(participants_of(config, t)[1]) for t in range(200)}
    return [next(t for t in lost if lost[t] in wanted) for wanted in ((1, 2), (3,))]


def test_whoever_drops_out_stays_as_it_was_and_has_no_part(programs):
    losing = with_config(programs, dropout=0.6)
    some, every = rounds_of(losing.federation.config)
    stayed, dropped = participants_of(losing.federation.config, some)
    state, result = losing.run_round(losing.start(), some)
    assert (result.participants.tolist(), result.dropped) == (stayed, dropped)
    given, wanted = programs.run_round(programs.start(), some, stayed)
    assert same((states(state), state.server), (states(given), given.server))
    assert same(result.reports, wanted.reports)
    before = start_of(programs)[0]
    assert all(same(states(state)[client], before[client]) for client in dropped)
    server, clients = state.server, states(state)
    state, result = losing.run_round(state, every)  # nobody is left
    assert same((states(state), state.server), (clients, server)) and result.reports == {}


# With one architecture. The flips must not reach the clean pass that yields the rows.
FD = {"outputs": "logits", "temperature": 2.0}
FEDKD = {"coding": "none", "detach_targets": True, "mentee_learning_rate": 0.02}
OPTIONS = {
    "fd, logits": {"fd": FD, "aggregation": "uniform", "flip": True},
    "fedproto, nearest": {"preset": "fedproto_htfllib"},
    "fml, sum of both losses": {"preset": "fml_htfllib"},
    "lg_fedavg, layers": {"lg_fedavg": {"shared_layers": ("fc2", "header")}, "aggregation": "uniform"},
    "fedkd, weights": {"preset": "fedkd_htfllib"},
    "fedrep, flipped": {"fedrep": {"head_epochs": 1}, "flip": True},
    "fedkd, no coding": {"fedkd": FEDKD},
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(["fd, logits"], OPTIONS))
def test_engine_equals_plain_loop_with_options(name):
    config = small_config(name.split(",")[0], architectures=("dense_b",), **OPTIONS[name])
    assert_equals_plain_loop(engine_of(config, *small_data()))


def ce(logits, labels):
    """Cross-entropy, mean over samples, in 64 bits."""
    return float(np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels]))


def kl(target, logits):
    """KL(softmax target ‖ softmax logits), mean over samples."""
    p, q = (np.exp(z) / np.exp(z).sum(-1, keepdims=True) for z in (target, logits))
    return float(np.mean(np.sum(p * np.log(p / q), -1)))


def net(architecture, extractor, header, images):
    """(features, logits) in 64 bits."""
    features = architecture.extract(extractor, images)
    logits = architecture.classify(header, features)
    return np.asarray(features, np.float64), np.asarray(logits, np.float64)


def loss_by_hand(method, client, server, private, shared, labels):
    """What a visit that moves nothing should cost, from (extractor, header) -> (features, logits)."""
    if method in ("standalone", "lg_fedavg", "fedgh"):
        header = client["header"] if method == "standalone" else server["header"]
        return ce(private(client["local_extractor"], header)[1], labels)
    if method in ("fedper", "fedrep"):  # FedRep: of the second phase
        return ce(shared(server["shared_extractor"], client["header"])[1], labels)
    if method == "pfedafm":
        header = client["header"]
        mine, _ = private(client["local_extractor"], header)
        theirs, _ = shared(server["shared_extractor"], header)
        mixed = 0.25 * mine + 0.75 * theirs
        return ce(mixed @ np.float64(header["kernel"]) + header["bias"], labels)
    features, logits = private(client["local_extractor"], client["header"])
    if method == "fd":  # γ = ½; the row of class 0 is known, that of class 1 is not
        rows = np.asarray(server["class_scores"], np.float64)[labels]
        soft = np.log(np.exp(logits).sum(-1)) - np.sum(rows * logits, -1)
        return ce(logits, labels) + 0.5 * np.mean((labels == 0) * soft)
    if method in ("fedproto", "fedtgp"):  # λ = 10
        apart = np.mean((features - np.asarray(server["prototypes"])[labels]) ** 2, -1)
        return ce(logits, labels) + 10 * np.mean((labels == 0) * apart)
    theirs, other = shared(server["shared_model"]["extractor"], server["shared_model"]["header"])
    mine, others = ce(logits, labels), ce(other, labels)
    to_mine, to_other = kl(other, logits), kl(logits, other)
    if method == "fml":  # α = 0.3, β = 0.8
        return 0.3 * mine + 0.7 * to_mine + 0.8 * others + 0.2 * to_other
    if method == "fedkd":
        hidden = np.mean((features - theirs @ np.float64(client["projection"])) ** 2)
        return mine + others + (to_mine + to_other + 2 * hidden) / (mine + others)
    # FedAPEN, λ = ½
    return mine + others + to_mine + to_other + 2 * ce(0.5 * logits + 0.5 * other, labels)


def test_the_loss_of_a_visit_by_hand(method, programs):
    """At rates of 0, where every batch meets the same model. FedKD divides each batch's loss by
    another number: a client of one batch."""
    number = 2 if method == "fedkd" else 0
    clients, server = start_of(programs)
    client, still = clients[number], replace(programs.method.training, learning_rate=0.0)
    rng, method_itself = np.random.default_rng(1), replace(programs.method, training=still)
    if method == "pfedafm":
        client["mix"] = np.full_like(client["mix"], 0.25)
        own = method_itself.settings.model_copy(update={"mix_learning_rate": 0.0})
        method_itself = replace(method_itself, settings=own)
    for rows, known in (("class_scores", "class_known"), ("prototypes", "prototype_known")):
        if rows in server:
            server[rows] = np.float32(rng.dirichlet(np.ones(server[rows].shape[1]), CLASSES))
            server[known] = np.float32([1, 0, 1, 0])
    architecture = programs.federation.architectures[programs.federation.groups[number]]
    key, one, data = jax.random.key(3), np.float32(1), plain_loop(programs).data_of(number)
    update = plain.client_update(method_itself, architecture, key, client, server, data, one)
    used = (
        split_adaptability(programs.federation.config.seed, 0.3, data)[1]
        if method == "fedapen"
        else data
    )
    rows = np.asarray(used.train)[: int(used.num_train)]
    dataset = programs.dataset
    scaled = dataset.images[rows] / np.float32(255)
    images = (scaled - np.float32(dataset.mean)) / np.float32(dataset.std)

    def private(extractor, header):
        return net(architecture, extractor, header, images)

    def shared(extractor, header):
        return net(method_itself.shared, extractor, header, images)

    labels = programs.dataset.labels[rows]
    expected = loss_by_hand(method, client, server, private, shared, labels)
    np.testing.assert_allclose(update.info["loss"], expected, rtol=1e-4)
    if method == "pfedafm":  # phase 2: the small model under the header that it is given
        given = {"header": jax.tree.map(lambda leaf: 2 * leaf, client["header"])}
        second = plain.shared_update(method_itself, key, given, server, data, one)
        logits = shared(server["shared_extractor"], given["header"])[1]
        np.testing.assert_allclose(second.info["shared_loss"], ce(logits, labels), rtol=1e-4)


SUMMED = {
    "fedper": "shared_extractor",
    "fedrep": "shared_extractor",
    "pfedafm": "shared_extractor",
    "lg_fedavg": "header",
    "fml": "shared_model",
    "fedapen": "shared_model",
}


@pytest.mark.parametrize("name", SUMMED)
def test_the_average_is_weighted_by_samples_and_of_one_is_its_own(name):
    part, programs = SUMMED[name], small_programs(name)
    alone = [play(programs, [client])[1][part] for client in (0, 1)]
    together = play(programs, [0, 1])[1][part]
    expected = jax.tree.map(lambda a, b: (SIZES[0] * a + SIZES[1] * b) / sum(SIZES[:2]), *alone)
    assert_close(together, expected)
    assert not np.allclose(jax.tree.leaves(together)[-1], jax.tree.leaves(alone[1])[-1], atol=1e-6)


@pytest.mark.parametrize(
    ("name", "rows", "known"),
    [("fd", "class_scores", "class_known"), ("fedproto", "prototypes", "prototype_known")],
)
def test_rows_are_averaged_by_class_counts_and_absent_classes_stay_unknown(name, rows, known):
    (dataset, partition), programs = small_data(), small_programs(name)
    alone = [play(programs, [client])[1][rows] for client in (0, 1)]
    _, server, _ = play(programs, [0, 1])
    held = [dataset.labels[partition.train[client]] for client in (0, 1)]
    count = np.stack([np.bincount(labels, minlength=CLASSES)[:, None] for labels in held])
    # A plain mean weighted by counts: not divided by the number of owners once more.
    expected = (count * np.stack(alone)).sum(0) / np.maximum(count.sum(0), 1)
    np.testing.assert_allclose(server[rows], expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(server[known], [1, 1, 1, 0])
    assert not np.any(server[rows][ABSENT])
    only = alone[1][2]  # the row of its one owner
    np.testing.assert_allclose(server[rows][2], only, rtol=1e-5, atol=1e-6)
