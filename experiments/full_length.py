"""Long runs of one comparison side by side: accuracies, differences, what mixing adds, the maximum.

    python experiments/full_length.py experiments/results/full_length/hetero_cifar10-n100

All runs have one split and the same participants in every round, so that methods are compared
client by client and round by round (those of the lowest seed, if there are several; then one table
has means over seeds). `late` rounds and evaluations are the last fifth of a run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from paper import numbers
from scipy import stats  # comes with JAX, which needs it

from pfedafm_jax import PfedafmError, cli, figures, plots
from pfedafm_jax.files import write_atomically
from pfedafm_jax.progress import console
from pfedafm_jax.results import Run, read_runs
from pfedafm_jax.tables import human, markdown, mean_and_deviation, percent

OURS = "pfedafm"
STRETCHES = 5  # parts of a run in the table of pFedAFM's models
DRAWS = 2000  # of participants, to see what a maximum over rounds is worth


def participants(run: Run, prediction: str = "") -> np.ndarray:
    """Participants' mean accuracy by round, in percent: `[rounds]`."""
    name = f"mean_accuracy{'/' if prediction else ''}{prediction}"
    return 100 * run.per_round()[name].to_numpy()


def late(run: Run, rounds: np.ndarray) -> np.ndarray:
    """Which of these rounds, by number, are in the last fifth of the run."""
    return 5 * rounds > 4 * run.summary.rounds


def late_rounds(run: Run) -> np.ndarray:
    """Participants' mean accuracy in percent in the late rounds: `[rounds]`."""
    return participants(run)[late(run, run.per_round()["round"].to_numpy())]


def late_clients(run: Run) -> np.ndarray:
    """Each client's accuracy in percent, mean over the late evaluations of all: `[clients]`."""
    chosen = late(run, run.clients["evaluation_rounds"])
    return 100 * run.clients["all_clients/accuracy"][chosen].mean(axis=0)


def with_error(values: np.ndarray) -> str:
    """Mean and standard error of the mean."""
    return f"{values.mean():+.2f} ± {stats.sem(values):.2f}"


def accuracies(runs: Sequence[Run]) -> str:
    """The four accuracies of each run, what it spent until the target, and the paper's best."""
    heads = ["method", "rate", "best round", "last ten", "all clients", "spread"]
    heads += ["late, all clients", "rounds to target", "floats", "FLOPs", "the paper, best"]
    rows = []
    for run in runs:
        one = run.summary
        cell = f"{percent(one.best_mean_accuracy)} ({one.best_round})"
        row = [run.title, f"{run.rate:g}", cell, percent(one.last_ten_mean_accuracy)]
        row += [percent(one.final_all_clients_accuracy), percent(one.spread_over_clients)]
        row += [f"{late_clients(run).mean():.2f}", str(one.rounds_to_target or "–")]
        row += ["–" if x is None else human(x) for x in (one.floats_to_target, one.flops_to_target)]
        column = run.config["num_clients"], run.config["dataset"]
        known = run.config["method"] in numbers.METHODS
        stated = numbers.accuracy("hetero", run.config["method"], *column) if known else None
        rows.append([*row, "–" if stated is None else f"{stated:.2f}"])
    return markdown(heads, rows)


def differences(runs: Sequence[Run]) -> str:
    """pFedAFM minus each other, paired by client and paired by round."""
    ours = next(run for run in runs if run.config["method"] == OURS)
    rows = []
    for run in runs:
        if run is ours:
            continue
        clients = late_clients(ours) - late_clients(run)
        rounds = late_rounds(ours) - late_rounds(run)
        row = [with_error(clients), f"{stats.ttest_1samp(clients, 0.0)[1]:.2g}"]
        row += [f"{(clients > 0).sum()} : {(clients < 0).sum()}", with_error(rounds)]
        rows.append([f"pFedAFM − {run.title}", *row])
    heads = ["points", "all clients, late", "p (paired t)", "clients ahead : behind"]
    return markdown([*heads, "participants, late rounds"], rows)


def over_seeds(runs: Sequence[Run]) -> str:
    """Methods that were run with several seeds: mean ± deviation over these, and the differences.

    Each seed has a split of its own, so that clients are paired within a seed.
    """
    by_method = {run.config["method"]: [] for run in runs}
    for run in runs:
        by_method[run.config["method"]].append(run)
    ours = {run.config["seed"]: run for run in by_method[OURS]}
    rows = []
    for method, own in by_method.items():
        own = [run for run in own if run.config["seed"] in ours]
        if len(own) < 2:
            continue
        summaries = [run.summary for run in own]
        names = ("best_mean_accuracy", "last_ten_mean_accuracy", "final_all_clients_accuracy")
        cells = [percent(*mean_and_deviation([getattr(s, n) for s in summaries])) for n in names]
        pairs = [late_clients(ours[run.config["seed"]]) - late_clients(run) for run in own]
        means = [pair.mean() for pair in pairs]
        ahead = f"{np.mean(means):+.2f} ± {np.std(means, ddof=1):.2f}"
        p = f"{stats.ttest_1samp(np.concatenate(pairs), 0.0)[1]:.2g}"
        rows.append(
            [own[0].title, str(len(own)), *cells, *(("", "") if method == OURS else (ahead, p))]
        )
    heads = ["method", "seeds", "best round", "last ten", "all clients"]
    return (
        markdown([*heads, "pFedAFM − it, all clients, late", "p (paired t)"], rows) if rows else ""
    )


def models(run: Run) -> str:
    """pFedAFM's mixed model beside the small and the large one alone, by stretch of rounds."""
    mixed, small, large = (participants(run, name) for name in ("", "small", "large"))
    mix, clients = run.per_round()["mix_mean"].to_numpy(), run.clients
    rows = []
    for part in np.array_split(np.arange(len(mixed)), STRETCHES):
        row = [f"{part[0] + 1} to {part[-1] + 1}"]
        row += [f"{one[part].mean():.2f}" for one in (mixed, small, large)]
        row += [with_error((mixed - small)[part]), f"{mix[part].mean():.3f}"]
        inside = np.isin(clients["evaluation_rounds"], part + 1)
        everyone = (clients[f"all_clients/accuracy{name}"][inside] for name in ("", "/small"))
        rows.append(row + [percent(values.mean() if values.size else None) for values in everyone])
    heads = ["rounds", "mixed", "small alone", "large alone", "mixed − small", "mean mix"]
    return markdown([*heads, "all clients, mixed", "all clients, small alone"], rows)


def by_architecture(run: Run) -> str:
    """What mixing adds to the small model at clients of each architecture, early and late."""
    clients, rows = run.clients, []
    gain = 100 * (clients["visits/accuracy"] - clients["visits/accuracy/small"])
    rounds = np.arange(1, len(gain) + 1)
    early, end = rounds <= len(gain) // STRETCHES, late(run, rounds)
    for number, name in enumerate(run.about["architectures"]):
        own = clients["architecture"] == number
        parts = (gain[chosen][:, own] for chosen in (early, end))
        row = [with_error(part[np.isfinite(part)]) for part in parts]
        mix = np.nanmean(clients["visits/mix_mean"][end][:, own])
        rows.append([figures.architecture_label(name), *row, f"{mix:.3f}"])
    heads = ["clients with", "mixed − small, first fifth", "mixed − small, last fifth"]
    return markdown([*heads, "mean mix, last fifth"], rows)


def maxima(runs: Sequence[Run]) -> str:
    """How far the best round lies above the late ones, and how far it would by the draw alone."""
    rows = []
    for run in runs:
        draw = np.random.default_rng(0)  # the same draws for every run
        best, rounds, clients = participants(run).max(), late_rounds(run), late_clients(run)
        size = len(run.records[0].participants)
        # The maximum over late rounds if every client stayed as it is and only the draw changed.
        picks = draw.random((DRAWS, len(clients))).argpartition(size, axis=1)[:, :size]
        means = clients[picks].mean(axis=1)
        count = DRAWS // len(rounds) * len(rounds)
        drawn = means[:count].reshape(-1, len(rounds)).max(axis=1).mean()
        row = [f"{best:.2f}", f"{rounds.mean():.2f}", f"{rounds.std(ddof=1):.2f}"]
        row += [f"{rounds.max() - rounds.mean():.2f}", f"{drawn - clients.mean():.2f}"]
        rows.append([run.title, *row])
    heads = ["method", "best of all rounds", "late mean", "late deviation of a round"]
    heads += ["best late round − late mean", "the same by the draw of participants alone"]
    return markdown(heads, rows)


def picture(runs: Sequence[Run]) -> Figure:
    """All clients by round for each method; pFedAFM's three models, means of twenty rounds."""
    figure, [[left, right]] = figures.panels(1, 2, 5.6, 4.2)
    for run in runs:
        frame = run.per_round().dropna(subset=["all_clients_accuracy"])
        name, values = run.config["method"], 100 * frame["all_clients_accuracy"]
        left.plot(frame["round"], values, color=figures.method_colour(name), label=run.title)
    ours = next(run for run in runs if run.config["method"] == OURS)
    shown = (("", "mixed"), ("small", "small alone"), ("large", "large alone"))
    for (part, label), colour in zip(shown, figures.COLOURS, strict=False):
        smooth = np.convolve(participants(ours, part), np.ones(20) / 20, "valid")
        right.plot(np.arange(20, 20 + len(smooth)), smooth, color=colour, label=label)
    right.legend(frameon=False, fontsize=8)
    left.set(xlabel="communication round", ylabel="test accuracy of all clients, %")
    right.set(xlabel="communication round", ylabel="participants, mean of 20 rounds, %")
    right.set_title("pFedAFM's models", fontsize=10)
    figures.legend_below(figure, 6)
    return figure


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "experiments/full_length.py", description=(__doc__ or "").split("\n")[0], allow_abbrev=False
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    out = parser.add_argument("--out", type=Path, default=Path("full_length"), metavar="NAME")
    out.help = "writes NAME.md and NAME.png"
    asked = parser.parse_args(argv)
    runs = [run for run in read_runs(asked.runs) if run.finished]
    if OURS not in {run.config["method"] for run in runs}:
        raise PfedafmError(f"none of {', '.join(asked.runs)} is a finished run of {OURS}")
    lengths = {run.summary.rounds for run in runs}
    if len(lengths) > 1 or min(lengths) < 2 * STRETCHES:
        found = ", ".join(f"{run.name}: {run.summary.rounds}" for run in runs)
        raise PfedafmError(
            f"runs of one length are compared, {2 * STRETCHES} rounds or more; {found}"
        )
    runs.sort(key=lambda run: -(run.summary.final_all_clients_accuracy or 0))
    seed, everything = min(run.config["seed"] for run in runs if run.config["method"] == OURS), runs
    runs = [run for run in runs if run.config["seed"] == seed]
    ours = next(run for run in runs if run.config["method"] == OURS)
    parts = {
        "Accuracies, %": accuracies(runs),
        "Differences, points": differences(runs),
        "Several seeds, %": over_seeds(everything),
        "What mixing adds: pFedAFM's participants, and all its clients, %": models(ours),
        "What mixing adds by architecture: pFedAFM's participants, points": by_architecture(ours),
        "The best of the rounds, participants, %": maxima(runs),
    }
    text = "\n".join(f"### {title}\n\n{table}" for title, table in parts.items() if table)
    write_atomically(asked.out.with_suffix(".md"), text)
    plots.save(picture(runs), asked.out.with_suffix(".png"))
    console.print(text)
    return 0


if __name__ == "__main__":
    cli.guarded(main)
