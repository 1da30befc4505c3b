"""Pictures of runs: each function takes runs, tables or arrays and returns a matplotlib figure.

A method has one colour in all pictures, axes that count have whole numbers, and text is shown as it
is: nothing in a name or a path is taken for a formula (see `Picture`).
"""

import io
import itertools
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import EngFormatter, MaxNLocator

from pfedafm_jax.results import Run, grouped, mean_and_deviation

BLUE, ORANGE, GREEN, GREY, BLACK = "#2f6db5", "#d9822b", "#3a9a5b", "#8a8f98", "#111111"
RED, VIOLET, TEAL, PINK, BROWN = "#b0413e", "#7b5ea7", "#5aa7a7", "#c26db0", "#8c6d31"
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, TEAL, PINK, BROWN, GREY)
METHOD_COLOURS = {
    "pfedafm": BLUE, "fedproto": ORANGE, "standalone": GREY, "fd": GREEN, "lg_fedavg": RED,
    "fml": VIOLET, "fedkd": TEAL, "fedapen": PINK, "fedper": BROWN, "fedrep": BLACK,
}  # fmt: skip
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
    """A figure whose text is plain text, and that notebooks show whatever backend they have."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
        super().draw(renderer)

    def _repr_png_(self) -> bytes:
        return rendered(self, "png", dpi=100)


def rendered(figure: Figure, kind: str, **options: Any) -> bytes:
    """A figure as the bytes of a file of this kind: png, svg, pdf."""
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a name may be in any script
        figure.savefig(file, format=kind, **options)
    return file.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a file; its suffix says which kind."""
    path = Path(path)
    path.write_bytes(rendered(figure, path.suffix[1:].lower() or "png", dpi=140))
    return path


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` plain axes, each of this size in inches."""
    figure = Picture(figsize=(max(6.5, width * columns), height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.reshape(-1):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid.tolist()


def _figure(width: float = 7.0, height: float = 4.2) -> tuple[Figure, Axes]:
    figure, [[axes]] = panels(1, 1, width, height)
    return figure, axes


def whole_numbers(axis: Axis) -> None:
    """For rounds and clients, which are counted."""
    axis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, columns: int = 4) -> None:
    """One legend for all axes, of the first one's labels, with at most this many columns."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    longest = max(map(len, labels), default=0)
    fitting = int(13 * figure.get_figwidth() / (longest + 7))
    for old in figure.legends:
        old.remove()
    figure.legend(
        handles, labels, frameon=False, fontsize=8, loc="outside lower center",
        ncols=max(1, min(columns, fitting, len(labels))),
    )  # fmt: skip


def method_colour(name: str) -> str:
    """A method's colour in every picture; that of one of your own depends on its name."""
    return METHOD_COLOURS.get(name) or COLOURS[zlib.crc32(name.encode()) % len(COLOURS)]


def architecture_label(name: str) -> str:
    """`cnn3` → `CNN-3`."""
    return f"CNN-{name[3:]}" if name.startswith("cnn") and name[3:].isdigit() else name


# ------------------------------------------------------------------------------- one run


def accuracy_by_round(rounds: pd.DataFrame, predictions: Sequence[str] = ("own",), title: str = "") -> Figure:
    """Mean accuracy of each round's participants, and of all clients where evaluated.

    Args:
        rounds: one row a round, as `per_round()` gives it.
        predictions: names of what was evaluated, the method's own first.
        title: a heading.
    """
    figure, axes = _figure()
    for name, colour in zip(predictions[1:], (ORANGE, GREEN, GREY), strict=False):
        values, label = 100 * rounds[f"mean_accuracy/{name}"], f"participants, {name} model"
        axes.plot(rounds["round"], values, color=colour, linewidth=0.9, alpha=0.7, label=label)
    means, label = 100 * rounds["mean_accuracy"], f"participants, {predictions[0]} model"
    axes.plot(rounds["round"], means, color=BLUE, linewidth=1.6, label=label)
    everyone = rounds[rounds["all_clients_accuracy"].notna()]
    if len(everyone):
        values = 100 * everyone["all_clients_accuracy"]
        axes.plot(everyone["round"], values, "o-", color=BLACK, ms=3.5, lw=1, label="all clients")
    if len(means.dropna()):
        best = rounds["round"][means.idxmax()], means.max()
        axes.plot(*best, "o", color=BLUE, markersize=5)
        axes.annotate(f"best {best[1]:.2f} %", best, xytext=(0, 8), textcoords="offset points",
                      ha="center", color=BLUE)  # fmt: skip
    axes.set(xlabel=X_AXES["rounds"], ylabel="test accuracy, %", title=title)
    axes.margins(y=0.12)
    whole_numbers(axes.xaxis)
    legend_below(figure, 2)
    return figure


def accuracy_by_client(accuracy: np.ndarray, groups: np.ndarray, names: Sequence[str], title: str = "") -> Figure:
    """Each client's accuracy, sorted within its architecture; the dashed line is the mean.

    Args:
        accuracy: shares, `[clients]`.
        groups: the number of each client's architecture, `[clients]`.
        names: the architectures.
        title: a heading.
    """
    figure, axes = _figure(8.0, 4.0)
    start, values = 0, 100 * np.asarray(accuracy, float)
    for group, (name, colour) in enumerate(zip(names, itertools.cycle(COLOURS), strict=False)):
        bars = np.sort(values[np.asarray(groups) == group])[::-1]
        places, label = start + np.arange(len(bars)), architecture_label(name)
        mean = f" {bars.mean():.1f} %" if len(bars) else ""
        axes.bar(places, bars, width=0.9, color=colour, label=label + mean)
        # A bar of no height would look like no client.
        axes.plot(places[bars == 0], bars[bars == 0], "x", color=colour, ms=4, clip_on=False)
        start += len(bars)
    axes.axhline(values.mean(), color=BLACK, linestyle="--", linewidth=1)
    axes.annotate(f"mean {values.mean():.2f} %", (start, values.mean()), xytext=(4, 0),
                  textcoords="offset points", va="center", fontsize=8, annotation_clip=False)  # fmt: skip
    low = max(0.0, np.floor(values.min() / 10) * 10 - 10)
    axes.set(xlabel="clients, by architecture", ylabel="test accuracy, %", title=title)
    axes.set(ylim=(low, 100), xlim=(-1, start), xticks=[])
    legend_below(figure, 6)
    return figure


def mix_by_round(mix: np.ndarray, title: str = "", axes: Axes | None = None) -> Figure:
    """Mean of the mix vector by round: participants' median, 10–90 % band, and two single clients.

    Args:
        mix: `[rounds, clients]`, NaN where a client took no part.
        title: a heading.
        axes: where to draw, instead of a figure of its own.
    """
    figure: Any
    figure, axes = _figure() if axes is None else (axes.figure, axes)
    rounds, visited = np.arange(1, len(mix) + 1), np.isfinite(mix)
    seen = visited.any(axis=1)
    if seen.any():
        low, middle, high = np.nanpercentile(mix[seen], (10, 50, 90), axis=1)
        axes.fill_between(rounds[seen], low, high, color=BLUE, alpha=0.15, linewidth=0,
                          label="10 to 90 % of participants")  # fmt: skip
        axes.plot(rounds[seen], middle, color=BLUE, lw=1.4, label="median of the participants")
    for client, colour in zip(busiest(mix), (ORANGE, GREEN), strict=False):
        drawn = visited[:, client]
        axes.plot(rounds[drawn], mix[drawn, client], "o-", color=colour, ms=3, lw=0.9,
                  label=f"client {client}")  # fmt: skip
    axes.set(xlabel=X_AXES["rounds"], ylim=(-0.02, 1.02), title=title)
    axes.set_ylabel("mean of the mix vector (1: local, 0: shared)")
    whole_numbers(axes.xaxis)
    axes.legend(frameon=False, fontsize=8)
    return figure


def busiest(mix: np.ndarray) -> list[int]:
    """The two clients that took part most often."""
    return np.argsort(-np.isfinite(mix).sum(axis=0), kind="stable")[:2].tolist()


def classes_by_client(counts: np.ndarray, title: str = "") -> Figure:
    """Heat map of a split: images of each class (columns) at each client (rows)."""
    classes = counts.shape[1]
    figure, axes = _figure(7.0 if classes <= 20 else 9.0, 5.0)
    axes.grid(False)
    shown = np.where(counts > 0, counts, np.nan)
    picture = axes.imshow(shown, aspect="auto", cmap="viridis_r", interpolation="nearest")
    axes.set(xlabel="class", ylabel="client", title=title)
    whole_numbers(axes.yaxis)
    whole_numbers(axes.xaxis)
    if classes <= 20:
        axes.set_xticks(range(classes))
    figure.colorbar(picture, ax=axes, label="images", shrink=0.85)
    return figure


def of_run(run: Run, counts: np.ndarray | None = None, titled: bool = True) -> dict[str, Callable[[], Figure]]:
    """What can be drawn of a run, by name: accuracy, clients, mix, split (from `counts`)."""
    config, clients, name = run.config, run.clients, ""
    if titled:
        share = 100 * config["participation"]
        name = f"{run.title}, {config['dataset']}, N = {config['num_clients']}, C = {share:g} %"
    found: dict[str, Callable[[], Figure]] = {}
    if run.records:
        found["accuracy"] = lambda: accuracy_by_round(run.per_round(), run.predictions, name)
    if len(clients.get("evaluation_rounds", ())):
        last = f"{name}, round {clients['evaluation_rounds'][-1]}" if titled else ""
        scores, names = clients["all_clients/accuracy"][-1], run.about["architectures"]
        found["clients"] = lambda: accuracy_by_client(scores, clients["architecture"], names, last)
    if len(clients.get("visits/mix_mean", ())):
        found["mix"] = lambda: mix_by_round(clients["visits/mix_mean"], name)
    if counts is not None:
        title = f"{config['dataset']}, images by client" if titled else ""
        found["split"] = lambda: classes_by_client(counts, title)
    return found


def draw_all(run: Run, counts: np.ndarray, folder: str | Path, log: Callable[[str], object]) -> list[Path]:
    """All pictures of a run as PNG files; one that cannot be drawn costs a line, not the run.

    Args:
        run: with the numbers of its clients.
        counts: images of each class at each client, `[clients, classes]`.
        folder: where they go.
        log: told of what could not be drawn.
    """
    paths = []
    for name, draw in of_run(run, counts).items():
        try:
            paths.append(save(draw(), Path(folder) / f"{name}.png"))
        except Exception as error:
            log(f"warning: {name}.png could not be drawn ({type(error).__name__}: {error})")
    return paths


# ------------------------------------------------------------------------------- several runs


def curve(
    rounds: pd.DataFrame, x: str = "rounds", y: str = "participants", window: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """A run as two arrays, y a mean of the last `window` points; rounds without a value left out.

    >>> rounds = pd.DataFrame({"seconds": [2, 2, 3], "mean_accuracy": [0.5, None, 0.75]})
    >>> curve(rounds, x="seconds")
    (array([2., 7.]), array([50., 75.]))
    """
    parts = {"floats": ["floats_up", "floats_down"]}.get(x, [x])
    steps = np.ones(len(rounds)) if x == "rounds" else rounds[parts].sum(axis=1).to_numpy(float)
    values = rounds[Y_AXES[y][0]].to_numpy(float) * (1 if y == "loss" else 100)
    known = np.isfinite(values)
    along, values = np.cumsum(steps)[known], values[known]
    if not len(values):
        return along, values
    width = max(1, min(window, len(values)))
    return along[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid")


def _on_one_grid(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Curves as rows of one table: as they are where x is the same, else between their points."""
    shortest = min(len(along) for along, _ in found)
    first = found[0][0][:shortest]
    if all(np.array_equal(along[:shortest], first) for along, _ in found):
        return first, np.stack([values[:shortest] for _, values in found])
    start, end = max(along[0] for along, _ in found), min(along[-1] for along, _ in found)
    grid = np.linspace(start, end, 200)
    return grid, np.stack([np.interp(grid, along, values) for along, values in found])


def styles(runs: Mapping[str, Sequence[Run]]) -> dict[str, tuple[str, str]]:
    """A colour and a dash for each label: methods by colour, several of one method by dash."""
    methods = {label: found[0].config["method"] for label, found in runs.items()}
    if len(set(methods.values())) == 1 < len(methods):  # the method tells nothing apart
        dashes = itertools.cycle(itertools.product(("-", "--", ":"), COLOURS))
        return {label: (colour, dash) for label, (dash, colour) in zip(runs, dashes, strict=False)}
    found, seen = {}, []
    for label, method in methods.items():
        found[label] = method_colour(method), ("-", "--", ":", "-.")[seen.count(method) % 4]
        seen.append(method)
    return found


def curves(
    runs: Mapping[str, Sequence[Run]],
    title: str = "",
    *,
    x: str = "rounds",
    y: str = "participants",
    window: int = 1,
) -> Figure:
    """Curves of runs by label; of several under one label the mean, and a band from least to most.

    Args:
        runs: label → its runs, as `results.grouped` gives them.
        title: a heading.
        x, y: names of `X_AXES` and `Y_AXES`.
        window: how many points each point is the mean of.
    """
    figure, axes = _figure(8.0, 4.8)
    looks, ends = styles(runs), []
    for label, found in runs.items():
        colour, dash = looks[label]
        lines = [curve(run.per_round(), x, y, window) for run in found if run.records]
        lines = [line for line in lines if len(line[0])]
        if not lines:
            axes.plot([], [], dash, color=colour, label=f"{label} (no values)")
            continue
        along, table = _on_one_grid(lines)
        mean = table.mean(axis=0)
        if along[-1] == 0:  # it never sends anything: a level to compare with
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
        whole_numbers(axes.xaxis)
    elif x in ("floats", "flops"):
        if ends and max(ends) > 30 * min(ends):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter())
    smooth = f", mean of {window} points" if window > 1 else ""
    axes.set(xlabel=X_AXES[x], ylabel=Y_AXES[y][1] + smooth, title=title)
    legend_below(figure)
    return figure


def compare_runs(runs: Sequence[Run], title: str = "", window: int = 5) -> Figure:
    """Participants' mean accuracy of several methods, by round.

    Short runs are smoothed over fewer rounds than `window`, so that there is a curve left.
    """
    shortest = min((len(run.records) for run in runs), default=0)
    window = max(1, min(window, shortest // 4))
    return curves(grouped(runs, ["method"]), title, window=window)


def accuracy_by_floats(runs: Sequence[Run], title: str = "") -> Figure:
    """What methods send a client and round against what all clients reach at the end."""
    figure, axes = _figure()
    for label, found in grouped(runs, ["method"]).items():
        scores = [run.summary.final_all_clients_accuracy for run in found]
        mean, deviation = mean_and_deviation(scores)
        summary, colour = found[0].summary, method_colour(found[0].config["method"])
        if mean is None:
            continue
        floats = (summary.floats_up_per_client or 0) + (summary.floats_down_per_client or 0)
        width = None if deviation is None else 100 * deviation
        axes.errorbar(floats, 100 * mean, width, fmt="o", color=colour, markersize=7, capsize=3)
        axes.annotate(label, (floats, 100 * mean), xytext=(0, 9), textcoords="offset points",
                      ha="center", fontsize=8, color=colour)  # fmt: skip
    axes.set_xscale("symlog", linthresh=1)  # a method may send nothing
    axes.xaxis.set_major_formatter(EngFormatter())
    axes.set(xlabel="floats up and down, per client and round", title=title)
    axes.set_ylabel("test accuracy of all clients, %")
    axes.margins(x=0.12, y=0.2)
    return figure
