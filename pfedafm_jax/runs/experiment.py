"""A run in memory, to look into from Python: federation, executor, state and history together."""

import time
from collections.abc import Iterator
from functools import cached_property

import pandas as pd

from pfedafm_jax.base.files import Log
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.data.load import check_data, load_data, split
from pfedafm_jax.engine import Devices, Executor, Federation, State, executor_for
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models import kernels
from pfedafm_jax.results.records import Record, Summary
from pfedafm_jax.results.run import Run
from pfedafm_jax.runs.history import History
from pfedafm_jax.runs.train import evaluation_is_due


class Experiment:
    """A handle on one run of one method; `rounds()` runs the rounds that are left.

    It puts the parts of a run together and adds no rule of its own; `run` takes one from its start
    to its end, with files.

    Attributes:
        federation: settings, method, what is known of the clients.
        executor: who does the rounds.
        state: the weights of server and clients.
        history: records, what every visit reported, evaluations.
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
        check_names(config, dataset)  # before the data are loaded, which is slow
        self.config = config
        self.dataset = load_data(config, data_dir, log) if dataset is None else dataset
        if dataset is None:
            check_data(config, self.dataset)
        self.partition = split(config, self.dataset) if partition is None else partition
        self.partition.check(len(self.dataset.images), config.num_clients)
        kernels.choose(config.kernels, log)  # before anything is traced
        self.federation = Federation.of_partition(config, self.dataset, self.partition)
        self.executor: Executor = executor_for(
            self.federation, self.dataset, self.partition, devices
        )
        self.history = History(self.federation, self.executor)

    @cached_property
    def state(self) -> State:
        """The weights of server and clients."""
        return self.executor.start()

    # ---------------------------------------------------------------------------- rounds

    def compile(self) -> None:
        """Compiles all programs now; otherwise the first round does."""
        begin = time.perf_counter()
        self.executor.prepare()
        self.history.compile_seconds += time.perf_counter() - begin

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
        begin, t = time.perf_counter(), self.round + 1
        self.state, result = self.executor.run_round(self.state, t)
        due = evaluate or evaluation_is_due(self.config, t)
        accuracies = self.executor.evaluate(self.state) if due else None
        return self.history.add(result, accuracies, time.perf_counter() - begin)

    # ---------------------------------------------------------------------------- what came out

    @property
    def round(self) -> int:
        """The number of rounds done so far."""
        return self.history.rounds_done

    @property
    def records(self) -> list[Record]:
        """One of each round."""
        return self.history.records

    @property
    def predictions(self) -> list[str]:
        """Names of the predictions that are evaluated, the method's main one first."""
        return self.federation.prediction_names

    def summary(self) -> Summary:
        """The run in numbers."""
        return self.history.summary()

    def result(self) -> Run:
        """The run as tables and plots take it, as if read from a folder."""
        return self.history.result()

    def per_round(self) -> pd.DataFrame:
        """One row per round, see `History.per_round`."""
        return self.history.per_round()

    def per_client(self) -> pd.DataFrame:
        """One row per client, see `History.per_client`."""
        return self.history.per_client()
