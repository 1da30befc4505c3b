"""Tables 1 to 3: sizes of the networks, and mean accuracy with one or with five architectures."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product

from matplotlib.figure import Figure

from paper import numbers, outcome
from paper.outcome import BEST, EVERYONE, LAST_TEN, PAPER, Outcome, Table
from paper.study import Found, Study, at
from pfedafm_jax.methods import find_method
from pfedafm_jax.models.architecture import describe
from pfedafm_jax.results import style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import percent
from pfedafm_jax.runs.existing import Task

Cell = tuple[int, str]  # N and dataset
TITLES = {
    "homo": "Table 2: one architecture for all clients", "hetero": "Table 3: five architectures",
}  # fmt: skip


def model_sizes(study: Study, found: Found) -> Outcome:
    """Table 1. Megabytes are 2^20 bytes of float32 with ten classes, as the paper's numbers are."""
    rows = []
    for name, stated in numbers.MODEL_MEGABYTES.items():
        ten, hundred = describe(name, 10), describe(name, 100)
        sizes = f"{ten.params * 4 / 2**20:.2f}", f"{stated:.2f}"
        counts = (f"{n:,}" for n in (ten.params, hundred.params, ten.extractor_params))
        rows.append([style.architecture_label(name), *sizes, *counts, f"{ten.macs / 1e6:.2f}"])
    columns = ("network", "MB", "paper", "weights, 10 classes", "100 classes", "without header")
    columns += ("M mult-adds",)
    figure, [[axes]] = style.panels(1, 1, 6.5, 3.6)
    here, there = ([float(row[column]) for row in rows] for column in (1, 2))
    axes.bar(range(len(rows)), here, color=style.BLUE, width=0.6, label="here")
    axes.plot(range(len(rows)), there, "D", color=PAPER, markersize=5, label="paper")
    axes.set_xticks(range(len(rows)), [row[0] for row in rows])
    axes.set(ylabel="MB of float32, ten classes", title="Table 1: sizes of the networks")
    axes.legend(frameon=False)
    notes = [
        f"The paper's {row[2]} MB of {row[0]} are not what the widths in its own table give, "
        f"{row[1]} MB; the widths are used here."
        for row in rows
        if abs(float(row[1]) - float(row[2])) > 0.01
    ]
    tables = [Table("", columns, rows)]
    return Outcome("Table 1: sizes of the networks", tables, figure, notes=notes)


# ------------------------------------------------------------------------------- Tables 2 and 3


def accuracy_tasks(study: Study, family: str) -> dict[tuple, Task]:
    """The runs of Table 2 (`homo`) or 3 (`hetero`) by N, dataset, method and seed."""
    methods = study.scale.homogeneous if family == "homo" else study.scale.methods
    every = product(study.scale.columns, study.datasets, study.one_seed, study.chosen(methods))
    return {
        (column, dataset, method, seed): study.task(method, dataset, seed, family, column)
        for column, dataset, seed, method in every
    }


def accuracy_table(study: Study, found: Found, family: str) -> Outcome:
    """Table 2 or 3 from the finished runs, the paper's numbers beside ours."""
    names = {key[2] for key in found}
    methods = [name for name in numbers.METHODS if name in names]
    methods += sorted(names - set(methods))
    cells = {
        (column, dataset): {m: runs for m in methods if (runs := at(found, column, dataset, m))}
        for column, dataset in dict.fromkeys(key[:2] for key in found)
    }
    labels = [f"N={column}, {study.label(dataset)}" for column, dataset in cells]
    stated = {cell: partial(_stated, family, cell) for cell in cells}
    overview = [
        [find_method(name).title]
        + [_cell(runs.get(name, ()), stated[cell](name)) for cell, runs in cells.items()]
        for name in methods
    ]
    for label, baselines, margins in (
        ("pFedAFM − best baseline", numbers.METHODS, numbers.MARGIN_BEST),
        ("pFedAFM − best of category", numbers.MUTUAL, numbers.MARGIN_MUTUAL),
        ("pFedAFM − best control", numbers.CONTROLS, {}),
    ):
        if baselines is numbers.CONTROLS and not names & set(baselines):
            continue
        known = dict(zip(numbers.CELLS, margins.get(family, ()), strict=False))
        row = [_margin(runs, baselines, known.get(cell)) for cell, runs in cells.items()]
        overview.append([label, *row])
    title = "Best mean accuracy of participants, %; in brackets the paper's (fails: no convergence)"
    tables = [Table(title, ["method", *labels], overview)]
    columns = ("method", "best", "paper", "last ten", "all clients", "spread", "rounds", "seeds")
    for label, (cell, members) in zip(labels, cells.items(), strict=True):
        rows = []
        for name, runs in members.items():
            keys = (BEST, LAST_TEN, EVERYONE, "spread_over_clients")
            best, *others = (percent(*outcome.score(runs, key)) for key in keys)
            row = [best, stated[cell](name), *others, outcome.lengths(runs), str(len(runs))]
            rows.append([find_method(name).title + outcome.diverged(runs), *row])
        tables.append(Table(f"{label}: all accuracies, %", columns, rows))
    ahead = [
        outcome.mean(runs["pfedafm"]) > max(map(outcome.mean, others))
        for runs in cells.values()
        if "pfedafm" in runs and (others := [v for k, v in runs.items() if k != "pfedafm"])
    ]
    text = "pFedAFM has the highest mean accuracy in every column."
    claim = outcome.everywhere(text, ahead, "columns")
    notes = [
        "best: the paper's convention, the highest mean over the participants of a round, on test "
        "data; last ten: the mean of the last ten rounds; all clients: all of them after the last "
        "round; spread: their standard deviation."
    ]
    if any(" to " in outcome.lengths(at(found, *cell)) for cell in cells):
        notes.append("Runs are of different lengths, see the column of rounds: compare with care.")
    figure = _accuracy_figure(family, cells, labels, methods)
    return Outcome(TITLES[family], tables, figure, [claim], notes)


def _cell(runs: Sequence[Run], stated: str) -> str:
    return f"{percent(outcome.score(runs)[0])}{' ✗' if outcome.diverged(runs) else ''} ({stated})"


def _stated(family: str, cell: Cell, method: str) -> str:
    """The paper's number; `fails` where it did not converge, a dash where there is no such cell."""
    value = numbers.accuracy(family, method, *cell)
    known = cell in numbers.CELLS and method in numbers.METHODS
    return f"{value:.2f}" if value is not None else "fails" if known else "–"


def _margin(
    runs: Mapping[str, Sequence[Run]], baselines: Sequence[str], stated: float | None
) -> str:
    others = [outcome.mean(runs[name]) for name in baselines if name != "pfedafm" and name in runs]
    ours = "–"
    if others and "pfedafm" in runs:
        ours = f"{outcome.mean(runs['pfedafm']) - max(others):+.2f}"
    return f"{ours} ({'–' if stated is None else f'{stated:+.2f}'})"


def _accuracy_figure(
    family: str,
    cells: Mapping[Cell, Mapping[str, Sequence[Run]]],
    labels: Sequence[str],
    methods: Sequence[str],
) -> Figure:
    """A panel per cell: each method's accuracies here and in the paper on one line."""
    columns = list(dict.fromkeys(column for column, _ in cells))
    datasets = list(dict.fromkeys(dataset for _, dataset in cells))
    height = max(3.0, 0.9 + 0.34 * len(methods))
    figure, grid = style.panels(len(datasets), len(columns), 4.6, height, sharey=True)
    kinds = {
        "best mean of participants": ("o", style.BLUE),
        "all clients at the end": ("o", style.GREY),
        "the paper's best mean": ("D", PAPER),
    }
    for label, ((column, dataset), members) in zip(labels, cells.items(), strict=True):
        axes = grid[datasets.index(dataset)][columns.index(column)]
        for place, name in enumerate(methods):
            runs = members.get(name, [])
            stated = numbers.accuracy(family, name, column, dataset) or float("nan")
            points = (outcome.mean(runs), outcome.mean(runs, EVERYONE), stated)
            axes.plot(points, [place] * 3, color=style.GREY, alpha=0.4, linewidth=1)
            for value, (kind, (marker, colour)) in zip(points, kinds.items(), strict=True):
                text = "" if place else kind
                axes.plot(value, place, marker, color=colour, ms=5.5, label=text)
            if outcome.diverged(runs):
                axes.annotate("diverged", (points[0], place), xytext=(6, 0), fontsize=7,
                              textcoords="offset points", va="center", color=style.RED)  # fmt: skip
        axes.set_yticks(range(len(methods)), [find_method(name).title for name in methods])
        axes.set(title=label, xlabel="test accuracy, %", ylim=(len(methods) - 0.5, -0.5))
    style.legend_below(figure, 3)
    figure.suptitle(TITLES[family], fontsize=11)
    return figure
