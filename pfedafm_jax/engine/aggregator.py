"""From the totals of a round to the next broadcast: sums over devices and processes, the update."""

import jax
import numpy as np

from pfedafm_jax.base.trees import as_numbers
from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.federation import Federation
from pfedafm_jax.engine.hosts import Processes
from pfedafm_jax.engine.programs import CompiledPrograms
from pfedafm_jax.engine.visit import Totals
from pfedafm_jax.methods.base import Method, Server


class Aggregator:
    """The server's part of a round, whoever has visited the clients.

    Args:
        federation: of which the settings are used.
        method: that the programs were compiled for.
        programs: of which only `sum`, `update` and `zeros` are used.
        devices, processes: those that the totals are on.

    Attributes:
        method: the method with its numbers on every device.
        key_data: the run's random key, as `key_data`, on every device.
    """

    def __init__(
        self,
        federation: Federation,
        method: Method,
        programs: CompiledPrograms,
        devices: Devices,
        processes: Processes,
    ):
        self.config, self.programs = federation.config, programs
        self.devices, self.processes = devices, processes
        self.method: Method = devices.replicate(as_numbers(method))
        self.key_data = devices.replicate(np.asarray(jax.random.key_data(federation.run_key)))

    def zeros(self, shared_stage: bool = False) -> Totals:
        """Totals of nobody, `[devices, …]`: those of the first stage, or of the shared one."""
        return self.programs.zeros[int(shared_stage)]

    def next_server(
        self, server: Server, t: int, participants: list[int], totals: list[Totals]
    ) -> Server:
        """The server's state after round `t`; the old one if the method uploads nothing.

        Args:
            server: its state before.
            participants: in the order drawn, which is that of single uploads.
            totals: of each stage, `[devices, …]`.
        """
        if self.programs.sum is None or self.programs.update is None:
            return server
        summed = self.programs.sum(totals)
        if self.processes.count > 1:
            summed = self.devices.replicate(self.processes.sum(summed))
        new = self.programs.update(
            self.method,
            server,
            summed,
            self.devices.replicate(self._clients_by_rank(participants)),
            self.key_data,
            self.devices.replicate(np.int32(t)),
        )
        jax.block_until_ready(new)  # collectives of two rounds must not overlap
        return new

    def _clients_by_rank(self, participants: list[int]) -> np.ndarray:
        """int32 `[K]`: who sent the upload of each rank; `num_clients` where nobody did."""
        clients = np.full(self.config.num_participants, self.config.num_clients, np.int32)
        clients[: len(participants)] = participants[: self.config.num_participants]
        return clients
