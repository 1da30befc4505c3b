"""Runs with their folders: `run` one, `compare` methods side by side, `run_all` for the commands.

`find_existing` says what exists of each run, and `train` trains those that are not finished.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax

from pfedafm_jax.base.errors import START_OVER, Interrupted, bad
from pfedafm_jax.base.files import Log, check_writable, write_atomically
from pfedafm_jax.base.terminal import bold, console
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.engine import Executor, Federation, setup_devices
from pfedafm_jax.methods import chosen_methods, find_method, method_names
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.results import plots
from pfedafm_jax.results.records import Summary
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import COLUMNS, cells, markdown, over_seeds, table
from pfedafm_jax.runs.checkpoints import Checkpoints
from pfedafm_jax.runs.existing import (
    Task,
    checkpoint_folder,
    find_existing,
    other_data,
    refuse_others,
)
from pfedafm_jax.runs.experiment import Experiment
from pfedafm_jax.runs.observers import Observer
from pfedafm_jax.runs.progress import Progress, print_plan, print_summary, print_table
from pfedafm_jax.runs.signals import Signals
from pfedafm_jax.runs.train import finished_run, train

SplitOf = Callable[[Config, Dataset], Partition]


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
    """Runs all rounds; returns the experiment with its records and weights.

    Args:
        config: the settings.
        dataset: the images; by default those that the settings name.
        partition: the clients' shares of them; by default as the settings say.
        run_dir: a folder for the run's files and checkpoints. The same call again then resumes
            where the last one stopped, and loads a finished run. Without it everything stays in
            memory.
        data_dir: the folder of CIFAR, instead of downloading it.
        fresh: start over even if there is a run in `run_dir`.
        progress: show the plan, a progress bar and the result.
        name: a name for the plan.
        command, observers, signals: see `train`.
    """
    start_devices(config)
    log = logger(progress)
    shown = progress and not console.quiet
    task = find_existing(
        Task(config, None if run_dir is None else Path(run_dir)), fresh=fresh, log=log
    )
    experiment = Experiment(config, dataset, partition, data_dir=data_dir, log=log)
    federation, executor = experiment.federation, experiment.executor
    if task.state == "done" and task.folder is not None:
        experiment.history, experiment.state = finished_run(federation, executor, task.folder, log)
        if shown:
            say_finished(task, experiment.history.summary())
        return experiment
    with progress_of(task, federation, executor, name, shown) as bar:
        experiment.history, experiment.state = train(
            federation,
            executor,
            task.folder,
            partition=experiment.partition,
            restart=task.state == "again",
            command=command,
            observers=(bar, *observers),
            signals=signals,
            log=log,
        )
    draw_figures(experiment, task.folder, log)
    if shown:
        print_summary(experiment.history.summary(), pictures_in(task.folder))
    return experiment


def run_all(
    tasks: Sequence[Task],
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    split_of: SplitOf = split,
    data_dir: str | None = None,
    drop_checkpoints: bool = False,
    progress: bool = True,
    name: str = "",
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
) -> list[Run]:
    """Runs several tasks in sequence and skips finished ones; returns all results, in their order.

    Datasets are loaded and split before the first run starts, so that errors show early.

    Args:
        tasks: as `find_existing` returned them.
        dataset, partition: shared by all; by default as each run's settings say.
        split_of: makes the partition of a run.
        data_dir: the folder of CIFAR, instead of downloading it.
        drop_checkpoints: delete a run's checkpoints when it is finished.
        progress: show a progress bar; for a single run also its plan and result.
        name: a name for the plan.
        command, observers, signals: see `train`.
    """
    if not tasks:
        return []
    log = logger(progress)
    shown = progress and not console.quiet
    alone = len(tasks) == 1
    start_devices(tasks[0].config)
    runs = {index: task.run for index, task in enumerate(tasks) if task.run and is_done(task)}
    pending = [index for index in range(len(tasks)) if index not in runs]
    deal = split_of if partition is None else lambda *_: partition
    data = _load_and_split(tasks, pending, dataset, deal, data_dir, log)
    rounds = sum(tasks[index].config.rounds for index in pending)
    if shown and alone and not pending:
        say_finished(tasks[0], runs[0].summary)
        return [runs[0]]
    with Progress(rounds, hidden=not (shown and pending)) as bar:
        for number, index in enumerate(pending, 1):
            task = tasks[index]
            experiment = Experiment(task.config, *data[index], log=log)
            if shown and alone:
                print_plan(experiment.federation, experiment.executor, name, task.folder)
            if not alone:
                bar.next_run(_description(task, number, len(pending)), task.config.rounds)
            bar.compiling()
            experiment.history, experiment.state = train(
                experiment.federation,
                experiment.executor,
                task.folder,
                partition=experiment.partition,
                restart=task.state == "again",
                command=command,
                observers=(bar, *observers),
                signals=signals,
                log=log,
            )
            draw_figures(experiment, task.folder, log)
            if drop_checkpoints and task.folder and experiment.executor.processes.first:
                Checkpoints(checkpoint_folder(task.folder)).clear()
            runs[index] = experiment.history.result(task.folder)
            del experiment  # its weights and data, before those of the next run are made
            gc.collect()
            if signals and signals.received is not None and len(runs) < len(tasks):
                message = "stopped between two runs; the same command resumes"
                raise Interrupted(message, signals.received)
    if shown and alone:
        print_summary(runs[0].summary, pictures_in(tasks[0].folder))
    return [runs[index] for index in range(len(tasks))]


def is_done(task: Task) -> bool:
    """Whether nothing is left to do of a task."""
    return task.state == "done"


def say_finished(task: Task, summary: Summary) -> None:
    """Says that a run was finished before, and prints its result."""
    console.print(bold(task.folder), f"is finished already; {START_OVER}")
    print_summary(summary, pictures_in(task.folder))


@contextlib.contextmanager
def progress_of(
    task: Task, federation: Federation, executor: Executor, name: str, shown: bool
) -> Iterator[Progress]:
    """Prints the plan of a single run and shows a bar while it goes on, if they are to be shown."""
    if shown:
        print_plan(federation, executor, name, task.folder)
    with Progress(federation.config.rounds, hidden=not shown) as bar:
        bar.compiling()
        yield bar


def draw_figures(experiment: Experiment, folder: Path | None, log: Log) -> None:
    """Draws the pictures of a finished run into its folder, in the first process."""
    if folder is None or not experiment.executor.processes.first:
        return
    dataset = experiment.dataset
    counts = experiment.partition.class_counts(dataset.labels, dataset.num_classes)
    plots.draw_all(experiment.result(), counts, folder, log)


def pictures_in(folder: Path | None) -> list[Path]:
    """The pictures in a run's folder."""
    return sorted(folder.glob("*.png")) if folder else []


def _load_and_split(
    tasks: Sequence[Task],
    pending: Sequence[int],
    dataset: Dataset | None,
    split_of: SplitOf,
    data_dir: str | None,
    log: Log,
) -> dict[int, tuple[Dataset, Partition]]:
    """The data of each pending run and its split; the same data are
    shared. Raises if a finished run, which will stand beside them, had others."""
    loaded: dict[object, Dataset] = {}
    found: dict[int, tuple[Dataset, Partition]] = {}
    for index in [*pending, *(index for index in range(len(tasks)) if index not in pending)]:
        config, run = tasks[index].config, tasks[index].run
        generated = config.synthetic_classes, config.synthetic_samples, config.seed
        key = config.dataset, config.image_size, config.dataset == "synthetic" and generated
        if dataset is not None:
            loaded[key] = dataset
        elif index in pending and key not in loaded:
            loaded[key] = load_data(config, data_dir, log)
        if index in pending:
            found[index] = loaded[key], split_of(config, loaded[key])
        elif key in loaded and run is not None:
            own = split_of(config, loaded[key]) if run.partition else None
            refuse_others(tasks[index].folder or "", other_data(run, loaded[key], own))
    return found


def _description(task: Task, number: int, count: int) -> str:
    """What the progress bar says of a run, the `number`th of `count`."""
    title = find_method(task.config.method).title
    where = f", {task.folder.parent.name}/{task.folder.name}" if task.folder else ""
    return f"run {number} of {count}: {title}{where}"


def compare(
    config: Config,
    methods: str | Sequence[str] = "paper",
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
    """Runs several methods in sequence, on the same split and with the same seeds.

    Args:
        config: the common settings; each method may have its own learning rate.
        methods: their names, as a list or separated by commas; `paper` (its eight), `controls` and
            `all` stand for several, see `chosen_methods`.
        seeds: by default that of the settings; several give mean and deviation.
        dataset, partition: shared by all; by default as the settings say.
        run_dir: a folder for one folder per run, and finally `compare.md`, `compare.json` and
            `compare.png`. The same call again resumes where the last one stopped.
        data_dir: the folder of CIFAR, instead of downloading it.
        fresh: start over even if there are runs in `run_dir`.
        progress: show a progress bar and the result.
        name: the title of the plot.
        command, observers, signals: see `train`.

    `tables.table`, `tables.over_seeds` and `plots.compare_runs` show the result.
    """
    if not methods:
        raise bad(
            "methods", methods, f"paper, controls, all, or some of {', '.join(method_names())}"
        )
    numbers = list(dict.fromkeys([config.seed] if seeds is None else seeds))
    if not numbers:
        raise bad("seeds", seeds, "one or more whole numbers")
    start_devices(config)
    base, log = None if run_dir is None else Path(run_dir), logger(progress)
    if base is not None:
        check_writable(base)
    tasks = []
    for seed in numbers:
        for method in chosen_methods(methods):
            one = updated(config, method=method, seed=seed)
            check_names(one, dataset)
            task = Task(one, base / f"{method}-seed{seed}" if base else None)
            tasks.append(find_existing(task, fresh=fresh, log=log))
    runs = run_all(
        tasks,
        dataset=dataset,
        partition=partition,
        data_dir=data_dir,
        progress=progress,
        command=command,
        observers=observers,
        signals=signals,
    )
    headings, rows = ["method", *COLUMNS.values()], cells(over_seeds(runs))
    if progress:
        print_table(headings, rows)
    if base is None or jax.process_index() > 0:
        return runs
    write_atomically(base / "compare.md", markdown(headings, rows))
    frame = table(runs).reset_index()
    write_atomically(base / "compare.json", f"{frame.to_json(orient='records', indent=2)}\n")
    try:
        title = ", ".join(part for part in (config.dataset, name) if part)
        plots.save(plots.compare_runs(runs, title), base / "compare.png")
    except Exception as error:  # a warning, so that the comparison goes on
        log(f"warning: compare.png could not be drawn ({type(error).__name__}: {error})")
    for path in sorted(base.glob("compare.*")) if progress else ():
        console.print(f"  {path}")
    return runs


def logger(progress: bool) -> Log:
    """Prints single lines, such as warnings; without `progress` to standard error."""
    return console.print if progress else partial(print, file=sys.stderr, flush=True)


def start_devices(config: Config) -> None:
    """Sets up one device per core, unless JAX has started already."""
    if getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        setup_devices(config.devices)
