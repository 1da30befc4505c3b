"""The paper's case studies and ablations, heterogeneous setting: uneven data, the mix vector, its parts, its training."""

from collections.abc import Callable, Sequence

import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.methods import find_method
from pfedafm_jax.reproduce import paper
from pfedafm_jax.reproduce.comparisons import PAIR, colours
from pfedafm_jax.reproduce.outcome import PAPER, Claim, Outcome, Table, mean_and_deviation, panels, percent
from pfedafm_jax.reproduce.plan import Run, Study, Summary
from pfedafm_jax.reproduce.results import Results, dataset_label, rounds_of

BEST, LAST, EVERYONE = "best_mean_accuracy", "last_mean_accuracy", "final_all_clients_accuracy"
Spread = tuple[float | None, float | None]  # mean and deviation over seeds


def over_seeds(runs: Sequence[Summary], key: str) -> Spread:
    return mean_and_deviation([summary[key] for summary in runs])


def accuracies(runs: Sequence[Summary]) -> list[str]:
    """Cells: best, last, all clients, rounds, seeds."""
    diverged = [s["diverged_at_round"] for s in runs if s["diverged_at_round"] is not None]
    mark = f" (✗ diverged at round {min(diverged)})" if diverged else ""
    cells = [percent(*over_seeds(runs, key)) for key in (BEST, LAST, EVERYONE)]
    return [cells[0] + mark, *cells[1:], rounds_of(runs), str(len(runs))]


ACCURACY_COLUMNS = ("best, %", "last, %", "all clients, %", "rounds", "seeds")


# ---------------------------------------------------------------------------------------------- uneven data


def class_points(study: Study, dataset: str) -> Sequence[float]:
    return study.scale.seen_classes[dataset]


def class_run(study: Study, method: str, dataset: str, seed: int, classes: float) -> Run:
    usual = study.run(method, dataset, seed)
    if classes == usual.config.classes_per_client:
        return usual  # the one that Table 3 has
    return study.run(method, dataset, seed, variation=f"classes{classes:g}", classes_per_client=int(classes))


def gamma_points(study: Study, dataset: str) -> Sequence[float]:
    return study.scale.gammas


def gamma_run(study: Study, method: str, dataset: str, seed: int, gamma: float) -> Run:
    return study.run(method, dataset, seed, variation=f"gamma{gamma:g}", partition="dirichlet", gamma=gamma)


Points = Callable[[Study, str], Sequence[float]]
RunAt = Callable[[Study, str, str, int, float], Run]


def uneven_runs(study: Study, points: Points, run_at: RunAt) -> list[Run]:
    return [
        run_at(study, method, dataset, seed, point)
        for dataset in study.datasets
        for point in points(study, dataset)
        for method in study.chosen(PAIR)
        for seed in study.one_seed
    ]


def uneven(study: Study, results: Results, points: Points, run_at: RunAt, title: str, axis: str) -> Outcome:
    """Accuracy of methods over an axis of unevenness, a panel a dataset."""
    methods = study.chosen(PAIR)
    figure, [row_of_axes] = panels(1, len(study.datasets), 5.0, 3.6)
    colour, rows, numbers, higher, falls = colours(methods), [], {}, [], []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label, at = dataset_label(study, dataset), list(points(study, dataset))
        best: dict[str, list[float]] = {}
        for method in methods:
            found = [[f.summary for f in results.all(run_at(study, method, dataset, seed, point)
                                                     for seed in study.one_seed)] for point in at]  # fmt: skip
            rows += [
                [label, f"{p:g}", find_method(method).title, *accuracies(f)]
                for p, f in zip(at, found, strict=True)
                if f
            ]
            best[method] = [number(over_seeds(f, BEST)[0]) for f in found]
            everyone = [number(over_seeds(f, EVERYONE)[0]) for f in found]
            numbers[f"{dataset}-{method}"] = {"at": at, BEST: plain(best[method]), EVERYONE: plain(everyone)}
            title_of = find_method(method).title
            axes.plot(at, best[method], "o-", color=colour[method], label=f"{title_of}, best mean of participants")
            axes.plot(at, everyone, "o--", color=colour[method], markersize=3, linewidth=1, alpha=0.6,
                      label=f"{title_of}, all clients at the end")  # fmt: skip
            drop = np.diff([value for value in best[method] if np.isfinite(value)])
            falls += [bool(drop.sum() < 0)] if len(drop) else []
        stated = [(p, paper.accuracy("hetero", m, study.scale.columns[-1], dataset)) for m in methods for p in at[:1]]
        if points is class_points:  # the first point is a cell of Table 3
            known = [(p, value) for p, value in stated if value is not None]
            if known:
                axes.plot(*zip(*known, strict=True), "D", color=PAPER, markersize=4, label="paper, Table 3")
        if {"pfedafm", "fedproto"} <= set(best):
            pairs = zip(best["pfedafm"], best["fedproto"], strict=True)
            higher += [own > other for own, other in pairs if np.isfinite(own) and np.isfinite(other)]
        axes.set(title=label, xlabel=axis, ylabel="test accuracy, %")
        axes.set_xticks(at)
        axes.legend(frameon=False, fontsize=7)
    claims = [
        Claim("pFedAFM is above FedProto at every point.", all(higher) if higher else None,
              f"at {sum(higher)} of {len(higher)} points" if higher else ""),
        Claim("Accuracy falls as data become more even.", all(falls) if falls else None),
    ]  # fmt: skip
    notes = ["The paper shows its values in a picture only."]
    return Outcome(title, [Table("", ("dataset", axis, "method", *ACCURACY_COLUMNS), rows)], figure, claims, notes,
                   numbers)  # fmt: skip


def number(share: float | None) -> float:
    return np.nan if share is None else 100 * share


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]


# ---------------------------------------------------------------------------------------------- the mix vector


def mix_rate_run(study: Study, dataset: str, seed: int, rate: float) -> Run:
    usual = study.run("pfedafm", dataset, seed)
    if rate == usual.config.pfedafm.mix_learning_rate:
        return usual
    return study.run("pfedafm", dataset, seed, variation=f"mixlr{rate:g}", pfedafm={"mix_learning_rate": rate})


def mix_rate_runs(study: Study) -> list[Run]:
    runs = [
        mix_rate_run(study, dataset, seed, rate)
        for dataset in study.datasets
        for rate in study.scale.mix_learning_rates
        for seed in study.seeds or study.scale.mix_seeds
    ]
    return runs + [
        study.run("fedproto", dataset, (study.seeds or study.scale.mix_seeds)[0]) for dataset in study.datasets
    ]


def mix_rate(study: Study, results: Results) -> Outcome:
    """pFedAFM over the learning rate of the mix vector: mean and deviation over seeds, FedProto beside it."""
    seeds, rates = study.seeds or study.scale.mix_seeds, study.scale.mix_learning_rates
    figure, [row_of_axes] = panels(1, len(study.datasets), 5.0, 3.6)
    rows, numbers, claims = [], {}, []
    for dataset, axes in zip(study.datasets, row_of_axes, strict=True):
        label = dataset_label(study, dataset)
        found = [[f.summary for f in results.all(mix_rate_run(study, dataset, seed, rate) for seed in seeds)]
                 for rate in rates]  # fmt: skip
        rows += [[label, f"{rate:g}", *accuracies(runs)] for rate, runs in zip(rates, found, strict=True) if runs]
        for key, shade, text in (
            (BEST, plots.BLUE, "best mean of participants"),
            (EVERYONE, plots.GREY, "all clients"),
        ):
            spreads = [over_seeds(runs, key) for runs in found]
            middle = np.array([number(mean) for mean, _ in spreads])
            width = np.array([100 * (deviation or 0.0) for _, deviation in spreads])
            axes.plot(rates, middle, "o-", color=shade, label=f"pFedAFM, {text}")
            axes.fill_between(rates, middle - width, middle + width, color=shade, alpha=0.2, linewidth=0)
            numbers[f"{dataset}-{key}"] = {"rates": list(rates), "mean": plain(middle), "deviation": plain(width)}
        other = results.get(study.run("fedproto", dataset, seeds[0]))
        fedproto = None if other is None else other.summary[BEST]
        if fedproto is not None:
            axes.axhline(100 * fedproto, color=plots.ORANGE, linewidth=1.2, label="FedProto here")
        stated = paper.accuracy("hetero", "fedproto", 100, dataset)
        if stated is not None and study.scale.name != "smoke":
            axes.axhline(stated, color=PAPER, linewidth=0.9, linestyle=":", label=f"FedProto in the paper, {stated}")
        axes.set_xscale("log")
        axes.set(title=label, xlabel="learning rate of the mix vector", ylabel="test accuracy, %")
        axes.legend(frameon=False, fontsize=7)
        means = [mean for runs in found if (mean := over_seeds(runs, BEST)[0]) is not None]
        if dataset == "cifar10":
            claims.append(
                Claim(f"{label}: accuracy rises with the rate.", means[-1] > means[0] if len(means) > 1 else None)
            )
        above = [mean > fedproto for mean in means] if fedproto is not None else []
        claims.append(Claim(f"{label}: almost all rates are above FedProto ({stated} there).",
                            sum(above) >= len(above) - 1 if above else None, f"{sum(above)} of {len(above)}" if above else ""))  # fmt: skip
    columns = ("dataset", "rate", *ACCURACY_COLUMNS)
    return Outcome("Learning rate of the mix vector", [Table("", columns, rows)], figure, claims, numbers=numbers)


def mix_mean_runs(study: Study) -> list[Run]:
    return [study.run("pfedafm", dataset, study.one_seed[0]) for dataset in study.datasets]


def mix_mean(study: Study, results: Results) -> Outcome:
    """Mean of the mix vector by round: two clients as in the paper (those drawn most often), and all participants."""
    figure, [row_of_axes] = panels(1, len(study.datasets), 5.0, 3.6, sharey=True)
    rows, numbers, claims = [], {}, []
    for dataset, run, axes in zip(study.datasets, mix_mean_runs(study), row_of_axes, strict=True):
        label, finished, stated = dataset_label(study, dataset), results.get(run), paper.MIX_MEAN[dataset]
        near = None
        if finished is not None:
            mix = finished.clients["visits/mix_mean"]
            visited, rounds = np.isfinite(mix), np.arange(1, len(mix) + 1)
            seen = visited.any(axis=1)
            axes.plot(rounds[seen], np.nanmedian(mix[seen], axis=1), color=plots.BLUE, linewidth=1.4,
                      label="median of the participants")  # fmt: skip
            busiest = np.argsort(-visited.sum(axis=0), kind="stable")[:2]
            for client, shade in zip(busiest, (plots.ORANGE, plots.GREEN), strict=False):
                values = mix[visited[:, client], client]
                axes.plot(rounds[visited[:, client]], values, "o-", color=shade, markersize=3, linewidth=0.9,
                          label=f"client {client}")  # fmt: skip
                rows.append([label, f"client {client}", f"{values[0]:.3f}", f"{values[-1]:.3f}", str(len(values)),
                             f"{stated:g}", str(len(mix))])  # fmt: skip
                numbers[f"{dataset}-client{client}"] = {"rounds": rounds[visited[:, client]].tolist(),
                                                        "mean": values.astype(float).round(5).tolist()}  # fmt: skip
            first, last = _ends(mix)
            near = abs(float(np.median(last)) - stated) < 0.25 if len(last) else None
            rows.append([label, "median client", f"{np.median(first):.3f}", f"{np.median(last):.3f}", f"{visited.sum(axis=0).mean():.1f}",
                         f"{stated:g}", str(len(mix))])  # fmt: skip
        axes.axhline(
            stated, color=PAPER, linestyle=":", linewidth=0.9, label=f"the paper's two clients: near {stated:g}"
        )
        axes.set(title=label, xlabel="communication round", ylim=(-0.02, 1.02))
        axes.locator_params(axis="x", integer=True)
        axes.legend(frameon=False, fontsize=7)
        claims.append(Claim(f"{label}: the mean of the mix vector comes close to {stated:g}.", near,
                            "the median client ends within 0.25 of it" if near else ""))  # fmt: skip
    row_of_axes[0].set_ylabel("mean of the mix vector (1: local, 0: shared)")
    columns = ("dataset", "client", "first visit", "last visit", "visits", "paper, near", "rounds")
    return Outcome("Mean of the mix vector", [Table("", columns, rows)], figure, claims, numbers=numbers)


def _ends(mix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every client's value after its first and after its last visit, of those that had one."""
    columns = [column[np.isfinite(column)] for column in mix.T]
    seen = [column for column in columns if len(column)]
    return np.array([column[0] for column in seen]), np.array([column[-1] for column in seen])
