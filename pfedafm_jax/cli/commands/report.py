"""Runs as one page to open, print or send: `pfedafm report runs/hetero_cifar10`."""

from typing import TYPE_CHECKING, ClassVar

from pfedafm_jax.cli.options import CommandOptions, read_options

if TYPE_CHECKING:
    from pfedafm_jax.results.page import Published


class ReportOptions(CommandOptions):
    """What `pfedafm report` takes."""

    placeholders: ClassVar[dict[str, str]] = {"runs": "RUN_DIR"}
    positional: ClassVar[tuple[str, ...]] = ("runs",)

    runs: tuple[str, ...]
    """Folders of runs, or folders that contain some."""
    out: str = "report.html"
    """The page."""


def main(words: list[str], published: "Published | None" = None) -> int:
    """Writes the page of the runs that these words name; `published`: see `write_report`."""
    asked = read_options(words, "report", __doc__ or "", ReportOptions)

    from pfedafm_jax.base.terminal import console
    from pfedafm_jax.results.page import write_report
    from pfedafm_jax.results.tables import percent

    for run in write_report(asked.runs, asked.out, published):
        score = run.summary.best_mean_accuracy
        best = "no accuracy" if score is None else f"best mean of participants {percent(score)} %"
        line = f"{run.folder}: {run.title}, {best}"
        if not run.finished:
            line += f", unfinished: {len(run.records)} of {run.config['rounds']} rounds"
        console.print(line)
    console.print(f"  {asked.out}")
    return 0
