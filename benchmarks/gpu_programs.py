"""What a GPU would run: `python benchmarks/gpu_programs.py` compiles the programs of a method for a
target description (of an A100) and reads the compiler's output.

It needs the extra `cuda12`, but no GPU. Without the extra it only lowers the programs for CUDA, and
says which figures that leaves out. No time here was measured on a card: the time of a round is an
estimate, printed with its assumptions.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hlo import innermost, instructions, launched, read, waits

CARD = Path(__file__).parent / "cards" / "a100.txt"
IMAGES, SIZES = 60_000, (480, 120)  # CIFAR-10, split evenly over 100 clients
ROUNDS = 300  # whose draws are counted
LAUNCH = 3e-6  # seconds per kernel launch; an assumption
FLOPS = {"highest": 19.5e12, "tf32": 156e12, "bfloat16": 312e12}  # an A100's data sheet


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    made = argparse.ArgumentParser("gpu_programs", description=__doc__)
    add = made.add_argument
    add("--method", default="pfedafm", help="(%(default)s)")
    add("--layout", default="lockstep", choices=("lockstep", "loop"), help="(%(default)s)")
    add("--clients-per-step", type=int, default=0, help="(0: automatic)")
    add("--precision", default="highest", choices=tuple(FLOPS), help="(%(default)s)")
    add("--architectures", default="cnn1,cnn2,cnn3,cnn4,cnn5", metavar="A,B", help="(%(default)s)")
    add("--participants", type=int, default=10, help="K, of 100 clients (%(default)s)")
    add("--epochs", type=int, default=10, help="E (%(default)s)")
    add("--batch-size", type=int, default=64, help="(%(default)s)")
    add("--devices", type=int, default=1, help="(%(default)s)")
    add("--card", default=str(CARD), metavar="FILE", help="a GpuTargetConfigProto as text (A100)")
    add("--json", metavar="FILE", help="all numbers")
    return made.parse_args(argv)


# --------------------------------------------------------------------------------- a method's run


def build_engine(options: argparse.Namespace) -> Any:
    """The `Engine` of a run of the method, on blank images and as many CPU devices."""
    import numpy as np

    from pfedafm_jax.config.config import Config
    from pfedafm_jax.data import Partition, dataset_from_arrays
    from pfedafm_jax.engine import Engine, Federation, setup_devices
    from pfedafm_jax.models import kernels

    setup_devices(options.devices, cache=False)
    kernels.choose("xla")
    config = Config(
        method=options.method,
        architectures=tuple(options.architectures.split(",")),
        participation=options.participants / 100,
        local_epochs=options.epochs,
        batch_size=options.batch_size,
        devices=options.devices,
        layout=options.layout,
        clients_per_step=options.clients_per_step,
        kernels="xla",
    )
    images, labels = np.zeros((IMAGES, 32, 32, 3), np.uint8), np.arange(IMAGES) % 10
    dataset = dataset_from_arrays("empty", images, labels, images[:1], labels[:1], num_classes=10)
    rows = np.arange(IMAGES, dtype=np.int32).reshape(100, sum(SIZES))
    train, test = tuple(rows[:, : SIZES[0]]), tuple(rows[:, SIZES[0] :])
    partition = Partition(train, test, (rows[0, :0],) * 100)
    return Engine(Federation.of_partition(config, dataset, partition), dataset, partition)


def described(options: argparse.Namespace) -> tuple[Any, str]:
    """Devices of the target description, or CPU devices that lower for CUDA, and why."""
    import jax
    from jax.experimental import topologies

    from pfedafm_jax.engine import Devices

    try:
        card = topologies.get_topology_desc(
            platform="cuda",
            target_config=Path(options.card).read_text(),
            topology=f"1x1x{options.devices}",
        )
        return Devices(0, card.devices), ""
    except (RuntimeError, ValueError, jax.errors.JaxRuntimeError) as error:
        why = str(error).splitlines()[0][:200]
        return Devices(options.devices, lower_for="cuda"), why


def rounds_of(engine: Any, program_key: Any) -> dict[str, float]:
    """Means over the rounds of a run: calls and steps of each stage, bytes copied."""
    import jax
    import numpy as np

    from pfedafm_jax.engine.programs import shapes_of
    from pfedafm_jax.engine.round import draw_participants

    def size(tree: Any) -> int:
        return sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    shapes, totals, config = shapes_of(program_key), Counter(), engine.federation.config
    row = size(shapes.slot)
    states, wide = [size(one) for one in shapes.starts], [size(one) for one in shapes.states]
    for t in range(1, ROUNDS + 1):
        clients = draw_participants(config.seed, t, config.num_clients, config.num_participants)
        clients = [int(client) for client in clients]
        own = sum(states[engine.federation.groups[client]] for client in clients)
        totals["participants' states"] += own
        for call in engine.calls_of(clients, engine.federation.num_train):
            totals["train calls"] += 1
            totals["train steps"] += max(call.num_steps)
            totals[f"train calls {call.program}"] += 1
            totals[f"train steps {call.program}"] += max(call.num_steps)
            moved = 0 if program_key.lockstep else call.clients.size * wide[call.program]
            totals["bytes up"] += moved + 2 * call.clients.size * row
            totals["bytes down"] += moved
        totals["bytes up"] += own if program_key.lockstep else 0
        totals["bytes down"] += own if program_key.lockstep else 0
        for client in clients:
            totals[f"moved {engine.federation.groups[client]}"] += 1
        if shapes.parts:
            for call in engine.calls_of(clients, engine.federation.num_train, shared_stage=True):
                totals["shared calls"] += 1
                totals["shared steps"] += max(call.num_steps)
                totals["bytes up"] += call.clients.size * (row + size(shapes.parts))
    return {name: value / ROUNDS for name, value in totals.items()}


def compile_all(engine: Any, program_key: Any, real: bool, folder: str) -> tuple[list[dict], dict]:
    """Every program with its numbers, and computations of each."""
    from pfedafm_jax.engine.programs import shapes_of, traced

    rows, found, counts = [], {}, Counter()
    for name, lowered in traced(program_key, shapes_of(program_key)):
        number = counts[name]
        counts[name] += 1
        if not real:
            text = lowered.as_text()
            rows.append(
                {
                    "program": f"{name} {number}",
                    "loops": text.count("stablehlo.while"),
                    "products": text.count("stablehlo.dot_general"),
                }
            )
            continue
        start = time.perf_counter()
        made = lowered.compile()
        seconds = time.perf_counter() - start
        found[name, number] = computations = read(made.as_text())
        memory, step = made.memory_analysis(), innermost(computations)
        rows.append(
            {
                "program": f"{name} {number}",
                "compile_seconds": round(seconds, 1),
                "step_kernels": step.kernels,
                "step_products": step.products,
                "waits": waits(computations),
                "argument_bytes": memory.argument_size_in_bytes,
                "temporary_bytes": memory.temp_size_in_bytes,
                "instructions": instructions(folder),
            }
        )
    return rows, found


def a_round(engine: Any, program_key: Any, found: dict) -> dict[str, float]:
    """Kernels, bytes and an estimated time of a round."""
    import numpy as np

    from pfedafm_jax.engine.engine import programs_of_clients
    from pfedafm_jax.engine.programs import shapes_of

    means = rounds_of(engine, program_key)
    steps = -(-SIZES[0] // engine.method.training.batch_size)
    kernels = 0.0
    for (name, number), computations in found.items():
        if name in ("train", "evaluate"):
            calls = means.get(f"train calls {number}", 0.0)
            trips = means.get(f"train steps {number}", 0.0) / max(calls, 1e-9)
        elif name == "shared":
            calls, trips = means["shared calls"], means["shared steps"] / means["shared calls"]
        elif name in ("place", "take"):
            calls, trips = means.get(f"moved {number}", 0.0), 1.0
        else:
            calls, trips = 1.0, 1.0
        kernels += calls * launched(computations, [trips, steps])
    flops = np.array([engine.federation.cost_of_visit(client).flops for client in range(100)])
    program_of_client = programs_of_clients(engine.federation, program_key)
    wide = np.array([group.architecture.macs for group in shapes_of(program_key).groups])
    wide = wide[program_of_client]
    flops = float(np.mean(flops * wide / engine.federation.macs))  # padding is computed too
    flops *= engine.federation.config.num_participants / len(program_key.devices)
    products = flops / FLOPS[program_key.precision]
    return {
        **means,
        "trips": means["train steps"] + means.get("shared steps", 0.0),
        "kernels": kernels,
        "seconds_of_launches": kernels * LAUNCH,
        "seconds_of_products": products,
        "seconds": max(kernels * LAUNCH, products),
    }


# ------------------------------------------------------------------------------------------ output


def show(result: dict[str, Any]) -> None:
    """The numbers as tables of at most 80 columns."""
    from rich.console import Console
    from rich.table import Table

    console, real = Console(width=80), result["compiled"]
    console.print(f"[bold]{result['title']}[/bold]")
    if not real:
        console.print(f"Lowered for CUDA, not compiled: {result['why']}")
        console.print(
            "Kernels, memory, precision and time cannot be told without the extra cuda12."
        )
    table = Table("program", box=None)
    columns = {
        "compile_seconds": "compile s", "step_kernels": "kernels a step",
        "step_products": "products", "waits": "waits", "argument_bytes": "arguments MB",
        "temporary_bytes": "temporary MB", "loops": "loops", "products": "products",
    }  # fmt: skip
    shown = [name for name in columns if name in result["programs"][0]]
    for name in shown:
        table.add_column(columns[name], justify="right")
    for row in result["programs"]:
        cells = (row[name] / 2**20 if name.endswith("bytes") else row[name] for name in shown)
        table.add_row(row["program"], *(f"{cell:.4g}" for cell in cells))
    console.print(table)
    if not real:
        return
    one, states = result["round"], result["round"]["participants' states"]
    used = Counter()
    for row in result["programs"]:
        used.update(row["instructions"])
    lines = {
        "trips a round": f"{one['trips']:.2f}",
        "waits for the host in a visit": f"{result['waits']}",
        "kernels a round": f"{one['kernels']:,.0f}",
        "bytes up": f"{one['bytes up'] / 1e6:.1f} MB, {one['bytes up'] / states:.2f} × the states",
        "bytes down": f"{one['bytes down'] / 1e6:.1f} MB, {one['bytes down'] / states:.2f} ×",
        "instructions of products": ", ".join(f"{n} {name}" for name, n in used.items()),
        "memory of a client": f"{result['client_bytes'] / 2**20:.0f} MB by the engine's model, "
        f"{result['client_bytes_compiled'] / 2**20:.0f} by the compiler",
        "compile seconds": f"{result['compile_seconds']:.0f}, one after another",
        "a round, estimated": f"{1e3 * one['seconds']:.0f} ms: {1e3 * one['seconds_of_launches']:.0f}"
        f" of launches at {1e6 * LAUNCH:g} µs a kernel, {1e3 * one['seconds_of_products']:.0f} of"
        " products at the card's peak",
    }
    plain = Table(box=None, show_header=False)
    for name, value in lines.items():
        plain.add_row(name, value)
    console.print(plain)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All numbers of one setting."""
    from pfedafm_jax.engine.programs import client_bytes

    with tempfile.TemporaryDirectory() as folder:
        # XLA reads these when it starts: without a card, autotuning must be off.
        os.environ["JAX_PLATFORMS"], os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "cpu", "1"
        os.environ["XLA_FLAGS"] = f"--xla_gpu_autotune_level=0 --xla_dump_to={folder}"
        engine = build_engine(options)
        devices, why = described(options)
        program_key = engine.program_key._replace(devices=devices, precision=options.precision)
        rows, found = compile_all(engine, program_key, not why, folder)
    about = (
        f"{options.method}, {options.layout}, K = {options.participants}, E = {options.epochs}, "
    )
    result = {
        "title": f"{about}batch {options.batch_size}, {options.precision}, {devices}",
        "options": vars(options),
        "compiled": not why,
        "why": why,
        "programs": rows,
    }
    if not why:
        result["waits"] = sum(row["waits"] for row in rows)
        result["compile_seconds"] = sum(row["compile_seconds"] for row in rows)
        result["round"] = a_round(engine, program_key, found)
        result["client_bytes"] = client_bytes(program_key)
        temporary = max(row["temporary_bytes"] for row in rows if row["program"] == "train 0")
        result["client_bytes_compiled"] = temporary // engine.clients_per_step
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    options = parse(sys.argv[1:] if argv is None else argv)
    result = measure(options)
    show(result)
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
