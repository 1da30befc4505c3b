"""The paper's convergence analysis, measured in a run: `docs/theory.md` says what and how.

The theory is about a client's whole model h = (θ, ω_k, α_k) and its loss on all its training data
(Eq. 12). In every round a few participants are examined at five points:

  start       what the client has, with the shared extractor it receives       (tE + 0)
  step        one step of plain gradient descent from there
  local       after phase 1
  trained     after phase 2, with the shared extractor it has trained itself    ((t+1)E)
  aggregated  the same with the average that the server has made of them        ((t+1)E + 0)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import Log
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.engine.reference.plain import PlainLoop, shared_update
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.methods.pfedafm import PFedAFM, mix_features
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.runs.experiment import Experiment
from pfedafm_jax.training.losses import cross_entropy

Tree = Any
CLIENTS = 3  # participants examined per round
WAYS = (("start", "step"), ("start", "local"), ("local", "trained"), ("trained", "aggregated"))


class Pass(NamedTuple):
    """One pass over a client's data at fixed parameters."""

    loss: jax.Array
    gradient: Tree
    variance: jax.Array  # of a batch's gradient around it: E‖g_B - ∇L‖², Eq. 16


def gradient_pass(
    loss: Callable[[Tree, Tree], jax.Array], params: Tree, batches: Tree, sizes: jax.Array
) -> Pass:
    """Loss, gradient and the variance of batch gradients from one epoch of random batches.

    Consecutive batches of a random order are random batches, and their mean, weighted by size, is
    the gradient on all data: the mean squared distance from it is unbiased if all have one size.

    Args:
        loss: `loss(params, batch)`, a mean over the batch.
        params: the point.
        batches: the epoch, `[batches, …]`.
        sizes: samples of each batch, `[batches]`; 0: padding.
    """

    def add(total: Pass, part: tuple[Tree, jax.Array]) -> tuple[Pass, None]:
        batch, share = part
        value, gradient = jax.value_and_grad(loss)(params, batch)
        found = Pass(value, gradient, _squared(gradient))
        return jax.tree.map(lambda sum_, leaf: sum_ + share * leaf, total, found), None

    empty = Pass(jnp.float32(0), jax.tree.map(jnp.zeros_like, params), jnp.float32(0))
    total, _ = lax.scan(add, empty, (batches, sizes / jnp.sum(sizes)))
    return total._replace(variance=jnp.maximum(total.variance - _squared(total.gradient), 0.0))


def _squared(tree: Tree) -> jax.Array:
    return jnp.sum(jnp.stack([jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)]))


def squared_distance(first: Tree, second: Tree) -> float:
    """‖first - second‖² over all arrays, in double precision."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return sum(float(np.sum(np.square(np.float64(a) - np.float64(b)))) for a, b in pairs)


def smoothness(first: tuple[Tree, Tree], second: tuple[Tree, Tree]) -> float | None:
    """‖∇L(h') - ∇L(h)‖ / ‖h' - h‖ for two (parameters, gradient); None: no distance.

    No L₁ below it satisfies Eq. 13.
    """
    moved = squared_distance(first[0], second[0])
    return (squared_distance(first[1], second[1]) / moved) ** 0.5 if moved > 0 else None


def bound(
    T: float, *, L1: float, sigma2: float, delta2: float, Delta: float, E: float, eta: float
) -> float | None:
    """The right side of Eq. 30, divided by E: what the mean of ‖∇L‖² over steps may be.

    None: void, since η ≥ 2/L₁.

    >>> bound(10, L1=1.0, sigma2=0.0, delta2=0.0, Delta=2.0, E=4, eta=1.0)
    0.1
    """
    below = (eta - L1 * eta**2 / 2) * E
    above = Delta / T + L1 * E * eta**2 * sigma2 / 2 + eta * delta2
    return above / below if below > 0 else None


@partial(jax.jit, static_argnames=("method", "architecture"))
def _at(method: PFedAFM, architecture: Architecture, params: Tree, batches: Tree) -> Pass:
    """The mixed model's loss (Eq. 12) over batches: images uint8 `[batches, size, …]`, labels and
    a mask of real samples `[batches, size]`."""

    def loss(params: Tree, batch: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        pixels = normalise(batch[0], method.training.mean, method.training.std)
        shared = method.shared.extract(params["shared_extractor"], pixels)
        local = architecture.extract(params["local_extractor"], pixels)
        mixed = mix_features(params["mix"], shared, local)
        return cross_entropy(architecture.classify(params["header"], mixed), batch[1], batch[2])

    return gradient_pass(loss, params, batches, jnp.sum(batches[2], axis=1))


def _batches(loop: PlainLoop, client: int, round_index: int) -> tuple[np.ndarray, ...]:
    """A client's training data in a random order, padded to the same number of batches for all."""
    size, rows = loop.method.training.batch_size, loop.partition.train[client]
    random = np.random.default_rng([loop.federation.config.seed, round_index, client])
    count = -(-int(loop.federation.num_train.max()) // size)
    padded = np.resize(random.permutation(rows), (count, size))
    real = (np.arange(count * size) < len(rows)).astype(np.float32).reshape(count, size)
    dataset = loop.dataset
    return dataset.images[padded], dataset.labels[padded].astype(np.int32), real


def own_extractor(loop: PlainLoop, client: int, t: int, header: Tree, shared: Tree) -> Tree:
    """θ_k^t, a participant's upload: phase 2 repeated with the same key, since the engine keeps
    only the average. `header` is the trained one, `shared` the extractor it received."""
    key, data = client_key(loop.federation.run_key, t, client), loop.data_of(client)
    own, server = {"header": header}, {"shared_extractor": shared}
    update = shared_update(loop.method, key, own, server, data, np.float32(1))
    return jax.device_get(update.upload["shared_extractor"])


def visit(
    loop: PlainLoop, client: int, t: int, before: Tree, after: Tree, old: Tree, new: Tree
) -> dict[str, Any]:
    """The measurements of one participant: `before` and `after` are its states around the round,
    `old` and `new` the shared extractors."""
    method, architecture = loop.method, loop.architecture_of(client)
    assert isinstance(method, PFedAFM)
    batches = _batches(loop, client, t)
    trained = own_extractor(loop, client, t, after["header"], old)

    def model(state: Tree, shared: Tree) -> Tree:
        parts = {part: state[part] for part in ("local_extractor", "header", "mix")}
        return {**parts, "shared_extractor": shared}

    def examined(at: Tree) -> tuple[Tree, Pass]:
        return at, jax.device_get(_at(method, architecture, at, batches))

    start = examined(model(before, old))
    rate, gradient = np.float32(loop.federation.config.rate), start[1].gradient
    found = {
        "start": start,
        "step": examined(jax.tree.map(lambda p, g: p - rate * g, start[0], gradient)),
        "local": examined(model(after, old)),
        "trained": examined(model(after, trained)),
        "aggregated": examined(model(after, new)),
    }
    ends = {name: (params, measured.gradient) for name, (params, measured) in found.items()}
    zero = jax.tree.map(np.zeros_like, gradient)
    steps = -(-int(loop.federation.num_train[client]) // method.training.batch_size)
    return {
        "client": client,
        "steps": loop.federation.config.local_epochs * steps,
        "loss": {name: float(measured.loss) for name, (_, measured) in found.items()},
        "squared_gradient": {name: squared_distance(g, zero) for name, (_, g) in ends.items()},
        "variance": float(start[1].variance),
        "smoothness": {f"{a} to {b}": smoothness(ends[a], ends[b]) for a, b in WAYS},
        "variation": squared_distance(trained, new),
    }


def _finite(values: Any) -> bool:
    if isinstance(values, dict):
        return all(map(_finite, values.values()))
    return values is None or bool(np.isfinite(values))


def study(config: Config, data_dir: str | None = None, log: Log = print) -> dict[str, Any]:
    """Trains with the settings of `config` and measures on the way; returns JSON, see `outcome`."""
    if config.method != "pfedafm" or config.pfedafm.training != "iterative":
        raise bad("method", config.method, "pfedafm with iterative training, as in the paper")
    experiment = Experiment(config, data_dir=data_dir, log=log)
    loop = PlainLoop(experiment.federation, experiment.dataset, experiment.partition)
    rounds, running = [], experiment.rounds()
    for number in range(1, config.rounds + 1):
        old = jax.device_get(experiment.state.server["shared_extractor"])
        before = {c: experiment.state.clients.state(c) for c in _drawn(config, number)[:CLIENTS]}
        record = next(running)
        new, store = jax.device_get(experiment.state.server), experiment.state.clients
        around = old, new["shared_extractor"]
        visits = [visit(loop, c, number, b, store.state(c), *around) for c, b in before.items()]
        finite = [each for each in visits if _finite(each)]
        rounds.append({"round": number, "accuracy": record.mean_accuracy, "visits": finite})
        if number % max(1, config.rounds // 10) == 0 or number == config.rounds:
            norms = [each["squared_gradient"]["start"] for each in finite]
            shown = f"{np.mean(norms):.3g}" if norms else "not finite"
            log(f"theory: round {number}/{config.rounds}, ‖∇L‖² at its start {shown}")
    return {"config": config.as_dict(), **outcome(rounds, config), "rounds": rounds}


def _drawn(config: Config, number: int) -> list[int]:
    clients, participants = config.num_clients, config.num_participants
    return draw_participants(config.seed, number, clients, participants).tolist()


def outcome(rounds: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """From the measurements: constants, the average of Theorem 2 by T, its bound, the lemmas."""
    visits = [each for row in rounds for each in row["visits"]]
    usual = [each["smoothness"]["start to step"] or 0.0 for each in visits]
    if not visits or not rounds[0]["visits"] or max(usual) <= 0:
        raise PfedafmError("nothing finite to measure: it diverged, or its learning rate is 0")
    ratios = [ratio for each in visits for ratio in each["smoothness"].values() if ratio]
    noise, variation, steps = (
        np.array([each[name] for each in visits]) for name in ("variance", "variation", "steps")
    )
    start = float(np.mean([each["loss"]["start"] for each in rounds[0]["visits"]]))  # L* = 0
    same = {"Delta": start, "E": float(steps.mean()), "eta": (eta := config.rate)}
    most = {"L1": max(ratios), "sigma2": float(noise.max()), "delta2": float(variation.max())}
    typical = {"sigma2": float(noise.mean()), "delta2": float(variation.mean())}
    constants, typical = most | same, {"L1": float(np.median(usual))} | typical | same
    T = [row["round"] for row in rounds if row["visits"]]
    by_round = [float(np.mean(list(map(_path, row["visits"])))) for row in rounds if row["visits"]]
    average = np.cumsum(by_round) / np.arange(1, len(by_round) + 1)
    half, slope = len(T) // 2, None
    if len(T) - half > 1 and average.min() > 0:  # d log(average) / d log T; -1 would be 1/T
        slope = float(np.polyfit(np.log(T[half:]), np.log(average[half:]), 1)[0])
    each_had = visits_per_client(config, T)
    loss = {place: np.array([v["loss"][place] for v in visits]) for place in visits[0]["loss"]}
    falls = (eta - most["L1"] * eta**2 / 2) * np.array(list(map(_path, visits)))
    noise_term = most["L1"] * eta**2 * most["sigma2"] / 2
    changes = loss["aggregated"] - loss["trained"]
    return {
        "constants": constants,
        "typical": typical,
        "T": T,
        "by_round": by_round,
        "average": average.tolist(),
        "visits": each_had,
        "bound": [bound(number, **constants) for number in each_had],
        "typical_bound": [bound(number, **typical) for number in each_had],
        "slope": slope,
        "lemmas": {  # means over visits
            "visits": len(visits),
            "loss_fall": float(np.mean(loss["start"] - loss["trained"])),
            "lemma1_fall": float(np.mean(steps * (falls - noise_term))),
            "loss_change": float(np.mean(changes)),
            "eta_variation": float(np.mean(eta * variation)),
            "lemma2_holds": int(np.sum(changes <= eta * variation)),
        },
    }


def _path(measured: dict[str, Any]) -> float:
    """Mean of ‖∇L‖² over a round's steps, from three points by the trapezoidal rule."""
    norms = measured["squared_gradient"]
    return (norms["start"] + 2 * norms["local"] + norms["trained"]) / 4


def visits_per_client(config: Config, numbers: Sequence[int]) -> list[float]:
    """Visits so far over clients seen so far, after these rounds; T if C = 1.

    The theorem is about one client; this is the mean number of rounds it has had.
    """
    seen: set[int] = set()
    found = {}
    for number in range(1, max(numbers) + 1):
        seen.update(_drawn(config, number))
        found[number] = config.num_participants * number / len(seen)
    return [found[number] for number in numbers]
