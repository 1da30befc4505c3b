"""Watching a run from outside: TensorBoard, Weights & Biases, or an observer of your own.

An observer is told when a run starts or goes on, after every round, and at the end: `run_into(…, observers=[…])`, or
`with observed(TensorBoard): …` for all runs in that block. In a run over several processes the first one has the observers.
"""

import contextlib
import importlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pfedafm_jax.data.atomic import write_atomically
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.event_file import encode_event, encode_start, framed, read_events
from pfedafm_jax.experiment import Experiment, Record
from pfedafm_jax.records import RunFolder, read_rounds


class Observation(NamedTuple):
    """One round."""

    record: Record  # as in `rounds.jsonl`
    clients: dict[str, np.ndarray]
    """Numbers over clients by name: `participants/…` in the order of `record["participants"]`, `all_clients/…` in rounds
    that evaluate all of them, `vectors/mix` `[participants, features]` where a method has it; this one only as it happens."""


class Observer:
    """Derive from it and define what you need; every method does nothing by default.

    >>> class Printer(Observer):
    ...     def round(self, observation):
    ...         print(observation.record["round"], observation.record["mean_accuracy"])
    >>> Printer().round(Observation({"round": 1, "mean_accuracy": 0.5}, {}))
    1 0.5
    """

    def start(self, run_dir: Path, config: dict[str, Any], past: Sequence[Observation]) -> None:
        """Before the first new round; `past` has the rounds that the run goes on after, empty at the start of a run."""

    def round(self, observation: Observation) -> None:
        """After each round."""

    def finish(self, summary: dict[str, Any]) -> None:
        """After the last round and `summary.json`."""

    def close(self) -> None:
        """At the very end, however that came."""

    def has(self, run_dir: Path, rounds: int) -> bool:
        """Whether this finished run is known already; if not, `replay` tells it."""
        return False


_AROUND: ContextVar[tuple[Callable[[], Observer], ...]] = ContextVar("observers", default=())


@contextlib.contextmanager
def observed(*makers: Callable[[], Observer]) -> Iterator[None]:
    """Every run in this block that has a folder gets an observer from each of `makers`: `with observed(TensorBoard): …`."""
    token = _AROUND.set((*_AROUND.get(), *makers))
    try:
        yield
    finally:
        _AROUND.reset(token)


def around() -> list[Observer]:
    """New observers for a run, as the `observed` around it say."""
    return [make() for make in _AROUND.get()]


def latest(experiment: Experiment) -> Observation:
    """The round that an experiment has just done."""
    record, federation = experiment.records[-1], experiment.federation
    found = {f"participants/{name}": values for name, values in experiment._visits[-1].items()}
    for name, values in experiment.evaluations.get(record["round"], {}).items():
        found[f"all_clients/accuracy/{name}"] = values
    if federation.hosts.count == 1 and "mix" in federation.store.start(0):  # else states may be in other processes
        found["vectors/mix"] = federation.store.read_parts(("mix",), record["participants"])["mix"]
    return Observation(record, found)


def observations(records: Sequence[Record], table: Mapping[str, np.ndarray]) -> list[Observation]:
    """Rounds that were, from their records and the arrays of `Experiment.client_table` or `clients.npz`."""
    evaluated = {int(number): row for row, number in enumerate(table["evaluation_rounds"])}
    arrays = {name: table[name] for name in table if name.startswith(("visits/", "all_clients/"))}  # read a file once
    past = []
    for index, record in enumerate(records):
        found = {}
        for name, values in arrays.items():
            kind, what = name.split("/", 1)
            if kind == "visits":
                found[f"participants/{what}"] = values[index, record["participants"]]
            elif record["round"] in evaluated:
                found[f"all_clients/accuracy/{what}"] = values[evaluated[record["round"]]]
        past.append(Observation(record, found))
    return past


def replay(run_dir: str | Path, observers: Sequence[Observer]) -> None:
    """Tells observers about a finished run that they have not seen."""
    if not observers:
        return
    folder = RunFolder(run_dir)
    config, summary = folder.config(), folder.summary()
    if config is None or summary is None:
        raise PfedafmError(f"{run_dir} is not the folder of a finished run")
    missing = [observer for observer in observers if not observer.has(folder.path, summary["rounds"])]
    if not missing:
        return
    with np.load(folder / "clients.npz") as table:
        past = observations(read_rounds(run_dir), table)
    for observer in missing:
        try:
            observer.start(folder.path, config, past)
            observer.finish(summary)
        finally:
            observer.close()


# ---------------------------------------------------------------------------------------------- what is shown

SECTIONS = {
    "mean_accuracy": "accuracy/participants",
    "all_clients_accuracy": "accuracy/all_clients",
    "accuracy": "accuracy/participants",
    "all_clients": "accuracy/all_clients",
    "loss": "training/loss",
    "not_finite": "training/not_finite",
    "seconds": "cost/seconds",
    "floats_up": "cost/floats_up",
    "floats_down": "cost/floats_down",
    "flops": "cost/flops",
}


def scalars(record: Record) -> dict[str, float]:
    """All numbers of a record by name, in sections; what a method reports of its own is in `method/`.

    >>> scalars({"round": 1, "mean_accuracy": 0.5, "loss": None, "accuracy": {"small": 0.25}, "mix_mean": 1.0})
    {'accuracy/participants': 0.5, 'accuracy/participants/small': 0.25, 'method/mix_mean': 1.0}
    """
    found = {}
    for name, value in record.items():
        if name == "round":
            continue
        place = SECTIONS.get(name, f"method/{name}")
        parts = (
            {f"{place}/{part}": number for part, number in value.items()} if isinstance(value, dict) else {place: value}
        )
        found |= {tag: float(number) for tag, number in parts.items() if isinstance(number, int | float)}
    return found


def histograms(observation: Observation) -> dict[str, np.ndarray]:
    """What is shown as a distribution over clients: accuracies, loss and what the method reports."""
    hidden = ("participants/finite", "participants/floats_up", "participants/floats_down")
    return {name: values for name, values in observation.clients.items() if name not in hidden}


# ---------------------------------------------------------------------------------------------- TensorBoard


class TensorBoard(Observer):
    """An event file in the run's folder; `tensorboard --logdir runs` shows all runs. Needs nothing to be installed.

    A run that goes on gets a new file with the rounds up to its checkpoint, which takes the place of the old one: no round
    is there twice and none is missing. Each round is one write, so kill -9 costs at most the round at hand.
    """

    PATTERN = "events.out.tfevents.*.pfedafm"

    def __init__(self) -> None:
        self._file: Any = None

    def start(self, run_dir: Path, config: dict[str, Any], past: Sequence[Observation]) -> None:
        old = sorted(run_dir.glob(self.PATTERN))
        times, vectors = {}, {}
        for event in (event for path in old for event in read_events(path)):
            if any(tag.startswith("vectors/") for tag in event.tags):
                vectors[event.step] = event.content  # known only as it happens
            else:
                times[event.step] = event.wall_time
        now = time.time()
        content, left = encode_start(now), sum(row.record["seconds"] for row in past)
        for row in past:
            number = row.record["round"]
            left -= row.record["seconds"]
            content += self._events(row, times.get(number, now - left))
            content += [vectors[number]] if number in vectors else []
        path = run_dir / self.PATTERN.replace("*", str(time.time_ns()))
        write_atomically(path, lambda file: file.write(b"".join(map(framed, content))))
        for other in old:
            other.unlink()
        self._file = path.open("ab", buffering=0)

    def round(self, observation: Observation) -> None:
        self._file.write(b"".join(map(framed, self._events(observation, time.time()))))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def has(self, run_dir: Path, rounds: int) -> bool:
        return any(event.step == rounds for path in run_dir.glob(self.PATTERN) for event in read_events(path))

    @staticmethod
    def _events(observation: Observation, wall_time: float) -> list[bytes]:
        """An event of what can be told again later, and one of what cannot."""
        number, shown = observation.record["round"], histograms(observation)
        vectors = {name: shown.pop(name) for name in list(shown) if name.startswith("vectors/")}
        events = [encode_event(number, wall_time, scalars(observation.record), shown)]
        return [*events, encode_event(number, wall_time, histograms=vectors)] if vectors else events


# ---------------------------------------------------------------------------------------------- Weights & Biases


class WeightsAndBiases(Observer):
    """A run of a Weights & Biases project; its id is kept in the run's folder, so that a run that goes on stays one run.

    With `WANDB_MODE=offline` everything is written to `wandb/` in the run's folder. Each start then writes all rounds so far,
    so `wandb sync` of the newest of them is the whole run.
    """

    NAME = "wandb.json"

    def __init__(self, project: str, fresh: bool = False, log: Callable[[str], None] = lambda line: None):
        self._project, self._fresh, self._log, self._run = project, fresh, log, None
        try:
            self._wandb: Any = importlib.import_module("wandb")
        except ImportError:
            raise PfedafmError("--wandb needs the package wandb, which is not installed: pip install wandb") from None
        try:
            self._online = self._wandb.setup().settings.mode == "online"
            if self._online:
                self._wandb.login(verify=False)  # asks for a key now, where there is none, rather than after the start
        except self._wandb.errors.Error as error:
            raise self._unusable(error) from error

    def start(self, run_dir: Path, config: dict[str, Any], past: Sequence[Observation]) -> None:
        known = {} if self._fresh else RunFolder(run_dir)._read_json(self.NAME, "id") or {}
        self._path, self._id = run_dir / self.NAME, known.get("id") or uuid.uuid4().hex
        self._keep({"id": self._id})
        try:
            self._run = self._wandb.init(
                project=self._project,
                id=self._id,
                name=run_dir.absolute().name,
                dir=str(run_dir),
                config=config,
                resume="allow" if self._online else None,  # offline it would only warn that it cannot
                settings=self._wandb.Settings(console="off", silent=True),  # the terminal is the progress bar's
            )
        except self._wandb.errors.Error as error:
            raise self._unusable(error) from error
        self._log(
            f"Weights & Biases: {self._run.url if self._online else f'{run_dir}/wandb/, to be sent by wandb sync'}"
        )
        for observation in past:
            self.round(observation)

    def round(self, observation: Observation) -> None:
        number = observation.record["round"]
        if self._run is None or number < self._run.starting_step:  # the server has it from before
            return
        distributions = {
            name: self._wandb.Histogram(values[np.isfinite(values)])
            for name, values in histograms(observation).items()
            if np.isfinite(values).any()
        }
        self._run.log({**scalars(observation.record), **distributions}, step=number)

    def finish(self, summary: dict[str, Any]) -> None:
        if self._run is not None:
            self._run.summary.update({name: value for name, value in summary.items() if name != "config"})
            self._run.finish()
            self._run = None
            self._keep({"id": self._id, "rounds": summary["rounds"]})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1)  # stopped before its end
            self._run = None

    def has(self, run_dir: Path, rounds: int) -> bool:
        return (RunFolder(run_dir)._read_json(self.NAME, "id") or {}).get("rounds") == rounds

    def _keep(self, content: dict[str, Any]) -> None:
        text = json.dumps(content) + "\n"
        write_atomically(self._path, lambda file: file.write(text.encode()))

    def _unusable(self, error: Exception) -> PfedafmError:
        return PfedafmError(
            f"wandb = {self._project!r} cannot be used ({error}); accepted: a project that `wandb login` has given access "
            "to, or WANDB_MODE=offline"
        )
