"""The state before the first round: initial weights of clients and server."""

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax

from pfedafm_jax.config.config import Config
from pfedafm_jax.engine.executor import State
from pfedafm_jax.engine.programs import init_client
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.engine.visit import START_KEY
from pfedafm_jax.methods.base import Method
from pfedafm_jax.models.architecture import Architecture

if TYPE_CHECKING:
    from pfedafm_jax.engine.federation import Federation

Tree = Any


def start_number(config: Config, method: Method, client: int, group: int | None) -> int:
    """Selects the random numbers of a client's initial state: those of its group with `same_start`,
    otherwise, and for a newcomer, who has no group, its own."""
    if group is not None and config.same_start:
        return group
    return len(method.architectures) + client


def client_start(method: Method, key: jax.Array, number: int, architecture: Architecture) -> Tree:
    """A client's initial state, as numpy arrays; `number` is its `start_number`."""
    own = jax.random.fold_in(jax.random.fold_in(key, START_KEY), number)
    return jax.device_get(init_client(method, own, architecture))


def initial_state(federation: "Federation", folder: str | None = None) -> State:
    """The state before the first round, as numpy arrays; `folder` is where the store puts its files.

    Clients of one architecture start with the same weights unless `same_start` is off.
    """
    config = federation.config
    method = federation.method

    def group_start(group: int) -> Tree:
        return client_start(method, federation.run_key, group, method.architectures[group])

    with ThreadPoolExecutor() as pool:
        server = pool.submit(federation.initial_server)
        starts = list(pool.map(group_start, range(len(method.architectures))))
    clients = ClientStore(
        starts,
        federation.groups,
        place=config.store,
        folder=folder,
        start_of=None if config.same_start else federation.initial_client,
    )
    return State(server.result(), clients)
