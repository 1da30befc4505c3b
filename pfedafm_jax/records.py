"""The files of a run: `runs/<name>/` with settings, rounds, clients and summary, all plain JSON and numpy."""

import contextlib
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Experiment, Record

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
LOCK = ".lock"


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
        """Raises before any work if the folder cannot be made or written, or if a run is at work in it; makes nothing."""
        place = self.path.absolute()
        try:
            while not place.exists():
                place = place.parent
            with tempfile.TemporaryFile(dir=place):  # rights alone do not tell: root has all, a disk may be read-only
                pass
            if "\0" in str(self.path):
                raise ValueError("no name can hold a zero byte")
        except (OSError, ValueError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or error
            raise self._unusable(f"{place}: {reason}") from error
        if (self / LOCK).exists():
            with self.lock():
                pass
        return self

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One run at a time: the lock goes with the process that holds it, however that ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self / LOCK).open("a+")
        except OSError as error:
            raise self._unusable(str(error.strerror or error)) from error
        with file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise PfedafmError(
                        f"{self.path} is in use by another run; wait for it, or choose another --run-dir"
                    ) from None
                except OSError:
                    pass  # a file system without locks
            yield

    def _unusable(self, reason: str) -> PfedafmError:
        return PfedafmError(
            f"run_dir = {str(self.path)!r} cannot be used; accepted: a folder that can be written ({reason})"
        )

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        return self._read_json("summary.json", "rounds")

    def config(self) -> dict[str, Any] | None:
        """The settings of the run that is here, or None."""
        return (self._read_json("config.json", "config") or {}).get("config")

    def _read_json(self, name: str, key: str) -> dict[str, Any] | None:
        try:
            content = json.loads((self / name).read_text())
        except (OSError, ValueError, RecursionError):
            return None
        return content if isinstance(content, dict) and key in content else None

    def start(self, experiment: Experiment, command: str) -> None:
        """Settings, versions, data digest, split and the records so far; what a finished run adds is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in ("summary.json", "clients.npz"):
            (self / name).unlink(missing_ok=True)
        self._json(
            "config.json",
            {
                "config": experiment.config.as_dict(),
                "command": command,
                "versions": versions(),
                "devices": str(experiment.federation.devices),
                "kernels": str(experiment.kernels),
                "data": {"source": experiment.dataset.source, "digest": experiment.dataset.digest},
            },
        )
        experiment.partition.save(self / "partition.npz")
        lines = "".join(json.dumps(record) + "\n" for record in experiment.records)
        write_atomically(self / "rounds.jsonl", lambda file: file.write(lines.encode()))

    def add(self, record: Record) -> None:
        """One line of `rounds.jsonl`."""
        with open(self / "rounds.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")

    def finish(self, experiment: Experiment, **more: Any) -> dict[str, Any]:
        """Per-client arrays and, last of all, the summary, which says that the run is finished; returns it."""
        table: dict[str, Any] = experiment.client_table()
        write_atomically(self / "clients.npz", lambda file: np.savez_compressed(file, **table))
        summary = {
            **experiment.summary(),
            **more,
            "versions": versions(),
            "devices": str(experiment.federation.devices),
            "kernels": str(experiment.kernels),
        }
        self._json("summary.json", summary)
        return summary

    def _json(self, name: str, content: dict[str, Any]) -> None:
        text = json.dumps(content, indent=2) + "\n"
        write_atomically(self / name, lambda file: file.write(text.encode()))


def read_rounds(path: str | Path) -> list[Record]:
    """The records of a run folder."""
    with open(Path(path) / "rounds.jsonl") as file:
        return [json.loads(line) for line in file if line.strip()]


NOT_IN_RESULTS = ("rounds", "eval_every", "devices", "clients_per_step", "kernels", "store", "checkpoint_every")
"""Settings that a run may go on with after a change: what it has computed so far would have been the same.

(Devices and clients per step within float tolerance; see `docs/determinism.md`.)
"""


def differences(stored: dict[str, Any], config: Config) -> list[str]:
    """Settings that make another run of a stored one, as `setting: stored → asked`; empty if it may go on."""
    before, after = _flat(Config(method=config.method).as_dict()) | _flat(stored), _flat(config.as_dict())
    free = set(NOT_IN_RESULTS)
    if config.method == "fedkd" and config.fedkd.coding != "none":
        free.discard("rounds")  # how much its coding keeps rises until the last round
    names = [n for n in dict.fromkeys([*after, *before]) if "." not in n or n.startswith(f"{config.method}.")]
    return [
        f"{name}: {_shown(before, name)} → {_shown(after, name)}"
        for name in names
        if name not in free and (name not in before or name not in after or before[name] != after[name])
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, `pfedafm.mix_fixed`; tuples as lists, as JSON has them."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def _shown(values: dict[str, Any], name: str) -> str:
    if name not in values:
        return "(unknown)"
    return ",".join(values[name]) if isinstance(values[name], list) else str(values[name])
