"""The estimates of the theory on problems whose constants are known, and the study of a small run."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import theory
from paper import fig_theory

from pfedafm_jax import plots
from pfedafm_jax.config import updated
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.engine import build, draw_participants, run_round, start
from pfedafm_jax.errors import PfedafmError

CURVATURE = np.array([4.0, 1.0, 0.25], np.float32)
CENTRES = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)


def quadratic(params, batch):
    """Mean over the batch of ½ (h - c)ᵀ A (h - c), A diagonal: smoothness is A's largest entry."""
    away = params["h"][None, :] - batch
    return jnp.mean(0.5 * jnp.sum(jnp.square(away) * CURVATURE[None, :], axis=1))


def epoch(params, order, size=8, loss=quadratic, data=CENTRES):
    batches = jnp.asarray(data)[order].reshape(-1, size, *data.shape[1:])
    return theory.gradient_pass(loss, params, batches, jnp.full(len(batches), float(size)))


def at(point):
    """(parameters, gradient) of the quadratic."""
    params = {"h": jnp.asarray(point, jnp.float32)}
    return params, epoch(params, jnp.arange(24)).gradient


def test_loss_and_gradient_are_those_of_all_data():
    h = np.array([1.0, -2.0, 0.5], np.float32)
    found = epoch({"h": jnp.asarray(h)}, jax.random.permutation(jax.random.key(1), 24))
    np.testing.assert_allclose(found.gradient["h"], CURVATURE * (h - CENTRES.mean(axis=0)), rtol=1e-5)
    by_hand = np.mean(0.5 * np.sum(CURVATURE * np.square(h - CENTRES), axis=1))
    assert float(found.loss) == pytest.approx(by_hand, rel=1e-5)


def test_variance_is_that_of_a_random_batch():
    """Drawn without replacement: the variance of the mean of b of n is S²/b · (n - b)/(n - 1)."""
    keys = jax.random.split(jax.random.key(2), 3000)
    params = {"h": jnp.zeros(3)}
    orders = jax.vmap(lambda key: jax.random.permutation(key, 24))(keys)
    found = jax.jit(jax.vmap(lambda order: epoch(params, order).variance))(orders)
    spread = np.mean(np.sum(np.square(CURVATURE * (CENTRES - CENTRES.mean(axis=0))), axis=1))
    assert float(jnp.mean(found)) == pytest.approx(spread / 8 * 16 / 23, rel=0.03)


def test_padding_counts_for_nothing_and_one_batch_has_no_variance():
    params = {"h": jnp.ones(3)}
    batches = jnp.asarray(CENTRES).reshape(3, 8, 3)
    padded = jnp.concatenate([batches, jnp.full((1, 8, 3), 100.0)])
    found = theory.gradient_pass(quadratic, params, padded, jnp.array([8.0, 8.0, 8.0, 0.0]))
    plain = theory.gradient_pass(quadratic, params, batches, jnp.array([8.0, 8.0, 8.0]))
    np.testing.assert_allclose(found.gradient["h"], plain.gradient["h"])
    assert float(found.variance) == float(plain.variance) > 0
    assert float(epoch(params, jnp.arange(24), size=24).variance) == 0


def test_smoothness_of_a_quadratic_is_its_curvature_along_the_way():
    start = np.array([0.3, -1.0, 2.0])
    for direction, value in zip(np.eye(3), CURVATURE, strict=True):
        assert theory.smoothness(at(start), at(start + 0.5 * direction)) == pytest.approx(value, rel=1e-4)
    between = theory.smoothness(at(start), at([1.0, 1.0, 1.0]))
    assert between is not None and 0.25 < between < 4.0
    assert theory.smoothness(at(start), at(start)) is None


def test_the_bound_holds_for_plain_sgd_and_is_void_for_too_large_a_step():
    """Eq. 30 without aggregation: E plain steps a round on the quadratic, its constants known."""
    spread = np.mean(np.sum(np.square(CURVATURE * (CENTRES - CENTRES.mean(axis=0))), axis=1))
    sigma2, eta, rounds, steps = spread / 8 * 16 / 23, 0.2, 25, 4
    random, h, norms = np.random.default_rng(4), np.array([3.0, 3.0, 3.0]), []

    def loss(h):
        return np.mean(0.5 * np.sum(CURVATURE * np.square(h - CENTRES), axis=1))

    excess = loss(h) - loss(CENTRES.mean(axis=0))
    for _ in range(rounds * steps):
        norms.append(np.sum(np.square(CURVATURE * (h - CENTRES.mean(axis=0)))))
        h = h - eta * CURVATURE * (h - CENTRES[random.choice(24, 8, replace=False)].mean(axis=0))
    constants = {"L1": 4.0, "sigma2": sigma2, "delta2": 0.0, "Delta": excess, "E": steps, "eta": eta}
    limit = theory.bound(rounds, **constants)
    assert limit is not None and np.mean(norms) < limit < 10 * np.mean(norms)
    assert theory.bound(rounds, **{**constants, "eta": 0.5}) is None
    floor = theory.bound(np.inf, **constants)
    assert floor == pytest.approx(4.0 * steps * eta**2 * sigma2 / 2 / (eta - 4.0 * eta**2 / 2) / steps)


def test_extractors_trained_again_average_to_the_servers(config, dataset, partition):
    programs = build(config, dataset, partition)
    state = start(programs)
    old = jax.device_get(state.server["shared_extractor"])
    drawn = [int(client) for client in draw_participants(config.seed, 1, 6, 3)]
    before = {client: state.store.state(client) for client in drawn}
    state, _ = run_round(programs, state, 1)
    new = jax.device_get(state.server["shared_extractor"])
    own = [theory.own_extractor(programs, c, 1, state.store.state(c)["header"], old) for c in drawn]
    weights = programs.num_train[drawn] / programs.num_train[drawn].sum()
    average = jax.tree.map(lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *own)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), average, new)

    client = drawn[0]
    visit = theory.visit(programs, client, 1, before[client], state.store.state(client), old, new)
    architecture = programs.architectures[programs.groups[client]]
    rows, how = partition.train[client], programs.method.how
    images = normalise(jnp.asarray(dataset.images[rows]), how.mean, how.std)
    scores = programs.method.predict(architecture, before[client], {"shared_extractor": old}, images)["mixed"]
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.asarray(dataset.labels[rows], jnp.int32))
    assert visit["loss"]["start"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert visit["variation"] == pytest.approx(theory.squared_distance(own[0], new), rel=1e-3)
    assert visit["steps"] == 2 * -(-len(rows) // 8)
    # One step of plain gradient descent lowers the loss by about η‖∇L‖².
    fallen = visit["loss"]["start"] - visit["loss"]["step"]
    assert fallen == pytest.approx(config.learning_rate * visit["squared_gradient"]["start"], rel=0.2)


def test_the_theorems_rounds_are_the_visits_of_a_client(config):
    everyone = dataclasses.replace(config, participation=1.0)
    assert theory.visits_per_client(everyone, [1, 2, 5]) == [1, 2, 5]
    first, second = (set(draw_participants(config.seed, number, 6, 3).tolist()) for number in (1, 2))
    assert theory.visits_per_client(config, [1, 2]) == [1, 6 / len(first | second)]


def test_a_study_is_measured_drawn_and_told(config, tmp_path):
    settings = dataclasses.replace(config, synthetic_samples=240, architectures=("small_b",))
    lines: list[str] = []
    result = theory.study(settings, log=lines.append)
    assert any("round 3/3" in line for line in lines)
    assert len(result["T"]) == len(result["average"]) == 3 and all(len(row["visits"]) == 3 for row in result["rounds"])
    ratios = [v for row in result["rounds"] for visit in row["visits"] for v in visit["smoothness"].values()]
    assert result["constants"]["L1"] == max(ratios) and result["lemmas"]["visits"] == 9
    assert result["constants"]["Delta"] == pytest.approx(np.log(4), rel=0.1)
    assert plots.save(fig_theory.figure(result), tmp_path / "theory.png").stat().st_size > 20_000
    shown = dict(fig_theory.rows(result))
    assert shown["η of the networks, of the mix vector"] == "0.05, 1" and "nan" not in str(shown)
    assert shown["L₁, smoothness (Eq. 13): typical, largest"].endswith(f", {max(ratios):.3g}")


@pytest.mark.parametrize("other", [{"method": "fd"}, {"pfedafm": {"training": "end_to_end"}}])
def test_what_the_theory_is_not_about_is_refused(other, config):
    with pytest.raises(PfedafmError, match=r"cannot be used; accepted: .*pfedafm.*iterative"):
        theory.study(updated(config, other))
