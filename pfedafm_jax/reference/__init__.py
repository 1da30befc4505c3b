"""Every method as its paper writes it down: plain loops over rounds, clients, epochs and batches.

Slow and obvious: one client after the other, `lax.conv` networks, losses and SGD by hand, the last batch at its true
size, the average as a sum. The engine is tested against it and timed against it. Parameters, keys and the order of
samples are those of the engine, so both compute the same numbers up to rounding; no loss, average or coding of the
engine's methods is used.
"""

from pfedafm_jax.reference import baselines, mutual, personal, pfedafm  # each enters its methods in ALGORITHMS
from pfedafm_jax.reference.loop import (
    ALGORITHMS,
    Algorithm,
    Reference,
    aggregation_shares,
    clipped,
    cross_entropy,
    sgd,
    weighted_sum,
)

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Reference",
    "aggregation_shares",
    "baselines",
    "clipped",
    "cross_entropy",
    "mutual",
    "personal",
    "pfedafm",
    "sgd",
    "weighted_sum",
]
