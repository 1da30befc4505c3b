"""A run with its folder: started, watched, recorded, drawn; skipped where it is finished already."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pfedafm_jax import plots
from pfedafm_jax.config import Config
from pfedafm_jax.experiment import Experiment, Record
from pfedafm_jax.records import RunFolder, same_settings


def finished_summary(config: Config, run_dir: Path) -> dict[str, Any] | None:
    """The summary of a run that is finished with these settings."""
    summary = RunFolder(run_dir).summary()
    return summary if summary and same_settings(config, summary["config"]) else None


def title_of(config: Config, method: str) -> str:
    """A heading for plots."""
    return f"{method}, {config.dataset}, N = {config.num_clients}, C = {100 * config.participation:g} %"


def run_into(
    run_dir: Path,
    experiment: Experiment,
    command: str,
    show: Callable[[Record], None] = lambda record: None,
) -> tuple[dict[str, Any], list[Path]]:
    """Runs an experiment to its end, writing records as it goes; returns the summary and the plots."""
    folder = RunFolder(run_dir)
    folder.start(experiment, command)
    for record in experiment.rounds():
        folder.add(record)
        show(record)
    summary = folder.finish(experiment)
    title = title_of(experiment.config, experiment.federation.method.title)
    return summary, plots.draw_all(experiment, run_dir, title)
