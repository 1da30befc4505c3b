"""The paper's tables and figures beside ours: `python experiments/reproduce.py table3`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from paper import numbers
from paper.items import ITEMS, theory_task
from paper.outcome import lengths
from paper.study import SCALES, Found, Scale, Study, estimator, name_of

from pfedafm_jax import setup_devices
from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.base.files import check_writable
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.methods import chosen_methods
from pfedafm_jax.results.run import Run
from pfedafm_jax.runs.drive import run_all
from pfedafm_jax.runs.existing import Task, find_existing
from pfedafm_jax.runs.progress import in_words, print_table
from pfedafm_jax.runs.signals import Signals


def parse(argv: Sequence[str]) -> argparse.Namespace:
    about = "\n".join(f"  {name:<22} {item.about}" for name, item in ITEMS.items())
    lines = (f"  {one.name:<22} {one.about}; {rounds_of(one)} rounds" for one in SCALES.values())
    more = f"items:\n{about}\n  {'all':<22} all of them\n\nscales:\n" + "\n".join(lines)
    raw, name = argparse.RawDescriptionHelpFormatter, "experiments/reproduce.py"
    parser = argparse.ArgumentParser(
        name, description=__doc__, epilog=more, formatter_class=raw, allow_abbrev=False
    )
    add = parser.add_argument
    add("item", nargs="+", metavar="ITEM", help="one or more of the items below")
    add("--scale", default="quick", metavar="NAME", help=f"{', '.join(SCALES)} (default: quick)")
    add("--rounds", type=int, metavar="R", help="communication rounds instead of the scale's")
    add("--seeds", default="", metavar="0,1,…", help="default: 0, and three for fig-mix-lr")
    add(
        "--methods",
        metavar="A,B,…",
        help="names, or paper, controls, all: instead of those that the paper compares",
    )
    add("--datasets", metavar="A,B", help="cifar10, cifar100 (default: both; smoke: the first)")
    add("--data-dir", metavar="DIR", help="folder or archive with the datasets")
    add("--run-dir", metavar="DIR", help="for runs and results (default: runs/reproduce-SCALE)")
    add("--devices", type=int, default=0, metavar="N", help="devices to use; 0: all")
    add("--list", action="store_true", help="say what would run, how long, and what is done")
    add("--only-finished", action="store_true", help="run nothing, draw what finished runs give")
    add("--drop-checkpoints", action="store_true", help="remove those of finished runs")
    return parser.parse_args(argv)


def rounds_of(scale: Scale) -> str:
    """`500`, or `200 to 500` if datasets have different lengths."""
    return " to ".join(map(str, sorted({*scale.rounds.values()})))


def read_seeds(text: str) -> list[int] | None:
    """`0,1,2` as numbers, without repetition; None for an empty text."""
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(","))) if text else None
    except ValueError:
        raise bad("seeds", text, "whole numbers like 0,1,2") from None


def study_of(asked: argparse.Namespace) -> Study:
    """The command line, checked."""
    if asked.scale not in SCALES:
        raise bad("scale", asked.scale, known(asked.scale, SCALES))
    if asked.rounds is not None and asked.rounds < 1:
        raise bad("rounds", asked.rounds, "1 or more")
    scale = SCALES[asked.scale]
    datasets = tuple(asked.datasets.split(",")) if asked.datasets else scale.datasets
    for name in datasets:
        if name not in numbers.DATASETS:
            raise bad("datasets", name, known(name, numbers.DATASETS))
    methods = chosen_methods(asked.methods) if asked.methods else None
    base = Path(asked.run_dir or f"runs/reproduce-{scale.name}")
    given = methods, read_seeds(asked.seeds), asked.rounds, asked.data_dir, asked.only_finished
    return Study(scale, base, datasets, *given)


def print_plan(
    study: Study, items: Sequence[str], seconds: Sequence[float | None], tasks: Sequence[Task]
) -> None:
    """Prints what there is to do."""
    what = "all" if len(items) == len(ITEMS) else ", ".join(items)
    rounds = study.rounds or rounds_of(study.scale)
    console.print(f"{what}, scale {study.scale.name}, {rounds} rounds: {study.scale.about}")
    done, left = sum(task.state == "done" for task in tasks), sum(one or 0.0 for one in seconds)
    rest = f"; the rest takes about {in_words(left)}, as finished ones did" if left else ""
    console.print(f"{len(tasks)} runs, {done} of them done{rest}")


def existing(tasks: Sequence[Task]) -> dict[Path, Task]:
    """The state of these runs, each looked up once."""
    unique = {task.folder: task for task in tasks if task.folder is not None}
    return {folder: find_existing(task, longer=True) for folder, task in unique.items()}


def main(argv: list[str]) -> int:
    asked = parse(argv)
    items = list(ITEMS) if "all" in asked.item else list(dict.fromkeys(asked.item))
    for name in items:
        if name not in ITEMS:
            raise bad("item", name, known(name, [*ITEMS, "all"]))
    study = study_of(asked)
    if asked.devices < 0:
        raise bad("devices", asked.devices, "0 (all) or more")
    setup_devices(asked.devices)
    if not (asked.list or asked.only_finished):
        check_writable(study.base)
    needed = existing([task for name in items for task in ITEMS[name].tasks(study).values()])
    more = [theory_task(study)] if "fig-theory" in items else []
    everything = [*needed.values(), *more]
    seconds = list(map(estimator(everything), everything))
    print_plan(study, items, seconds, everything)
    if asked.list:
        rows = []
        for one, left in zip(everything, seconds, strict=True):
            rounds = f"{one.rounds_done}/{one.config.rounds}"
            rows.append([name_of(one), one.state, rounds, in_words(left) if left else ""])
        print_table(["run", "state", "rounds", "time left"], rows)
        return 0
    if asked.only_finished:
        done = {folder: task.run for folder, task in needed.items()}
    else:
        with Signals() as signals:
            runs = run_all(
                list(needed.values()),
                data_dir=asked.data_dir,
                drop_checkpoints=asked.drop_checkpoints,
                command=shlex.join(["python", "experiments/reproduce.py", *argv]),
                signals=signals,
            )
        done = dict(zip(needed, runs, strict=True))
    others = existing([task for name in items for task in ITEMS[name].also(study).values()])
    done |= {folder: other.run for folder, other in others.items() if folder not in done}
    for name in items:
        draw(study, name, {folder: run for folder, run in done.items() if run and run.finished})
    return 0


def draw(study: Study, name: str, done: dict[Path, Run]) -> None:
    """Writes an item's files; says so if none of its runs is finished."""
    item = ITEMS[name]
    needed = item.tasks(study)
    wanted = {**item.also(study), **needed}
    found: Found = {
        key: done[task.folder].first(task.config.rounds)
        for key, task in wanted.items()
        if task.folder in done
    }
    used = [found[key] for key in needed if key in found]
    outcome = item.draw(study, found) if used or not needed else None
    if outcome is None:
        console.print(f"\n{name}: nothing is finished yet")
        return
    head = f"`{study.command(name)}`: {study.scale.about}."
    if used:
        devices = ", ".join(sorted({run.summary.devices for run in used}))
        sources = "; ".join(sorted({run.summary.data_source for run in used}))
        minutes = in_words(sum(run.summary.seconds for run in used))
        head += f"\n{len(used)} of {len(needed)} runs of {lengths(used)} rounds, {minutes} of "
        head += f"training on {devices}. Data: {sources}."
    outcome.show()
    for path in outcome.save(study.base, name, head):
        console.print(f"  {path}")


if __name__ == "__main__":
    guarded(main)
