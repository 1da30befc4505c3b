"""Settings chosen by held-out data: the grid, the ranking and the files of `pfedafm sweep`."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.base.checked import Checked
from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.flags import read_text
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.method_settings import every_method
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.data.load import split
from pfedafm_jax.methods import find_method
from pfedafm_jax.results.run import MATTERS_IF, Run
from pfedafm_jax.results.tables import markdown, mean_and_deviation, percent
from pfedafm_jax.runs.progress import print_table

HELD_OUT = 0.1  # fraction of each client's training data, by default
Grid = dict[str, tuple[Any, ...]]  # setting, `fd.gamma` for one of a method, → values
Point = dict[str, Any]  # setting → value
Score = dict[str, Any]  # an entry of `sweep.json`


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
        texts = [value.strip() for value in values.split(",")]
        grid[name] = tuple(dict.fromkeys(read_setting(name, text) for text in texts))
    return grid


def kind_of(name: str) -> type[Checked] | None:
    """The model that has a setting, `fd.gamma` or `batch_size`; None if it is unknown."""
    method, _, setting = name.rpartition(".")
    kind = every_method().get(method) if method else Config
    return kind if kind is not None and setting in kind.model_fields else None


def read_setting(name: str, text: str) -> Any:
    """A setting's value from a text; of an unknown setting, which is told later, the text."""
    kind = kind_of(name)
    return text if kind is None else read_text(kind, name.rpartition(".")[2], text)


def check_matters(name: str, grid: Grid, config: Config) -> None:
    """Raises if all values of a setting would give the same run."""
    prefix, dot, _ = name.partition(".")
    other, value = MATTERS_IF.get(name, ("method", prefix if dot else config.method))
    if other not in grid and kind_of(name) is not None and getattr(config, other) != value:
        flag = other.replace("_", "-")
        accepted = f"settings that matter here: {name} does so with --{flag} {value}"
        raise bad("grid", name, accepted)


def points(grid: Grid) -> list[Point]:
    """All combinations, the last setting changing fastest."""
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def shown(value: Any) -> str:
    """A value in a table and in a folder's name."""
    if isinstance(value, tuple):
        return "+".join(value)
    short = f"{value:g}" if isinstance(value, float) else str(value)
    return short if str(value) == short or float(short) == value else str(value)


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


def scored(point: Point, runs: Sequence[Run]) -> Score:
    """What `sweep.json` says of a point, from its runs, one per seed.

    `validation` is the accuracy of all clients after the last round of each; points are ranked by
    their mean, `accuracy`, which is None if a run diverged or has none.
    """
    own = [run.summary for run in runs]
    scores = [one.final_all_clients_accuracy for one in own]
    diverged = [one.diverged_at_round for one in own if one.diverged_at_round is not None]
    return {
        "point": point,
        "accuracy": None if diverged or None in scores else mean_and_deviation(scores)[0],
        "validation": scores,
        "diverged": min(diverged, default=None),
        "last_ten": [one.last_ten_mean_accuracy for one in own],
        "rounds": [one.rounds for one in own],
        "seconds": [one.seconds for one in own],
        "seeds": [run.config["seed"] for run in runs],
    }


def ranked(scores: Sequence[Score]) -> list[Score]:
    """Best first, the grid's own order among equals; those without an accuracy last."""
    return sorted(scores, key=lambda one: 1.0 if one["accuracy"] is None else -one["accuracy"])


def rows(scores: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of a table of all points, as ranked."""
    found = []
    for place, one in enumerate(scores, 1):
        accuracy = percent(*mean_and_deviation(one["validation"]))
        if one["diverged"] is not None:
            accuracy = f"✗ diverged at round {one['diverged']}"
        last, _ = mean_and_deviation(one["last_ten"])
        length, minutes = max(one["rounds"]), sum(one["seconds"]) / 60
        values = map(shown, one["point"].values())
        found.append([str(place), *values, accuracy, percent(last), str(length), f"{minutes:.1f}"])
    short = [name.split(".")[-1] for name in scores[0]["point"]]
    return ["place", *short, "all clients, %", "last ten rounds, %", "rounds", "min"], found


def write(base: Path, given: Config, scores: Sequence[Score], about: str) -> None:
    """Writes the table, the numbers and the chosen configuration; `about` says how."""
    title = f"{find_method(given.method).title}, {given.dataset}: {len(scores)} settings"
    headings, cells = rows(scores)
    print_table(headings, cells, "Accuracy on validation data, after the last round")
    write_atomically(base / "sweep.md", f"# {title}\n\n{about}\n\n{markdown(headings, cells)}")
    write_atomically(base / "sweep.json", json.dumps(scores, indent=2) + "\n")
    best = scores[0]
    if best["accuracy"] is None:
        words = "have diverged; try lower learning rates"
        if any(one["diverged"] is None for one in scores):
            words = "have diverged or no accuracy on held-out data"
        raise PfedafmError(f"nothing to choose: all runs of {base} {words}")
    words = f"{percent(best['accuracy'])} % of all clients' validation images right, the best of\n"
    chosen = updated(given, best["point"]).toml(f"{words}{title}.\n{about}")
    write_atomically(base / "best.toml", chosen)
    for name in ("sweep.md", "sweep.json", "best.toml"):
        console.print(f"  {base / name}")
