"""From one client to many: rounds of a method on one device or several.

A `Federation` is what does not change in a run and `State` what does, its clients in a `store`. An
`Executor` does a round: the `Engine` draws participants (`round`), gives them to devices and hosts
(`schedule`), whose compiled `programs` make `visit`s; `reference/` does the same in plain loops.
Imports `base` to `methods`.
"""

from pfedafm_jax.engine.devices import Devices, setup_devices
from pfedafm_jax.engine.engine import Engine
from pfedafm_jax.engine.executor import Executor, RoundResult, State
from pfedafm_jax.engine.executors import executor_for
from pfedafm_jax.engine.federation import Federation
from pfedafm_jax.engine.hosts import LostProcess, Processes, join
from pfedafm_jax.engine.round import draw_participants
from pfedafm_jax.engine.store import ClientStore
