"""Several runs in one program: runs that differ only in seed or numeric settings are a `vmap` axis.

Clients are numbered consecutively over the runs and trained in lockstep, each with the server, key,
round number and settings of its own run. Every run keeps its own state.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.engine.programs import Programs
from pfedafm_jax.engine.round import RoundResult, participants_of, run_round
from pfedafm_jax.engine.state import State
from pfedafm_jax.engine.store import ClientStore

Tree = Any
CALLED_BY_EACH_RUN = ("evaluate", "place", "take")  # programs that each run calls by itself


def can_go_together(several: Sequence[Programs]) -> str:
    """The reason why these runs cannot share one program; empty if they can."""
    first = several[0]
    forms = {one.form._replace(train_width=0, test_width=0, only=()) for one in several}
    if first.method.in_turn:
        return f"clients of {first.config.method} are trained one after the other"
    if not all(one.lockstep for one in several):
        return "a CPU trains one client after the other; --layout lockstep trains them at once"
    if first.processes.count > 1:
        return "there are several processes"
    if any(one.dataset is not first.dataset for one in several):
        return "their images differ (synthetic ones depend on the seed)"
    return "they differ in more than numbers" if len(forms) > 1 else ""


class Together:
    """Runs that share one program; `can_go_together` says which can."""

    def __init__(self, several: Sequence[Programs]):
        assert not can_go_together(several)
        first, self._several = several[0], several
        self._programs = replace(first, only=())
        if len(several) > 1:
            keys = np.stack([np.asarray(one.key_data) for one in several])
            methods = [one.method for one in several]
            self._programs = replace(
                self._programs,
                method=jax.tree.map(lambda *numbers: np.stack(numbers), *methods),
                groups=np.concatenate([one.groups for one in several]),
                num_train=np.concatenate([one.num_train for one in several]),
                num_test=np.concatenate([one.num_test for one in several]),
                key_data=first.devices.replicate(keys),
                train_rows=_joined([one.train_rows for one in several]),
                test_rows=_joined([one.test_rows for one in several]),
                runs=len(several),
            )
        self._programs.compile()

    def run_round(
        self, states: Sequence[State], numbers: Sequence[int]
    ) -> list[tuple[State, RoundResult]]:
        """Runs round `numbers[i]` of each run `i`, given its state.

        Returns:
            The next state and the result of each run.
        """
        programs, config = self._programs, self._programs.config
        if len(states) == 1:
            return [run_round(programs, states[0], numbers[0])]
        count, pairs = config.num_clients, zip(self._several, numbers, strict=True)
        drawn = [participants_of(own.config, t) for own, t in pairs]
        participants = [run * count + client for run, one in enumerate(drawn) for client in one[0]]
        store: Any = _Stores([state.store for state in states], count)
        state = State(_stacked([one.server for one in states]), store, np.zeros(0, int))
        state, result = run_round(programs, state, np.array(numbers), participants)
        found = []
        for run, server in enumerate(_apart(state.server, len(states))):
            mine, (order, dropped) = result.participants // count == run, drawn[run]
            info = {name: values[mine] for name, values in result.info.items()}
            own = RoundResult(np.array(order, int), info, dropped)
            found.append((states[run]._replace(server=server), own))
        return found


class _Stores:
    """The stores of all runs as one, with clients numbered consecutively over the runs."""

    def __init__(self, stores: Sequence[ClientStore], count: int):
        self._stores, self._count = stores, count

    def state(self, client: int, parts: Sequence[str] | None = None) -> Tree:
        return self._stores[client // self._count].state(client % self._count, parts)

    def write(self, client: int, state: Tree) -> None:
        self._stores[client // self._count].write(client % self._count, state)


def _joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenates the runs' tables of rows, padded to the width of the widest."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in tables])


@jax.jit
def _stacked(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@partial(jax.jit, static_argnums=1)
def _apart(tree: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, run=run: leaf[run], tree) for run in range(count)]
