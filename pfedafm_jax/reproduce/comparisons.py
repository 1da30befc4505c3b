"""The figures that compare methods in the heterogeneous setting: convergence, single clients, cost to a target."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.compare import human
from pfedafm_jax.costs import to_target
from pfedafm_jax.methods import find_method
from pfedafm_jax.reproduce import paper
from pfedafm_jax.reproduce.outcome import PAPER, Claim, Outcome, Table, panels, percent
from pfedafm_jax.reproduce.plan import Run, Study
from pfedafm_jax.reproduce.results import Finished, Results, dataset_label, rounds_of

CURVES = ("pfedafm", "standalone", "fedproto")  # the paper draws pFedAFM and the best baseline of each column
PAIR = ("pfedafm", "fedproto")
COLOURS = {"pfedafm": plots.BLUE, "fedproto": plots.ORANGE, "standalone": plots.GREY}
OTHERS = (plots.GREEN, "#b0413e", "#7b5ea7", "#5aa7a7", "#c26db0", "#8c6d31", "#4d4d4d")


def colours(methods: Sequence[str]) -> dict[str, str]:
    """One colour a method, the same in all pictures for those that the paper draws."""
    rest = itertools.cycle(OTHERS)
    return {name: COLOURS.get(name) or next(rest) for name in methods}


# ---------------------------------------------------------------------------------------------- convergence


def present(study: Study, results: Results, default: Sequence[str]) -> list[str]:
    """The methods of an item that have a finished run anywhere."""
    return [
        method
        for method in study.chosen(default)
        if results.all(
            study.run(method, dataset, study.one_seed[0], column=column)
            for dataset in study.datasets
            for column in study.scale.columns
        )
    ]


def convergence_runs(study: Study) -> list[Run]:
    return [
        study.run(method, dataset, study.one_seed[0], column=column)
        for column in study.scale.columns
        for dataset in study.datasets
        for method in study.chosen(CURVES)
    ]


def convergence(study: Study, results: Results) -> Outcome:
    """Mean accuracy of participants by round, a panel for each column of N and each dataset."""
    figure, grid = panels(len(study.datasets), len(study.scale.columns), 4.4, 3.2, sharex=False)
    methods = present(study, results, CURVES)
    colour = colours(methods)
    rows, numbers, faster = [], {}, []
    for (i, dataset), (j, column) in itertools.product(enumerate(study.datasets), enumerate(study.scale.columns)):
        axes, label = grid[i][j], f"N={column}, {dataset_label(study, dataset)}"
        reached = {}
        found = {m: results.get(study.run(m, dataset, study.one_seed[0], column=column)) for m in methods}
        shortest = min((len(finished.rounds) for finished in found.values() if finished is not None), default=0)
        for method, finished in found.items():
            if finished is None:
                continue
            title = find_method(method).title
            curve = np.array([np.nan if r["mean_accuracy"] is None else r["mean_accuracy"] for r in finished.rounds])
            width = max(1, len(curve) // 20)
            smooth = np.convolve(curve, np.ones(width) / width, mode="valid")
            axes.plot(np.arange(1, len(curve) + 1), 100 * curve, color=colour[method], linewidth=0.7, alpha=0.35)
            axes.plot(np.arange(width, len(curve) + 1), 100 * smooth, color=colour[method], linewidth=1.7)
            half = curve[: max(1, shortest // 2)]  # the same rounds for all
            reached[method] = float(np.nanmax(half)) if np.isfinite(half).any() else 0.0
            numbers[f"n{column}-{dataset}-{method}"] = [r["mean_accuracy"] for r in finished.rounds]
            summary = finished.summary
            rows.append([label, title, percent(reached[method]), percent(summary["best_mean_accuracy"]),
                         str(summary["best_round"]), str(summary["rounds"])])  # fmt: skip
        if "pfedafm" in reached and len(reached) > 1:
            faster.append(reached["pfedafm"] == max(reached.values()))
        axes.set(title=label, xlabel="communication round", ylabel="participants' mean accuracy, %")
        axes.locator_params(axis="x", integer=True)
    handles = [grid[0][0].plot([], [], color=colour[m], linewidth=1.7, label=find_method(m).title)[0] for m in colour]
    figure.legend(handles=handles, frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    claim = Claim(
        "pFedAFM converges faster to higher accuracy.",
        all(faster) if faster else None,
        f"it was ahead half-way in {sum(faster)} of {len(faster)} settings" if faster else "",
    )
    columns = ("setting", "method", "best of first half, %", "best, %", "at round", "of")
    notes = ["Thin: every round; thick: mean over a twentieth of the run."]
    return Outcome("Accuracy by round", [Table("", columns, rows)], figure, [claim], notes, numbers)


# ---------------------------------------------------------------------------------------------- single clients


def pair_runs(study: Study) -> list[Run]:
    """pFedAFM and FedProto in the column with most clients."""
    return [
        study.run(method, dataset, study.one_seed[0]) for dataset in study.datasets for method in study.chosen(PAIR)
    ]


def baseline_runs(study: Study) -> list[Run]:
    """All baselines there."""
    baselines = [method for method in paper.METHODS if method != "pfedafm"]
    return [study.run(method, dataset, study.one_seed[0]) for dataset in study.datasets for method in baselines]


def individual(study: Study, results: Results) -> Outcome:
    """Each client's accuracy under pFedAFM minus that under FedProto, and under the other baselines that are finished."""
    figure, [row_of_axes] = panels(1, len(study.datasets), 5.2, 3.6)
    rows, numbers, claims = [], {}, []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, seed = dataset_label(study, dataset), study.one_seed[0]
        own = results.get(study.run("pfedafm", dataset, seed))
        others = {m: results.get(study.run(m, dataset, seed)) for m in paper.METHODS if m != "pfedafm"}
        baselines: dict[str, Finished] = {name: finished for name, finished in others.items() if finished is not None}
        axes.set(title=label, xlabel="clients, sorted", ylabel="accuracy of pFedAFM minus baseline, points")
        if own is None or not baselines:
            claims.append(_better_claim(dataset, label, None))
            continue
        gains = {m: 100 * (own.accuracy_of_clients() - f.accuracy_of_clients()) for m, f in baselines.items()}
        best = max(baselines, key=lambda name: float(baselines[name].accuracy_of_clients().mean()))
        drawn = "fedproto" if "fedproto" in gains else best
        bars = np.sort(gains[drawn])[::-1]
        axes.bar(range(len(bars)), bars, width=1.0, color=np.where(bars > 0, plots.BLUE, plots.ORANGE).tolist(),
                 label=f"to {find_method(drawn).title}: better for {100 * np.mean(bars > 0):.0f} %")  # fmt: skip
        if best != drawn:
            line = np.sort(gains[best])[::-1]
            axes.step(range(len(line)), line, where="mid", color=PAPER, linewidth=1,
                      label=f"to {find_method(best).title}, the best here: {100 * np.mean(line > 0):.0f} %")  # fmt: skip
        axes.legend(frameon=False, fontsize=8, loc="upper right")
        axes.margins(x=0.01, y=0.2)
        for name, gain in gains.items():
            share, equal = 100 * float(np.mean(gain > 0)), 100 * float(np.mean(gain == 0))
            stated = f"{paper.BETTER_CLIENTS[dataset]:.0f}" if name == "fedproto" else "–"
            both = [own.summary, baselines[name].summary]
            rows.append([label, find_method(name).title, f"{share:.0f}", stated, f"{equal:.0f}",
                         f"{gain.mean():+.2f}", rounds_of(both)])  # fmt: skip
            numbers[f"{dataset}-{name}"] = {"better_percent": share, "gain_points": gain.round(4).tolist()}
        claims.append(_better_claim(dataset, label, gains.get("fedproto")))
    columns = ("dataset", "baseline", "better for, % of clients", "paper", "equal, %", "mean gain, points", "rounds")
    notes = ["Accuracies of all clients after the last round, as in the paper. A client that was never drawn has not been "
             "trained in either run: short runs have some."]  # fmt: skip
    return Outcome("Single clients", [Table("", columns, rows)], figure, claims, notes, numbers)


def _better_claim(dataset: str, label: str, gain: np.ndarray | None) -> Claim:
    share = None if gain is None else 100 * float(np.mean(gain > 0))
    return Claim(
        f"{label}: most clients are better off with pFedAFM than with FedProto "
        f"({paper.BETTER_CLIENTS[dataset]:.0f} % there).",
        None if share is None else share > 50,
        "" if share is None else f"{share:.0f} %",
    )


# ---------------------------------------------------------------------------------------------- cost to a target


def cost(study: Study, results: Results) -> Outcome:
    """Rounds, floats and FLOPs until the mean accuracy of participants reached the paper's target.

    Where a run did not get there, also to the highest whole percent that all of them reached.
    """
    methods, seed = present(study, results, PAIR), study.one_seed[0]
    measures = {"rounds": "rounds_to_target", "floats, both ways": "floats_to_target", "FLOPs": "flops_to_target"}
    figure, [row_of_axes] = panels(1, 3, 4.0, 3.6)
    colour = colours(methods)
    rows, numbers, groups = [], {}, []
    for dataset in study.datasets:
        found = {m: f for m in methods if (f := results.get(study.run(m, dataset, seed))) is not None}
        targets = [study.scale.target[dataset]] if found else []
        bests = [f.summary["best_mean_accuracy"] or 0.0 for f in found.values()]
        if found and min(bests) < targets[0] and np.floor(100 * min(bests)) >= 1:
            targets.append(float(np.floor(100 * min(bests)) / 100))
        for target in targets:
            label = f"{dataset_label(study, dataset)}\n{100 * target:.0f} %"
            to = {method: to_target(finished.rounds, target) for method, finished in found.items()}
            groups.append((label, to))
            numbers[f"{dataset}-{100 * target:.0f}"] = to
            for method, reached in to.items():
                rows.append([label.replace("\n", " to "), find_method(method).title,
                             *(_amount(reached[key]) for key in measures.values()),
                             percent(found[method].summary["best_mean_accuracy"]), str(found[method].summary["rounds"])])  # fmt: skip
    for axes, (measure, key) in zip(row_of_axes, measures.items(), strict=True):
        for place, (method, shade) in enumerate(colour.items()):
            offset = (place - (len(colour) - 1) / 2) * 0.8 / len(colour)
            values = [to.get(method, {}).get(key) for _, to in groups]
            places = np.arange(len(groups)) + offset
            axes.bar(places, [v or np.nan for v in values], width=0.75 / len(colour), color=shade,
                     label=find_method(method).title)  # fmt: skip
            for x, value in zip(places, values, strict=True):
                if not value:  # a bar of nothing is said in words
                    word = "0" if value == 0 else "not reached"
                    axes.annotate(word, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="center",
                                  va="bottom", fontsize=7, color=shade)  # fmt: skip
        if key == "floats_to_target" and any(to[m][key] for _, to in groups for m in to):
            axes.set_yscale("log")
        if key != "rounds_to_target":
            axes.yaxis.set_major_formatter(lambda value, _: human(value))
        axes.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize=8)
        axes.set(title=f"{measure} to the target")
    figure.legend(*row_of_axes[0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=4,
                  loc="outside lower center")  # fmt: skip
    columns = ("target", "method", *measures, "best, %", "of rounds")
    claims = [
        Claim("pFedAFM needs fewer rounds than FedProto.", *_less(groups, "rounds_to_target")),
        Claim("It moves more floats in all.", *_less(groups, "floats_to_target", more=True)),
        Claim("It computes less in all.", *_less(groups, "flops_to_target")),
    ]
    notes = ["Floats and FLOPs of all participants of all rounds so far; FLOPs are those of the algorithm (3 passes a "
             "training step, pFedAFM's frozen extractor 1)."]  # fmt: skip
    return Outcome("Cost until a target accuracy", [Table("", columns, rows)], figure, claims, notes, numbers)


def _amount(value: float | None) -> str:
    return "not reached" if value is None else human(value)


def _less(groups: Sequence[tuple[str, dict[str, Any]]], key: str, more: bool = False) -> tuple[bool | None, str]:
    """Whether pFedAFM needed less (or more) than FedProto wherever both reached the target, and in how many places."""
    pairs = [(to["pfedafm"][key], to["fedproto"][key]) for _, to in groups if {"pfedafm", "fedproto"} <= set(to)]
    known = [(own > other) if more else (own < other) for own, other in pairs if own is not None and other is not None]
    return (all(known) if known else None), (f"in {sum(known)} of {len(known)} targets that both reached"
                                             if known else "")  # fmt: skip
