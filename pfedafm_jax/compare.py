"""Methods side by side: `compare`, and the files that it leaves."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from pfedafm_jax import plots
from pfedafm_jax.config import Config
from pfedafm_jax.files import write_atomically
from pfedafm_jax.methods import chosen_methods, method_names
from pfedafm_jax.progress import console, print_table
from pfedafm_jax.records import check_writable
from pfedafm_jax.results import Run
from pfedafm_jax.run import logger, run_all, start_devices
from pfedafm_jax.settings import bad
from pfedafm_jax.standing import Task, look
from pfedafm_jax.tables import COLUMNS, cells, markdown, over_seeds, table


def compare(
    config: Config,
    methods: str | Sequence[str] = "all",
    seeds: Sequence[int] | None = None,
    *,
    run_dir: str | Path | None = None,
    fresh: bool = False,
    together: bool = False,
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
        together: all seeds of a method in one program, see `docs/gpu.md`.
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
    if together and config.layout == "auto":
        config = replace(config, layout="lockstep")
    start_devices(config)
    base, log = None if run_dir is None else Path(run_dir), logger(progress)
    if base is not None:
        check_writable(base)
    tasks = []
    for seed in numbers:
        for method in chosen_methods(methods):
            one = replace(config, method=method, seed=seed).check(options.get("dataset"))
            task = Task(one, base / f"{method}-seed{seed}" if base else None)
            tasks.append(look(task, fresh=fresh, log=log))
    runs = run_all(tasks, together=together, progress=progress, **options)
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
    except Exception as error:  # costs a line, not the comparison
        log(f"warning: compare.png could not be drawn ({type(error).__name__}: {error})")
    for path in sorted(base.glob("compare.*")) if progress else ():
        console.print(f"  {path}")
    return runs
