"""pFedAFM with mix vectors that are trained and fixed, beside the shared extractor alone.

    python experiments/mixes.py experiments/results/full_length/hetero_cifar10-n100*

compares the runs of pFedAFM in these folders, and those of FedPer and FedRep, over the rounds that
all have, those of the lowest seed: a run of pFedAFM does not know its length, so that the first rounds of a longer one are
those of a shorter one. `late`, ± and the parts of a run are those of `full_length.py`.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from full_length import CONTROLS, OURS, everyone, label, stretches, visits, with_error
from matplotlib.figure import Figure

from pfedafm_jax import PfedafmError, cli, figures, plots
from pfedafm_jax.files import write_atomically
from pfedafm_jax.progress import console
from pfedafm_jax.results import Run, differing, read_runs
from pfedafm_jax.tables import markdown, percent

USUAL = "trained from 1"


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


def gaps(runs: Sequence[Run]) -> str:
    """The usual mix minus each other over all clients, paired by client, in each part of the run."""
    usual = next(run for run in runs if name_of(run) == USUAL)
    parts = list(stretches(usual))
    rows = []
    for run in runs:
        if run is not usual:
            gap = everyone(usual) - everyone(run)
            cells = [with_error(gap[evaluations]) for _, evaluations in parts]
            rows.append([f"{USUAL} − {name_of(run)}", *cells])
    return markdown(["all clients, points", *(label(rows) for rows, _ in parts)], rows)


def picture(runs: Sequence[Run]) -> Figure:
    """All clients by round."""
    figure, axes = figures.plain_figure()
    for run, colour in zip(runs, figures.COLOURS, strict=False):
        frame = run.per_round().dropna(subset=["all_clients_accuracy"])
        other = run.config["method"] != OURS
        axes.plot(
            frame["round"],
            100 * frame["all_clients_accuracy"],
            color=figures.method_colour(run.config["method"]) if other else colour,
            linestyle="--" if other else "-",
            label=name_of(run),
        )
    axes.set(xlabel="communication round", ylabel="test accuracy of all clients, %")
    figures.legend_below(figure)
    return figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "experiments/mixes.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    out = parser.add_argument("--out", type=Path, default=Path("mixes"), metavar="NAME")
    out.help = "writes NAME.md and NAME.png"
    asked = parser.parse_args(argv)
    page, image = cli.outputs(asked.out, ".md", ".png")
    found = [run for run in read_runs(asked.runs) if run.finished]
    found = [run for run in found if run.config["method"] in (OURS, *CONTROLS)]
    first = min((run.config["seed"] for run in found), default=0)
    runs = [run for run in found if run.config["seed"] == first]
    names = [name_of(run) for run in runs]
    if USUAL not in names or len(set(names)) < max(len(runs), 2):
        raise PfedafmError(
            f"one run of each mix is compared, {USUAL!r} among them; there are: {', '.join(names)}"
        )
    unlike = {name for name in differing(runs) if "." not in name} - {"method", "learning_rate"}
    if unlike:
        words = ", ".join(sorted(unlike))
        raise PfedafmError(f"runs that differ in their mixes are compared; these differ in {words}")
    shortest = min(len(run.records) for run in runs)
    runs = [run.first(shortest) for run in runs]
    runs.sort(
        key=lambda run: (
            run.config["method"] != OURS,
            -(run.summary.final_all_clients_accuracy or 0),
        )
    )
    text = f"### Mixes, {shortest} rounds, %\n\n{accuracies(runs)}\n### Differences, points\n\n{gaps(runs)}"
    write_atomically(page, text)
    plots.save(picture(runs), image)
    console.print(text)
    return 0


if __name__ == "__main__":
    cli.guarded(main)
