"""How cost grows: `python benchmarks/scaling.py` measures seconds a round and memory against the
number of clients (N), participants (K), local epochs (E) and devices, and draws them.

Every point is a process of its own, so its peak of memory is its own. The points of one curve run
in turns. All clients have 480 training and 120 test images, whatever their number (they share
them), and every round has the same mixture of architectures: so only what is on the axis changes.
"""

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import numpy as np
from common import Contender, Work, console, numbers, progress, ratio, spread, text
from matplotlib.figure import Figure
from rich.table import Table

from pfedafm_jax import plots
from pfedafm_jax.cli import guarded
from pfedafm_jax.config import Config
from pfedafm_jax.data import Partition
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import load_data
from pfedafm_jax.settings import bad, known

TITLES = {"N": "clients, N", "K": "participants a round, K", "E": "local epochs, E"}
TITLES["devices"] = "devices"
MEGABYTE = 2**20


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = common.parser("scaling", __doc__)
    add = made.add_argument
    add("--quick", action="store_true", help="minutes: two architectures, fewer points and repeats")
    add("--series", default="N,K,E,devices", metavar="A,B", help="which curves (%(default)s)")
    add("--clients", default="100,1000,10000", metavar="N,…", help="(%(default)s)")
    add("--participants", metavar="K,…", help="(5,10,20,40; quick: 5,10,20)")
    add("--epochs", metavar="E,…", help="(1,2,4; quick: 1,2)")
    add("--devices", default="1,2,4", metavar="D,…", help="(%(default)s)")
    add("--architectures", metavar="A,…", help="(all five; quick: cnn1,cnn5)")
    add("--batch-size", type=int, default=64, help="(%(default)s)")
    add("--samples", type=int, default=6000, help="generated images (%(default)s)")
    options = made.parse_args(argv)
    options.participants = options.participants or ("5,10,20" if options.quick else "5,10,20,40")
    options.epochs = options.epochs or ("1,2" if options.quick else "1,2,4")
    five = "cnn1,cnn2,cnn3,cnn4,cnn5"
    options.architectures = options.architectures or ("cnn1,cnn5" if options.quick else five)
    return options


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
    ).check()


def series_of(options: argparse.Namespace, base: Config) -> dict[str, dict[int, dict[str, Any]]]:
    """Curve → value on its axis → the settings that differ from the base."""
    wanted = options.series.split(",")
    for name in wanted:
        if name not in TITLES:
            raise bad("series", name, known(name, TITLES))
    if options.repeats is not None and options.repeats < 1:
        raise bad("repeats", options.repeats, "1 or more")
    clients, epochs = numbers(options.clients, "clients"), numbers(options.epochs, "epochs")
    participants, fewest = numbers(options.participants, "participants"), base.num_participants
    if min(clients) < fewest or max(participants) > base.num_clients:
        most = f"participants at most {base.num_clients}"
        raise PfedafmError(f"clients must be {fewest} or more, {most}")
    found: dict[str, dict[int, dict[str, Any]]] = {
        "N": {n: {"num_clients": n, "participation": base.num_participants / n} for n in clients},
        "K": {k: {"participation": k / base.num_clients} for k in participants},
        "E": {e: {"local_epochs": e} for e in epochs},
        "devices": {d: {"devices": d} for d in numbers(options.devices, "devices")},
    }
    for points in found.values():
        for change in points.values():
            replace(base, **change).check()
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
                progress.print(f"  {value}: left out, {error}", style="dim")
                contenders.pop(value).close()
        for number in range(1, repeats + 2):  # the first round warms up
            for value, contender in contenders.items():
                answer = contender("numbered_round", number=number)
                if number > 1:
                    seconds[value].append(answer["seconds"])
        memory = {value: contender("memory") for value, contender in contenders.items()}
    finally:
        for contender in contenders.values():
            contender.close()
    rows = []
    for value in contenders:
        found = spread(seconds[value])
        assert found is not None
        row = {"value": value, "round_seconds": found["median"], "spread": found}
        rows.append({**row, **reports[value], **memory[value]})
    return rows


# --------------------------------------------------------------------------------------- for people


def print_series(name: str, rows: list[dict[str, Any]]) -> None:
    """One curve as a table at 80 columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    times = (name, "seconds", "least–most", "× first")
    for column in (*times, "peak MB", "rounds", "devices", "store MB", ""):
        table.add_column(column, justify="right", no_wrap=True)
    kinds = ("peak_bytes", "rounds_peak_bytes", "device_bytes", "store_bytes")
    for row in rows:
        table.add_row(
            f"{row['value']:,}",
            text(row["round_seconds"]),
            f"{row['spread']['min']:.2f}–{row['spread']['max']:.2f}",
            text(ratio(row["round_seconds"], rows[0]["round_seconds"])),
            *(text(row[kind] and row[kind] / MEGABYTE, 0) for kind in kinds),
            "disk" if row["store_on_disk"] else "",
        )
    console.print(table)


def draw(series: dict[str, list[dict[str, Any]]], title: str) -> Figure:
    """Small multiples: seconds above, memory below, one column a curve."""
    figure = Figure(figsize=(2.9 * max(2, len(series)), 5.2), layout="constrained")
    panels = figure.subplots(2, len(series), squeeze=False)
    for (upper, lower), (name, rows) in zip(panels.T, series.items(), strict=True):
        places = np.arange(len(rows))
        middle = np.array([row["round_seconds"] for row in rows])
        low = middle - [row["spread"]["min"] for row in rows]
        high = np.array([row["spread"]["max"] for row in rows]) - middle
        look: Any = {"fmt": "o-", "color": plots.BLUE, "linewidth": 1.4, "capsize": 2}
        upper.errorbar(places, middle, yerr=[low, high], **look)
        kinds = (
            ("peak_bytes", plots.ORANGE, "peak of the process"),
            ("rounds_peak_bytes", plots.BLUE, "peak during rounds"),
            ("device_bytes", plots.GREEN, "arrays on the devices"),
        )
        for key, colour, label in kinds:
            values = [np.nan if row[key] is None else row[key] / 2**30 for row in rows]
            lower.plot(places, values, "o-", color=colour, linewidth=1.2, markersize=4, label=label)
        for axes in (upper, lower):
            axes.set_xticks(places, [f"{row['value']:,}" for row in rows])
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
            axes.margins(x=0.1)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(alpha=0.25, linewidth=0.6)
        lower.set_xlabel(TITLES[name])
    panels[0, 0].set_ylabel("seconds a round")
    panels[1, 0].set_ylabel("memory, GB")
    handles, labels = panels[1, 0].get_legend_handles_labels()
    figure.legend(handles, labels, frameon=False, fontsize=8, ncols=3, loc="outside lower center")
    figure.suptitle(title, fontsize=10)
    return figure


def main(argv: list[str]) -> int:
    options = parse(argv)
    base = base_config(options)
    series = series_of(options, base)
    json_file = common.writable(options.json, "json")
    picture = common.writable(options.plot, "plot")
    assert picture is not None
    about = {"N": base.num_clients, "K": base.num_participants, "E": base.local_epochs}
    about |= {"batch_size": base.batch_size, "architectures": base.architectures}
    results: dict[str, Any] = {"machine": common.machine(), "base": about, "series": {}}
    results["command"] = f"python {shlex.join(sys.argv)}"
    watch, nothing = common.Others(), (np.zeros(1, np.int32),)
    with tempfile.TemporaryDirectory(prefix="pfedafm-scaling-") as name:
        folder = Path(name)
        # Without a split: every point makes its own for its number of clients.
        Work(base, load_data(base), Partition(nothing, nothing, nothing)).save(folder)
        for name, points in series.items():
            progress.print(f"{TITLES[name]}: {', '.join(map(str, points))}", style="dim")
            repeats = options.repeats or (3 if options.quick else 5)
            results["series"][name] = measure_series(folder, points, base.batch_size, repeats)
            print_series(name, results["series"][name])
    results["others"] = watch.shares()
    networks = ", ".join(map(plots.architecture_label, base.architectures))
    title = f"pFedAFM, {networks}, batch {base.batch_size}"
    console.print(
        "peak: of the process, compilation included; rounds: its peak after that;\n"
        "devices: arrays on them; store: states of all clients, room taken when drawn",
        style="dim",
    )
    drawn = {name: rows for name, rows in results["series"].items() if rows}
    console.print(f"  {plots.save(draw(drawn, title), picture)}")
    common.write_json(json_file, results)
    return 0


if __name__ == "__main__":
    guarded(main)
