"""A whole run: data, split, federation, rounds, and what they gave."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from pfedafm_jax import kernels
from pfedafm_jax.config import Config
from pfedafm_jax.costs import TARGET_ACCURACY, to_target
from pfedafm_jax.data import Dataset, Partition, load_dataset, make_partition
from pfedafm_jax.engine import Devices, Federation

Record = dict[str, Any]


def load_data(config: Config, data_dir: str | None = None, log: Callable[[str], None] | None = None) -> Dataset:
    """The dataset of a configuration."""
    return load_dataset(
        config.dataset,
        data_dir,
        num_classes=config.synthetic_classes,
        num_samples=config.synthetic_samples,
        seed=config.seed,
        image_size=config.image_size,
        log=log,
    )


def split(config: Config, dataset: Dataset) -> Partition:
    """The clients' shares of a dataset."""
    config.check(dataset)
    return make_partition(
        dataset.labels,
        dataset.num_train,
        config.num_clients,
        kind=config.partition,
        classes_per_client=config.classes_per_client,
        gamma=config.gamma,
        protocol=config.protocol,
        validation_fraction=config.validation_fraction,
        min_samples=config.min_samples,
        seed=config.seed,
        num_classes=dataset.num_classes,
    )


class Experiment:
    """A run of one method on one split; `rounds()` goes on where it stands, `summary()` says what came out.

    `records` has one dictionary a round; `per_round()` and `per_client()` are columns for a table; the arrays of
    `visits` are `[rounds, clients]` with NaN where a client took no part.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset | None = None,
        partition: Partition | None = None,
        *,
        data_dir: str | None = None,
        devices: Devices | None = None,
        log: Callable[[str], None] | None = None,
    ):
        self.config = config = config.check(dataset)
        self.dataset = dataset if dataset is not None else load_data(config, data_dir, log)
        self.partition = partition if partition is not None else split(config, self.dataset)
        self.kernels = kernels.choose(config.kernels, log)  # before anything is traced
        self.federation = Federation(config, self.dataset, self.partition, devices)
        self.records: list[Record] = []
        self._visits: list[dict[str, np.ndarray]] = []  # for each round what its participants reported, [K] each
        self.evaluations: dict[int, dict[str, np.ndarray]] = {}  # round → accuracies of all clients
        self.compile_seconds = 0.0

    @property
    def round(self) -> int:
        """Rounds done so far."""
        return len(self.records)

    def compile(self) -> None:
        """Compiles all programs; the first round does it otherwise."""
        start = time.perf_counter()
        self.federation.compile()
        self.compile_seconds += time.perf_counter() - start

    def rounds(self, count: int | None = None) -> Iterator[Record]:
        """Runs rounds up to the configured number (or `count` more), yielding the record of each."""
        last = self.config.rounds if count is None else self.round + count
        if self.round < last:
            self.compile()
        while self.round < last:
            yield self.run_round(evaluate=self.round + 1 == last)

    def run_round(self, evaluate: bool = False) -> Record:
        """One round; all clients are evaluated every `eval_every` rounds and whenever `evaluate` says so."""
        start, number = time.perf_counter(), self.round + 1
        federation = self.federation
        result = federation.run_round(number)
        info = result.info
        finite = info["finite"]
        costs = federation.costs(result.participants)
        judged = self.judged_by
        record: Record = {
            "round": number,
            "mean_accuracy": _mean(info[f"accuracy/{judged}"]),
            "all_clients_accuracy": None,
            "loss": _mean(info["loss"][finite]) if finite.any() else None,
            "seconds": 0.0,
            "participants": result.participants.tolist(),
            "not_finite": int(np.sum(~finite)),
            "accuracy": {name: _mean(info[f"accuracy/{name}"]) for name in self.predictions},
            "all_clients": None,
            "floats_up": int(np.sum(info["floats_up"]))
            if "floats_up" in info
            else int(sum(c.floats_up for c in costs)),
            "floats_down": int(np.sum(info["floats_down"]))
            if "floats_down" in info
            else int(sum(c.floats_down for c in costs)),
            "flops": int(sum(cost.flops for cost in costs)),
        }
        for name, values in info.items():
            if name not in ("finite", "loss", "floats_up", "floats_down") and not name.startswith("accuracy/"):
                record[name] = _mean(values[finite]) if finite.any() else None
        if evaluate or number % self.config.eval_every == 0:
            self._evaluate(record)
        record["seconds"] = round(time.perf_counter() - start, 3)
        self._visits.append({name: np.asarray(values, np.float32) for name, values in info.items()})
        self.records.append(record)
        return record

    def _evaluate(self, record: Record) -> None:
        """Accuracies of all clients as they are now, into the record of the round."""
        found = self.federation.evaluate()
        scores = {name.removeprefix("accuracy/"): np.asarray(values, np.float32) for name, values in found.items()}
        self.evaluations[record["round"]] = scores
        record["all_clients_accuracy"] = _mean(scores[self.judged_by])
        record["all_clients"] = {name: _mean(values) for name, values in scores.items()}

    @property
    def visits(self) -> dict[str, np.ndarray]:
        """What participants reported: name → `[rounds, clients]`, NaN where a client took no part."""
        names = dict.fromkeys(name for row in self._visits for name in row)
        tables = {name: np.full((self.round, self.config.num_clients), np.nan, np.float32) for name in names}
        for index, (record, row) in enumerate(zip(self.records, self._visits, strict=True)):
            for name, values in row.items():
                tables[name][index, record["participants"]] = values
        return tables

    # ------------------------------------------------------------------------------------------ going on

    def history(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Everything so far besides the weights: what goes into JSON, and arrays."""
        visits = list(dict.fromkeys(name for row in self._visits for name in row))
        missing = np.full(self.config.num_participants, np.nan, np.float32)
        arrays = {
            "visits": np.array([[row.get(name, missing) for name in visits] for row in self._visits], np.float32),
            "evaluations": np.array([list(scores.values()) for scores in self.evaluations.values()], np.float32),
        }
        details = {
            "records": [dict(record) for record in self.records],
            "visits": visits,
            "evaluations": list(next(iter(self.evaluations.values()), {})),
            "evaluation_rounds": list(self.evaluations),
            "rounds": self.config.rounds,
            "eval_every": self.config.eval_every,
            "compile_seconds": self.compile_seconds,
        }
        return details, arrays

    def continue_from(self, details: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Takes over a history; clients and server must be those of its last round.

        Afterwards the records are those that a run with the present number of rounds would have by now.
        """
        self.records = details["records"]
        visits, evaluations = arrays.get("visits"), arrays.get("evaluations")
        self._visits = [dict(zip(details["visits"], row, strict=True)) for row in ([] if visits is None else visits)]
        rows = [] if evaluations is None else evaluations
        self.evaluations = {
            number: dict(zip(details["evaluations"], row, strict=True))
            for number, row in zip(details["evaluation_rounds"], rows, strict=True)
        }
        self.compile_seconds += details["compile_seconds"]
        if self.round == self.config.rounds and self.round not in self.evaluations:
            self._evaluate(self.records[-1])  # it was not to be the last round, and now is
        old_last = details["rounds"]
        if old_last in self.evaluations and old_last < self.config.rounds and old_last % details["eval_every"]:
            del self.evaluations[old_last]  # it was the last round, and is no more
            self.records[old_last - 1] |= {"all_clients_accuracy": None, "all_clients": None}

    @property
    def predictions(self) -> list[str]:
        """Names of what is judged, the method's own first."""
        return self.federation.predictions

    @property
    def judged_by(self) -> str:
        """The prediction that the method is judged by."""
        return self.predictions[0]

    def per_round(self) -> dict[str, np.ndarray]:
        """Columns of equal length with one number a round, NaN where there is none: `pd.DataFrame(e.per_round())`.

        Everything in `records` but who took part; `accuracy/…` and `all_clients/…` are the single predictions.
        """
        nested = ("accuracy", "all_clients")
        names = dict.fromkeys(name for record in self.records for name in record if name != "participants")
        columns = {n: _column([record.get(n) for record in self.records]) for n in names if n not in nested}
        for name in nested if self.records else ():
            for part in self.predictions:
                columns[f"{name}/{part}"] = _column([(record[name] or {}).get(part) for record in self.records])
        return columns

    def per_client(self) -> dict[str, np.ndarray]:
        """Columns of equal length with one entry a client: `pd.DataFrame(experiment.per_client())`.

        `accuracy` is that of the last evaluation of all clients; `loss` and what else a method reports are those of
        a client's last visit; NaN where there was none.
        """
        federation, clients = self.federation, np.arange(self.config.num_clients)
        counts = self.partition.class_counts(self.dataset.labels, self.dataset.num_classes)
        took_part = np.zeros((self.round, len(clients)), bool)
        for index, record in enumerate(self.records):
            took_part[index, record["participants"]] = True
        visits = took_part.sum(axis=0)
        last = self.round - 1 - np.argmax(took_part[::-1], axis=0) if self.round else np.zeros(len(clients), int)
        columns: dict[str, np.ndarray] = {
            "client": clients,
            "architecture": np.array([one.name for one in federation.architectures])[federation.groups],
            "num_train": federation.num_train,
            "num_test": federation.num_test,
            "num_classes": (counts > 0).sum(axis=1),
            "visits": visits,
            "last_round": np.where(visits > 0, last + 1, 0),
        }
        scores = self.evaluations[max(self.evaluations)] if self.evaluations else {}
        for name in self.predictions:
            column = "accuracy" if name == self.judged_by else f"accuracy/{name}"
            columns[column] = np.asarray(scores.get(name, np.full(len(clients), np.nan)), np.float32)
        for name, rows in self.visits.items():
            if name != "finite" and not name.startswith("accuracy/"):
                columns[name] = rows[last, clients]
        return columns

    def client_table(self) -> dict[str, np.ndarray]:
        """Arrays for `clients.npz`: per-client numbers by round, accuracies of all clients by evaluation, sizes."""
        federation = self.federation
        table = {f"visits/{name}": rows for name, rows in self.visits.items()}
        table["evaluation_rounds"] = np.array(list(self.evaluations), np.int64)
        for name in self.predictions:
            rows = [scores[name] for scores in self.evaluations.values()]
            table[f"all_clients/{name}"] = np.array(rows, np.float32).reshape(-1, self.config.num_clients)
        table["architecture"] = federation.groups
        table["num_train"], table["num_test"] = federation.num_train, federation.num_test
        return table

    def summary(self) -> dict[str, Any]:
        """The run in one dictionary."""
        records, config = self.records, self.config
        means = [r["mean_accuracy"] for r in records if r["mean_accuracy"] is not None]
        everyone = [r["all_clients_accuracy"] for r in records if r["all_clients_accuracy"] is not None]
        last = self.evaluations[max(self.evaluations)][self.judged_by] if self.evaluations else None
        visits = config.num_participants * max(1, len(records))
        diverged = [r["round"] for r in records if r["not_finite"]]
        return {
            "method": config.method,
            "dataset": config.dataset,
            "best_mean_accuracy": max(means, default=None),
            "best_round": next((r["round"] for r in records if means and r["mean_accuracy"] == max(means)), None),
            "last_mean_accuracy": means[-1] if means else None,
            "final_all_clients_accuracy": everyone[-1] if everyone else None,
            "best_all_clients_accuracy": max(everyone, default=None),
            "spread_over_clients": None if last is None else round(float(np.std(last)), 6),
            "rounds": len(records),
            "seconds": round(sum(r["seconds"] for r in records), 3),
            "compile_seconds": round(self.compile_seconds, 3),
            "data_source": self.dataset.source,
            "floats_up_per_client": sum(r["floats_up"] for r in records) / visits,
            "floats_down_per_client": sum(r["floats_down"] for r in records) / visits,
            "flops_per_client_round": sum(r["flops"] for r in records) / visits,
            "diverged_at_round": diverged[0] if diverged else None,
            "clients_not_finite": sum(r["not_finite"] for r in records),
            **to_target(records, TARGET_ACCURACY.get(config.dataset)),
            "config": config.as_dict(),
        }


def _column(values: list[Any]) -> np.ndarray:
    """Numbers as an array: whole ones stay whole, None becomes NaN."""
    if all(isinstance(value, int) for value in values):
        return np.array(values)
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _mean(values: np.ndarray) -> float | None:
    """Unweighted mean over clients, rounded for reading; None where there is nothing finite."""
    finite = np.asarray(values, np.float64)
    finite = finite[np.isfinite(finite)]
    return round(float(finite.mean()), 6) if finite.size else None
