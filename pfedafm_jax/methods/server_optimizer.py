"""Server optimizers (FedOpt): the averaged change of a round as the gradient of a step.

    Δ^t = θ^t_average - θ^(t-1)           the change that plain averaging would make
    θ^t = θ^(t-1) + step(Δ^t, memory)     momentum, Adam or Yogi, by optax on the gradient -Δ^t
    m^t = μ m^(t-1) + (1 - μ) θ^t         the running mean that all clients are judged with

A method says which parts of its broadcast are weights of networks that clients average
(`Method.averaged_weights`); everything else of a broadcast stays as the method makes it. Between
rounds the server's state has two more entries than the broadcast, `MEMORY` and `RUNNING_MEAN`, if
the settings ask for them. Clients never receive these.
"""

from dataclasses import dataclass
from typing import Any

import jax
import optax

from pfedafm_jax.base.trees import register
from pfedafm_jax.config.config import Config
from pfedafm_jax.models.batch_stats import statistics_of, with_statistics, without_statistics

Tree = Any
MEMORY = "server_optimizer_memory"
RUNNING_MEAN = "server_running_mean"
USUAL_RATES = {"average": 1.0, "momentum": 1.0, "adam": 0.01, "yogi": 0.01}
"""Learning rates where the settings name none."""


@dataclass(frozen=True)
class ServerOptimizer:
    """How the average becomes the next broadcast. A pytree: numbers are leaves, `kind` and whether
    there is a running mean are static."""

    kind: str = "average"  # or momentum, adam, yogi
    learning_rate: float = 1.0
    momentum: float = 0.0  # the decay of momentum; β1 of Adam and Yogi
    second_moment: float = 0.99  # β2 of Adam and Yogi
    epsilon: float = 1e-3  # τ of Adam and Yogi
    mean_decay: float | None = None  # μ; None: clients are judged with the broadcast itself

    @classmethod
    def of(cls, config: Config) -> "ServerOptimizer":
        """The settings of a run."""
        rate = config.server_learning_rate
        if rate is None:
            rate = USUAL_RATES[config.server_optimizer]
        return cls(
            kind=config.server_optimizer,
            learning_rate=rate,
            momentum=config.server_momentum,
            second_moment=config.server_second_moment,
            epsilon=config.server_epsilon,
            mean_decay=config.server_mean if config.server_mean > 0 else None,
        )

    @property
    def is_plain(self) -> bool:
        """Whether the average itself is the next broadcast, and clients are judged with it."""
        return self.kind == "average" and self.mean_decay is None

    def transformation(self) -> optax.GradientTransformation:
        """The optax optimizer whose gradient is the negative averaged change."""
        if self.kind == "momentum":
            return optax.sgd(self.learning_rate, momentum=self.momentum)
        if self.kind == "adam":
            scaling = optax.scale_by_adam(self.momentum, self.second_moment, self.epsilon)
        else:
            scaling = optax.scale_by_yogi(self.momentum, self.second_moment, self.epsilon)
        return optax.chain(scaling, optax.scale_by_learning_rate(self.learning_rate))

    def init(self, weights: dict[str, Tree]) -> dict[str, Tree]:
        """The entries beside the first broadcast, whose averaged `weights` these are."""
        entries: dict[str, Tree] = {}
        if self.kind != "average":
            entries[MEMORY] = self.transformation().init(without_statistics(weights))
        if self.mean_decay is not None:
            entries[RUNNING_MEAN] = weights
        return entries

    def step(
        self, memory: Tree, old: dict[str, Tree], averaged: dict[str, Tree]
    ) -> tuple[dict[str, Tree], Tree]:
        """The next weights and memory, from the old weights and the clients' average of them.

        Running statistics (BatchNorm) are averaged as they are: they are no weights.
        """
        statistics = statistics_of(averaged)
        before = without_statistics(old)
        after = without_statistics(averaged)
        gradient = jax.tree.map(lambda start, end: start - end, before, after)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in whole numbers
            change, memory = self.transformation().update(gradient, memory, before)
        return with_statistics(optax.apply_updates(before, change), statistics), memory

    def mean(self, running: dict[str, Tree], weights: dict[str, Tree]) -> dict[str, Tree]:
        """The running mean with the next broadcast's weights in it."""
        decay: Any = self.mean_decay
        return jax.tree.map(lambda mean, new: decay * mean + (1.0 - decay) * new, running, weights)


register(
    ServerOptimizer,
    lambda kind: ("learning_rate", "momentum", "second_moment", "epsilon", "mean_decay"),
)


def broadcast_of(server: dict[str, Tree]) -> dict[str, Tree]:
    """What clients receive of the server's state."""
    return {name: part for name, part in server.items() if name not in (MEMORY, RUNNING_MEAN)}


def judged_of(server: dict[str, Tree]) -> dict[str, Tree]:
    """What clients are judged with: the broadcast, or its running mean if there is one."""
    return {**broadcast_of(server), **server.get(RUNNING_MEAN, {})}
