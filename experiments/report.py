"""Runs as one page to open, print or send: `python experiments/report.py runs/hetero_cifar10`."""

import argparse

from paper.numbers import published

from pfedafm_jax import cli
from pfedafm_jax.progress import console
from pfedafm_jax.report import write_report
from pfedafm_jax.tables import percent


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="experiments/report.py", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="folders of runs, or folders that contain some")
    add("--out", default="report.html", metavar="FILE", help="the page (default: report.html)")
    options = parser.parse_args(argv)
    for run in write_report(options.runs, options.out, published):
        score, done = run.summary.best_mean_accuracy, len(run.records)
        state = "" if run.finished else f", unfinished: {done} of {run.config['rounds']} rounds"
        best = "no rounds yet" if score is None else f"best mean of participants {percent(score)} %"
        console.print(f"{run.folder}: {run.title}, {best}{state}")
    console.print(f"  {options.out}")
    return 0


if __name__ == "__main__":
    cli.guarded(main)
