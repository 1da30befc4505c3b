"""Runs as one HTML page to open, print or send: `python experiments/report.py runs/hetero_cifar10`."""

import argparse

from pfedafm_jax import cli
from pfedafm_jax.report import write_report


def main() -> int:
    parser = argparse.ArgumentParser(prog="experiments/report.py", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="folders of runs, or folders that contain some")
    parser.add_argument("--out", default="report.html", metavar="FILE", help="the page to write (default: report.html)")
    parser.add_argument(
        "--data-dir", metavar="DIR", help="the dataset, if it is not in the cache: for the label counts"
    )
    options = parser.parse_args()
    runs = write_report(options.runs, options.out, options.data_dir)
    for run in runs:
        score = run.summary["best_mean_accuracy"]
        state = "" if run.finished else f", unfinished: {len(run.records)} of {run.config.rounds} rounds"
        best = "no rounds yet" if score is None else f"best mean of participants {cli.percent(score)}"
        cli.console.print(f"{run.folder}: {run.method}, {best}{state}", markup=False)
    cli.console.print(f"  {options.out}", markup=False)
    return 0


if __name__ == "__main__":
    cli.guarded(main)
