"""The measurements of `speed.py`: contenders in turns on the same rounds, and the time from start to the first round.

Rounds differ in work, as participants differ in model and samples. So that they compare, each repeat's seconds are scaled
to a round of mean work by its FLOPs: `seconds · mean FLOPs / FLOPs of this repeat`.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, Contender, cache_environment, child_environment, ratio, spread

from pfedafm_jax.config import Config
from pfedafm_jax.engine import draw_participants
from pfedafm_jax.errors import PfedafmError

LABELS = {
    "ours": "this engine",
    "ours_vmap": "this engine, one vmap",
    "reference": "plain JAX loop",
    "torch_clean": "PyTorch loop, careful",
    "torch_released": "PyTorch loop, as released",
    "ours_one_core": "this engine, one core",
}
TORCH = ("torch_clean", "torch_released")


@dataclass(frozen=True)
class Plan:
    """How much is measured: repeats of each contender, participants of the plain loop (0: all), repeats of the limits."""

    repeats: dict[str, int]
    reference_clients: int = 0
    limit_repeats: int = 3


QUICK = Plan(
    {"ours": 3, "torch_clean": 3, "torch_released": 2, "ours_vmap": 1, "reference": 1, "ours_one_core": 1},
    reference_clients=3,
)
FULL = Plan({name: 5 if name in ("ours", "torch_clean") else 3 for name in LABELS}, limit_repeats=5)


class Race:
    """The contenders of one run, each in a process of its own; `batch` measures one batch size."""

    def __init__(self, config: Config, folder: Path, plan: Plan, cache: Path, names: Sequence[str]):
        self.config, self.folder, self.plan, self.cache = config, folder, plan, cache
        self.names = [name for name in LABELS if name in names]
        draws = max(plan.repeats[name] for name in self.names)
        self.draws = [
            draw_participants(config.seed, number, config.num_clients, config.num_participants).tolist()
            for number in range(1, draws + 1)
        ]
        self.contenders: dict[str, Contender] = {}

    def __enter__(self) -> "Race":
        return self

    def __exit__(self, *error: Any) -> None:
        for contender in self.contenders.values():
            contender.close()

    @property
    def largest_group(self) -> int:
        """Most participants of one architecture in any of the rounds."""
        groups = len(self.config.architectures)
        return max(int(np.bincount(np.array(draw) % groups).max()) for draw in self.draws)

    @property
    def reference_participants(self) -> list[int]:
        """Those of the first round, or the first few of different architectures among them."""
        first, wanted = self.draws[0], self.plan.reference_clients
        groups = len(self.config.architectures)
        seen: dict[int, int] = {}
        for client in first:
            seen.setdefault(client % groups, client)
        return [seen[group] for group in sorted(seen)][:wanted] if wanted else first

    def participants(self, name: str, repeat: int) -> list[int]:
        """Who takes part in a contender's repeat."""
        return self.reference_participants if name == "reference" else self.draws[repeat]

    def start(self, name: str) -> Contender:
        """The contender's process; only the engine with its automatic settings keeps to a compilation cache of this run,
        empty at first, since its time to compile is reported."""
        if name not in self.contenders:
            options, environment = {}, {}
            if name == "ours":
                environment = cache_environment(self.cache)
            if name == "ours_vmap":
                options = {"devices": 1, "clients_per_step": self.largest_group}
            if name == "ours_one_core":
                options, environment = {"devices": 1, "one_core": True}, {"PJRT_NPROC": "1"}
            self.contenders[name] = Contender(name, self.folder, environment, **options)
        return self.contenders[name]

    def prepare(self, name: str, batch_size: int) -> dict[str, Any]:
        """Everything before the clock: data, compilation, a warm-up with the clients of the timed rounds.

        The PyTorch loops have had theirs when they have tried their layouts.
        """
        arguments: dict[str, Any] = {}
        if name == "reference":
            arguments = {"participants": self.reference_participants}
        elif name not in TORCH:
            arguments = {"warm_up": self.draws[: self.plan.repeats[name]]}
        return self.start(name)("prepare", batch_size=batch_size, **arguments)

    def batch(self, batch_size: int, names: Sequence[str], say: Callable[[str], None]) -> dict[str, Any]:
        """Seconds a round of every contender at this batch size, in turns, and the limits of the machine."""
        names = [name for name in self.names if name in names]
        say(f"batch {batch_size}: preparing {LABELS['ours']}")
        prepared = {"ours": self.prepare("ours", batch_size)}
        others = [name for name in names if name != "ours"]
        say(f"batch {batch_size}: preparing " + ", ".join(LABELS[name] for name in others))
        with ThreadPoolExecutor(max_workers=2) as pool:
            prepared.update(zip(others, pool.map(lambda name: self.prepare(name, batch_size), others), strict=True))
        ours = self.start("ours")
        flops = [ours("flops", participants=draw) for draw in self.draws]
        reference_flops = ours("flops", participants=self.reference_participants)
        say(f"batch {batch_size}: measuring")
        limits, runs = [ours("matmul_gflops", repeats=self.plan.limit_repeats)], {name: [] for name in names}
        for repeat in range(len(self.draws)):
            for name in names:
                if repeat < self.plan.repeats[name]:
                    participants = self.participants(name, repeat)
                    answer = self.start(name)("round", number=repeat + 1, participants=participants)
                    work = reference_flops if name == "reference" else flops[repeat]
                    runs[name].append({**answer, "scaled": answer["seconds"] * float(np.mean(flops)) / work})
            limits.append(ours("matmul_gflops", repeats=self.plan.limit_repeats))
        phase1 = ours("phase1_gflops", repeats=self.plan.limit_repeats)
        results = summary(runs, float(np.mean(flops)), max(limits))
        results["compile_seconds"] = round(prepared["ours"]["compile_seconds"], 2)
        results["phase1"] = phase1_summary(phase1, max(limits))
        results["settings"] = prepared
        results["reference_clients"] = len(self.reference_participants)
        return results


def summary(runs: dict[str, list[dict[str, Any]]], mean_flops: float, limit: float) -> dict[str, Any]:
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
        "accuracy": {name: [round(run["accuracy"], 4) for run in found] for name, found in runs.items()},
    }


def phase1_summary(measured: dict[str, Any], limit: float) -> dict[str, Any]:
    """Phase 1 of one architecture as a fraction of the limit."""
    rates = spread(measured["rates"])
    assert rates is not None
    return {
        "architecture": measured["architecture"],
        "phase1_cnn1_gflops": rates["median"],
        "phase1_cnn1_fraction": ratio(rates["median"], limit),
        "spread": rates,
    }


# ---------------------------------------------------------------------------------------------- from start to round one


def start_times(config: Config, folder: Path, cache: Path, data_dir: str | None) -> dict[str, Any]:
    """Seconds from the start of `experiments/run.py` to the end of its first round: with an empty and a filled cache.

    The cold run goes on to its end, since its summary has the seconds it took to compile.
    """
    cold = _first_round(config, folder / "cold", cache, data_dir, to_the_end=True)
    warm = _first_round(config, folder / "warm", cache, data_dir, to_the_end=False)
    summary = json.loads((folder / "cold" / "summary.json").read_text())
    return {
        "start_cold_seconds": round(cold, 2),
        "start_warm_seconds": round(warm, 2),
        "compile_seconds": summary["compile_seconds"],
        "batch_size": config.batch_size,
        "local_epochs": config.local_epochs,
    }


def _first_round(config: Config, run_dir: Path, cache: Path, data_dir: str | None, to_the_end: bool) -> float:
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
        **({} if data_dir is None else {"--data-dir": data_dir}),
    }
    command = [sys.executable, str(ROOT / "experiments" / "run.py"), "--architectures", *config.architectures]
    command += [str(word) for pair in settings.items() for word in pair]
    start, lines = time.perf_counter(), []
    with subprocess.Popen(
        command,
        env=child_environment(cache_environment(cache)),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        seconds = None
        for line in process.stdout:
            lines.append(line)
            if seconds is None and line.startswith("round 1/"):
                seconds = time.perf_counter() - start
                if not to_the_end:
                    process.kill()
                    break
    if seconds is None or (to_the_end and process.returncode):
        raise PfedafmError(f"experiments/run.py did not finish its first round:\n{''.join(lines[-5:])}")
    return seconds
