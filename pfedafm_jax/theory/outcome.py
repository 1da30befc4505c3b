"""What the measurements of all rounds amount to: the constants, the average of Theorem 2 by T, its bound, the lemmas."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.theory.estimators import bound


def outcome(rounds: Sequence[dict[str, Any]], config: Config) -> dict[str, Any]:
    """The constants of the theory from what was measured, the average of Theorem 2 by T, and its bound."""
    visits = [visit for row in rounds for visit in row["visits"]]
    ratios = [ratio for visit in visits for ratio in visit["smoothness"].values() if ratio is not None]
    usual = [visit["smoothness"]["start to step"] or 0.0 for visit in visits]
    if not visits or not rounds[0]["visits"] or max(usual) <= 0:
        raise PfedafmError("nothing finite to measure: the training diverged, or its learning rate is 0")
    constants = {
        "L1": max(ratios),
        "sigma2": max(visit["variance"] for visit in visits),
        "delta2": max(visit["variation"] for visit in visits),
        "Delta": float(np.mean([visit["loss"]["start"] for visit in rounds[0]["visits"]])),  # L* = 0
        "E": float(np.mean([visit["steps"] for visit in visits])),
        "eta": config.learning_rate,
    }
    typical = {
        **constants,
        "L1": float(np.median(usual)),
        "sigma2": float(np.mean([visit["variance"] for visit in visits])),
        "delta2": float(np.mean([visit["variation"] for visit in visits])),
    }
    by_round = [
        float(np.mean([_path_mean(visit["squared_gradient"]) for visit in row["visits"]]))
        for row in rounds
        if row["visits"]
    ]
    numbers = [row["round"] for row in rounds if row["visits"]]
    average = (np.cumsum(by_round) / np.arange(1, len(by_round) + 1)).tolist()
    visits_per_client = _visits_per_client(config, numbers)
    return {
        "constants": constants,
        "typical": typical,
        "T": numbers,
        "by_round": by_round,
        "average": average,
        "visits": visits_per_client,
        "bound": [bound(T, **constants) for T in visits_per_client],
        "typical_bound": [bound(T, **typical) for T in visits_per_client],
        "slope": _slope(numbers, average),
        "lemmas": _lemmas(visits, constants),
    }


def _path_mean(norms: dict[str, float]) -> float:
    """Mean of ‖∇L‖² over a round's steps, from its start, middle and end (trapezoidal rule)."""
    return (norms["start"] + 2 * norms["local"] + norms["trained"]) / 4


def _visits_per_client(config: Config, numbers: Sequence[int]) -> list[float]:
    """Visits so far over clients seen so far: the rounds that the theorem, which is about one client, has had; T if C = 1."""
    seen: set[int] = set()
    found = {}
    for number in range(1, max(numbers) + 1):
        seen.update(draw_participants(config.seed, number, config.num_clients, config.num_participants).tolist())
        found[number] = config.num_participants * number / len(seen)
    return [found[number] for number in numbers]


def _slope(numbers: Sequence[int], average: Sequence[float]) -> float | None:
    """d log(average) / d log T over the second half of the rounds; -1 would be 1/T."""
    half = len(numbers) // 2
    if len(numbers) - half < 2 or min(average) <= 0:
        return None
    return float(np.polyfit(np.log(numbers[half:]), np.log(average[half:]), 1)[0])


def _lemmas(visits: Sequence[dict[str, Any]], constants: dict[str, float]) -> dict[str, Any]:
    """What local training and aggregation do to the loss, beside what Lemmas 1 and 2 say of it; means over visits."""
    eta, smooth, noise = constants["eta"], constants["L1"], constants["sigma2"]
    least = [
        visit["steps"]
        * ((eta - smooth * eta**2 / 2) * _path_mean(visit["squared_gradient"]) - smooth * eta**2 * noise / 2)
        for visit in visits
    ]
    changes = [visit["loss"]["aggregated"] - visit["loss"]["trained"] for visit in visits]
    taken = [eta * visit["variation"] for visit in visits]
    return {
        "visits": len(visits),
        "loss_fall": float(np.mean([visit["loss"]["start"] - visit["loss"]["trained"] for visit in visits])),
        "lemma1_fall": float(np.mean(least)),
        "loss_change": float(np.mean(changes)),
        "eta_variation": float(np.mean(taken)),
        "lemma2_holds": sum(change <= most for change, most in zip(changes, taken, strict=True)),
    }
