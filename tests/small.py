"""The smallest setting in which all methods have something to do, and rounds of it."""

from dataclasses import replace
from functools import cache

import flax.linen as nn
import jax
import numpy as np
import pytest

from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.presets import with_preset
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.engine import Engine, Federation
from pfedafm_jax.engine.reference.algorithm1 import Algorithm1
from pfedafm_jax.engine.reference.plain import PlainLoop
from pfedafm_jax.engine.reference.released import ReleasedLoop
from pfedafm_jax.methods import PAPER_METHODS, find_method
from pfedafm_jax.methods.base import Method
from pfedafm_jax.models.architecture import describe, register_extractor
from pfedafm_jax.training.batches import LocalTraining

METHODS = [*PAPER_METHODS, "fedper", "fedrep", "fedgh", "fedtgp"]
# Uneven clients: 2 has a single, partial batch of a single class, and nobody has class 3.
SIZES, SEEN = (11, 15, 3, 7), ((0, 1), (0, 1, 2), (2,), (1, 2))
CLASSES, ABSENT, WIDTH = 4, 3, 6
# Settings under which more happens than by default: strong coding, a weight that moves, unlike
# halves of a loss.
OWN = {
    "fd": {"temperature": 0.5, "gamma": 0.5},
    "fedproto": {"lambda_mse": 10.0},
    "fml": {"alpha": 0.3, "beta": 0.8},
    "fedkd": {"t_start": 0.5, "t_end": 0.8},
    "fedapen": {"lambda_learning_rate": 0.5, "lambda_epochs": 3, "adaptability_fraction": 0.3},
    "fedrep": {"head_epochs": 3},
    "fedgh": {"server_learning_rate": 0.5, "server_epochs": 3, "server_batch_size": 2},
    "fedtgp": {"server_learning_rate": 0.1, "server_epochs": 3, "server_batch_size": 4},
}


class Dense(nn.Module):
    """Two dense layers: the smallest thing that is an extractor."""

    hidden: int
    features: int = WIDTH

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(nn.Dense(self.hidden, name="fc1")(images.reshape(images.shape[0], -1)))
        return nn.relu(nn.Dense(self.features, name="fc2")(hidden))

    @staticmethod
    def widest(modules):
        return modules[0].clone(hidden=max(one.hidden for one in modules))


register_extractor("dense_a", Dense(hidden=8))
register_extractor("dense_b", Dense(hidden=5))
# Two architectures, three of four clients a round, batches of 4.
SMALL = Config(
    num_clients=4,
    participation=0.75,
    architectures=("dense_a", "dense_b"),
    shared_extractor="dense_b",
    feature_size=WIDTH,
    local_epochs=2,
    batch_size=4,
    rounds=4,
    devices=1,
)


def small_config(method: str, preset: str | None = None, **changes) -> Config:
    """The small setting for a method, with its settings of above or those of a preset."""
    own = {method: OWN[method]} if method in OWN else {}
    config = with_preset(SMALL, preset) if preset else updated(SMALL, own)
    return updated(config, {"local_epochs": 2, "batch_size": 4, "method": method, **changes})


@cache
def small_data():
    """(dataset, partition): 3x3 images, brighter by class."""
    labels = np.arange(120) % CLASSES
    dark = np.random.default_rng(0).integers(0, 60, (120, 3, 3, 1))
    images = (dark + 60 * labels[:, None, None, None]).astype(np.uint8)
    parts = images, labels, images[:1], labels[:1]
    dataset = dataset_from_arrays("small", *parts, num_classes=CLASSES)
    rows, train, test = np.arange(120, dtype=np.int32), [], []
    for size, seen in zip(SIZES, SEEN, strict=True):
        mine = rows[np.isin(labels[rows], seen)][: size + 5]
        train.append(mine[:size])
        test.append(mine[size:])
        rows = np.setdiff1d(rows, mine)
    return dataset, Partition(tuple(train), tuple(test), (rows[:0],) * 4)


def engine_of(config: Config, dataset, partition) -> Engine:
    """The engine of a run of simulated clients."""
    return Engine(Federation.of_partition(config, dataset, partition), dataset, partition)


def with_config(engine: Engine, **changes) -> Engine:
    """The same engine but for these settings of its federation."""
    config = updated(engine.federation.config, **changes)
    federation = replace(engine.federation, config=config)
    return Engine(federation, engine.dataset, engine.partition)


def plain_loop(engine: Engine) -> PlainLoop:
    """The plain loop of the engine's run."""
    return PlainLoop(engine.federation, engine.dataset, engine.partition)


def algorithm_1(engine: Engine) -> Algorithm1:
    """The loop of Algorithm 1 of the engine's run."""
    return Algorithm1(engine.federation, engine.dataset, engine.partition)


def released_loop(engine: Engine) -> ReleasedLoop:
    """The loop of the released code of the engine's run."""
    return ReleasedLoop(engine.federation, engine.dataset, engine.partition)


@cache
def small_programs(method: str, clients_per_step: int = 1) -> Engine:
    """The engine of a method in the small setting; several clients a step in both architectures, one
    at a time in one where that shows all there is, which is compiled in half the time."""
    both = clients_per_step > 1 or method in ("pfedafm", "lg_fedavg")
    more = {} if both else {"architectures": ("dense_b",)}
    return engine_of(small_config(method, clients_per_step=clients_per_step, **more), *small_data())


def start(programs: Engine):
    """(clients' states, server) before the first round."""
    state = programs.start()
    return states(state), jax.device_get(state.server)


def play(programs: Engine, *rounds):
    """(clients' states, server, numbers of each round) after rounds with these participants."""
    state, info = programs.start(), []
    for number, participants in enumerate(rounds):
        state, result = programs.run_round(state, number, participants)
        info.append(result.reports)
    return states(state), jax.device_get(state.server), info


def states(state) -> list:
    return [state.clients.state(client) for client in range(len(state.clients.groups))]


def command_words(**settings) -> list[str]:
    """Arguments of a command: six clients with the network `small_a` on generated images, in a
    moment, and these settings."""
    usual = {"dataset": "synthetic", "synthetic_samples": 240, "num_clients": 6, "devices": 1}
    usual |= {"architectures": "small_a", "shared_extractor": "small_a", "feature_size": 12}
    given = {**usual, "participation": 0.5, "local_epochs": 1, **settings}
    return [
        word
        for name, value in given.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]


TRAINING = LocalTraining(64, 64, 10, 0.01, 0.9, 1e-3, 50.0, mean=(0.5,) * 3, std=(0.25,) * 3)


def real(name: str, classes: int, **changes) -> Method:
    """A method on the paper's networks."""
    config = updated(Config(), {"method": name, "local_epochs": 10, **changes})
    networks = [describe(one, classes) for one in config.architectures]
    return find_method(name).of(config, TRAINING, describe("cnn5", classes), networks)


def slow_but(kept, names):
    """Parameters of a test, marked `slow` unless they are among those kept: each takes ten seconds
    and more to compile."""
    return [name if name in kept else pytest.param(name, marks=pytest.mark.slow) for name in names]


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) for a, b in pairs)


def all_moved(one, other) -> bool:
    """Whether every leaf differs."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return not any(np.array_equal(a, b) for a, b in pairs)


def assert_close(one, other, **tolerance) -> None:
    limits = {"rtol": 1e-4, "atol": 1e-5, **tolerance}
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **limits), one, other)


# Three of four; two, one of them new; one by itself, which lacks class 2.
ROUNDS = ([2, 0, 1], [1, 3], [0])


def assert_equals_plain_loop(*several) -> None:
    """States, server, numbers of every round and evaluation, of engines that differ in clients a
    step alone."""
    loop = plain_loop(several[0])
    state, results = loop.start(), []
    for number, participants in enumerate(ROUNDS):
        state, result = loop.run_round(state, number, participants)
        results.append((jax.device_get(state.server), result.reports))
    expected = states(state), loop.evaluate(state)
    for programs in several:
        state = programs.start()
        for number, (participants, (server, info)) in enumerate(zip(ROUNDS, results, strict=True)):
            state, result = programs.run_round(state, number, participants)
            assert set(result.reports) == set(info)
            assert_close(result.reports, info, rtol=5e-4, atol=2e-5)
            assert_close(jax.device_get(state.server), server, rtol=2e-3, atol=2e-5)
        found = states(state), programs.evaluate(state)
        assert_close(found, expected, rtol=2e-3, atol=2e-5)
