"""`speed.py --methods`: every method's seconds a round beside its FLOPs."""

import tempfile
from pathlib import Path
from typing import Any

from common import Contender, Work, console, progress, ratio, spread, text
from rich.table import Table

from pfedafm_jax.config import Config
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.experiment import load_data, split
from pfedafm_jax.methods import chosen_methods, find_method

BASE = "standalone"


def measure_methods(
    config: Config, methods: str, data_dir: str | None, batch_size: int, repeats: int
) -> dict[str, Any]:
    """Seconds and FLOPs of one and the same round by every method.

    Standalone runs in turns with each of them, so that a method's seconds over Standalone's come
    from the same minutes.
    """
    names = chosen_methods(methods)
    for name in names:
        find_method(name)
    dataset = load_data(config, data_dir, progress.print)
    participants = draw_participants(
        config.seed, 1, config.num_clients, config.num_participants
    ).tolist()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pfedafm-methods-") as name:
        folder = Path(name)
        Work(config, dataset, split(config, dataset)).save(folder)
        base = Contender("ours", folder, method=BASE)
        try:
            base("prepare", batch_size=batch_size)
            for method in [BASE, *(method for method in names if method != BASE)]:
                progress.print(f"{find_method(method).title}", style="dim")
                found[method] = _measure(method, base, folder, batch_size, participants, repeats)
        finally:
            base.close()
    for row in found.values():
        row["flops_vs_standalone"] = ratio(row["flops"], found[BASE]["flops"])
        row["seconds_over_flops"] = ratio(row["seconds_vs_standalone"], row["flops_vs_standalone"])
    return found


def _measure(
    method: str,
    base: Contender,
    folder: Path,
    batch_size: int,
    participants: list[int],
    repeats: int,
) -> dict[str, Any]:
    ours = base if method == BASE else Contender("ours", folder, method=method)
    times: dict[str, list[float]] = {"base": [], "ours": []}
    try:
        if ours is not base:
            ours("prepare", batch_size=batch_size)
        for number in range(repeats + 1):
            for name, contender in (("base", base), ("ours", ours)):
                answer = contender("round", number=number, participants=participants)
                if number > 0:  # the first warms up
                    times[name].append(answer["seconds"])
        flops = ours("flops", participants=participants)
    finally:
        if ours is not base:
            ours.close()
    spreads = {name: spread(values) for name, values in times.items()}
    medians = {
        name: None if numbers is None else numbers["median"] for name, numbers in spreads.items()
    }
    return {
        "round_seconds": medians["ours"],
        "flops": flops,
        "seconds_vs_standalone": ratio(medians["ours"], medians["base"]),
        "spread": spreads,
    }


def print_methods(found: dict[str, Any]) -> None:
    """The table at 80 columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for column in ("seconds", "GFLOP", "FLOPs", "time", "time/FLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    for method, row in found.items():
        table.add_row(
            find_method(method).title,
            text(row["round_seconds"]),
            text(row["flops"] / 1e9, 0),
            text(row["flops_vs_standalone"], 2, "×"),
            text(row["seconds_vs_standalone"], 2, "×"),
            text(row["seconds_over_flops"], 2),
        )
    console.print(table)
    console.print("  FLOPs and time: relative to Standalone", style="dim")
