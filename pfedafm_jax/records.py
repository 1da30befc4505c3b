"""The files of a run: `runs/<name>/` with settings, rounds, clients and summary, all plain JSON and numpy."""

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Experiment, Record

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def versions() -> dict[str, str]:
    """What a run was made with."""
    found = {"python": platform.python_version()}
    return found | {name: importlib.metadata.version(name) for name in PACKAGES}


class RunFolder:
    """Writes a run's files as it goes; every file but the growing `rounds.jsonl` is written atomically."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def check(self) -> "RunFolder":
        """Raises before any work if the folder cannot be made or written; makes nothing."""
        place = self.path.absolute()
        while not place.exists():
            place = place.parent
        if not (place.is_dir() and os.access(place, os.W_OK | os.X_OK)):
            raise PfedafmError(
                f"run_dir = {str(self.path)!r} cannot be used; accepted: a folder that can be written ({place} cannot)"
            )
        return self

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        try:
            return json.loads((self / "summary.json").read_text())
        except (OSError, ValueError):
            return None

    def start(self, experiment: Experiment, command: str) -> None:
        """Settings, versions, data digest and split; an earlier run's records in this folder are removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("rounds.jsonl", "summary.json", "clients.npz"):
            (self / name).unlink(missing_ok=True)
        self._json(
            "config.json",
            {
                "config": experiment.config.as_dict(),
                "command": command,
                "versions": versions(),
                "devices": str(experiment.federation.devices),
                "data": {"source": experiment.dataset.source, "digest": experiment.dataset.digest},
            },
        )
        experiment.partition.save(self / "partition.npz")

    def add(self, record: Record) -> None:
        """One line of `rounds.jsonl`."""
        with open(self / "rounds.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, experiment: Experiment) -> dict[str, Any]:
        """Per-client arrays and the summary; returns the summary."""
        table: dict[str, Any] = experiment.client_table()
        write_atomically(self / "clients.npz", lambda file: np.savez_compressed(file, **table))
        summary = {**experiment.summary(), "versions": versions(), "devices": str(experiment.federation.devices)}
        self._json("summary.json", summary)
        return summary

    def _json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(self / name, lambda file: file.write(text.encode()))


def read_rounds(path: str | Path) -> list[Record]:
    """The records of a run folder."""
    with open(Path(path) / "rounds.jsonl") as file:
        return [json.loads(line) for line in file if line.strip()]


def same_settings(config: Config, other: dict[str, Any]) -> bool:
    """Whether a stored configuration is this one."""
    return json.loads(json.dumps(config.as_dict())) == other
