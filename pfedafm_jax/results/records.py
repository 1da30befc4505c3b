"""The results of a run: `Record` is one round, `Summary` the whole; only `RunFolder` writes them.

    config.json     settings, command, versions, data: everything needed to run it again
    partition.npz   which client has which images
    rounds.jsonl    a `Record` per line
    clients.npz     per-client numbers by round
    summary.json    a `Summary`; written last, so a run that has it is finished

All but `rounds.jsonl`, to which lines are appended, are written atomically. `summary.json` holds the
sha256 of the two `.npz` files. `run.py` reads them;
`docs/evaluation.md` says which accuracy is which.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Lt
from pydantic import ConfigDict, PlainValidator

from pfedafm_jax.base.checked import Checked, read_json
from pfedafm_jax.base.errors import PfedafmError, reason
from pfedafm_jax.base.files import _unusable, check_writable, read_bytes, write_atomically
from pfedafm_jax.data import Partition

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

FORMAT = 2  # version of a run's files; 1 had nested accuracies and no version
LAST_ROUNDS = 10  # of `last_ten_mean_accuracy`
LOCK, MARK = ".lock", b"pfedafm_jax"  # the mark identifies our folders


AS_WRITTEN = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""How files are read: nothing is converted, and what no run writes is refused."""

Whole = Annotated[int, Ge(0), Lt(2**63)]  # of a table: an int64
Client = Whole
Accuracy = float | None


def _number(value: Any) -> Any:
    if value is None or (type(value) in (int, float) and _fits(value)):
        return value
    raise ValueError("a number, or none")


Number = Annotated[float | None, PlainValidator(_number)]
"""A number of a table, whole or not, or nothing where nothing was finite."""


@dataclass(frozen=True)
class Record:
    """One round. Accuracies are unweighted means over clients of the method's own prediction."""

    __pydantic_config__ = AS_WRITTEN

    round: Annotated[int, Ge(1)]
    mean_accuracy: Accuracy  # of the participants, each right after its training
    all_clients_accuracy: Accuracy  # of all clients after the round; None: not evaluated
    loss: float | None  # mean over the participants' training; None: none was finite
    seconds: float
    participants: list[Client]  # without those that dropped out
    not_finite: Whole  # participants whose update had NaN or infinity and was discarded
    floats_up: Whole
    floats_down: Whole
    flops: Whole
    more: dict[str, Number] = field(default_factory=dict)
    """Other predictions, `mean_accuracy/small`, and what the method reports, `mix_mean`."""
    dropped: list[Client] = field(default_factory=list)
    """Clients that were drawn and dropped out; they received, and did and sent nothing."""

    @property
    def drawn(self) -> int:
        """How many clients were drawn."""
        return len(self.participants) + len(self.dropped)

    def as_dict(self) -> dict[str, Any]:
        """A line of `rounds.jsonl`, with `more` merged in."""
        hidden = {"more"} if self.dropped else {"more", "dropped"}
        return {name: value for name, value in vars(self).items() if name not in hidden} | self.more

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Record":
        """The inverse of `as_dict`; raises `PfedafmError` for a value that no run writes."""
        names = [one.name for one in fields(cls) if one.name != "more"]
        known = {name: values[name] for name in names if name in values}
        more = {name: value for name, value in values.items() if name not in names}
        return read_json(cls, json.dumps({**known, "more": more}))


def _fits(value: float) -> bool:
    """Whether a number is one of a table: an int64, or a finite float (a loss may be 1e30)."""
    return -(2**63) < value < 2**63 if type(value) is int else math.isfinite(value)


def mean(values: np.ndarray) -> float | None:
    """Unweighted mean over clients, to six places; None if nothing is finite."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return round(float(finite.mean()), 6) if finite.size else None


@dataclass(frozen=True)
class Summary:
    """A run in numbers. `docs/evaluation.md` explains each accuracy."""

    __pydantic_config__ = AS_WRITTEN

    method: str
    dataset: str
    best_mean_accuracy: Accuracy
    best_round: Annotated[int, Ge(1)] | None
    last_mean_accuracy: Accuracy
    last_ten_mean_accuracy: Accuracy  # mean over the last ten rounds, or all if fewer
    final_all_clients_accuracy: Accuracy
    best_all_clients_accuracy: Accuracy
    spread_over_clients: float | None  # standard deviation at the last evaluation of all clients
    rounds: Whole
    seconds: float
    compile_seconds: float
    data_source: str
    floats_up_per_client: float | None
    floats_down_per_client: float | None
    flops_per_client_round: float | None
    diverged_at_round: Annotated[int, Ge(1)] | None
    clients_not_finite: Whole
    config: dict[str, Any]
    devices: str
    versions: dict[str, str]
    kernels: str = ""  # which implementation of the kernels, and why
    checkpoint_seconds: float = 0.0  # that rounds waited for saves
    checkpoint_background_seconds: float = 0.0  # that saves took in the background
    format: int = FORMAT

    def as_dict(self) -> dict[str, Any]:
        """The content of `summary.json`."""
        return dict(vars(self))


class Data(Checked):
    """What `config.json` says of the data."""

    model_config = ConfigDict(extra="ignore")

    source: str
    """Where they came from."""
    digest: str
    """sha256 of all samples and labels."""
    classes: tuple[str, ...] = ()
    """Their names."""
    image_shape: tuple[Whole, ...] = ()


class Settings(Checked):
    """Those settings in `config.json` that are needed to read the other files; a method that they
    name may be one of a plugin that is not there."""

    model_config = ConfigDict(extra="ignore")

    method: str
    dataset: str
    num_clients: Annotated[int, Ge(1)]
    rounds: Annotated[int, Ge(1)]
    seed: Whole


class About(Checked):
    """`config.json`: everything needed to run it again. It may have more, which is kept."""

    model_config = ConfigDict(extra="ignore")

    config: Settings
    versions: dict[str, str]
    devices: str
    data: Data
    predictions: tuple[str, ...]
    """Their names, the method's own first."""
    architectures: tuple[str, ...]


def summarize(
    records: Sequence[Record],
    about: Mapping[str, Any],
    last: np.ndarray | None = None,
    **timing: Any,
) -> Summary:
    """The summary of a run, finished or not, from its records.

    Args:
        records: the rounds so far.
        about: the content of `config.json`.
        last: accuracies `[clients]` at the last evaluation of all clients.
        timing: `compile_seconds`, `checkpoint_seconds`, `checkpoint_background_seconds`.
    """
    config, visits = about["config"], sum(r.drawn for r in records)
    means = [r.mean_accuracy for r in records if r.mean_accuracy is not None]
    last_ten = [r.mean_accuracy for r in records[-LAST_ROUNDS:] if r.mean_accuracy is not None]
    everyone = [r.all_clients_accuracy for r in records if r.all_clients_accuracy is not None]
    best, known = max(means, default=None), [] if last is None else last[np.isfinite(last)]
    spread = round(float(np.std(known)), 6) if len(known) else None

    def per_visit(name: str) -> float | None:
        return sum(getattr(r, name) for r in records) / visits if visits else None

    return Summary(
        method=config["method"],
        dataset=config["dataset"],
        best_mean_accuracy=best,
        best_round=next((r.round for r in records if means and r.mean_accuracy == best), None),
        last_mean_accuracy=means[-1] if means else None,
        last_ten_mean_accuracy=round(sum(last_ten) / len(last_ten), 6) if last_ten else None,
        final_all_clients_accuracy=everyone[-1] if everyone else None,
        best_all_clients_accuracy=max(everyone, default=None),
        spread_over_clients=spread,
        rounds=len(records),
        seconds=round(sum(r.seconds for r in records), 3),
        compile_seconds=timing.pop("compile_seconds", 0.0),
        data_source=about["data"]["source"],
        floats_up_per_client=per_visit("floats_up"),
        floats_down_per_client=per_visit("floats_down"),
        flops_per_client_round=per_visit("flops"),
        diverged_at_round=next((r.round for r in records if r.not_finite), None),
        clients_not_finite=sum(r.not_finite for r in records),
        config=config,
        devices=about["devices"],
        versions=about["versions"],
        kernels=about.get("kernels", ""),
        **timing,
    )


# -------------------------------------------------------------------------------- the folder


class RunFolder:
    """The files of one run, and a lock so that only one process at a time writes them."""

    def __init__(self, path: str | Path):
        self.path = Path(path)

    def check(self) -> None:
        """Raises if the folder cannot be written, is in use, or holds something else."""
        check_writable(self.path)
        try:
            names = sorted(one.name for one in self.path.iterdir()) if self.path.exists() else []
            ours = LOCK in names and read_bytes(self.path / LOCK).startswith(MARK)
        except OSError as error:
            raise _unusable(self.path, "a folder", reason(error)) from error
        with contextlib.suppress(OSError, ValueError, RecursionError, AttributeError):
            content = json.loads(read_bytes(self.path / "config.json"))  # only we write this
            ours |= content.keys() >= {"config", "versions", "data"}
        if names and not ours:
            why = f"it holds {', '.join(names[:3])}, and no run of this program"
            raise _unusable(self.path, "a new or empty folder, or that of a run", why)
        if LOCK in names:
            with self.lock():
                pass

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder's lock, which the system releases if the process dies.

        Removes partial files of a killed process.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = (self.path / LOCK).open("ab+")
        except OSError as error:
            raise _unusable(self.path, "a folder that can be written", reason(error)) from error
        with file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                words = "is in use by another run; wait for it, or choose another --run-dir"
                raise PfedafmError(f"{self.path} {words}") from None
            except OSError:
                pass  # a file system without locks
            if file.tell() == 0:
                file.write(MARK + b"\n")
                file.flush()
            for left in self.path.glob(".*.tmp"):
                left.unlink(missing_ok=True)
            yield

    def start(
        self, about: Mapping[str, Any], partition: Partition | None, records: Sequence[Record]
    ) -> None:
        """Writes settings, split and the records so far; removes the files of a finished run.

        `partition` is None where nodes have the samples."""
        for name in ("summary.json", "clients.npz"):
            (self.path / name).unlink(missing_ok=True)
        self._write_json("config.json", about)
        if partition is not None:
            partition.save(self.path / "partition.npz")
        self._write_records(records)

    def add(self, record: Record) -> None:
        """Appends a line to `rounds.jsonl`."""
        with open(self.path / "rounds.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_dict()) + "\n")

    def finish(
        self, summary: Summary, records: Sequence[Record], clients: Mapping[str, np.ndarray]
    ) -> None:
        """Writes per-client numbers, all records again, and last the summary."""
        arrays: dict[str, Any] = dict(clients)
        path = self.path / "clients.npz"
        write_atomically(path, lambda file: np.savez_compressed(file, **arrays))
        self._write_records(records)  # in case the file was altered meanwhile
        digests = {
            name: hashlib.sha256(read_bytes(self.path / name)).hexdigest()
            for name in ("partition.npz", "clients.npz")
            if (self.path / name).exists()
        }
        self._write_json("summary.json", {**summary.as_dict(), "files": digests})

    def _write_records(self, records: Sequence[Record]) -> None:
        lines = "".join(json.dumps(record.as_dict()) + "\n" for record in records)
        write_atomically(self.path / "rounds.jsonl", lines)

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        write_atomically(self.path / name, json.dumps(content, indent=2) + "\n")
