"""The figures that compare methods: convergence, single clients, cost to a target."""

import itertools
from collections.abc import Sequence

import numpy as np

from paper import numbers
from paper.outcome import BEST, PAPER, Claim, Outcome, Table, everywhere, lengths
from paper.study import Found, Study, at
from pfedafm_jax import figures, plots
from pfedafm_jax.methods import find_method
from pfedafm_jax.records import to_target
from pfedafm_jax.results import Run
from pfedafm_jax.standing import Task
from pfedafm_jax.tables import human, percent


def convergence_tasks(study: Study) -> dict[tuple, Task]:
    seed = study.one_seed[0]
    return {
        (column, dataset, method, seed): study.task(method, dataset, seed, column=column)
        for column in study.scale.columns
        for dataset in study.datasets
        for method in study.chosen(study.scale.curves)
    }


def convergence(study: Study, found: Found) -> Outcome:
    """Mean accuracy of participants by round, a panel for each column of N and each dataset."""
    columns, datasets = study.scale.columns, study.datasets
    figure, grid = figures.panels(len(datasets), len(columns), 4.4, 3.2)
    rows, faster = [], []
    for (i, dataset), (j, column) in itertools.product(enumerate(datasets), enumerate(columns)):
        axes, label = grid[i][j], f"N={column}, {study.label(dataset)}"
        runs = {run.config["method"]: run for run in at(found, column, dataset)}
        shortest = min((len(run.records) for run in runs.values()), default=0)
        reached = {}
        for method, run in runs.items():
            colour, frame = figures.method_colour(method), run.per_round()
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
        figures.whole_numbers(axes.xaxis)
    figures.legend_below(figure)
    text = "pFedAFM converges faster to higher accuracy (it is ahead half-way)."
    columns = ("setting", "method", "best of first half, %", "best, %", "at round", "of")
    notes = ["Thin: every round; thick: mean over a twentieth of the run."]
    claims = [everywhere(text, faster, "settings")]
    return Outcome("Accuracy by round", [Table("", columns, rows)], figure, claims, notes)


# ------------------------------------------------------------------------------- single clients


def pair_tasks(study: Study, methods: Sequence[str] = ()) -> dict[tuple, Task]:
    """pFedAFM and FedProto, or these methods, in the column with most clients."""
    chosen, seed = methods or study.chosen(study.scale.pair), study.one_seed[0]
    return {
        (dataset, method, seed): study.task(method, dataset, seed)
        for dataset in study.datasets
        for method in chosen
    }


def all_tasks(study: Study) -> dict[tuple, Task]:
    return pair_tasks(study, study.scale.methods)


def individual(study: Study, found: Found) -> Outcome:
    """Each client's accuracy under pFedAFM minus that under the baselines that are finished."""
    figure, [row_of_axes] = figures.panels(1, len(study.datasets), 5.2, 3.6)
    rows, claims = [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, runs = study.label(dataset), {r.config["method"]: r for r in at(found, dataset)}
        accuracy = {name: run.clients["all_clients/accuracy"][-1] for name, run in runs.items()}
        own = accuracy.pop("pfedafm", None)
        axes.set(title=label, xlabel="clients, sorted", ylabel="pFedAFM minus baseline, points")
        gains = {} if own is None else {m: 100 * (own - other) for m, other in accuracy.items()}
        best = max(accuracy, key=lambda name: accuracy[name].mean(), default="")
        drawn = [name for name in dict.fromkeys(("fedproto", best)) if name in gains]
        for name, kind in zip(drawn, ("bar", "step"), strict=False):
            bars = np.sort(gains[name])[::-1]
            extra = ", the best here" if name == best else ""
            text = f"to {runs[name].title}{extra}: better for {100 * np.mean(bars > 0):.0f} %"
            if kind == "bar":
                colour = np.where(bars > 0, figures.BLUE, figures.ORANGE).tolist()
                axes.bar(range(len(bars)), bars, width=1.0, color=colour, label=text)
            else:
                axes.step(range(len(bars)), bars, where="mid", color=PAPER, lw=1, label=text)
        if drawn:
            axes.legend(frameon=False, fontsize=8, loc="upper right")
            axes.margins(x=0.01, y=0.2)
        for name, gain in gains.items():
            share, equal = 100 * float(np.mean(gain > 0)), 100 * float(np.mean(gain == 0))
            stated = f"{numbers.BETTER_CLIENTS[dataset]:.0f}" if name == "fedproto" else "–"
            rounds = lengths([runs["pfedafm"], runs[name]])
            shares = [f"{share:.0f}", stated, f"{equal:.0f}", f"{gain.mean():+.2f}", rounds]
            rows.append([label, runs[name].title, *shares])
        better = 100 * float(np.mean(gains.get("fedproto", np.full(1, np.nan)) > 0))
        text = f"{label}: most clients are better off with pFedAFM than with FedProto "
        text += f"({numbers.BETTER_CLIENTS[dataset]:.0f} % there)."
        told = Claim(text, better > 50, f"{better:.0f} %")
        claims.append(told if "fedproto" in gains else Claim(text, None))
    columns = ("dataset", "baseline", "better for, % of clients", "paper", "equal, %")
    columns += ("mean gain, points", "rounds")
    notes = [
        "Accuracies of all clients after the last round, as in the paper. A client that was never "
        "drawn has not been trained in either run: short runs have some."
    ]
    return Outcome("Single clients", [Table("", columns, rows)], figure, claims, notes)


# ------------------------------------------------------------------------------- cost to a target

MEASURES = ("rounds", "floats, both ways", "FLOPs")


def spent(run: Run, target: float) -> list[int] | None:
    """Rounds, floats and FLOPs of all participants until their mean accuracy reached a target."""
    found = to_target(run.records, target)
    amounts = [found[f"{name}_to_target"] for name in ("rounds", "floats", "flops")]
    return None if amounts[0] is None else amounts


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
            groups[label] = {method: spent(run, target) for method, run in runs.items()}
            for method, amounts in groups[label].items():
                words = map(human, amounts) if amounts else ["not reached"] * 3
                best = percent(getattr(runs[method].summary, BEST))
                rows.append([label, runs[method].title, *words, best, lengths([runs[method]])])
    figure, [row_of_axes] = figures.panels(1, 3, 4.0, 3.6)
    for which, (axes, measure) in enumerate(zip(row_of_axes, MEASURES, strict=True)):
        for place, method in enumerate(methods):
            colour, offset = figures.method_colour(method), (place - (len(methods) - 1) / 2)
            places = np.arange(len(groups)) + offset * 0.8 / len(methods)
            amounts = [(to.get(method) or [np.nan] * 3)[which] for to in groups.values()]
            heights = [amount or np.nan for amount in amounts]
            title = find_method(method).title
            axes.bar(places, heights, width=0.75 / len(methods), color=colour, label=title)
            for x, amount in zip(places, amounts, strict=True):
                if not amount > 0:  # a bar of nothing is said in words
                    word = "0" if amount == 0 else "not reached"
                    axes.annotate(word, (x, 0.02), xycoords=("data", "axes fraction"), va="bottom",
                                  ha="center", rotation=90, fontsize=7, color=colour)  # fmt: skip
        if which == 1 and any(to and to[1] for group in groups.values() for to in group.values()):
            axes.set_yscale("log")
            axes.minorticks_off()
        if which == 0:
            figures.whole_numbers(axes.yaxis)
        axes.yaxis.set_major_formatter(lambda value, _: human(value))
        labels = [label.replace(" to ", "\n") for label in groups]
        axes.set_xticks(range(len(groups)), labels, fontsize=8)
        axes.set(title=f"{measure} to the target")
    figures.legend_below(figure)
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
        "algorithm (3 passes a training step, pFedAFM's frozen extractor 1)."
    ]
    title = "Cost until a target accuracy"
    return Outcome(title, [Table("", columns, rows)], figure, claims, notes)
