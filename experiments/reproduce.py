"""The paper's tables and figures with its numbers beside ours: `python experiments/reproduce.py table3 --scale quick`."""

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table as TerminalTable

from pfedafm_jax import cli, setup_devices
from pfedafm_jax.config import Config, bad, config_names, known
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.progress import console
from pfedafm_jax.records import RunFolder
from pfedafm_jax.reproduce import ITEMS, SCALES, Results, Standing, Study, estimator, look, paper
from pfedafm_jax.reproduce.ablations import theory_standing
from pfedafm_jax.reproduce.execute import carry_out
from pfedafm_jax.reproduce.plan import checkpoint_gigabytes, in_words


def parse(argv: Sequence[str]) -> argparse.Namespace:
    about = "\n".join(f"  {name:<22} {item.about}" for name, item in ITEMS.items())
    scales = "\n".join(f"  {scale.name:<22} {scale.about}" for scale in SCALES.values())
    parser = argparse.ArgumentParser(
        prog="experiments/reproduce.py",
        description=__doc__,
        epilog=f"items:\n{about}\n  {'all':<22} all of them\n\nscales:\n{scales}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("item", nargs="+", metavar="ITEM", help="one or more of the items below")
    parser.add_argument("--scale", default="quick", metavar="NAME", help=f"{', '.join(SCALES)} (default: quick)")
    parser.add_argument("--rounds", type=int, metavar="R", help="communication rounds instead of the scale's")
    parser.add_argument("--seeds", metavar="0,1,…", help="default: 0, and three for fig-mix-lr")
    parser.add_argument("--methods", metavar="A,B,…", help="methods instead of those that the paper compares, or all")
    parser.add_argument("--datasets", metavar="A,B", help="cifar10, cifar100 (default: both; smoke: the first)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder or archive with the datasets")
    parser.add_argument("--run-dir", metavar="DIR", help="where runs and results go (default: runs/reproduce-SCALE)")
    parser.add_argument("--devices", type=int, default=0, metavar="N", help="devices to use; 0: all")
    parser.add_argument(
        "--list", action="store_true", help="say what would run, for how long, and what is done already"
    )
    parser.add_argument("--only-finished", action="store_true", help="run nothing, draw what finished runs give")
    parser.add_argument(
        "--drop-checkpoints", action="store_true", help="remove a run's checkpoints when it is finished"
    )
    return parser.parse_args(argv)


def names(given: str, setting: str, accepted: Sequence[str]) -> tuple[str, ...]:
    """Names with commas between them; `all`: every one."""
    chosen = tuple(accepted) if given == "all" else tuple(dict.fromkeys(given.split(",")))
    for name in chosen:
        if name not in accepted:
            raise bad(setting, name, "all, or some of " + known(name, accepted))
    return chosen


def study_of(asked: argparse.Namespace) -> Study:
    """What was asked for, checked."""
    if asked.scale not in SCALES:
        raise bad("scale", asked.scale, known(asked.scale, SCALES))
    if asked.rounds is not None and asked.rounds < 1:
        raise bad("rounds", asked.rounds, "1 or more")
    scale = SCALES[asked.scale]
    try:
        seeds = None if asked.seeds is None else tuple(dict.fromkeys(int(seed) for seed in asked.seeds.split(",")))
    except ValueError:
        raise bad("seeds", asked.seeds, "whole numbers like 0,1,2") from None
    return Study(
        scale,
        Path(asked.run_dir or f"runs/reproduce-{scale.name}"),
        {name: Config.load(name) for name in config_names()},
        scale.datasets if asked.datasets is None else names(asked.datasets, "datasets", tuple(paper.DATASETS)),
        None if asked.methods is None else names(asked.methods, "methods", method_names()),
        seeds,
        asked.rounds,
        asked.data_dir,
        asked.only_finished,
        console.print,
    )


def print_runs(standings: Sequence[Standing], seconds: Sequence[float]) -> None:
    table = TerminalTable(box=None, pad_edge=False)
    for column in ("run", "state", "rounds", "time left"):
        table.add_column(column, justify="left" if column in ("run", "state") else "right", no_wrap=True)
    for standing, left in zip(standings, seconds, strict=True):
        run = standing.run
        done = standing.summary["rounds"] if standing.state == "done" and standing.summary else standing.rounds_done
        words = "" if standing.state == "done" else in_words(left)
        table.add_row(run.name, standing.state, f"{done}/{run.config.rounds}", words)
    console.print(table)


def print_plan(study: Study, items: Sequence[str], standings: Sequence[Standing], seconds: Sequence[float]) -> None:
    """What there is to do, before it starts."""
    pending = [standing for standing in standings if standing.state != "done"]
    what = "all" if len(items) == len(ITEMS) else ", ".join(items)
    console.print(f"[bold]{what}[/bold], scale {study.scale.name}: {study.scale.about}")
    if not standings:
        return
    text = f"{len(standings)} runs, {len(standings) - len(pending)} of them done"
    if pending and not study.only_finished:
        text += f"; the rest takes about {in_words(sum(seconds))} on this machine"
        size = sum(checkpoint_gigabytes(standing.run.config) for standing in pending)
        if size >= 1:
            text += f" and {size:.0f} GB of checkpoints (--drop-checkpoints removes those of finished runs)"
    console.print(text)


def main() -> int:
    asked = parse(sys.argv[1:])
    items = list(ITEMS) if "all" in asked.item else list(dict.fromkeys(asked.item))
    for name in items:
        if name not in ITEMS:
            raise bad("item", name, known(name, [*ITEMS, "all"]))
    study = study_of(asked)
    for name in study.methods or ():
        find_method(name)
    setup_devices(asked.devices)
    if not (asked.list or asked.only_finished):
        RunFolder(study.base).check()
    runs = {run.folder: run for name in items for run in ITEMS[name].runs(study)}
    standings = [look(run) for run in runs.values()]
    seconds_left = estimator(standings, study.scale.start_seconds)
    everything = [*standings, *([theory_standing(study)] if "fig-theory" in items else [])]
    seconds = [seconds_left(standing) for standing in everything]
    print_plan(study, items, everything, seconds)
    if asked.list:
        print_runs(everything, seconds)
        return 0
    command = shlex.join(["experiments/reproduce.py", *sys.argv[1:]])
    if not asked.only_finished:
        summaries = carry_out(standings, seconds_left, data_dir=asked.data_dir, command=f"python {command}",
                              drop_checkpoints=asked.drop_checkpoints)  # fmt: skip
        found = {standing.run.folder: summary for standing, summary in zip(standings, summaries, strict=True)}
    else:
        found = {standing.run.folder: standing.summary for standing in standings if standing.summary is not None}
    for standing in (look(run) for name in items for run in ITEMS[name].also(study)):
        if standing.summary is not None:
            found[standing.run.folder] = standing.summary
    return draw(study, items, Results(found))


def draw(study: Study, items: Sequence[str], results: Results) -> int:
    """Every item's files; items that nothing is finished for are named."""
    for name in items:
        needed = ITEMS[name].runs(study)
        outcome = ITEMS[name].draw(study, results) if not needed or results.all(needed) else None
        if outcome is None:
            console.print(f"\n[bold]{name}[/bold]: nothing is finished yet")
            continue
        used = results.all(needed)
        head = f"`python experiments/reproduce.py {name} --scale {study.scale.name}`: {study.scale.about}."
        if used:
            devices = ", ".join(sorted({str(run.summary.get("devices")) for run in used}))
            minutes = in_words(sum(run.summary["seconds"] for run in used))
            sources = "; ".join(sorted({str(run.summary["data_source"]) for run in used}))
            head += f"\n{len(used)} of {len(needed)} runs, {minutes} of training on {devices}. Data: {sources}."
        outcome.show(console)
        for path in outcome.save(study.base, name, head):
            console.print(f"  {path}")
    return 0


if __name__ == "__main__":
    cli.guarded(main)
