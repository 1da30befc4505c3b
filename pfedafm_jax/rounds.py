"""One run with its folder, round by round: resumed, recorded, observed, saved, drawn."""

import contextlib
import hashlib
import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.observers import Observer, latest, observations
from pfedafm_jax.progress import Progress, print_plan
from pfedafm_jax.records import RunFolder
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Task, checkpoint_folder, refuse_others

Log = Callable[[str], None]
Steps = Generator[None, Any, list[Path]]


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
    """A run as a generator: it asks for a round, and is sent what came of it, or None to run it.

    Args:
        experiment: with no round done yet.
        task: as `look` returned it.
        bar: is shown every round.
        plan: a name, to show the plan first.
        command: noted in the run's files as what started it.
        observers: told of every round of a run that has a folder, see `observers.py`.
        signals: waited for at the end of each round, as the commands have it; otherwise Ctrl-C ends
            the call at once.
        log: told of single lines, such as a damaged checkpoint.

    Returns:
        Its pictures.
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
        return []
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
            past = observations(experiment.records, experiment.client_arrays()) if observers else []
            for observer in observers:
                closing.callback(observer.close)
                observer.start(place, experiment.config.as_dict(), past)
            processes.any(False)  # nobody starts before the folder is as it should be
            with signals.saved_at_the_end_of_a_round():
                while experiment.round < experiment.config.rounds:
                    record = experiment.run_round(done=(yield))
                    if first:
                        folder.add(record)
                        bar.show(record)
                    for observer in observers:
                        observer.round(latest(experiment))
                    _save_or_stop(experiment, checkpoints, signals)
            checkpoints.finish()
            if not first:
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
    """Raises where the processes of a run would not do the same."""
    own = {
        "devices",
        "layout",
        "clients_per_step",
        "backend",
        "kernels",
        "store",
    }  # each process's own business
    values = {name: value for name, value in mine["config"].items() if name not in own}
    values["its settings"] = values.pop(experiment.config.method)
    values |= {"data": mine["data"], "split": mine["split"], "fresh": fresh}
    experiment.programs.processes.agree(values)


def identity(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint must have in common with a run that is resumed from it."""
    digest, partition = hashlib.sha256(), experiment.partition
    for rows in (*partition.train, *partition.test, *partition.validation):
        digest.update(f"{len(rows)} ".encode())
        digest.update(np.ascontiguousarray(rows, np.int32).tobytes())
    data, parts = experiment.dataset.digest, digest.hexdigest()
    return {"config": experiment.config.as_dict(), "data": data, "split": parts}


def resume(experiment: Experiment, checkpoints: Checkpoints) -> bool:
    """Puts a new experiment where its newest good checkpoint was; False: there is none."""
    mine, processes = checkpoints.identity, experiment.programs.processes
    for manifest in checkpoints.manifests().values():
        other = [what for what in ("data", "split") if manifest[what] != mine[what]]
        words = [f"{one}: sha256 {manifest[one][:16]}… → {mine[one][:16]}…" for one in other]
        refuse_others(checkpoints.folder, words)
    saved = checkpoints.load(experiment.state)
    if processes.count > 1:
        processes.any(False)  # all have read what they need
        checkpoints.clean()  # half-written folders: one of them could be taken for a new one
    if saved is None:
        return False
    experiment.state = saved.state
    experiment.resume(saved.details, saved.arrays)
    return True


def load(experiment: Experiment, task: Task, log: Log) -> None:
    """Puts an experiment where a finished run left it: records, clients and server."""
    place, processes = task.folder or Path(), experiment.programs.processes
    checkpoints = Checkpoints(checkpoint_folder(place), identity(experiment), log, processes)
    with contextlib.closing(checkpoints):
        if resume(experiment, checkpoints) and experiment.round == experiment.config.rounds:
            return
    raise PfedafmError(
        f"{place} is finished, and there is no checkpoint of its last round to load; its numbers "
        f"are in {place}/, pfedafm_jax.results.read_run reads them; {START_OVER}"
    )
