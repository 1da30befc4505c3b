"""A run from its first round, or its last checkpoint, to its last: the one loop over rounds."""

import contextlib
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pfedafm_jax.base.errors import START_OVER, Interrupted, PfedafmError, storage_error
from pfedafm_jax.base.files import Log
from pfedafm_jax.config.config import Config, Machine
from pfedafm_jax.data import Partition
from pfedafm_jax.engine import Executor, Federation, Processes, State
from pfedafm_jax.results.records import RunFolder
from pfedafm_jax.runs.checkpoints import Checkpoints
from pfedafm_jax.runs.existing import checkpoint_folder, other_digest, refuse_others
from pfedafm_jax.runs.history import History
from pfedafm_jax.runs.observers import Observer, observed
from pfedafm_jax.runs.signals import Signals


def train(
    federation: Federation,
    executor: Executor,
    folder: Path | None = None,
    *,
    partition: Partition | None = None,
    restart: bool = False,
    command: str = "",
    observers: Sequence[Observer] = (),
    signals: Signals | None = None,
    log: Log = lambda line: None,
) -> tuple[History, State]:
    """Trains a federation to its last round, from its last checkpoint if its folder has one.

    Args:
        federation: what does not change in the run.
        executor: who does its rounds.
        folder: where its files and checkpoints go; without one it stays in memory.
        partition: which client has which samples, for the folder; none where nodes have them.
        restart: start over, whatever the folder has.
        command: recorded in the run's files as what started it.
        observers: called after every round, see `observers.py`; of several processes in the first.
        signals: checked at the end of each round, so that a signal saves first; without it Ctrl-C
            ends the call at once.
        log: called with single lines, such as a damaged checkpoint.

    Returns:
        All numbers of the run, and its weights.
    """
    config = federation.config
    signals = signals or Signals()
    check_agreement(federation, executor.processes, restart)
    history = History(federation, executor, command)
    begin = time.perf_counter()
    executor.prepare()
    history.compile_seconds = time.perf_counter() - begin
    with _files_of(folder, federation, executor.processes, log) as (files, checkpoints):
        state = resumed(checkpoints, executor, history, restart)
        if files is not None:
            files.start(history.about(), partition, history.records)
        with _observed_by(observers, folder, history, state, executor.processes) as watching:
            executor.processes.any(False)  # a barrier: none starts before the folder is ready
            waiting = (
                contextlib.nullcontext()
                if folder is None
                else signals.saved_at_the_end_of_a_round()
            )
            with waiting:
                for t in range(history.rounds_done + 1, config.rounds + 1):
                    begin = time.perf_counter()
                    state, result = executor.run_round(state, t)
                    due = evaluation_is_due(config, t)
                    accuracies = executor.evaluate(state) if due else None
                    record = history.add(result, accuracies, time.perf_counter() - begin)
                    if files is not None:
                        files.add(record)
                    for observer in watching:
                        observer.round(observed(history, state, record))
                    stopped = _stop_asked(signals, executor.processes)
                    save_if_due(checkpoints, history, state, stopped)
                    if stopped and t < config.rounds:
                        raise _interrupted(checkpoints, config, t, signals)
            if checkpoints is not None:
                checkpoints.finish()
                history.checkpoint_seconds = checkpoints.seconds
                history.checkpoint_background_seconds = checkpoints.background_seconds
            summary = history.summary()
            if files is not None:
                files.finish(summary, history.records, history.client_arrays())
            for observer in watching:
                observer.finish(summary)
    return history, state


def evaluation_is_due(config: Config, t: int) -> bool:
    """Whether all clients are evaluated after round `t`: every `eval_every`, and after the last."""
    return t == config.rounds or t % config.eval_every == 0


def checkpoint_is_due(config: Config, t: int, stopped: bool) -> bool:
    """Whether a run is saved after round `t`: every `checkpoint_every`, after the last, and when it
    is stopped; never if `checkpoint_every` is 0."""
    every = config.checkpoint_every
    return every > 0 and (t % every == 0 or t == config.rounds or stopped)


# ------------------------------------------------------------------------------------- checkpoints


def resumed(
    checkpoints: Checkpoints | None, executor: Executor, history: History, restart: bool = False
) -> State:
    """The state to go on from, with the history up to it: that of the newest valid checkpoint, or
    the first. `restart` removes the checkpoints instead."""
    state = executor.start()
    if checkpoints is None:
        return state
    processes = executor.processes
    if restart:
        if processes.first:
            checkpoints.clear()
        return state
    for manifest in checkpoints.manifests().values():
        for what in ("data", "split"):
            stored, asked = manifest[what], checkpoints.identity[what]
            refuse_others(checkpoints.folder, other_digest(what, stored, asked))
    saved = checkpoints.load(state)
    if processes.count > 1:
        processes.any(False)  # a barrier: all have read what they need
        checkpoints.clean()  # partial folders: one could be mistaken for a new one
    if saved is None:
        return state
    state, details, arrays = saved
    history.restore(details, arrays)
    rounds = history.federation.config.rounds
    if history.rounds_done == rounds and rounds not in history.evaluations:
        # It became the last round, since the number of rounds was lowered.
        history.add_evaluation(executor.evaluate(state))
    return state


def save_if_due(
    checkpoints: Checkpoints | None, history: History, state: State, stopped: bool
) -> None:
    """After a round: saves if a checkpoint is due, in the background; raises if one has failed."""
    if checkpoints is None:
        return
    t = history.rounds_done
    if checkpoint_is_due(history.federation.config, t, stopped):
        details, arrays = history.to_checkpoint()
        checkpoints.save(t, state, arrays, details, history.records[-1].mean_accuracy)
    checkpoints.check()


def finished_run(
    federation: Federation, executor: Executor, folder: Path, log: Log = lambda line: None
) -> tuple[History, State]:
    """All numbers and the weights of a run that is finished, from its last checkpoint."""
    history = History(federation, executor)
    checkpoints = _checkpoints_of(folder, federation, executor.processes, log)
    with contextlib.closing(checkpoints):
        state = resumed(checkpoints, executor, history)
    if history.rounds_done == federation.config.rounds:
        return history, state
    raise PfedafmError(
        f"{folder} is finished, and there is no checkpoint of its last round to load; its numbers "
        f"are in {folder}/, pfedafm_jax.results.run.read_run reads them; {START_OVER}"
    )


def identity(federation: Federation) -> dict[str, Any]:
    """What must be equal between a checkpoint and the run that resumes from it."""
    data = federation.data
    return {"config": federation.config.as_dict(), "data": data.digest, "split": data.split}


def _checkpoints_of(
    folder: Path, federation: Federation, processes: Processes, log: Log
) -> Checkpoints:
    return Checkpoints(checkpoint_folder(folder), identity(federation), log, processes)


# ------------------------------------------------------------------------- files, observers, signals


@contextlib.contextmanager
def _files_of(
    folder: Path | None, federation: Federation, processes: Processes, log: Log
) -> Iterator[tuple[RunFolder | None, Checkpoints | None]]:
    """The files of a run, locked, in the first process, and its checkpoints; None without a folder.

    Errors of the storage are told as such."""
    if folder is None:
        yield None, None
        return
    checkpoints = _checkpoints_of(folder, federation, processes, log)
    files = RunFolder(folder) if processes.first else None
    with files.lock() if files is not None else contextlib.nullcontext():
        try:
            yield files, checkpoints
        except OSError as error:
            raise storage_error(f"the files of {folder}", folder, error) from error
        finally:
            checkpoints.close()


@contextlib.contextmanager
def _observed_by(
    observers: Sequence[Observer],
    folder: Path | None,
    history: History,
    state: State,
    processes: Processes,
) -> Iterator[Sequence[Observer]]:
    """Those who observe the run in this process, told of its rounds so far; closed at the end."""
    watching = observers if processes.first else ()
    past = [observed(history, state, record) for record in history.records] if watching else []
    with contextlib.ExitStack() as closing:
        for observer in watching:
            closing.callback(observer.close)
            observer.start(folder, history.federation.config.as_dict(), past)
        yield watching


def _stop_asked(signals: Signals, processes: Processes) -> bool:
    """Whether a signal asks to stop after this round; one to any process is meant for all."""
    stopped = signals.received is not None
    return processes.any(stopped) if processes.count > 1 else stopped


def _interrupted(
    checkpoints: Checkpoints | None, config: Config, t: int, signals: Signals
) -> Interrupted:
    """The error that ends a run that was stopped after round `t`, once it is saved."""
    kept = "not saved (checkpoint_every = 0); the same command starts over"
    if checkpoints is not None:
        checkpoints.wait()
        if config.checkpoint_every:
            kept = f"saved in {checkpoints.folder}; the same command resumes"
    words = f"stopped after round {t} of {config.rounds}, {kept}"
    return Interrupted(words, signals.received or signal.SIGTERM)


def check_agreement(federation: Federation, processes: Processes, restart: bool) -> None:
    """Raises if the processes of a run differ in settings or data."""
    mine = identity(federation)
    # Processes may differ in settings of the machine, but all must save in the same rounds.
    own = Machine.model_fields.keys() - {"checkpoint_every"}
    values = {name: value for name, value in mine["config"].items() if name not in own}
    values["its settings"] = values.pop(federation.config.method)
    values |= {"data": mine["data"], "split": mine["split"], "fresh": restart}
    processes.agree(values)
