"""From one client to many: state, compiled programs and rounds; client store, schedule, devices,
processes."""

from pfedafm_jax.engine.devices import Devices, setup_devices
from pfedafm_jax.engine.federation import Programs, build
from pfedafm_jax.engine.hosts import LostProcess, Processes, join
from pfedafm_jax.engine.round import RoundResult, draw_participants, evaluate, run_round
from pfedafm_jax.engine.state import State, start
from pfedafm_jax.engine.store import ClientStore
