"""Settings chosen by held-out data: `pfedafm sweep --method fd --grid fd.gamma=0.1,1,10`.

Without --grid it is the paper's own grid. A part of every client's training data is held out and
takes the place of the test images, which are not used at all. Settings are ranked by the accuracy
of all clients after the last round. best.toml is the result: pfedafm run --config …/best.toml
"""

import argparse
import itertools
import json
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax import cli
from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import split
from pfedafm_jax.files import write_atomically
from pfedafm_jax.methods import find_method
from pfedafm_jax.progress import console, print_table
from pfedafm_jax.records import check_writable
from pfedafm_jax.results import Run
from pfedafm_jax.run import run_all
from pfedafm_jax.settings import bad
from pfedafm_jax.signals import Signals
from pfedafm_jax.standing import Task, look
from pfedafm_jax.tables import markdown, mean_and_deviation, percent

HELD_OUT = 0.1  # fraction of each client's training data, by default
PAPER_GRID = {
    "batch_size": (64, 128, 256, 512),
    "local_epochs": (1, 10),
    "learning_rate": (0.01,),
    "pfedafm.mix_learning_rate": (0.001, 0.01, 0.1, 1.0),
}
Grid = dict[str, tuple[Any, ...]]  # setting, `fd.gamma` for one of a method, → values
Point = dict[str, Any]  # setting → value


def paper_grid(method: str) -> Grid:
    """The paper's grid for this method."""
    return {n: v for n, v in PAPER_GRID.items() if "." not in n or n.startswith(f"{method}.")}


def parse_grid(words: Sequence[str]) -> Grid:
    """`["batch-size=64,512", "pfedafm.mix_fixed=none,0.5"]` → names and values."""
    grid: Grid = {}
    for word in words:
        name, _, values = word.partition("=")
        name, accepted = name.strip().replace("-", "_"), ""
        if not name or not all(value.strip() for value in values.split(",")):
            accepted = "SETTING=VALUE,VALUE,… like batch_size=64,512"
        elif name in ("seed", "validation_fraction"):
            accepted = "settings to choose; --seeds and --validation-fraction are flags"
        elif name in grid:
            accepted = f"each setting once; {name} is there already"
        if accepted:
            raise bad("grid", word, accepted)
        grid[name] = tuple(dict.fromkeys(_value(value.strip()) for value in values.split(",")))
    return grid


def _value(text: str) -> Any:
    """A number, true or false as in TOML; none; anything else is a word."""
    if text == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def points(grid: Grid) -> list[Point]:
    """All combinations, the last setting changing fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def at(config: Config, point: Point) -> Config:
    """The configuration of a point."""
    nested: dict[str, Any] = {}
    for name, value in point.items():
        method, _, own = name.rpartition(".")
        (nested.setdefault(method, {}) if method else nested)[own] = value
    return updated(config, nested)


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def label(point: Point) -> str:
    """A folder's name: `batch_size=64,mix_learning_rate=0.1`."""
    words = (f"{name.split('.')[-1]}={shown(value)}" for name, value in point.items())
    return ",".join(words).replace("/", "_") or "as_it_is"


def validation_split(config: Config, dataset: Dataset) -> Partition:
    """The clients' shares, with held-out training data in place of the test data."""
    whole = split(config, dataset)
    nothing = tuple(np.zeros(0, np.int32) for _ in whole.train)
    return replace(whole, test=whole.validation, validation=nothing)


# -------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Score:
    """A point and its runs, one per seed."""

    point: Point
    runs: Sequence[Run]

    @property
    def validation(self) -> list[float | None]:
        """The accuracy of all clients after the last round, for each seed."""
        return [run.summary.final_all_clients_accuracy for run in self.runs]

    @property
    def diverged(self) -> int | None:
        """The first round with NaN or infinity in a run."""
        rounds = (run.summary.diverged_at_round for run in self.runs)
        return min((one for one in rounds if one is not None), default=None)

    @property
    def accuracy(self) -> float | None:
        """The accuracy that points are ranked by; None: a run diverged, or has none."""
        usable = self.diverged is None and None not in self.validation
        return mean_and_deviation(self.validation)[0] if usable else None


def ranked(scores: Sequence[Score]) -> list[Score]:
    """Best first, the grid's own order among equals; those without an accuracy last."""
    return sorted(scores, key=lambda one: 1.0 if one.accuracy is None else -one.accuracy)


def rows(scores: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of all points, best first."""
    names, found = list(scores[0].point), []
    for place, score in enumerate(ranked(scores), 1):
        accuracy = percent(*mean_and_deviation(score.validation))
        if score.diverged is not None:
            accuracy = f"✗ diverged at round {score.diverged}"
        last, _ = mean_and_deviation([run.summary.last_ten_mean_accuracy for run in score.runs])
        length = max(run.summary.rounds for run in score.runs)
        minutes = sum(run.summary.seconds for run in score.runs) / 60
        values = [shown(score.point[name]) for name in names]
        found.append([str(place), *values, accuracy, percent(last), str(length), f"{minutes:.1f}"])
    short = [name.split(".")[-1] for name in names]
    return ["place", *short, "all clients, %", "last ten rounds, %", "rounds", "min"], found


def write(
    base: Path, given: Config, scores: Sequence[Score], seeds: Sequence[int], about: str
) -> None:
    """Writes the table, the numbers and the chosen configuration; `about` says how."""
    title = f"{find_method(given.method).title}, {given.dataset}: {len(scores)} settings"
    headings, cells = rows(scores)
    print_table(headings, cells, "Accuracy on validation data, after the last round")
    write_atomically(base / "sweep.md", f"# {title}\n\n{about}\n\n{markdown(headings, cells)}")
    content = [
        {
            "point": one.point,
            "accuracy": one.accuracy,
            "validation": one.validation,
            "diverged": one.diverged,
            "rounds": [run.summary.rounds for run in one.runs],
            "seeds": list(seeds),
        }
        for one in ranked(scores)
    ]
    write_atomically(base / "sweep.json", json.dumps(content, indent=2) + "\n")
    best = ranked(scores)[0]
    if best.accuracy is None:
        words = "diverged; try lower learning rates"
        raise PfedafmError(f"nothing to choose: all runs of {base} {words}")
    words = f"{percent(best.accuracy)} % of all clients' validation images right, the best of\n"
    chosen = at(given, best.point).toml(f"{words}{title}.\n{about}")
    write_atomically(base / "best.toml", chosen)
    for name in ("sweep.md", "sweep.json", "best.toml"):
        console.print(f"  {base / name}")


# -------------------------------------------------------------------------------- the command


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", action="append", default=[], metavar="SETTING=A,B,…",
        help="values of a setting; may be repeated (default: the paper's grid)")  # fmt: skip
    add("--seeds", default="", metavar="0,1,…", help="several seeds: the choice is by their mean")
    add("--drop-checkpoints", action="store_true", help="remove those of a run that is finished")


def main(argv: list[str]) -> int:
    given, options = cli.parse(argv, "sweep", __doc__ or "", add_options)
    more = options.more
    if more.coordinator is not None:
        raise bad("coordinator", more.coordinator, "nothing: a sweep is run by one process")
    grid = parse_grid(more.grid) if more.grid else paper_grid(given.method)
    seeds = cli.seeds(more.seeds) or [given.seed]
    base = options.run_dir if more.run_dir else Path("runs") / f"sweep-{options.name}"
    held_out = given.validation_fraction or HELD_OUT
    config = replace(given, validation_fraction=held_out, eval_every=given.rounds)
    pairs = list(itertools.product(points(grid), seeds))
    tasks = [
        Task(replace(at(config, point), seed=seed).check(), base / label(point) / f"seed{seed}")
        for point, seed in pairs
    ]
    shared = options.start(config.devices)
    check_writable(base)
    tasks = [look(task, fresh=more.fresh, longer=True) for task in tasks]
    axes = ", ".join(f"{name} ({len(values)})" for name, values in grid.items())
    console.print(f"{find_method(config.method).title} on {config.dataset}: {axes}", style="bold")
    console.print(f"{len(tasks)} runs, {sum(one.state == 'done' for one in tasks)} of them done")
    with Signals() as signals:
        drop = more.drop_checkpoints
        shared |= {"split_of": validation_split, "drop_checkpoints": drop, "signals": signals}
        runs = run_all(tasks, **shared)
    scores = [
        Score(point, runs[place * len(seeds) : (place + 1) * len(seeds)])
        for place, point in enumerate(points(grid))
    ]
    part = (
        f"{100 * held_out:g} % of each client's training data, seeds {', '.join(map(str, seeds))}"
    )
    write(base, given, scores, seeds, f"Evaluated on {part}, by\n\n    {options.command}")
    return 0
