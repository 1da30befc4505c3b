"""The measurements of `speed.py`: contenders in turns on the same rounds, and the time to round one.

Rounds differ in work, as participants differ in model and samples. So that they compare, each
repeat's seconds are scaled to a round of mean work: `seconds · mean FLOPs / FLOPs of this repeat`.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, Contender, child_environment, ratio, spread

from pfedafm_jax.config import Config
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.errors import PfedafmError

LABELS = {
    "ours": "this engine",
    "ours_xla": "this engine, XLA's kernels",
    "torch_strongest": "PyTorch, a process a core",
    "torch_clean": "PyTorch, careful loop",
    "torch_released": "PyTorch, as released",
}
TORCH = ("torch_strongest", "torch_clean", "torch_released")


@dataclass(frozen=True)
class Plan:
    """How much is measured: repeats of each contender, and how many different rounds."""

    repeats: dict[str, int]
    draws: int


QUICK = Plan(dict.fromkeys(LABELS, 3) | {"torch_released": 2, "ours_xla": 2}, draws=1)
FULL = Plan(dict.fromkeys(LABELS, 5), draws=5)


class Race:
    """The contenders of one run, each in a process of its own; `batch` measures one batch size."""

    def __init__(self, config: Config, folder: Path, plan: Plan, cache: Path, names: Sequence[str]):
        self.config, self.folder, self.plan, self.cache = config, folder, plan, cache
        self.names = [name for name in LABELS if name in names]
        self.draws = [
            draw_participants(config.seed, t, config.num_clients, config.num_participants).tolist()
            for t in range(1, plan.draws + 1)
        ]
        self.contenders: dict[str, Contender] = {}

    def __enter__(self) -> "Race":
        return self

    def __exit__(self, *error: Any) -> None:
        for contender in self.contenders.values():
            contender.close()

    def start(self, name: str) -> Contender:
        """The contender's process; the engine's has an empty cache: its compilation is reported."""
        if name not in self.contenders:
            environment = {"XDG_CACHE_HOME": str(self.cache)} if name == "ours" else {}
            self.contenders[name] = Contender(name, self.folder, environment)
        return self.contenders[name]

    def prepare(self, name: str, batch_size: int) -> dict[str, Any]:
        """Everything before the clock: data, compilation, a warm-up with the timed clients."""
        prepared = self.start(name)("prepare", batch_size=batch_size)
        for draw in self.draws[: self.plan.repeats[name]]:
            self.start(name)("round", number=0, participants=draw)
        return prepared

    def batch(self, batch_size: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Seconds a round of every contender at this batch size, and the limit of the machine."""
        prepared: dict[str, Any] = {}
        for name in self.names:
            say(f"batch {batch_size}: preparing {LABELS[name]}")
            prepared[name] = self.prepare(name, batch_size)
        ours = self.start("ours")
        flops = [ours("flops", participants=draw) for draw in self.draws]
        say(f"batch {batch_size}: measuring")
        limits = [ours("matmul_gflops")]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in self.names}
        for repeat in range(max(self.plan.repeats.values())):
            place = repeat % len(self.draws)
            for name in self.names:
                if repeat < self.plan.repeats[name]:
                    about = {"number": repeat + 1, "participants": self.draws[place]}
                    answer = self.start(name)("round", **about)
                    answer["scaled"] = answer["seconds"] * float(np.mean(flops)) / flops[place]
                    runs[name].append(answer)
            limits.append(ours("matmul_gflops"))
        compile_seconds = round(prepared["ours"]["compile_seconds"], 2)
        results = summary(runs, float(np.mean(flops)), max(limits))
        return {**results, "compile_seconds": compile_seconds, "settings": prepared}


def summary(
    runs: dict[str, list[dict[str, Any]]], mean_flops: float, limit: float
) -> dict[str, Any]:
    """Numbers of one batch size; what was not measured is null."""
    spreads = {name: spread([run["scaled"] for run in runs.get(name, [])]) for name in LABELS}
    seconds = {name: found and found["median"] for name, found in spreads.items()}
    ours = seconds["ours"]
    achieved = ours and mean_flops / ours / 1e9

    def rounded(number: str) -> dict[str, list[float]]:
        return {name: [round(run[number], 4) for run in found] for name, found in runs.items()}

    return {
        **{f"{name}_round_seconds": value for name, value in seconds.items()},
        **{f"ratio_vs_{name}": ratio(seconds[name], ours) for name in LABELS if name != "ours"},
        "round_gflop": round(mean_flops / 1e9, 4),
        "gflops": achieved and round(achieved, 4),
        "peak_gflops": round(limit, 2),
        "peak_fraction": ratio(achieved, limit),
        "spread": spreads,
        "loss": rounded("loss"),
        "accuracy": rounded("accuracy"),
    }


# -------------------------------------------------------------------------- from start to round one


def start_times(config: Config, folder: Path, data_dir: str | None) -> dict[str, Any]:
    """Seconds from the start of `experiments/run.py` to the end of its first round, with an empty
    cache, so that native code is built, and with a filled one."""
    cache, names = folder / "start", ("start_cold_seconds", "start_warm_seconds")
    return {name: round(_first_round(config, folder / name, cache, data_dir), 2) for name in names}


def _first_round(config: Config, run_dir: Path, cache: Path, data_dir: str | None) -> float:
    names = "dataset synthetic_samples num_clients participation local_epochs batch_size seed"
    settings = {name: getattr(config, name) for name in names.split()}
    # Two rounds: the end of round one is then seen apart from what follows the last round.
    settings |= {"rounds": 2, "run_dir": run_dir, "architectures": ",".join(config.architectures)}
    settings |= {} if data_dir is None else {"data_dir": data_dir}
    command = [sys.executable, str(ROOT / "experiments" / "run.py")]
    for name, value in settings.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    environment = child_environment({"XDG_CACHE_HOME": str(cache)})
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    start, lines = time.perf_counter(), []
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("round 1/"):
                process.kill()
                return time.perf_counter() - start
    said = "".join(lines[-5:])
    raise PfedafmError(f"experiments/run.py did not finish its first round:\n{said}")
