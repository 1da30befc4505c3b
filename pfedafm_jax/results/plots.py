"""Plots of runs: each function takes runs, tables or arrays and returns a matplotlib figure.

A method has the same colour in all plots, axes of counts have whole numbers, and text is shown
literally: nothing in a name or path is parsed as a formula (`style.py`).
"""

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pfedafm_jax.base.files import Log, write_atomically
from pfedafm_jax.data.dataset import noun_of
from pfedafm_jax.results import style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.select import grouped
from pfedafm_jax.results.style import BLACK, BLUE, COLOURS, GREEN, GREY, ORANGE, architecture_label
from pfedafm_jax.results.tables import mean_and_deviation

X_AXES = {
    "rounds": "communication round",
    "floats": "floats sent and received by all participants so far",
    "flops": "floating-point operations of all participants so far",
    "seconds": "seconds of training so far",
}
Y_AXES = {
    "participants": ("mean_accuracy", "participants' test accuracy, %"),
    "all_clients": ("all_clients_accuracy", "test accuracy of all clients, %"),
    "loss": ("loss", "training loss"),
}


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a file of the kind that its suffix says."""
    path = Path(path)
    form = path.suffix[1:].lower() or "png"
    write_atomically(path, style.rendered(figure, form, dpi=140))
    return path


def accuracy_by_round(
    rounds: pd.DataFrame, predictions: Sequence[str] = ("own",), title: str = ""
) -> Figure:
    """Mean accuracy of each round's participants, and of all clients when evaluated.

    Args:
        rounds: one row per round, as `per_round()` returns it.
        predictions: names of the predictions, the method's main one first.
    """
    figure, axes = style.plain_figure()
    frame: Any = rounds
    for name, colour in zip(predictions[1:], (ORANGE, GREEN, GREY), strict=False):
        values, label = 100 * rounds[f"mean_accuracy/{name}"], f"participants, {name} model"
        axes.plot(frame["round"], values, color=colour, linewidth=0.9, alpha=0.7, label=label)
    means, label = 100 * frame["mean_accuracy"], f"participants, {predictions[0]} model"
    axes.plot(frame["round"], means, color=BLUE, linewidth=1.6, label=label)
    everyone = frame[frame["all_clients_accuracy"].notna()]
    if len(everyone):
        values = 100 * everyone["all_clients_accuracy"]
        axes.plot(everyone["round"], values, "o-", color=BLACK, ms=3.5, lw=1, label="all clients")
    if means.notna().any():
        best = frame["round"][means.idxmax()], means.max()
        axes.plot(*best, "o", color=BLUE, markersize=5)
        style.note(axes, f"best {best[1]:.2f} %", best, BLUE)
    axes.set(xlabel=X_AXES["rounds"], ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    style.whole_numbers(axes.xaxis)
    style.legend_below(figure, 2)
    return figure


def accuracy_by_client(
    accuracy: np.ndarray, groups: np.ndarray, names: Sequence[str], title: str = ""
) -> Figure:
    """Each client's accuracy, sorted within its architecture; the dashed line is the mean.

    Args:
        accuracy: fractions, `[clients]`; NaN for clients without test images, which are left out.
        groups: the index of each client's architecture, `[clients]`.
        names: the architectures.
    """
    figure, axes = style.plain_figure(8.0, 4.0)
    known = np.isfinite(accuracy)
    start, values, groups = 0, 100 * np.asarray(accuracy, float)[known], np.asarray(groups)[known]
    for group, (name, colour) in enumerate(zip(names, itertools.cycle(COLOURS), strict=False)):
        bars = np.sort(values[groups == group])[::-1]
        places, label = start + np.arange(len(bars)), architecture_label(name)
        mean = f" {bars.mean():.1f} %" if len(bars) else ""
        axes.bar(places, bars, width=0.9, color=colour, label=label + mean)
        # A bar without height would look like a missing client.
        axes.plot(places[bars == 0], bars[bars == 0], "x", color=colour, ms=6, mew=1.5)
        start += len(bars)
    axes.axhline(values.mean(), color=BLACK, linestyle="--", linewidth=1)
    axes.text(start + 0.3, values.mean(), f"mean {values.mean():.2f} %", va="center", fontsize=8)
    low = max(0.0, np.floor(values.min() / 10) * 10 - 10)
    axes.set(xlabel="clients, by architecture", ylabel="test accuracy, %", title=title)
    axes.set(ylim=(low or -3.0, 100), xlim=(-1, start), xticks=[])
    style.legend_below(figure, 6)
    return figure


def mix_by_round(mix: np.ndarray, title: str = "", axes: Axes | None = None) -> Figure:
    """Mean of the mix vector by round: participants' median, 10–90 % band, and two single clients.

    Args:
        mix: `[rounds, clients]`, NaN where a client took no part.
        axes: where to draw, instead of a new figure.
    """
    figure: Any
    figure, axes = style.plain_figure() if axes is None else (axes.figure, axes)
    rounds, visited = np.arange(1, len(mix) + 1), np.isfinite(mix)
    seen = visited.any(axis=1)
    if seen.any():
        low, middle, high = np.nanpercentile(mix[seen], (10, 50, 90), axis=1)
        band = {"color": BLUE, "alpha": 0.15, "linewidth": 0}
        axes.fill_between(rounds[seen], low, high, label="10 to 90 % of participants", **band)
        axes.plot(rounds[seen], middle, color=BLUE, lw=1.4, label="median of the participants")
    for client, colour in zip(busiest(mix), (ORANGE, GREEN), strict=False):
        drawn, label = visited[:, client], f"client {client}"
        axes.plot(rounds[drawn], mix[drawn, client], "o-", color=colour, ms=3, lw=0.9, label=label)
    axes.set(xlabel=X_AXES["rounds"], ylim=(-0.02, 1.02), title=title)
    axes.set_ylabel("mean of the mix vector (1: local, 0: shared)")
    style.whole_numbers(axes.xaxis)
    axes.legend(frameon=False, fontsize=8)
    return figure


def busiest(mix: np.ndarray) -> list[int]:
    """The two clients that took part most often."""
    return np.argsort(-np.isfinite(mix).sum(axis=0), kind="stable")[:2].tolist()


def classes_by_client(counts: np.ndarray, title: str = "", label: str = "images") -> Figure:
    """Heat map of a split: images of each class (columns) at each client (rows)."""
    classes = counts.shape[1]
    figure, axes = style.plain_figure(7.0 if classes <= 20 else 9.0, 5.0)
    axes.grid(False)
    shown = np.where(counts > 0, counts, np.nan)
    picture = axes.imshow(shown, aspect="auto", cmap="viridis_r", interpolation="nearest")
    axes.set(xlabel="class", ylabel="client", title=title)
    style.whole_numbers(axes.yaxis)
    style.whole_numbers(axes.xaxis)
    if classes <= 20:
        axes.set_xticks(range(classes))
    figure.colorbar(picture, ax=axes, label=label, shrink=0.85)
    return figure


def of_run(
    run: Run, counts: np.ndarray | None = None, titled: bool = True
) -> dict[str, Callable[[], Figure]]:
    """All plots of a run by name: accuracy, clients, mix, split (from `counts`)."""
    config, clients, found = run.config, run.clients, {}
    share = 100 * config["participation"]
    name = f"{run.title}, {config['dataset']}, N = {config['num_clients']}, C = {share:g} %"
    name = name if titled else ""
    if run.records:
        found["accuracy"] = lambda: accuracy_by_round(run.per_round(), run.predictions, name)
    if len(clients.get("evaluation_rounds", ())):
        last = f"{name}, round {clients['evaluation_rounds'][-1]}" if titled else ""
        scores, names = clients["all_clients/accuracy"][-1], run.about["architectures"]
        found["clients"] = lambda: accuracy_by_client(scores, clients["architecture"], names, last)
    if len(clients.get("visits/mix_mean", ())):
        found["mix"] = lambda: mix_by_round(clients["visits/mix_mean"], name)
    if counts is not None:
        data = run.about["data"]
        noun = noun_of(data.get("image_shape", (0, 0, 0)), data.get("dtype", "uint8"))
        words = f"{config['dataset']}: {data.get('partition', 'who has what')}" if titled else ""
        title = textwrap.fill(words, 64)
        found["split"] = partial(classes_by_client, counts, title, noun)
    return found


def draw_all(run: Run, counts: np.ndarray | None, folder: str | Path, log: Log) -> None:
    """Writes all plots of a run as PNG files; logs a line for one that cannot be drawn.

    `counts`: images of each class at each client, `[clients, classes]`; None: nobody knows.
    """
    for name, draw in of_run(run, counts).items():
        try:
            save(draw(), Path(folder) / f"{name}.png")
        except Exception as error:
            log(f"warning: {name}.png could not be drawn ({type(error).__name__}: {error})")


# ------------------------------------------------------------------------------- several runs


def curve(
    rounds: pd.DataFrame, x: str = "rounds", y: str = "participants", window: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """A run as arrays x and y, with y averaged over the last `window` points; skips missing values.

    >>> rounds = pd.DataFrame({"seconds": [2, 2, 3], "mean_accuracy": [0.5, None, 0.75]})
    >>> curve(rounds, x="seconds")
    (array([2., 7.]), array([50., 75.]))
    """
    parts = ["floats_up", "floats_down"] if x == "floats" else [x]
    steps = np.ones(len(rounds)) if x == "rounds" else rounds[parts].sum(axis=1).to_numpy(float)
    values: Any = rounds[Y_AXES[y][0]] * (1 if y == "loss" else 100)
    known = values.notna().to_numpy()
    along, values = np.cumsum(steps)[known], values[known]
    width = max(1, min(window, len(values)))
    return along[width - 1 :], values.rolling(width).mean().to_numpy(float)[width - 1 :]


def styles(runs: Mapping[str, Sequence[Run]]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each label: methods by colour, several of one method by dash."""
    methods = [found[0].config["method"] for found in runs.values()]
    alone = len(set(methods)) == 1 < len(methods)  # the method does not distinguish them
    found: dict[str, tuple[str, str]] = {}
    for place, (label, method) in enumerate(zip(runs, methods, strict=True)):
        colour = COLOURS[place % len(COLOURS)] if alone else style.method_colour(method)
        same = [other for other, _ in found.values()].count(colour)
        found[label] = colour, ("-", "--", ":", "-.")[same % 4]
    return found


def curves(
    runs: Mapping[str, Sequence[Run]],
    title: str = "",
    *,
    x: str = "rounds",
    y: str = "participants",
    window: int = 1,
) -> Figure:
    """Curves of runs by label; for several runs under one label their mean, and a min–max band.

    Args:
        runs: label → its runs, as `labels.grouped` returns them.
        x, y: names in `X_AXES` and `Y_AXES`.
        window: how many points to average.
    """
    figure, axes = style.plain_figure(8.0, 4.8)
    looks, ends = styles(runs), []
    for label, found in runs.items():
        colour, dash = looks[label]
        lines = [curve(run.per_round(), x, y, window) for run in found if run.records]
        lines = [line for line in lines if len(line[0])]
        if not lines:
            axes.plot([], [], dash, color=colour, label=f"{label} (no values)")
            continue
        # Interpolated at the points of any run that lie in the range of all.
        start, end = max(xs[0] for xs, _ in lines), min(xs[-1] for xs, _ in lines)
        along = np.unique(np.concatenate([xs for xs, _ in lines]))
        along = along[(start <= along) & (along <= end)] if start <= end else along
        table = np.stack([np.interp(along, *line) for line in lines])
        mean = table.mean(axis=0)
        if along[-1] == 0:  # it never sends anything: draw a horizontal line
            text = f"{label} (sends nothing)"
            axes.axhline(mean[-1], color=colour, linestyle=(0, (6, 3)), linewidth=1.2, label=text)
            continue
        ends.append(along[-1])
        marker = "o" if len(along) == 1 else ""
        axes.plot(along, mean, dash, marker=marker, color=colour, linewidth=1.6, label=label)
        if len(lines) > 1:
            least, most = table.min(axis=0), table.max(axis=0)
            axes.fill_between(along, least, most, color=colour, alpha=0.15, linewidth=0)
    if x == "rounds":
        style.whole_numbers(axes.xaxis)
    elif x in ("floats", "flops"):
        if ends and max(ends) > 30 * min(ends):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter())
    smooth = f", mean of {window} points" if window > 1 else ""
    axes.set(xlabel=X_AXES[x], ylabel=Y_AXES[y][1] + smooth, title=title)
    style.legend_below(figure)
    return figure


def compare_runs(runs: Sequence[Run], title: str = "", window: int = 5) -> Figure:
    """Participants' mean accuracy of several methods, by round; short runs are smoothed less."""
    shortest = min((len(run.records) for run in runs), default=0)
    return curves(grouped(runs, ["method"]), title, window=max(1, min(window, shortest // 4)))


def accuracy_by_floats(runs: Sequence[Run], title: str = "") -> Figure:
    """Floats per client and round against the final accuracy of all clients, for each method."""
    figure, axes = style.plain_figure()
    for label, found in grouped(runs, ["method"]).items():
        scores = [run.summary.final_all_clients_accuracy for run in found]
        mean, deviation = mean_and_deviation(scores)
        summary, colour = found[0].summary, style.method_colour(found[0].config["method"])
        if mean is None:
            continue
        floats = (summary.floats_up_per_client or 0) + (summary.floats_down_per_client or 0)
        width = None if deviation is None else 100 * deviation
        axes.errorbar(floats, 100 * mean, width, fmt="o", color=colour, markersize=7, capsize=3)
        style.note(axes, label, (floats, 100 * mean), colour)
    axes.set_xscale("symlog", linthresh=1)  # a method may send nothing
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set(xlabel="floats up and down, per client and round", title=title)
    axes.set_ylabel("test accuracy of all clients, %")
    axes.margins(x=0.12, y=0.2)
    return figure
