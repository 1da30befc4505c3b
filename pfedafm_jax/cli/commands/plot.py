"""Plots runs together: `pfedafm plot runs/hetero_cifar10 runs/other`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.cli.options import CommandOptions, read_options

FORMATS = (".png", ".pdf", ".svg")
PLACEHOLDERS = {"runs": "RUN_DIR", "group": "SETTING,…", "title": "TEXT"}


class PlotOptions(CommandOptions):
    """What `pfedafm plot` takes."""

    placeholders: ClassVar[dict[str, str]] = PLACEHOLDERS
    positional: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...]
    """Folders of runs, or folders with such in them."""
    x: Literal["rounds", "seconds", "floats", "flops"] = "rounds"
    """What to draw against: rounds, seconds, floats or flops."""
    y: Literal["participants", "all_clients", "loss"] = "participants"
    """What to draw: participants, all_clients or loss. participants: the mean accuracy of a round's
    participants."""
    smooth: Annotated[int, Ge(1)] = 1
    """Each point is a mean of this many."""
    group: tuple[str, ...] = ()
    """Runs that agree in these settings as one: mean, and a band from least to most."""
    title: str = ""
    """A heading."""
    out: str = "plot.png"
    """The file: PNG, PDF or SVG."""


def read(words: list[str]) -> PlotOptions:
    """The options of these words, checked as far as one can before the runs are read."""
    asked = read_options(words, "plot", __doc__ or "", PlotOptions)

    from pfedafm_jax.base.files import check_writable

    out = Path(asked.out)
    folder = out.absolute().parent
    if out.suffix.lower() not in FORMATS or out.is_dir() or not folder.is_dir():
        accepted = f"a file in a folder that exists, its name ending in {', '.join(FORMATS)}"
        raise bad("out", asked.out, accepted)
    check_writable(folder, "out")
    return asked


def main(words: list[str]) -> int:
    """Draws the runs that these words name, and prints their accuracies."""
    asked = read(words)

    from pfedafm_jax.base.terminal import console
    from pfedafm_jax.results import plots
    from pfedafm_jax.results.run import differing, read_runs
    from pfedafm_jax.results.select import grouped, labels
    from pfedafm_jax.results.tables import COLUMNS, cells, means
    from pfedafm_jax.runs.progress import print_table

    runs = read_runs(asked.runs)
    for run in runs:
        if not run.records:
            raise PfedafmError(f"{str(run.folder)!r} has no finished round; nothing to draw yet")
    sets = {label: [run] for label, run in zip(labels(runs), runs, strict=True)}
    if asked.group:
        sets = grouped(runs, asked.group)
    for label, members in sets.items():
        mixed = [name for name in differing(members) if name != "seed"]
        if len({len(run.records) for run in members}) > 1:
            mixed.append("rounds")
        if mixed:
            warning = f"{label}: a mean over runs that also differ in {', '.join(mixed)}"
            console.print(warning, style="yellow")
    drawn = {}
    for label, members in sets.items():
        name = f"{label}, {len(members)} runs" if len(members) > 1 else label
        drawn[name] = members
    accuracies = slice(4)  # costs need more than a terminal's width
    rows = [row[accuracies] for row in cells(means(drawn))]
    print_table(["", *COLUMNS.values()][accuracies], rows)
    figure = plots.curves(drawn, asked.title, x=asked.x, y=asked.y, window=asked.smooth)
    console.print(f"  {plots.save(figure, Path(asked.out))}")
    return 0
