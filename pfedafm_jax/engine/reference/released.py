"""`pfedafm_released`: rounds as in the released code of pFedAFM, one client after the other."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.executor import RoundResult, State
from pfedafm_jax.engine.reference.algorithm1 import Algorithm1, aggregated, momenta
from pfedafm_jax.engine.reference.plain import columns, with_server
from pfedafm_jax.engine.round import participants_of, weights_of


class ReleasedLoop(Algorithm1):
    """Does rounds as the released code does: an `Executor`.

    The server's state also has `relay`, what one client leaves to the next.
    """

    def start(self, folder: str | None = None) -> State:
        """The state before round 1; raises if settings are beyond what the released code does."""
        name, count = self.federation.config.method, self.processes.count
        if count > 1:
            raise bad("num_processes", count, f"1 for {name}, whose clients depend on one another")
        for one in {self.method.shared, *self.federation.architectures}:
            if one.statistics or one.random:
                accepted = f"networks without BatchNorm or Dropout for {name}"
                raise bad("architectures", one.name, accepted)
        state = super().start(folder)
        first = state.clients.start(0)
        extractor = state.server["shared_extractor"]
        relay = {"mix": first["mix"], **momenta(first, extractor)}
        return state._replace(server={**state.server, "relay": jax.device_get(relay)})

    def run_round(
        self, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> tuple[State, RoundResult]:
        """Round `t`; `participants` instead of those drawn."""
        settings: Any = self.method.settings
        server = jax.device_get(state.server)
        received, relay = server["shared_extractor"], server["relay"]
        order, dropped = participants_of(self.federation.config, t, participants)
        weights = weights_of(self.federation, order)
        if settings.last_alone:
            weights = [float(k == order[-1]) for k in order]
        uploads, reports = [], []
        for k, weight in zip(order, weights, strict=True):
            client = state.clients.state(k)
            if settings.mix_relay and state.clients.visited[k]:
                client = {**client, "mix": relay["mix"]}  # as the previous client left it
            left = relay if settings.leak_momentum else momenta(client, received)
            with matmul_precision(self.federation.config.precision):
                done = self.visit_of(t, k, client, received, left)
            state.clients.write(k, done.client)
            relay = done.left if done.report["finite"] else relay
            reports.append(done.report)
            if done.extractor is not None:
                uploads.append((weight, done.extractor))
        how = "last" if settings.last_alone else self.method.aggregation
        new = {"shared_extractor": aggregated(how, uploads, received), "relay": relay}
        return with_server(state, new), RoundResult(np.array(order, int), columns(reports), dropped)

    def evaluate(
        self, state: State, clients: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Accuracies of these clients, or of all: `accuracy/NAME` → `[clients]`."""
        with matmul_precision(self.federation.config.precision):
            return super().evaluate(state, clients)
