"""How cost grows: `python benchmarks/scaling.py` measures seconds per round and memory against the
number of clients (N), participants (K), local epochs (E) and devices, and draws them.

Every point is a process of its own, so its peak of memory is its own. The points of one curve run
in turns. All clients have 480 training and 120 test images, whatever their number (they share
them), and every round has the same mixture of architectures: so only what is on the axis changes.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Contender, Work, console, numbers, progress, spread
from matplotlib.figure import Figure
from rich.table import Table

from pfedafm_jax.base.errors import PfedafmError, bad, known
from pfedafm_jax.cli.main import guarded
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition
from pfedafm_jax.data.load import load_data
from pfedafm_jax.results import plots, style

TITLES = {"N": "clients, N", "K": "participants a round, K", "E": "local epochs, E"}
TITLES["devices"] = "devices"
MEMORY = {
    "peak_bytes": (plots.ORANGE, "peak of the process during rounds"),
    "device_bytes": (plots.GREEN, "arrays on the devices"),
    "store_bytes": (plots.GREY, "states of all clients, room taken when drawn"),
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = common.parser("scaling", __doc__)
    add = made.add_argument
    add("--series", default="N,K,E,devices", metavar="A,B", help="which curves (%(default)s)")
    add("--clients", default="100,1000,10000", metavar="N,…", help="(%(default)s)")
    add("--participants", default="5,10,20,40", metavar="K,…", help="(%(default)s)")
    add("--epochs", default="1,2,4", metavar="E,…", help="(%(default)s)")
    add("--devices", default="1,2,4", metavar="D,…", help="(%(default)s)")
    add("--batch-size", type=int, default=64, help="(%(default)s)")
    add("--samples", type=int, default=6000, help="generated images (%(default)s)")
    return made.parse_args(argv)


def base_config(options: argparse.Namespace) -> Config:
    """The point that every curve goes through: N = 100, K = 10, E = 1, automatic devices."""
    return Config(
        dataset="synthetic",
        synthetic_samples=options.samples,
        num_clients=100,
        participation=0.1,
        architectures=tuple(options.architectures.split(",")),
        local_epochs=1,
        batch_size=options.batch_size,
        seed=options.seed,
    )


def series_of(options: argparse.Namespace, base: Config) -> dict[str, dict[int, dict[str, Any]]]:
    """Curve → value on its axis → the settings that differ from the base."""
    wanted = options.series.split(",")
    for name in wanted:
        if name not in TITLES:
            raise bad("series", name, known(name, TITLES))
    values = {n: numbers(getattr(options, n), n) for n in ("clients", "participants", "epochs")}
    fewest = base.num_participants
    if min(values["clients"]) < fewest or max(values["participants"]) > base.num_clients:
        most = f"participants at most {base.num_clients}"
        raise PfedafmError(f"clients must be {fewest} or more, {most}")
    found: dict[str, dict[int, dict[str, Any]]] = {
        "N": {n: {"num_clients": n, "participation": fewest / n} for n in values["clients"]},
        "K": {k: {"participation": k / base.num_clients} for k in values["participants"]},
        "E": {e: {"local_epochs": e} for e in values["epochs"]},
        "devices": {d: {"devices": d} for d in numbers(options.devices, "devices")},
    }
    for points in found.values():
        for change in points.values():
            updated(base, **change)
    return {name: found[name] for name in wanted}


def measure_series(
    folder: Path, points: dict[int, dict[str, Any]], batch_size: int, repeats: int
) -> list[dict]:
    """One curve: its points prepared one after the other, then timed in turns."""
    contenders: dict[int, Contender] = {}
    reports: dict[int, dict[str, Any]] = {}
    seconds: dict[int, list[float]] = {value: [] for value in points}
    try:
        for value, change in points.items():
            contenders[value] = Contender("point", folder, settings=change)
            try:
                reports[value] = contenders[value]("prepare", batch_size=batch_size)
            except PfedafmError as error:
                progress.print(f"  {value}: left out, {error}")
                contenders.pop(value).close()
        for number in range(repeats + 1):  # the first round warms up
            for value, contender in contenders.items():
                answer = contender("numbered_round", number=number + 1)
                seconds[value] += [answer["seconds"]] if number else []
        for value, contender in contenders.items():
            reports[value] |= contender("memory")
    finally:
        for contender in contenders.values():
            contender.close()
    return [{"value": v, "spread": spread(seconds[v]), **reports[v]} for v in contenders]


def print_series(name: str, rows: list[dict[str, Any]]) -> None:
    """One curve as a table at 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in (name, "seconds", "least–most", "× first", "peak MB", "devices", "store MB", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        one = row["spread"]
        table.add_row(
            f"{row['value']:,}",
            f"{one['median']:.2f}",
            f"{one['min']:.2f}–{one['max']:.2f}",
            f"{one['median'] / rows[0]['spread']['median']:.2f}",
            *(f"{row[kind] / 2**20:.0f}" for kind in MEMORY),
            "disk" if row["store_on_disk"] else "",
        )
    console.print(table)


def draw(series: dict[str, list[dict[str, Any]]], title: str) -> Figure:
    """Small multiples: seconds above, memory below, one column a curve."""
    figure, [above, below] = style.panels(2, len(series), 3.2, 2.6)
    for upper, lower, (name, rows) in zip(above, below, series.items(), strict=True):
        places, ends = np.arange(len(rows)), ("min", "median", "max")
        low, middle, high = (np.array([row["spread"][end] for row in rows]) for end in ends)
        error = [middle - low, high - middle]
        upper.errorbar(places, middle, yerr=error, fmt="o-", color=plots.BLUE, capsize=2)
        for kind, (colour, label) in list(MEMORY.items())[:2]:
            values = [row[kind] / 2**30 for row in rows]
            lower.plot(places, values, "o-", color=colour, markersize=4, label=label)
        for axes, what in ((upper, "seconds a round"), (lower, "memory, GB")):
            axes.set_xticks(places, [f"{row['value']:,}" for row in rows])
            axes.set(ylim=(0, 1.08 * axes.get_ylim()[1]), xlabel=TITLES[name], ylabel=what)
    figure.suptitle(title, fontsize=10)
    handles, labels = below[0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=2, loc="outside lower center")
    return figure


def main(argv: list[str]) -> int:
    options = parse(argv)
    base = base_config(options)
    series, repeats = series_of(options, base), options.repeats or (3 if options.quick else 5)
    json_file, picture = (common.writable(getattr(options, n), n) for n in ("json", "plot"))
    results: dict[str, Any] = {"machine": common.machine(), "base": base.as_dict(), "series": {}}
    results["command"] = f"python {shlex.join(sys.argv)}"
    nothing = (np.zeros(1, np.int32),)
    with tempfile.TemporaryDirectory(prefix="pfedafm-scaling-") as name:
        # Without a split: every point makes its own for its number of clients.
        Work(base, load_data(base), Partition(nothing, nothing, nothing)).save(Path(name))
        for curve, points in series.items():
            progress.print(f"{TITLES[curve]}: {', '.join(map(str, points))}")
            rows = measure_series(Path(name), points, base.batch_size, repeats)
            results["series"][curve] = rows
            print_series(curve, rows)
    for kind, (_, label) in MEMORY.items():
        console.print(f"{kind.partition('_')[0]}: {label}", style="dim")
    networks = ", ".join(map(plots.architecture_label, base.architectures))
    drawn = {curve: rows for curve, rows in results["series"].items() if rows}
    figure = draw(drawn, f"pFedAFM, {networks}, batch {base.batch_size}")
    console.print(f"  {plots.save(figure, picture or 'scaling.png')}")
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    guarded(main)
