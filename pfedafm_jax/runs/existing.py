"""What exists of a run and what is left to do, determined once before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax

from pfedafm_jax.base.errors import START_OVER, PfedafmError, bad
from pfedafm_jax.base.files import Log, check_writable
from pfedafm_jax.base.terminal import console
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.results.records import RunFolder
from pfedafm_jax.results.run import NOT_IN_RESULTS, Damaged, Run, flat, read_run
from pfedafm_jax.runs.checkpoints import Checkpoints

ELSEWHERE = f"{START_OVER}, another --run-dir leaves it as it is"


@dataclass(frozen=True)
class Task:
    """A run to do, and what `find_existing` found of it in its folder.

    `again`: it starts over, whatever exists. Without a folder everything stays in memory.
    """

    config: Config
    folder: Path | None = None
    state: Literal["new", "started", "done", "again"] = "new"
    rounds_done: int = 0
    run: Run | None = None  # what was read from its folder


def checkpoint_folder(run_dir: str | Path) -> Path:
    """The folder of a run's checkpoints: `checkpoints/NAME` for `runs/NAME` if there is a folder
    `checkpoints` next to `runs`, as in this repository; else `checkpoints` in the run's own."""
    place = Path(run_dir).absolute()
    if not (place / "checkpoints").is_dir():
        for parent in place.parents:
            if parent.name == "runs" and (parent.parent / "checkpoints").is_dir():
                return parent.parent / "checkpoints" / place.relative_to(parent)
    return place / "checkpoints"


def find_existing(
    task: Task,
    *,
    fresh: bool = False,
    longer: bool = False,
    nodes: bool = False,
    log: Log = console.print,
) -> Task:
    """The task, completed by what exists of it; raises early if its folder cannot be used.

    Args:
        task: the run and its folder.
        fresh: start over, whatever exists.
        longer: accept a run that was started with more rounds, and start over one that cannot be
            extended; otherwise both are refused.
        nodes: clients are elsewhere; a run of the other kind is refused.
        log: called for damaged files that a checkpoint can replace.
    """
    if task.folder is None:
        return task
    place, config = task.folder, task.config
    saved = {} if fresh else Checkpoints(checkpoint_folder(place)).manifests()
    run = None if fresh else _read(place, bool(saved), log)
    if run and bool(run.about.get("nodes")) != nodes:
        words = "a federation's run" if run.about.get("nodes") else "a simulation's run"
        raise PfedafmError(
            f"{place} holds {words}, which this command does not go on with; {ELSEWHERE}"
        )
    stored = ([run.config] if run else []) + [one["config"] for one in saved.values()]
    started = stored[0]["rounds"] if stored else 0
    for settings in stored:
        same = updated(config, rounds=started) if longer else config
        refuse_others(place if run else checkpoint_folder(place), differences(settings, same))
    config = updated(config, rounds=max(config.rounds, started)) if longer else config
    task = Task(config, place, "started" if saved else "new", max(saved, default=0), run)
    finished = run.summary.rounds if run and run.finished else 0
    done = max(finished, *saved, 0)
    if finished == config.rounds:
        return replace(task, state="done", rounds_done=finished)
    if done > config.rounds:
        accepted = f"{done} or more, since {place} has done {done} already ({ELSEWHERE})"
        raise bad("rounds", config.rounds, accepted)
    if finished and not saved and not longer:
        words = f"is finished after {finished} rounds and has no checkpoint to resume from"
        raise PfedafmError(f"{place} {words}; {ELSEWHERE}")
    if jax.process_index() == 0:  # the one that writes
        RunFolder(place).check()
        check_writable(checkpoint_folder(place))
    if fresh or (finished and not saved) or any(differences(one, config) for one in stored):
        return replace(task, state="again", rounds_done=0)
    return task


def _read(place: Path, saved: bool, log: Log) -> Run | None:
    """The run in a folder; None if there is none, or if checkpoints replace its damaged files."""
    if not (place / "config.json").exists():
        return None
    try:
        run = read_run(place)
        _ = run.finished and (run.clients, run.partition)  # reading checks both
        return run
    except Damaged as error:
        if not saved:
            raise
        log(f"warning: {error}")
        return None


def differences(stored: Mapping[str, Any], config: Config) -> list[str]:
    """Settings in which a stored run differs, `setting: stored → asked`; empty: it is the same."""
    usual = flat(Config(method=config.method).as_dict())  # defaults, for settings added since
    before, after = usual | flat(stored), flat(config.as_dict())
    free = NOT_IN_RESULTS - ({"rounds"} if getattr(config, config.method).length_matters else set())
    found = []
    for name in dict.fromkeys([*after, *before]):
        of_another_method = "." in name and not name.startswith(f"{config.method}.")
        values = [one.get(name, "(unknown)") for one in (before, after)]
        if name not in free and not of_another_method and values[0] != values[1]:
            words = [",".join(map(str, v)) if isinstance(v, list) else str(v) for v in values]
            found.append(f"{name}: {words[0]} → {words[1]}")
    return found


def other_digest(what: str, stored: str, asked: str) -> list[str]:
    """Digests that differ, as `differences` says it."""
    return [] if stored == asked else [f"{what}: sha256 {stored[:16]}… → {asked[:16]}…"]


def other_data(run: Run, dataset: Dataset, split: Partition | None) -> list[str]:
    """Whether a run had these data, and this split of them if both are known, as `differences`."""
    found = other_digest("data", run.about["data"]["digest"], dataset.digest)
    if found:
        return found
    if split is None or run.partition is None or run.partition.same_rows(split):
        return []
    return [f"split: {run.partition.about} → another one of the same data"]


def refuse_others(place: str | Path, found: Sequence[str]) -> None:
    """Raises if a folder holds a run with these differences."""
    if found:
        lines = "\n  ".join(["holds a run with other settings:", *found])
        raise PfedafmError(f"{place} {lines}\n{ELSEWHERE}")
