"""A grid of settings: its points, the choice among them by validation data, and the picture of it.

Every client's training data is cut once more and the models see the larger part. The other part takes the place of the
test images, which belong to nobody here: no choice can have seen them.
"""

import itertools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pfedafm_jax.config import Config, bad, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.experiment import split
from pfedafm_jax.reproduce import paper
from pfedafm_jax.reproduce.outcome import PAPER, Table, mean_and_deviation, panels, percent
from pfedafm_jax.reproduce.plan import Summary

Grid = dict[str, tuple[Any, ...]]  # setting, `pfedafm.mix_learning_rate` for one of a method's own, → values
Point = dict[str, Any]  # setting → value


def validation_split(config: Config, dataset: Dataset) -> Partition:
    """The clients' shares with the held-out part of the training data where the test data would be."""
    whole = split(config, dataset)
    return Partition(whole.train, whole.validation, tuple(np.zeros(0, np.int32) for _ in whole.train))


# ---------------------------------------------------------------------------------------------- points


def paper_grid(method: str) -> Grid:
    """What the paper searches: batches, epochs, for pFedAFM the mix vector's learning rate; 0.01 for all networks."""
    grid: Grid = {**paper.GRID, "learning_rate": (paper.LEARNING_RATE,)}
    return grid | ({"pfedafm.mix_learning_rate": paper.MIX_LEARNING_RATES} if method == "pfedafm" else {})


def parse_grid(words: Sequence[str]) -> Grid:
    """`["batch_size=64,512", "pfedafm.mix_learning_rate=0.1,1"]` → names and values.

    >>> parse_grid(["batch-size=64,512", "pfedafm.training=iterative,end_to_end"])
    {'batch_size': (64, 512), 'pfedafm.training': ('iterative', 'end_to_end')}
    """
    grid: Grid = {}
    for word in words:
        name, equals, values = word.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name or not all(value.strip() for value in values.split(",")):
            raise bad("grid", word, "SETTING=VALUE,VALUE,… like batch_size=64,512")
        if name in ("seed", "validation_fraction"):
            raise bad("grid", word, "settings to choose; --seeds and --validation-fraction are flags of their own")
        if name in grid:
            raise bad("grid", word, f"each setting once; {name} is there already")
        grid[name] = tuple(dict.fromkeys(_value(value.strip()) for value in values.split(",")))
    return grid


def _value(text: str) -> Any:
    """A number, true or false as TOML has them; none; anything else is a word."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def points(grid: Grid) -> list[Point]:
    """All combinations, the last setting changing fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def at(config: Config, point: Point) -> Config:
    """The configuration of a point."""
    nested: dict[str, Any] = {}
    for name, value in point.items():
        *groups, last = name.split(".")
        place = nested
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return updated(config, nested)


def label(point: Point) -> str:
    """A folder's name: `batch_size=64,mix_learning_rate=0.1`."""
    return ",".join(f"{name.split('.')[-1]}={_shown(value)}" for name, value in point.items()) or "as_it_is"


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---------------------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Score:
    """A point and its runs, one a seed. `accuracy` is what the choice is by; None: a run diverged, or there is none."""

    point: Point
    summaries: Sequence[Summary]
    validation: Sequence[float | None]  # all clients after the last round, for each seed

    @property
    def diverged(self) -> int | None:
        """The first round in which a run was not finite."""
        rounds = [s["diverged_at_round"] for s in self.summaries if s["diverged_at_round"] is not None]
        return min(rounds, default=None)

    @property
    def accuracy(self) -> float | None:
        known = [value for value in self.validation if value is not None and np.isfinite(value)]
        return None if self.diverged is not None or len(known) < max(1, len(self.validation)) else float(np.mean(known))


def ranked(scores: Sequence[Score]) -> list[Score]:
    """Best first, the grid's own order among equals; those without an accuracy last."""
    return sorted(scores, key=lambda score: -1.0 if score.accuracy is None else score.accuracy, reverse=True)


def table(scores: Sequence[Score]) -> Table:
    """All points, best first."""
    names = list(scores[0].point) if scores else []
    rows = []
    for place, score in enumerate(ranked(scores), 1):
        mean, deviation = mean_and_deviation(score.validation)
        last, _ = mean_and_deviation([summary["last_mean_accuracy"] for summary in score.summaries])
        accuracy = percent(mean, deviation) if score.diverged is None else f"✗ diverged at round {score.diverged}"
        rounds = max((summary["rounds"] for summary in score.summaries), default=0)
        minutes = sum(summary["seconds"] for summary in score.summaries) / 60
        rows.append([str(place), *(_shown(score.point[name]) for name in names), accuracy, percent(last), str(rounds),
                     f"{minutes:.1f}"])  # fmt: skip
    columns = ("place", *(name.split(".")[-1] for name in names), "all clients, %", "participants, %", "rounds", "min")
    return Table("Accuracy on validation data, after the last round", columns, rows)


def influence(scores: Sequence[Score]) -> dict[str, float]:
    """For each setting with several values how far apart they are, each by its mean over all other settings."""
    found = {}
    for name in scores[0].point if scores else ():
        groups: dict[Any, list[float]] = {}
        for score in scores:
            if score.accuracy is not None:
                groups.setdefault(score.point[name], []).append(score.accuracy)
        means = [float(np.mean(values)) for values in groups.values()]
        if len({score.point[name] for score in scores}) > 1:
            found[name] = max(means) - min(means) if means else 0.0
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def heat_map(scores: Sequence[Score], title: str) -> Figure:
    """The two settings that matter most, each field the best over all others; crosses: all runs there diverged."""
    names = list(influence(scores))[:2]
    values = [list(dict.fromkeys(score.point[name] for score in scores)) for name in names]
    values += [[None]] * (2 - len(values))
    best = np.full((len(values[1]), len(values[0])), np.nan)
    for score in scores:
        if score.accuracy is not None:
            column = values[0].index(score.point[names[0]]) if names else 0
            row = values[1].index(score.point[names[1]]) if len(names) > 1 else 0
            best[row, column] = np.nanmax([best[row, column], 100 * score.accuracy])
    figure, [[axes]] = panels(1, 1, max(5.0, 2.2 + 1.1 * best.shape[1]), max(2.4, 1.6 + 0.7 * best.shape[0]))
    axes.grid(False)
    known = np.isfinite(best)
    low, high = (best[known].min(), best[known].max()) if known.any() else (0.0, 1.0)
    picture = axes.imshow(best, cmap="viridis", aspect="auto", vmin=low, vmax=max(high, low + 0.01))
    for row, column in np.ndindex(best.shape):
        value = best[row, column]
        dark = np.isfinite(value) and value < (low + high) / 2
        axes.text(column, row, f"{value:.2f}" if np.isfinite(value) else "✗", ha="center", va="center",
                  color="white" if dark else PAPER, fontweight="bold" if value == high else "normal")  # fmt: skip
    axes.set_xticks(range(best.shape[1]), [_shown(v) for v in values[0]] if names else [""])
    axes.set_yticks(range(best.shape[0]), [_shown(v) for v in values[1]] if len(names) > 1 else [""] * best.shape[0])
    axes.set(title=title, xlabel=names[0] if names else "", ylabel=names[1] if len(names) > 1 else "")
    figure.colorbar(picture, ax=axes, label="all clients, validation, %", shrink=0.9)
    return figure
