"""One or several runs as a page that can be opened anywhere and sent: `write_report(["runs/a", "runs/b"], "report.html")`."""

from collections.abc import Sequence
from pathlib import Path

from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.errors import PfedafmError, storage_error
from pfedafm_jax.report.page import report
from pfedafm_jax.report.read import Run, find_runs, read_run

__all__ = ["Run", "find_runs", "read_run", "report", "write_report"]


def write_report(
    folders: Sequence[str | Path], out: str | Path = "report.html", data_dir: str | None = None
) -> list[Run]:
    """Writes the report of these run folders to one HTML file; returns the runs that it shows.

    `data_dir` is where the dataset is, if not in the cache: the label counts are drawn from it.
    """
    target = Path(out)
    if target.suffix.lower() not in (".html", ".htm") or target.is_dir():
        raise PfedafmError(f"out = {str(out)!r} cannot be used; accepted: the name of a file that ends in .html")
    if data_dir is not None and not Path(data_dir).expanduser().exists():
        raise PfedafmError(f"data_dir = {data_dir!r} cannot be used; accepted: a folder or archive with the dataset")
    runs = [read_run(folder) for folder in find_runs([Path(folder) for folder in folders])]
    text = report(runs, data_dir)
    try:
        write_atomically(target, lambda file: file.write(text.encode("utf-8", "replace")))
    except OSError as error:
        raise storage_error(f"the report {target}", target.parent, error) from error
    return runs
