"""What a compiled GPU program launches, read from the compiler's text."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Instructions that launch nothing on the card.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call",
    "partition-id", "replica-id", "after-all", "add-dependency", "all-reduce-done", "copy-done",
}  # fmt: skip
PRODUCT = re.compile(r'"kind":"__triton\w*gemm|custom_call_target="__cu(blas|dnn)')
LINE = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = .*?\s([a-z][\w\-]*)\(")


@dataclass
class Computation:
    """One computation of a compiled program: what it launches, and its loops."""

    kernels: int = 0
    products: int = 0
    loops: list[tuple[str, str, int | None]] = field(default_factory=list)  # body, condition, trips
    calls: list[str] = field(default_factory=list)


def read(text: str) -> dict[str, Computation]:
    """Computations of a compiled program by name; the first one's name is `ENTRY`."""
    found: dict[str, Computation] = {}
    current = Computation()
    for line in text.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            current = found.setdefault("ENTRY" if head[1] else head[2], Computation())
            continue
        operation = LINE.match(line)
        if not operation:
            continue
        name = operation[1]
        current.kernels += name not in FREE
        current.products += name in ("dot", "convolution") or bool(PRODUCT.search(line))
        if name == "while":
            body, condition = (
                re.search(rf"{what}=%?([\w.\-]+)", line) for what in ("body", "condition")
            )
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
            assert body and condition
            current.loops.append((body[1], condition[1], int(trips[1]) if trips else None))
        elif name == "call":
            current.calls += re.findall(r"to_apply=%?([\w.\-]+)", line)
    return found


def launched(found: dict[str, Computation], unknown: Sequence[float], name: str = "ENTRY") -> float:
    """Kernels of a whole call; loops of unknown length run `unknown[depth]` times."""
    one, inner = found[name], unknown[1:] or unknown
    total = float(one.kernels) + sum(launched(found, unknown, call) for call in one.calls)
    for body, condition, trips in one.loops:
        times = unknown[0] if trips is None else trips
        deeper = inner if trips is None else unknown
        total += times * (launched(found, deeper, body) + found[condition].kernels)
    return total


def innermost(found: dict[str, Computation]) -> Computation:
    """The loop body with the most products: a training step."""
    bodies = [found[body] for one in found.values() for body, _, _ in one.loops]
    return max(bodies, key=lambda one: one.products, default=found["ENTRY"])


def waits(found: dict[str, Computation]) -> int:
    """Loops whose condition the host must read."""
    return sum(trips is None for one in found.values() for _, _, trips in one.loops)


def instructions(folder: str) -> dict[str, int]:
    """Instructions of products in the assembly that was written there, which is then removed."""
    counts: Counter[str] = Counter()
    for path in Path(folder).glob("*.ptx"):
        text = path.read_text()
        counts["tf32"] += len(re.findall(r"mma\.\S*tf32", text))
        counts["bfloat16"] += len(re.findall(r"mma\.\S*bf16", text))
        counts["float32"] += text.count("fma.rn.f32")
        path.unlink()
    return dict(counts)
