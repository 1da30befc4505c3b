"""What both benchmarks share: the work, contenders in processes of their own, bars and numbers.

A process each, so that thread pools, devices and memory of one contender do not touch another. The
benchmark drives them through pipes, in turns: a machine that slows down for a while slows all of
them alike.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pfedafm_jax.base.errors import PfedafmError, bad, naming
from pfedafm_jax.base.version import own_version
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.models.kernels.build import processor

ROOT = Path(__file__).parent.parent
console = Console(highlight=False, soft_wrap=False)
progress = Console(highlight=False, soft_wrap=True, stderr=True, style="dim")


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


class Contender:
    """A contender in a process of its own; a call sends one command and waits for its answer."""

    def __init__(self, kind: str, folder: Path, cache: Path | None = None, **options: Any):
        self.kind = kind
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        if cache is not None:
            environment["XDG_CACHE_HOME"] = str(cache)
        worker = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable, worker, kind, str(folder), json.dumps(options)]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, **pipes)

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


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and largest of some repeats."""
    found = {"median": np.median(values), "min": min(values), "max": max(values)}
    rounded = {name: round(float(value), 4) for name, value in found.items()}
    return {**rounded, "repeats": [round(float(value), 4) for value in values]}


def machine() -> dict[str, Any]:
    """Where a measurement was taken: processor, cores, load, versions."""
    versions = {"pfedafm_jax": own_version()}
    for name in ("jax", "jaxlib", "numpy", "torch"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    load = round(os.getloadavg()[0], 2)
    cpu = processor().split("\n")[0]
    return {"cpu": cpu, "cores": os.cpu_count(), "load_at_start": load, "versions": versions}


def writable(path: str | None, setting: str) -> Path | None:
    """A file to write at the end, refused before hours of work if its folder cannot be made."""
    if path is None:
        return None
    file = Path(path)
    with naming(f"{setting} = {path!r} cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a"):
            return file


def numbers(value: str, setting: str) -> list[int]:
    """`1,2,4` → [1, 2, 4]."""
    try:
        found = [int(part) for part in value.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise bad(setting, value, "whole numbers from 1 on, like 1,2,4")
    return found


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """A command line with what both benchmarks have."""
    short = (description or "").split("\n\n")[0]
    made = argparse.ArgumentParser(f"benchmarks/{name}.py", description=short, allow_abbrev=False)
    add = made.add_argument
    add("--quick", action="store_true", help="minutes: fewer repeats, E = 1")
    add("--json", metavar="FILE", help="write the numbers")
    picture = f"runs/benchmarks/{name}.png"
    add("--plot", metavar="FILE", default=picture, help="the picture (%(default)s)")
    add("--repeats", type=int, metavar="R", help="rounds timed (5; quick: 3 or fewer)")
    add("--architectures", default="cnn1,cnn2,cnn3,cnn4,cnn5", metavar="A,B", help="(%(default)s)")
    add("--seed", type=int, default=0)
    return made
