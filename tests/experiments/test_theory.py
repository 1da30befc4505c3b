"""The theory's estimates on a problem whose constants are known, and the study of a small run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import theory
from paper import fig_theory
from small import engine_of, plain_loop

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.results import plots

CURVATURE = np.array([4.0, 1.0, 0.25], np.float32)
CENTRES = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
SPREAD = np.mean(np.sum(np.square(CURVATURE * (CENTRES - CENTRES.mean(axis=0))), axis=1))
SIGMA2 = SPREAD / 8 * 16 / 23  # of the mean of b = 8 of n = 24: S²/b · (n - b)/(n - 1)


def loss_of(h):
    return np.mean(0.5 * np.sum(CURVATURE * np.square(h - CENTRES), axis=1))


def epoch(h, order, size=8, padding=0):
    """½ (h - c)ᵀ A (h - c) over batches of the centres c, A diagonal: L₁ is A's largest entry."""

    def quadratic(params, batch):
        away = params["h"][None, :] - batch
        return jnp.mean(0.5 * jnp.sum(jnp.square(away) * CURVATURE[None, :], axis=1))

    batches = jnp.asarray(CENTRES)[order].reshape(-1, size, 3)
    sizes = jnp.full(len(batches), float(size))
    batches = jnp.concatenate([batches, jnp.full((padding, size, 3), 100.0)])
    sizes = jnp.concatenate([sizes, jnp.zeros(padding)])
    return theory.gradient_pass(quadratic, {"h": jnp.asarray(h, jnp.float32)}, batches, sizes)


def test_a_pass_has_loss_gradient_and_variance_of_batches_whatever_the_padding():
    h = np.array([1.0, -2.0, 0.5])
    for padding in (0, 1):
        found = epoch(h, jax.random.permutation(jax.random.key(1), 24), padding=padding)
        np.testing.assert_allclose(
            found.gradient["h"], CURVATURE * (h - CENTRES.mean(axis=0)), rtol=1e-5
        )
        assert float(found.loss) == pytest.approx(loss_of(h), rel=1e-5)
    orders = jax.vmap(lambda key: jax.random.permutation(key, 24))(
        jax.random.split(jax.random.key(2), 3000)
    )
    found = jax.jit(jax.vmap(lambda order: epoch(np.zeros(3), order).variance))(orders)
    assert float(jnp.mean(found)) == pytest.approx(SIGMA2, rel=0.03)
    assert float(epoch(h, jnp.arange(24), size=24).variance) == 0


def test_smoothness_of_a_quadratic_is_its_curvature_along_the_way():
    def at(h):
        return {"h": np.float32(h)}, epoch(h, jnp.arange(24)).gradient

    start = np.array([0.3, -1.0, 2.0])
    for direction, value in zip(np.eye(3), CURVATURE, strict=True):
        assert theory.smoothness(at(start), at(start + 0.5 * direction)) == pytest.approx(
            value, rel=1e-4
        )
    assert theory.smoothness(at(start), at(start)) is None


def test_the_bound_holds_for_plain_sgd_and_is_void_for_too_large_a_step():
    """Eq. 30 without aggregation: E plain steps a round on the quadratic, its constants known."""
    eta, rounds, steps, norms = 0.2, 25, 4, []
    random, h = np.random.default_rng(4), np.array([3.0, 3.0, 3.0])
    excess = loss_of(h) - loss_of(CENTRES.mean(axis=0))
    for _ in range(rounds * steps):
        norms.append(np.sum(np.square(CURVATURE * (h - CENTRES.mean(axis=0)))))
        h = h - eta * CURVATURE * (h - CENTRES[random.choice(24, 8, replace=False)].mean(axis=0))
    constants = {"L1": 4.0, "sigma2": SIGMA2, "delta2": 0.0, "Delta": excess}
    constants |= {"E": steps, "eta": eta}
    limit = theory.bound(rounds, **constants)
    assert limit is not None and np.mean(norms) < limit < 10 * np.mean(norms)
    assert theory.bound(rounds, **{**constants, "eta": 0.5}) is None
    floor = 4.0 * steps * eta**2 * SIGMA2 / 2 / (eta - 4.0 * eta**2 / 2) / steps
    assert theory.bound(np.inf, **constants) == pytest.approx(floor)


@pytest.mark.slow
def test_extractors_trained_again_average_to_the_servers(config, dataset, partition):
    config = updated(config, architectures=("small_b",))
    programs = engine_of(config, dataset, partition)
    state = programs.start()
    old = jax.device_get(state.server["shared_extractor"])
    drawn = [int(client) for client in draw_participants(config.seed, 1, 6, 3)]
    before = {client: state.clients.state(client) for client in drawn}
    state, _ = programs.run_round(state, 1)
    new = jax.device_get(state.server["shared_extractor"])
    own = [
        theory.own_extractor(plain_loop(programs), c, 1, state.clients.state(c)["header"], old)
        for c in drawn
    ]
    weights = programs.federation.num_train[drawn] / programs.federation.num_train[drawn].sum()
    average = jax.tree.map(
        lambda *leaves: sum(w * leaf for w, leaf in zip(weights, leaves, strict=True)), *own
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), average, new)

    client = drawn[0]
    visit = theory.visit(
        plain_loop(programs), client, 1, before[client], state.clients.state(client), old, new
    )
    architecture = programs.federation.architectures[programs.federation.groups[client]]
    rows, training = partition.train[client], programs.method.training
    images = normalise(jnp.asarray(dataset.images[rows]), training.mean, training.std)
    scores = programs.method.predict(
        architecture, before[client], {"shared_extractor": old}, images
    )["mixed"]
    labels = jnp.asarray(dataset.labels[rows], jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    assert visit["loss"]["start"] == pytest.approx(float(losses.mean()), rel=1e-4)
    assert visit["variation"] == pytest.approx(theory.squared_distance(own[0], new), rel=1e-3)
    assert visit["steps"] == 2 * -(-len(rows) // 8)
    # One step of plain gradient descent lowers the loss by about η‖∇L‖².
    fallen = visit["loss"]["start"] - visit["loss"]["step"]
    foreseen = config.learning_rate * visit["squared_gradient"]["start"]
    assert fallen == pytest.approx(foreseen, rel=0.2)


def test_the_theorems_rounds_are_the_visits_of_a_client(config):
    everyone = updated(config, participation=1.0)
    assert theory.visits_per_client(everyone, [1, 2, 5]) == [1, 2, 5]
    drawn = [draw_participants(config.seed, number, 6, 3) for number in (1, 2)]
    assert theory.visits_per_client(config, [1, 2]) == [1, 6 / len(set(np.ravel(drawn)))]


@pytest.mark.slow
def test_a_study_is_measured_drawn_and_told(config, tmp_path):
    settings = updated(config, synthetic_samples=240, architectures=("small_b",))
    lines: list[str] = []
    result = theory.study(settings, log=lines.append)
    assert any("round 3/3" in line for line in lines)
    assert len(result["T"]) == len(result["average"]) == 3
    assert all(len(row["visits"]) == 3 for row in result["rounds"])
    visits = [visit for row in result["rounds"] for visit in row["visits"]]
    ratios = [value for visit in visits for value in visit["smoothness"].values()]
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
