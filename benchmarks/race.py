"""The measurements of `speed.py`: contenders in turns on the same rounds, and the time from start
to the first round.

Rounds differ in work, as participants differ in model and samples. So that they compare, each
repeat's
seconds are scaled to a round of mean work by its FLOPs: `seconds · mean FLOPs / FLOPs of this
repeat`.
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
        """The contender's process; the engine's has a cache of its own, since its time to compile
        is reported."""
        if name not in self.contenders:
            environment = cache_environment(self.cache) if name == "ours" else {}
            self.contenders[name] = Contender(name, self.folder, environment)
        return self.contenders[name]

    def prepare(self, name: str, batch_size: int) -> dict[str, Any]:
        """Everything before the clock: data, compilation, a warm-up with the clients of the timed
        rounds."""
        prepared = self.start(name)("prepare", batch_size=batch_size)
        for draw in self.draws[: self.plan.repeats[name]]:
            self.start(name)("round", number=0, participants=draw)
        return prepared

    def batch(self, batch_size: int, say: Callable[[str], None]) -> dict[str, Any]:
        """Seconds a round of every contender at this batch size, in turns, and the limit of the
        machine."""
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
                    answer = self.start(name)(
                        "round", number=repeat + 1, participants=self.draws[place]
                    )
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
    seconds = {name: None if found is None else found["median"] for name, found in spreads.items()}
    ours = seconds["ours"]
    achieved = None if ours is None else mean_flops / ours / 1e9
    return {
        **{f"{name}_round_seconds": value for name, value in seconds.items()},
        **{f"ratio_vs_{name}": ratio(seconds[name], ours) for name in LABELS if name != "ours"},
        "round_gflop": round(mean_flops / 1e9, 4),
        "gflops": None if achieved is None else round(achieved, 4),
        "peak_gflops": round(limit, 2),
        "peak_fraction": ratio(achieved, limit),
        "spread": spreads,
        "loss": {name: [round(run["loss"], 4) for run in found] for name, found in runs.items()},
        "accuracy": {
            name: [round(run["accuracy"], 4) for run in found] for name, found in runs.items()
        },
    }


# -------------------------------------------------------------------------- from start to round one


def cache_environment(folder: Path) -> dict[str, str]:
    """Makes a process keep compiled programs and native code in this folder instead of the
    user's."""
    return {"XDG_CACHE_HOME": str(folder)}


def start_times(config: Config, folder: Path, data_dir: str | None) -> dict[str, Any]:
    """Seconds from the start of `experiments/run.py` to the end of its first round, native code to
    be built or not."""
    cache = folder / "start"
    names = ("start_cold_seconds", "start_warm_seconds")
    return {name: round(_first_round(config, folder / name, cache, data_dir), 2) for name in names}


def _first_round(config: Config, run_dir: Path, cache: Path, data_dir: str | None) -> float:
    settings = {
        "--dataset": config.dataset,
        "--synthetic-samples": config.synthetic_samples,
        "--num-clients": config.num_clients,
        "--participation": config.participation,
        "--local-epochs": config.local_epochs,
        "--batch-size": config.batch_size,
        "--seed": config.seed,
        "--rounds": 2,  # the end of round one is seen apart from what follows the last round
        "--run-dir": run_dir,
        "--architectures": ",".join(config.architectures),
        **({} if data_dir is None else {"--data-dir": data_dir}),
    }
    command = [sys.executable, str(ROOT / "experiments" / "run.py")]
    command += [str(word) for pair in settings.items() for word in pair]
    environment = child_environment(cache_environment(cache))
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    start, lines, seconds = time.perf_counter(), [], None
    with subprocess.Popen(command, env=environment, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("round 1/"):
                seconds = time.perf_counter() - start
                process.kill()
    if seconds is None:
        raise PfedafmError(
            f"experiments/run.py did not finish its first round:\n{''.join(lines[-5:])}"
        )
    return seconds
