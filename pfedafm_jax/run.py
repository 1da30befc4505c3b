"""Runs with their folders: resumed, recorded, observed, saved, drawn.

`run` is the call from Python for one run, `compare.py` has that for methods side by side. All of
them, and the commands, go through `run_all`: what `look` says of each run, then `train` for those
that are not done.
"""

import contextlib
import gc
import hashlib
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
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
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.methods import find_method
from pfedafm_jax.observers import Observer, latest, observations, replay
from pfedafm_jax.progress import Progress, bold, console, print_plan, print_summary
from pfedafm_jax.records import RunFolder
from pfedafm_jax.results import Run, read_run
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Task, checkpoint_folder, look, refuse_others

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
        command, observers, signals: see `train`.
    """
    start_devices(config)
    log = logger(progress)
    task = look(Task(config, None if run_dir is None else Path(run_dir)), fresh=fresh, log=log)
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    if task.state == "done":
        _load(experiment, task, log)
    run_all(
        [task],
        experiment=experiment,
        progress=progress,
        name=name,
        command=command,
        observers=observers,
        signals=signals,
    )
    return experiment


def run_all(
    tasks: Sequence[Task],
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    split_of: Callable[[Config, Dataset], Partition] = split,
    experiment: Experiment | None = None,
    data_dir: str | None = None,
    drop_checkpoints: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
) -> list[Run]:
    """Many runs one after another, those that are done left alone; what came out, in their order.

    Datasets are loaded and split before the first run starts, so that what cannot work fails at
    once.

    Args:
        tasks: as `look` returned them.
        dataset, partition: the same for all; by default as each one's settings say.
        split_of: makes the partition of a run.
        experiment: that of the only run, where it has been made already.
        data_dir: where to find CIFAR, if not downloaded.
        drop_checkpoints: remove those of a run when it is finished.
        progress: show a progress bar; of a single run also its plan and its result.
        name: a name for the plan.
        command, observers, signals: see `train`.
    """
    if not tasks:
        return []
    pending = [task for task in tasks if task.state != "done"]
    log, shown, alone = logger(progress), progress and not console.quiet, len(tasks) == 1
    start_devices(tasks[0].config)
    data: dict[tuple[object, ...], Dataset] = {}
    shares: list[tuple[Dataset, Partition]] = []
    for config in () if experiment else (task.config for task in pending):
        key: tuple[object, ...] = (config.dataset, config.image_size)
        if config.dataset == "synthetic":
            key = (config.synthetic_classes, config.synthetic_samples, config.seed)
        if dataset is None and key not in data:
            data[key] = load_data(config, data_dir, log)
        images = data[key] if dataset is None else dataset
        shares.append((images, split_of(config, images) if partition is None else partition))
    runs: list[Run] = []
    pictures: list[Path] = []
    todo = iter(enumerate(shares, 1))
    with Progress(sum(one.config.rounds for one in tasks), hidden=not shown) as bar:
        for task in tasks:
            config, place = task.config, task.folder
            title = find_method(config.method).title
            if task.run and task.state == "done":
                bar.next_run(title, config.rounds, done=True)
                replay(task.run, observers)
                runs.append(task.run)
                pictures = sorted(place.glob("*.png")) if place else []
                if shown and alone:
                    console.print(bold(place), f"is finished already; {START_OVER}")
                continue
            number, (images, share) = (1, (None, None)) if experiment else next(todo)
            if not alone:
                where = f", {place.parent.name}/{place.name}" if place else ""
                bar.next_run(f"run {number} of {len(pending)}: {title}{where}", config.rounds)
            current = experiment or Experiment(config, images, share)
            pictures = train(
                current,
                task,
                bar,
                plan=name if alone and shown else None,
                command=command,
                observers=observers,
                signals=signals,
                log=log,
            )
            first = current.programs.processes.first
            runs.append(read_run(place) if place and first else current.result())
            if place and drop_checkpoints and first:
                Checkpoints(checkpoint_folder(place)).clear()
            del current
            gc.collect()
            if signals and signals.received is not None and len(runs) < len(tasks):
                message = "stopped between two runs; the same command resumes"
                raise Interrupted(message, signals.received)
    if shown and alone:
        print_summary(runs[0].summary, pictures)
    return runs


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
) -> list[Path]:
    """Runs an experiment to its end, from its last checkpoint if it has one; returns its pictures.

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
            bar.show(experiment.run_round())
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
                    record = experiment.run_round()
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


def _load(experiment: Experiment, task: Task, log: Log) -> None:
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


def logger(progress: bool) -> Log:
    """Where single lines go: what is fetched, and warnings."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def start_devices(config: Config) -> None:
    """One device per core, unless somebody has chosen already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
