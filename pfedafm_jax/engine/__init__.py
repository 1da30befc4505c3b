"""From one client to many: the client store, the schedule, the devices, the round."""

from pfedafm_jax.engine.devices import Devices, setup_devices
from pfedafm_jax.engine.federation import Federation, RoundResult, draw_participants
from pfedafm_jax.engine.hosts import Hosts, LostProcess, join
from pfedafm_jax.engine.store import ClientStore

__all__ = [
    "ClientStore",
    "Devices",
    "Federation",
    "Hosts",
    "LostProcess",
    "RoundResult",
    "draw_participants",
    "join",
    "setup_devices",
]
