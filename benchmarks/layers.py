"""Where the time of a client's visit goes: `python benchmarks/layers.py` traces one visit of pFedAFM on one core.

Each compiled operation is counted for the layer that it comes from, as a matrix product or as anything else: moving numbers
to where a product needs them, activations, pooling, the optimizer. Products also have their FLOPs, as they are computed.
"""

import argparse
import os
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from common import machine, writable, write_json
from contenders import gflops, pin_to_one_core, square_product
from rich.table import Table

from pfedafm_jax.cli import console, guarded
from pfedafm_jax.config import Config
from pfedafm_jax.engine import Federation, setup_devices
from pfedafm_jax.experiment import load_data, split

LAYER = re.compile(r"\b(conv\d|fc\d)\b")
INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w-]+)\((?P<arguments>.*?)\)"
)
EXECUTION = "ThunkExecutor::Execute"  # a program from beginning to end, or a part of it; some say that they wait for it
INSIDE = ("while", "call", "conditional")  # their time is that of the operations in them


@dataclass(frozen=True)
class Operation:
    """A compiled operation: the layer it comes from, the FLOPs of its product (0: it is not one)."""

    layer: str
    flops: float


def operations(program: str) -> dict[str, Operation]:
    """Operations of a compiled program by the name that a trace has for them."""
    products: dict[str, float] = {}  # of a computation
    found, shapes, computation = {}, {}, ""
    for line in program.splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split()[0].lstrip("%")
        match = INSTRUCTION.match(line)
        if match is None or match["kind"] in INSIDE:
            continue
        shapes[match["name"]] = dimensions(match["type"])
        flops = product_flops(line, match, shapes) if match["kind"] == "dot" else 0.0
        products[computation] = products.get(computation, 0.0) + flops
        called = re.search(r"calls=%([\w.-]+)", line)
        if called:
            flops = products.get(called[1], 0.0)
        source = re.search(r'op_name="([^"]*)"', line)
        layers = LAYER.findall(source[1]) if source else []
        found[match["name"]] = Operation(layers[-1] if layers else "", flops)
    return found


def dimensions(kind: str) -> tuple[int, ...]:
    """`f32[64,500]{1,0}` → (64, 500)."""
    sizes = re.match(r"\w+\[([\d,]*)\]", kind)
    return tuple(int(size) for size in sizes[1].split(",") if size) if sizes else ()


def product_flops(line: str, match: re.Match[str], shapes: dict[str, tuple[int, ...]]) -> float:
    """Two for each number of the result and each number that is summed over."""
    left = shapes[re.findall(r"%([\w.-]+)", match["arguments"])[0]]
    summed = re.search(r"lhs_contracting_dims=\{([\d,]+)\}", line)
    size = np.prod([left[int(axis)] for axis in summed[1].split(",")]) if summed else 1
    return 2.0 * float(np.prod(dimensions(match["type"]))) * float(size)


def durations(folder: Path, programs: int) -> list[dict[str, tuple[float, int]]]:
    """Seconds and calls by name within each of the longest executions in this folder's trace, in order of time."""
    events = [
        (event.start_ns, event.duration_ns, event.name)
        for file in folder.rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
    ]
    whole: list[tuple[float, float, str]] = []
    for event in sorted((event for event in events if event[2].startswith(EXECUTION)), key=lambda event: -event[1]):
        inner = any(start <= event[0] < start + length for start, length, _ in whole)
        if not inner and len(whole) < programs:
            whole.append(event)
    found = []
    for start, length, _ in sorted(whole):
        inside: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
        for at, duration, name in events:
            if start <= at < start + length:
                seconds, calls = inside[name]
                inside[name] = seconds + duration / 1e9, calls + 1
        found.append(inside)
    return found


def profile(federation: Federation, client: int) -> dict[str, dict[str, float]]:
    """A visit of this client: seconds and FLOPs of each layer's products, seconds of everything else."""
    programs = [operations(federation.program_text(name)) for name in (f"client {federation.groups[client]}", "shared")]
    for number in range(3):
        federation.run_round(number, [client])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.host_tracer_level = 0, 3
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            federation.run_round(3, [client])
        measured = durations(Path(folder), len(programs))
    rows: dict[str, dict[str, float]] = defaultdict(lambda: {"products": 0.0, "flop": 0.0, "other": 0.0})
    for phase, (known, inside) in enumerate(zip(programs, measured, strict=True), start=1):
        for name, operation in known.items():
            seconds, calls = inside.get(name, (0.0, 0))
            row = rows[f"phase {phase} {operation.layer or 'rest'}"]
            row["products" if operation.flops else "other"] += seconds
            row["flop"] += operation.flops * calls
    return dict(sorted(rows.items()))


def print_profile(rows: dict[str, dict[str, float]], limit: float, title: str) -> None:
    """One line a layer."""
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for column in ("layer", "products, ms", "GFLOP/s", "of the limit", "anything else, ms"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    total = {key: sum(row[key] for row in rows.values()) for key in ("products", "flop", "other")}
    for name, row in [*rows.items(), ("all", total)]:
        rate = row["flop"] / row["products"] / 1e9 if row["products"] else 0.0
        table.add_row(name, f"{1e3 * row['products']:.1f}", f"{rate:.0f}" if rate else "–",
                      f"{rate / limit:.2f}" if rate else "–", f"{1e3 * row['other']:.1f}")  # fmt: skip
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks/layers.py", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--architecture", default="cnn1", metavar="NAME", help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="B", help="(%(default)s)")
    parser.add_argument("--epochs", type=int, default=1, metavar="E", help="(%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="write the numbers")
    options = parser.parse_args()
    file = writable(options.json, "json")
    os.environ["PJRT_NPROC"] = "1"  # one thread, before JAX starts: seconds of several at once would add up
    setup_devices(1)
    config = Config(dataset="synthetic", synthetic_samples=6000, num_clients=10, devices=1, local_epochs=options.epochs,
                    architectures=(options.architecture,), batch_size=options.batch_size).check()  # fmt: skip
    dataset = load_data(config)
    federation = Federation(config, dataset, split(config, dataset))
    federation.compile()
    pin_to_one_core()
    limit = max(gflops(square_product(federation.devices, size), 5) for size in (1024, 1536, 2048))
    rows = profile(federation, 0)
    title = (
        f"{options.architecture}, {federation.num_train[0]} images, batch {options.batch_size}, E = {options.epochs}"
    )
    print_profile(rows, limit, title)
    console.print(f"limit: {limit:.0f} GFLOP/s, the best of some square products on this core")
    write_json(file, {"work": title, "layers": rows, "peak_gflops": limit, "machine": machine()})
    return 0


if __name__ == "__main__":
    guarded(main)
