"""What all plots share: colours, axes, legends, plain text; used by `plots.py`."""

import io
import warnings
import zlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

BLUE, ORANGE, GREEN, GREY, BLACK = "#2f6db5", "#d9822b", "#3a9a5b", "#8a8f98", "#111111"
RED, VIOLET, TEAL, PINK, BROWN = "#b0413e", "#7b5ea7", "#5aa7a7", "#c26db0", "#8c6d31"
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, TEAL, PINK, BROWN, GREY)
METHOD_COLOURS = {
    "pfedafm": BLUE, "fedproto": ORANGE, "standalone": GREY, "fd": GREEN, "lg_fedavg": RED,
    "fml": VIOLET, "fedkd": TEAL, "fedapen": PINK, "fedper": BROWN, "fedrep": BLACK,
    "fedavg": "#5b7a1f", "fedprox": "#a3b86c", "fedgh": "#1f3a6e", "fedtgp": "#e0b23a",
    "pfedafm_released": "#7fb0e0", "fedavg_priors": "#2e8b57", "fedavg_finetuned": "#8fae1b",
    "ditto": "#b5651d",
}  # fmt: skip


class Picture(Figure):
    """A figure with literal text that notebooks show with any backend."""

    def draw(self, renderer: Any) -> None:
        for text in self.findobj(Text):
            text.set_parse_math(False)  # pyright: ignore[reportAttributeAccessIssue]
            # A path may hold bytes that are not valid text, which a font cannot draw.
            text.set_text(text.get_text().encode("utf-8", "backslashreplace").decode())
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


def panels(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` axes, each of this size in inches."""
    figure = Picture(figsize=(max(6.5, width * columns), height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.reshape(-1):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid.tolist()


def plain_figure(width: float = 7.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure of one panel."""
    figure, [[axes]] = panels(1, 1, width, height)
    return figure, axes


def whole_numbers(axis: Axis) -> None:
    """Restricts ticks to whole numbers, for rounds and clients."""
    axis.set_major_locator(MaxNLocator(integer=True))


def legend_below(figure: Figure, columns: int = 4) -> None:
    """One legend for all axes, from the first one's labels, with at most this many columns."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    fitting = int(13 * figure.get_figwidth() / (max(map(len, labels), default=0) + 7))
    for old in figure.legends:
        old.remove()
    style = {"frameon": False, "fontsize": 8, "loc": "outside lower center"}
    figure.legend(handles, labels, ncols=max(1, min(columns, fitting, len(labels))), **style)


def note(axes: Axes, text: str, place: tuple[float, float], colour: str) -> None:
    """Text above a point."""
    offset: Any = {"xytext": (0, 8), "textcoords": "offset points"}
    axes.annotate(text, place, ha="center", fontsize=9, color=colour, **offset)


def method_colour(name: str) -> str:
    """A method's colour in every plot; for unknown methods it depends on the name."""
    return METHOD_COLOURS.get(name) or COLOURS[zlib.crc32(name.encode()) % len(COLOURS)]


def architecture_label(name: str) -> str:
    """`cnn3` → `CNN-3`."""
    return f"CNN-{name[3:]}" if name.startswith("cnn") and name[3:].isdigit() else name
