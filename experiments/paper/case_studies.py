"""The paper's case studies and ablations: uneven data, the mix vector, its parts, its training."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np

from paper import numbers, outcome
from paper.by_client import everyone, with_error
from paper.outcome import BEST, EVERYONE, PAPER, SCORES, Claim, Outcome, Table, everywhere
from paper.study import Found, Study, at
from pfedafm_jax.methods import find_method
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.tables import percent
from pfedafm_jax.runs.existing import Task

Means = dict[str, list[float]]  # method → best mean of participants in percent, at each point


class Axis(NamedTuple):
    """One setting that is varied."""

    title: str
    label: str
    points: Callable[[Study, str], Sequence[float]]  # those of a dataset
    changes: Callable[[float], dict[str, Any]]  # of the settings, at a point
    claims: Callable[[Mapping[str, Means]], list[Claim]]  # from the means by dataset
    mix: bool = False  # pFedAFM alone over several seeds, FedProto as a level beside it


def _above(found: Mapping[str, Means]) -> list[bool]:
    """Whether pFedAFM is above FedProto, wherever both are known."""
    pairs = [zip(m.get("pfedafm", []), m.get("fedproto", []), strict=False) for m in found.values()]
    return [own > other for pair in pairs for own, other in pair if np.isfinite(own + other)]


def _ends(values: Sequence[float]) -> list[float]:
    known = [value for value in values if np.isfinite(value)]
    return [known[0], known[-1]] if len(known) > 1 else []


def _more_even(found: Mapping[str, Means]) -> list[Claim]:
    ends = [_ends(values) for means in found.values() for values in means.values()]
    falls = [pair[1] < pair[0] for pair in ends if pair]
    return [
        everywhere("pFedAFM is above FedProto at every point.", _above(found), "points"),
        everywhere("Accuracy falls as data become more even.", falls, "curves"),
    ]


def _rates(found: Mapping[str, Means]) -> list[Claim]:
    claims = []
    for label, means in found.items():
        ends, above = _ends(means["pfedafm"]), _above({label: means})
        rises = f"{label}: accuracy rises with the rate (the paper says so of CIFAR-10)."
        claims.append(Claim(rises, ends[1] > ends[0] if ends else None))
        almost = sum(above) >= len(above) - 1 if len(above) > 2 else None
        text = f"{label}: almost all rates are above FedProto."
        claims.append(Claim(text, almost, f"{sum(above)} of {len(above)}" if above else ""))
    return claims


CLASSES = Axis(
    "Classes that a client sees",
    "classes per client",
    lambda study, dataset: study.scale.seen_classes[dataset],
    lambda point: {"variation": f"classes{point:g}", "classes_per_client": int(point)},
    _more_even,
)
GAMMA = Axis(
    "Dirichlet shares of all classes",
    "gamma",
    lambda study, dataset: study.scale.gammas,
    lambda point: {"variation": f"gamma{point:g}", "partition": "dirichlet", "gamma": point},
    _more_even,
)
MIX_RATE = Axis(
    "Learning rate of the mix vector",
    "rate",
    lambda study, dataset: study.scale.mix_learning_rates,
    lambda point: {"variation": f"mixlr{point:g}", "pfedafm": {"mix_learning_rate": point}},
    _rates,
    mix=True,
)


def along_tasks(study: Study, axis: Axis) -> dict[tuple, Task]:
    """By dataset, point, method and seed; the level has no point."""
    methods = ("pfedafm",) if axis.mix else study.chosen(study.scale.pair)
    seeds = (study.seeds or study.scale.mix_seeds) if axis.mix else study.one_seed
    tasks = {}
    for dataset in study.datasets:
        for point, method, seed in product(axis.points(study, dataset), methods, seeds):
            task = study.task(method, dataset, seed, **axis.changes(point))
            tasks[dataset, point, method, seed] = task
        if axis.mix:
            tasks[dataset, None, "fedproto", seeds[0]] = study.task("fedproto", dataset, seeds[0])
    return tasks


def along(study: Study, found: Found, axis: Axis) -> Outcome:
    """Accuracy of methods over an axis, a panel per dataset; bands are deviations over seeds."""
    figure, [row_of_axes] = style.panels(1, len(study.datasets), 5.0, 3.6)
    rows, every = [], {}
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, points = study.label(dataset), list(axis.points(study, dataset))
        every[label] = means = {}
        for method in dict.fromkeys(key[2] for key in found if key[0] == dataset):
            name, colour = find_method(method).title, style.method_colour(method)
            level = at(found, dataset, None, method)
            runs = [level or at(found, dataset, point, method) for point in points]
            for point, one in zip(points, runs, strict=True):
                shown = [label, f"{point:g}", name, *outcome.scores(one)]
                rows += [shown] if one and not level else []
            means[method] = [outcome.mean(one) for one in runs]
            for score, dash, text in (
                (BEST, "-", "best of rounds"),
                (EVERYONE, "--", "all clients"),
            ):
                middle = np.array([outcome.mean(one, score) for one in runs])
                width = np.array([100 * (outcome.score(one, score)[1] or 0.0) for one in runs])
                known = np.isfinite(middle)  # a line joins what has been run
                run_at, low, high = np.array([points, middle - width, middle + width])[:, known]
                axes.plot(
                    run_at, middle[known], f"o{dash}", color=colour, ms=3, label=f"{name}, {text}"
                )
                axes.fill_between(run_at, low, high, color=colour, alpha=0.2)
            stated = numbers.accuracy("hetero", method, study.scale.columns[-1], dataset)
            if axis is CLASSES and stated is not None:  # the first point is in Table 3
                axes.plot(points[0], stated, "D", color=PAPER, markersize=4)
        if axis.mix:
            axes.set_xscale("log")
        axes.set_xticks(points, [f"{point:g}" for point in points])
        axes.minorticks_off()
        axes.set(title=label, xlabel=axis.label, ylabel="test accuracy, %")
        axes.legend(frameon=False, fontsize=7)
    notes = ["The paper shows its values in a picture only; a diamond is from its Table 3."]
    tables = [Table("", ("dataset", axis.label, "method", *SCORES), rows)]
    tables += [] if axis.mix else [_differences(study, found, axis)]
    return Outcome(axis.title, tables, figure, axis.claims(every), notes)


def _differences(study: Study, found: Found, axis: Axis) -> Table:
    """pFedAFM minus each other at the end, paired by client of a seed, and what mixing adds."""

    def gaps(dataset: str, point: float, method: str, prediction: str = "") -> str:
        ends = [np.array([np.nan])]
        for seed in study.one_seed:
            own, other = (found.get((dataset, point, name, seed)) for name in ("pfedafm", method))
            if own and other:
                ends.append(everyone(own)[-1] - everyone(other, prediction)[-1])
        return with_error(np.concatenate(ends))

    others, rows = [name for name in study.chosen(study.scale.pair) if name != "pfedafm"], []
    for dataset in study.datasets:
        for point in axis.points(study, dataset):
            if at(found, dataset, point, "pfedafm"):
                cells = [gaps(dataset, point, name) for name in others]
                cells.append(gaps(dataset, point, "pfedafm", "small"))
                rows.append([study.label(dataset), f"{point:g}", *cells])
    heads = [f"pFedAFM − {find_method(name).title}" for name in others]
    columns = ("dataset", axis.label, *heads, "mixed − small")
    return Table("All clients at the end, points (± a standard error over clients)", columns, rows)


# ------------------------------------------------------------------------------- the mix vector


def mix_mean(study: Study, found: Found) -> Outcome:
    """Mean of the mix vector by round: the two clients drawn most often, and all participants."""
    figure, [row_of_axes] = style.panels(1, len(study.datasets), 5.0, 3.6, sharey=True)
    rows, claims = [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, stated, near = study.label(dataset), numbers.MIX_MEAN[dataset], None
        text = f"the paper's two clients: near {stated:g}"
        axes.axhline(stated, color=PAPER, linestyle=":", linewidth=0.9, label=text)
        for run in at(found, dataset):
            mix = run.clients["visits/mix_mean"]
            plots.mix_by_round(mix, label, axes)
            visits = [column[np.isfinite(column)] for column in mix.T]
            kinds = {f"client {client}": [visits[client]] for client in plots.busiest(mix)}
            kinds["median client"] = [column for column in visits if len(column)]
            for name, seen in kinds.items():
                first, last = (np.median([column[end] for column in seen]) for end in (0, -1))
                count = np.mean([len(column) for column in seen])
                shown = [f"{first:.3f}", f"{last:.3f}", f"{round(count, 1):g}", f"{stated:g}"]
                rows.append([label, name, *shown, str(len(mix))])
                near = bool(abs(last - stated) < 0.25)  # in the end of the median client
        text = f"{label}: the mean of the mix vector comes close to {stated:g}."
        claims.append(Claim(text, near, "the median client ends within 0.25 of it" if near else ""))
    columns = ("dataset", "client", "first visit", "last visit", "visits", "paper, near", "rounds")
    return Outcome("Mean of the mix vector", [Table("", columns, rows)], figure, claims)


# ------------------------------------------------------------------------------- ablations

Bar = tuple[float, float, list[str]]  # best and all clients in percent; cells of a table


def ablation(
    study: Study,
    title: str,
    column: str,
    names: Sequence[str],
    text: str,
    bars_of: Callable[[str], Mapping[str, Bar]],
) -> Outcome:
    """Bars by name, a group per dataset, under `column` in the table; the paper says they rise."""
    figure, [[axes]] = style.panels(1, 1, 6.5, 3.8)
    groups = {study.label(dataset): bars_of(dataset) for dataset in study.datasets}
    rows, claims = [], []
    for label, bars in groups.items():
        rows += [[label, name, *bars[name][2]] for name in names if name in bars]
        best = [bars[name][0] for name in names if name in bars]
        rises = all(a < b for a, b in pairwise(best))
        claims.append(Claim(f"{label}: {text}", rises if len(best) == len(names) else None))
    for place, name in enumerate(names):
        middle = np.arange(len(groups)) + (place - (len(names) - 1) / 2) * 0.8 / len(names)
        best, everyone = np.array([bars.get(name, (np.nan,) * 2)[:2] for bars in groups.values()]).T
        drawn = axes.bar(middle, best, 0.75 / len(names), color=style.COLOURS[place], label=name)
        labels = [f"{value:.1f}" if np.isfinite(value) else "" for value in best]
        axes.bar_label(drawn, labels, fontsize=8, padding=2)
        dots = "" if place else "all clients at the end"
        axes.plot(middle, everyone, "o", color=PAPER, markersize=4, label=dots)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    style.legend_below(figure)
    return Outcome(title, [Table("", ("dataset", column, *SCORES), rows)], figure, claims)


def parts(study: Study, found: Found) -> Outcome:
    """The small model (shared extractor, header), the large one (local extractor), both mixed; in
    one run, in which the mixed model is what is trained."""
    names = {"small": "/small", "large": "/large", "mixed": ""}

    def bars_of(dataset: str) -> dict[str, Bar]:
        bars = {}
        for run in at(found, dataset):
            frame: Any = run.per_round()
            for name, suffix in names.items():
                means = frame[f"mean_accuracy{suffix}"].dropna()
                everyone = frame[f"all_clients_accuracy{suffix}"].iloc[-1]
                cells = map(percent, (means.max(), means.tail(10).mean(), everyone))
                cells = [*cells, str(len(frame)), "1"]
                bars[name] = 100 * means.max(), 100 * everyone, cells
        return bars

    text = "accuracy rises from the small to the large to the mixed model."
    return ablation(study, "Small, large and mixed model", "model", list(names), text, bars_of)


KINDS = {"end to end": "end_to_end", "iterative": "iterative"}


def training_tasks(study: Study) -> dict[tuple, Task]:
    tasks = {}
    for dataset, kind, seed in product(study.datasets, KINDS, study.one_seed):
        changes = {"variation": KINDS[kind], "pfedafm": {"training": KINDS[kind]}}
        tasks[dataset, kind, seed] = study.task("pfedafm", dataset, seed, **changes)
    return tasks


def training(study: Study, found: Found) -> Outcome:
    """Both extractors at once, or in turn."""

    def bars_of(dataset: str) -> dict[str, Bar]:
        runs = {kind: one for kind in KINDS if (one := at(found, dataset, kind))}
        return {
            kind: (outcome.mean(one), outcome.mean(one, EVERYONE), outcome.scores(one))
            for kind, one in runs.items()
        }

    text = "iterative training is better than end to end."
    title = "End-to-end and iterative training"
    return ablation(study, title, "training", list(KINDS), text, bars_of)
