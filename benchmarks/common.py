"""What both benchmarks share: the work handed to every contender, contenders in processes of their
own, numbers in words.

Every contender runs in a process of its own, so that thread pools, devices and memory of one do not
touch another. The
benchmark drives them through pipes, in turns: a machine that slows down for a while slows all of
them alike.
"""

import json
import os
import platform
import resource
import shutil
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
from pfedafm_jax.errors import PfedafmError

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
        about = {
            "config": self.config.as_dict(),
            "dataset": {
                name: getattr(self.dataset, name)
                for name in Dataset.__dataclass_fields__
                if name not in ("images", "labels")
            },
        }
        (folder / "work.json").write_text(json.dumps(about))
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
        return cls(
            updated(Config(), about["config"]), dataset, Partition.load(folder / "partition.npz")
        )


# ---------------------------------------------------------------------------------------- processes


class Contender:
    """A contender in a process of its own; a call sends one command and waits for its answer."""

    def __init__(
        self, kind: str, folder: Path, environment: dict[str, str] | None = None, **options: Any
    ):
        self.kind = kind
        command = [
            sys.executable,
            str(Path(__file__).parent / "worker.py"),
            kind,
            str(folder),
            json.dumps(options),
        ]
        self.process = subprocess.Popen(
            command,
            env=child_environment(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

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
            raise PfedafmError(
                f"{self.kind} ended with code {self.process.wait()} during {command!r}"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise PfedafmError(f"{self.kind}: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        """Ends the process."""
        if self.process.stdin is not None:
            with suppress(OSError):
                self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
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
    return {
        "median": round(float(np.median(values)), 4),
        "min": round(float(min(values)), 4),
        "max": round(float(max(values)), 4),
        "repeats": [round(float(value), 4) for value in values],
    }


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
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            name: _version(name)
            for name in ("pfedafm-jax", "jax", "jaxlib", "flax", "numpy", "torch")
        },
        "commit": _commit(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _commit() -> str | None:
    if shutil.which("git") is None:
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD")
    return f"{commit} with changes" if commit and git("status", "--porcelain") else commit or None


class Others:
    """How much of the machine went to others since it was made; ask when all own processes have
    ended."""

    def __init__(self):
        self.begin, self.start = self._now(), time.perf_counter()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds all cores were busy, taken by the host, and used by this process and its ended
        children."""
        try:
            user, nice, system, _, _, irq, softirq, steal = map(
                int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            )
        except (OSError, ValueError):
            return None
        own = sum(
            sum(resource.getrusage(who)[:2])
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        ticks = os.sysconf("SC_CLK_TCK")
        return (user + nice + system + irq + softirq) / ticks, steal / ticks, own

    def shares(self) -> dict[str, float] | None:
        """Shares of all cores' time; None where the system does not tell."""
        end = self._now()
        if self.begin is None or end is None:
            return None
        busy, steal, own = (after - before for after, before in zip(end, self.begin, strict=True))
        total = (time.perf_counter() - self.start) * (os.cpu_count() or 1)
        return {
            "cpu_share": round(max(0.0, busy - own) / total, 4),
            "steal_share": round(steal / total, 4),
        }


def writable(path: str | None, setting: str) -> Path | None:
    """A file to write at the end, refused before hours of work if its folder cannot be made."""
    if path is None:
        return None
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        with file.open("a"):
            pass
    except OSError as error:
        raise PfedafmError(
            f"{setting} = {path!r} cannot be written ({error.strerror or error})"
        ) from error
    return file


def numbers(value: str, setting: str, least: int = 1) -> list[int]:
    """`1,2,4` → [1, 2, 4]."""
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise PfedafmError(
            f"{setting} = {value!r} cannot be used; accepted: whole numbers from {least} on, like 1,2,4"
        )
    return found


def write_json(path: Path | None, results: dict[str, Any]) -> None:
    """The results as a file, where one is asked for."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        console.print(f"  {path}")
