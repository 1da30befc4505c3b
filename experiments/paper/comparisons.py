"""The figures that compare methods: convergence, single clients, cost to a target."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from paper import numbers
from paper.outcome import BEST, PAPER, Claim, Outcome, Table, everywhere, lengths
from paper.study import Found, Study, at
from pfedafm_jax.methods import find_method
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.tables import human, percent
from pfedafm_jax.runs.existing import Task


def convergence_tasks(study: Study) -> dict[tuple, Task]:
    seed, methods = study.one_seed[0], study.chosen(study.scale.curves)
    every = itertools.product(study.scale.columns, study.datasets, methods)
    return {
        (column, dataset, method, seed): study.task(method, dataset, seed, column=column)
        for column, dataset, method in every
    }


def convergence(study: Study, found: Found) -> Outcome:
    """Mean accuracy of participants by round, a panel for each column of N and each dataset."""
    columns, datasets = study.scale.columns, study.datasets
    figure, grid = style.panels(len(datasets), len(columns), 4.4, 3.2)
    rows, faster = [], []
    for (i, dataset), (j, column) in itertools.product(enumerate(datasets), enumerate(columns)):
        axes, label = grid[i][j], f"N={column}, {study.label(dataset)}"
        runs = {run.config["method"]: run for run in at(found, column, dataset)}
        shortest = min((len(run.records) for run in runs.values()), default=0)
        reached = {}
        for method, run in runs.items():
            colour, frame = style.method_colour(method), run.per_round()
            axes.plot(*plots.curve(frame), color=colour, linewidth=0.7, alpha=0.35)
            smooth = plots.curve(frame, window=max(1, len(frame) // 20))
            axes.plot(*smooth, color=colour, linewidth=1.7, label=run.title)
            # The best of the same rounds for all.
            half = frame["mean_accuracy"].iloc[: max(1, shortest // 2)].max()
            reached[method] = 0.0 if np.isnan(half) else float(half)
            summary = run.summary
            best = percent(summary.best_mean_accuracy), str(summary.best_round), lengths([run])
            rows.append([label, run.title, percent(reached[method]), *best])
        if "pfedafm" in reached and len(reached) > 1:
            faster.append(reached["pfedafm"] == max(reached.values()))
        axes.set(title=label, xlabel="communication round", ylabel="participants' accuracy, %")
        style.whole_numbers(axes.xaxis)
    style.legend_below(figure)
    text = "pFedAFM converges faster to higher accuracy (it is ahead half-way)."
    columns = ("setting", "method", "best of first half, %", "best, %", "at round", "of")
    notes = ["Thin: every round; thick: mean over a twentieth of the run."]
    claims = [everywhere(text, faster, "settings")]
    return Outcome("Accuracy by round", [Table("", columns, rows)], figure, claims, notes)


# ------------------------------------------------------------------------------- single clients


def pair_tasks(study: Study, methods: Sequence[str] = ()) -> dict[tuple, Task]:
    """The pair of the scale, or these methods, in the column with most clients; one seed."""
    chosen, seed = methods or study.chosen(study.scale.pair), study.one_seed[0]
    return {
        (dataset, method, seed): study.task(method, dataset, seed)
        for dataset in study.datasets
        for method in chosen
    }


def individual(study: Study, found: Found) -> Outcome:
    """Each client's accuracy under pFedAFM minus that under the baselines that are finished."""
    figure, [row_of_axes] = style.panels(1, len(study.datasets), 5.2, 3.6)
    rows, claims = [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, runs = study.label(dataset), {r.config["method"]: r for r in at(found, dataset)}
        ours, stated = runs.pop("pfedafm", None), f"{numbers.BETTER_CLIENTS[dataset]:.0f}"
        text = f"{label}: most clients are better off with pFedAFM than with FedProto ({stated} %)."
        claims.append(Claim(text, None))
        for name, run in runs.items():
            if ours is None:
                continue
            last = [one.clients["all_clients/accuracy"][-1] for one in (ours, run)]
            gain = 100 * np.sort(last[0] - last[1])[::-1]
            better, equal = 100 * float(np.mean(gain > 0)), 100 * float(np.mean(gain == 0))
            paper = stated if name == "fedproto" else "–"
            shares = [f"{better:.0f}", paper, f"{equal:.0f}", f"{gain.mean():+.2f}"]
            rows.append([label, run.title, *shares, lengths([ours, run])])
            shown = f"to {run.title}: better for {better:.0f} %"
            axes.plot(gain, color=style.method_colour(name), label=shown)
            if name == "fedproto":
                axes.fill_between(range(len(gain)), gain, color=style.ORANGE, alpha=0.3)
                claims[-1] = Claim(text, better > 50, f"{better:.0f} %")
        axes.axhline(0, color=PAPER, linewidth=0.8)
        axes.set(title=label, xlabel="clients, sorted", ylabel="pFedAFM minus baseline, points")
        axes.legend(frameon=False, fontsize=7)
    columns = ("dataset", "baseline", "better for, % of clients", "paper", "equal, %")
    columns += ("mean gain, points", "rounds")
    notes = [
        "Accuracies of all clients after the last round, as in the paper. A client that was never "
        "drawn has not been trained in either run: short runs have some."
    ]
    return Outcome("Single clients", [Table("", columns, rows)], figure, claims, notes)


# ------------------------------------------------------------------------------- cost to a target

MEASURES = ("rounds", "floats, both ways", "FLOPs")


def cost(study: Study, found: Found) -> Outcome:
    """What each method has spent until the mean accuracy of participants reached the target.

    Where a run did not get there, also to the highest whole percent that all of them reached.
    """
    methods = list(dict.fromkeys(key[1] for key in found))
    rows, groups = [], {}
    for dataset in study.datasets:
        runs = {run.config["method"]: run for run in at(found, dataset)}
        targets = [study.scale.target[dataset]] if runs else []
        lowest = min((getattr(run.summary, BEST) or 0.0 for run in runs.values()), default=0.0)
        if runs and lowest < targets[0] and lowest >= 0.01:
            targets.append(np.floor(100 * lowest) / 100)
        for target in targets:
            label = f"{study.label(dataset)} to {100 * target:.0f} %"
            groups[label] = {
                method: numbers.cost_to(target, run.records) for method, run in runs.items()
            }
            for method, amounts in groups[label].items():
                words = map(human, amounts) if amounts else ["not reached"] * 3
                best = percent(getattr(runs[method].summary, BEST))
                rows.append([label, runs[method].title, *words, best, lengths([runs[method]])])
    figure, [row_of_axes] = style.panels(1, 3, 4.0, 3.6)
    for which, (axes, measure) in enumerate(zip(row_of_axes, MEASURES, strict=True)):
        for place, method in enumerate(methods):
            offset = (place - (len(methods) - 1) / 2) * 0.8 / len(methods)
            amounts = [(to.get(method) or [np.nan] * 3)[which] for to in groups.values()]
            look: Any = {"width": 0.75 / len(methods), "color": style.method_colour(method)}
            title = find_method(method).title
            places = np.arange(len(groups)) + offset
            words: Any = {"fontsize": 7, "rotation": 90}
            bars = axes.bar(places, amounts, label=title, **look)
            shown = ["" if np.isnan(one) else human(one) for one in amounts]
            axes.bar_label(bars, shown, padding=2, **words)
            low: Any = {"transform": axes.get_xaxis_transform(), "ha": "center", **words}
            for x in places[np.isnan(np.array(amounts, float))]:
                axes.text(x, 0.02, "not reached", color=look["color"], **low)
        if which == 1 and any(to and to[1] for group in groups.values() for to in group.values()):
            axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: human(value))
        labels = [label.replace(" to ", "\n") for label in groups]
        axes.set_xticks(range(len(groups)), labels, fontsize=8)
        axes.set(title=f"{measure} to the target")
        axes.margins(y=0.2)
    style.legend_below(figure)
    columns = ("target", "method", *MEASURES, "best, %", "of rounds")
    pairs = [(to.get("pfedafm"), to.get("fedproto")) for to in groups.values()]
    both = [(own, other) for own, other in pairs if own and other]
    where = "targets that both reached"
    fewer = "pFedAFM needs fewer rounds than FedProto."
    claims = [
        everywhere(fewer, [a[0] < b[0] for a, b in both], where),
        everywhere("It moves more floats in all.", [a[1] > b[1] for a, b in both], where),
        everywhere("It computes less in all.", [a[2] < b[2] for a, b in both], where),
    ]
    notes = [
        "Floats and FLOPs of all participants of all rounds so far; FLOPs are those of the "
        "algorithm (3 passes per training step, pFedAFM's frozen extractor 1)."
    ]
    title = "Cost until a target accuracy"
    return Outcome(title, [Table("", columns, rows)], figure, claims, notes)
