"""How fast is a round? `python benchmarks/speed.py` runs everything side by side on the same work,
in one run:

this engine; the same with XLA's kernels instead of native ones; PyTorch with one process per core,
the frozen features cached, the fastest layout and SGD; a careful PyTorch loop on all cores; one in
the manner of the released code; and the limit of the machine. `--quick` takes a few minutes.
PyTorch comes with `pip install -e '.[bench]'`; without it the rest still runs.

Rounds differ in work, as participants differ in model and samples. So that they compare, each
repeat's seconds are scaled to a round of mean work: `seconds · mean FLOPs / FLOPs of this repeat`.
"""

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Contender, Work, console, numbers, progress, spread
from matplotlib.figure import Figure
from rich.table import Table

from pfedafm_jax.base.errors import bad, known
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.results import plots
from pfedafm_jax.results import style as figures

LABELS = {
    "ours": "this engine",
    "ours_xla": "this engine, XLA's kernels",
    "torch_strongest": "PyTorch, a process a core",
    "torch_clean": "PyTorch, careful loop",
    "torch_released": "PyTorch, as released",
}
COLOURS = dict(zip(LABELS, figures.COLOURS, strict=False))
FEW = ("torch_released", "ours_xla")  # slow, and with --quick measured twice only


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = common.parser("speed", __doc__)
    add = made.add_argument
    add("--epochs", type=int, metavar="E", help="local epochs (2; quick: 1)")
    add("--batch-sizes", default="64,512", metavar="A,B", help="(%(default)s)")
    add("--clients", type=int, default=100, metavar="N", help="(%(default)s)")
    add("--participants", type=int, default=10, metavar="K", help="(%(default)s)")
    add("--samples", type=int, default=60_000, help="generated images (%(default)s)")
    add("--without", default="", metavar="A,B", help=f"leave out some of {', '.join(LABELS)}")
    return made.parse_args(argv)


def settings(options: argparse.Namespace) -> Config:
    """The run's settings, checked."""
    if not 1 <= options.participants <= options.clients:
        raise bad("participants", options.participants, f"1 to {options.clients}")
    return Config(
        dataset="synthetic",
        synthetic_samples=options.samples,
        num_clients=options.clients,
        participation=options.participants / options.clients,
        architectures=tuple(options.architectures.split(",")),
        local_epochs=options.epochs or (1 if options.quick else 2),
        seed=options.seed,
    )


def repeats_of(options: argparse.Namespace) -> dict[str, int]:
    """The contenders to run, and how often each is timed."""
    left_out = [name for name in options.without.split(",") if name]
    for name in left_out:
        if name not in LABELS or name == "ours":
            raise bad("without", name, known(name, [*LABELS][1:]))
    if importlib.util.find_spec("torch") is None:
        progress.print("PyTorch is not installed (pip install -e '.[bench]'): it is left out")
        left_out += [name for name in LABELS if name.startswith("torch")]
    usual = dict.fromkeys(LABELS, 3 if options.quick else 5)
    usual |= dict.fromkeys(FEW, 2) if options.quick else {}
    found = {name: options.repeats or count for name, count in usual.items()}
    return {name: count for name, count in found.items() if name not in left_out}


# ---------------------------------------------------------------------------------- the measurement


def race(
    contenders: Mapping[str, Callable[..., Any]],
    repeats: Mapping[str, int],
    draws: Sequence[list[int]],
    batch_size: int,
) -> dict[str, Any]:
    """Seconds per round of each contender at this batch size, in turns, and the machine's limit."""
    prepared = {}
    for name, contender in contenders.items():
        progress.print(f"batch {batch_size}: preparing {LABELS[name]}")
        prepared[name] = contender("prepare", batch_size=batch_size)
        for draw in draws[: repeats[name]]:  # everything before the clock
            contender("round", number=0, participants=draw)
    ours = contenders["ours"]
    flops = [ours("flops", participants=draw) for draw in draws]
    progress.print(f"batch {batch_size}: measuring")
    limits = [ours("matmul_gflops")]
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    for repeat in range(max(repeats.values())):
        place = repeat % len(draws)
        for name, contender in contenders.items():
            if repeat < repeats[name]:
                answer = contender("round", number=repeat + 1, participants=draws[place])
                answer["scaled"] = answer["seconds"] * float(np.mean(flops)) / flops[place]
                runs[name].append(answer)
        limits.append(ours("matmul_gflops"))
    found = summary(runs, float(np.mean(flops)), max(limits))
    return {**found, "compile_seconds": prepared["ours"]["compile_seconds"], "settings": prepared}


def summary(
    runs: Mapping[str, list[dict[str, Any]]], mean_flops: float, limit: float
) -> dict[str, Any]:
    """Numbers of one batch size; what was not measured is null."""
    spreads = {name: spread([run["scaled"] for run in rows]) for name, rows in runs.items()}
    seconds = {name: spreads[name]["median"] if name in spreads else None for name in LABELS}
    ours = seconds["ours"]
    others = {name: value for name, value in seconds.items() if name != "ours"}
    return {
        **{f"{name}_round_seconds": value for name, value in seconds.items()},
        **{f"ratio_vs_{n}": value and round(value / ours, 3) for n, value in others.items()},
        "round_gflop": round(mean_flops / 1e9, 4),
        "gflops": round(mean_flops / ours / 1e9, 4),
        "peak_gflops": round(limit, 2),
        "peak_fraction": round(mean_flops / ours / 1e9 / limit, 3),
        "spread": spreads,
        "learned": {
            name: [[round(row[what], 4) for what in ("loss", "accuracy")] for row in rows]
            for name, rows in runs.items()
        },
    }


# --------------------------------------------------------------------------------------- for people


def about(work: Mapping[str, Any]) -> str:
    return f"pFedAFM, N = {work['N']}, K = {work['K']}, E = {work['E']}"


def print_results(results: dict[str, Any], batch_sizes: list[int]) -> None:
    """The table at 80 columns, and the limits below it."""
    console.print(f"[bold]{about(results['work'])}[/bold]: seconds a round, least–most, ratio")
    table = Table("", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for size in batch_sizes:
        for heading, style in (("", None), (f"batch {size}", "dim"), ("", None)):
            table.add_column(heading, justify="right", style=style, no_wrap=True)
    for name, label in LABELS.items():
        cells: list[str] = []
        for found in (results[str(size)] for size in batch_sizes):
            one, times = found["spread"].get(name), found.get(f"ratio_vs_{name}") or 1.0
            shown = one and [
                f"{one['median']:.2f}",
                f"{one['min']:.2f}–{one['max']:.2f}",
                f"{times:.2f}×",
            ]
            cells += shown or ["–", "", ""]
        table.add_row(label, *cells)
    console.print(table)
    for size in batch_sizes:
        found = results[str(size)]
        console.print(
            f"batch {size}: {found['gflops']:.0f} GFLOP/s, {found['peak_fraction']:.2f} of matrix "
            f"products on all cores; compiled in {found['compile_seconds']:.1f} s"
        )
    console.print(f"kernels: {results[str(batch_sizes[0])]['settings']['ours']['kernels']}")
    console.print(
        f"load at the start: {results['machine']['load_at_start']} (trust a quiet machine)"
    )


def draw(results: dict[str, Any], batch_sizes: list[int]) -> Figure:
    """Bars of seconds per round, one panel per batch size, with the least and largest repeat."""
    figure, [panels] = figures.panels(1, len(batch_sizes), 5.0, 3.4, sharey=True)
    for axes, size in zip(panels, batch_sizes, strict=True):
        found = results[str(size)]
        longest = max(one["max"] for one in found["spread"].values())
        for place, (name, one) in enumerate(found["spread"].items()):
            middle = one["median"]
            error = [[middle - one["min"]], [one["max"] - middle]]
            axes.barh(place, middle, xerr=error, color=COLOURS[name], height=0.7)
            times = "" if name == "ours" else f"  ({found[f'ratio_vs_{name}']:.1f}×)"
            label = f"{middle:.2f} s{times}"
            axes.text(one["max"] + 0.02 * longest, place, label, va="center", fontsize=8)
        axes.set(title=f"batch {size}", xlabel="seconds a round", xlim=(0, 1.4 * longest))
        axes.set_yticks(range(len(found["spread"])), [LABELS[name] for name in found["spread"]])
    panels[0].invert_yaxis()
    place = results["machine"]
    title = f"{about(results['work'])}: {place['cores']} cores, {place['cpu']}"
    figure.suptitle(title, fontsize=10)
    return figure


def main(argv: list[str]) -> int:
    options = parse(argv)
    batch_sizes = numbers(options.batch_sizes, "batch_sizes")
    config, repeats = settings(options), repeats_of(options)
    json_file, picture = (common.writable(getattr(options, n), n) for n in ("json", "plot"))
    work = {"N": config.num_clients, "K": config.num_participants, "E": config.local_epochs}
    results: dict[str, Any] = {"machine": common.machine(), "work": work}
    results["command"] = f"python {shlex.join(sys.argv)}"
    draws = [
        draw_participants(config.seed, t, config.num_clients, config.num_participants).tolist()
        for t in range(1, (1 if options.quick else 5) + 1)
    ]
    begin, contenders = time.perf_counter(), {}
    dataset = load_data(config)
    with tempfile.TemporaryDirectory(prefix="pfedafm-speed-") as name:
        folder = Path(name)
        Work(config, dataset, split(config, dataset)).save(folder / "work")
        try:
            for name in repeats:  # the engine's cache is empty: its compilation is reported
                cache = folder / "cache" if name == "ours" else None
                contenders[name] = Contender(name, folder / "work", cache)
            for size in batch_sizes:
                results[str(size)] = race(contenders, repeats, draws, size)
        finally:
            for contender in contenders.values():
                contender.close()
    results["seconds"] = round(time.perf_counter() - begin, 1)
    print_results(results, batch_sizes)
    console.print(f"  {plots.save(draw(results, batch_sizes), picture or 'speed.png')}")
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    guarded(main)
