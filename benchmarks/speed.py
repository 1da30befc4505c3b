"""How fast is a round? `python benchmarks/speed.py` runs everything side by side on the same work,
in one run:

this engine; the same with XLA's kernels instead of native ones; PyTorch with one process a core,
the frozen features cached, the fastest layout and SGD; a careful PyTorch loop on all cores; one in
the manner of the released code; and the limit of the machine. `--quick` takes a few minutes.
PyTorch comes with `pip install -e '.[bench]'`; without it the rest still runs.
"""

import argparse
import importlib.util
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
from common import Others, Work, console, numbers, progress, ratio, text
from matplotlib.figure import Figure
from race import FULL, LABELS, QUICK, TORCH, Race, start_times
from rich.table import Table

from pfedafm_jax import plots
from pfedafm_jax.cli import guarded
from pfedafm_jax.config import Config
from pfedafm_jax.experiment import load_data, split
from pfedafm_jax.settings import bad, known

QUIET = 0.03  # of all cores taken by others: above it the numbers are not to be trusted
_COLOURS = (plots.BLUE, "#8fb3dc", plots.ORANGE, "#d9a066", "#b0413e")
COLOURS = dict(zip(LABELS, _COLOURS, strict=True))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = common.parser("speed", __doc__)
    add = made.add_argument
    add("--quick", action="store_true", help="everything in a few minutes: E = 1, fewer repeats")
    add("--data", default="synthetic", choices=("synthetic", "cifar10"), help="(%(default)s)")
    add("--data-dir", metavar="DIR", help="folder or archive with CIFAR-10")
    add("--epochs", type=int, metavar="E", help="local epochs (2; quick: 1)")
    add("--batch-sizes", default="64,512", metavar="A,B", help="(%(default)s)")
    add("--clients", type=int, default=100, metavar="N", help="(%(default)s)")
    add("--participants", type=int, default=10, metavar="K", help="(%(default)s)")
    add("--samples", type=int, default=60_000, help="generated images (%(default)s)")
    add("--architectures", default="cnn1,cnn2,cnn3,cnn4,cnn5", metavar="A,B", help="(%(default)s)")
    names = ", ".join([*LABELS, "start"])
    add("--without", default="", metavar="A,B", help=f"leave out some of {names}")
    return made.parse_args(argv)


def settings(options: argparse.Namespace) -> Config:
    """The run's settings, checked."""
    if not 1 <= options.participants <= options.clients:
        raise bad("participants", options.participants, f"1 to {options.clients}")
    for name in ("repeats", "epochs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise bad(name, value, "1 or more")
    return Config(
        dataset=options.data,
        synthetic_samples=options.samples,
        num_clients=options.clients,
        participation=options.participants / options.clients,
        architectures=tuple(options.architectures.split(",")),
        local_epochs=options.epochs or (1 if options.quick else 2),
        seed=options.seed,
    ).check()


def chosen(without: str) -> list[str]:
    """Contenders to run, `start` among them."""
    names = [*LABELS, "start"]
    left_out = [name for name in without.split(",") if name]
    for name in left_out:
        if name not in names[1:]:
            raise bad("without", name, known(name, names[1:]))
    if importlib.util.find_spec("torch") is None:
        progress.print("PyTorch is not installed (pip install -e '.[bench]'): it is left out")
        left_out += TORCH
    return [name for name in names if name not in left_out]


def measure(
    options: argparse.Namespace, config: Config, batch_sizes: list[int], names: list[str]
) -> dict[str, Any]:
    """The whole run, as the JSON has it."""
    plan = QUICK if options.quick else FULL
    if options.repeats:
        plan = replace(plan, repeats={name: int(options.repeats) for name in plan.repeats})
    results: dict[str, Any] = {}
    begin = time.perf_counter()

    def say(line: str) -> None:
        progress.print(f"{time.perf_counter() - begin:5.0f} s  {line}", style="dim")

    say("data")
    dataset = load_data(config, options.data_dir, progress.print)
    others = Others()
    with tempfile.TemporaryDirectory(prefix="pfedafm-speed-") as name:
        folder = Path(name)
        Work(config, dataset, split(config, dataset)).save(folder / "work")
        start = None
        if "start" in names:
            say("from start to round one, with an empty and a filled cache")
            first = replace(config, batch_size=batch_sizes[0])
            start = start_times(first, folder, options.data_dir)
        with Race(config, folder / "work", plan, folder / "cache", names) as race:
            for batch_size in batch_sizes:
                results[str(batch_size)] = race.batch(batch_size, say)
    results["start"] = start
    results["work"] = {
        "data": dataset.source,
        "E": config.local_epochs,
        "N": config.num_clients,
        "K": config.num_participants,
        "architectures": list(config.architectures),
    }
    results["others"] = others.shares()
    results["seconds"] = round(time.perf_counter() - begin, 1)
    return results


# --------------------------------------------------------------------------------------- for people


def print_results(results: dict[str, Any], batch_sizes: list[int]) -> None:
    """The table at 80 columns, and the limits below it."""
    work = results["work"]
    about = f"N = {work['N']}, K = {work['K']}, E = {work['E']}"
    console.print(f"[bold]pFedAFM[/bold], {about}: median seconds a round, least–most, ratio")
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for batch_size in batch_sizes:
        table.add_column("", justify="right", no_wrap=True, min_width=6)
        table.add_column(f"batch {batch_size}", justify="right", style="dim", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
    for name, label in LABELS.items():
        cells = []
        for found in (results[str(size)] for size in batch_sizes):
            spread = found["spread"][name]
            if spread is None:
                cells += ["–", "", ""]
                continue
            least, most, digits = spread["min"], spread["max"], 2 if spread["min"] < 10 else 1
            times = ratio(spread["median"], found["ours_round_seconds"])
            times = text(times, 2 if (times or 0) < 10 else 1, "×")
            cells += [text(spread["median"]), f"{least:.{digits}f}–{most:.{digits}f}", times]
        table.add_row(label, *cells)
    console.print(table)
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold")
    for size in batch_sizes:
        found = results[str(size)]
        reached = f"{found['gflops']:.0f} GFLOP/s, {found['peak_fraction']:.2f} of it"
        limit = f"{found['peak_gflops']:.0f} GFLOP/s"
        table.add_row(f"batch {size}: matrix products, all cores", limit)
        table.add_row("  whole round", reached)
        table.add_row("  compilation", f"{found['compile_seconds']:.1f} s")
    table.add_row("kernels", results[str(batch_sizes[0])]["settings"]["ours"]["kernels"])
    for kind in ("cold", "warm") if results["start"] else ():
        seconds = results["start"][f"start_{kind}_seconds"]
        table.add_row(f"start to end of round one, {kind}", f"{seconds:.1f} s")
    console.print(table)
    others = results["others"]
    if others is not None and others["cpu_share"] + others["steal_share"] > QUIET:
        console.print(
            f"[red]The machine was not quiet[/red]: other work took "
            f"{100 * others['cpu_share']:.0f} % of it, the host {100 * others['steal_share']:.0f} %. "
            "Loops with several threads suffer most; measure again."
        )


def draw(results: dict[str, Any], batch_sizes: list[int]) -> Figure:
    """Bars of seconds a round, one panel a batch size, with the least and largest repeat."""
    figure = Figure(figsize=(4.0 + 3.0 * len(batch_sizes), 3.4), layout="constrained")
    panels = figure.subplots(1, len(batch_sizes), sharey=True, squeeze=False)[0]
    shown = [n for n in COLOURS if any(results[str(size)]["spread"][n] for size in batch_sizes)]
    for axes, size in zip(panels, batch_sizes, strict=True):
        found = results[str(size)]
        longest = max(found["spread"][name]["max"] for name in shown if found["spread"][name])
        for place, name in enumerate(shown):
            spread = found["spread"][name]
            if spread is None:
                continue
            middle = spread["median"]
            error = [[middle - spread["min"]], [spread["max"] - middle]]
            look: Any = {"color": COLOURS[name], "height": 0.7, "error_kw": {"linewidth": 0.8}}
            axes.barh(place, middle, xerr=error, **look)
            label = f"{middle:.2f} s"
            if name != "ours":
                label += f"  ({found[f'ratio_vs_{name}']:.1f}×)"
            axes.text(spread["max"] + 0.02 * longest, place, label, va="center", fontsize=8)
        axes.set(title=f"batch {size}", xlabel="seconds a round", xlim=(0, 1.4 * longest))
        axes.set_yticks(range(len(shown)), [LABELS[name] for name in shown])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    panels[0].invert_yaxis()
    work, place = results["work"], results["machine"]
    about = f"N = {work['N']}, K = {work['K']}, E = {work['E']}"
    figure.suptitle(f"pFedAFM, {about}: {place['cores']} cores, {place['cpu']}", fontsize=10)
    return figure


def main(argv: list[str]) -> int:
    options = parse(argv)
    batch_sizes = numbers(options.batch_sizes, "batch_sizes")
    config, names = settings(options), chosen(options.without)
    json_file = common.writable(options.json, "json")
    about = {"machine": common.machine(), "command": f"python {shlex.join(sys.argv)}"}
    picture = common.writable(options.plot, "plot")
    assert picture is not None
    results = {**measure(options, config, batch_sizes, names), **about}
    print_results(results, batch_sizes)
    console.print(f"  {plots.save(draw(results, batch_sizes), picture)}")
    common.write_json(json_file, results)
    return 0


if __name__ == "__main__":
    guarded(main)
