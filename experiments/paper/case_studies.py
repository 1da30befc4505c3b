"""The paper's case studies and ablations: uneven data, the mix vector, its parts, its training."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from paper import numbers, outcome
from paper.outcome import BEST, EVERYONE, PAPER, SCORES, Claim, Outcome, Table
from paper.study import Found, Study, at
from pfedafm_jax import figures, plots
from pfedafm_jax.methods import find_method
from pfedafm_jax.standing import Task
from pfedafm_jax.tables import percent

# ------------------------------------------------------------------------------- uneven data


class Axis(NamedTuple):
    """One way in which data are uneven."""

    title: str
    label: str
    points: Callable[[Study, str], Sequence[float]]  # those of a dataset
    changes: Callable[[float], dict[str, Any]]  # of the settings, at a point


CLASSES = Axis(
    "Classes that a client sees",
    "classes a client",
    lambda study, dataset: study.scale.seen_classes[dataset],
    lambda point: {"variation": f"classes{point:g}", "classes_per_client": int(point)},
)
GAMMA = Axis(
    "Dirichlet shares of all classes",
    "gamma",
    lambda study, dataset: study.scale.gammas,
    lambda point: {"variation": f"gamma{point:g}", "partition": "dirichlet", "gamma": point},
)


def uneven_tasks(study: Study, axis: Axis) -> dict[tuple, Task]:
    return {
        (dataset, point, method, seed): study.task(method, dataset, seed, **axis.changes(point))
        for dataset in study.datasets
        for point in axis.points(study, dataset)
        for method in study.chosen(study.scale.pair)
        for seed in study.one_seed
    }


def uneven(study: Study, found: Found, axis: Axis) -> Outcome:
    """Accuracy of methods over an axis of unevenness, a panel a dataset."""
    figure, [row_of_axes] = figures.panels(1, len(study.datasets), 5.0, 3.6)
    rows, higher, falls = [], [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, along = study.label(dataset), list(axis.points(study, dataset))
        best: dict[str, list[float]] = {}
        for method in study.chosen(study.scale.pair):
            name, colour = find_method(method).title, figures.method_colour(method)
            runs = [at(found, dataset, point, method) for point in along]
            for point, one in zip(along, runs, strict=True):
                rows += [[label, f"{point:g}", name, *outcome.scores(one)]] if one else []
            best[method] = [outcome.mean(one) for one in runs]
            everyone = [outcome.mean(one, EVERYONE) for one in runs]
            axes.plot(along, best[method], "o-", color=colour, label=f"{name}, best of rounds")
            text = f"{name}, all clients at the end"
            axes.plot(along, everyone, "o--", color=colour, ms=3, lw=1, alpha=0.6, label=text)
            known = [value for value in best[method] if np.isfinite(value)]
            falls += [known[-1] < known[0]] if len(known) > 1 else []
            stated = numbers.accuracy("hetero", method, study.scale.columns[-1], dataset)
            if axis is CLASSES and stated is not None:  # the first point is in Table 3
                text = "paper, Table 3" if method == "pfedafm" else ""
                axes.plot(along[0], stated, "D", color=PAPER, markersize=4, label=text)
        pairs = zip(best.get("pfedafm", []), best.get("fedproto", []), strict=False)
        higher += [own > other for own, other in pairs if np.isfinite(own + other)]
        axes.set(title=label, xlabel=axis.label, ylabel="test accuracy, %")
        axes.set_xticks(along)
        axes.legend(frameon=False, fontsize=7)
    claims = [
        outcome.everywhere("pFedAFM is above FedProto at every point.", higher, "points"),
        outcome.everywhere("Accuracy falls as data become more even.", falls, "curves"),
    ]
    notes = ["The paper shows its values in a picture only."]
    tables = [Table("", ("dataset", axis.label, "method", *SCORES), rows)]
    return Outcome(axis.title, tables, figure, claims, notes)


# ------------------------------------------------------------------------------- the mix vector


def mix_rate_tasks(study: Study) -> dict[tuple, Task]:
    seeds, tasks = study.seeds or study.scale.mix_seeds, {}
    for dataset in study.datasets:
        for rate in study.scale.mix_learning_rates:
            changes = {"variation": f"mixlr{rate:g}", "pfedafm": {"mix_learning_rate": rate}}
            for seed in seeds:
                tasks[dataset, rate, seed] = study.task("pfedafm", dataset, seed, **changes)
        tasks[dataset, "fedproto", seeds[0]] = study.task("fedproto", dataset, seeds[0])
    return tasks


def mix_rate(study: Study, found: Found) -> Outcome:
    """pFedAFM over the learning rate of the mix vector: mean and deviation, FedProto beside it."""
    rates = study.scale.mix_learning_rates
    figure, [row_of_axes] = figures.panels(1, len(study.datasets), 5.0, 3.6)
    rows, claims = [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, runs = study.label(dataset), [at(found, dataset, rate) for rate in rates]
        for rate, one in zip(rates, runs, strict=True):
            rows += [[label, f"{rate:g}", *outcome.scores(one)]] if one else []
        for key, colour, text in (
            (BEST, figures.method_colour("pfedafm"), "best of rounds"),
            (EVERYONE, figures.GREY, "all clients"),
        ):
            middle = np.array([outcome.mean(one, key) for one in runs])
            width = np.array([100 * (outcome.score(one, key)[1] or 0.0) for one in runs])
            axes.plot(rates, middle, "o-", color=colour, label=f"pFedAFM, {text}")
            band = {"color": colour, "alpha": 0.2, "linewidth": 0}
            axes.fill_between(rates, middle - width, middle + width, **band)
        other = outcome.mean(at(found, dataset, "fedproto"))
        if np.isfinite(other):
            colour = figures.method_colour("fedproto")
            axes.axhline(other, color=colour, linewidth=1.2, label="FedProto here")
        stated = numbers.accuracy("hetero", "fedproto", 100, dataset)
        if stated is not None and study.scale.name != "smoke":
            text = f"FedProto in the paper, {stated}"
            axes.axhline(stated, color=PAPER, linewidth=0.9, linestyle=":", label=text)
        axes.set_xscale("log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.minorticks_off()
        axes.set(title=label, xlabel="learning rate of the mix vector", ylabel="test accuracy, %")
        axes.legend(frameon=False, fontsize=7)
        means = [value for one in runs if np.isfinite(value := outcome.mean(one))]
        if dataset == "cifar10":
            rises = means[-1] > means[0] if len(means) > 1 else None
            claims.append(Claim(f"{label}: accuracy rises with the rate.", rises))
        above = [value > other for value in means] if np.isfinite(other) else []
        almost = sum(above) >= len(above) - 1 if above else None
        text = f"{label}: almost all rates are above FedProto ({stated} there)."
        claims.append(Claim(text, almost, f"{sum(above)} of {len(above)}" if above else ""))
    tables = [Table("", ("dataset", "rate", *SCORES), rows)]
    return Outcome("Learning rate of the mix vector", tables, figure, claims)


def own_tasks(study: Study) -> dict[tuple, Task]:
    """pFedAFM as in Table 3, once a dataset."""
    seed = study.one_seed[0]
    return {(dataset, seed): study.task("pfedafm", dataset, seed) for dataset in study.datasets}


def mix_mean(study: Study, found: Found) -> Outcome:
    """Mean of the mix vector by round: the two clients drawn most often, and all participants."""
    figure, [row_of_axes] = figures.panels(1, len(study.datasets), 5.0, 3.6, sharey=True)
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
                shown = [f"{first:.3f}", f"{last:.3f}", f"{count:.1f}", f"{stated:g}"]
                rows.append([label, name, *shown, str(len(mix))])
                near = bool(abs(last - stated) < 0.25)  # in the end of the median client
        text = f"{label}: the mean of the mix vector comes close to {stated:g}."
        claims.append(Claim(text, near, "the median client ends within 0.25 of it" if near else ""))
    columns = ("dataset", "client", "first visit", "last visit", "visits", "paper, near", "rounds")
    tables = [Table("", columns, rows)]
    return Outcome("Mean of the mix vector", tables, figure, claims)


# ------------------------------------------------------------------------------- ablations

Both = tuple[float, float]  # best mean of participants and all clients at the end, percent


def _bars(groups: Mapping[str, Mapping[str, Both]], names: Sequence[str], title: str) -> Figure:
    """For each dataset and name the best mean of participants (bars), all clients (dots)."""
    figure, [[axes]] = figures.panels(1, 1, 6.5, 3.8)
    shades = (figures.ORANGE, figures.GREEN, figures.BLUE)[-len(names) :]
    for place, (name, colour) in enumerate(zip(names, shades, strict=True)):
        middle = np.arange(len(groups)) + (place - (len(names) - 1) / 2) * 0.8 / len(names)
        pairs = [values.get(name, (np.nan, np.nan)) for values in groups.values()]
        best, everyone = zip(*pairs, strict=True)
        bars = axes.bar(middle, best, width=0.75 / len(names), color=colour, label=name)
        labels = [f"{value:.1f}" if np.isfinite(value) else "" for value in best]
        axes.bar_label(bars, labels, fontsize=8, padding=2)
        text = "" if place else "all clients at the end"
        axes.plot(middle, everyone, "o", color=PAPER, markersize=4, label=text)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    figures.legend_below(figure)
    return figure


def parts(study: Study, found: Found) -> Outcome:
    """The small model (shared extractor, header), the large one (local extractor), both mixed."""
    names = {"small": "/small", "large": "/large", "mixed": ""}
    groups: dict[str, dict[str, Both]] = {}
    rows, claims = [], []
    for dataset in study.datasets:
        label = study.label(dataset)
        groups[label] = {}
        for run in at(found, dataset):
            frame: Any = run.per_round()
            for name, suffix in names.items():
                means = frame[f"mean_accuracy{suffix}"].dropna()
                everyone = frame[f"all_clients_accuracy{suffix}"].iloc[-1]
                groups[label][name] = (100 * means.max(), 100 * everyone)
                shown = (means.max(), means.tail(10).mean(), everyone)
                rows.append([label, name, *map(percent, shown), str(len(frame))])
        small, large, mixed = (groups[label].get(name, (np.nan,))[0] for name in names)
        known = bool(np.isfinite(small + large + mixed))
        text = f"{label}: accuracy rises from the small to the large to the mixed model."
        claims.append(Claim(text, bool(small < large < mixed) if known else None))
    title = "Small, large and mixed model"
    tables = [Table("", ("dataset", "model", *SCORES[:4]), rows)]
    notes = [
        "All three are evaluated in one run, in which the mixed model is what is trained: header "
        "and local extractor have learned beside the shared features."
    ]
    return Outcome(title, tables, _bars(groups, list(names), title), claims, notes)


KINDS = {"end to end": "end_to_end", "iterative": "iterative"}


def training_tasks(study: Study) -> dict[tuple, Task]:
    return {
        (dataset, kind, seed): study.task(
            "pfedafm", dataset, seed, variation=training, pfedafm={"training": training}
        )
        for dataset in study.datasets
        for kind, training in KINDS.items()
        for seed in study.one_seed
    }


def training(study: Study, found: Found) -> Outcome:
    """Both extractors at once, or in turn."""
    groups: dict[str, dict[str, Both]] = {}
    rows, claims = [], []
    for dataset in study.datasets:
        label = study.label(dataset)
        runs = {kind: one for kind in KINDS if (one := at(found, dataset, kind))}
        groups[label] = {}
        for kind, one in runs.items():
            groups[label][kind] = outcome.mean(one), outcome.mean(one, EVERYONE)
            rows.append([label, kind, *outcome.scores(one)])
        better = None
        if len(runs) == len(KINDS):
            better = groups[label]["iterative"][0] > groups[label]["end to end"][0]
        text = f"{label}: iterative training is better than end to end."
        claims.append(Claim(text, better))
    title = "End-to-end and iterative training"
    tables = [Table("", ("dataset", "training", *SCORES), rows)]
    return Outcome(title, tables, _bars(groups, list(KINDS), title), claims)
