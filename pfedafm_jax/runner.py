"""A run with its folder: started or gone on with, watched, recorded, saved, drawn; skipped where it is finished already."""

import contextlib
import hashlib
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pfedafm_jax import plots
from pfedafm_jax.checkpoint import Checkpoints, fitted
from pfedafm_jax.config import Config
from pfedafm_jax.data import Partition
from pfedafm_jax.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.experiment import Experiment, Record
from pfedafm_jax.interruption import Interruption
from pfedafm_jax.observers import Observer, latest, observations
from pfedafm_jax.records import RunFolder, differences


def checkpoint_folder(run_dir: str | Path) -> Path:
    """Where a run's checkpoints are: `checkpoints/NAME` for `runs/NAME` where there is such a folder beside `runs`, as in
    this repository; else `checkpoints` in the run's own folder."""
    place = Path(run_dir).absolute()
    if not (place / "checkpoints").is_dir():
        for parent in place.parents:
            if parent.name == "runs" and (parent.parent / "checkpoints").is_dir():
                return parent.parent / "checkpoints" / place.relative_to(parent)
    return place / "checkpoints"


def finished_summary(
    config: Config, run_dir: str | Path, fresh: bool = False, writes: bool = True
) -> dict[str, Any] | None:
    """The summary of a run that is finished with these settings; None: there is something left to do.

    Raises before any work where the folder cannot be used, or holds a run that cannot be gone on with. `writes`: whether
    this process is the one that writes into it.
    """
    folder = RunFolder(run_dir)
    summary = None if fresh else folder.summary()
    if writes and (summary is None or summary["rounds"] != config.rounds):  # there is something to write
        folder.check()
        RunFolder(checkpoint_folder(run_dir)).check()
    if fresh:
        return None
    saved, stored = Checkpoints(checkpoint_folder(run_dir)).manifests(), folder.config()
    for settings in (stored, *(manifest.get("config") for manifest in saved.values())):
        _refuse_other(run_dir, differences(settings, config) if settings else [])
    done = max([summary["rounds"] if summary else 0, *saved])
    if done > config.rounds:
        raise PfedafmError(
            f"rounds = {config.rounds} cannot be used; accepted: {done} or more, since {run_dir} has done {done} already "
            f"({START_OVER}, another --run-dir leaves it as it is)"
        )
    if summary and summary["rounds"] == config.rounds:
        return summary
    if summary and not saved:
        raise PfedafmError(
            f"{run_dir} is finished after {summary['rounds']} rounds and has no checkpoint to go on from; "
            f"{START_OVER}, another --run-dir leaves it as it is"
        )
    return None


def _refuse_other(run_dir: str | Path, found: list[str]) -> None:
    if found:
        raise PfedafmError(
            f"{run_dir} holds a run with other settings:\n  "
            + "\n  ".join(found)
            + f"\n{START_OVER}, another --run-dir leaves it as it is"
        )


def title_of(config: Config, method: str) -> str:
    """A heading for plots."""
    return f"{method}, {config.dataset}, N = {config.num_clients}, C = {100 * config.participation:g} %"


def run_into(
    run_dir: str | Path,
    experiment: Experiment,
    command: str = "",
    show: Callable[[Record], None] = lambda record: None,
    *,
    resumed: Callable[[list[Record]], None] = lambda records: None,
    fresh: bool = False,
    interruption: Interruption | None = None,
    log: Callable[[str], None] = lambda line: None,
    observers: Sequence[Observer] = (),
) -> tuple[dict[str, Any], list[Path]]:
    """Runs an experiment to its end, from its last checkpoint if it has one; returns the summary and the plots.

    `show` is given every new record, `resumed` those of before; `fresh` starts over. `observers` are told all of it, see
    `observers.py`.
    """
    hosts = experiment.federation.hosts
    finished_summary(experiment.config, run_dir, fresh, hosts.first)
    folder, interruption = RunFolder(run_dir), interruption or Interruption()
    observers = observers if hosts.first else []
    with folder.lock() if hosts.first else contextlib.nullcontext(), contextlib.ExitStack() as closing:
        checkpoints = Checkpoints(checkpoint_folder(run_dir), identity(experiment), log, hosts)
        try:
            if fresh and hosts.first:
                checkpoints.clear()
            if not fresh and go_on(experiment, checkpoints):
                resumed(experiment.records)
            if hosts.first:
                folder.start(experiment, command)
            past = observations(experiment.records, experiment.client_table()) if observers else []
            for observer in observers:
                closing.callback(observer.close)
                observer.start(folder.path, experiment.config.as_dict(), past)
            hosts.any(False)  # nobody starts before the folder is as it should be
            with interruption.saved_at_the_end_of_a_round():
                _rounds(experiment, folder, checkpoints, show, interruption, observers)
            if not hosts.first:
                return experiment.summary(), []
            title = title_of(experiment.config, experiment.federation.method.title)
            pictures = plots.draw_all(experiment, run_dir, title)
            summary = folder.finish(
                experiment,
                checkpoint_seconds=round(checkpoints.seconds, 3),
                checkpoint_background_seconds=round(checkpoints.background_seconds, 3),
            )
            for observer in observers:
                observer.finish(summary)
        except OSError as error:
            raise storage_error(f"the files of {folder.path}", folder.path, error) from error
        finally:
            checkpoints.close()
    return summary, pictures


def load_finished(run_dir: str | Path, experiment: Experiment, log: Callable[[str], None] = lambda line: None) -> None:
    """Puts an experiment that has run no round yet where a finished run left it: records, clients and server."""
    checkpoints = Checkpoints(checkpoint_folder(run_dir), identity(experiment), log, experiment.federation.hosts)
    try:
        loaded = go_on(experiment, checkpoints) and experiment.round == experiment.config.rounds
    finally:
        checkpoints.close()
    if not loaded:
        raise PfedafmError(
            f"{run_dir} is finished, and there is no checkpoint of its last round to load; its numbers are in "
            "rounds.jsonl, clients.npz and summary.json, and fresh=True starts over"
        )


def _rounds(
    experiment: Experiment,
    folder: RunFolder,
    checkpoints: Checkpoints,
    show: Callable[[Record], None],
    interruption: Interruption,
    observers: Sequence[Observer],
) -> None:
    config, hosts = experiment.config, experiment.federation.hosts
    for record in experiment.rounds():
        if hosts.first:
            folder.add(record)
            show(record)
            for observer in observers:
                observer.round(latest(experiment))
        number, stopped = experiment.round, interruption.signal_number is not None
        if hosts.count > 1:  # a signal to one process is meant for all
            stopped = hosts.any(stopped)
        if config.checkpoint_every and (number % config.checkpoint_every == 0 or number == config.rounds or stopped):
            save(experiment, checkpoints)
        checkpoints.check()
        if stopped and number < config.rounds:
            checkpoints.wait()
            kept = f"saved in {checkpoints.folder}" if config.checkpoint_every else "not saved (checkpoint_every = 0)"
            raise Interrupted(
                f"stopped after round {number} of {config.rounds}, {kept}; the same command goes on",
                interruption.signal_number or signal.SIGTERM,
            )
    checkpoints.finish()


def identity(experiment: Experiment) -> dict[str, Any]:
    """What a checkpoint must have in common with a run that goes on from it."""
    split = _digest(experiment.partition)
    return {"config": experiment.config.as_dict(), "data": experiment.dataset.digest, "split": split}


def _digest(partition: Partition) -> str:
    found = hashlib.sha256()
    for part in (partition.train, partition.test, partition.validation):
        for rows in part:
            found.update(f"{len(rows)} ".encode())
            found.update(np.ascontiguousarray(rows, np.int32).tobytes())
    return found.hexdigest()


def save(experiment: Experiment, checkpoints: Checkpoints) -> None:
    """Saves an experiment as it stands after its last round, in the background."""
    details, arrays = experiment.history()
    federation, score = experiment.federation, experiment.records[-1]["mean_accuracy"]
    server = jax.device_get(federation.server)
    checkpoints.save(experiment.round, federation.store, server, arrays, details, score, federation.home)


def go_on(experiment: Experiment, checkpoints: Checkpoints) -> bool:
    """Puts an experiment that has run no round yet where its newest good checkpoint was; False: there is none."""
    mine = identity(experiment)
    for manifest in checkpoints.manifests().values():
        found = differences(manifest["config"], experiment.config)
        found += [f"{what}: sha256 {manifest[what][:16]}… → {mine[what][:16]}…" for what in ("data", "split")
                  if manifest[what] != mine[what]]  # fmt: skip
        _refuse_other(checkpoints.folder, found)
    federation = experiment.federation
    saved = checkpoints.load(federation.store, federation.home)
    if federation.hosts.count > 1:
        federation.hosts.any(False)  # all have read what they need
        checkpoints.clean()  # half-written folders: one of them could be taken for a new one
    if saved is None:
        return False
    federation.server = federation.devices.replicate(fitted(jax.device_get(federation.server), saved.server))
    experiment.continue_from(saved.details, saved.arrays)
    return True
