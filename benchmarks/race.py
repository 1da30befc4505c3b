"""The measurements of `speed.py`: contenders in turns on the same rounds, and the time from start to the first round.

Rounds differ in work, as participants differ in model and samples. So that they compare, each repeat's seconds are scaled
to a round of mean work by its FLOPs: `seconds · mean FLOPs / FLOPs of this repeat`.

Some contenders can be measured on a part, four clients of the first architecture, which spares them the time to compile the
others: the engine runs the same part, and their seconds a round are its own times the ratio on that part.
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
    """How much is measured: repeats of each contender, which ones at the first batch size only, which on a part, different
    rounds, repeats of the limits."""

    repeats: dict[str, int]
    first_only: tuple[str, ...] = ("ours_one_core",)
    on_part: tuple[str, ...] = ()
    draws: int = 5
    limit_repeats: int = 3


PART = 4  # clients; with the first architecture all of them
QUICK = Plan(
    {"ours": 3, "torch_clean": 3, "torch_released": 2, "ours_vmap": 1, "reference": 1, "ours_one_core": 1},
    first_only=("ours_vmap", "reference", "ours_one_core"),
    on_part=("ours_vmap", "reference", "ours_one_core"),
    draws=1,
)
FULL = Plan({name: 5 if name in ("ours", "torch_clean") else 3 for name in LABELS}, limit_repeats=5)


class Race:
    """The contenders of one run, each in a process of its own; `batch` measures one batch size."""

    def __init__(self, config: Config, folder: Path, plan: Plan, cache: Path, names: Sequence[str]):
        self.config, self.folder, self.plan, self.cache = config, folder, plan, cache
        self.names = [name for name in LABELS if name in names]
        self.draws = [
            draw_participants(config.seed, number, config.num_clients, config.num_participants).tolist()
            for number in range(1, plan.draws + 1)
        ]
        groups = len(config.architectures)
        self.part = list(range(0, config.num_clients, groups))[:PART]  # clients of the first architecture
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

    def participants(self, name: str, repeat: int) -> list[int]:
        """Who takes part in a contender's repeat, by the numbers that its own clients have."""
        return list(range(len(self.part))) if name in self.plan.on_part else self.draws[self.draw(name, repeat)]

    def draw(self, name: str, repeat: int) -> int:
        """Which draw a repeat has. The plain loop keeps to the first: every size of a last batch is a program of its own, and
        only those of the first draw are compiled before the clock."""
        return 0 if name == "reference" else repeat % len(self.draws)

    def start(self, name: str) -> Contender:
        """The contender's process; only the engine with its automatic settings keeps to a compilation cache of this run,
        empty at first, since its time to compile is reported."""
        if name not in self.contenders:
            options: dict[str, Any] = {}
            environment: dict[str, str] = {}
            if name == "ours":
                environment = cache_environment(self.cache)
            if name == "ours_vmap":
                clients = len(self.part) if name in self.plan.on_part else self.largest_group
                options = {"devices": 1, "clients_per_step": clients}
            if name == "ours_one_core":
                options, environment = {"devices": 1, "one_core": True}, {"PJRT_NPROC": "1"}
            if name in self.plan.on_part:
                options["part"] = True
            self.contenders[name] = Contender(name, self.folder, environment, **options)
        return self.contenders[name]

    def prepare(self, name: str, batch_size: int) -> dict[str, Any]:
        """Everything before the clock: data, compilation, a warm-up with the clients of the timed rounds.

        The PyTorch loops have had theirs when they have tried their layouts.
        """
        arguments: dict[str, Any] = {}
        if name == "reference":
            arguments = {"participants": self.participants(name, 0)}
        elif name not in TORCH:
            rounds = [self.participants(name, repeat) for repeat in range(self.plan.repeats[name])]
            arguments = {"warm_up": [draw for place, draw in enumerate(rounds) if draw not in rounds[:place]]}
            if name == "ours" and self.plan.on_part:
                arguments["warm_up"].append(self.part)
        return self.start(name)("prepare", batch_size=batch_size, **arguments)

    def batch(
        self, batch_size: int, names: Sequence[str], say: Callable[[str], None], compiles: bool = True
    ) -> dict[str, Any]:
        """Seconds a round of every contender at this batch size, in turns, and the limits of the machine.

        Where the engine `compiles`, it does so alone, since the time it takes is reported.
        """
        names = [name for name in self.names if name in names]
        prepared: dict[str, Any] = {}
        if compiles:
            say(f"batch {batch_size}: preparing {LABELS['ours']}")
            prepared["ours"] = self.prepare("ours", batch_size)
        others = [name for name in names if name not in prepared]
        say(f"batch {batch_size}: preparing " + ", ".join(LABELS[name] for name in others))
        with ThreadPoolExecutor(max_workers=2) as pool:
            prepared.update(zip(others, pool.map(lambda name: self.prepare(name, batch_size), others), strict=True))
        ours = self.start("ours")
        flops = [ours("flops", participants=draw) for draw in self.draws]
        mean_flops = float(np.mean(flops))
        say(f"batch {batch_size}: measuring")
        limits = [ours("matmul_gflops", repeats=self.plan.limit_repeats)]
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        part: list[float] = []  # seconds of the engine on the part
        for repeat in range(max(self.plan.repeats[name] for name in names)):
            for name in names:
                if repeat < self.plan.repeats[name]:
                    answer = self.start(name)("round", number=repeat + 1, participants=self.participants(name, repeat))
                    scale = mean_flops / flops[self.draw(name, repeat)]
                    runs[name].append({**answer, "scaled": answer["seconds"] * scale})
            if any(repeat < self.plan.repeats[name] for name in names if name in self.plan.on_part):
                part.append(ours("round", number=repeat + 1, participants=self.part)["seconds"])
            limits.append(ours("matmul_gflops", repeats=self.plan.limit_repeats))
        round_seconds = np.median([run["scaled"] for run in runs["ours"]])
        for name in names:
            for run in runs[name] if name in self.plan.on_part else ():
                run["scaled"] = run["seconds"] * round_seconds / float(np.median(part))
        phase1 = ours("phase1_gflops", repeats=self.plan.limit_repeats)
        results = summary(runs, mean_flops, max(limits))
        results["compile_seconds"] = round(prepared["ours"]["compile_seconds"], 2)
        results["phase1"] = phase1_summary(phase1, max(limits))
        results["settings"] = prepared
        results["part"] = spread(part) and {**(spread(part) or {}), "clients": len(self.part)}
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
