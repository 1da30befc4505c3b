"""A whole run, and a whole comparison, as one call each; `experiments/run.py` and `compare.py` are shells over them."""

import gc
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pfedafm_jax import cli, plots
from pfedafm_jax.compare import Comparison, Run, markdown
from pfedafm_jax.config import Config, bad
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.errors import Interrupted
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.methods import chosen_methods, find_method, method_names
from pfedafm_jax.observers import Observer, replay
from pfedafm_jax.progress import Watch, console, waiting
from pfedafm_jax.records import RunFolder, read_rounds
from pfedafm_jax.runner import finished_summary, load_finished, run_into


def run(
    config: Config,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    *,
    run_dir: str | Path | None = None,
    data_dir: str | None = None,
    fresh: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
    interruption: Interruption | None = None,
    observers: Sequence[Observer] = (),
) -> Experiment:
    """A run from its first round to its last; returns the experiment with all that came out.

    Args:
        config: the settings.
        dataset: the images; by default those that the settings name.
        partition: who has which of them; by default as the settings say.
        run_dir: a folder for the run's files and checkpoints. The same call again then goes on where the last one
            stopped, and a finished run is loaded. Without it everything stays in memory.
        data_dir: where to find CIFAR, if not downloaded.
        fresh: start over even if there is a run in `run_dir`.
        progress: show the plan, a progress bar and the result.
        name: a name for the plan.
        command: noted in the run's files as what started it.
        observers: are told of every round of a run that has a folder, see `observers.py`.
        interruption: signals that are waited for at the end of each round, as the command has it; otherwise Ctrl-C
            ends the call at once.
    """
    _start_devices(config)
    log, shown = _log(progress), progress and not console.quiet
    finished = None
    if run_dir is not None:  # raises before any work if the folder cannot be used
        finished = finished_summary(config, run_dir, fresh, writes=jax.process_index() == 0)
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    pictures: list[Path] = []
    if run_dir is not None and finished:
        load_finished(run_dir, experiment, log)
        replay(run_dir, observers)
        pictures = sorted(Path(run_dir).glob("*.png"))
        if shown:
            console.print(f"[bold]{run_dir}[/bold] is finished already; fresh=True starts over")
    else:
        if shown:
            cli.print_plan(experiment, name, run_dir)
        with waiting("compiling, up to a minute the first time", hidden=not shown):
            experiment.compile()
        with Watch(config.rounds, hidden=not shown) as watch:
            if run_dir is None:
                for record in experiment.rounds():
                    watch.show(record)
            else:
                _, pictures = run_into(
                    run_dir,
                    experiment,
                    command,
                    watch.show,
                    resumed=watch.resume,
                    fresh=fresh,
                    interruption=interruption,
                    log=log,
                    observers=observers,
                )
    if shown:
        cli.print_summary(finished or experiment.summary(), pictures)
    return experiment


def compare_methods(
    config: Config,
    methods: str | Sequence[str] = "all",
    seeds: Sequence[int] | None = None,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    run_dir: str | Path | None = None,
    data_dir: str | None = None,
    fresh: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
    interruption: Interruption | None = None,
    observers: Sequence[Observer] = (),
) -> Comparison:
    """Several methods, one after the other, on the same split and the same seeds.

    Args:
        config: the settings that all have in common; a method may have a learning rate of its own.
        methods: their names, in a list or with commas between them; `all`: the paper's eight.
        seeds: by default the one of the settings; several give mean and deviation.
        dataset: the images; by default those that the settings name, for each seed.
        partition: who has which of them, whatever the seed; by default as the settings say, for each seed.
        run_dir: a folder with one for each run in it, and `compare.png`, `compare.md` and `compare.json` at the end. The
            same call again goes on where the last one stopped.

    The other arguments are those of `run`.
    """
    names, numbers = _names(methods), list(dict.fromkeys([config.seed] if seeds is None else seeds))
    if not numbers:
        raise bad("seeds", seeds, "one or more whole numbers")
    _start_devices(config)
    log, shown, first = _log(progress), progress and not console.quiet, jax.process_index() == 0
    base = None if run_dir is None else Path(run_dir)
    if base is not None and first:
        RunFolder(base).check()
    plan = [
        (replace(config, method=method, seed=seed).check(dataset), base and base / f"{method}-seed{seed}")
        for seed in numbers
        for method in names
    ]
    # All folders are looked at before the first run starts.
    finished = [folder and finished_summary(settings, folder, fresh, first) for settings, folder in plan]
    runs: list[Run] = []
    shares: dict[int, tuple[Dataset, Partition]] = {}
    with Watch(config.rounds, len(plan), hidden=not shown) as watch:
        for (settings, folder), summary in zip(plan, finished, strict=True):
            watch.next_run(find_method(settings.method).title, done=bool(summary))
            if summary and folder:
                replay(folder, observers)
                runs.append(Run(settings.method, settings.seed, summary, read_rounds(folder)))
                continue
            if settings.seed not in shares:
                images = dataset if dataset is not None else load_data(settings, data_dir, log)
                shares = {settings.seed: (images, partition if partition is not None else split(settings, images))}
            into = partial(
                run_into,
                command=command,
                resumed=watch.resume,
                fresh=fresh,
                interruption=interruption,
                log=log,
                observers=observers,
            )
            runs.append(_one(Experiment(settings, *shares[settings.seed]), folder, watch, into))
            # Every compiled program holds memory maps; those of some hundred runs in one process end in a crash in XLA.
            jax.clear_caches()
            gc.collect()
            if interruption is not None and interruption.signal_number is not None:
                raise Interrupted("stopped between two runs; the same command goes on", interruption.signal_number)
    comparison = Comparison(runs)
    if shown:
        cli.print_comparison(comparison.rows)
    if base is not None and first:
        paths = _write(comparison, base, ", ".join(part for part in (config.dataset, name) if part))
        for path in paths if shown else ():
            console.print(f"  {path}")
    return comparison


def _one(experiment: Experiment, folder: Path | None, watch: Watch, into: Callable[..., Any]) -> Run:
    """One run of a comparison, of which only the numbers are kept."""
    config = experiment.config
    experiment.compile()
    if folder is not None:
        summary, _ = into(folder, experiment, show=watch.show)
    else:
        for record in experiment.rounds():
            watch.show(record)
        summary = experiment.summary()
    return Run(config.method, config.seed, summary, experiment.records)


def _write(comparison: Comparison, folder: Path, title: str) -> list[Path]:
    rows = comparison.rows
    picture = plots.save(plots.compare_records(comparison.curves(), title), folder / "compare.png")
    (folder / "compare.json").write_text(json.dumps(rows, indent=2) + "\n")
    (folder / "compare.md").write_text(markdown(rows))
    return [picture, folder / "compare.md", folder / "compare.json"]


def _names(methods: str | Sequence[str]) -> list[str]:
    if not methods:
        raise bad("methods", methods, f"all, or some of {', '.join(method_names())}")
    return chosen_methods(methods)


def _log(progress: bool) -> Callable[[str], Any]:
    """Where single lines go: what is fetched, and warnings."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def _start_devices(config: Config) -> None:
    """One device per core, unless somebody has chosen already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
