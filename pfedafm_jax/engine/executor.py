"""Who does the rounds of a run, and what a round changes and returns."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.hosts import Processes
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.methods.base import Server


class State(NamedTuple):
    """Everything that a round changes. A checkpoint holds these two, and the history.

    Clients may be larger than memory, so a round changes them in place: after a round use only the
    state that it returned.
    """

    server: Server  # the broadcast, and what the server's optimizer keeps
    clients: ClientStore  # what clients keep between visits


class RoundResult(NamedTuple):
    """Who took part in a round, and what each of them reported."""

    participants: np.ndarray  # int [K], in the order drawn, without those that dropped out
    # name → [K]: loss, finite (False: its update was discarded), accuracy/NAME, and what else the
    # method reports; NaN where a participant did not report it, no names if nobody is left
    reports: dict[str, np.ndarray]
    dropped: Sequence[int] = ()  # drawn, and dropped out


class Executor(Protocol):
    """Who does a round: draws participants, has them visited, aggregates, evaluates.

    Four can: `Engine` with compiled programs on this machine's devices, `PlainLoop` as a loop over
    clients (what the engine is tested against), `ReleasedLoop` as the released code does it, and
    `deploy.server.NodesExecutor` over a network. A round is, in all of them,

        participants, dropped = participants_of(config, t)
        weights = weights_of(federation, participants)
        for client, weight in zip(participants, weights):
            random_key = client_key(federation.run_key, t, client)
            update = method.client_update(random_key, …, clients[client], server, …, weight)
            clients[client] = update.client              # in place
            reports[client] = update.info, and its accuracies with what it received or `update.view`
        parts = the same for method.shared_update, if the method has `shared_parts`
        averaged = average of the uploads by weight      # or all of them, see `method.sees_uploads`
        server = after_average(method, server, averaged) # or `next_broadcast`

    with these rules. The state's clients are changed in place. A client whose update is not finite
    is discarded: it keeps its old state and has weight 0. If nobody is left, the server stays as it
    is. Random numbers depend on seed, round and client only. What comes out equals `PlainLoop`
    within float tolerance.

    Attributes:
        devices: those that it computes with.
        processes: those of its run.
    """

    devices: Devices
    processes: Processes

    def prepare(self) -> None:
        """Compiles what rounds need; a loop has nothing to do."""
        ...

    def start(self) -> State:
        """The state before round 1."""
        ...

    def run_round(self, state: State, t: int) -> tuple[State, RoundResult]:
        """Round `t`, which counts from 1: the state after it, and what participants reported."""
        ...

    def evaluate(self, state: State) -> dict[str, np.ndarray]:
        """Accuracies of all clients on their own test samples with the present broadcast:
        `accuracy/NAME` → `[clients]`, NaN of those that have none or cannot be reached."""
        ...
