"""What every executor does alike in a round: who takes part, who drops out, with which weight."""

from collections.abc import Sequence

import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.config.config import Config
from pfedafm_jax.engine.federation import Federation


def draw_participants(seed: int, t: int, num_clients: int, num_participants: int) -> np.ndarray:
    """The participants of round `t`, in the order drawn; they depend on seed and round only."""
    generator = np.random.Generator(np.random.PCG64([seed, t, 0xD4A3]))
    return generator.choice(num_clients, num_participants, replace=False)


def participants_of(
    config: Config, t: int, given: Sequence[int] | np.ndarray | None = None
) -> tuple[list[int], list[int]]:
    """Who takes part in round `t` to its end, in the order drawn, and who of those drawn drops out.

    Both depend on nothing but seed and round. Clients that are `given` take part, all of them.
    """
    if given is not None:
        return [int(client) for client in given], []
    order = draw_participants(config.seed, t, config.num_clients, config.num_participants)
    generator = np.random.Generator(np.random.PCG64([config.seed, t, 0xD209]))
    gone = generator.random(config.num_clients)[order] < config.dropout
    return order[~gone].tolist(), order[gone].tolist()


def weights_of(federation: Federation, clients: Sequence[int]) -> list[float]:
    """Weights of these clients in the average: their number of training samples, or 1."""
    if federation.config.aggregation != "samples":
        return [1.0] * len(clients)
    return [float(federation.num_train[client]) for client in clients]


def check_participants(federation: Federation, participants: Sequence[int]) -> None:
    """Raises if these clients cannot be trained together, where a caller has chosen them."""
    config = federation.config
    num_clients = config.num_clients
    different = len(set(participants)) == len(participants)
    if not different or not all(0 <= client < num_clients for client in participants):
        raise bad("participants", participants, f"0 to {num_clients - 1}, each once")
    if federation.method.sees_uploads and len(participants) > config.num_participants:
        accepted = f"{config.num_participants} at most, where the server sees single uploads"
        raise bad("participants", len(participants), accepted)
