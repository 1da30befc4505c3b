"""pFedAFM with mix vectors that are trained and fixed, beside the shared extractor alone.

    python experiments/mixes.py experiments/results/full_length/hetero_cifar10-n100{,-mix0,-mix0.5,-mix1,-start0.5}

compares the runs of pFedAFM in these folders, and those of FedPer and FedRep, of the lowest seed
and over the rounds that all have: these methods do not know their length, so that the first rounds
of a longer run are those of a shorter one. `late`, ± and the parts of a run are those of
`full_length.py`.
"""

from collections.abc import Sequence

import numpy as np
from full_length import OURS, by_stretch, finished, refuse_unlike, write
from matplotlib.figure import Figure
from paper.by_client import STRETCHES, everyone, stretches, visits, with_error
from paper.numbers import CONTROLS

from pfedafm_jax import PfedafmError
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.results import style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import markdown, percent

USUAL = "trained from 1"
SHOWN = 20, 40, 60, 80, 100, 200, 300, 400, 500  # rounds, of those evaluated


def name_of(run: Run) -> str:
    """What becomes of the mix vector; the title of another method."""
    if run.config["method"] != OURS:
        return run.title
    fixed = run.settings["pfedafm.mix_fixed"]
    start = run.settings["pfedafm.mix_start"]
    return f"trained from {start:g}" if fixed is None else f"fixed at {fixed:g}"


def accuracies(runs: Sequence[Run]) -> str:
    """Each run's best round, and its late accuracies: participants, and all clients by model."""
    heads = ["mix", "best round", "participants, late", "all clients, late", "small alone"]
    rows = []
    for run in runs:
        *_, (part, evaluations) = stretches(run)
        best = f"{percent(run.summary.best_mean_accuracy)} ({run.summary.best_round})"
        row = [name_of(run), best, f"{np.nanmean(visits(run)[part]):.2f}"]
        row.append(f"{everyone(run)[evaluations].mean():.2f}")
        for model in ("small", "large"):
            known = model in run.predictions
            row.append(f"{everyone(run, model)[evaluations].mean():.2f}" if known else "–")
        mixes = run.per_round().get("mix_mean")
        rows.append([*row, "–" if mixes is None else f"{mixes[part].mean():.3f}"])
    return markdown([*heads, "large alone", "mean mix, late"], rows)


def by_round(usual: Run, runs: Sequence[Run]) -> str:
    """The usual mix minus each other over all clients, paired by client, at some evaluations.

    Nothing where every part of the run has one evaluation: `by_stretch` has these.
    """
    rounds = usual.clients["evaluation_rounds"].tolist()
    shown = [number for number in rounds if number in SHOWN]
    if len(rounds) <= STRETCHES or not shown:
        return ""
    rows = []
    for run in runs:
        if run is not usual:
            gap = everyone(usual) - everyone(run)
            cells = [with_error(gap[rounds.index(number)]) for number in shown]
            rows.append([f"{name_of(usual)} − {name_of(run)}", *cells])
    return markdown(["all clients, points", *(f"round {number}" for number in shown)], rows)


def picture(runs: Sequence[Run]) -> Figure:
    """All clients by round."""
    figure, axes = style.plain_figure()
    for run, colour in zip(runs, style.COLOURS, strict=False):
        frame = run.per_round().dropna(subset=["all_clients_accuracy"])
        other = run.config["method"] != OURS
        axes.plot(
            frame["round"],
            100 * frame["all_clients_accuracy"],
            color=style.method_colour(run.config["method"]) if other else colour,
            linestyle="--" if other else "-",
            label=name_of(run),
        )
    axes.set(xlabel="communication round", ylabel="test accuracy of all clients, %")
    style.legend_below(figure)
    return figure


def main(argv: list[str]) -> int:
    found, out = finished(argv, "mixes", __doc__)
    found = [run for run in found if run.config["method"] in (OURS, *CONTROLS)]
    first = min((run.config["seed"] for run in found), default=0)
    runs = [run for run in found if run.config["seed"] == first]
    names = [name_of(run) for run in runs]
    if USUAL not in names or len(set(names)) < max(len(runs), 2):
        raise PfedafmError(
            f"one run of each mix is compared, {USUAL!r} among them; there are: {', '.join(names)}"
        )
    refuse_unlike(runs, ("method",))
    shortest = min(len(run.records) for run in runs)
    if shortest < 2 * STRETCHES:
        raise PfedafmError(f"runs have {2 * STRETCHES} rounds or more here; one has {shortest}")
    runs = [run.first(shortest) for run in runs]
    runs.sort(
        key=lambda run: (
            run.config["method"] != OURS,
            -(run.summary.final_all_clients_accuracy or 0),
        )
    )
    usual = next(run for run in runs if name_of(run) == USUAL)
    parts = {f"Mixes, {shortest} rounds, %": accuracies(runs)}
    parts["Differences by part of the run, points"] = by_stretch(usual, runs, name_of)
    parts["Differences by round, points"] = by_round(usual, runs)
    write(parts, picture(runs), out)
    return 0


if __name__ == "__main__":
    guarded(main)
