"""Runs as one page to open, print or send: `pfedafm report runs/hetero_cifar10`."""

import argparse

from pfedafm_jax.results.page import Published, write_report
from pfedafm_jax.results.tables import percent
from pfedafm_jax.runs.progress import console


def main(argv: list[str], published: Published | None = None) -> int:
    parser = argparse.ArgumentParser("pfedafm report", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("runs", nargs="+", metavar="RUN_DIR", help="folders of runs, or folders that contain some")
    add("--out", default="report.html", metavar="FILE", help="the page (default: report.html)")
    options = parser.parse_args(argv)
    for run in write_report(options.runs, options.out, published):
        score, done = run.summary.best_mean_accuracy, len(run.records)
        state = "" if run.finished else f", unfinished: {done} of {run.config['rounds']} rounds"
        best = "no accuracy" if score is None else f"best mean of participants {percent(score)} %"
        console.print(f"{run.folder}: {run.title}, {best}{state}")
    console.print(f"  {options.out}")
    return 0
