"""The sections of a report: runs side by side, then each run by itself."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from pfedafm_jax.compare import COLUMNS, cell, collect, human
from pfedafm_jax.config import Config
from pfedafm_jax.records import NOT_IN_RESULTS
from pfedafm_jax.report import pictures
from pfedafm_jax.report.html import Html, element, page, table, together
from pfedafm_jax.report.paper import paper_score
from pfedafm_jax.report.read import Run

Labelled = tuple[str, Run]
HIGHER_IS_BETTER = ("best", "last", "all clients")


def report(runs: Sequence[Run], data_dir: str | None = None) -> str:
    """The whole page."""
    labelled = [(f"{number} · {run.folder.resolve().name}", run) for number, run in enumerate(runs, 1)]
    if len(runs) == 1:
        title = f"{runs[0].method} on {runs[0].config.dataset}"
        return page(title, [element("h1", title), *_one(runs[0], data_dir)])
    title = f"{len(runs)} runs: {', '.join(dict.fromkeys(run.method for run in runs))}"
    parts: list[object] = [element("h1", title), *_side_by_side(labelled)]
    for number, (label, run) in enumerate(labelled, 1):
        title_of_run = element("h2", f"{label}: {run.method} on {run.config.dataset}", id=f"run-{number}")
        parts += [title_of_run, *_one(run, data_dir)]
    return page(title, parts)


def percent(value: float | None) -> str:
    """0.9212 → `92.12 %`."""
    return "–" if value is None else f"{100 * value:.2f} %"


def settings_of(config: Config) -> dict[str, Any]:
    """All settings as one level: `pfedafm.mix_fixed`."""
    found: dict[str, Any] = {}
    for name, value in config.as_dict().items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _said(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return "none" if value is None else "yes" if value is True else "no" if value is False else str(value)


# ---------------------------------------------------------------------------------------------- several runs


def _side_by_side(runs: Sequence[Labelled]) -> list[object]:
    """Results of all runs as a table and as curves, where their settings differ, and means over seeds."""
    parts: list[object] = [_results(runs)]
    if any(run.records for _, run in runs):
        parts.append(pictures.curves([(f"{number} {run.method}", run) for number, (_, run) in enumerate(runs, 1)]))
    flat = [settings_of(run.config) for _, run in runs]
    names = [name for name in flat[0] if any(other.get(name) != flat[0][name] for other in flat)]
    parts.append(element("h3", "Where their settings differ"))
    if names:
        rows = [(element("code", name), *(_said(settings.get(name)) for settings in flat)) for name in names]
        parts.append(table(["setting", *(label for label, _ in runs)], rows, words=True))
    else:
        parts.append(element("p", "Nowhere: all settings are the same."))
    return parts + _over_seeds(runs)


def _results(runs: Sequence[Labelled]) -> Html:
    values = [{c: run.summary[key] for c, key in COLUMNS.items()} for _, run in runs]
    rows = []
    finished = [own for (_, run), own in zip(runs, values, strict=True) if run.finished]
    for number, ((label, run), own) in enumerate(zip(runs, values, strict=True), 1):
        cells: list[object] = []
        for column in COLUMNS:
            text = cell(column, None if own[column] is None else {"mean": own[column], "deviation": None})  # pyright: ignore[reportArgumentType]
            others = [other[column] for other in finished if other[column] is not None]
            best = column in HIGHER_IS_BETTER and run.finished and own[column] == max(others, default=None)
            cells.append(element("span", text, class_="best") if best else text)
        score = paper_score(run.config)
        done = f"{len(run.records)}" + ("" if run.finished else f" of {run.config.rounds}")
        cells.append("–" if score is None else "no convergence" if score[1] is None else f"{100 * score[1]:.2f}")
        rows.append((element("a", label, href=f"#run-{number}"), run.method, done, *cells))
    caption = (
        "Accuracies in percent. Best and last: mean over a round's participants, each right after its training; best is "
        "the maximum over rounds, the paper's convention. All clients: every client after the last evaluation; spread: its "
        "standard deviation over clients. Floats and FLOPs: per participant and round. Paper: its best, where it has these "
        "clients, classes and networks."
    )
    return table(["run", "method", "rounds", *COLUMNS, "paper"], rows, caption)


def _over_seeds(runs: Sequence[Labelled]) -> list[object]:
    """Mean and deviation of runs that differ in nothing but their seed."""
    groups: dict[str, list[Run]] = {}
    for _, run in runs:
        settings = settings_of(run.config)
        key = str([value for name, value in settings.items() if name not in ("seed", *NOT_IN_RESULTS[1:])])
        groups.setdefault(key, []).append(run)
    rows = []
    for group in groups.values():
        if len({run.config.seed for run in group}) > 1 and all(run.finished for run in group):
            row = collect([("pfedafm", run.summary) for run in group])[0]  # the name is not used
            seeds = ", ".join(str(run.config.seed) for run in group)
            rows.append((group[0].method, seeds, *(cell(column, row[column]) for column in COLUMNS)))
    if not rows:
        return []
    caption = "Mean ± standard deviation over seeds of finished runs with otherwise equal settings."
    return [element("h3", "Over seeds"), table(["method", "seeds", *COLUMNS], rows, caption)]


# ---------------------------------------------------------------------------------------------- one run


def _one(run: Run, data_dir: str | None) -> list[object]:
    config, summary = run.config, run.summary
    about = (
        f"{config.num_clients} clients, {config.num_participants} a round; "
        f"{len(run.records)} of {config.rounds} rounds, E = {config.local_epochs}, batch {config.batch_size}, "
        f"learning rate {config.rate:g}, seed {config.seed}"
    )
    parts: list[object] = [element("p", about, class_="soft"), *_warnings(run)]
    if run.records:
        parts += [_tiles(run), element("h3", "Accuracy, by every convention"), _conventions(run)]
    drawn = pictures.of_run(run, data_dir)
    if drawn:
        parts += [element("h3", "Pictures"), element("div", together(drawn), class_="figures")]
    if run.records:
        parts += [element("h3", "Costs"), _costs(run, summary)]
    return [*parts, element("h3", "Settings"), *_settings(run)]


def _warnings(run: Run) -> list[Html]:
    found = []
    if not run.finished:
        found.append(
            f"This run is unfinished: {len(run.records)} of {run.config.rounds} rounds are there. What a run writes at its "
            "end (each client's numbers, mix vectors) is missing here."
        )
    if run.summary["diverged_at_round"] is not None:
        found.append(
            f"Updates that were not finite were kept out: {run.summary['clients_not_finite']}, the first in round "
            f"{run.summary['diverged_at_round']}."
        )
    return [element("p", text, class_="note") for text in found]


def _tiles(run: Run) -> Html:
    summary, score = run.summary, paper_score(run.config)
    tiles = [
        (percent(summary["best_mean_accuracy"]), f"participants, best round ({summary['best_round']})"),
        (percent(summary["last_mean_accuracy"]), "participants, last round"),
        (percent(summary["final_all_clients_accuracy"]), "all clients, last evaluation (unbiased)"),
    ]
    if score is not None:
        number = "no convergence" if score[1] is None else percent(score[1])
        tiles.append(
            (number, f"the paper's {score[0]}: participants, best of up to 500 rounds and its grid of settings")
        )
    return element(
        "div", *(element("div", element("b", a), element("span", b), class_="tile") for a, b in tiles), class_="tiles"
    )


def _conventions(run: Run) -> Html:
    """Rows are conventions, columns what was judged."""
    names, records = run.predictions, run.records
    judged = [record for record in records if record["all_clients"] is not None]
    rows: list[list[str]] = []

    def add(title: str, values: list[float | None]) -> None:
        rows.append([title, *(percent(value) for value in values)])

    def best(rounds: Sequence[dict[str, Any]], part: str, name: str) -> float | None:
        return max((r[part][name] for r in rounds if r[part][name] is not None), default=None)

    add("participants, best round (the paper's)", [best(records, "accuracy", name) for name in names])
    add("participants, last round", [records[-1]["accuracy"][name] for name in names])
    if judged:
        last, count = judged[-1], len(judged)
        add(f"all clients, round {last['round']} (unbiased)", [last["all_clients"][name] for name in names])
        if count > 1:
            add(f"all clients, best of {count} evaluations", [best(judged, "all_clients", name) for name in names])
    tables = [run.evaluations(name) for name in names]
    if tables and len(tables[0]):
        weights = run.clients["num_test"]
        add("all clients, last, weighted by test images", [float(np.average(t[-1], weights=weights)) for t in tables])
        add("spread over clients, last (standard deviation)", [float(np.std(t[-1])) for t in tables])
    caption = (
        "Participants: each right after its own training, mean over the clients of a round. The best of many rounds, taken on "
        "test data, is optimistic. The first column is what the method is judged by."
    )
    return table(["convention", *(f"{name} model" for name in names)], rows, caption)


def _costs(run: Run, summary: dict[str, Any]) -> Html:
    records, written = run.records, run.written or {}

    def row(title: str, key: str, unit: str = "") -> list[str]:
        total = sum(record[key] for record in records)
        visits = max(1, sum(len(record["participants"]) for record in records))
        return [title, *(human(v) + unit for v in (total / visits, total / len(records), total))]

    seconds = [record["seconds"] for record in records]
    rows = [
        row("floats up", "floats_up"),
        row("floats down", "floats_down"),
        row("FLOPs", "flops"),
        ["seconds of training", "–", f"{np.median(seconds):.1f} (median)", f"{sum(seconds):.0f}"],
    ]
    for title, key in (
        ("seconds of compilation", "compile_seconds"),
        ("seconds waiting for saves", "checkpoint_seconds"),
    ):
        if isinstance(written.get(key), int | float):
            rows.append([title, "–", "–", f"{written[key]:.0f}"])
    caption = "FLOPs are those of the algorithm, counted by its layers."
    if summary["rounds_to_target"]:
        caption += (
            f" To the paper's target of {100 * summary['target_accuracy']:.0f} %: {summary['rounds_to_target']} rounds, "
            f"{human(summary['floats_to_target'])} floats both ways, {human(summary['flops_to_target'])} FLOPs."
        )
    elif summary["target_accuracy"] is not None:
        caption += f" The paper's target of {100 * summary['target_accuracy']:.0f} % was not reached."
    return table(["", "per participant and round", "per round", "whole run"], rows, caption)


def _settings(run: Run) -> list[object]:
    """What differs from the defaults, and the rest folded away; then what the run was made with."""
    defaults, own = settings_of(Config()), settings_of(run.config)
    methods = [
        field.name for field in dataclasses.fields(Config) if dataclasses.is_dataclass(getattr(Config(), field.name))
    ]
    others = tuple(f"{name}." for name in methods if name != run.config.method)
    own = {name: value for name, value in own.items() if not name.startswith(others)}  # settings of other methods
    changed = [name for name, value in own.items() if value != defaults[name]]
    parts: list[object] = []
    if changed:
        rows = [(element("code", name), _said(own[name]), _said(defaults[name])) for name in changed]
        parts.append(table(["differs from the defaults", "here", "default"], rows, words=True))
    else:
        parts.append(element("p", "All settings are the defaults."))
    rest = [(element("code", name), _said(value)) for name, value in own.items() if name not in changed]
    same = element("summary", f"{len(rest)} settings as by default")
    parts.append(element("details", same, table(["setting", "value"], rest, words=True)))
    about = run.about
    data, versions = about.get("data"), about.get("versions")
    made = [("folder", str(run.folder)), ("device", about.get("devices", "–"))]
    if isinstance(data, dict):
        made += [("data", data.get("source", "–")), ("sha256 of the data", data.get("digest", "–"))]
    if isinstance(versions, dict):
        made.append(("versions", ", ".join(f"{name} {number}" for name, number in versions.items())))
    if about.get("command"):
        parts.append(element("pre", about["command"]))
    return [*parts, table(["made with", ""], made, words=True)]
