"""pFedAFM as its released code has it, where that differs from the paper: see `docs/deviations.md`.

Clients depend on one another here, so they are trained one after the other, by
`engine/reference/released.py`.
"""

from dataclasses import replace

from pfedafm_jax.config.method_settings import Rate
from pfedafm_jax.methods.base import Cost
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.training.sgd import SGD


class PFedAFMReleased(PFedAFM):
    """Its settings switch off, one by one, what differs from the paper."""

    name = "pfedafm_released"
    title = "pFedAFM, as released"
    in_turn = True

    class Settings(PFedAFM.Settings):
        """Beside pFedAFM's own settings."""

        mix_learning_rate: Rate = 0.01
        """Learning rate of the mix vector (0.1 there with one architecture)."""
        mix_weight_decay: Rate = 1e-3
        """Weight decay on the mix vector."""
        mix_relay: bool = True
        """One mix vector, passed from client to client, instead of one each."""
        leak_momentum: bool = True
        """Momentum of shared extractor and mix vector carries over to the next client."""
        last_alone: bool = True
        """The last participant's extractor instead of the average."""
        send_header: bool = True
        """An untrained header is sent too (counted as traffic)."""

    @property
    def mix_optimizer(self) -> SGD:
        return super().mix_optimizer._replace(weight_decay=self.settings.mix_weight_decay)

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        cost = super().cost(architecture, num_train, num_classes_seen)
        floats = cost.floats_up + self.settings.send_header * self.shared.header_params
        return replace(cost, floats_up=floats, floats_down=floats)
