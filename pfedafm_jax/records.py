"""What a run leaves: `Record` is one round, `Summary` the whole, `RunFolder` alone writes them.

    config.json     settings, command, versions, data: all that is needed to run it again
    partition.npz   who has which images
    rounds.jsonl    one line a round, a `Record`
    clients.npz     numbers of single clients by round
    summary.json    a `Summary`; written last, so where it is, the run is finished

All but the growing `rounds.jsonl` are written atomically. The two JSON files hold their own sha256,
and `summary.json` holds those of the others. `results.py` reads them; `docs/evaluation.md` says
which accuracy is which.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pfedafm_jax.data import Partition
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.files import write_atomically
from pfedafm_jax.settings import bad

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None

FORMAT = 2
"""Of a run's files; 1 had no number, nested accuracies and no digests."""
TARGET_ACCURACY = {"cifar10": 0.9, "cifar100": 0.5}  # the paper's targets
LAST_ROUNDS = 10  # of `last_ten_mean_accuracy`
LOCK, MARK = (
    ".lock",
    b"pfedafm_jax",
)  # the mark tells our folders from others, whatever else is lost


# -------------------------------------------------------------------------------- one round


@dataclass(frozen=True)
class Record:
    """One round. Accuracies are unweighted means over clients of the method's own prediction."""

    round: int
    mean_accuracy: float | None  # of the participants, each right after its training
    all_clients_accuracy: float | None  # of all clients after the round; None: not evaluated
    loss: float | None  # of the participants' training; None: none was finite
    seconds: float
    participants: list[int]
    not_finite: int  # participants whose update was not finite, and kept out
    floats_up: int
    floats_down: int
    flops: int
    more: dict[str, float | None] = field(default_factory=dict)
    """Other predictions, `mean_accuracy/small`, and what the method reports, `mix_mean`."""

    def as_dict(self) -> dict[str, Any]:
        """A line of `rounds.jsonl`: all on one level."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return values | values.pop("more")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Record":
        """Reads what `as_dict` gave; `ValueError` where something is missing or of a wrong type."""
        known = {one.name for one in dataclasses.fields(cls)} - {"more"}
        for name in sorted({*known, *values} - {"participants"}):
            value: Any = values.get(name)
            number = type(value) in ((int,) if name in _WHOLE else (int, float))
            nothing = value is None and name in values and name not in (*_WHOLE, "seconds")
            if not nothing and not (number and -(2**63) < value < 2**63):  # nor NaN or infinity
                raise ValueError(f"{name} is missing or no number")
        drawn = values.get("participants")
        if type(drawn) is not list or any(type(client) is not int for client in drawn):
            raise ValueError("participants is no list of clients")
        more = {name: value for name, value in values.items() if name not in known}
        return cls(**{name: values[name] for name in known}, more=more)


_WHOLE = ("round", "not_finite", "floats_up", "floats_down", "flops")


def mean(values: np.ndarray) -> float | None:
    """Unweighted mean over clients, to six places; None where nothing is finite."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return round(float(finite.mean()), 6) if finite.size else None


# -------------------------------------------------------------------------------- the whole run


@dataclass(frozen=True)
class Summary:
    """A run in numbers. `docs/evaluation.md` says what each accuracy is good for."""

    method: str
    dataset: str
    best_mean_accuracy: float | None
    best_round: int | None
    last_mean_accuracy: float | None
    last_ten_mean_accuracy: float | None
    """Mean of `mean_accuracy` over the last ten rounds, or all if there are fewer."""
    final_all_clients_accuracy: float | None
    best_all_clients_accuracy: float | None
    spread_over_clients: float | None
    """Standard deviation between clients at the last evaluation of all of them."""
    rounds: int
    seconds: float
    compile_seconds: float
    data_source: str
    floats_up_per_client: float | None
    floats_down_per_client: float | None
    flops_per_client_round: float | None
    diverged_at_round: int | None
    clients_not_finite: int
    target_accuracy: float | None
    rounds_to_target: int | None
    floats_to_target: int | None
    flops_to_target: int | None
    config: dict[str, Any]
    devices: str
    versions: dict[str, str]
    kernels: str = ""  # the form of the operations, and why
    checkpoint_seconds: float = 0.0  # the run was held up by saving
    checkpoint_background_seconds: float = 0.0  # saves took beside it
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}


def summarize(
    records: Sequence[Record],
    about: Mapping[str, Any],
    last: np.ndarray | None = None,
    **timing: Any,
) -> Summary:
    """The one place where records become a summary, of a run that is finished or not.

    Args:
        records: the rounds so far.
        about: the content of `config.json`.
        last: accuracies `[clients]` at the last evaluation of all clients.
        timing: `compile_seconds`, `checkpoint_seconds`, `checkpoint_background_seconds`.
    """
    config, visits = about["config"], sum(len(r.participants) for r in records)
    means = [r.mean_accuracy for r in records if r.mean_accuracy is not None]
    everyone = [r.all_clients_accuracy for r in records if r.all_clients_accuracy is not None]
    last_ten = [r.mean_accuracy for r in records[-LAST_ROUNDS:] if r.mean_accuracy is not None]
    best = max(means, default=None)
    floats_up, floats_down, flops = (
        sum(getattr(r, name) for r in records) / visits if visits else None
        for name in ("floats_up", "floats_down", "flops")
    )
    return Summary(
        method=config["method"],
        dataset=config["dataset"],
        best_mean_accuracy=best,
        best_round=next((r.round for r in records if means and r.mean_accuracy == best), None),
        last_mean_accuracy=means[-1] if means else None,
        last_ten_mean_accuracy=round(sum(last_ten) / len(last_ten), 6) if last_ten else None,
        final_all_clients_accuracy=everyone[-1] if everyone else None,
        best_all_clients_accuracy=max(everyone, default=None),
        spread_over_clients=None if last is None else round(float(np.std(last)), 6),
        rounds=len(records),
        seconds=round(sum(r.seconds for r in records), 3),
        compile_seconds=timing.pop("compile_seconds", 0.0),
        data_source=about["data"]["source"],
        floats_up_per_client=floats_up,
        floats_down_per_client=floats_down,
        flops_per_client_round=flops,
        diverged_at_round=next((r.round for r in records if r.not_finite), None),
        clients_not_finite=sum(r.not_finite for r in records),
        **to_target(records, TARGET_ACCURACY.get(config["dataset"])),
        config=config,
        devices=about["devices"],
        versions=about["versions"],
        kernels=about.get("kernels", ""),
        **timing,
    )


def to_target(records: Sequence[Record], target: float | None) -> dict[str, Any]:
    """Rounds, floats in both directions and FLOPs of all participants until the target."""
    names = ("rounds_to_target", "floats_to_target", "flops_to_target")
    floats = flops = 0
    for record in records:
        floats += record.floats_up + record.floats_down
        flops += record.flops
        if target is not None and (record.mean_accuracy or 0.0) >= target:
            spent = dict(zip(names, (record.round, floats, flops), strict=True))
            return {"target_accuracy": target, **spent}
    return {"target_accuracy": target, **dict.fromkeys(names)}


# -------------------------------------------------------------------------------- JSON


def digest(content: Mapping[str, Any]) -> str:
    """sha256 of a JSON object without its own `sha256`, however it is laid out."""
    plain = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """What a run was made with."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    installed = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version()} | installed


# -------------------------------------------------------------------------------- the folder


def _unusable(path: str | Path, accepted: str, error: object) -> PfedafmError:
    reason = getattr(error, "strerror", None) or error
    return bad("run_dir", str(path), f"{accepted} ({reason})")


def check_writable(path: str | Path) -> None:
    """Raises where a folder cannot be made or written; makes nothing."""
    place = Path(path).absolute()
    try:
        if "\0" in str(path).encode().decode():  # what is no text would fail later, in a library
            raise ValueError("no name can hold a zero byte")
        while not place.exists():
            place = place.parent
        # Rights alone do not tell: root has all of them, a disk may be read-only.
        with tempfile.TemporaryFile(dir=place):
            pass
    except (OSError, ValueError) as error:
        raise _unusable(path, "a folder that can be written", error) from error


class RunFolder:
    """The files of one run, and the lock that lets one process at a time write them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def check(self) -> None:
        """Raises before any work where it cannot be written, is in use, or is not a run's."""
        check_writable(self.path)
        try:
            names = sorted(one.name for one in self.path.iterdir()) if self.path.exists() else []
        except OSError as error:
            raise _unusable(self.path, "a folder", error) from error
        if names and not self._is_ours():
            reason = f"it holds {', '.join(names[:3])}, and no run of this program"
            raise _unusable(self.path, "a new or empty folder, or that of a run", reason)
        if LOCK in names:
            with self.lock():
                pass

    def _is_ours(self) -> bool:
        """By the mark in the lock, or by a `config.json` that only we write."""
        with contextlib.suppress(OSError):
            if (self / LOCK).read_bytes()[: len(MARK)] == MARK:
                return True
        try:
            content = json.loads((self / "config.json").read_bytes())
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(content, dict) and content.keys() >= {"config", "versions", "data"}

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One run at a time: the lock goes with its process, however that ends.

        What a process that was killed left half-written is removed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self / LOCK).open("ab+")
        except OSError as error:
            raise _unusable(self.path, "a folder that can be written", error) from error
        with file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PfedafmError(
                    f"{self.path} is in use by another run; wait for it, or choose another --run-dir"
                ) from None
            except OSError:
                pass  # a file system without locks
            if file.tell() == 0:
                file.write(MARK + b"\n")
                file.flush()
            for left in self.path.glob(".*.tmp"):
                left.unlink(missing_ok=True)
            yield

    def start(
        self, about: Mapping[str, Any], partition: Partition, records: Sequence[Record]
    ) -> None:
        """Settings, split and the records so far; what a finished run adds is removed."""
        for name in ("summary.json", "clients.npz"):
            (self / name).unlink(missing_ok=True)
        self._json("config.json", about)
        partition.save(self / "partition.npz")
        self._write_records(records)

    def _write_records(self, records: Sequence[Record]) -> None:
        lines = "".join(json.dumps(record.as_dict()) + "\n" for record in records)
        write_atomically(self / "rounds.jsonl", lambda file: file.write(lines.encode()))

    def add(self, record: Record) -> None:
        """One line more of `rounds.jsonl`."""
        with open(self / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")

    def finish(
        self, summary: Summary, records: Sequence[Record], clients: Mapping[str, np.ndarray]
    ) -> None:
        """Numbers of single clients, the records once more, and last of all the summary."""
        arrays: dict[str, Any] = dict(clients)
        write_atomically(self / "clients.npz", lambda file: np.savez_compressed(file, **arrays))
        self._write_records(records)  # whatever happened to the file meanwhile
        names = ("config.json", "partition.npz", "rounds.jsonl", "clients.npz")
        there = [name for name in names if (self / name).exists()]
        files = {name: hashlib.sha256((self / name).read_bytes()).hexdigest() for name in there}
        self._json("summary.json", {**summary.as_dict(), "files": files})

    def _json(self, name: str, content: Mapping[str, Any]) -> None:
        text = json.dumps({**content, "sha256": digest(content)}, indent=2) + "\n"
        write_atomically(self / name, lambda file: file.write(text.encode()))
