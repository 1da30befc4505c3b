"""pFedAFM beside the controls that could refute it: all clients after the last round, over seeds.

    python experiments/controls.py experiments/results/full_length/hetero_cifar10-n100{,-momentum}

Runs of one dataset, split and length are one column. The measure that carries a claim is the mean
accuracy of all clients at the end, and differences to pFedAFM are paired by seed. Where two or more
seeds are common to both, the interval is that of a t-test with the seeds as units, 95 %; with one
seed there is none.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import scipy.stats
from full_length import finished, write
from matplotlib.figure import Figure
from paper import numbers

from pfedafm_jax import PfedafmError
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.results import style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import human, markdown

OURS = "pFedAFM"
Seeds = dict[int, Run]  # the runs of one method on one split, by seed
Column = dict[str, Seeds]  # those of one split, by the method's name with what is particular to it


def split_of(run: Run) -> str:
    """What a run is compared within: `CIFAR-10, 2 classes, 500 rounds`."""
    settings = run.settings
    dataset = numbers.DATASETS.get(settings["dataset"], settings["dataset"])
    share = f"{settings['classes_per_client']} classes"
    if settings["partition"] == "dirichlet":
        share = f"γ = {settings['gamma']:g}"
    return f"{dataset}, {share}, {len(run.records)} rounds"


def name_of(run: Run) -> str:
    """The method, and what is particular to this run of it: `FedPer, momentum 0.5, mean 0.8`."""
    settings = run.settings
    words = [run.title]
    if run.config["method"] == "pfedafm" and settings["pfedafm.mix_fixed"] is not None:
        words.append(f"mix held at {settings['pfedafm.mix_fixed']:g}")
    if run.config["method"] == "fedavg_finetuned":
        words.append(settings["fedavg_finetuned.finetune"])
    if settings["server_optimizer"] != "average":
        words.append(f"{settings['server_optimizer']} {settings['server_momentum']:g}")
    if settings["server_mean"]:
        words.append(f"mean {settings['server_mean']:g}")
    return ", ".join(words)


def by_split(runs: Sequence[Run]) -> dict[str, Column]:
    """Runs by split, method and seed; raises for a second one of its kind."""
    columns: dict[str, Column] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        seeds = columns[split_of(run)][name_of(run)]
        if run.config["seed"] in seeds:
            raise PfedafmError(f"{run.folder} is the second run of its kind and seed")
        seeds[run.config["seed"]] = run
    return columns


def at_the_end(run: Run) -> float:
    """The mean accuracy of all clients after the last round, in percent."""
    return 100 * (run.summary.final_all_clients_accuracy or np.nan)


def methods_of(columns: Mapping[str, Column]) -> list[str]:
    """All methods, the best of the first split that has them first."""
    names: list[str] = []
    for column in columns.values():
        level = {
            name: float(np.mean([at_the_end(run) for run in seeds.values()]))
            for name, seeds in column.items()
        }
        names += sorted(level.keys() - set(names), key=lambda name: -level[name])
    return names


def levels(columns: Mapping[str, Column]) -> str:
    """A row a method: the accuracy of every seed, and their mean."""

    def cell(seeds: Seeds) -> str:
        values = [at_the_end(seeds[seed]) for seed in sorted(seeds)]
        if not values:
            return "not run"
        text = ", ".join(f"{value:.2f}" for value in values)
        return text if len(values) == 1 else f"**{np.mean(values):.2f}** ({text})"

    rows = [
        [name, *(cell(column.get(name, {})) for column in columns.values())]
        for name in methods_of(columns)
    ]
    return markdown(["all clients at the end, %", *columns], rows)


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean, by Student's t over these values."""
    error = scipy.stats.sem(values)
    low, high = scipy.stats.t.interval(0.95, len(values) - 1, np.mean(values), error)
    return float(low), float(high)


def difference(ours: Seeds, other: Seeds) -> str:
    """pFedAFM minus another, paired by seed: every value, and with several their mean and interval."""
    common = sorted(ours.keys() & other.keys())
    values = [at_the_end(ours[seed]) - at_the_end(other[seed]) for seed in common]
    if not values:
        return "not run"
    text = ", ".join(f"{value:+.2f}" for value in values)
    if len(values) == 1:
        return f"{text} (seed {common[0]})"
    low, high = interval(values)
    return f"{np.mean(values):+.2f} [{low:+.2f}, {high:+.2f}] ({text})"


def differences(columns: Mapping[str, Column]) -> str:
    """A row a method: pFedAFM minus it, paired by seed."""
    rows = []
    for name in methods_of(columns):
        if name == OURS:
            continue
        cells = [
            difference(column.get(OURS, {}), column.get(name, {})) for column in columns.values()
        ]
        rows.append([name, *cells])
    return markdown(["pFedAFM minus the other, points", *columns], rows)


def costs(columns: Mapping[str, Column]) -> str:
    """A row a method: floats sent up and down and FLOPs of a whole run of its first seed."""

    def cell(seeds: Seeds) -> str:
        if not seeds:
            return "not run"
        records = seeds[min(seeds)].records
        floats = sum(record.floats_up + record.floats_down for record in records)
        flops = sum(record.flops for record in records)
        return f"{human(floats)} floats, {human(flops)}FLOP"

    rows = [
        [name, *(cell(column.get(name, {})) for column in columns.values())]
        for name in methods_of(columns)
    ]
    return markdown(["a whole run", *columns], rows)


def picture(columns: Mapping[str, Column]) -> Figure:
    """All clients by round, a panel a split: the mean over seeds, and a band from least to most."""
    figure, [panels] = style.panels(1, len(columns), 4.6, 4.2)
    dashes: dict[str, int] = defaultdict(int)
    looks: dict[str, tuple[str, str]] = {}
    for axes, (split, column) in zip(panels, columns.items(), strict=True):
        for name, seeds in column.items():
            method = next(iter(seeds.values())).config["method"]
            if name not in looks:
                looks[name] = (
                    style.method_colour(method),
                    ("-", "--", ":", "-.")[dashes[method] % 4],
                )
                dashes[method] += 1
            colour, dash = looks[name]
            curves = [run.clients for run in seeds.values()]
            rounds = curves[0]["evaluation_rounds"]
            values = 100 * np.array(
                [np.nanmean(curve["all_clients/accuracy"], axis=1) for curve in curves]
            )
            axes.plot(rounds, values.mean(axis=0), color=colour, linestyle=dash, label=name)
            if len(values) > 1:
                least, most = values.min(axis=0), values.max(axis=0)
                axes.fill_between(rounds, least, most, color=colour, alpha=0.15, linewidth=0)
        axes.set_title(split, fontsize=10)
        axes.set_xlabel("round")
        axes.set_ylim(bottom=max(0.0, axes.get_ylim()[0]))
    panels[0].set_ylabel("all clients, %")
    style.legend_below(figure)
    return figure


def main(argv: list[str]) -> int:
    runs, out = finished(argv, "controls", __doc__)
    columns = by_split(runs)
    if not any(OURS in column for column in columns.values()):
        raise PfedafmError(f"no finished run is one of {OURS}")
    tables = {
        "All clients after the last round": levels(columns),
        "pFedAFM minus the other, paired by seed": differences(columns),
        "What a run sends and computes": costs(columns),
    }
    write(tables, picture(columns), out)
    return 0


if __name__ == "__main__":
    guarded(main)
