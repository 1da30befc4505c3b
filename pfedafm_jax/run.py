"""Runs with their folders: one (`run`), methods side by side (`compare`), or any list (`run_all`).

`look` says once what there is to do, `train` does it: resumed from the last checkpoint, recorded,
observed, saved, drawn. The commands in `experiments/` are shells over these.
"""

import contextlib
import gc
import hashlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.files import write_atomically
from pfedafm_jax.methods import chosen_methods, find_method, method_names
from pfedafm_jax.models import describe
from pfedafm_jax.observers import Observer, latest, observations, replay
from pfedafm_jax.progress import (
    Progress,
    bold,
    console,
    in_words,
    print_comparison,
    print_plan,
    print_summary,
    waiting,
)  # fmt: skip
from pfedafm_jax.records import RunFolder, check_writable, differences, refuse_other_settings
from pfedafm_jax.results import Damaged, Run, read_run
from pfedafm_jax.settings import bad
from pfedafm_jax.signals import Signals
from pfedafm_jax.tables import COLUMNS, cells, markdown, over_seeds

Log = Callable[[str], None]


# -------------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Task:
    """A run to be done; without a folder everything stays in memory."""

    config: Config
    folder: Path | None = None


@dataclass(frozen=True)
class Standing:
    """A task as its folder shows it. `again`: it starts over, whatever is there."""

    task: Task
    state: Literal["new", "started", "done", "again"] = "new"
    rounds_done: int = 0
    run: Run | None = None  # what can be read there


def checkpoint_folder(run_dir: str | Path) -> Path:
    """Where a run's checkpoints are: `checkpoints/NAME` for `runs/NAME` where there is such a folder
    beside `runs`, as in this repository; else `checkpoints` in the run's own folder."""
    place = Path(run_dir).absolute()
    if not (place / "checkpoints").is_dir():
        for parent in place.parents:
            if parent.name == "runs" and (parent.parent / "checkpoints").is_dir():
                return parent.parent / "checkpoints" / place.relative_to(parent)
    return place / "checkpoints"


def look(task: Task, *, fresh: bool = False, longer: bool = False, log: Log = console.print) -> Standing:
    """What there is to do of a task; raises before any work where its folder cannot be used.

    Args:
        task: the run and its folder.
        fresh: start over, whatever is there.
        longer: a run that was started with more rounds than asked counts as this one, and one that
            cannot be made longer starts over; otherwise both are refused.
        log: told of damaged files that a checkpoint makes up for.
    """
    if task.folder is None:
        return Standing(task)
    place, config = task.folder, task.config
    saved = {} if fresh else Checkpoints(checkpoint_folder(place)).manifests()
    run = None if fresh else _read(place, bool(saved), log)
    stored = [run.config] if run else []
    stored += [manifest["config"] for manifest in saved.values()]
    started = stored[0]["rounds"] if stored else 0
    for settings in stored:
        same = replace(config, rounds=started) if longer else config
        refuse_other_settings(place, differences(settings, same))
    if longer:
        config = replace(config, rounds=max(config.rounds, started))
    standing = partial(Standing, Task(config, place), rounds_done=max(saved, default=0), run=run)
    finished = run.summary.rounds if run and run.finished else 0
    if finished == config.rounds:
        return standing("done", rounds_done=finished)
    if max(finished, *saved, 0) > config.rounds:
        done = max(finished, *saved)
        raise bad(
            "rounds",
            config.rounds,
            f"{done} or more, since {place} has done {done} already ({START_OVER}, another --run-dir "
            "leaves it as it is)",
        )
    if finished and not saved and not longer:
        raise PfedafmError(
            f"{place} is finished after {finished} rounds and has no checkpoint to resume from; "
            f"{START_OVER}, another --run-dir leaves it as it is"
        )
    if jax.process_index() == 0:  # the one that writes
        RunFolder(place).check()
        check_writable(checkpoint_folder(place))
    if fresh or (finished and not saved) or any(differences(one, config) for one in stored):
        return standing("again", rounds_done=0)
    return standing("started" if saved else "new")


def _read(place: Path, saved: bool, log: Log) -> Run | None:
    """The run in a folder; None where there is none, or a damaged one that checkpoints make up for."""
    if not (place / "config.json").exists():
        return None
    try:
        run = read_run(place)
        _ = run.finished and (run.clients, run.partition)  # as good as said
    except Damaged as error:
        if not saved:
            raise
        log(f"warning: {error}")
        return None
    return run


# -------------------------------------------------------------------------------- one run


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
        run_dir: a folder for the run's files and checkpoints. The same call again then resumes where
            the last one stopped, and loads a finished run. Without it everything stays in memory.
        data_dir: where to find CIFAR, if not downloaded.
        fresh: start over even if there is a run in `run_dir`.
        progress: show the plan, a progress bar and the result.
        name: a name for the plan.
        command: noted in the run's files as what started it.
        observers: told of every round of a run that has a folder, see `observers.py`.
        signals: waited for at the end of each round, as the commands have it; otherwise Ctrl-C ends
            the call at once.
    """
    _start_devices(config)
    log, shown = _log(progress), progress and not console.quiet
    task = Task(config, None if run_dir is None else Path(run_dir))
    standing = look(task, fresh=fresh, log=log)
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    if standing.state == "done":
        _load(experiment, standing, log)
        replay(standing.run, observers)
        pictures = _said_finished(standing, shown, "fresh=True")
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
    bar, signals, place = bar or Progress(0, hidden=True), signals or Signals(), standing.task.folder
    if plan is not None:
        print_plan(experiment, plan, place)
    with waiting("compiling, up to a minute the first time", hidden=bar.hidden):
        experiment.compile()
    if place is None:
        for record in experiment.rounds():
            bar.show(record)
        return []
    processes, folder = experiment.programs.processes, RunFolder(place)
    observers = observers if processes.first else ()
    with folder.lock() if processes.first else contextlib.nullcontext(), contextlib.ExitStack() as closing:
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


def _said_finished(standing: Standing, shown: bool, again: str) -> list[Path]:
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
        found = differences(manifest["config"], experiment.config)
        for what in ("data", "split"):
            if manifest[what] != mine[what]:
                found.append(f"{what}: sha256 {manifest[what][:16]}… → {mine[what][:16]}…")
        refuse_other_settings(checkpoints.folder, found)
    saved, processes = checkpoints.load(experiment.state), experiment.programs.processes
    if processes.count > 1:
        processes.any(False)  # all have read what they need
        checkpoints.clean()  # half-written folders: one of them could be taken for a new one
    if saved is None:
        return False
    experiment.state = saved.state
    experiment.resume(saved.details, saved.arrays)
    return True


# -------------------------------------------------------------------------------- many runs


def run_all(
    standings: Sequence[Standing],
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    split_of: Callable[[Config, Dataset], Partition] = split,
    data_dir: str | None = None,
    drop_checkpoints: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
) -> list[Run]:
    """Many runs one after another, those that are done left alone; what came out, in their order.

    Datasets are loaded and split before the first run starts, so that what cannot work fails at once.

    Args:
        standings: what `look` said of each task.
        dataset, partition: the same for all; by default as each one's settings say.
        split_of: makes the partition of a run.
        drop_checkpoints: remove those of a run when it is finished.

    The other arguments are those of `run`.
    """
    pending = [standing for standing in standings if standing.state != "done"]
    log, shown, alone = _log(progress), progress and not console.quiet, len(standings) == 1
    _start_devices(standings[0].task.config)
    data: dict[tuple[object, ...], Dataset] = {}
    shares: list[tuple[Dataset, Partition]] = []
    for config in (standing.task.config for standing in pending):
        if dataset is None and _data_key(config) not in data:
            data[_data_key(config)] = load_data(config, data_dir, log)
        images = data[_data_key(config)] if dataset is None else dataset
        shares.append((images, split_of(config, images) if partition is None else partition))
    if not drop_checkpoints:
        _check_space([one.task for one in pending], [images for images, _ in shares])
    runs: list[Run] = []
    pictures: list[Path] = []
    total, left = sum(one.task.config.rounds for one in standings), _time_left(pending)
    with Progress(total, hidden=not shown) as bar:
        for standing in standings:
            config, place = standing.task.config, standing.task.folder
            title = find_method(config.method).title
            if standing.run and standing.state == "done":
                bar.next_run(title, config.rounds, done=True)
                replay(standing.run, observers)
                runs.append(standing.run)
                pictures = _said_finished(standing, shown and alone, "--fresh")
                continue
            if not alone:
                where = f"  {place.parent.name}/{place.name}" if place else ""
                log(f"{next(left)}{where}") if shown else None
                bar.next_run(title, config.rounds)
            experiment = Experiment(config, *shares[pending.index(standing)])
            pictures = train(
                experiment,
                standing,
                bar,
                plan=name if alone and shown else None,
                command=command,
                observers=observers,
                signals=signals,
                log=log,
            )
            first = experiment.programs.processes.first
            runs.append(read_run(place) if place and first else experiment.result())
            if place and drop_checkpoints and first:
                Checkpoints(checkpoint_folder(place)).clear()
            del experiment
            # Programs hold memory maps; those of some hundred runs in one process crash XLA.
            jax.clear_caches()
            gc.collect()
            if signals and signals.received is not None and len(runs) < len(standings):
                raise Interrupted("stopped between two runs; the same command resumes", signals.received)
    if shown and alone:
        print_summary(runs[0].summary, pictures)
    return runs


def _time_left(pending: Sequence[Standing]) -> Iterator[str]:
    """`run 2 of 8, about 5 min left`, by the rounds that were done so far."""
    start, rounds = time.perf_counter(), [one.task.config.rounds - one.rounds_done for one in pending]
    for number in range(len(pending)):
        done, left = sum(rounds[:number]), sum(rounds[number:])
        seconds = (time.perf_counter() - start) * left / max(1, done)
        about = f", about {in_words(seconds)} left" if done else ""
        yield f"run {number + 1} of {len(pending)}{about}"


def _check_space(tasks: Sequence[Task], datasets: Sequence[Dataset]) -> None:
    """Raises where the checkpoints of all these runs, the clients drawn, would not fit on the disk."""
    needed, place = 0.0, Path.cwd()
    for task, dataset in zip(tasks, datasets, strict=True):
        config, shape = task.config, dataset.image_shape
        if task.folder is None or not config.checkpoint_every:
            continue
        place = checkpoint_folder(task.folder)
        networks = [describe(one, dataset.num_classes, shape, config.feature_size) for one in config.architectures]
        drawn = config.num_clients * (1 - (1 - config.participation) ** config.rounds)
        needed += 4e-9 * drawn * sum(one.params for one in networks) / len(networks)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free / 1e9
    if needed > free:
        raise PfedafmError(
            f"{len(tasks)} runs leave about {needed:.0f} GB of checkpoints, and {place} has {free:.0f} GB free; "
            "--checkpoint-every 0 makes none, sweep.py and reproduce.py have --drop-checkpoints"
        )


def _data_key(config: Config) -> tuple[object, ...]:
    """What a dataset depends on."""
    if config.dataset != "synthetic":
        return config.dataset, config.image_size
    return config.dataset, config.synthetic_classes, config.synthetic_samples, config.seed


def compare(
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
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
) -> list[Run]:
    """Several methods, one after the other, on the same split and the same seeds.

    Args:
        config: the settings that all have in common; a method may have a learning rate of its own.
        methods: their names, in a list or with commas between them; `all`: the paper's eight.
        seeds: by default the one of the settings; several give mean and deviation.
        dataset: the images; by default those that the settings name, for each seed.
        partition: who has which of them, whatever the seed; by default as the settings say.
        run_dir: a folder with one for each run in it, and `compare.png`, `compare.md` and
            `compare.json` at the end. The same call again resumes where the last one stopped.

    The other arguments are those of `run`. `tables.table`, `tables.over_seeds` and
    `plots.compare_runs` make tables and pictures of what comes back.
    """
    if not methods:
        raise bad("methods", methods, f"all, or some of {', '.join(method_names())}")
    numbers = list(dict.fromkeys([config.seed] if seeds is None else seeds))
    if not numbers:
        raise bad("seeds", seeds, "one or more whole numbers")
    _start_devices(config)
    base = None if run_dir is None else Path(run_dir)
    if base is not None:
        check_writable(base)
    tasks = [
        Task(
            replace(config, method=method, seed=seed).check(dataset),
            base and base / f"{method}-seed{seed}",
        )
        for seed in numbers
        for method in chosen_methods(methods)
    ]
    log, shown = _log(progress), progress and not console.quiet
    runs = run_all(
        [look(task, fresh=fresh, log=log) for task in tasks],
        dataset=dataset,
        partition=partition,
        data_dir=data_dir,
        progress=progress,
        command=command,
        observers=observers,
        signals=signals,
    )
    if shown:
        print_comparison(runs)
    if base is not None and jax.process_index() == 0:
        title = ", ".join(part for part in (config.dataset, name) if part)
        for path in _write_comparison(runs, base, title, log) if shown else ():
            console.print(f"  {path}")
    return runs


def _write_comparison(runs: Sequence[Run], folder: Path, title: str, log: Log) -> list[Path]:
    frame = over_seeds(runs)
    rows = []
    for label, row in frame.to_dict("index").items():
        values = {name: None if np.isnan(value) else value for name, value in row.items()}
        pairs = {one: {part: values[one, part] for part in ("mean", "deviation")} for one in COLUMNS}
        counts = {"runs": values["runs", "count"], "diverged": values["diverged", "round"]}
        rows.append({"method": label, **counts, **pairs})
    files = {
        "compare.md": markdown([str(frame.index.name), *COLUMNS.values()], cells(frame)),
        "compare.json": json.dumps(rows, indent=2) + "\n",
    }
    for name, text in files.items():
        write_atomically(folder / name, lambda file, text=text: file.write(text.encode()))
    paths = [folder / name for name in files]
    try:
        return [plots.save(plots.compare_runs(runs, title), folder / "compare.png"), *paths]
    except Exception as error:  # costs a line, not the comparison
        log(f"warning: compare.png could not be drawn ({type(error).__name__}: {error})")
        return paths


def _log(progress: bool) -> Log:
    """Where single lines go: what is fetched, and warnings."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def _start_devices(config: Config) -> None:
    """One device per core, unless somebody has chosen already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
