"""Many runs one after another: methods side by side (`compare`), or any list (`run_all`)."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.errors import Interrupted
from pfedafm_jax.experiment import Experiment, load_data, split
from pfedafm_jax.files import write_atomically
from pfedafm_jax.methods import chosen_methods, find_method, method_names
from pfedafm_jax.observers import Observer, replay
from pfedafm_jax.progress import Progress, console, print_comparison, print_summary
from pfedafm_jax.records import check_writable
from pfedafm_jax.results import Run, read_run
from pfedafm_jax.run import Log, logger, said_finished, start_devices, train
from pfedafm_jax.settings import bad
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Standing, Task, checkpoint_folder, look
from pfedafm_jax.tables import COLUMNS, cells, markdown, over_seeds, table


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

    Datasets are loaded and split before the first run starts, so that what cannot work fails at
    once.

    Args:
        standings: what `look` said of each task.
        dataset, partition: the same for all; by default as each one's settings say.
        split_of: makes the partition of a run.
        drop_checkpoints: remove those of a run when it is finished.

    The other arguments are those of `run`.
    """
    pending = [standing for standing in standings if standing.state != "done"]
    log, shown, alone = logger(progress), progress and not console.quiet, len(standings) == 1
    if not standings:
        return []
    start_devices(standings[0].task.config)
    data: dict[tuple[object, ...], Dataset] = {}
    shares: list[tuple[Dataset, Partition]] = []
    for config in (standing.task.config for standing in pending):
        key: tuple[object, ...] = (config.dataset, config.image_size)
        if config.dataset == "synthetic":
            key = (config.synthetic_classes, config.synthetic_samples, config.seed)
        if dataset is None and key not in data:
            data[key] = load_data(config, data_dir, log)
        images = data[key] if dataset is None else dataset
        shares.append((images, split_of(config, images) if partition is None else partition))
    runs: list[Run] = []
    pictures: list[Path] = []
    left = iter(enumerate(shares, 1))
    with Progress(sum(one.task.config.rounds for one in standings), hidden=not shown) as bar:
        for standing in standings:
            config, place = standing.task.config, standing.task.folder
            title = find_method(config.method).title
            if standing.run and standing.state == "done":
                bar.next_run(title, config.rounds, done=True)
                replay(standing.run, observers)
                runs.append(standing.run)
                pictures = said_finished(standing, shown and alone, "--fresh")
                continue
            number, share = next(left)
            if not alone:
                where = f", {place.parent.name}/{place.name}" if place else ""
                bar.next_run(f"run {number} of {len(pending)}: {title}{where}", config.rounds)
            experiment = Experiment(config, *share)
            plan = name if alone and shown else None
            options: Any = {"command": command, "observers": observers, "signals": signals}
            pictures = train(experiment, standing, bar, plan=plan, log=log, **options)
            first = experiment.programs.processes.first
            runs.append(read_run(place) if place and first else experiment.result())
            if place and drop_checkpoints and first:
                Checkpoints(checkpoint_folder(place)).clear()
            del experiment
            gc.collect()
            if signals and signals.received is not None and len(runs) < len(standings):
                message = "stopped between two runs; the same command resumes"
                raise Interrupted(message, signals.received)
    if shown and alone:
        print_summary(runs[0].summary, pictures)
    return runs


def compare(
    config: Config,
    methods: str | Sequence[str] = "all",
    seeds: Sequence[int] | None = None,
    *,
    run_dir: str | Path | None = None,
    fresh: bool = False,
    progress: bool = True,
    name: str = "",
    **options: Any,
) -> list[Run]:
    """Several methods, one after the other, on the same split and the same seeds.

    Args:
        config: the settings that all have in common; a method may have a learning rate of its own.
        methods: their names, in a list or with commas between them; `all`: the paper's eight.
        seeds: by default the one of the settings; several give mean and deviation.
        run_dir: a folder with one for each run in it, and `compare.md`, `compare.json` and
            `compare.png` at the end. The same call again resumes where the last one stopped.
        fresh: start over even if there are runs in `run_dir`.
        progress: show a progress bar and the result.
        name: a name for the picture.
        options: `dataset` and `partition`, the same for all, and what else `run_all` takes.

    `tables.table`, `tables.over_seeds` and `plots.compare_runs` show what comes back.
    """
    if not methods:
        raise bad("methods", methods, f"all, or some of {', '.join(method_names())}")
    numbers = list(dict.fromkeys([config.seed] if seeds is None else seeds))
    if not numbers:
        raise bad("seeds", seeds, "one or more whole numbers")
    start_devices(config)
    base, log = None if run_dir is None else Path(run_dir), logger(progress)
    if base is not None:
        check_writable(base)
    standings = [
        look(Task(one.check(options.get("dataset")), base and base / f"{one.method}-seed{one.seed}"),
             fresh=fresh, log=log)
        for seed in numbers
        for one in (replace(config, method=method, seed=seed) for method in chosen_methods(methods))
    ]  # fmt: skip
    runs = run_all(standings, progress=progress, **options)
    if progress:
        print_comparison(runs)
    if base is not None and jax.process_index() == 0:
        title = ", ".join(part for part in (config.dataset, name) if part)
        for path in _write_comparison(runs, base, title, log):
            console.print(f"  {path}") if progress else None
    return runs


def _write_comparison(runs: Sequence[Run], folder: Path, title: str, log: Log) -> list[Path]:
    """Mean and deviation of each method as Markdown, every run's numbers as JSON, curves as PNG."""
    files = {
        "compare.md": markdown(["method", *COLUMNS.values()], cells(over_seeds(runs))),
        "compare.json": f"{table(runs).reset_index().to_json(orient='records', indent=2)}\n",
    }
    for name, text in files.items():
        write_atomically(folder / name, lambda file, text=text: file.write(text.encode()))
    paths = [folder / name for name in files]
    try:
        return [*paths, plots.save(plots.compare_runs(runs, title), folder / "compare.png")]
    except Exception as error:  # costs a line, not the comparison
        log(f"warning: compare.png could not be drawn ({type(error).__name__}: {error})")
        return paths
