"""A run with its folder, round by round: resume, record, observe, save, plot."""

import contextlib
import hashlib
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.base.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.base.files import Log
from pfedafm_jax.config.config import Machine
from pfedafm_jax.results import plots
from pfedafm_jax.results.records import RunFolder
from pfedafm_jax.runs.checkpoints import Checkpoints
from pfedafm_jax.runs.existing import Task, checkpoint_folder, other_digest, refuse_others
from pfedafm_jax.runs.experiment import Experiment
from pfedafm_jax.runs.observers import Observer, observed
from pfedafm_jax.runs.progress import Progress, print_plan
from pfedafm_jax.runs.signals import Signals


def train(
    experiment: Experiment,
    task: Task,
    bar: Progress | None = None,
    *,
    plan: str | None = None,
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
    log: Log = lambda line: None,
) -> None:
    """Trains a run to its end, from its last checkpoint if it has one.

    Args:
        experiment: before its first round.
        task: as `find_existing` returned it; without a folder the run stays in memory.
        bar: shows every round.
        plan: prints the plan first, under this name.
        command: recorded in the run's files as what started it.
        observers: called after every round of a run that has a folder, see `observers.py`.
        signals: checked at the end of each round, so that a signal saves first; without it Ctrl-C
            ends the call at once.
        log: called with single lines, such as a damaged checkpoint.
    """
    bar = bar or Progress(0, hidden=True)
    signals = signals or Signals()
    run_identity = identity(experiment)
    _agree(experiment, run_identity, task.state == "again")
    if plan is not None:
        print_plan(experiment, plan, task.folder)
    bar.compiling()
    experiment.compile()
    if task.folder is None:
        while experiment.round < experiment.config.rounds:
            bar.show(experiment.run_round())
        return
    processes = experiment.programs.processes
    checkpoints = Checkpoints(checkpoint_folder(task.folder), run_identity, log, processes)
    if not processes.first:
        _train_in_folder(experiment, task, bar, checkpoints, "", (), signals)
        return
    with RunFolder(task.folder).lock():
        _train_in_folder(experiment, task, bar, checkpoints, command, observers, signals)


def _train_in_folder(
    experiment: Experiment,
    task: Task,
    bar: Progress,
    checkpoints: Checkpoints,
    command: str,
    observers: Sequence[Observer],
    signals: Signals,
) -> None:
    """Resumes, trains, records, observes, saves and plots; of several processes only the first one
    records and plots."""
    assert task.folder is not None
    folder = RunFolder(task.folder)
    processes = experiment.programs.processes
    with contextlib.ExitStack() as closing:
        try:
            if task.state == "again":
                if processes.first:
                    checkpoints.clear()
            elif resume(experiment, checkpoints):
                bar.resume(experiment.records)
            if processes.first:
                folder.start(experiment.about(command), experiment.partition, experiment.records)
            for observer in observers:
                past = [observed(experiment, record) for record in experiment.records]
                closing.callback(observer.close)
                observer.start(task.folder, experiment.config.as_dict(), past)
            processes.any(False)  # a barrier: no process starts before the folder is ready
            with signals.saved_at_the_end_of_a_round():
                while experiment.round < experiment.config.rounds:
                    record = experiment.run_round()
                    if processes.first:
                        folder.add(record)
                        bar.show(record)
                    for observer in observers:
                        observer.round(observed(experiment, record))
                    _save_or_stop(experiment, checkpoints, signals)
            checkpoints.finish()
            if processes.first:
                summary = experiment.summary(
                    checkpoint_seconds=round(checkpoints.seconds, 3),
                    checkpoint_background_seconds=round(checkpoints.background_seconds, 3),
                )
                folder.finish(summary, experiment.records, experiment.client_arrays())
                for observer in observers:
                    observer.finish(summary)
        except OSError as error:
            raise storage_error(f"the files of {task.folder}", task.folder, error) from error
        finally:
            checkpoints.close()
        if processes.first:
            dataset = experiment.dataset
            counts = experiment.partition.class_counts(dataset.labels, dataset.num_classes)
            plots.draw_all(experiment.result(), counts, task.folder, checkpoints.log)


def _save_or_stop(experiment: Experiment, checkpoints: Checkpoints, signals: Signals) -> None:
    """After a round: saves if a checkpoint is due, and raises `Interrupted` if a signal arrived."""
    config, processes, number = experiment.config, experiment.programs.processes, experiment.round
    stopped = signals.received is not None
    if processes.count > 1:  # a signal to one process is meant for all
        stopped = processes.any(stopped)
    every = config.checkpoint_every
    if every and (number % every == 0 or number == config.rounds or stopped):
        details, arrays = experiment.history()
        score = experiment.records[-1].mean_accuracy
        checkpoints.save(number, experiment.state, arrays, details, score)
    checkpoints.check()
    if stopped and number < config.rounds:
        checkpoints.wait()
        kept = f"saved in {checkpoints.folder}; the same command resumes"
        if not every:
            kept = "not saved (checkpoint_every = 0); the same command starts over"
        words = f"stopped after round {number} of {config.rounds}, {kept}"
        raise Interrupted(words, signals.received or signal.SIGTERM)


def _agree(experiment: Experiment, mine: Mapping[str, Any], fresh: bool) -> None:
    """Raises if the processes of a run differ in settings or data."""
    # Processes may differ in settings of the machine, but all must save in the same rounds.
    own = Machine.model_fields.keys() - {"checkpoint_every"}
    values = {name: value for name, value in mine["config"].items() if name not in own}
    values["its settings"] = values.pop(experiment.config.method)
    values |= {"data": mine["data"], "split": mine["split"], "fresh": fresh}
    experiment.programs.processes.agree(values)


def identity(experiment: Experiment) -> dict[str, Any]:
    """What must be equal between a checkpoint and the run that resumes from it."""
    digest, partition = hashlib.sha256(), experiment.partition
    for rows in (*partition.train, *partition.test, *partition.validation):
        digest.update(f"{len(rows)} ".encode())
        digest.update(np.ascontiguousarray(rows, np.int32).tobytes())
    data, parts = experiment.dataset.digest, digest.hexdigest()
    return {"config": experiment.config.as_dict(), "data": data, "split": parts}


def resume(experiment: Experiment, checkpoints: Checkpoints) -> bool:
    """Restores an experiment from its newest valid checkpoint; False if there is none."""
    mine, processes = checkpoints.identity, experiment.programs.processes
    for manifest in checkpoints.manifests().values():
        for what in ("data", "split"):
            refuse_others(checkpoints.folder, other_digest(what, manifest[what], mine[what]))
    saved = checkpoints.load(experiment.state)
    if processes.count > 1:
        processes.any(False)  # a barrier: all have read what they need
        checkpoints.clean()  # partial folders: one could be mistaken for a new one
    if saved is None:
        return False
    experiment.state, details, arrays = saved
    experiment.resume(details, arrays)
    return True


def load(experiment: Experiment, task: Task, log: Log) -> None:
    """Restores an experiment from a finished run: records, clients and server."""
    place, processes = task.folder or Path(), experiment.programs.processes
    checkpoints = Checkpoints(checkpoint_folder(place), identity(experiment), log, processes)
    with contextlib.closing(checkpoints):
        if resume(experiment, checkpoints) and experiment.round == experiment.config.rounds:
            return
    raise PfedafmError(
        f"{place} is finished, and there is no checkpoint of its last round to load; its numbers "
        f"are in {place}/, pfedafm_jax.results.run.read_run reads them; {START_OVER}"
    )
