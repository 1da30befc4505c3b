"""A run in memory: rounds and their results."""

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from pfedafm_jax import engine
from pfedafm_jax.base.errors import START_OVER, PfedafmError
from pfedafm_jax.base.files import Log
from pfedafm_jax.base.version import own_version
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.data.load import load_data, split
from pfedafm_jax.engine import Devices, build
from pfedafm_jax.engine.reference import released
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models import kernels
from pfedafm_jax.results.records import FORMAT, Record, Summary, mean, summarize
from pfedafm_jax.results.run import Run, per_round


class Experiment:
    """A run of one method on one split; `rounds()` runs the rounds that are left.

    `records` has one `Record` per round, `reports` what participants reported, a row per visit,
    `(round, client)`, and `evaluations` the accuracies of all clients in the rounds that evaluated
    them, `{round: {name: [clients]}}`. Everywhere, `accuracy` is that of the method's main
    prediction, and `accuracy/NAME` that of another one.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | None = None,
        partition: Partition | None = None,
        *,
        data_dir: str | None = None,
        devices: Devices | None = None,
        log: Log | None = None,
    ):
        if dataset is None:
            dataset = load_data(
                check_names(config), data_dir, log
            )  # checked first: loading is slow
        self.dataset, self.config = dataset, check_names(config, dataset)
        self.partition = split(config, dataset) if partition is None else partition
        self.partition.check(len(self.dataset.images), config.num_clients)
        self.kernels = kernels.choose(config.kernels, log)  # before anything is traced
        self.programs = build(config, self.dataset, self.partition, devices)
        self._loop = released if self.programs.method.in_turn else engine
        self.state = self._loop.start(self.programs)
        self.records: list[Record] = []
        self.reports = _reports([], {})
        self.evaluations: dict[int, dict[str, np.ndarray]] = {}
        self.compile_seconds = 0.0

    @property
    def round(self) -> int:
        """The number of rounds done so far."""
        return len(self.records)

    @property
    def predictions(self) -> list[str]:
        """Names of the predictions that are evaluated, the method's main one first."""
        return self.programs.predictions

    def _name(self, name: str) -> str:
        """Renames the engine's `accuracy/mixed` to `accuracy` if `mixed` is the main prediction."""
        return "accuracy" if name == f"accuracy/{self.predictions[0]}" else name

    @property
    def _accuracies(self) -> list[str]:
        """Names of all predictions' accuracies: `accuracy`, `accuracy/small`, …"""
        return [self._name(f"accuracy/{one}") for one in self.predictions]

    # ---------------------------------------------------------------------------- rounds

    def compile(self) -> None:
        """Compiles all programs now; otherwise the first round does."""
        start = time.perf_counter()
        if self._loop is not released:
            self.programs.compile()
        self.compile_seconds += time.perf_counter() - start

    def rounds(self, count: int | None = None) -> Iterator[Record]:
        """Runs rounds up to the configured number (or `count` more); yields each one's record."""
        last = self.config.rounds if count is None else self.round + count
        if self.round < last:
            self.compile()
        while self.round < last:
            yield self.run_round(evaluate=self.round + 1 == last)

    def run_round(self, evaluate: bool = False) -> Record:
        """Runs one round; all clients are evaluated every `eval_every` rounds, after the last, and
        if `evaluate`."""
        start, number = time.perf_counter(), self.round + 1
        self.state, result = self._loop.run_round(self.programs, self.state, number)
        info = {self._name(name): values for name, values in result.info.items()}
        if not info:  # all dropped out
            info = {name: np.zeros(0, np.float32) for name in ("accuracy", "loss", "finite")}
        finite, costs = info["finite"].astype(bool), self.programs.costs(result.participants)
        # Methods count weights only; averaged statistics are added here.
        for name in info.keys() & {"floats_up", "floats_down"}:
            info[name] = info[name] + np.float32(self.programs.statistics_sent)
        totals = {  # float32, in which they are reported, would lose digits of a sum
            # What a discarded client did not report is NaN.
            name: int(np.nansum(info.get(name, [getattr(one, name) for one in costs]), dtype=float))
            for name in ("floats_up", "floats_down", "flops")
        }
        if self.programs.method.counts_missed:
            # A discarded client has received nothing, by its own count, and reports it again.
            received = info.get("floats_down", np.zeros_like(finite, float))
            totals["floats_down"] = int(np.sum(received[finite], dtype=float))
        else:
            gone = self.programs.costs(result.dropped)  # who received, and did and sent nothing
            totals["floats_down"] += int(sum(cost.floats_down for cost in gone))
        more = {}
        for name in info.keys() - {"accuracy", "finite", "loss", *totals}:
            if name.startswith("accuracy/"):  # of another prediction
                more[f"mean_{name}"] = mean(info[name])
            else:
                more[name] = mean(info[name][finite])
        record = Record(
            round=number,
            mean_accuracy=mean(info["accuracy"]),
            all_clients_accuracy=None,
            loss=mean(info["loss"][finite]),
            seconds=0.0,
            participants=result.participants.tolist(),
            not_finite=int(np.sum(~finite)),
            **totals,
            more=dict(sorted(more.items())),
            dropped=list(result.dropped),
        )
        last = number == self.config.rounds
        if evaluate or last or number % self.config.eval_every == 0:
            record = self._evaluated(record)
        record = replace(record, seconds=round(time.perf_counter() - start, 3))
        new = _reports([record], info)
        # pandas warns of tables without rows: none yet, or all dropped out.
        self.reports = pd.concat([one for one in (self.reports, new) if len(one)] or [new])
        self.records.append(record)
        return record

    def _evaluated(self, record: Record) -> Record:
        """Evaluates all clients; returns the record with their mean accuracies."""
        found = self._loop.evaluate(self.programs, self.state)
        scores = {self._name(name): np.asarray(found[name], np.float32) for name in found}
        self.evaluations[record.round] = scores = {name: scores[name] for name in self._accuracies}
        means = {f"all_clients_{name}": mean(values) for name, values in scores.items()}
        own = means.pop("all_clients_accuracy")
        more = _without_evaluation(record) | means
        if self.programs.method.adapts:
            more["adaptation_flops"] = self.programs.adaptation_flops()
        return replace(record, all_clients_accuracy=own, more=more)

    # ---------------------------------------------------------------------------- resuming

    def history(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Everything so far except the weights: values for JSON, and arrays."""
        details = {
            "records": [record.as_dict() for record in self.records],
            "rounds": self.config.rounds,
            "eval_every": self.config.eval_every,
            "compile_seconds": self.compile_seconds,
        }
        reports = {f"visits/{name}": rows.to_numpy() for name, rows in self.reports.items()}
        return details, reports | self._evaluation_arrays()

    def resume(self, details: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restores a `history`; `state` must be that of its last round.

        The records become those that a run with the present number of rounds would have by now.
        """
        if "evaluation_rounds" in details:  # they are among the arrays now
            raise PfedafmError(f"the checkpoint was written by an earlier version; {START_OVER}")
        self.records = [Record.from_dict(row) for row in details["records"]]
        own = {n.removeprefix("visits/"): a for n, a in arrays.items() if n.startswith("visits/")}
        self.reports = _reports(self.records, own)
        self.evaluations = {
            int(number): {name: arrays[f"all_clients/{name}"][row] for name in self._accuracies}
            for row, number in enumerate(arrays.get("evaluation_rounds", ()))
        }
        self.compile_seconds += details["compile_seconds"]
        if self.round == self.config.rounds and self.round not in self.evaluations:
            # It became the last round, since the number of rounds was lowered.
            self.records[-1] = self._evaluated(self.records[-1])
        old = details["rounds"]
        if old in self.evaluations and old < self.config.rounds and old % details["eval_every"]:
            del self.evaluations[old]  # no longer the last round
            record = self.records[old - 1]
            more = _without_evaluation(record)
            self.records[old - 1] = replace(record, all_clients_accuracy=None, more=more)

    # ---------------------------------------------------------------------------- what came out

    def about(self, command: str = "") -> dict[str, Any]:
        """The content of `config.json`."""
        packages = ("jax", "jaxlib", "flax", "optax", "numpy")
        versions = {name: importlib.metadata.version(name) for name in packages}
        return {
            "format": FORMAT,
            "config": self.config.as_dict(),
            "command": command,
            "versions": {
                "pfedafm_jax": own_version(),
                "python": platform.python_version(),
                **versions,
            },
            "devices": str(self.programs.devices),
            "kernels": str(self.kernels),
            "data": {
                "source": self.dataset.source,
                "partition": self.partition.about,
                "digest": self.dataset.digest,
                "image_shape": self.dataset.image_shape,
                "dtype": self.dataset.dtype,
                "classes": self.dataset.class_names,
                # Features were normalised with the dataset's own, before training.
                "mean": self.programs.method.training.mean or self.dataset.mean,
                "std": self.programs.method.training.std or self.dataset.std,
            },
            "predictions": self.predictions,
            "architectures": [one.name for one in self.programs.architectures],
        }

    def summary(self, **timing: float) -> Summary:
        """The run in numbers."""
        last = self.evaluations[max(self.evaluations)]["accuracy"] if self.evaluations else None
        seconds = round(self.compile_seconds, 3)
        return summarize(self.records, self.about(), last, compile_seconds=seconds, **timing)

    def result(self) -> Run:
        """The run as tables and plots take it, as if read from a folder."""
        finished, arrays = self.round >= self.config.rounds, self.client_arrays()
        return Run(self.about(), self.records, self.summary(), finished, arrays=arrays)

    @property
    def visits(self) -> dict[str, np.ndarray]:
        """What participants reported: name → `[rounds, clients]`, NaN where one took no part."""
        rounds, clients = range(1, self.round + 1), range(self.config.num_clients)
        return {
            str(name): rows.unstack().reindex(index=rounds, columns=clients).to_numpy(np.float32)
            for name, rows in self.reports.items()
        }

    def client_arrays(self) -> dict[str, np.ndarray]:
        """The content of `clients.npz`, see `results.Run.clients`."""
        programs, arrays = self.programs, {f"visits/{n}": rows for n, rows in self.visits.items()}
        sizes = {"num_train": programs.num_train, "num_test": programs.num_test}
        return arrays | self._evaluation_arrays() | {"architecture": programs.groups, **sizes}

    def _evaluation_arrays(self) -> dict[str, np.ndarray]:
        found, shape = self.evaluations.values(), (-1, self.config.num_clients)
        arrays = {
            f"all_clients/{name}": np.array([one[name] for one in found], np.float32).reshape(shape)
            for name in self._accuracies
        }
        return {"evaluation_rounds": np.array(list(self.evaluations), np.int64), **arrays}

    def per_round(self) -> pd.DataFrame:
        """One row per round, with every number of `records`."""
        return per_round(self.records)

    def per_client(self) -> pd.DataFrame:
        """One row per client: architecture, data and results.

        `accuracy` is from the last evaluation of all clients; `loss` and what else the method
        reports are from the client's last visit; NaN if there was none.
        """
        programs, clients = self.programs, np.arange(self.config.num_clients)
        counts = self.partition.class_counts(self.dataset.labels, self.dataset.num_classes)
        visits = self.reports.groupby(level="client")
        last: Any = visits.tail(1)
        rounds = pd.Series(last.index.get_level_values("round"), last.index.droplevel("round"))
        last = last.droplevel("round").reindex(clients)
        columns: dict[str, Any] = {
            "client": clients,
            "architecture": np.array([a.name for a in programs.architectures])[programs.groups],
            "num_train": programs.num_train,
            "num_test": programs.num_test,
            "num_classes": (counts > 0).sum(axis=1),
            "visits": visits.size().reindex(clients, fill_value=0),
            "last_round": rounds.reindex(clients, fill_value=0),
        }
        scores = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        for name in self._accuracies:
            columns[name] = scores.get(name, np.full(len(clients), np.nan, np.float32))
        for name in last:
            if name != "finite" and not str(name).startswith("accuracy"):
                columns[str(name)] = last[name]
        return pd.DataFrame(columns)


def _reports(records: Sequence[Record], columns: Mapping[str, Any]) -> pd.DataFrame:
    """What the participants of these rounds reported: a row per visit, `(round, client)`."""
    rounds = [record.round for record in records for _ in record.participants]
    clients = [client for record in records for client in record.participants]
    index = pd.MultiIndex.from_arrays([rounds, clients], names=("round", "client"))
    return pd.DataFrame(dict(columns), index, dtype=np.float32)


def _without_evaluation(record: Record) -> dict[str, float | None]:
    return {
        name: value
        for name, value in record.more.items()
        if not name.startswith("all_clients_") and name != "adaptation_flops"
    }
