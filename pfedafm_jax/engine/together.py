"""Several runs in one program: runs that differ in seed or other numbers, as one more mapped axis.

The clients of all runs are numbered one run after the other and trained in lockstep. Server, key,
round and the method's numbers are those of each client's run. Every run keeps its own state.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.engine.programs import Programs
from pfedafm_jax.engine.round import RoundResult, draw_participants, run_round
from pfedafm_jax.engine.state import State
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.errors import PfedafmError

Tree = Any
OWN = ("evaluate", "place", "take")  # stages that a run goes through by itself


def can_go_together(several: Sequence[Programs]) -> str:
    """Why these runs cannot be one program; empty: they can."""
    first = several[0]
    forms = {one.form._replace(train_width=0, test_width=0, stages=()) for one in several}
    if not all(one.lockstep for one in several):
        return "a CPU trains one client after the other; --layout lockstep trains them at once"
    if first.processes.count > 1:
        return "there are several processes"
    if any(one.dataset is not first.dataset for one in several):
        return "their images differ (synthetic ones depend on the seed)"
    return "they differ in more than numbers" if len(forms) > 1 else ""


class Together:
    """Runs that go through one program; `run_round` is a round of each."""

    def __init__(self, several: Sequence[Programs]):
        why = can_go_together(several)
        if why:
            raise PfedafmError(f"these runs cannot go together: {why}")
        first, self._several = several[0], several
        self._programs = replace(first, stages=())
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
        """Round `numbers[i]` of run i, for all of them."""
        programs, config = self._programs, self._programs.config
        if len(states) == 1:
            return [run_round(programs, states[0], numbers[0])]
        count, drawn = config.num_clients, config.num_participants
        orders = [
            draw_participants(own.config.seed, t, count, drawn)
            for own, t in zip(self._several, numbers, strict=True)
        ]
        participants = [run * count + order for run, order in enumerate(orders)]
        store: Any = _Stores([state.store for state in states], count)
        state = State(_stacked([one.server for one in states]), store, np.zeros(0, int))
        state, result = run_round(programs, state, np.array(numbers), np.concatenate(participants))
        found = []
        for run, server in enumerate(_apart(state.server, len(states))):
            mine = slice(run * drawn, (run + 1) * drawn)
            info = {name: values[mine] for name, values in result.info.items()}
            found.append((states[run]._replace(server=server), RoundResult(orders[run], info)))
        return found


class _Stores:
    """The states of all runs' clients, numbered one run after the other."""

    def __init__(self, stores: Sequence[ClientStore], count: int):
        self._stores, self._count = stores, count

    def state(self, client: int) -> Tree:
        return self._stores[client // self._count].state(client % self._count)

    def write(self, group: int, clients: Sequence[int], states: Tree) -> None:
        (client,) = clients
        self._stores[client // self._count].write(group, [client % self._count], states)

    def read_parts(self, parts: Sequence[str], clients: Sequence[int]) -> Tree:
        run, own = np.maximum(clients, 0) // self._count, np.asarray(clients) % self._count
        own = np.where(np.asarray(clients) < 0, -1, own)
        pairs = zip(run, own, strict=True)
        rows = [self._stores[number].read_parts(parts, [client]) for number, client in pairs]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *rows)


def _joined(tables: Sequence[np.ndarray]) -> np.ndarray:
    """Tables of all runs, one after the other, as wide as the widest."""
    width = max(table.shape[1] for table in tables)
    return np.concatenate([np.pad(one, ((0, 0), (0, width - one.shape[1]))) for one in tables])


@jax.jit
def _stacked(trees: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@partial(jax.jit, static_argnums=1)
def _apart(tree: Tree, count: int) -> list[Tree]:
    return [jax.tree.map(lambda leaf, run=run: leaf[run], tree) for run in range(count)]
