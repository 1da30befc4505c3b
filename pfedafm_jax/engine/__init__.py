"""From one client to many: rounds of a method on one device or several.

A `federation` is what does not change in a run and `state` what does, its clients in a `store`; a
`round` draws participants, a `schedule` gives them to `devices` and `hosts`, whose `programs` make
`visit`s. `reference/` does the same in plain loops. Imports `base` to `methods`.
"""

from pfedafm_jax.engine.devices import Devices, setup_devices
from pfedafm_jax.engine.federation import Programs, build
from pfedafm_jax.engine.hosts import LostProcess, Processes, join
from pfedafm_jax.engine.round import RoundResult, draw_participants, evaluate, run_round
from pfedafm_jax.engine.state import State, start
from pfedafm_jax.engine.store import ClientStore
