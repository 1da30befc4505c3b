"""Rounds as plain loops over clients: slow, obvious, and what the engine is tested against.

`algorithm1` is the paper's Algorithm 1 written out, with the released code's variations;
`plain` calls the functions of any method, one client after another. `start`, `run_round` and
`evaluate` have the engine's interface. Runs whose settings make clients depend on one another, such
as `--preset authors_code`, use them instead of the engine.
"""

from collections.abc import Sequence

import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.engine import Programs, RoundResult, State
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.programs import only_in_a_plain_loop
from pfedafm_jax.reference import algorithm1, plain
from pfedafm_jax.settings import bad


def needed(config: Config) -> bool:
    """Whether a run with these settings must use a plain loop."""
    return bool(only_in_a_plain_loop(config))


def start(programs: Programs, folder: str | None = None) -> State:
    """The state before the first round, see `engine.start`."""
    if programs.processes.count > 1:
        names = ", ".join(only_in_a_plain_loop(programs.config))
        why = f"1, since clients depend on one another ({names})"
        raise bad("num_processes", programs.processes.count, why)
    for one in {programs.method.shared, *programs.architectures}:
        if programs.config.method == "pfedafm" and (one.statistics or one.random):
            names = ", ".join(only_in_a_plain_loop(programs.config))
            raise bad("architectures", one.name, f"networks without BatchNorm or Dropout ({names})")
    return algorithm1.start(programs, folder)


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One round, see `engine.run_round`: `algorithm1` for pFedAFM, else `plain`."""
    loop = algorithm1 if programs.config.method == "pfedafm" else plain
    with matmul_precision(programs.config.precision):
        return loop.run_round(programs, state, t, participants)


def evaluate(
    programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Accuracies of these clients, or of all, see `engine.evaluate`."""
    with matmul_precision(programs.config.precision):
        return plain.evaluate(programs, state, clients)


__all__ = ["algorithm1", "evaluate", "needed", "plain", "run_round", "start"]
