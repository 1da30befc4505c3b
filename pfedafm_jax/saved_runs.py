"""Runs that are in folders, told apart by their settings: what `experiments/plot.py` draws."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pfedafm_jax.config import Config, bad
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.experiment import Record
from pfedafm_jax.methods import find_method, method_names
from pfedafm_jax.records import NOT_IN_RESULTS, RunFolder, _flat

# Settings that matter only where another one has this value; those of a method matter only to it.
MATTERS_IF: dict[str, Callable[[dict[str, Any]], bool]] = {
    "gamma": lambda settings: settings["partition"] == "dirichlet",
    "min_samples": lambda settings: settings["partition"] == "dirichlet",
    "classes_per_client": lambda settings: settings["partition"] == "pathological",
    "synthetic_classes": lambda settings: settings["dataset"] == "synthetic",
    "synthetic_samples": lambda settings: settings["dataset"] == "synthetic",
}


@dataclass(frozen=True)
class SavedRun:
    """A run, finished or not."""

    folder: Path
    settings: dict[str, Any]  # on one level: `pfedafm.mix_fixed`
    records: list[Record]

    def has(self, name: str) -> bool:
        """Whether a setting matters to this run."""
        part, dot, _ = name.partition(".")
        matters = MATTERS_IF.get(name, lambda settings: True)
        return name in self.settings and (part == self.settings["method"] if dot else matters(self.settings))


def read_runs(folders: Sequence[str | Path]) -> list[SavedRun]:
    """The runs of these folders; one that is not a run itself stands for the runs in it."""
    found = []
    for folder in map(Path, folders):
        inside = [folder] if _is_run(folder) else sorted(path for path in folder.glob("*") if _is_run(path))
        if not inside:
            raise PfedafmError(
                f"{str(folder)!r} cannot be used; accepted: the folder of a run (with config.json and rounds.jsonl), or "
                "one with such folders in it"
            )
        found += [_read(path) for path in inside]
    return list({run.folder.absolute(): run for run in found}.values())


def _is_run(folder: Path) -> bool:
    return (folder / "rounds.jsonl").is_file() and RunFolder(folder).config() is not None


def _read(folder: Path) -> SavedRun:
    records = []
    for line in (folder / "rounds.jsonl").read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:  # the last line of a run that was cut off, or is being written
            break
    if not records:
        raise PfedafmError(f"{str(folder)!r} is a run without a finished round; there is nothing to draw yet")
    return SavedRun(folder, _flat(Config().as_dict()) | _flat(RunFolder(folder).config() or {}), records)


# ---------------------------------------------------------------------------------------------- words


def labels(runs: Sequence[SavedRun]) -> list[str]:
    """For each run what makes it different from the others; its folder's name where that is nothing."""
    names = differing(runs)
    found = [label(run, names) or run.folder.name for run in runs]
    return [
        f"{words} ({run.folder.name})" if found.count(words) > 1 and words != run.folder.name else words
        for run, words in zip(runs, found, strict=True)
    ]


def differing(runs: Sequence[SavedRun]) -> list[str]:
    """Settings with several values among the runs that they matter to."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [
        name
        for name in names
        if name not in NOT_IN_RESULTS and len({json.dumps(run.settings[name]) for run in runs if run.has(name)}) > 1
    ]


def label(run: SavedRun, names: Sequence[str]) -> str:
    """These settings of a run in words: `pFedAFM, gamma 0.1, seed 1`."""
    return ", ".join(_words(name, run.settings[name]) for name in names if run.has(name))


def _words(name: str, value: Any) -> str:
    if name == "method":
        return find_method(value).title if value in method_names() else str(value)
    short = name.rpartition(".")[2].replace("_", " ")
    if isinstance(value, bool | None):
        return short if value else f"no {short}"
    if isinstance(value, list):
        return "+".join(map(str, value))
    return str(value) if name in ("dataset", "partition") else f"{short} {value}"


def grouped(runs: Sequence[SavedRun], names: Sequence[str]) -> dict[str, list[SavedRun]]:
    """Runs that agree in these settings together, by a label."""
    settings = list(dict.fromkeys(name for run in runs for name in run.settings))
    for name in names:
        if name not in settings:
            near = "".join(f" (did you mean {other}?)" for other in get_close_matches(name, settings, n=1))
            raise bad("group", name, f"names of settings with commas between them, like method,gamma{near}")
    found: dict[str, list[SavedRun]] = {}
    for run in runs:
        found.setdefault(label(run, names) or f"without {', '.join(names)}", []).append(run)
    return found
