"""Settings chosen by held-out data: `pfedafm sweep --method fd --grid fd.gamma=0.1,1,10`.

Without --grid it is the paper's own grid. Every client's training data is cut once more, and the
models see the larger part. The other part takes the place of the test images, which belong to
nobody here: no choice can have seen them. The choice is by the accuracy of all clients after the
last round. best.toml is the result: pfedafm run --config …/best.toml
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
import pandas as pd
from matplotlib.figure import Figure

from pfedafm_jax import cli, figures, plots
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

HELD_OUT = 0.1  # of each client's training data, where the settings say nothing
PAPER_GRID = {
    "batch_size": (64, 128, 256, 512),
    "local_epochs": (1, 10),
    "learning_rate": (0.01,),
    "pfedafm.mix_learning_rate": (0.001, 0.01, 0.1, 1.0),
}
Grid = dict[str, tuple[Any, ...]]  # setting, `fd.gamma` for one of a method, → values
Point = dict[str, Any]  # setting → value


def paper_grid(method: str) -> Grid:
    """What the paper searches for this method."""
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
    """A number, true or false as TOML has them; none; anything else is a word."""
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
    """The clients' shares with held-out training data where the test data would be."""
    whole = split(config, dataset)
    nothing = tuple(np.zeros(0, np.int32) for _ in whole.train)
    return replace(whole, test=whole.validation, validation=nothing)


# -------------------------------------------------------------------------------- the choice


@dataclass(frozen=True)
class Score:
    """A point and its runs, one a seed."""

    point: Point
    runs: Sequence[Run]
    validation: Sequence[float | None]  # all clients at the end of the stage, for each seed

    @property
    def diverged(self) -> int | None:
        """The first round in which a run was not finite."""
        rounds = (run.summary.diverged_at_round for run in self.runs)
        return min((one for one in rounds if one is not None), default=None)

    @property
    def accuracy(self) -> float | None:
        """What the choice is by; None: a run diverged, or has none."""
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


def influence(scores: Sequence[Score]) -> dict[str, float]:
    """For each setting with several values how far apart their means over all others are."""
    frame, found = _frame(scores), {}
    for name in scores[0].point:
        means = frame.groupby(name)["accuracy"].mean()
        if len(means) > 1:
            found[name] = float(np.nan_to_num(means.max() - means.min()))
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _frame(scores: Sequence[Score]) -> Any:
    """One row a point: its settings as they are shown, and its accuracy."""
    values = [{name: shown(value) for name, value in one.point.items()} for one in scores]
    return pd.DataFrame(values).assign(accuracy=np.array([one.accuracy for one in scores], float))


def heat_map(scores: Sequence[Score], title: str) -> Figure:
    """The two settings that matter most, each field the best over all others; ✗: all diverged."""
    x, y = [*influence(scores), "", " "][:2]
    frame = _frame(scores).assign(**{name: "" for name in (x, y) if not name.strip()})
    best = 100 * frame.groupby([y, x])["accuracy"].max().unstack()
    best = best.reindex(index=frame[y].unique(), columns=frame[x].unique())
    height, width = best.shape
    size = max(5.0, 2.2 + 1.1 * width), max(3.0, 1.6 + 0.7 * height)
    figure, axes = figures.plain_figure(*size)
    axes.grid(False)
    low, high = np.nan_to_num([best.min(axis=None), best.max(axis=None)])
    picture = axes.imshow(best, cmap="viridis", aspect="auto", vmin=low, vmax=max(high, low + 0.01))
    for (row, column), value in np.ndenumerate(best.to_numpy()):
        text = f"{value:.2f}" if np.isfinite(value) else "✗"
        colour = "white" if value < (low + high) / 2 else "black"
        weight = "bold" if value == high else "normal"
        axes.text(column, row, text, ha="center", va="center", color=colour, fontweight=weight)
    axes.set_xticks(range(width), best.columns)
    axes.set_yticks(range(height), best.index)
    axes.set(title=title, xlabel=x.strip(), ylabel=y.strip())
    figure.colorbar(picture, ax=axes, label="all clients, validation, %", shrink=0.9)
    return figure


# -------------------------------------------------------------------------------- the command


class Sweep:
    """A grid, its runs and its result."""

    def __init__(self, config: Config, options: cli.Options):
        more, self.options, self.given = options.more, options, config
        if more.coordinator is not None:
            raise bad("coordinator", more.coordinator, "nothing: a sweep is run by one process")
        self.grid = parse_grid(more.grid) if more.grid else paper_grid(config.method)
        self.seeds = cli.seeds(more.seeds) or [config.seed]
        self.stages = [config.rounds]
        if more.halving:
            self.stages = [config.rounds // 4, config.rounds // 2, config.rounds]
            if more.drop_checkpoints:
                raise bad("drop_checkpoints", True, "off beside --halving, which resumes from them")
            if config.rounds % 4 or "rounds" in self.grid:
                accepted = "a multiple of 4, and not in the grid, beside --halving"
                raise bad("rounds", config.rounds, accepted)
            if config.method == "fedkd" and config.fedkd.coding != "none":
                accepted = "off for FedKD, whose coding depends on the last round, unless none"
                raise bad("halving", True, accepted)
        self.base = options.run_dir if more.run_dir else Path("runs") / f"sweep-{options.name}"
        held_out = config.validation_fraction or HELD_OUT
        # What --halving decides by must be evaluated at the end of each stage.
        every = max(1, self.stages[0])
        self.config = replace(config, validation_fraction=held_out, eval_every=every)
        self.points = points(self.grid)
        for point in self.points:
            self.task(point, self.seeds[0])  # raises on the first that cannot work

    def task(self, point: Point, seed: int, rounds: int | None = None) -> Task:
        config = replace(at(self.config, point), seed=seed)
        config = config if rounds is None else replace(config, rounds=rounds)
        return Task(config.check(), self.base / label(point) / f"seed{seed}")

    def run(self, **shared: Any) -> list[Score]:
        """All points' scores; with --halving those of the points kept are the later ones."""
        scores, chosen, more = {}, self.points, self.options.more
        shared |= {"split_of": validation_split, "drop_checkpoints": more.drop_checkpoints}
        with Signals() as signals:
            for number, rounds in enumerate(self.stages):
                fresh, length = more.fresh and number == 0, rounds if more.halving else None
                asked = [self.task(point, seed, length) for point in chosen for seed in self.seeds]
                tasks = [look(task, fresh=fresh, longer=True) for task in asked]
                done = sum(task.state == "done" for task in tasks)
                words = f" of {rounds} rounds" if more.halving else ""
                console.print(f"{len(tasks)} runs{words}, {done} of them done")
                runs = iter(run_all(tasks, signals=signals, **shared))
                found = []
                for point in chosen:
                    mine = list(itertools.islice(runs, len(self.seeds)))
                    found.append(Score(point, mine, [_accuracy(run, length) for run in mine]))
                scores |= {label(score.point): score for score in found}
                keep = -(-len(self.points) // 2 ** (number + 1))
                chosen = [score.point for score in ranked(found)[:keep]]
        return list(scores.values())

    def write(self, scores: list[Score]) -> None:
        """Table, numbers, the configuration that was chosen, and last a picture."""
        title = f"{find_method(self.given.method).title}, {self.given.dataset}"
        headings, cells = rows(scores)
        print_table(headings, cells, "Accuracy on validation data, after the last round")
        held_out = f"{100 * self.config.validation_fraction:g} % of each client's training data"
        head = f"# {title}: {len(scores)} settings, evaluated on {held_out}"
        text = f"{head}\n\n`{self.options.command}`\n\n![heat map](sweep.png)\n\n"
        write_atomically(self.base / "sweep.md", text + markdown(headings, cells))
        content = [
            {
                "point": one.point,
                "accuracy": one.accuracy,
                "validation": list(one.validation),
                "diverged": one.diverged,
                "rounds": [run.summary.rounds for run in one.runs],
                "seeds": self.seeds,
            }
            for one in ranked(scores)
        ]
        write_atomically(self.base / "sweep.json", json.dumps(content, indent=2) + "\n")
        lengths = [one.runs[0].summary.rounds for one in scores]
        whole = [s for s, n in zip(scores, lengths, strict=True) if n == max(lengths)]
        # With --halving among those that went all the way.
        best = ranked(whole if self.options.more.halving else scores)[0]
        if best.accuracy is None:
            words = "diverged; try lower learning rates"
            raise PfedafmError(f"nothing to choose: all runs of {self.base} {words}")
        about = (
            f"The best of {len(scores)} settings, {percent(best.accuracy)} % of all clients' "
            f"validation images right\n({held_out}, seeds {', '.join(map(str, self.seeds))}), "
            f"chosen by\n  {self.options.command}"
        )
        write_atomically(self.base / "best.toml", at(self.given, best.point).toml(about))
        plots.save(heat_map(scores, title), self.base / "sweep.png")
        for name in ("sweep.md", "sweep.json", "best.toml", "sweep.png"):
            console.print(f"  {self.base / name}")


def _accuracy(run: Run, rounds: int | None) -> float | None:
    """All clients after `rounds`; a longer run from before may not have evaluated them then."""
    then = run.records[(rounds or run.summary.rounds) - 1].all_clients_accuracy
    return run.summary.final_all_clients_accuracy if then is None else then


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--grid", action="append", default=[], metavar="SETTING=A,B,…",
        help="values of a setting; may be repeated (default: the paper's grid)")  # fmt: skip
    add("--seeds", default="", metavar="0,1,…", help="several seeds: the choice is by their mean")
    halving = "a quarter of the rounds for all, half for the better half, all for the best quarter"
    add("--halving", action="store_true", help=halving)
    add("--drop-checkpoints", action="store_true", help="remove those of a run that is finished")


def main(argv: list[str]) -> int:
    config, options = cli.parse(argv, "sweep", __doc__ or "", add_options)
    sweep = Sweep(config, options)
    shared = options.start(config.devices)
    check_writable(sweep.base)
    axes = ", ".join(f"{name} ({len(values)})" for name, values in sweep.grid.items())
    console.print(f"{find_method(config.method).title} on {config.dataset}: {axes}", style="bold")
    sweep.write(sweep.run(**shared))
    return 0
