"""Settings chosen by held-out data: `pfedafm sweep --method fd --grid fd.gamma=0.1,1,10`.

A part of every client's training data is held out and
takes the place of the test images, which are not used at all. Settings are ranked by the accuracy
of all clients after the last round. best.toml is the result: pfedafm run --config …/best.toml
"""

import itertools
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from pfedafm_jax.base.errors import bad
from pfedafm_jax.cli.options import RunOptions, parse
from pfedafm_jax.config.config import updated


class SweepOptions(RunOptions):
    """What `pfedafm sweep` takes beside the settings."""

    heading: ClassVar[str] = "Sweep"
    placeholders: ClassVar[dict[str, str]] = {
        **RunOptions.placeholders,
        "grid": "SETTING=A,B,…",
        "seeds": "0,1,…",
    }
    repeated: ClassVar[tuple[str, ...]] = (*RunOptions.repeated, "grid")

    grid: tuple[str, ...] = ()
    """Values of a setting; may be repeated."""
    seeds: tuple[Annotated[int, Ge(0), Lt(2**32)], ...] = ()
    """Several seeds: the choice is by their mean."""
    drop_checkpoints: bool = False
    """Remove the checkpoints of a run that is finished."""


def main(words: list[str]) -> int:
    """Trains, or resumes, a run for each combination, and writes which is best."""
    asked = parse(words, "sweep", __doc__ or "", SweepOptions)
    given, more = asked.config, asked.options

    from pfedafm_jax.base.files import check_writable
    from pfedafm_jax.base.terminal import console
    from pfedafm_jax.cli import sweep
    from pfedafm_jax.methods import find_method
    from pfedafm_jax.methods.checks import check_names
    from pfedafm_jax.runs.drive import run_all
    from pfedafm_jax.runs.existing import ELSEWHERE, Task, find_existing
    from pfedafm_jax.runs.signals import Signals

    if more.coordinator is not None:
        raise bad("coordinator", more.coordinator, "nothing: a sweep is run by one process")
    if not more.grid:
        raise bad("grid", None, "SETTING=VALUE,VALUE,… once or more, like batch_size=64,512")
    grid = sweep.parse_grid(more.grid)
    for name in grid:
        sweep.check_matters(name, grid, given)
    if "validation_fraction" in asked.flags and not given.validation_fraction:
        raise bad("validation_fraction", 0, "above 0: a sweep ranks settings by held-out data")
    seeds = tuple(dict.fromkeys(more.seeds)) or (given.seed,)
    base = asked.run_dir if more.run_dir else Path("runs") / f"sweep-{asked.name}"
    held_out = given.validation_fraction or sweep.HELD_OUT
    config = updated(given, validation_fraction=held_out, eval_every=given.rounds)
    tasks = []
    for point, seed in itertools.product(sweep.points(grid), seeds):
        own = check_names(updated(config, point, seed=seed))
        tasks.append(Task(own, base / sweep.label(point) / f"seed{seed}"))
    shared = asked.start()
    check_writable(base)
    for number, task in enumerate(tasks):
        tasks[number] = find_existing(task, fresh=more.fresh, longer=True)
        if tasks[number].config.rounds > task.config.rounds:  # they would be ranked together
            accepted = f"{tasks[number].config.rounds} or more, as {task.folder} has; {ELSEWHERE}"
            raise bad("rounds", task.config.rounds, accepted)
    axes = ", ".join(f"{name} ({len(values)})" for name, values in grid.items())
    console.print(f"{find_method(config.method).title} on {config.dataset}: {axes}", style="bold")
    console.print(f"{len(tasks)} runs, {sum(one.state == 'done' for one in tasks)} of them done")
    with Signals() as signals:
        drop = more.drop_checkpoints
        shared |= {"split_of": sweep.validation_split, "drop_checkpoints": drop, "signals": signals}
        runs = iter(run_all(tasks, **shared))
    scores = [
        sweep.scored(point, list(itertools.islice(runs, len(seeds))))
        for point in sweep.points(grid)
    ]
    named = ", ".join(map(str, seeds))
    part = f"{100 * held_out:g} % of each client's training data, seeds {named}"
    given = updated(given, validation_fraction=0.0)  # what is chosen trains on all of it
    sweep.write(
        base, given, sweep.ranked(scores), f"Evaluated on {part}, by\n\n    {asked.command}"
    )
    return 0
