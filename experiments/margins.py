"""How far pFedAFM is ahead of each other method, on several splits side by side, in points.

    python experiments/margins.py experiments/results/full_length/hetero_cifar10-n100{,-mix0}

Runs of one dataset and split are compared, seed by seed and over the rounds that both have, by
their best round and by all clients at the end, paired by client. Where both have several seeds ± is
the deviation over these; otherwise it is a standard error with the client as the unit, and a best
round has none. Runs of pFedAFM with other mix vectors count as other methods.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from full_length import CHOSEN, finished, refuse_unlike, write
from matplotlib.figure import Figure
from mixes import USUAL, name_of
from paper import numbers
from paper.by_client import best_round, everyone, standard_error
from paper.by_seed import OURS
from paper.numbers import CONTROLS

from pfedafm_jax import PfedafmError
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.results import style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import markdown

BEST, EVERYONE, PAPER = "best round", "all clients", "best round in the paper"
PAPER_SPLITS = {f"{numbers.DATASETS[data]}, {own} classes" for data, own in numbers.CLASSES.items()}
Runs = Mapping[int, Run]  # by seed


class Margin(NamedTuple):
    """pFedAFM minus another, in points."""

    points: float
    error: float = np.nan
    note: str = ""

    def __str__(self) -> str:
        error = "" if np.isnan(self.error) else f" ± {self.error:.2f}"
        return f"{self.points:+.2f}{error}{self.note and f' ({self.note})'}"


Margins = Mapping[str, Mapping[str, Mapping[str, Margin]]]  # by split, other method, score


def split_of(run: Run) -> str:
    """`CIFAR-10, 2 classes`"""
    known, dataset = run.settings, run.config["dataset"]
    uneven = known["partition"] == "dirichlet"
    share = f"γ = {known['gamma']:g}" if uneven else f"{known['classes_per_client']} classes"
    return f"{numbers.DATASETS.get(dataset, dataset)}, {share}"


def margins(ours: Runs, other: Runs) -> dict[str, Margin]:
    """pFedAFM minus another by each score; nothing where no seed is common to both."""
    seeds, pairs, notes = sorted(ours.keys() & other.keys()), [], []
    for seed in seeds:
        rounds = min(len(ours[seed].records), len(other[seed].records))
        pairs.append((ours[seed].first(rounds), other[seed].first(rounds)))
        if rounds < len(ours[seed].records):
            notes = [f"{rounds} rounds"]
    if not pairs:
        return {}
    best = [best_round(a) - best_round(b) for a, b in pairs]
    gaps = [(everyone(a) - everyone(b))[-1] for a, b in pairs]
    means = [gap.mean() for gap in gaps]
    several = len(pairs) > 1
    notes += [] if several or len(ours) == 1 else [f"seed {seeds[0]}"]
    errors = [np.std(values, ddof=1) for values in (best, means)] if several else []
    errors = errors or [np.nan, standard_error(gaps[0])]
    found = {
        name: Margin(float(np.mean(values)), float(error), ", ".join(notes))
        for name, values, error in zip((BEST, EVERYONE), (best, means), errors, strict=True)
    }
    run = pairs[0][1]
    if run.config["method"] != OURS and split_of(run) in PAPER_SPLITS:
        column = run.config["num_clients"], run.config["dataset"]
        kind = "hetero" if len(run.config["architectures"]) > 1 else "homo"
        names = OURS, run.config["method"]
        own, stated = (numbers.accuracy(kind, name, *column) for name in names)
        if own is not None and stated is not None:
            found[PAPER] = Margin(own - stated)
    return found


def table(found: Margins, others: Sequence[str]) -> str:
    """A row for each other method, a column for each score of each split."""
    columns = [
        (split, score)
        for split, own in found.items()
        for score in (BEST, PAPER, EVERYONE)
        if any(score in one for one in own.values())
    ]
    rows = []
    for other in others:
        cells = [found[split].get(other, {}) for split, _ in columns]
        cells = [
            str(cell[score]) if score in cell else "–" if score == PAPER else "not run"
            for cell, (_, score) in zip(cells, columns, strict=True)
        ]
        rows.append([other, *cells])
    heads = [f"{split}: {score}" for split, score in columns]
    return markdown(["pFedAFM minus", *heads], rows)


def picture(found: Margins, others: Sequence[str]) -> Figure:
    """A panel for each score; right of the line pFedAFM is ahead."""
    figure, [row] = style.panels(1, 2, 5.0, 0.34 * len(others) + 1.4, sharey=True)
    places = np.arange(len(others))[::-1]
    for axes, score in zip(row, (BEST, EVERYONE), strict=True):
        axes.axvline(0, color=style.BLACK, linewidth=1)
        for number, (split, own) in enumerate(found.items()):
            shown = [own.get(other, {}).get(score, Margin(np.nan)) for other in others]
            axes.errorbar(
                [one.points for one in shown],
                places + 0.2 * ((len(found) - 1) / 2 - number),
                xerr=np.nan_to_num([one.error for one in shown]),
                fmt="o",
                markersize=5,
                color=style.COLOURS[number % len(style.COLOURS)],
                label=split,
            )
        axes.set_yticks(places, others)
        axes.set_title(score, fontsize=10)
        axes.set_xlabel("pFedAFM minus the other, points")
    style.legend_below(figure)
    return figure


def main(argv: list[str]) -> int:
    runs, out = finished(argv, "margins", __doc__)
    by_split: dict[str, dict[str, dict[int, Run]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        own = by_split[split_of(run)][name_of(run)]
        if own.setdefault(run.config["seed"], run) is not run:
            raise PfedafmError(f"{run.folder} is the second run of its kind and seed")
    found: dict[str, dict[str, dict[str, Margin]]] = {}
    rows: dict[str, tuple[int, float]] = {}  # the paper's methods, controls, mixes; nearest first
    for split, by_name in by_split.items():
        refuse_unlike([run for own in by_name.values() for run in own.values()], CHOSEN)
        if USUAL not in by_name:
            raise PfedafmError(f"no finished run is one of {OURS} ({split})")
        ours = by_name.pop(USUAL)
        own_rows = found[f"{split}, {len(next(iter(ours.values())).records)} rounds"] = {}
        for name, own in by_name.items():
            method = next(iter(own.values())).config["method"]
            title, kind = (f"its mix {name}", 2) if method == OURS else (name, method in CONTROLS)
            if margin := margins(ours, own):
                own_rows[title] = margin
                rows.setdefault(title, (int(kind), margin[EVERYONE].points))
    if not rows:
        raise PfedafmError(f"there is nothing to compare {OURS} with")
    others = sorted(rows, key=lambda title: rows[title])
    write({"pFedAFM minus the other, points": table(found, others)}, picture(found, others), out)
    return 0


if __name__ == "__main__":
    guarded(main)
