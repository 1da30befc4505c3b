"""Runs as one page to open, print or send: `write_report(["runs/a", "runs/b"], "report.html")`.

`report.html` next to this file is the page as a jinja2 template, which escapes what is inserted.
This file computes its numbers and draws its plots.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from pfedafm_jax.base.errors import bad, storage_error
from pfedafm_jax.base.files import check_writable, read_bytes, write_atomically
from pfedafm_jax.config.config import Config
from pfedafm_jax.results import plots
from pfedafm_jax.results.run import Run, differing, flat, matters, read_runs
from pfedafm_jax.results.style import legend_below, rendered
from pfedafm_jax.results.tables import COLUMNS, cells, human, means, over_seeds, percent

Published = Callable[[dict[str, Any]], tuple[str, float | None] | None]
"""From a run's settings to a published result: its source and best mean accuracy (None: no
convergence); None if there is no such result."""
WINDOW = 5  # rounds averaged into one point of a long curve


def write_report(
    folders: Sequence[str | Path],
    out: str | Path = "report.html",
    published: Published | None = None,
) -> list[Run]:
    """Writes the report of these run folders to one HTML file; returns the runs that it shows.

    Args:
        folders: of runs, or folders that contain runs.
        out: the file, its name ending in .html.
        published: numbers to compare with.
    """
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir():
        raise bad("out", str(out), "the name of a file that ends in .html")
    check_writable(target.parent, "out")
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
    return "–" if value is None or np.isnan(value) else f"{percent(value)} %"


def _said(value: Any) -> str:
    """A setting, formatted."""
    if isinstance(value, bool | None):
        return "none" if value is None else "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _side_by_side(runs: Sequence[Run], shown: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results of all runs, their curves, where their settings differ, and means over seeds."""
    names, finished = differing(runs), [run for run in runs if run.finished]
    settings = [
        (name, *(_said(run.settings[name]) if matters(run, name) else "–" for run in runs))
        for name in names
    ]
    window = WINDOW if max(len(run.records) for run in runs) >= 5 * WINDOW else 1
    drawn = {f"{number} {run.title}": [run] for number, run in enumerate(runs, 1) if run.records}
    figures: dict[str, Callable[[], Figure]] = {}
    if len(runs) > 1 and drawn:
        figures["participants"] = lambda: plots.curves(drawn, window=window)
        figures["all_clients"] = lambda: plots.curves(drawn, y="all_clients")
    pictures, failed = _drawn(figures, 6.2, 4.2)
    results = []
    others = [name for name in differing(finished) if name != "seed"] or ["method"]
    over = cells(over_seeds(finished, others)) if "seed" in differing(finished) else []
    for one in shown:
        run, stated = one["run"], one["published"]
        rounds = str(len(run.records)) + ("" if run.finished else f" of {run.config['rounds']}")
        told = "–" if not stated else percent(stated[1]) if stated[1] else "no convergence"
        cells_of = cells(means({"": [run]}))[0][1:]
        results.append([one["label"], run.title, rounds, *cells_of, told])
    return {
        "results": results,
        "curves": pictures,
        "failed": failed,
        "window": window,
        "labels": [one["label"] for one in shown],
        "differing": settings,
        "seeds": over,
    }


def _one(number: int, run: Run, published: Published | None) -> dict[str, Any]:
    config, own = run.config, {n: v for n, v in run.settings.items() if matters(run, n)}
    defaults = flat(Config(method=config["method"]).as_dict())
    changed = [name for name, value in own.items() if value != defaults.get(name, value)]
    pictures, failed = _drawn(plots.of_run(run, titled=False))
    split = run.folder / "split.png" if run.folder else None
    if split is not None and split.is_file():
        pictures["split"] = _source(read_bytes(split))  # from the run, since a report has no data
    return {
        "run": run,
        "label": f"{number} · {run.folder.resolve().name if run.folder else run.name}",
        "published": published(config) if published else None,
        "models": [f"{name} model" for name in run.predictions],
        "conventions": _conventions(run) if run.records else [],
        "pictures": pictures,
        "failed": failed,
        "changed": [(name, _said(own[name]), _said(defaults[name])) for name in changed],
        "same": [(name, _said(value)) for name, value in own.items() if name not in changed],
        "versions": ", ".join(f"{name} {value}" for name, value in run.about["versions"].items()),
    }


def _conventions(run: Run) -> list[list[str]]:
    """Accuracies: one row per convention, one column per prediction."""
    frame: Any = run.per_round()
    names = ["", *(f"/{name}" for name in run.predictions[1:])]  # the main one has no suffix
    mean, every = (
        frame.reindex(columns=[f"{kind}_accuracy{name}" for name in names]).astype(float)
        for kind in ("mean", "all_clients")
    )
    rows = {
        "participants, best round (the paper's)": mean.max(),
        "participants, mean of the last ten rounds": mean.tail(10).mean(),
        "participants, last round": mean.ffill().iloc[-1],
        "all clients, last evaluation (no round chosen)": every.ffill().iloc[-1],
        "all clients, best evaluation": every.max(),
    }
    if len(run.clients.get("evaluation_rounds", ())):
        last = [run.clients[f"all_clients/accuracy{name}"][-1] for name in names]
        rows["spread over clients, last (standard deviation)"] = np.nanstd(last, axis=1)
    return [[title, *map(_percent, values)] for title, values in rows.items()]


def _drawn(
    figures: Mapping[str, Callable[[], Figure]], width: float = 5.6, height: float = 4.0
) -> tuple[dict[str, str], list[str]]:
    """Data URLs of the figures by name, at a size that is legible on a phone; and a line for each
    that could not be drawn."""
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
