"""`pfedafm_released`: rounds as in the released code of pFedAFM, one client after the other.

`start`, `run_round` and `evaluate` have the engine's interface.
"""

from collections.abc import Sequence

import jax
import numpy as np

from pfedafm_jax import engine
from pfedafm_jax.base.errors import bad
from pfedafm_jax.engine import Programs, RoundResult, State
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.reference import plain
from pfedafm_jax.engine.reference.algorithm1 import aggregated, momenta, visit
from pfedafm_jax.engine.round import participants_of


def start(programs: Programs, folder: str | None = None) -> State:
    """As the engine's; the server's state also has `relay`, what one client leaves to the next."""
    name, count = programs.config.method, programs.processes.count
    if count > 1:
        raise bad("num_processes", count, f"1 for {name}, whose clients depend on one another")
    for one in {programs.method.shared, *programs.architectures}:
        if one.statistics or one.random:
            raise bad(
                "architectures", one.name, f"networks without BatchNorm or Dropout for {name}"
            )
    state = engine.start(programs, folder)
    first, extractor = state.store.start(0), jax.device_get(state.server["shared_extractor"])
    relay = {"mix": first["mix"], **momenta(first, extractor)}
    return state._replace(server={**state.server, "relay": programs.devices.replicate(relay)})


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One round, see `engine.run_round`."""
    settings, server = programs.method.settings, jax.device_get(state.server)
    received, relay = server["shared_extractor"], server["relay"]
    order, dropped = participants_of(programs.config, t, participants)
    shares = plain.weights(programs, order)
    if settings.last_alone:
        shares = [float(k == order[-1]) for k in order]
    uploads, reports = [], []
    for k, share in zip(order, shares, strict=True):
        client = state.store.state(k)
        if settings.mix_relay and state.store.visited[k]:
            client = {**client, "mix": relay["mix"]}  # as the previous client left it
        left = relay if settings.leak_momentum else momenta(client, received)
        with matmul_precision(programs.config.precision):
            done = visit(programs, t, k, client, received, left)
        state.store.write(k, done.client)
        relay = done.left if done.report["finite"] else relay
        reports.append(done.report)
        if done.extractor is not None:
            uploads.append((share, done.extractor))
    how = "last" if settings.last_alone else programs.method.aggregation
    new = {"shared_extractor": aggregated(how, uploads, received), "relay": relay}
    result = RoundResult(np.array(order, int), plain.columns(reports), dropped)
    return plain.with_server(state, new), result


def evaluate(
    programs: Programs, state: State, clients: Sequence[int] | np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """Accuracies of these clients, or of all, see `engine.evaluate`."""
    with matmul_precision(programs.config.precision):
        return plain.evaluate(programs, state, clients)
