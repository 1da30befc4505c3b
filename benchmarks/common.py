"""What both benchmarks share: the work, contenders in processes of their own, numbers in words.

A process each, so that thread pools, devices and memory of one contender do not touch another. The
benchmark drives them through pipes, in turns: a machine that slows down for a while slows all of
them alike.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.errors import PfedafmError, naming
from pfedafm_jax.kernels.build import processor
from pfedafm_jax.settings import bad

ROOT = Path(__file__).parent.parent
console = Console(highlight=False, soft_wrap=False)
progress = Console(highlight=False, soft_wrap=True, stderr=True)


# ----------------------------------------------------------------------------------------- the work


@dataclass(frozen=True)
class Work:
    """The same settings, images and split for every contender."""

    config: Config
    dataset: Dataset
    partition: Partition

    def save(self, folder: Path) -> None:
        """Writes it where the contenders' processes read it."""
        folder.mkdir(parents=True, exist_ok=True)
        about = {n: v for n, v in vars(self.dataset).items() if n not in ("images", "labels")}
        both = {"config": self.config.as_dict(), "dataset": about}
        (folder / "work.json").write_text(json.dumps(both))
        np.save(folder / "images.npy", self.dataset.images)
        np.save(folder / "labels.npy", self.dataset.labels)
        self.partition.save(folder / "partition.npz")

    @classmethod
    def load(cls, folder: Path) -> "Work":
        """Reads what `save` wrote; the images stay on disk until they are used."""
        about = json.loads((folder / "work.json").read_text())
        own = about["dataset"]
        dataset = Dataset(
            images=np.load(folder / "images.npy", mmap_mode="r"),
            labels=np.load(folder / "labels.npy"),
            **{n: tuple(v) if isinstance(v, list) else v for n, v in own.items()},
        )
        config, partition = updated(Config(), about["config"]), folder / "partition.npz"
        return cls(config, dataset, Partition.load(partition))


# ---------------------------------------------------------------------------------------- processes


class Contender:
    """A contender in a process of its own; a call sends one command and waits for its answer."""

    def __init__(
        self, kind: str, folder: Path, environment: dict[str, str] | None = None, **options: Any
    ):
        self.kind = kind
        worker = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable, worker, kind, str(folder), json.dumps(options)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=child_environment(environment), **pipes)

    def __call__(self, command: str, **arguments: Any) -> Any:
        """The contender's answer; `PfedafmError` where it failed."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps([command, arguments]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self.process.wait()
            raise PfedafmError(f"{self.kind} ended with code {code} during {command!r}")
        answer = json.loads(line)
        if "error" in answer:
            raise PfedafmError(f"{self.kind}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def child_environment(changes: dict[str, str] | None = None) -> dict[str, str]:
    """This environment, the package findable from any folder, with some variables changed."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, **(changes or {})}


# ------------------------------------------------------------------------------------------ numbers


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """Median, least and largest of some repeats; None where there are none."""
    if not len(values):
        return None
    numbers = {"median": np.median(values), "min": min(values), "max": max(values)}
    found = {name: round(float(value), 4) for name, value in numbers.items()}
    return {**found, "repeats": [round(float(value), 4) for value in values]}


def ratio(above: float | None, below: float | None, digits: int = 3) -> float | None:
    """above / below, where both are there."""
    return None if above is None or not below else round(above / below, digits)


def text(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "–" if value is None else f"{value:.{digits}f}{unit}"


# ------------------------------------------------------------------------------------- surroundings


def machine() -> dict[str, Any]:
    """Where a measurement was taken: processor, cores, memory, versions, commit."""
    return {
        "cpu": processor().split("\n")[0] or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("jax", "jaxlib", "flax", "numpy", "torch")},
        "commit": _git("describe", "--always", "--dirty"),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _git(*arguments: str) -> str | None:
    with suppress(OSError):
        pipes: Any = {"capture_output": True, "text": True}
        return subprocess.run(["git", *arguments], cwd=ROOT, **pipes).stdout.strip() or None
    return None


class Others:
    """How much of the machine went to others; ask when all own processes have ended."""

    def __init__(self):
        self.begin, self.start = self._now(), time.perf_counter()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds all cores were busy, taken by the host, and used by us and our ended children."""
        try:
            words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, _, irq, softirq, steal = map(int, words)
        except (OSError, ValueError):
            return None
        ours = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
        own = sum(sum(resource.getrusage(who)[:2]) for who in ours)
        ticks = os.sysconf("SC_CLK_TCK")
        return (user + nice + system + irq + softirq) / ticks, steal / ticks, own

    def shares(self) -> dict[str, float] | None:
        """Shares of all cores' time; None where the system does not tell."""
        end = self._now()
        if self.begin is None or end is None:
            return None
        busy, steal, own = (after - before for after, before in zip(end, self.begin, strict=True))
        total = (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        others = max(0.0, busy - own)
        return {"cpu_share": round(others / total, 4), "steal_share": round(steal / total, 4)}


def writable(path: str | None, setting: str) -> Path | None:
    """A file to write at the end, refused before hours of work if its folder cannot be made."""
    if path is None:
        return None
    file = Path(path)
    with naming(f"{setting} = {path!r} cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            return file


def numbers(value: str, setting: str, least: int = 1) -> list[int]:
    """`1,2,4` → [1, 2, 4]."""
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise bad(setting, value, f"whole numbers from {least} on, like 1,2,4")
    return found


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """The results as a file, where one is asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        console.print(f"  {path}")


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A command line with what both benchmarks have."""
    short = (description or "").split("\n\n")[0]
    made = argparse.ArgumentParser(f"benchmarks/{name}.py", description=short, allow_abbrev=False)
    made.add_argument("--json", metavar="FILE", help="write the numbers")
    picture = f"runs/benchmarks/{name}.png"
    made.add_argument("--plot", metavar="FILE", default=picture, help="the picture (%(default)s)")
    made.add_argument(
        "--repeats", type=int, metavar="R", help="rounds timed (5; quick: 3 or fewer)"
    )
    made.add_argument("--seed", type=int, default=0)
    return made
