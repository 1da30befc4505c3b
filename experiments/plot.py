"""Runs in one picture: `python experiments/plot.py runs/hetero_cifar10 runs/other`."""

import argparse
import sys
from pathlib import Path

from rich.table import Table

from pfedafm_jax import cli, plots
from pfedafm_jax.config import bad
from pfedafm_jax.saved_runs import differing, grouped, labels, read_runs

FORMATS = (".png", ".pdf", ".svg")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="experiments/plot.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "runs", nargs="+", metavar="RUN_DIR", help="folders of runs, or folders with such folders in them"
    )
    parser.add_argument("--x", default="rounds", choices=plots.X_AXES, help="what to draw against (default: rounds)")
    parser.add_argument("--y", default="participants", choices=plots.Y_AXES,
                        help="what to draw (default: the mean accuracy of a round's participants)")  # fmt: skip
    parser.add_argument("--smooth", type=int, default=1, metavar="K", help="each point a mean of the last K")
    parser.add_argument("--group", default="", metavar="SETTING,…",
                        help="runs that agree in these settings as one: mean, and a band from the least to the most")  # fmt: skip
    parser.add_argument("--title", default="", help="a heading")
    parser.add_argument("--out", type=Path, default=Path("plot.png"), metavar="FILE", help="PNG, PDF or SVG (plot.png)")
    asked = parser.parse_args(argv)
    if asked.smooth < 1:
        raise bad("smooth", asked.smooth, "1 or more")
    if asked.out.suffix.lower() not in FORMATS or not asked.out.absolute().parent.is_dir():
        raise bad("out", str(asked.out), f"a file in a folder that exists, its name ending in {', '.join(FORMATS)}")
    return asked


def main() -> int:
    asked = parse(sys.argv[1:])
    runs = read_runs(asked.runs)
    if asked.group:
        sets = grouped(runs, asked.group.split(","))
    else:
        sets = {label: [run] for label, run in zip(labels(runs), runs, strict=True)}
    table = Table(box=None, pad_edge=False)
    table.add_column(style="bold")
    for column in ("rounds", "best", "last", "all clients"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column(style="dim")
    for label, members in sets.items():
        for run, name in zip(members, [label, *[""] * len(members)], strict=False):
            means = [row["mean_accuracy"] for row in run.records if row["mean_accuracy"] is not None]
            everyone = [row["all_clients_accuracy"] for row in run.records if row["all_clients_accuracy"] is not None]
            shown = (cli.percent(f(v) if v else None) for f, v in ((max, means), (_last, means), (_last, everyone)))
            table.add_row(name, str(len(run.records)), *shown, str(run.folder))
        mixed = [name for name in differing(members) if name != "seed"]
        if mixed:
            cli.console.print(f"{label}: a mean over runs that also differ in {', '.join(mixed)}", style="yellow")
    cli.console.print(table)
    drawn = {f"{label}, {len(runs)} runs" if len(runs) > 1 else label: runs for label, runs in sets.items()}
    figure = plots.curves(
        {label: [run.records for run in runs] for label, runs in drawn.items()},
        asked.title,
        x=asked.x,
        y=asked.y,
        window=asked.smooth,
    )
    cli.console.print(f"  {plots.save(figure, asked.out)}")
    return 0


def _last(values: list[float]) -> float:
    return values[-1]


if __name__ == "__main__":
    cli.guarded(main)
