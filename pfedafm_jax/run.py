"""One run with its folder: resumed, recorded, observed, saved, drawn.

`run` is the call from Python; `compare.py` has comparisons and any other list of runs.
"""

import contextlib
import hashlib
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.observers import Observer, latest, observations, replay
from pfedafm_jax.progress import Progress, bold, console, print_plan, print_summary
from pfedafm_jax.records import RunFolder
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Standing, Task, checkpoint_folder, look, refuse_others

Log = Callable[[str], None]


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
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
) -> Experiment:
    """A run from its first round to its last; returns the experiment with all that came out.

    Args:
        config: the settings.
        dataset: the images; by default those that the settings name.
        partition: who has which of them; by default as the settings say.
        run_dir: a folder for the run's files and checkpoints. The same call again then resumes
            where the last one stopped, and loads a finished run. Without it everything stays in
            memory.
        data_dir: where to find CIFAR, if not downloaded.
        fresh: start over even if there is a run in `run_dir`.
        progress: show the plan, a progress bar and the result.
        name: a name for the plan.
        command: noted in the run's files as what started it.
        observers: told of every round of a run that has a folder, see `observers.py`.
        signals: waited for at the end of each round, as the commands have it; otherwise Ctrl-C ends
            the call at once.
    """
    start_devices(config)
    log, shown = logger(progress), progress and not console.quiet
    task = Task(config, None if run_dir is None else Path(run_dir))
    standing = look(task, fresh=fresh, log=log)
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    if standing.state == "done":
        _load(experiment, standing, log)
        replay(standing.run, observers)
        pictures = said_finished(standing, shown, "fresh=True")
    else:
        with Progress(config.rounds, hidden=not shown) as bar:
            pictures = train(
                experiment, standing, bar,
                plan=name if shown else None, command=command, observers=observers, signals=signals, log=log,
            )  # fmt: skip
    if shown:
        print_summary(standing.run.summary if standing.run else experiment.summary(), pictures)
    return experiment


def train(
    experiment: Experiment,
    standing: Standing,
    bar: Progress | None = None,
    *,
    plan: str | None = None,
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
    log: Log = lambda line: None,
) -> list[Path]:
    """Runs an experiment to its end, from its last checkpoint if it has one; returns its pictures.

    Args:
        experiment: with no round done yet.
        standing: what `look` said of it.
        bar: is shown every round.
        plan: a name, to show the plan first.
        command, observers, signals: as in `run`.
        log: told of single lines, such as a damaged checkpoint.
    """
    bar, signals, place = (
        bar or Progress(0, hidden=True),
        signals or Signals(),
        standing.task.folder,
    )
    if plan is not None:
        print_plan(experiment, plan, place)
    bar.compiling()
    experiment.compile()
    if place is None:
        for record in experiment.rounds():
            bar.show(record)
        return []
    processes, folder = experiment.programs.processes, RunFolder(place)
    observers = observers if processes.first else ()
    with (
        folder.lock() if processes.first else contextlib.nullcontext(),
        contextlib.ExitStack() as closing,
    ):
        checkpoints = Checkpoints(checkpoint_folder(place), identity(experiment), log, processes)
        try:
            if standing.state == "again" and processes.first:
                checkpoints.clear()
            elif standing.state != "again" and resume(experiment, checkpoints):
                bar.resume(experiment.records)
            if processes.first:
                folder.start(experiment.about(command), experiment.partition, experiment.records)
            past = observations(experiment.records, experiment.client_arrays()) if observers else []
            for observer in observers:
                closing.callback(observer.close)
                observer.start(place, experiment.config.as_dict(), past)
            processes.any(False)  # nobody starts before the folder is as it should be
            with signals.saved_at_the_end_of_a_round():
                for record in experiment.rounds():
                    if processes.first:
                        folder.add(record)
                        bar.show(record)
                    for observer in observers:
                        observer.round(latest(experiment))
                    _save_or_stop(experiment, checkpoints, signals)
            checkpoints.finish()
            if not processes.first:
                return []
            summary = experiment.summary(
                checkpoint_seconds=round(checkpoints.seconds, 3),
                checkpoint_background_seconds=round(checkpoints.background_seconds, 3),
            )
            folder.finish(summary, experiment.records, experiment.client_arrays())
            for observer in observers:
                observer.finish(summary)
        except OSError as error:
            raise storage_error(f"the files of {place}", place, error) from error
        finally:
            checkpoints.close()
        dataset = experiment.dataset
        counts = experiment.partition.class_counts(dataset.labels, dataset.num_classes)
        return plots.draw_all(experiment.result(), counts, place, log)


def _save_or_stop(experiment: Experiment, checkpoints: Checkpoints, signals: Signals) -> None:
    """After a round: saves it where one is due, and raises `Interrupted` where a signal came."""
    config, processes, number = experiment.config, experiment.programs.processes, experiment.round
    stopped = signals.received is not None
    if processes.count > 1:  # a signal to one process is meant for all
        stopped = processes.any(stopped)
    every = config.checkpoint_every
    if every and (number % every == 0 or number == config.rounds or stopped):
        save(experiment, checkpoints)
    checkpoints.check()
    if stopped and number < config.rounds:
        checkpoints.wait()
        kept = f"saved in {checkpoints.folder}" if every else "not saved (checkpoint_every = 0)"
        raise Interrupted(
            f"stopped after round {number} of {config.rounds}, {kept}; the same command resumes",
            signals.received or signal.SIGTERM,
        )


def _load(experiment: Experiment, standing: Standing, log: Log) -> None:
    """Puts an experiment where a finished run left it: records, clients and server."""
    place = standing.task.folder or Path()
    processes = experiment.programs.processes
    checkpoints = Checkpoints(checkpoint_folder(place), identity(experiment), log, processes)
    try:
        loaded = resume(experiment, checkpoints) and experiment.round == experiment.config.rounds
    finally:
        checkpoints.close()
    if not loaded:
        raise PfedafmError(
            f"{place} is finished, and there is no checkpoint of its last round to load; its numbers "
            f"are in {place}/, pfedafm_jax.results.read_run reads them; {START_OVER}"
        )


def said_finished(standing: Standing, shown: bool, again: str) -> list[Path]:
    """Says that there is nothing to do; returns the pictures that are there."""
    place = standing.task.folder or Path()
    if shown:
        console.print(bold(place), f"is finished already; {again} starts over")
    return sorted(place.glob("*.png"))


def identity(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint must have in common with a run that is resumed from it."""
    digest = hashlib.sha256()
    partition = experiment.partition
    for rows in (*partition.train, *partition.test, *partition.validation):
        digest.update(f"{len(rows)} ".encode())
        digest.update(np.ascontiguousarray(rows, np.int32).tobytes())
    data, parts = experiment.dataset.digest, digest.hexdigest()
    return {"config": experiment.config.as_dict(), "data": data, "split": parts}


def save(experiment: Experiment, checkpoints: Checkpoints) -> None:
    """Saves an experiment as it stands after its last round, in the background."""
    details, arrays = experiment.history()
    score = experiment.records[-1].mean_accuracy
    checkpoints.save(experiment.round, experiment.state, arrays, details, score)


def resume(experiment: Experiment, checkpoints: Checkpoints) -> bool:
    """Puts a new experiment where its newest good checkpoint was; False: there is none."""
    mine = identity(experiment)
    for manifest in checkpoints.manifests().values():
        other = [what for what in ("data", "split") if manifest[what] != mine[what]]
        refuse_others(
            checkpoints.folder,
            [f"{one}: sha256 {manifest[one][:16]}… → {mine[one][:16]}…" for one in other],
        )
    saved, processes = checkpoints.load(experiment.state), experiment.programs.processes
    if processes.count > 1:
        processes.any(False)  # all have read what they need
        checkpoints.clean()  # half-written folders: one of them could be taken for a new one
    if saved is None:
        return False
    experiment.state = saved.state
    experiment.resume(saved.details, saved.arrays)
    return True


def logger(progress: bool) -> Log:
    """Where single lines go: what is fetched, and warnings."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def start_devices(config: Config) -> None:
    """One device per core, unless somebody has chosen already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
