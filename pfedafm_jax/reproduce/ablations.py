"""The paper's ablations: parts of the mixed model, and how it is trained; and a look at its theory."""

import dataclasses
import json
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from pfedafm_jax import plots
from pfedafm_jax.reproduce.case_studies import (
    ACCURACY_COLUMNS,
    BEST,
    EVERYONE,
    accuracies,
    mix_mean_runs,
    number,
    over_seeds,
)
from pfedafm_jax.reproduce.outcome import PAPER, Claim, Outcome, Table, panels, percent
from pfedafm_jax.reproduce.plan import Run, Standing, Study
from pfedafm_jax.reproduce.results import Results, dataset_label

Both = tuple[float | None, float | None]  # best mean of participants, all clients at the end


def _bars(groups: Mapping[str, Mapping[str, Both]], names: Sequence[str], title: str) -> Figure:
    """For each dataset and name the best mean of participants (bars) and all clients at the end (dots)."""
    figure, [[axes]] = panels(1, 1, 6.5, 3.8)
    shades = dict(zip(names, (plots.ORANGE, plots.GREEN, plots.BLUE) if len(names) > 2 else (plots.GREY, plots.BLUE),
                      strict=True))  # fmt: skip
    for place, name in enumerate(names):
        at = np.arange(len(groups)) + (place - (len(names) - 1) / 2) * 0.8 / len(names)
        best = [number(values.get(name, (None, None))[0]) for values in groups.values()]
        everyone = [number(values.get(name, (None, None))[1]) for values in groups.values()]
        bars = axes.bar(at, best, width=0.75 / len(names), color=shades[name], label=name)
        axes.bar_label(bars, [f"{v:.1f}" if np.isfinite(v) else "" for v in best], fontsize=8, padding=2)
        axes.plot(at, everyone, "o", color=PAPER, markersize=4, label="all clients at the end" if place == 0 else None)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.set(ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    figure.legend(frameon=False, fontsize=8, ncols=4, loc="outside lower center")
    return figure


def parts(study: Study, results: Results) -> Outcome:
    """The small model (shared extractor and header), the large one (local extractor and header), and both mixed."""
    names, rows, numbers, claims = ("small", "large", "mixed"), [], {}, []
    groups: dict[str, dict[str, Both]] = {}
    for dataset, run in zip(study.datasets, mix_mean_runs(study), strict=True):
        label, finished = dataset_label(study, dataset), results.get(run)
        groups[label] = {}
        if finished is None:
            continue
        for name in names:
            means = [r["accuracy"][name] for r in finished.rounds if r["accuracy"].get(name) is not None]
            everyone = (finished.rounds[-1]["all_clients"] or {}).get(name)
            best = max(means, default=None)
            groups[label][name] = (best, everyone)
            rows.append([label, name, percent(best), percent(means[-1] if means else None), percent(everyone),
                         str(finished.summary["rounds"])])  # fmt: skip
        numbers[dataset] = {
            name: {"best": best, "all_clients": everyone} for name, (best, everyone) in groups[label].items()
        }
        small, large, mixed = (groups[label][name][0] for name in names)
        ordered = None if small is None or large is None or mixed is None else small < large < mixed
        claims.append(Claim(f"{label}: accuracy rises from the small to the large to the mixed model.", ordered))
    title = "Small, large and mixed model"
    columns = ("dataset", "model", *ACCURACY_COLUMNS[:-1])
    notes = ["All three are judged in one run, in which the mixed model is what is trained: header and local extractor have "
             "learned beside the shared features."]  # fmt: skip
    return Outcome(title, [Table("", columns, rows)], _bars(groups, names, title), claims, notes, numbers)


def training_run(study: Study, dataset: str, seed: int, kind: str) -> Run:
    if kind == "iterative":
        return study.run("pfedafm", dataset, seed)
    return study.run("pfedafm", dataset, seed, variation="end_to_end", pfedafm={"training": "end_to_end"})


KINDS = {"end_to_end": "end to end", "iterative": "iterative"}


def training_runs(study: Study) -> list[Run]:
    return [training_run(study, d, seed, kind) for d in study.datasets for kind in KINDS for seed in study.one_seed]


def training(study: Study, results: Results) -> Outcome:
    """Both extractors at once, or in turn."""
    rows, numbers, claims = [], {}, []
    groups: dict[str, dict[str, Both]] = {}
    for dataset in study.datasets:
        label = dataset_label(study, dataset)
        groups[label] = {}
        for kind, text in KINDS.items():
            found = [f.summary for f in results.all(training_run(study, dataset, s, kind) for s in study.one_seed)]
            if found:
                groups[label][text] = (over_seeds(found, BEST)[0], over_seeds(found, EVERYONE)[0])
                rows.append([label, text, *accuracies(found)])
        numbers[dataset] = {name: {"best": best, "all_clients": every} for name, (best, every) in groups[label].items()}
        end, iterative = (groups[label].get(text, (None, None))[0] for text in KINDS.values())
        better = None if end is None or iterative is None else iterative > end
        claims.append(Claim(f"{label}: iterative training is better than end to end.", better))
    title = "End-to-end and iterative training"
    figure = _bars(groups, list(KINDS.values()), title)
    columns = ("dataset", "training", *ACCURACY_COLUMNS)
    return Outcome(title, [Table("", columns, rows)], figure, claims, numbers=numbers)


# ---------------------------------------------------------------------------------------------- theory


def theory_standing(study: Study) -> Standing:
    """Its own training, measured on the way and kept in `theory.json`, where one with more rounds is used as it is."""
    run = study.run("pfedafm", study.datasets[0], study.one_seed[0], variation="theory")
    try:
        done = len(json.loads((run.folder / "theory.json").read_text())["rounds"])
    except (OSError, ValueError, KeyError, TypeError):
        return Standing(run, "new")
    if done < run.config.rounds and not study.only_finished:
        return Standing(run, "again")
    return Standing(Run(run.folder, dataclasses.replace(run.config, rounds=done)), "done", done)


def theory_outcome(study: Study, results: Results) -> Outcome | None:
    """What the paper's assumptions and bound look like in a run; None: it is not there and nothing may be run."""
    standing = theory_standing(study)
    run = standing.run
    if study.only_finished and standing.state != "done":
        return None
    if standing.state == "again":
        (run.folder / "theory.json").unlink()  # a shorter one, which cannot be gone on with
    import theory  # of experiments/, where this will be too
    from paper import fig_theory

    result = theory.study(run.config, run.folder, study.data_dir, study.log)
    table = Table("", ("", "measured"), [list(row) for row in fig_theory.rows(result)])
    return Outcome("The theory in a run", [table], fig_theory.figure(result), numbers=result)
