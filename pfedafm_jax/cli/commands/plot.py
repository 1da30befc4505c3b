"""Plots runs together: `pfedafm plot runs/hetero_cifar10 runs/other`."""

import argparse
from pathlib import Path

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import check_writable
from pfedafm_jax.results import plots
from pfedafm_jax.results.run import differing, read_runs
from pfedafm_jax.results.select import grouped, labels
from pfedafm_jax.results.tables import COLUMNS, cells, means
from pfedafm_jax.runs.progress import console, print_table

FORMATS = (".png", ".pdf", ".svg")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("pfedafm plot", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="folders of runs, or folders with such in them")
    add("--x", default="rounds", choices=plots.X_AXES, help="what to draw against (rounds)")
    usual = "what to draw (the mean accuracy of a round's participants)"
    add("--y", default="participants", choices=plots.Y_AXES, help=usual)
    add("--smooth", type=int, default=1, metavar="K", help="each point a mean of the last K")
    group = "runs that agree in these settings as one: mean, and a band from least to most"
    add("--group", default="", metavar="SETTING,…", help=group)
    add("--title", default="", help="a heading")
    add("--out", type=Path, default=Path("plot.png"), metavar="FILE", help="PNG, PDF or SVG")
    asked = parser.parse_args(argv)
    if asked.smooth < 1:
        raise bad("smooth", asked.smooth, "1 or more")
    fine = asked.out.absolute().parent.is_dir() and not asked.out.is_dir()
    if asked.out.suffix.lower() not in FORMATS or not fine:
        accepted = f"a file in a folder that exists, its name ending in {', '.join(FORMATS)}"
        raise bad("out", str(asked.out), accepted)
    check_writable(asked.out.absolute().parent, "out")
    return asked


def main(argv: list[str]) -> int:
    asked = parse(argv)
    runs = read_runs(asked.runs)
    for run in runs:
        if not run.records:
            raise PfedafmError(f"{str(run.folder)!r} has no finished round; nothing to draw yet")
    sets = {label: [run] for label, run in zip(labels(runs), runs, strict=True)}
    if asked.group:
        sets = grouped(runs, asked.group.split(","))
    for label, members in sets.items():
        mixed = [name for name in differing(members) if name != "seed"]
        mixed += ["rounds"] if len({len(run.records) for run in members}) > 1 else []
        if mixed:
            words = f"{label}: a mean over runs that also differ in {', '.join(mixed)}"
            console.print(words, style="yellow")
    drawn = {f"{one}, {len(own)} runs" if own[1:] else one: own for one, own in sets.items()}
    accuracies = slice(4)  # costs need more than a terminal's width
    rows = [row[accuracies] for row in cells(means(drawn))]
    print_table(["", *COLUMNS.values()][accuracies], rows)
    figure = plots.curves(drawn, asked.title, x=asked.x, y=asked.y, window=asked.smooth)
    console.print(f"  {plots.save(figure, asked.out)}")
    return 0
