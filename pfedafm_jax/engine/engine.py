"""Rounds on the devices of this machine, with compiled programs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import Dataset, Partition
from pfedafm_jax.engine.aggregator import Aggregator
from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.executor import RoundResult, State
from pfedafm_jax.engine.federation import Federation
from pfedafm_jax.engine.hosts import Processes
from pfedafm_jax.engine.programs import CompiledPrograms, ProgramKey, compiled, shapes_of
from pfedafm_jax.engine.round import check_participants, participants_of, weights_of
from pfedafm_jax.engine.schedule import Call, schedule
from pfedafm_jax.engine.state import initial_state
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.engine.transfers import HostTransfers, LockstepTransfers
from pfedafm_jax.engine.visit import PRIVATE_STATISTICS, DeviceResult, RoundInputs, Slots, Totals
from pfedafm_jax.methods.base import Method, Server
from pfedafm_jax.methods.server_optimizer import broadcast_of, judged_of
from pfedafm_jax.models import kernels
from pfedafm_jax.training.batches import table_width

Tree = Any
Reports = dict[int, dict[str, Any]]  # client → name → number
Entries = dict[int, tuple[float, int]]  # client → its weight and its rank, see `Slots`
NOTHING = Totals({}, {})  # of an evaluation


class Engine:
    """Does rounds with compiled programs on the devices of this process: an `Executor`.

    With several processes it trains the clients that belong to its own, see `Processes`.

    Args:
        federation: what does not change in the run.
        dataset: the samples, which are copied to every device.
        partition: which client has which of them.
        devices: by default as many as the settings say.

    Attributes:
        method: the federation's; in lockstep, without a smaller last batch.
        lockstep: whether a device trains all its clients at once, see `programs.py`.
        images, labels: on every device.
        train_rows, test_rows: each client's rows of the dataset, int32 `[clients, width]`, padded
            with zeros.
    """

    def __init__(
        self,
        federation: Federation,
        dataset: Dataset,
        partition: Partition,
        devices: Devices | None = None,
    ):
        config = federation.config
        self.federation, self.dataset, self.partition = federation, dataset, partition
        self.devices = devices or Devices(config.devices)
        if config.precision == "tf32" and self.devices.kind == "cpu":
            raise bad("precision", "tf32", "highest, bfloat16 on a CPU")
        self.processes = Processes()
        self.lockstep = _goes_in_lockstep(config, self.devices)
        self.method = _in_lockstep(federation.method) if self.lockstep else federation.method
        self.images = self.devices.replicate(dataset.images)
        self.labels = self.devices.replicate(dataset.labels.astype(np.int32))
        self.train_rows = padded_rows(partition.train, self.lockstep)
        self.test_rows = padded_rows(partition.test, self.lockstep)

    # ---------------------------------------------------------------------------- what it runs with

    @property
    def program_key(self) -> ProgramKey:
        """Everything that the compiled programs depend on."""
        config = self.federation.config
        return ProgramKey(
            method=jax.tree.structure(self.method),
            architectures=self.federation.architectures,
            num_images=self.images.shape[0],
            train_width=self.train_rows.shape[1],
            test_width=self.test_rows.shape[1],
            devices=self.devices,
            num_participants=config.num_participants,
            lockstep=self.lockstep,
            clients_per_step=config.clients_per_step,
            precision=config.precision,
            kernels=str(kernels.implementation()),
        )

    @cached_property
    def programs(self) -> CompiledPrograms:
        """The compiled programs, shared with other runs of this key."""
        assert not self.method.in_turn, "clients of this method are trained one after the other"
        return compiled(self.program_key)

    @property
    def clients_per_step(self) -> int:
        """Clients that a device trains at once (of the first program, if there are several)."""
        program_key = self.program_key
        return program_key.step(shapes_of(program_key).groups[0])

    @cached_property
    def aggregator(self) -> Aggregator:
        """The server's part of a round."""
        run = self.devices, self.processes
        return Aggregator(self.federation, self.method, self.programs, *run)

    @cached_property
    def transfers(self) -> HostTransfers | LockstepTransfers:
        """How the states of clients come to the devices and back, in this layout."""
        if self.lockstep:
            return LockstepTransfers(self.programs, self.program_key, self.federation.groups)
        return HostTransfers(self.programs.shapes.starts)

    # ---------------------------------------------------------------------------- a round

    def prepare(self) -> None:
        """Compiles all programs now; otherwise the first round does."""
        _ = self.programs

    def start(self, folder: str | None = None) -> State:
        """The state before round 1; `folder` is where the store puts its files."""
        state = initial_state(self.federation, folder)
        return state._replace(server=self.devices.replicate(state.server))

    def run_round(
        self, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> tuple[State, RoundResult]:
        """Round `t`, see `Executor`.

        Args:
            state: that after the previous round; its clients are changed in place.
            t: the number of the round, which determines participants and batches.
            participants: clients to train instead of those drawn.

        Returns:
            The next state, and what each participant reported.
        """
        order, dropped = participants_of(self.federation.config, t, participants)
        check_participants(self.federation, order)
        weights = weights_of(self.federation, order)
        entries: Entries = {
            client: (weight, rank)
            for rank, (client, weight) in enumerate(zip(order, weights, strict=True))
            if self.processes.keeps(client)
        }
        reports: Reports = {client: {} for client in entries}
        inputs = self.inputs(broadcast_of(state.server), t)
        totals = [self._train(inputs, state.clients, entries, reports)]
        if self.method.shared_parts:
            finite = {k: entry for k, entry in entries.items() if reports[k]["finite"]}
            totals.append(self._train_shared(inputs, state.clients, finite, reports))
        state.clients.written_elsewhere([client for client in order if client not in entries])
        server = self.aggregator.next_server(state.server, t, order, totals)
        result = RoundResult(np.array(order, int), self._gathered(order, reports), dropped)
        return state._replace(server=server), result

    def evaluate(
        self, state: State, clients: Sequence[int] | np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Accuracies of these clients, or of all, with the present broadcast: name → `[clients]`."""
        if clients is None:
            clients = range(self.federation.config.num_clients)
        order = [int(client) for client in clients]
        reports: Reports = {client: {} for client in order if self.processes.keeps(client)}
        inputs = self.inputs(judged_of(state.server), 0)
        pending: list[tuple[Call, dict[str, jax.Array]]] = []
        for call in self.calls_of(list(reports), self.federation.num_test):
            states = self.transfers.load(call, state.clients)
            pending.append((call, self._evaluated(inputs, call, states, self._slots(call, {}))))
            self.transfers.release(call, states)
            if len(pending) > 1:  # at most two calls in memory, however many clients there are
                _report(*pending.pop(0), reports)
        for call, info in pending:
            _report(call, info, reports)
        gathered = self._gathered(order, reports)
        return {name: row for name, row in gathered.items() if name.startswith("accuracy/")}

    # ---------------------------------------------------------------------------- the stages

    def _train(
        self, inputs: RoundInputs, clients: ClientStore, entries: Entries, reports: Reports
    ) -> Totals:
        """Trains the clients in `entries` by the programs of their own architectures, and evaluates
        them.

        Returns:
            The sums for the average. States go to `clients`, reports to `reports`.
        """
        totals = self.aggregator.zeros()
        pending: list[tuple[Call, Tree, dict[str, jax.Array]]] = []
        most = self.transfers.most_in_progress

        def finish(call: Call, states: Tree, info: dict[str, jax.Array]) -> None:
            self.transfers.save(call, states, clients)
            _report(call, info, reports)

        for call in self.calls_of(list(entries), self.federation.num_train):
            slots = self._slots(call, entries)
            states = self.transfers.load(call, clients)
            program = self.programs.train[call.program]
            done: DeviceResult = program(inputs, totals, states, slots, call.num_steps)
            totals = done.totals
            info = done.info
            # `work` has evaluated clients whose update has a `view`; the others are evaluated here,
            # with the broadcast that they received.
            if not any(name.startswith("accuracy/") for name in info):
                info = info | self._evaluated(inputs, call, done.state, slots)
            pending.append((call, done.state, info))
            while most is not None and len(pending) > most:
                finish(*pending.pop(0))
        for each in pending:
            finish(*each)
        return totals

    def _train_shared(
        self, inputs: RoundInputs, clients: ClientStore, entries: Entries, reports: Reports
    ) -> Totals:
        """The same for the stage that all architectures share, which reads parts of a client's state
        and changes none but its private statistics."""
        assert self.programs.shared is not None, "the method has shared parts"
        totals = self.aggregator.zeros(shared_stage=True)
        transfers = HostTransfers([self.programs.shapes.parts])
        pending: list[tuple[Call, Tree, dict[str, jax.Array]]] = []
        for call in self.calls_of(list(entries), self.federation.num_train, shared_stage=True):
            slots = self._slots(call, entries)
            states = transfers.load(call, clients)
            done: DeviceResult = self.programs.shared(inputs, totals, states, slots, call.num_steps)
            totals = done.totals
            pending.append((call, done.state, done.info))
        for call, states, info in pending:
            _keep_statistics(call, states, clients)
            _report(call, info, reports)
        return totals

    def _evaluated(
        self, inputs: RoundInputs, call: Call, states: Tree, slots: Slots
    ) -> dict[str, jax.Array]:
        """The accuracies of a call's clients, `[devices, slots]` by name."""
        program = self.programs.evaluate[call.program]
        return program(inputs, NOTHING, states, slots, call.num_steps).info

    # ---------------------------------------------------------------------------- their arguments

    def inputs(self, broadcast: Server, t: int) -> RoundInputs:
        """The arguments that all clients of round `t` share, on every device."""
        number = self.devices.replicate(np.int32(t))
        method = self.aggregator.method
        key_data = self.aggregator.key_data
        return RoundInputs(method, self.images, self.labels, broadcast, key_data, number)

    def calls_of(
        self, clients: list[int], samples: np.ndarray, shared_stage: bool = False
    ) -> list[Call]:
        """Calls that cover these clients, see `calls_of`."""
        return calls_of(self.federation, self.program_key, clients, samples, shared_stage)

    def _slots(self, call: Call, entries: Entries) -> Slots:
        """Data and weights of a call's clients `[devices, slots, …]`."""
        flat = call.clients.reshape(-1)
        empty = flat < 0
        nobody = 0.0, self.federation.config.num_participants
        pairs = [entries.get(int(client), nobody) for client in flat]
        num_train = np.where(empty, 0, self.federation.num_train[flat]).astype(np.int32)
        num_test = np.where(empty, 0, self.federation.num_test[flat]).astype(np.int32)
        arrays: dict[str, Any] = dict(
            client=np.maximum(flat, 0).astype(np.int32),
            train=self.train_rows[flat],
            num_train=num_train,
            test=self.test_rows[flat],
            num_test=num_test,
            weight=np.array([weight for weight, _ in pairs], np.float32),
            rank=np.array([rank for _, rank in pairs], np.int32),
        )
        return call.folded(Slots(**arrays))

    # ---------------------------------------------------------------------------- several processes

    def _gathered(self, order: list[int], reports: Reports) -> dict[str, np.ndarray]:
        """Reports of all clients in `order`, gathered from their processes: name → `[clients]`."""
        names: Sequence[str] = self.programs.reported
        if self.processes.count == 1:
            names = [name for name in names if any(name in own for own in reports.values())]
        missing = np.float32(np.nan)  # a client whose first stage was discarded has no second one
        table = np.zeros((len(names), len(order)), np.float32)
        for column, client in enumerate(order):
            if client in reports:
                table[:, column] = [reports[client].get(name, missing) for name in names]
        rows = zip(names, self.processes.sum(table), strict=True)
        return {name: row.astype(bool) if name == "finite" else row for name, row in rows}


def _goes_in_lockstep(config: Config, devices: Devices) -> bool:
    """Whether these devices train their clients in lockstep: GPUs, unless the settings say else."""
    if config.layout == "auto":
        return devices.kind != "cpu"
    return config.layout == "lockstep"


def _in_lockstep(method: Method) -> Method:
    """The method for lockstep: the last, short batch of an epoch is padded to a full one."""
    size = method.training.batch_size
    return replace(method, training=replace(method.training, rest_size=size, lockstep=True))


def padded_rows(rows: Sequence[np.ndarray], tight: bool = False) -> np.ndarray:
    """Rows of different lengths as one table `[clients, width]`, padded with zeros; `tight`: see
    `table_width`."""
    table = np.zeros((len(rows), table_width([len(row) for row in rows], tight)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


def calls_of(
    federation: Federation,
    program_key: ProgramKey,
    clients: list[int],
    samples: np.ndarray,
    shared_stage: bool = False,
) -> list[Call]:
    """Calls that cover these clients, by program, or of the `shared_stage`; balanced by cost.

    Args:
        samples: of each client, int `[clients]`: what its cost is proportional to.
    """
    if shared_stage:
        groups = [None]
        program_of_client = np.zeros_like(federation.groups)
        macs: Any = float(federation.method.shared.macs)
    else:
        groups = shapes_of(program_key).groups
        program_of_client = programs_of_clients(federation, program_key)
        macs = federation.macs
    return schedule(
        clients,
        program_of_client,
        costs=samples * macs,
        num_devices=len(program_key.devices),
        clients_per_step=[program_key.step(group) for group in groups],
        slots=[program_key.slots(group) for group in groups],
    )


def programs_of_clients(federation: Federation, program_key: ProgramKey) -> np.ndarray:
    """Which of the programs of a stage trains each client, int `[clients]`."""
    program_of_architecture = np.zeros(len(federation.architectures), int)
    for program, group in enumerate(shapes_of(program_key).groups):
        program_of_architecture[list(group.members)] = program
    return program_of_architecture[federation.groups]


def _report(call: Call, info: dict[str, jax.Array], reports: Reports) -> None:
    """Adds what each slot reported to its client's reports."""
    for client, own in call.each(info):
        reports[client] |= own


def _keep_statistics(call: Call, states: Tree, clients: ClientStore) -> None:
    """Writes the private statistics of a call's clients, if they have any, to their states."""
    if PRIVATE_STATISTICS not in (states or {}):
        return
    for client, statistics in call.each(states[PRIVATE_STATISTICS]):
        clients.write(client, {**clients.state(client), PRIVATE_STATISTICS: statistics})
