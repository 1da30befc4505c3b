"""What a run has cost: floats and FLOPs so far, and until a target accuracy was reached."""

from collections.abc import Sequence
from typing import Any

TARGET_ACCURACY = {"cifar10": 0.9, "cifar100": 0.5}  # the paper's targets


def to_target(rounds: Sequence[dict[str, Any]], target: float | None) -> dict[str, Any]:
    """Rounds, floats (both directions) and FLOPs of all participants until the mean accuracy reached `target`.

    >>> to_target([{"round": 1, "mean_accuracy": 0.5, "floats_up": 2, "floats_down": 1, "flops": 10}], 0.5)
    {'target_accuracy': 0.5, 'rounds_to_target': 1, 'floats_to_target': 3, 'flops_to_target': 10}
    """
    floats = flops = 0.0
    if target is not None:
        for row in rounds:
            floats += row["floats_up"] + row["floats_down"]
            flops += row["flops"]
            if row["mean_accuracy"] is not None and row["mean_accuracy"] >= target:
                return {
                    "target_accuracy": target,
                    "rounds_to_target": row["round"],
                    "floats_to_target": int(floats),
                    "flops_to_target": int(flops),
                }
    return {"target_accuracy": target, "rounds_to_target": None, "floats_to_target": None, "flops_to_target": None}
