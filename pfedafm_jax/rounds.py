"""A run with its folder, round by round: resume, record, observe, save, plot; or several runs whose
rounds share one program."""

import contextlib
import copy
import hashlib
import signal
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Machine
from pfedafm_jax.engine import Together, can_go_together, together
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.files import Log
from pfedafm_jax.observers import Observer, observed
from pfedafm_jax.progress import Progress, print_plan
from pfedafm_jax.records import RunFolder
from pfedafm_jax.settings import settings_of
from pfedafm_jax.signals import Signals
from pfedafm_jax.tasks import Task, checkpoint_folder, other_digest, refuse_others

Steps = Generator[None, Any, None]


def steps(
    experiment: Experiment,
    task: Task,
    bar: Progress | None = None,
    *,
    plan: str | None = None,
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
    log: Log = lambda line: None,
) -> Steps:
    """A run as a generator: before each round it yields, and is sent the round's result, or None to
    run the round itself.

    Args:
        experiment: before its first round.
        task: as `find_existing` returned it.
        bar: shows every round.
        plan: prints the plan first, under this name.
        command: recorded in the run's files as what started it.
        observers: called after every round of a run that has a folder, see `observers.py`.
        signals: checked at the end of each round, so that a signal saves first; without it Ctrl-C
            ends the call at once.
        log: called with single lines, such as a damaged checkpoint.
    """
    bar, signals = bar or Progress(0, hidden=True), signals or Signals()
    place, processes = task.folder, experiment.programs.processes
    mine = identity(experiment)
    _agree(experiment, mine, task.state == "again")
    if plan is not None:
        print_plan(experiment, plan, place)
    bar.compiling()
    experiment.compile()
    if place is None:
        while experiment.round < experiment.config.rounds:
            bar.show(experiment.run_round(done=(yield)))
        return
    folder, first = RunFolder(place), processes.first
    observers = observers if first else ()
    with folder.lock() if first else contextlib.nullcontext(), contextlib.ExitStack() as closing:
        checkpoints = Checkpoints(checkpoint_folder(place), mine, log, processes)
        try:
            if task.state == "again" and first:
                checkpoints.clear()
            elif task.state != "again" and resume(experiment, checkpoints):
                bar.resume(experiment.records)
            if first:
                folder.start(experiment.about(command), experiment.partition, experiment.records)
            for observer in observers:
                past = [observed(experiment, record) for record in experiment.records]
                closing.callback(observer.close)
                observer.start(place, experiment.config.as_dict(), past)
            processes.any(False)  # a barrier: no process starts before the folder is ready
            with signals.saved_at_the_end_of_a_round():
                while experiment.round < experiment.config.rounds:
                    record = experiment.run_round(done=(yield))
                    if first:
                        folder.add(record)
                        bar.show(record)
                    for observer in observers:
                        observer.round(observed(experiment, record))
                    _save_or_stop(experiment, checkpoints, signals)
            checkpoints.finish()
            if not first:
                return
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
        plots.draw_all(experiment.result(), counts, place, log)


def drive(
    experiments: Sequence[Experiment],
    tasks: Sequence[Task],
    bar: Progress | None = None,
    *,
    observers: Sequence[Observer] = (),
    **options: Any,
) -> None:
    """Trains runs to their ends, from their last checkpoints if they have any.

    Args:
        experiments: before their first round; several share one program, round by round.
        tasks: as `find_existing` returned them.
        bar: shows every round of the first.
        observers: those of the first run; the other runs get copies.
        options: see `steps`.
    """
    if len(experiments) > 1:
        if why := can_go_together([one.programs for one in experiments]):
            raise PfedafmError(f"--together: {why}")
        for one in experiments:
            one.programs = replace(one.programs, only=together.CALLED_BY_EACH_RUN)
    runs: list[tuple[Experiment, Steps]] = []
    for one, task in zip(experiments, tasks, strict=True):
        own = [copy.copy(observer) for observer in observers] if runs else observers
        shown = None if runs else bar
        runs.append((one, steps(one, task, shown, observers=own, **options)))
    done: Sequence[Any] = [None] * len(runs)
    group: Together | None = None
    with contextlib.ExitStack() as closing:
        for _, run in runs:
            closing.callback(run.close)
        while runs:
            active, stopped = [], None
            for (one, run), result in zip(runs, done, strict=True):
                try:
                    run.send(result)
                    active.append((one, run))
                except StopIteration:
                    pass  # it has all its rounds
                except Interrupted as error:  # let the others save, too
                    stopped = error
            if stopped:
                raise stopped
            if len(active) < len(runs):
                group = None  # a program for those that are left
            runs, done = active, [None] * len(active)
            if len(experiments) > 1 and runs:
                start, own = time.perf_counter(), [one for one, _ in runs]
                if group is None:
                    group = Together([one.programs for one in own])
                    for one in own:
                        one.compile_seconds += (time.perf_counter() - start) / len(own)
                    start = time.perf_counter()
                results = group.run_round([o.state for o in own], [o.round + 1 for o in own])
                seconds = (time.perf_counter() - start) / len(own)
                done = [(*result, seconds) for result in results]


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
    own = settings_of(Machine).keys() - {"checkpoint_every"}
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
        f"are in {place}/, pfedafm_jax.results.read_run reads them; {START_OVER}"
    )
