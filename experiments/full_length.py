"""Long runs of one comparison side by side: accuracies, differences, what mixing adds, the maximum.

    python experiments/full_length.py experiments/results/full_length/hetero_cifar10-n100

All runs of a seed have one split and the same participants in every round, so that methods are
compared client by client. If there are several seeds, four tables are over these, the others
are of the lowest. `late` rounds and evaluations are the last fifth of a run. ± is a standard error
with the client as the unit, over its visits and evaluations, if nothing else is said.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from paper import by_seed, numbers
from paper.by_client import (
    STRETCHES,
    best_round,
    change,
    everyone,
    late_clients,
    paired_p,
    span,
    stretches,
    visits,
    with_error,
)
from paper.by_seed import OURS

from pfedafm_jax import PfedafmError
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli import options
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.run import Run, differing, read_runs
from pfedafm_jax.results.tables import human, markdown, percent

CHOSEN = "method", "seed", "learning_rate", "weight_decay"  # may differ, beside methods' own
DRAWS = 1000  # of as many rounds as a run has, to see what a maximum over rounds is worth


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
        row.append(f"{late_clients(run).mean():.2f}")
        target = numbers.TARGET_ACCURACY.get(run.config["dataset"])
        cost = None if target is None else numbers.cost_to(target, run.records)
        if cost is None:
            row += ["–", "–", "–"]
        else:
            row += [str(cost.rounds), human(cost.floats), human(cost.flops)]
        column = run.config["num_clients"], run.config["dataset"]
        known = run.config["method"] in numbers.METHODS
        kind = "hetero" if len(run.config["architectures"]) > 1 else "homo"
        stated = numbers.accuracy(kind, run.config["method"], *column) if known else None
        rows.append([*row, "–" if stated is None else f"{stated:.2f}"])
    return markdown(heads, rows)


def differences(runs: Sequence[Run]) -> str:
    """pFedAFM minus each other, paired by client: at the end, late, and at late visits."""
    ours = next(run for run in runs if run.config["method"] == OURS)
    alone = next((run for run in runs if run.config["method"] == "standalone"), None)
    *_, (rows_late, _) = stretches(ours)
    rows = []
    for run in runs:
        if run is ours:
            continue
        clients = late_clients(ours) - late_clients(run)
        row = [with_error((everyone(ours) - everyone(run))[-1]), with_error(clients)]
        row += [paired_p(clients)]
        row += [f"{(clients > 0).sum()} : {(clients < 0).sum()}"]
        row += [with_error((visits(ours) - visits(run))[rows_late])]
        if alone is None or run is alone:
            row += ["–", "–"]
        else:
            row.append(with_error((everyone(run) - everyone(alone))[-1]))
            row.append(with_error(late_clients(run) - late_clients(alone)))
        rows.append([f"pFedAFM − {run.title}", *row])
    heads = ["points", "all clients, end", "all clients, late", "p (paired t, late)"]
    heads += ["clients ahead : behind, late", "participants, late"]
    heads += [f"the other − Standalone, all clients, {when}" for when in ("end", "late")]
    return markdown(heads, rows)


def by_stretch(ours: Run, runs: Sequence[Run], name: Callable[[Run], str]) -> str:
    """One run minus each other over all clients, paired by client, in every part of the run."""
    parts = list(stretches(ours))
    rows = []
    for run in runs:
        if run is not ours:
            gap = everyone(ours) - everyone(run)
            cells = [with_error(gap[evaluations]) for _, evaluations in parts]
            rows.append([f"{name(ours)} − {name(run)}", *cells])
    return markdown(["all clients, points", *(span(rows) for rows, _ in parts)], rows)


def levels(runs: Sequence[Run]) -> str:
    """All clients in every part of a run, what the last part changed, and the highest evaluation."""
    parts = list(stretches(runs[0]))
    rows = []
    for run in runs:
        means = [everyone(run)[evaluations] for _, evaluations in parts]
        cells = [f"{part.mean():.2f}" if part.size else "–" for part in means]
        highest = everyone(run).mean(axis=1)
        when = run.clients["evaluation_rounds"][highest.argmax()]
        rows.append([run.title, *cells, with_error(change(run)), f"{highest.max():.2f} ({when})"])
    heads = ["all clients, %", *(span(rows) for rows, _ in parts)]
    return markdown([*heads, "change in the last part", "highest (round)"], rows)


def predictions(runs: Sequence[Run]) -> str:
    """Methods whose clients can predict in several ways: their accuracies by each of them."""
    rows = []
    for run in runs:
        for number, name in enumerate(run.predictions if len(run.predictions) > 1 else ()):
            key = name if number else ""
            *_, (part, evaluations) = stretches(run)
            rounds = np.nanmean(visits(run, key), axis=1)
            row = [run.title, name, f"{rounds.max():.2f} ({rounds.argmax() + 1})"]
            row += [f"{rounds[part].mean():.2f}", f"{everyone(run, key)[evaluations].mean():.2f}"]
            rows.append([*row, f"{everyone(run, key)[-1].mean():.2f}"])
    heads = ["method", "prediction", "best round", "participants, late", "all clients, late"]
    return markdown([*heads, "all clients, end"], rows) if rows else ""


def targets(runs: Sequence[Run]) -> str:
    """When the target is reached: by one round's participants, those of ten rounds, all clients."""
    rows = []
    for run in runs:
        target = 100 * numbers.TARGET_ACCURACY.get(run.config["dataset"], 1.0)
        rounds = run.clients["evaluation_rounds"]
        one = 100 * run.per_round()["mean_accuracy"].to_numpy()
        ten = np.convolve(one, np.ones(10) / 10, "valid")
        reached = [
            np.arange(1, len(one) + 1)[one >= target],
            np.arange(10, len(one) + 1)[ten >= target],
        ]
        reached.append(rounds[everyone(run).mean(axis=1) >= target])
        cells = [str(found[0]) if len(found) else "–" for found in reached]
        until = reached[-1][0] if len(reached[-1]) else 0
        flops = [record.flops for record in run.records]
        cells += [human(sum(flops[:until])) if until else "–", human(sum(flops) / len(flops))]
        rows.append([run.title, *cells])
    heads = ["method", "one round's participants", "mean of ten rounds", "all clients"]
    return markdown([*heads, "FLOPs until all clients", "FLOPs of a round"], rows)


def averaging(runs: Sequence[Run]) -> str:
    """Participants after their training, and the same clients in the same rounds with the average."""
    rows = []
    for run in runs:
        rounds = run.clients["evaluation_rounds"]
        chosen = 2 * rounds > run.summary.rounds
        before, after = visits(run)[rounds[chosen] - 1], everyone(run)[chosen]
        after = np.where(np.isfinite(before), after, np.nan)
        cells = [f"{np.nanmean(values):.2f}" for values in (before, after)]
        rows.append([run.title, *cells, with_error(after - before)])
    return markdown(["method", "after training", "after the average", "change"], rows)


def models(run: Run) -> str:
    """pFedAFM's mixed model beside the small and the large one alone, in every part of the run."""
    records = run.per_round()
    gain, gain_of_all = visits(run) - visits(run, "small"), everyone(run) - everyone(run, "small")
    rows = []
    for part, evaluations in stretches(run):
        row = [f"{np.nanmean(visits(run, name)[part]):.2f}" for name in ("", "small", "large")]
        row += [with_error(gain[part]), with_error(gain_of_all[evaluations])]
        means = (records[name][part].mean() for name in ("mix_mean", "loss", "shared_loss"))
        rows.append([span(part), *row, *(f"{mean:.3f}" for mean in means)])
    heads = ["rounds", "mixed", "small alone", "large alone", "mixed − small"]
    heads += ["mixed − small, all clients", "mean mix", "loss, phase 1", "loss, phase 2"]
    return markdown(heads, rows)


def by_clients(ours: Run, runs: Sequence[Run]) -> str:
    """What mixing adds for clients of each architecture, and by Standalone's accuracy for them."""
    names = ours.about["architectures"]
    groups = {
        style.architecture_label(name): ours.clients["architecture"] == number
        for number, name in enumerate(names)
    }
    for run in runs:
        if run.config["method"] == "standalone":
            thirds = np.array_split(np.argsort(late_clients(run), kind="stable"), 3)
            for name, third in zip(("lowest", "middle", "highest"), thirds, strict=True):
                groups[f"Standalone's {name} third"] = np.isin(
                    np.arange(len(ours.clients["architecture"])), third
                )
    controls = [run for run in runs if run.config["method"] in numbers.CONTROLS]
    gain = everyone(ours) - everyone(ours, "small")
    (_, first), *_, (_, last) = stretches(ours)
    rows = []
    for name, own in groups.items():
        row = [name, str(own.sum()), *(with_error(gain[p][:, own]) for p in (first, last))]
        row += [with_error((late_clients(ours) - late_clients(run))[own]) for run in controls]
        rows.append(row)
    heads = ["clients", "number", "mixed − small, first fifth", "mixed − small, late"]
    return markdown([*heads, *(f"pFedAFM − {run.title}, late" for run in controls)], rows)


@cache
def draws(rounds: int, clients: int, size: int) -> list[np.ndarray]:
    """Participants of so many rounds, `[rounds, size]`, drawn many times; the same for every run."""
    draw = np.random.default_rng(0)
    return [
        draw.random((rounds, clients)).argpartition(size - 1, axis=1)[:, :size].astype(np.uint16)
        for _ in range(DRAWS)
    ]


def maxima(runs: Sequence[Run]) -> str:
    """How far the best round lies above the late ones, and how far it would by the draw alone."""
    rows = []
    for run in runs:
        *_, (part, _) = stretches(run)
        best = best_round(run)
        rounds = np.nanmean(visits(run)[part], axis=1)
        # If every client stayed as it was at its late visits, and only the draw changed.
        seen = np.isfinite(visits(run)[part]).any(axis=0)
        clients = np.nanmean(visits(run)[part][:, seen], axis=0)
        size, count = len(run.records[0].participants), run.summary.rounds
        highest = [
            clients[picks].mean(axis=1).max()
            for picks in draws(count, len(clients), min(size, len(clients)))
        ]
        row = [f"{best:.2f}", f"{rounds.mean():.2f}", f"{rounds.std(ddof=1):.2f}"]
        rows.append(
            [
                run.title,
                *row,
                f"{best - rounds.mean():.2f}",
                f"{np.mean(highest) - clients.mean():.2f}",
            ]
        )
    heads = ["method", "best of all rounds", "late mean", "late deviation of a round"]
    return markdown(
        [*heads, "best − late mean", "the same by the draw of participants alone"], rows
    )


def picture(runs: Sequence[Run]) -> Figure:
    """All clients by round for each method; pFedAFM's three models, means of twenty rounds."""
    figure, [[left, right]] = style.panels(1, 2, 5.6, 4.2)
    for run in runs:
        frame = run.per_round().dropna(subset=["all_clients_accuracy"])
        name, values = run.config["method"], 100 * frame["all_clients_accuracy"]
        left.plot(frame["round"], values, color=style.method_colour(name), label=run.title)
    ours = next(run for run in runs if run.config["method"] == OURS)
    shown = (("", "mixed"), ("small", "small alone"), ("large", "large alone"))
    for (part, label), colour in zip(shown, style.COLOURS, strict=False):
        smooth = np.convolve(np.nanmean(visits(ours, part), axis=1), np.ones(20) / 20, "valid")
        right.plot(np.arange(20, 20 + len(smooth)), smooth, color=colour, label=label)
    right.legend(frameon=False, fontsize=8)
    left.set(xlabel="communication round", ylabel="test accuracy of all clients, %")
    right.set(xlabel="communication round", ylabel="participants, mean of 20 rounds, %")
    right.set_title("pFedAFM's models", fontsize=10)
    style.legend_below(figure, 6)
    return figure


def refuse_unlike(runs: Sequence[Run], may: Collection[str]) -> None:
    """Raises if runs differ in more than these settings and those of their methods."""
    unlike = sorted(name for name in differing(runs) if "." not in name and name not in may)
    if unlike:
        allowed = ", ".join(may)
        raise PfedafmError(
            f"runs that differ in {allowed} are compared; these differ in {', '.join(unlike)}"
        )


def finished(argv: list[str], script: str, about: str | None) -> tuple[list[Run], Path]:
    """The finished runs that a command names, and the name of its output."""
    parser = argparse.ArgumentParser(f"experiments/{script}.py", allow_abbrev=False)
    parser.description = (about or "").split("\n")[0]
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs")
    words = "writes NAME.md and NAME.png"
    parser.add_argument("--out", type=Path, default=Path(script), metavar="NAME", help=words)
    asked = parser.parse_args(argv)
    options.outputs(asked.out, ".md", ".png")  # checked before the work
    return [run for run in read_runs(asked.runs) if run.finished], asked.out


def write(tables: dict[str, str], figure: Figure, out: Path) -> None:
    """Tables by their titles, as a page and in the terminal, and a picture."""
    page, image = options.outputs(out, ".md", ".png")
    text = "\n".join(f"### {title}\n\n{table}" for title, table in tables.items() if table)
    write_atomically(page, text)
    plots.save(figure, image)
    console.print(text)


def main(argv: list[str]) -> int:
    runs, out = finished(argv, "full_length", __doc__)
    if OURS not in {run.config["method"] for run in runs}:
        raise PfedafmError(f"no finished run is one of {OURS}")
    lengths = {run.summary.rounds for run in runs}
    if len(lengths) > 1 or min(lengths) < 2 * STRETCHES:
        found = ", ".join(f"{run.name}: {run.summary.rounds}" for run in runs)
        raise PfedafmError(
            f"runs of one length are compared, {2 * STRETCHES} rounds or more; {found}"
        )
    refuse_unlike(runs, CHOSEN)
    runs.sort(key=lambda run: -(run.summary.final_all_clients_accuracy or 0))
    seed, everything = min(run.config["seed"] for run in runs if run.config["method"] == OURS), runs
    runs = [run for run in runs if run.config["seed"] == seed]
    ours = next(run for run in runs if run.config["method"] == OURS)
    parts = {
        "Accuracies, %": accuracies(runs),
        "Differences, points": differences(runs),
        "Differences by part of the run, points": by_stretch(ours, runs, lambda run: run.title),
        "All clients by part of the run, %": levels(runs),
        "Several seeds, mean and deviation over seeds, %": by_seed.levels(everything),
        "Several seeds, pFedAFM minus the other, points": by_seed.differences(everything),
        "Several seeds, by part of the run, points": by_seed.by_part(everything),
        "Several seeds, what mixing adds by part of the run": by_seed.mixing(everything),
        "Rounds until the target": targets(runs),
        "Before and after the average: the same clients, second half, %": averaging(runs),
        "What mixing adds: pFedAFM's participants, and all its clients, %": models(ours),
        "What mixing adds by clients: all clients, points": by_clients(ours, runs),
        "Predictions, %": predictions(runs),
        "The best of the rounds, participants, %": maxima(runs),
    }
    write(parts, picture(runs), out)
    return 0


if __name__ == "__main__":
    guarded(main)
