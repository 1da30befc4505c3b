"""What a report reads of a run's folder: settings, rounds, clients and split, each file checked as it is read."""

import dataclasses
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pfedafm_jax.config import METHOD_SETTINGS, Config, updated
from pfedafm_jax.costs import TARGET_ACCURACY, to_target
from pfedafm_jax.data import Partition
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import find_method

Record = dict[str, Any]
_MAYBE = (float, int, type(None))
_FIELDS: dict[str, Any] = {
    "round": int,
    "mean_accuracy": _MAYBE,
    "all_clients_accuracy": _MAYBE,
    "loss": _MAYBE,
    "seconds": (float, int),
    "participants": list,
    "not_finite": int,
    "accuracy": dict,
    "all_clients": (dict, type(None)),
    "floats_up": (float, int),
    "floats_down": (float, int),
    "flops": (float, int),
}


@dataclass(frozen=True)
class Run:
    """A run as its folder has it; `clients` is empty until the run is finished."""

    folder: Path
    config: Config
    about: dict[str, Any]  # command, versions, devices, data
    records: list[Record]
    written: dict[str, Any] | None  # the summary of a finished run
    clients: dict[str, np.ndarray]
    partition: Partition | None

    @property
    def finished(self) -> bool:
        return self.written is not None

    @property
    def method(self) -> str:
        """The method's title; the bare name of one that is not registered here."""
        try:
            return find_method(self.config.method).title
        except PfedafmError:
            return self.config.method

    @property
    def predictions(self) -> list[str]:
        """What was judged, the method's own first."""
        return list(self.records[0]["accuracy"]) if self.records else []

    def evaluations(self, prediction: str) -> np.ndarray:
        """Accuracies of all clients by evaluation, `[evaluations, clients]`."""
        return self.clients.get(f"all_clients/{prediction}", np.zeros((0, self.config.num_clients)))

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The numbers of `summary.json`, worked out from the rounds, so that unfinished runs have them as well."""
        records = self.records
        means = [(r["mean_accuracy"], -r["round"]) for r in records if r["mean_accuracy"] is not None]
        everyone = [r["all_clients_accuracy"] for r in records if r["all_clients_accuracy"] is not None]
        best, best_round = max(means, default=(None, None))
        last = self.evaluations(self.predictions[0]) if records else np.zeros((0, 0))
        visits = sum(len(r["participants"]) for r in records)

        def per_visit(name: str) -> float | None:
            return sum(r[name] for r in records) / visits if visits else None

        return {
            "best_mean_accuracy": best,
            "best_round": None if best_round is None else -best_round,
            "last_mean_accuracy": means[-1][0] if means else None,
            "final_all_clients_accuracy": everyone[-1] if everyone else None,
            "spread_over_clients": float(np.std(last[-1])) if len(last) else None,
            "rounds": len(records),
            "seconds": sum(r["seconds"] for r in records) if records else None,
            "floats_up_per_client": per_visit("floats_up"),
            "floats_down_per_client": per_visit("floats_down"),
            "flops_per_client_round": per_visit("flops"),
            "diverged_at_round": next((r["round"] for r in records if r["not_finite"]), None),
            "clients_not_finite": sum(r["not_finite"] for r in records),
            **to_target(records, TARGET_ACCURACY.get(self.config.dataset)),
        }


def find_runs(folders: list[Path]) -> list[Path]:
    """The run folders among these; a folder of runs, such as a comparison leaves, stands for the runs in it.

    Files are passed over where there are folders as well: `runs/all/*` has the tables of a comparison in it.
    """
    found: list[Path] = []
    for folder in [path for path in folders if not path.is_file()] or folders:
        inside = [] if (folder / "config.json").exists() else sorted(folder.glob("*/config.json"))
        if not inside and not (folder / "config.json").exists():
            reason = (
                "it has no config.json"
                if folder.is_dir()
                else "it is a file"
                if folder.exists()
                else "there is no such folder"
            )
            raise PfedafmError(
                f"run_dir = {str(folder)!r} cannot be used; accepted: the folder of a run, or a folder of such folders "
                f"({reason})"
            )
        found += [path.parent for path in inside] or [folder]
    return list(dict.fromkeys(found))


def read_run(folder: Path) -> Run:
    """Everything of one run; raises `PfedafmError` that names the file where one is damaged."""
    about = _json(folder / "config.json")
    config = _config(folder / "config.json", about)
    written = _json(folder / "summary.json") if (folder / "summary.json").exists() else None
    records = _records(folder / "rounds.jsonl", finished=written is not None)
    if written is not None and written.get("rounds") != len(records):
        _damaged(folder / "rounds.jsonl", f"{len(records)} rounds, and summary.json says {written.get('rounds')}")
    clients = {} if written is None else _clients(folder / "clients.npz", config, len(records))
    partition = Partition.load(folder / "partition.npz") if (folder / "partition.npz").exists() else None
    if partition is not None and partition.num_clients != config.num_clients:
        _damaged(folder / "partition.npz", f"{partition.num_clients} clients instead of {config.num_clients}")
    return Run(folder, config, about, records, written, clients, partition)


def _damaged(path: Path, reason: object) -> NoReturn:
    raise PfedafmError(f"{path} is damaged: {reason}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise PfedafmError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from error


def _parsed(path: Path, text: str, where: str = "") -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        content = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"{where}{error}")
    if not isinstance(content, dict):
        _damaged(path, f"{where}an object is expected")
    return content


def _json(path: Path) -> dict[str, Any]:
    return _parsed(path, _read(path))


def _config(path: Path, about: dict[str, Any]) -> Config:
    if not isinstance(about.get("config"), dict):
        _damaged(path, "it has no settings")
    try:
        known = {k: v for k, v in about["config"].items() if not isinstance(v, dict) or k in METHOD_SETTINGS}
        config = updated(Config(), known)
        # Networks and methods of one's own need not be registered where a report is made.
        plain = {"architectures": ("cnn1",), "shared_extractor": "cnn1", "method": "pfedafm"}
        dataclasses.replace(config, **plain).check()
        if not config.architectures or not all(isinstance(name, str) for name in config.architectures):
            _damaged(path, f"architectures = {config.architectures!r}")
    except (PfedafmError, TypeError) as error:
        _damaged(path, error)
    return config


def _records(path: Path, finished: bool) -> list[Record]:
    """The rounds; the last line of an unfinished run may be half-written and is then left out."""
    if not path.exists() and not finished:
        return []
    text = _read(path)
    lines = text.splitlines()
    if lines and not finished and not text.endswith("\n"):
        lines.pop()
    records = [_parsed(path, line, f"line {number}: ") for number, line in enumerate(lines, 1) if line.strip()]
    names = list(records[0].get("accuracy", {})) if records else []
    for number, record in enumerate(records, 1):
        wrong = [name for name, kind in _FIELDS.items() if not isinstance(record.get(name), kind) or name not in record]
        scores = [] if wrong else [record["accuracy"], record["all_clients"] or dict.fromkeys(names)]
        if any(set(found) != set(names) or not all(isinstance(v, _MAYBE) for v in found.values()) for found in scores):
            wrong.append("accuracy")
        if not wrong and record["round"] != number:
            wrong.append("round")
        if wrong or not names:
            _damaged(path, f"line {number}: {', '.join(wrong) or 'accuracy'} missing, or not as a run writes it")
    if finished and not records:
        _damaged(path, "no rounds")
    return records


def _clients(path: Path, config: Config, rounds: int) -> dict[str, np.ndarray]:
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            table = {name: content[name] for name in content.files}
    except OSError as error:
        raise PfedafmError(f"{path} cannot be read ({error.strerror or error})") from error
    except Exception as error:  # zipfile and numpy raise many types on damaged input
        _damaged(path, error)
    clients, evaluations = config.num_clients, len(table.get("evaluation_rounds", ()))
    for name, rows in table.items():
        kind = name.partition("/")[0]
        shapes = {
            "visits": (rounds, clients),
            "all_clients": (evaluations, clients),
            "evaluation_rounds": (evaluations,),
        }
        if rows.shape != shapes.get(kind, (clients,)) or rows.dtype.kind not in "iufb":
            _damaged(path, f"{name} has shape {rows.shape}, expected {shapes.get(kind, (clients,))}")
    missing = {"architecture", "num_train", "num_test", "evaluation_rounds"} - table.keys()
    if missing:
        _damaged(path, f"{', '.join(sorted(missing))} missing")
    return table
