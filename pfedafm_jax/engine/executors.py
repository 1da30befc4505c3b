"""Which executor does the rounds of a simulation."""

from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.engine import Engine
from pfedafm_jax.engine.federation import Federation
from pfedafm_jax.engine.reference.released import ReleasedLoop


def executor_for(
    federation: Federation, dataset: Dataset, partition: Partition, devices: Devices | None = None
) -> Engine | ReleasedLoop:
    """The engine, or a loop where the method's clients depend on one another.

    Args:
        federation: made of this dataset and partition.
        devices: by default as many as the settings say.
    """
    kind = ReleasedLoop if federation.method.in_turn else Engine
    return kind(federation, dataset, partition, devices)
