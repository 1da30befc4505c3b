"""Everything that a round changes, and its initial value."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from pfedafm_jax.config.config import Config
from pfedafm_jax.engine.federation import Programs
from pfedafm_jax.engine.programs import init_client, init_server
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.engine.visit import SERVER_KEY, START_KEY
from pfedafm_jax.methods.base import Method, Server
from pfedafm_jax.models.architecture import Architecture

Tree = Any


class State(NamedTuple):
    """The weights of a run; a checkpoint holds these.

    `store` may be larger than memory, so a round changes it in place: after a round use only the
    state that it returned.
    """

    server: Server  # the broadcast, on every device
    store: ClientStore  # what the clients keep between visits


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


def start(programs: Programs, folder: str | None = None) -> State:
    """The state before the first round; `folder` is where the store puts its files.

    Clients of one architecture start with the same weights unless `same_start` is off.
    """
    config, method, architectures = programs.config, programs.method, programs.architectures

    def group_start(group: int) -> Tree:
        return client_start(method, programs.key, group, architectures[group])

    def own_start(client: int) -> Tree:
        group = int(programs.groups[client])
        number = start_number(config, method, client, group)
        return client_start(method, programs.key, number, architectures[group])

    with ThreadPoolExecutor() as pool:
        server_key = jax.random.fold_in(programs.key, SERVER_KEY)
        server = pool.submit(init_server, method, server_key)
        starts = list(pool.map(group_start, range(len(architectures))))
    own = None if config.same_start else own_start
    store = ClientStore(starts, programs.groups, place=config.store, folder=folder, start_of=own)
    server = programs.devices.replicate(jax.device_get(server.result()))
    return State(server, store)
