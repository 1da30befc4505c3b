"""The paper's tables and figures: its numbers, the runs they need at three scales, and both side by side."""

from pfedafm_jax.reproduce.items import ITEMS, Item
from pfedafm_jax.reproduce.outcome import Claim, Outcome, Table
from pfedafm_jax.reproduce.plan import Run, Standing, Study, estimator, look
from pfedafm_jax.reproduce.results import Results
from pfedafm_jax.reproduce.scales import SCALES, Scale

__all__ = [
    "ITEMS",
    "SCALES",
    "Claim",
    "Item",
    "Outcome",
    "Results",
    "Run",
    "Scale",
    "Standing",
    "Study",
    "Table",
    "estimator",
    "look",
]
