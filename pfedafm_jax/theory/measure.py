"""A training run, looked at in every round where the theory says something.

The theory is about a client's whole model h = (θ, ω_k, α_k) and its loss on all its training data (Eq. 12). In every round a
few participants are looked at in five places:

  start       what the client has, with the shared extractor it receives         (tE + 0)
  step        one step of plain gradient descent from there
  local       after phase 1
  trained     after phase 2, with the shared extractor it has trained itself      ((t+1)E)
  aggregated  the same with the average that the server has made of all of them   ((t+1)E + 0)
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config, bad
from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.data.augment import normalise
from pfedafm_jax.engine import Federation, draw_participants
from pfedafm_jax.engine.program import client_key
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.methods.pfedafm import PFedAFM, mix_features
from pfedafm_jax.models import Architecture
from pfedafm_jax.records import differences
from pfedafm_jax.theory.estimators import Pass, gradient_pass, smoothness, squared_distance
from pfedafm_jax.theory.outcome import outcome
from pfedafm_jax.training import ClientData, cross_entropy

Tree = Any
CLIENTS = 3  # participants looked at in a round
PAIRS = (("start", "step"), ("start", "local"), ("local", "trained"), ("trained", "aggregated"))


@partial(jax.jit, static_argnames=("method", "architecture"))
def _at(
    method: PFedAFM, architecture: Architecture, params: Tree, images: jax.Array, labels: jax.Array, real: jax.Array
) -> Pass:
    """The mixed model's loss (Eq. 12) over batches: images uint8 `[batches, size, …]`, labels and `real` `[batches, size]`."""

    def loss(params: Tree, batch: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        pixels = normalise(batch[0], method.how.mean, method.how.std)
        shared = method.shared.extract(params["shared_extractor"], pixels)
        local = architecture.extract(params["local_extractor"], pixels)
        mixed = mix_features(params["mix"], shared, local)
        return cross_entropy(architecture.classify(params["header"], mixed), batch[1], batch[2])

    return gradient_pass(loss, params, (images, labels, real), jnp.sum(real, axis=1))


def _batches(federation: Federation, client: int, round_index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A client's training data in a random order, in batches; padded to the same number for all clients."""
    size, rows = federation.method.how.batch_size, federation.partition.train[client]
    order = np.random.default_rng([federation.config.seed, round_index, client]).permutation(rows)
    count = -(-int(federation.num_train.max()) // size)
    padded = np.resize(order, count * size).reshape(count, size)
    real = (np.arange(count * size) < len(rows)).astype(np.float32).reshape(count, size)
    return federation.dataset.images[padded], federation.dataset.labels[padded].astype(np.int32), real


def own_extractor(federation: Federation, client: int, round_index: int, header: Tree, shared_extractor: Tree) -> Tree:
    """θ_k^t: what a participant uploads. The engine keeps only the average, so phase 2 is done again, with the same key."""
    longest = int(federation.num_train.max())
    rows = np.resize(federation.partition.train[client], longest)
    count = jnp.int32(federation.num_train[client])
    images, labels = federation.dataset.images[rows], federation.dataset.labels[rows].astype(np.int32)
    positions = jnp.arange(longest, dtype=jnp.int32)
    data = ClientData(jnp.asarray(images), jnp.asarray(labels), positions, count, positions, count)
    key = client_key(federation.key, round_index, client)
    server = {"shared_extractor": shared_extractor}
    update = federation.method.shared_update(key, {"header": header}, server, data, jnp.float32(1))
    return jax.device_get(update.upload["shared_extractor"])


def _visit(federation: Federation, client: int, round_index: int, before: Tree, old: Tree, new: Tree) -> dict[str, Any]:
    """What is measured of one participant in one round; `old` and `new` are the shared extractors around it."""
    method, architecture = federation.method, federation.architectures[federation.groups[client]]
    assert isinstance(method, PFedAFM)
    after = federation.store.state(client)
    data = _batches(federation, client, round_index)

    def model(state: Tree, shared: Tree) -> Tree:
        return {**{part: state[part] for part in ("local_extractor", "header", "mix")}, "shared_extractor": shared}

    points = {
        "start": model(before, old),
        "local": model(after, old),
        "trained": model(after, own_extractor(federation, client, round_index, after["header"], old)),
        "aggregated": model(after, new),
    }
    found = {name: jax.device_get(_at(method, architecture, params, *data)) for name, params in points.items()}
    rate = np.float32(federation.config.learning_rate)
    points["step"] = jax.tree.map(lambda p, g: p - rate * g, points["start"], found["start"].gradient)
    found["step"] = jax.device_get(_at(method, architecture, points["step"], *data))
    zero = jax.tree.map(np.zeros_like, found["start"].gradient)
    steps = federation.config.local_epochs * -(-int(federation.num_train[client]) // method.how.batch_size)
    return {
        "client": client,
        "steps": steps,
        "loss": {name: float(at.loss) for name, at in found.items()},
        "squared_gradient": {name: squared_distance(at.gradient, zero) for name, at in found.items()},
        "variance": float(found["start"].variance),
        "smoothness": {
            f"{a} to {b}": smoothness((points[a], found[a].gradient), (points[b], found[b].gradient)) for a, b in PAIRS
        },
        "variation": squared_distance(points["trained"]["shared_extractor"], new),
    }


# ---------------------------------------------------------------------------------------------- the study


def study(
    config: Config, run_dir: str | Path, data_dir: str | None = None, log: Callable[[str], None] = print
) -> dict[str, Any]:
    """Trains as `config` says and measures along the way; kept in `run_dir/theory.json`, and read from there again."""
    path = Path(run_dir) / "theory.json"
    stored = _stored(path, config, log)
    if stored is not None:
        return stored
    if config.method != "pfedafm":
        raise bad("method", config.method, "pfedafm, which the theory is about")
    own = config.pfedafm
    if own.training != "iterative" or own.mix_relay or own.leak_momentum:
        raise PfedafmError(
            "pfedafm cannot be studied with these settings; accepted: training = 'iterative', mix_relay and leak_momentum "
            "off, as in the paper's theory"
        )
    experiment = Experiment(config, data_dir=data_dir, log=log)
    federation = experiment.federation
    rounds, running = [], experiment.rounds()
    for number in range(1, config.rounds + 1):
        drawn = draw_participants(config.seed, number, config.num_clients, config.num_participants)[:CLIENTS]
        old = jax.device_get(federation.server["shared_extractor"])
        before = {int(client): federation.store.state(int(client)) for client in drawn}
        record = next(running)
        new = jax.device_get(federation.server["shared_extractor"])
        visits = [_visit(federation, client, number, state, old, new) for client, state in before.items()]
        finite = [visit for visit in visits if _finite(visit)]
        rounds.append({"round": number, "accuracy": record["mean_accuracy"], "visits": finite})
        if number % max(1, config.rounds // 10) == 0 or number == config.rounds:
            norms = [visit["squared_gradient"]["start"] for visit in finite]
            shown = f"{np.mean(norms):.3g}" if norms else "not finite"
            log(f"theory: round {number}/{config.rounds}, squared gradient norm at its start {shown}")
    result = {"config": config.as_dict(), **outcome(rounds, config), "rounds": rounds}
    text = json.dumps(result, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write(text.encode()))
    return json.loads(text)


def _finite(visit: Any) -> bool:
    values = visit.values() if isinstance(visit, dict) else [visit]
    return all(_finite(v) if isinstance(v, dict) else v is None or bool(np.isfinite(v)) for v in values)


def _stored(path: Path, config: Config, log: Callable[[str], None]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        result = json.loads(path.read_text())
        stored, done = result["config"], len(result["rounds"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        log(f"{path} is damaged ({error}); measuring again")
        return None
    found = differences(stored, config)
    if done != config.rounds:
        found.append(f"rounds: {done} → {config.rounds}")
    if found:
        raise PfedafmError(f"{path} was measured with other settings, remove it first:\n  " + "\n  ".join(found))
    return result
