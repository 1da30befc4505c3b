"""Runs with their folders: resumed, recorded, observed, saved, drawn.

`run` is the call from Python for one run, `compare.py` has that for methods side by side. All of
them, and the commands, go through `run_all`: what `look` says of each run, then `train` for those
that are not done.
"""

import contextlib
import copy
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine import Together, can_go_together, setup_devices, together
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.methods import find_method
from pfedafm_jax.observers import Observer, replay
from pfedafm_jax.progress import Progress, bold, console, print_summary
from pfedafm_jax.results import Run, read_run
from pfedafm_jax.rounds import Log, Steps, load, steps
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Task, checkpoint_folder, look


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
        command, observers, signals: see `rounds.steps`.
    """
    start_devices(config)
    log = logger(progress)
    task = look(Task(config, None if run_dir is None else Path(run_dir)), fresh=fresh, log=log)
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    if task.state == "done":
        load(experiment, task, log)
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
    together: bool = False,
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
        together: runs of one method, which then may differ in numbers only, are one program.
        progress: show a progress bar; of a single run also its plan and its result.
        name: a name for the plan.
        command, observers, signals: see `rounds.steps`.
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
    runs: dict[int, Run] = {}
    pictures: list[Path] = []
    with Progress(sum(one.config.rounds for one in tasks), hidden=not shown) as bar:
        for group in _groups(tasks, together):
            task = tasks[group[0]]
            title = find_method(task.config.method).title
            if task.run and task.state == "done":
                bar.next_run(title, task.config.rounds, done=True)
                replay(task.run, observers)
                runs[group[0]] = task.run
                pictures = sorted(task.folder.glob("*.png")) if task.folder else []
                if shown and alone:
                    console.print(bold(task.folder), f"is finished already; {START_OVER}")
                continue
            own = [tasks[index] for index in group]
            given = [(None, None) if experiment else shares[pending.index(one)] for one in own]
            if not alone:
                bar.next_run(_heading(own, pending, title), task.config.rounds)
            current = [
                experiment or Experiment(one.config, *share)
                for one, share in zip(own, given, strict=True)
            ]
            pictures = train(
                current,
                own,
                bar,
                plan=name if alone and shown else None,
                command=command,
                observers=observers,
                signals=signals,
                log=log,
            )[0]
            for index, one in zip(group, own, strict=True):
                runs[index] = _result(current.pop(0), one.folder, drop_checkpoints)
            for one in own[1:]:
                bar.next_run(title, one.config.rounds, done=True)
            gc.collect()
            if signals and signals.received is not None and len(runs) < len(tasks):
                message = "stopped between two runs; the same command resumes"
                raise Interrupted(message, signals.received)
    if shown and alone:
        print_summary(runs[0].summary, pictures)
    return [runs[index] for index in range(len(tasks))]


def _result(experiment: Experiment, place: Path | None, drop_checkpoints: bool) -> Run:
    """What came out of a run, as its folder has it."""
    if not place or not experiment.programs.processes.first:
        return experiment.result()
    if drop_checkpoints:
        Checkpoints(checkpoint_folder(place)).clear()
    return read_run(place)


def _groups(tasks: Sequence[Task], together: bool) -> list[list[int]]:
    """Which runs are trained at the same time: those of one method, or each by itself."""
    if not together:
        return [[index] for index in range(len(tasks))]
    groups: dict[Any, list[int]] = {}
    for index, task in enumerate(tasks):
        groups.setdefault(index if task.state == "done" else task.config.method, []).append(index)
    return list(groups.values())


def _heading(own: Sequence[Task], pending: Sequence[Task], title: str) -> str:
    """What the bar says of the runs that come next."""
    if len(own) > 1:
        return f"{len(own)} of {len(pending)} runs together: {title}"
    place = own[0].folder
    where = f", {place.parent.name}/{place.name}" if place else ""
    return f"run {pending.index(own[0]) + 1} of {len(pending)}: {title}{where}"


def train(
    experiments: Sequence[Experiment],
    tasks: Sequence[Task],
    bar: Progress | None = None,
    **options: Any,
) -> list[list[Path]]:
    """Trains runs to their ends, from their last checkpoints where they have one.

    Args:
        experiments: with no round done yet; several go through one program, round by round.
        tasks: as `look` returned them.
        bar: is shown every round of the first.
        options: see `rounds.steps`.

    Returns:
        The pictures of each.
    """
    if len(experiments) > 1:
        why = can_go_together([one.programs for one in experiments])
        if why:
            raise PfedafmError(f"--together: {why}")
        for one in experiments:
            one.programs = replace(one.programs, stages=together.OWN)
    watching = options.pop("observers", ())
    runs = []
    for one, task in zip(experiments, tasks, strict=True):
        # Every run has observers of its own.
        own = [copy.copy(observer) for observer in watching] if runs else watching
        runs.append(steps(one, task, None if runs else bar, observers=own, **options))
    return _drive(experiments, runs)


def _drive(experiments: Sequence[Experiment], runs: Sequence[Steps]) -> list[list[Path]]:
    """Runs side by side to their ends, rounds of those under way together in one program."""
    pictures: dict[int, list[Path]] = {}
    active, done, stopped = list(range(len(runs))), {}, None
    group: tuple[list[int], Together] | None = None
    with contextlib.ExitStack() as closing:
        for one in runs:
            closing.callback(one.close)
        while active:
            for index in list(active):
                try:
                    runs[index].send(done.get(index))
                except StopIteration as end:
                    pictures[index] = end.value
                    active.remove(index)
                except Interrupted as error:  # the others are saved, too
                    stopped = error
            if stopped:
                raise stopped
            if len(runs) == 1 or not active:
                continue
            start = time.perf_counter()
            if group is None or group[0] != active:
                group = list(active), Together([experiments[index].programs for index in active])
                for index in active:
                    spent = (time.perf_counter() - start) / len(active)
                    experiments[index].compile_seconds += spent
                start = time.perf_counter()
            states = [experiments[index].state for index in active]
            results = group[1].run_round(states, [experiments[i].round + 1 for i in active])
            seconds = (time.perf_counter() - start) / len(active)
            done = {i: (*one, seconds) for i, one in zip(active, results, strict=True)}
    return [pictures[index] for index in range(len(runs))]


def logger(progress: bool) -> Log:
    """Where single lines go: what is fetched, and warnings."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def start_devices(config: Config) -> None:
    """One device per core, unless somebody has chosen already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
