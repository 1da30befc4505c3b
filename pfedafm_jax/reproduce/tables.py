"""Tables 1 to 3: sizes of the networks, and mean accuracy with one or with five architectures."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from pfedafm_jax import plots
from pfedafm_jax.compare import collect
from pfedafm_jax.methods import find_method
from pfedafm_jax.models import describe
from pfedafm_jax.reproduce import paper
from pfedafm_jax.reproduce.outcome import PAPER, Claim, Outcome, Table, panels, percent
from pfedafm_jax.reproduce.plan import Run, Study, Summary
from pfedafm_jax.reproduce.results import Results, dataset_label, rounds_of

Cell = tuple[int, str]  # N and dataset
FAMILIES = {"homo": "Table 2: one architecture for all clients", "hetero": "Table 3: five architectures"}


# ---------------------------------------------------------------------------------------------- Table 1


def model_sizes(study: Study, results: Results) -> Outcome:
    """Table 1. Megabytes are 2^20 bytes of float32 with ten classes, which is what the paper's numbers are."""
    rows, numbers = [], {}
    for name, stated in paper.MODEL_MEGABYTES.items():
        ten, hundred = describe(name, 10), describe(name, 100)
        size = ten.params * 4 / 2**20
        numbers[name] = {"megabytes": size, "paper": stated, "parameters": ten.params, "macs": ten.macs}
        rows.append([plots.architecture_label(name), f"{size:.2f}", f"{stated:.2f}", f"{ten.params:,}",
                     f"{hundred.params:,}", f"{ten.extractor_params:,}", f"{ten.macs / 1e6:.2f}"])  # fmt: skip
    columns = ("network", "MB", "paper", "weights, 10 classes", "100 classes", "without header", "M mult-adds")
    figure, [[axes]] = panels(1, 1, 6.5, 3.6)
    places = range(len(numbers))
    axes.bar(places, [n["megabytes"] for n in numbers.values()], color=plots.BLUE, width=0.6, label="here")
    axes.plot(places, [n["paper"] for n in numbers.values()], "D", color=PAPER, markersize=5, label="paper")
    axes.set_xticks(places, [plots.architecture_label(name) for name in numbers])
    axes.set(ylabel="MB of float32, ten classes", title="Table 1: sizes of the networks")
    axes.legend(frameon=False)
    off = [name for name, n in numbers.items() if abs(n["megabytes"] - n["paper"]) > 0.01]
    notes = [
        f"The paper's {paper.MODEL_MEGABYTES[name]:.2f} MB of {plots.architecture_label(name)} are not what the widths "
        f"in its own table give, {numbers[name]['megabytes']:.2f} MB; the widths are used here."
        for name in off
    ]
    return Outcome("Table 1: sizes of the networks", [Table("", columns, rows)], figure, notes=notes, numbers=numbers)


# ---------------------------------------------------------------------------------------------- Tables 2 and 3


def accuracy_runs(study: Study, family: str) -> dict[Cell, list[tuple[str, Run]]]:
    """The runs of Table 2 (`homo`) or 3 (`hetero`) by cell, with their methods."""
    return {
        (column, dataset): [
            (method, study.run(method, dataset, seed, family=family, column=column))
            for seed in study.one_seed
            for method in study.chosen(study.scale.homogeneous if family == "homo" else paper.METHODS)
        ]
        for column in study.scale.columns
        for dataset in study.datasets
    }


def accuracy_table(study: Study, results: Results, family: str) -> Outcome:
    """Table 2 or 3 from the finished runs."""
    found = {
        cell: [(method, finished.summary) for method, run in runs if (finished := results.get(run)) is not None]
        for cell, runs in accuracy_runs(study, family).items()
    }
    labels = {(n, dataset): f"N={n}, {dataset_label(study, dataset)}" for n, dataset in found}
    return compare_with_paper(family, {cell: runs for cell, runs in found.items() if runs}, labels)


def compare_with_paper(
    family: str, found: Mapping[Cell, Sequence[tuple[str, Summary]]], labels: Mapping[Cell, str]
) -> Outcome:
    """The outcome for summaries by cell; several of one method are several seeds."""
    rows = {cell: {row["name"]: row for row in _rows(family, cell, runs)} for cell, runs in found.items()}
    methods = [name for name in paper.METHODS if any(name in cell for cell in rows.values())]
    methods += sorted({name for cell in rows.values() for name in cell} - set(methods))
    overview = [
        [find_method(name).title] + [_overview(rows[cell].get(name), family, name, cell) for cell in rows]
        for name in methods
    ]
    for label, baselines in (("pFedAFM − best baseline", paper.METHODS), ("pFedAFM − best of category", paper.MUTUAL)):
        overview.append([label] + [_margin(rows[cell], family, cell, baselines) for cell in rows])
    tables = [
        Table(
            "Best mean accuracy of participants, %; in brackets the paper's (fails: it did not converge there)",
            ["method", *(labels[cell] for cell in rows)],
            overview,
        )
    ]
    columns = ("method", "best", "paper", "last", "all clients", "spread", "rounds", "seeds")
    for cell, members in rows.items():
        lines = [_detail(members[name], cell) for name in methods if name in members]
        tables.append(Table(f"{labels[cell]}: all accuracies, %", columns, lines))
    best_everywhere = [
        _best(rows[cell], paper.METHODS) < members["pfedafm"]["best"]["mean"]
        for cell, members in rows.items()
        if _accuracy(members.get("pfedafm")) is not None and _best(rows[cell], paper.METHODS) > 0
    ]
    claim = Claim(
        "pFedAFM has the highest mean accuracy in every column.",
        all(best_everywhere) if best_everywhere else None,
        f"in {sum(best_everywhere)} of {len(best_everywhere)}" if best_everywhere else "",
    )
    notes = [
        "best: the paper's convention, the highest mean over the participants of a round, on test data; last: the same in "
        "the last round; all clients: all of them after the last round; spread: their standard deviation."
    ]
    if any(len({row["rounds"] for row in members.values()}) > 1 for members in rows.values()):
        notes.append("Runs are of different lengths, see the column of rounds: compare them with care.")
    numbers = {f"n{n}-{dataset}": list(members.values()) for (n, dataset), members in rows.items()}
    figure = _accuracy_figure(family, rows, labels, methods)
    return Outcome(FAMILIES[family], tables, figure, [claim], notes, numbers)


def _rows(family: str, cell: Cell, runs: Sequence[tuple[str, Summary]]) -> list[dict[str, Any]]:
    """Means over seeds, one dictionary a method, with the paper's number."""
    names = list(dict.fromkeys(name for name, _ in runs))
    return [
        {
            **row,
            "name": name,
            "paper": paper.accuracy(family, name, *cell),
            "rounds": rounds_of([summary for other, summary in runs if other == name]),
        }
        for name, row in zip(names, collect(runs), strict=True)
    ]


def _accuracy(row: dict[str, Any] | None) -> float | None:
    return None if row is None or row["best"] is None else row["best"]["mean"]


def _best(members: Mapping[str, dict[str, Any]], names: Sequence[str]) -> float:
    """The best baseline's accuracy; 0 where there is none."""
    return max((_accuracy(members.get(name)) or 0.0 for name in names if name != "pfedafm"), default=0.0)


def _stated(value: float | None, cell: Cell) -> str:
    """The paper's number; `fails` where it says "failure to converge", a dash where it has no such cell."""
    return ("fails" if cell in paper.CELLS else "–") if value is None else f"{value:.2f}"


def _overview(row: dict[str, Any] | None, family: str, method: str, cell: Cell) -> str:
    ours = percent(_accuracy(row))
    if row is not None and row["diverged"] is not None:
        ours += " ✗"
    return f"{ours} ({_stated(paper.accuracy(family, method, *cell), cell)})"


def _margin(members: Mapping[str, dict[str, Any]], family: str, cell: Cell, baselines: Sequence[str]) -> str:
    own, best = _accuracy(members.get("pfedafm")), _best(members, baselines)
    ours = "–" if own is None or not best else f"{100 * (own - best):+.2f}"
    stated = (paper.MARGIN_BEST if baselines is paper.METHODS else paper.MARGIN_MUTUAL)[family]
    known = dict(zip(paper.CELLS, stated, strict=True)).get(cell)
    return f"{ours} ({'–' if known is None else f'{known:+.2f}'})"


def _detail(row: dict[str, Any], cell: Cell) -> list[str]:
    def shown(column: str) -> str:
        value = row[column]
        return percent(None) if value is None else percent(value["mean"], value["deviation"])

    name = row["method"] + ("" if row["diverged"] is None else f" (✗ diverged at round {row['diverged']})")
    return [name, shown("best"), _stated(row["paper"], cell), shown("last"), shown("all clients"), shown("spread"),
            row["rounds"], str(row["runs"])]  # fmt: skip


def _accuracy_figure(
    family: str, rows: Mapping[Cell, Mapping[str, dict[str, Any]]], labels: Mapping[Cell, str], methods: Sequence[str]
) -> Figure:
    """A panel a cell: each method's accuracies here and in the paper on one line."""
    columns = list(dict.fromkeys(n for n, _ in rows)) or [0]
    datasets = list(dict.fromkeys(dataset for _, dataset in rows)) or [""]
    figure, grid = panels(len(datasets), len(columns), 4.6, 0.9 + 0.34 * len(methods), sharey=True)
    for (n, dataset), members in rows.items():
        axes = grid[datasets.index(dataset)][columns.index(n)]
        for place, name in enumerate(methods):
            row = members.get(name)
            if row is None:
                continue
            everyone = None if row["all clients"] is None else row["all clients"]["mean"]
            points = [(everyone, "o", plots.GREY, "all clients at the end"),
                      (_accuracy(row), "o", plots.BLUE, "best mean of participants"),
                      (None if row["paper"] is None else row["paper"] / 100, "D", PAPER, "paper")]  # fmt: skip
            drawn = [100 * value for value, *_ in points if value is not None]
            axes.plot(drawn, [place] * len(drawn), color=plots.GREY, alpha=0.4, linewidth=1)
            for value, marker, colour, _ in points:
                if value is not None:
                    axes.plot(100 * value, place, marker, color=colour, markersize=5 if marker == "D" else 6)
            if row["diverged"] is not None:
                axes.annotate("diverged", (max(drawn, default=0), place), xytext=(6, 0), textcoords="offset points",
                              va="center", fontsize=7, color="#b0413e")  # fmt: skip
        axes.set_yticks(range(len(methods)), [find_method(name).title for name in methods])
        axes.set(title=labels[(n, dataset)], xlabel="test accuracy, %", ylim=(len(methods) - 0.5, -0.5))
    handles = [grid[0][0].plot([], [], marker, color=colour, label=label)[0] for marker, colour, label in (
        ("o", plots.BLUE, "best mean of participants"), ("o", plots.GREY, "all clients at the end"),
        ("D", PAPER, "the paper's best mean"))]  # fmt: skip
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(FAMILIES[family], fontsize=11)
    return figure
