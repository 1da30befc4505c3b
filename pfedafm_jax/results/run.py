"""Run folders read back: the only reader of what `records.py` writes.

`read_runs(folders)` returns one `Run` per folder and checks each file it reads; `Damaged` names a
bad one. `select.py` distinguishes runs by their settings, `tables.py` tabulates them.
"""

import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd

from pfedafm_jax.base.checked import read_json
from pfedafm_jax.base.errors import START_OVER, PfedafmError, bad, reason
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.config.config import REMOVED, Config, Machine
from pfedafm_jax.data import Partition
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.results.records import FORMAT, About, Record, Summary, summarize

EARLIER = ("sha256", "target_accuracy", "rounds_to_target", "floats_to_target", "flops_to_target")
"""What `config.json` and `summary.json` of earlier runs have beside it."""


class Damaged(PfedafmError):
    """A file of a run is missing or is not as a run writes it."""


@dataclass(frozen=True)
class Run:
    """A run, finished or not, from its folder or from memory.

    `about` is the content of `config.json`: config, command, versions, devices, data (source and
    digest), predictions (names, the method's own first), architectures (names).

    Read a setting from `settings`, which has every name, also for runs of earlier versions; `config`
    is as it was written, nested (in `about` and `summary`, too), for `updated(Config(), config)`.
    """

    about: dict[str, Any]
    records: list[Record]
    summary: Summary  # of the rounds so far, if unfinished
    finished: bool
    folder: Path | None = None
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)  # of a run that was just trained
    digests: Mapping[str, str] = field(default_factory=dict)  # of a finished run's arrays, by file

    @property
    def config(self) -> dict[str, Any]:
        """The settings, nested as they were written."""
        return self.about["config"]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings, flat: `pfedafm.mix_fixed`; defaults for settings added since."""
        return flat(Config().as_dict()) | flat(self.config)

    @property
    def rate(self) -> float:
        """The learning rate of the run's method: its own, or the common one."""
        own = self.settings.get(f"{self.config['method']}.learning_rate")
        return self.settings["learning_rate"] if own is None else own

    @property
    def num_participants(self) -> int:
        """How many clients are drawn each round: K = C · N."""
        return round(self.settings["participation"] * self.settings["num_clients"])

    @property
    def title(self) -> str:
        """The method's title; its bare name if it is not registered."""
        method = self.config["method"]
        return find_method(method).title if method in method_names() else method

    @property
    def name(self) -> str:
        """The folder's name, or the one it would have in a comparison."""
        method, seed = self.config["method"], self.config["seed"]
        return self.folder.name if self.folder else f"{method}-seed{seed}"

    @property
    def predictions(self) -> list[str]:
        """Names of the predictions that were evaluated, the method's main one first."""
        return self.about["predictions"]

    def per_round(self) -> pd.DataFrame:
        """One row per round, see `per_round`."""
        return per_round(self.records)

    @cached_property
    def clients(self) -> Mapping[str, np.ndarray]:
        """Per-client numbers; empty for an unfinished run in a folder.

        `visits/…` is `[rounds, clients]`, NaN where a client took no part; `all_clients/accuracy`
        and `all_clients/accuracy/NAME` are `[evaluations, clients]` after `evaluation_rounds`;
        `architecture` (its number), `num_train` and `num_test` are `[clients]`.
        """
        if self.arrays or self.folder is None or not self.finished:
            return self.arrays
        path = self.folder / "clients.npz"
        content = _bytes(path, self.digests)
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except Exception as error:  # zipfile and numpy raise many types on damaged input
            _damaged(path, error)

    def first(self, rounds: int) -> "Run":
        """The run as it was after this many rounds, in memory; itself if it has no more."""
        if rounds >= len(self.records):
            return self
        arrays = dict(self.clients)  # empty, if unfinished
        known = arrays.get("evaluation_rounds", np.zeros(0)) <= rounds
        for name, rows in arrays.items():
            if name.startswith("visits/"):
                arrays[name] = rows[:rounds]
            elif name == "evaluation_rounds" or name.startswith("all_clients/"):
                arrays[name] = rows[known]
        records, last = self.records[:rounds], arrays.get("all_clients/accuracy", np.zeros((0, 0)))
        summary = summarize(records, self.about, last[-1] if len(last) else None)
        return Run(self.about, records, summary, self.finished, arrays=arrays)

    @cached_property
    def partition(self) -> Partition | None:
        """Which client had which images, if the folder has it."""
        path = (self.folder or Path()) / "partition.npz"
        if self.folder is None or not path.exists():
            return None
        _bytes(path, self.digests)
        return Partition.load(path)


def per_round(records: Sequence[Record]) -> pd.DataFrame:
    """A table of records: one row per round, NaN for missing numbers, without the participants.

    >>> first = Record(1, 0.5, None, 1.25, 2.0, [3], 0, 10, 10, 99, {"mix_mean": 0.75})
    >>> per_round([first])[["mean_accuracy", "loss", "flops", "mix_mean"]]
       mean_accuracy  loss  flops  mix_mean
    0            0.5  1.25     99      0.75
    """
    frame: Any = pd.DataFrame([record.as_dict() for record in records])
    lists = ["participants", "dropped"]
    return frame.drop(columns=lists, errors="ignore").apply(pd.to_numeric)


# -------------------------------------------------------------------------------- reading


def read_runs(folders: Sequence[str | Path]) -> list[Run]:
    """The runs in these folders, each of which is a run or, as of a comparison, has runs in it.

    Files among them are ignored if there are folders as well: `runs/all/*` includes tables.
    """
    found: dict[Path, Path] = {}
    paths = [Path(folder) for folder in folders]
    for folder in [path for path in paths if not path.is_file()] or paths:
        inside = [folder] if (folder / "config.json").exists() else []
        inside = inside or sorted(path.parent for path in folder.glob("*/config.json"))
        if not inside:
            raise _no_run(folder, "the folder of a run, or one with such folders in it")
        found |= {path.absolute(): path for path in inside}
    return [read_run(folder) for folder in found.values()]


def read_run(folder: str | Path) -> Run:
    """Reads one run; raises `Damaged` with the name of a damaged file.

    `clients` and `partition` are read and checked on first use.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("config.json", "rounds.jsonl")):
        raise _no_run(folder, "the folder of a run")
    about = _object(folder / "config.json")
    try:
        About.model_validate(about)
    except PfedafmError as error:
        _damaged(folder / "config.json", error)
    written = _object(folder / "summary.json") if (folder / "summary.json").exists() else {}
    digests, path = written.pop("files", {}), folder / "rounds.jsonl"
    try:
        records = []
        if written or path.exists():
            *lines, rest = _bytes(path).split(b"\n")  # the last may be partial
            if rest and written:
                _damaged(path, "its last line is cut off")
            records = _records(path, lines, about["config"]["num_clients"])
        if not written:
            return Run(about, records, summarize(records, about), False, folder)
        if written["config"] != about["config"] or written["rounds"] != len(records):
            _damaged(folder / "summary.json", "it does not belong to config.json and rounds.jsonl")
        summary = read_json(Summary, json.dumps(written))
    except KeyError as error:  # not what a run writes
        _damaged(folder / ("summary.json" if written else "config.json"), error)
    except Damaged:
        raise
    except PfedafmError as error:
        _damaged(folder / "summary.json", error)
    return Run(about, records, summary, True, folder, digests=digests)


def _no_run(folder: Path, accepted: str) -> PfedafmError:
    why = "it has no config.json" if folder.is_dir() else "there is no such folder"
    return bad("run_dir", str(folder), f"{accepted} ({why})")


def _damaged(path: Path, why: object) -> NoReturn:
    raise Damaged(
        f"{str(path)!r} is damaged ({why}). The run's other files can still be read by hand; "
        "where there are checkpoints, the command that made it writes the file anew, else "
        f"{START_OVER}"
    )


def _bytes(path: Path, digests: Mapping[str, str] = {}) -> bytes:
    try:
        content = read_bytes(path)
    except FileNotFoundError:
        _damaged(path, "it is missing")
    except OSError as error:
        _damaged(path, reason(error))
    if path.name in digests and hashlib.sha256(content).hexdigest() != digests[path.name]:
        _damaged(path, "it has changed since it was written")
    return content


def _json(path: Path, text: bytes, where: str = "") -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"{where}{error}")
    return content if isinstance(content, dict) else _damaged(path, f"{where}no object")


def _object(path: Path) -> dict[str, Any]:
    """A JSON file, checked for its format."""
    content = _json(path, _bytes(path))
    if content.get("format") != FORMAT:
        found = repr(content["format"])[:20] if "format" in content else "1 or another program's"
        raise PfedafmError(
            f"{str(path)!r} is not of this version: its format is {found}, and {FORMAT} is read "
            f"here; {START_OVER}, another --run-dir leaves it as it is"
        )
    return {name: value for name, value in content.items() if name not in EARLIER}


def _records(path: Path, lines: Sequence[bytes], num_clients: int) -> list[Record]:
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = Record.from_dict(_json(path, line, f"line {number}: "))
            drawn = (*record.participants, *record.dropped)
            if record.round != number or not all(0 <= one < num_clients for one in drawn):
                raise ValueError("round or participants are not as a run writes them")
        except Damaged:
            raise
        except (PfedafmError, ValueError) as error:
            _damaged(path, f"line {number}: {error}")
        records.append(record)
    return records


# -------------------------------------------------------------------------------- labels

NOT_IN_RESULTS = {"rounds", "eval_every", *Machine.model_fields, *REMOVED}
"""Settings that may change when a run is resumed: its rounds so far would have been the same.

(Devices, layout, clients per step and kernels within float tolerance; see `docs/determinism.md`.)
"""

# Settings that matter only if another one has this value; a method's settings matter only to it.
MATTERS_IF = {
    "gamma": ("partition", "dirichlet"),
    "min_samples": ("partition", "dirichlet"),
    "classes_per_client": ("partition", "pathological"),
    "synthetic_classes": ("dataset", "synthetic"),
    "synthetic_samples": ("dataset", "synthetic"),
}


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings made flat, `pfedafm.mix_fixed`; tuples become lists, as in JSON."""
    found = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = list(value) if isinstance(value, tuple) else value
    return found


def matters(run: Run, name: str) -> bool:
    """Whether a setting matters to a run."""
    method, dot, _ = name.partition(".")
    other, value = MATTERS_IF.get(name, ("method", method if dot else run.config["method"]))
    return name in run.settings and run.settings[other] == value


def differing(runs: Sequence[Run]) -> list[str]:
    """Settings with different values among the runs that they matter to."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in NOT_IN_RESULTS
        and len({json.dumps(comparable(run.settings[name])) for run in runs if matters(run, name)})
        > 1
    ]


def comparable(value: Any) -> Any:
    """A setting's value such that equal values are equal texts: runs of earlier versions have `10`
    where a number is a float, `10.0`."""
    return float(value) if type(value) is int else value
