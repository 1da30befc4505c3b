"""Observers of a run: TensorBoard, Weights & Biases, or your own.

An observer is called when a run starts or resumes, after every round, and at the end:
`run(config, run_dir=…, observers=[TensorBoard()])`. One observer may watch several runs in
sequence. With several processes only the first has observers.
"""

import contextlib
import importlib
import json
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import Log, read_bytes, write_atomically
from pfedafm_jax.engine import State
from pfedafm_jax.results.records import Record, Summary
from pfedafm_jax.runs.history import History


class Observation(NamedTuple):
    """One round."""

    record: Record
    clients: dict[str, np.ndarray]
    """Numbers over clients by name: `participants/…` in the order of `record.participants`,
    `all_clients/…` in rounds that evaluate all of them, `vectors/mix` `[participants, features]`
    if the method has it, and only for the last round so far."""


class Observer:
    """Base of observers: override what you need; by default every method does nothing.

    >>> class Printer(Observer):
    ...     def round(self, observation):
    ...         print(observation.record.round, observation.record.mean_accuracy)
    >>> Printer().round(Observation(Record(1, 0.5, None, 1.2, 3.0, [2], 0, 10, 10, 99), {}))
    1 0.5
    """

    def start(
        self, run_dir: Path | None, config: dict[str, Any], past: Sequence[Observation]
    ) -> None:
        """Before the first new round.

        Args:
            run_dir: the run's folder; None: it stays in memory.
            config: the settings, nested as in `config.json`.
            past: the rounds of a resumed run so far.
        """

    def round(self, observation: Observation) -> None:
        """After each round."""

    def finish(self, summary: Summary) -> None:
        """After the last round and `summary.json`."""

    def close(self) -> None:
        """At the very end of a run, even after an error; another `start` may follow."""


def observed(history: History, state: State, record: Record) -> Observation:
    """What observers are told of a round.

    Args:
        history: the run's, with this round.
        state: that after the last round.
        record: that of the round.
    """
    rows = history.visits_of(record.round)
    clients = {f"participants/{name}": values.to_numpy() for name, values in rows.items()}
    for name, values in history.evaluations.get(record.round, {}).items():
        clients[f"all_clients/{name}"] = values
    is_last = record.round == history.rounds_done
    # What a participant keeps may be in another process, or at a node of a federation.
    has_vectors = jax.process_count() == 1 and "mix" in state.clients.start(0)
    if is_last and has_vectors and record.participants:
        vectors = [state.clients.state(client, ["mix"])["mix"] for client in record.participants]
        clients["vectors/mix"] = np.stack(vectors)
    return Observation(record, clients)


def scalars(record: Record) -> dict[str, float]:
    """All finite numbers of a record, by their names in `rounds.jsonl`."""
    numbers = {n: v for n, v in record.as_dict().items() if isinstance(v, int | float)}
    return {n: float(v) for n, v in numbers.items() if n != "round" and np.isfinite(v)}


def histograms(observation: Observation) -> dict[str, np.ndarray]:
    """The finite values that are shown as distributions over clients: accuracies, loss and what the
    method reports."""
    hidden = ("participants/finite", "participants/floats_up", "participants/floats_down")
    finite = {
        name: np.asarray(values, np.float64)[np.isfinite(values)]
        for name, values in observation.clients.items()
        if name not in hidden
    }
    return {name: values for name, values in finite.items() if values.size}


def _needed(run_dir: Path | None, title: str) -> Path:
    """The folder of a run, for an observer that writes into it."""
    if run_dir is None:
        raise bad("run_dir", None, f"a folder, into which {title} writes its files")
    return run_dir


BUCKETS = 40  # of a histogram


class TensorBoard(Observer):
    """Event files in the run's folder; `tensorboard --logdir runs` shows all runs.

    A resumed run gets another file, which first tells TensorBoard to drop the rounds after the
    checkpoint, so that none is shown twice. If there was none, all rounds so far are written.
    """

    PATTERN = "events.out.tfevents.*.pfedafm"

    def __init__(self) -> None:
        # Imported here, since tensorboardX loads PyTorch if it is installed, which takes seconds.
        self._tensorboard: Any = importlib.import_module("tensorboardX")
        self._writer: Any = None

    def start(
        self, run_dir: Path | None, config: dict[str, Any], past: Sequence[Observation]
    ) -> None:
        run_dir = _needed(run_dir, "TensorBoard")
        old = list(run_dir.glob(self.PATTERN))
        if not past:  # of the run that this one replaces
            for path in old:
                path.unlink()
        # The last round may not have reached the disk when the process was killed.
        again = past[-1:] if old else past
        self._writer = self._tensorboard.SummaryWriter(
            str(run_dir),
            purge_step=len(past) - len(again) + 1,
            max_queue=0,  # unlimited: its thread dies on a full disk, and a full queue would wait
            flush_secs=1,
            filename_suffix=f".{time.time_ns()}.pfedafm",  # two starts in a second are two files
        )
        for observation in again:
            self.round(observation)

    def round(self, observation: Observation) -> None:
        number = observation.record.round
        for tag, value in scalars(observation.record).items():
            self._writer.add_scalar(tag, value, number)
        for tag, values in histograms(observation).items():
            are_shares = values.min() >= 0 and values.max() <= 1
            bins = np.linspace(0, 1, BUCKETS + 1) if are_shares else BUCKETS  # the same each round
            self._writer.add_histogram(tag, values, number, bins)
        self._writer.flush()  # raises if the disk is full

    def finish(self, summary: Summary) -> None:
        self._writer.close()

    def close(self) -> None:
        if self._writer is None:
            return
        try:
            self._writer.close()
        except OSError:
            # A full disk has been told of; tensorboardX would try again when Python exits.
            self._writer.file_writer.event_writer.close = lambda: None
        self._writer = None


class WeightsAndBiases(Observer):
    """Logs to a Weights & Biases project; an id in the run's folder identifies a resumed run.

    With `WANDB_MODE=offline` everything is written to `wandb/` in the run's folder. Each start then
    writes all rounds so far, so `wandb sync` of the newest of them is the whole run.
    """

    NAME = "wandb.json"

    def __init__(self, project: str, fresh: bool = False, log: Log = lambda line: None):
        self._project, self._fresh, self._log, self._run = project, fresh, log, None
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            words = "--wandb needs the package wandb, which is not installed: pip install wandb"
            raise PfedafmError(words) from None
        try:
            self._online = self._wandb.setup().settings.mode == "online"
            if self._online:
                self._wandb.login(verify=False)  # asks for a missing key now, before the run starts
        except self._wandb.errors.Error as error:
            raise self._unusable(error) from error

    def start(
        self, run_dir: Path | None, config: dict[str, Any], past: Sequence[Observation]
    ) -> None:
        run_dir = _needed(run_dir, "Weights & Biases")
        path, known = run_dir / self.NAME, uuid.uuid4().hex
        with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
            known = known if self._fresh else str(json.loads(read_bytes(path))["id"])
        write_atomically(path, json.dumps({"id": known}) + "\n")
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=known,
                name=run_dir.absolute().name,
                dir=str(run_dir),
                config=config,
                resume="allow" if self._online else None,  # offline it would only warn
                reinit="create_new",  # runs may go together
                # The terminal is the progress bar's.
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.errors.Error as error:
            raise self._unusable(error) from error
        place = self._run.url if self._online else f"{run_dir}/wandb/, to be sent by wandb sync"
        self._log(f"Weights & Biases: {place}")
        for observation in past:
            self.round(observation)

    def round(self, observation: Observation) -> None:
        number = observation.record.round
        if self._run is None or number < self._run.starting_step:
            return  # the server has it already
        found = histograms(observation).items()
        shown = {name: self._wandb.Histogram(values) for name, values in found}
        self._run.log({**scalars(observation.record), **shown}, step=number)

    def finish(self, summary: Summary) -> None:
        if self._run is not None:
            self._run.summary.update({**summary.as_dict(), "config": None})
            self._run.finish()
            self._run = None

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)  # stopped before its end
            self._run = None

    def _unusable(self, error: Exception) -> PfedafmError:
        return PfedafmError(
            f"wandb = {self._project!r} cannot be used ({error}); accepted: a project that "
            "`wandb login` has given access to, or WANDB_MODE=offline"
        )
