"""Runs as one page to open, print or send: `write_report(["runs/a", "runs/b"], "report.html")`.

`report.html` beside this file is the page, words and all, as a jinja2 template, which escapes
whatever is put into it. This file works out the numbers and draws the pictures that stand there.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from pfedafm_jax import plots
from pfedafm_jax.config import Config, bad
from pfedafm_jax.errors import storage_error
from pfedafm_jax.figures import legend_below, rendered
from pfedafm_jax.files import read_bytes, write_atomically
from pfedafm_jax.results import NOT_IN_RESULTS, Run, flat, read_runs
from pfedafm_jax.tables import COLUMNS, cells, human, over_seeds, percent

Published = Callable[[dict[str, Any]], tuple[str, float | None] | None]
"""From a run's settings to a number to compare with: where it stands, and its best mean accuracy
(None: no convergence); None where there is none."""
HIGHER_IS_BETTER = ("best_mean_accuracy", "last_ten_mean_accuracy", "final_all_clients_accuracy")
WINDOW = 5  # rounds that a point of a long curve is the mean of


def write_report(
    folders: Sequence[str | Path],
    out: str | Path = "report.html",
    published: Published | None = None,
) -> list[Run]:
    """Writes the report of these run folders to one HTML file; returns the runs that it shows.

    Args:
        folders: of runs, or with runs in them.
        out: the file, its name ending in .html.
        published: numbers to compare with.
    """
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir():
        raise bad("out", str(out), "the name of a file that ends in .html")
    runs = read_runs(folders)
    text = page(runs, published)
    try:
        write_atomically(target, text.encode("utf-8", "replace"))
    except OSError as error:
        raise storage_error(f"the report {target}", target.parent, error) from error
    return runs


def page(runs: Sequence[Run], published: Published | None = None) -> str:
    """The whole page."""
    shown = [_one(number, run, published) for number, run in enumerate(runs, 1)]
    title = f"{len(runs)} runs: {', '.join(dict.fromkeys(run.title for run in runs))}"
    if len(runs) == 1:
        title = f"{runs[0].title} on {runs[0].config['dataset']}"
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters |= {"percent": _percent, "human": human}
    source = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        title=title, runs=shown, columns=list(COLUMNS.values()), **_side_by_side(runs, shown)
    )


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{percent(value)} %"


def _said(value: Any) -> str:
    """A setting for people."""
    if isinstance(value, bool | None):
        return "none" if value is None else "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _own_settings(run: Run) -> dict[str, Any]:
    """Settings on one level, without those of other methods; one learning rate, the one used."""
    method = f"{run.config['method']}."
    own = {n: v for n, v in run.settings.items() if "." not in n or n.startswith(method)}
    return own | {"learning_rate": own.pop(f"{method}learning_rate", None) or own["learning_rate"]}


def _side_by_side(runs: Sequence[Run], shown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of all runs, their curves, where their settings differ, and means over seeds."""
    settings = [_own_settings(run) for run in runs]
    differing = []
    for name in dict.fromkeys(name for own in settings for name in own):
        values = [_said(own[name]) if name in own else "–" for own in settings]
        differing += [(name, *values)] if len({*values} - {"–"}) > 1 else []
    window = WINDOW if max(len(run.records) for run in runs) >= 5 * WINDOW else 1
    drawn = {f"{number} {run.title}": [run] for number, run in enumerate(runs, 1) if run.records}
    figures: dict[str, Callable[[], Figure]] = {}
    if len(runs) > 1 and drawn:
        figures["participants"] = lambda: plots.curves(drawn, window=window)
        figures["all_clients"] = lambda: plots.curves(drawn, y="all_clients")
    pictures, failed = _drawn(figures, 6.2, 4.2)
    return {
        "results": [_result(one, runs) for one in shown],
        "curves": pictures,
        "failed": failed,
        "window": window,
        "labels": [one["label"] for one in shown],
        "differing": differing,
        "seeds": _over_seeds(runs, settings),
    }


def _result(shown: dict[str, Any], runs: Sequence[Run]) -> list[Any]:
    """A row of the table of all runs; the best of finished runs are marked."""
    run, score = shown["run"], shown["published"]
    rounds = str(len(run.records)) + ("" if run.finished else f" of {run.config['rounds']}")
    row: list[Any] = [shown["label"], run.title, rounds]
    for name, text in zip(COLUMNS, cells(over_seeds([run]))[0][1:], strict=True):
        others = [getattr(other.summary, name) for other in runs if other.finished]
        best = max((value for value in others if value is not None), default=None)
        mark = name in HIGHER_IS_BETTER and run.finished and getattr(run.summary, name) == best
        row.append({"best": text} if mark else text)
    stated = "–" if score is None else "no convergence" if score[1] is None else percent(score[1])
    return [*row, stated]


def _over_seeds(runs: Sequence[Run], settings: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of finished runs that differ in nothing but their seed."""
    groups: dict[str, list[Run]] = {}
    free = {"seed", *NOT_IN_RESULTS} - {"rounds"}
    for run, own in zip(runs, settings, strict=True):
        key = str([pair for pair in own.items() if pair[0] not in free])
        groups.setdefault(key, []).append(run)
    rows = []
    for found in groups.values():
        seeds = [str(run.config["seed"]) for run in found]
        if len({*seeds}) > 1 and all(run.finished for run in found):
            rows.append([found[0].title, ", ".join(seeds), *cells(over_seeds(found))[0][1:]])
    return rows


def _one(number: int, run: Run, published: Published | None) -> dict[str, Any]:
    config, own = run.config, _own_settings(run)
    defaults = flat(Config(method=config["method"]).as_dict())
    changed = [name for name, value in own.items() if value != defaults.get(name, value)]
    pictures, failed = _drawn(plots.of_run(run, titled=False))
    split = run.folder / "split.png" if run.folder else None
    if split is not None and split.is_file():
        pictures["split"] = _source(read_bytes(split))  # the run had its data, a report has not
    return {
        "run": run,
        "label": f"{number} · {run.folder.resolve().name if run.folder else run.name}",
        "rate": own["learning_rate"],
        "participants": max(1, round(config["participation"] * config["num_clients"])),
        "published": published(config) if published else None,
        "models": [f"{name} model" for name in run.predictions],
        "conventions": _conventions(run),
        "costs": _costs(run),
        "pictures": pictures,
        "failed": failed,
        "changed": [(name, _said(own[name]), _said(defaults[name])) for name in changed],
        "same": [(name, _said(value)) for name, value in own.items() if name not in changed],
        "versions": ", ".join(f"{name} {value}" for name, value in run.about["versions"].items()),
    }


def _conventions(run: Run) -> list[list[str]]:
    """Rows are conventions, columns what was evaluated."""
    if not run.records:
        return []
    names = ["", *(f"/{name}" for name in run.predictions[1:])]  # the method's own has no suffix
    frame: Any = run.per_round()
    frame = frame.reindex(
        columns=[f"{k}_accuracy{n}" for k in ("mean", "all_clients") for n in names]
    )
    evaluated = frame.index[frame["all_clients_accuracy"].notna()] + 1
    picks = {
        "participants, best round (the paper's)": ("mean", lambda v: v.max()),
        "participants, mean of the last ten rounds": ("mean", lambda v: v.tail(10).mean()),
        "participants, last round": ("mean", lambda v: v.iloc[-1]),
    }
    if len(evaluated):
        title = f"all clients, round {evaluated[-1]} (unbiased)"
        picks[title] = ("all_clients", lambda v: v.iloc[-1])
    if len(evaluated) > 1:
        title = f"all clients, best of {len(evaluated)} evaluations"
        picks[title] = ("all_clients", lambda v: v.max())
    rows = []
    for title, (kind, pick) in picks.items():
        known = [frame[f"{kind}_accuracy{name}"].dropna() for name in names]
        rows.append([title, *(_percent(float(pick(v))) if len(v) else "–" for v in known)])
    clients = run.clients
    if len(clients.get("evaluation_rounds", ())):
        last = [clients[f"all_clients/accuracy{name}"][-1] for name in names]
        tested = clients["num_test"] > 0
        last = [scores[tested] for scores in last]
        weighted = (np.average(one, weights=clients["num_test"][tested]) for one in last)
        title = "all clients, last, weighted by test images"
        rows.append([title, *(_percent(float(value)) for value in weighted)])
        title = "spread over clients, last (standard deviation)"
        rows.append([title, *(_percent(float(np.std(scores))) for scores in last)])
    return rows


def _costs(run: Run) -> list[list[str]]:
    """What a participant, a round and the whole run took."""
    if not run.records:
        return []
    frame: Any = run.per_round()
    visits, rows = max(1, sum(len(record.participants) for record in run.records)), []
    for title in ("floats up", "floats down", "FLOPs"):
        total = float(frame[title.lower().replace(" ", "_")].sum())
        rows.append([title, human(total / visits), human(total / len(frame)), human(total)])
    seconds, summary = frame["seconds"], run.summary
    each = f"{seconds.median():.1f} (median)"
    rows.append(["seconds of training", "–", each, f"{seconds.sum():.0f}"])
    if run.finished:
        rows.append(["seconds of compilation", "–", "–", f"{summary.compile_seconds:.0f}"])
        rows.append(["seconds waiting for saves", "–", "–", f"{summary.checkpoint_seconds:.0f}"])
    return rows


def _drawn(
    figures: Mapping[str, Callable[[], Figure]], width: float = 5.6, height: float = 4.0
) -> tuple[dict[str, str], list[str]]:
    """Figures as sources of images by name, small enough that a phone shows their letters; and a
    line for each that could not be drawn."""
    found, failed = {}, []
    for name, draw in figures.items():
        try:
            figure = draw()
            figure.set_size_inches(width, height)
            if figure.legends:
                legend_below(figure)
            found[name] = _source(rendered(figure, "png", dpi=200, transparent=True))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            failed.append(f"The picture {name} could not be drawn ({reason}).")
    return found, failed


def _source(content: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"
