"""Pictures of a run. Each function draws from plain arrays and dictionaries and returns a matplotlib figure."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pfedafm_jax.records import read_rounds

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9822b", "#3a9a5b", "#8a8f98"
ARCHITECTURE_COLOURS = (BLUE, ORANGE, GREEN, "#b0413e", "#7b5ea7", "#5aa7a7", GREY)
METHOD_COLOURS = (*ARCHITECTURE_COLOURS, "#c26db0")
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


class Picture(Figure):
    """A figure that notebooks show by themselves, whatever backend they have."""

    def _repr_png_(self) -> bytes:
        content = io.BytesIO()
        self.savefig(content, format="png", dpi=100)
        return content.getvalue()


def _figure(width: float = 7.0, height: float = 4.2, **options: Any) -> tuple[Figure, Any]:
    figure = Picture(figsize=(width, height), layout="constrained")
    axes = figure.subplots(**options)
    if not isinstance(axes, np.ndarray):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a PNG."""
    figure.savefig(path, dpi=140)
    return Path(path)


def architecture_label(name: str) -> str:
    """`cnn3` → `CNN-3`."""
    return f"CNN-{name[3:]}" if name.startswith("cnn") and name[3:].isdigit() else name


def accuracy_by_round(records: Sequence[dict[str, Any]], title: str = "", judged_by: str = "") -> Figure:
    """Mean accuracy of the participants of each round, of all clients where evaluated, and of the other predictions."""
    figure, axes = _figure()
    judged_by = judged_by or next(iter(records[0]["accuracy"]))
    rounds = [r["round"] for r in records]
    means = np.array([np.nan if r["mean_accuracy"] is None else r["mean_accuracy"] for r in records]) * 100
    others = [name for name in records[0]["accuracy"] if name != judged_by]
    for name, colour in zip(others, (ORANGE, GREEN, GREY), strict=False):
        values = [np.nan if r["accuracy"][name] is None else 100 * r["accuracy"][name] for r in records]
        axes.plot(rounds, values, color=colour, linewidth=0.9, alpha=0.7, label=f"participants, {name} model")
    axes.plot(rounds, means, color=BLUE, linewidth=1.6, label=f"participants, {judged_by} model")
    everyone = [(r["round"], 100 * r["all_clients_accuracy"]) for r in records if r["all_clients_accuracy"] is not None]
    if everyone:
        axes.plot(*zip(*everyone, strict=True), "o-", color="black", markersize=3.5, linewidth=1, label="all clients")
    if np.isfinite(means).any():
        best = int(np.nanargmax(means))
        axes.annotate(
            f"best {means[best]:.2f} %",
            (rounds[best], means[best]),
            xytext=(0, 8),
            textcoords="offset points",
            ha="center",
            color=BLUE,
        )
        axes.plot(rounds[best], means[best], "o", color=BLUE, markersize=5)
    axes.set(xlabel="communication round", ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    figure.legend(frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    return figure


def accuracy_by_client(accuracy: np.ndarray, groups: np.ndarray, names: Sequence[str], title: str = "") -> Figure:
    """Each client's accuracy, sorted within its architecture; the dashed line is the mean over clients."""
    figure, axes = _figure(8.0, 4.0)
    start, values = 0, 100 * np.asarray(accuracy, float)
    for group, name in enumerate(names):
        bars = np.sort(values[np.asarray(groups) == group])[::-1]
        colour = ARCHITECTURE_COLOURS[group % len(ARCHITECTURE_COLOURS)]
        label = f"{architecture_label(name)} {bars.mean():.1f} %" if len(bars) else architecture_label(name)
        axes.bar(np.arange(start, start + len(bars)), bars, width=0.9, color=colour, label=label)
        start += len(bars)
    axes.axhline(values.mean(), color="black", linestyle="--", linewidth=1)
    axes.annotate(f"mean {values.mean():.2f} %", (start, values.mean()), xytext=(4, 0), textcoords="offset points",
                  va="center", fontsize=8, annotation_clip=False)  # fmt: skip
    low = max(0.0, np.floor(values.min() / 10) * 10 - 10)
    axes.set(
        ylim=(low, 100), xlim=(-1, start), xlabel="clients, by architecture", ylabel="test accuracy, %", title=title
    )
    axes.set_xticks([])
    figure.legend(frameon=False, fontsize=8, ncols=min(6, len(names)), loc="outside lower center")
    return figure


def mix_by_round(mix: np.ndarray, title: str = "") -> Figure:
    """Mean of the mix vector by round, `[rounds, clients]`: participants' mean, 10–90 % band, and two single clients."""
    figure, axes = _figure()
    rounds = np.arange(1, len(mix) + 1)
    visited = np.isfinite(mix)
    seen = visited.any(axis=1)
    low, middle, high = np.nanpercentile(mix[seen], (10, 50, 90), axis=1) if seen.any() else np.zeros((3, 0))
    axes.fill_between(rounds[seen], low, high, color=BLUE, alpha=0.15, linewidth=0, label="10 to 90 % of participants")
    axes.plot(rounds[seen], middle, color=BLUE, linewidth=1.4, label="median of the participants")
    busiest = np.argsort(-visited.sum(axis=0), kind="stable")[:2]
    for client, colour in zip(busiest, (ORANGE, GREEN), strict=False):
        axes.plot(rounds[visited[:, client]], mix[visited[:, client], client], "o-", color=colour, markersize=3,
                  linewidth=0.9, label=f"client {client}")  # fmt: skip
    axes.set(xlabel="communication round", ylabel="mean of the mix vector (1: local, 0: shared)", ylim=(-0.02, 1.02))
    axes.set_title(title)
    axes.legend(frameon=False, fontsize=8)
    return figure


def classes_by_client(counts: np.ndarray, title: str = "") -> Figure:
    """Heat map of a split: images of each class (columns) at each client (rows)."""
    classes = counts.shape[1]
    figure, axes = _figure(7.0 if classes <= 20 else 9.0, 5.0)
    axes.grid(False)
    picture = axes.imshow(
        np.where(counts > 0, counts, np.nan), aspect="auto", cmap="viridis_r", interpolation="nearest"
    )
    axes.set(xlabel="class", ylabel="client", title=title)
    if classes <= 20:
        axes.set_xticks(range(classes))
    figure.colorbar(picture, ax=axes, label="images", shrink=0.85)
    return figure


def compare_runs(runs: Mapping[str, Sequence[str]], title: str = "", window: int = 5) -> Figure:
    """`compare_records` of run folders: `runs` maps a label to them."""
    records = {label: [read_rounds(folder) for folder in folders] for label, folders in runs.items()}
    return compare_records(records, title, window)


def compare_records(runs: Mapping[str, Sequence[Sequence[dict[str, Any]]]], title: str = "", window: int = 5) -> Figure:
    """Participants' mean accuracy of several methods, by round: `runs` maps a label to the records of its runs.

    Short runs are smoothed over fewer rounds than `window`, so that there is a curve left.
    """
    shortest = min((len(records) for found in runs.values() for records in found), default=0)
    return curves(runs, title, window=max(1, min(window, shortest // 4)))


def curve(
    records: Sequence[dict[str, Any]], x: str = "rounds", y: str = "participants", window: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """A run as two arrays, y a mean of the last `window` points; rounds without a value are left out.

    >>> records = [{"seconds": 2, "mean_accuracy": 0.5}, {"seconds": 2, "mean_accuracy": None}]
    >>> curve([*records, {"seconds": 3, "mean_accuracy": 0.75}], x="seconds")
    (array([2., 7.]), array([50., 75.]))
    """
    parts = {"floats": ("floats_up", "floats_down")}.get(x, (x,))
    steps = [1 if x == "rounds" else sum(record[part] for part in parts) for record in records]
    key = Y_AXES[y][0]
    values = np.array([np.nan if record[key] is None else record[key] for record in records], float)
    known = np.isfinite(values)
    along, values = np.cumsum(np.array(steps, float))[known], values[known] * (1 if y == "loss" else 100)
    width = max(1, min(window, len(values)))
    return along[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid") if len(values) else values


def _on_one_grid(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Curves as rows of one table: as they are where they have the same x, else between their points."""
    shortest = min(len(along) for along, _ in found)
    first = found[0][0][:shortest]
    if all(np.array_equal(along[:shortest], first) for along, _ in found):
        return first, np.stack([values[:shortest] for _, values in found])
    grid = np.linspace(max(along[0] for along, _ in found), min(along[-1] for along, _ in found), 200)
    return grid, np.stack([np.interp(grid, along, values) for along, values in found])


def curves(
    runs: Mapping[str, Sequence[Sequence[dict[str, Any]]]],
    title: str = "",
    *,
    x: str = "rounds",
    y: str = "participants",
    window: int = 1,
) -> Figure:
    """Curves of several runs, smoothed over `window` points; the mean, and a band from the least to the most, of several.

    `runs` maps a label to the records of its runs; `x` and `y` are names of `X_AXES` and `Y_AXES`.
    """
    figure, axes = _figure(8.0, 4.8)
    styles = itertools.product(("-", "--", ":"), METHOD_COLOURS)
    ends = []
    for (label, found), (style, colour) in zip(runs.items(), itertools.cycle(styles), strict=False):
        lines = [line for line in (curve(records, x, y, window) for records in found) if len(line[0])]
        if not lines:
            axes.plot([], [], style, color=colour, label=f"{label} (no values)")
            continue
        along, table = _on_one_grid(lines)
        if along[-1] == 0:  # it never sends anything: a level to compare with
            axes.axhline(
                table.mean(axis=0)[-1],
                color=colour,
                linestyle=(0, (6, 3)),
                linewidth=1.2,
                label=f"{label} (sends nothing)",
            )
            continue
        ends.append(along[-1])
        marker = "o" if len(along) == 1 else ""
        axes.plot(along, table.mean(axis=0), style, marker=marker, color=colour, linewidth=1.6, label=label)
        if len(lines) > 1:
            axes.fill_between(along, table.min(axis=0), table.max(axis=0), color=colour, alpha=0.15, linewidth=0)
    if x in ("floats", "flops"):
        if ends and max(ends) > 30 * min(ends):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter())
    smooth = f", mean of {window} points" if window > 1 else ""
    axes.set(xlabel=X_AXES[x], ylabel=Y_AXES[y][1] + smooth, title=title)
    longest = max((len(label) for label in runs), default=0)
    columns = max(1, min(4, 100 // (longest + 8), len(runs)))
    figure.legend(frameon=False, fontsize=8, ncols=columns, loc="outside lower center")
    return figure


def accuracy_by_floats(rows: Sequence[dict[str, Any]], title: str = "") -> Figure:
    """What methods send against what they reach: rows of a comparison, floats up and down a client and round."""
    figure, axes = _figure(7.0, 4.2)
    for row, colour in zip(rows, itertools.cycle(METHOD_COLOURS), strict=False):
        if row["all clients"] is None:
            continue
        floats = row["floats up"]["mean"] + row["floats down"]["mean"]
        accuracy, deviation = (100 * (row["all clients"][key] or 0.0) for key in ("mean", "deviation"))
        axes.errorbar(floats, accuracy, deviation or None, fmt="o", color=colour, markersize=7, capsize=3)
        axes.annotate(row["method"], (floats, accuracy), xytext=(0, 9), textcoords="offset points", ha="center",
                      fontsize=8, color=colour)  # fmt: skip
    axes.set_xscale("symlog", linthresh=1)  # a method may send nothing
    axes.set(xlabel="floats up and down, per client and round", ylabel="test accuracy of all clients, %", title=title)
    axes.margins(x=0.12, y=0.2)
    return figure


def draw_all(experiment: Any, folder: str | Path, title: str) -> list[Path]:
    """All pictures of an experiment, as PNG files."""
    folder, federation = Path(folder), experiment.federation
    names, paths = [one.name for one in experiment.federation.architectures], []
    paths.append(save(accuracy_by_round(experiment.records, title, experiment.judged_by), folder / "accuracy.png"))
    if experiment.evaluations:
        last = max(experiment.evaluations)
        figure = accuracy_by_client(
            experiment.evaluations[last][experiment.judged_by], federation.groups, names, f"{title}, round {last}"
        )
        paths.append(save(figure, folder / "clients.png"))
    if "mix_mean" in experiment.visits:
        paths.append(save(mix_by_round(np.stack(experiment.visits["mix_mean"]), title), folder / "mix.png"))
    counts = experiment.partition.class_counts(experiment.dataset.labels, experiment.dataset.num_classes)
    paths.append(
        save(classes_by_client(counts, f"{experiment.config.dataset}, images by client"), folder / "split.png")
    )
    return paths
