"""What came out of a run so far: a record of each round, what every visit reported, evaluations."""

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from pfedafm_jax.base.errors import START_OVER, PfedafmError
from pfedafm_jax.base.version import own_version
from pfedafm_jax.engine import Executor, Federation, RoundResult
from pfedafm_jax.models import kernels
from pfedafm_jax.results.records import FORMAT, Record, Summary, mean, summarize
from pfedafm_jax.results.run import Run, per_round
from pfedafm_jax.runs.traffic import traffic_of, with_statistics

Details = dict[str, Any]  # values for JSON
Arrays = dict[str, np.ndarray]
ALWAYS_REPORTED = ("accuracy", "loss", "finite")


class History:
    """The numbers of a run, round by round.

    Everywhere, `accuracy` is that of the method's main prediction, and `accuracy/NAME` that of
    another one.

    Args:
        federation: the run's.
        executor: of which only a description of its devices is kept.
        command: what was typed to start the run, if anything was.

    Attributes:
        records: one of each round.
        evaluations: accuracies of all clients in the rounds that evaluated them,
            `{round: {name: [clients]}}`.
        compile_seconds, checkpoint_seconds, checkpoint_background_seconds: that compiling took,
            that rounds waited for saves, that saves took in the background.
    """

    def __init__(self, federation: Federation, executor: Executor, command: str = ""):
        self.federation = federation
        self.command = command
        self.records: list[Record] = []
        self.evaluations: dict[int, Arrays] = {}
        self.compile_seconds = 0.0
        self.checkpoint_seconds = 0.0
        self.checkpoint_background_seconds = 0.0
        self._devices = str(executor.devices)
        self._visits: list[pd.DataFrame] = []  # one of each round; of restored rounds, one

    @property
    def rounds_done(self) -> int:
        """The number of rounds so far."""
        return len(self.records)

    @property
    def visits(self) -> pd.DataFrame:
        """What participants reported: a row per visit, index `(round, client)`."""
        # pandas warns of tables without rows: all dropped out.
        reported = [table for table in self._visits if len(table)]
        if reported:
            return pd.concat(reported)
        return self._visits[0] if self._visits else _visits([], {})

    def visits_of(self, t: int) -> pd.DataFrame:
        """The rows of `visits` of round `t`."""
        for visits in reversed(self._visits):  # that of the last round is the last
            rows = visits[visits.index.get_level_values("round") == t]
            if len(rows):
                break
        else:
            rows = self.visits[:0]
        return pd.DataFrame(rows)

    # ---------------------------------------------------------------------------- rounds

    def add(
        self, result: RoundResult, accuracies: Mapping[str, np.ndarray] | None, seconds: float
    ) -> Record:
        """Adds the next round; returns its record.

        Args:
            result: who took part, and what they reported.
            accuracies: of all clients by name, `[clients]`; None: they were not evaluated.
            seconds: that it took, evaluation included.
        """
        result = with_statistics(self.federation, result)
        reports = {self._name(name): values for name, values in result.reports.items()}
        if not reports:  # all dropped out
            reports = {name: np.zeros(0, np.float32) for name in ALWAYS_REPORTED}
        finite = reports["finite"].astype(bool)
        traffic = traffic_of(self.federation, result)
        record = Record(
            round=self.rounds_done + 1,
            mean_accuracy=mean(reports["accuracy"]),
            all_clients_accuracy=None,
            loss=mean(reports["loss"][finite]),
            seconds=round(seconds, 3),
            participants=result.participants.tolist(),
            not_finite=int(np.sum(~finite)),
            **traffic._asdict(),
            more=_means(reports, finite, without=(*ALWAYS_REPORTED, *traffic._fields)),
            dropped=list(result.dropped),
        )
        self.records.append(record)
        self._visits.append(_visits([record], reports))
        if accuracies is not None:
            self.add_evaluation(accuracies)
        return self.records[-1]

    def add_evaluation(self, accuracies: Mapping[str, np.ndarray]) -> None:
        """Adds accuracies of all clients by name, `[clients]`, to the last round."""
        named = {self._name(name): np.asarray(row, np.float32) for name, row in accuracies.items()}
        scores = {name: named[name] for name in self._accuracy_names}
        record = self.records[-1]
        self.evaluations[record.round] = scores
        means = {f"all_clients_{name}": mean(row) for name, row in scores.items()}
        main = means.pop("all_clients_accuracy")
        more = _without_evaluation(record) | means
        if self.federation.method.adapts:
            more["adaptation_flops"] = self.federation.adaptation_flops()
        self.records[-1] = replace(record, all_clients_accuracy=main, more=more)

    def _name(self, name: str) -> str:
        """Renames an executor's `accuracy/mixed` to `accuracy` if `mixed` is the main prediction."""
        main = self.federation.prediction_names[0]
        return "accuracy" if name == f"accuracy/{main}" else name

    @property
    def _accuracy_names(self) -> list[str]:
        """Names of all predictions' accuracies: `accuracy`, `accuracy/small`, …"""
        return [self._name(f"accuracy/{name}") for name in self.federation.prediction_names]

    # ---------------------------------------------------------------------------- checkpoints

    def to_checkpoint(self) -> tuple[Details, Arrays]:
        """Everything so far: values for JSON, and arrays."""
        config = self.federation.config
        details = {
            "records": [record.as_dict() for record in self.records],
            "rounds": config.rounds,
            "eval_every": config.eval_every,
            "compile_seconds": self.compile_seconds,
        }
        visits = {f"visits/{name}": rows.to_numpy() for name, rows in self.visits.items()}
        return details, visits | self._evaluation_arrays()

    def restore(self, details: Details, arrays: Arrays) -> None:
        """Restores what `to_checkpoint` gave.

        The records become those that a run with the present number of rounds would have by now; if
        it ends here and did not before, its last evaluation is left to the caller.
        """
        if "evaluation_rounds" in details:  # they are among the arrays now
            raise PfedafmError(f"the checkpoint was written by an earlier version; {START_OVER}")
        self.records = [Record.from_dict(row) for row in details["records"]]
        visits = {
            name.removeprefix("visits/"): rows
            for name, rows in arrays.items()
            if name.startswith("visits/")
        }
        self._visits = [_visits(self.records, visits)]
        self.evaluations = {
            int(t): {name: arrays[f"all_clients/{name}"][row] for name in self._accuracy_names}
            for row, t in enumerate(arrays.get("evaluation_rounds", ()))
        }
        self.compile_seconds += details["compile_seconds"]
        self._forget_last_evaluation(details["rounds"], details["eval_every"])

    def _forget_last_evaluation(self, rounds: int, eval_every: int) -> None:
        """Removes the evaluation after the last of `rounds`, if that is no longer the last."""
        only_since_last = rounds % eval_every != 0
        if (
            rounds in self.evaluations
            and rounds < self.federation.config.rounds
            and only_since_last
        ):
            del self.evaluations[rounds]
            record = self.records[rounds - 1]
            more = _without_evaluation(record)
            self.records[rounds - 1] = replace(record, all_clients_accuracy=None, more=more)

    # ---------------------------------------------------------------------------- what came out

    def about(self) -> dict[str, Any]:
        """The content of `config.json`."""
        packages = ("jax", "jaxlib", "flax", "optax", "numpy")
        versions = {name: importlib.metadata.version(name) for name in packages}
        federation, data = self.federation, self.federation.data
        about = {
            "format": FORMAT,
            "config": federation.config.as_dict(),
            "command": self.command,
            "versions": {
                "pfedafm_jax": own_version(),
                "python": platform.python_version(),
                **versions,
            },
            "devices": self._devices,
            "kernels": str(kernels.implementation()),
            "data": {
                "source": data.source,
                "partition": data.partition,
                "digest": data.digest,
                "image_shape": data.image_shape,
                "dtype": data.dtype,
                "classes": data.class_names,
                # Features were normalised with the dataset's own, before training.
                "mean": federation.method.training.mean or data.mean,
                "std": federation.method.training.std or data.std,
            },
            "predictions": federation.prediction_names,
            "architectures": [one.name for one in federation.architectures],
        }
        if data.at_nodes:
            about |= {"nodes": True, "num_train": federation.num_train.tolist()}
        return about

    def summary(self) -> Summary:
        """The run in numbers."""
        last = self.evaluations[max(self.evaluations)]["accuracy"] if self.evaluations else None
        timing = ("compile_seconds", "checkpoint_seconds", "checkpoint_background_seconds")
        seconds = {name: round(getattr(self, name), 3) for name in timing}
        return summarize(self.records, self.about(), last, **seconds)

    def result(self, folder: Path | None = None) -> Run:
        """The run as tables and plots take it, as if read from its folder."""
        finished = self.rounds_done >= self.federation.config.rounds
        return Run(
            self.about(),
            self.records,
            self.summary(),
            finished,
            folder=folder,
            arrays=self.client_arrays(),
        )

    def client_arrays(self) -> Arrays:
        """The content of `clients.npz`, see `results.Run.clients`."""
        federation = self.federation
        rounds, clients = range(1, self.rounds_done + 1), range(federation.config.num_clients)
        visits = {
            f"visits/{name}": (
                rows.unstack().reindex(index=rounds, columns=clients).to_numpy(np.float32)
            )
            for name, rows in self.visits.items()
        }
        known = {
            "architecture": federation.groups,
            "num_train": federation.num_train,
            "num_test": federation.num_test,
        }
        return visits | self._evaluation_arrays() | known

    def _evaluation_arrays(self) -> Arrays:
        scores, shape = self.evaluations.values(), (-1, self.federation.config.num_clients)
        arrays = {
            f"all_clients/{name}": np.array([one[name] for one in scores], np.float32).reshape(
                shape
            )
            for name in self._accuracy_names
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
        federation = self.federation
        clients = np.arange(federation.config.num_clients)
        visits = self.visits.groupby(level="client")
        last: Any = visits.tail(1)
        rounds = pd.Series(last.index.get_level_values("round"), last.index.droplevel("round"))
        last = last.droplevel("round").reindex(clients)
        architectures = np.array([one.name for one in federation.architectures])
        columns: dict[str, Any] = {
            "client": clients,
            "architecture": architectures[federation.groups],
            "num_train": federation.num_train,
            "num_test": federation.num_test,
            "num_classes": federation.num_classes_held,
            "visits": visits.size().reindex(clients, fill_value=0),
            "last_round": rounds.reindex(clients, fill_value=0),
        }
        scores = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        for name in self._accuracy_names:
            columns[name] = scores.get(name, np.full(len(clients), np.nan, np.float32))
        for name in last:
            if name != "finite" and not str(name).startswith("accuracy"):
                columns[str(name)] = last[name]
        return pd.DataFrame(columns)


def _visits(records: Sequence[Record], columns: Mapping[str, Any]) -> pd.DataFrame:
    """What the participants of these rounds reported: a row per visit, `(round, client)`."""
    rounds = [record.round for record in records for _ in record.participants]
    clients = [client for record in records for client in record.participants]
    index = pd.MultiIndex.from_arrays([rounds, clients], names=("round", "client"))
    return pd.DataFrame(dict(columns), index, dtype=np.float32)


def _means(
    reports: Mapping[str, np.ndarray], finite: np.ndarray, without: Sequence[str]
) -> dict[str, float | None]:
    """Means over participants of what else they reported: `mean_accuracy/NAME` of other predictions
    over all, other numbers over those that were not discarded."""
    means = {}
    for name in reports.keys() - set(without):
        if name.startswith("accuracy/"):
            means[f"mean_{name}"] = mean(reports[name])
        else:
            means[name] = mean(reports[name][finite])
    return dict(sorted(means.items()))


def _without_evaluation(record: Record) -> dict[str, float | None]:
    return {
        name: value
        for name, value in record.more.items()
        if not name.startswith("all_clients_") and name != "adaptation_flops"
    }
