"""What exists of a run and what is left to do, determined once before any work."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from pfedafm_jax.runs.weights_folder import (
    KnownRun,
    Owner,
    find_place,
    has_checkpoints,
    known_run,
    missing_weights,
    owner_of,
    possible_places,
    rounds_saved,
    usual_place,
)

ELSEWHERE = f"{START_OVER}, another --run-dir leaves it as it is"


@dataclass(frozen=True)
class Task:
    """A run to do, and what `find_existing` found of it in its folder.

    `again`: it starts over, whatever exists. Without a folder everything stays in memory.

    Attributes:
        weights: the folder of its weights; None where nothing is left to do.
    """

    config: Config
    folder: Path | None = None
    state: Literal["new", "started", "done", "again"] = "new"
    rounds_done: int = 0
    run: Run | None = None  # what was read from its folder
    weights: Path | None = None


def find_existing(
    task: Task,
    *,
    fresh: bool = False,
    longer: bool = False,
    nodes: bool = False,
    log: Log = console.print,
) -> Task:
    """The task, completed by what exists of it; raises early if its folders cannot be used.

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
    folder = task.folder
    known = known_run(folder)
    run = None if fresh else _read(folder, bool(_weights_of(folder, known)), log)
    if run and bool(run.about.get("nodes")) != nodes:
        kind = "a federation's run" if run.about.get("nodes") else "a simulation's run"
        raise PfedafmError(
            f"{folder} holds {kind}, which this command does not go on with; {ELSEWHERE}"
        )
    owner = None if fresh or run else _weights_of(folder, known)
    stored = run.config if run else owner.identity["config"] if owner else None
    config = task.config
    if stored is not None:
        same = updated(config, rounds=stored["rounds"]) if longer else config
        refuse_others(folder if run else usual_place(folder), differences(stored, same))
        if longer:
            config = updated(config, rounds=max(config.rounds, stored["rounds"]))
    finished = run.summary.rounds if run and run.finished else 0
    if finished == config.rounds:
        return Task(config, folder, "done", finished, run)
    if finished > config.rounds:
        raise _too_few(config, finished, folder)
    lost = finished > 0 and _weights_of(folder, known) is None
    if lost and known is not None and not longer:
        raise PfedafmError(
            f"{folder} is finished after {finished} rounds and has no checkpoint to resume from: "
            f"{missing_weights(folder, known)}; {ELSEWHERE}"
        )
    place = find_place(folder, known, fresh or lost)
    if known is not None and place.state == "start over" and not fresh and not lost:
        log(f"{folder} had done {known.rounds} rounds and saved none: it starts over")
    done = max(rounds_saved(place.folder), default=0) if place.state == "go on" else 0
    if done > config.rounds:
        raise _too_few(config, done, folder)
    if jax.process_index() == 0:  # the one that writes
        RunFolder(folder).check()
        check_writable(place.folder)
    if fresh or lost or (stored is not None and differences(stored, config)):
        return Task(config, folder, "again", 0, run, place.folder)
    return Task(config, folder, "started" if done else "new", done, run, place.folder)


def _weights_of(folder: Path, known: KnownRun | None) -> Owner | None:
    """Whose weights are where this run's can be, if they are its own as far as its folder tells."""
    for place in possible_places(folder):
        with contextlib.suppress(PfedafmError):
            owner = owner_of(place)
            its_own = owner is not None and (known is None or owner.run == known.run)
            if its_own and has_checkpoints(place):
                return owner
    return None


def _too_few(config: Config, done: int, folder: Path) -> PfedafmError:
    accepted = f"{done} or more, since {folder} has done {done} already ({ELSEWHERE})"
    return bad("rounds", config.rounds, accepted)


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
