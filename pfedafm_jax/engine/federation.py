"""A federation of clients and its rounds."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.data import NORMALISATION, Dataset, Partition
from pfedafm_jax.engine.devices import Devices, sum_over_devices
from pfedafm_jax.engine.hosts import Hosts
from pfedafm_jax.engine.program import Common, Result, Slots, judge, over_slots, work, zero_total
from pfedafm_jax.engine.schedule import Call, assign, schedule, slots_per_device
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import find_method
from pfedafm_jax.methods.base import Cost, Method, Server, average
from pfedafm_jax.models import Architecture, describe
from pfedafm_jax.training import LocalTraining

Tree = Any
START_KEY, SERVER_KEY = 2**31 - 1, 2**31 - 2  # rounds are numbered far below
MOVED_TOGETHER = 4  # states that travel between processes in one call


def draw_participants(seed: int, round_index: int, num_clients: int, num_participants: int) -> np.ndarray:
    """The participants of a round, in the order drawn; depends on nothing but seed and round."""
    generator = np.random.Generator(np.random.PCG64([seed, round_index, 0xD4A3]))
    return generator.choice(num_clients, num_participants, replace=False)


class RoundResult(NamedTuple):
    """What a round tells: one number per participant."""

    participants: np.ndarray  # int [K], in the order drawn
    info: dict[str, np.ndarray]  # each [K]: loss, accuracy/…, finite, and what the method reports


class Federation:
    """Clients, server and the compiled round; `run_round` moves it on by one.

    `groups[client]` is the number of the client's architecture; `server` lives on the devices, clients in `store`. Where
    several processes run together, `home[client]` is the one that keeps a client's state, -1 before its first visit.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        partition: Partition,
        devices: Devices | None = None,
        store_folder: str | None = None,
    ):
        self.config, self.dataset, self.partition = config, dataset, partition
        self.devices = devices or Devices(config.devices)
        self.hosts = Hosts(len(self.devices))
        image_shape: tuple[int, int, int] = dataset.images.shape[1:]  # type: ignore[assignment]

        def architecture(name: str) -> Architecture:
            return describe(name, dataset.num_classes, image_shape, config.feature_size, config.initialisation)

        one = find_method(config.method).one_network
        names = (config.shared_extractor,) if one else config.architectures
        self.architectures = [architecture(name) for name in names]
        mean, std = NORMALISATION["imagenet"] if config.normalisation == "imagenet" else (dataset.mean, dataset.std)
        self.num_train = np.array([len(rows) for rows in partition.train])
        self.num_test = np.array([len(rows) for rows in partition.test])
        how = LocalTraining.of(config, tuple(mean), tuple(std), self.num_train.tolist())
        self.method: Method = find_method(config.method)(config, how, architecture(config.shared_extractor))
        if self.method.sequential and self.hosts.count > 1:
            raise PfedafmError(
                f"num_processes = {self.hosts.count} cannot be used with clients that depend on one another "
                "(pfedafm.mix_relay, pfedafm.leak_momentum); accepted: 1"
            )
        self.groups = np.arange(config.num_clients) % len(self.architectures)
        self.home = np.full(config.num_clients, -1)
        self.key = jax.random.key(config.seed)
        self.store, self.server = self._start(store_folder)

        self._images = self.devices.replicate(dataset.images)
        self._labels = self.devices.replicate(dataset.labels.astype(np.int32))
        self._key_data = self.devices.replicate(np.asarray(jax.random.key_data(self.key)))
        self._tables = _padded(partition.train), _padded(partition.test)
        # Clients that follow each other cannot share a chunk: the relay would be the empty slot's.
        self.chunk = 1 if self.method.sequential else config.clients_per_step or self._automatic_chunk()
        self.traces = 0  # how often a program was traced: a round must not add to it
        self._programs: dict[str, Callable] = {}
        self._zeros: dict[str, Tree] = {}
        self._numbers: list[str] = []  # names of what a round reports for each participant

    def _start(self, store_folder: str | None) -> tuple[ClientStore, Server]:
        """Clients and server before the first round; clients of one architecture are alike unless asked otherwise."""
        start_key = jax.random.fold_in(self.key, START_KEY)
        init = jax.jit(self.method.init_client, static_argnums=1)  # as one program: op by op it takes many seconds

        def start(number: int, group: int) -> Tree:
            return jax.device_get(init(jax.random.fold_in(start_key, number), self.architectures[group]))

        numbers = range(len(self.architectures))
        with ThreadPoolExecutor() as pool:
            server = pool.submit(jax.jit(self.method.init_server), jax.random.fold_in(self.key, SERVER_KEY))
            starts = list(pool.map(start, numbers, numbers))

        def own_start(client: int) -> Tree:
            return start(len(self.architectures) + client, self.groups[client])

        start_of = None if self.config.same_start else own_start
        store = ClientStore(starts, self.groups, place=self.config.store, folder=store_folder, start_of=start_of)
        return store, self.devices.replicate(jax.device_get(server.result()))

    def _automatic_chunk(self) -> int:
        """One client at a time on CPU, where a core does one product best; on GPU all that fall to a device."""
        if self.devices.kind == "cpu":
            return 1
        return max(1, -(-self.config.num_participants // (len(self.architectures) * len(self.devices))))

    # ------------------------------------------------------------------------------------------ programs

    def compile(self) -> None:
        """Compiles every program, several at a time; the first round does it where it was not done before."""
        if self._programs:
            return
        with ThreadPoolExecutor(max_workers=4) as pool:  # one program is traced while others are compiled
            jobs = {name: pool.submit(lowered.compile) for name, lowered in self._lowered()}
            self._programs = {name: job.result() for name, job in jobs.items()}

    def program_text(self, name: str) -> str:
        """A compiled program as XLA runs it, for profiling: `client 0`, `judge 0`, `shared`, `sum`, `update`."""
        self.compile()
        return self._programs[name].as_text()  # pyright: ignore[reportFunctionMemberAccess]

    def _lowered(self) -> Iterator[tuple[str, Any]]:
        """Every program by name, traced and ready to be compiled."""
        common = self._common(0)

        def lower(name: str, stage: Callable, architecture: Architecture | None, call: Call) -> tuple[str, Any]:
            states, slots = self._states(call), self._slots(call, {})
            kind = name.split()[0]  # what a stage uploads has the same shapes for all architectures
            if stage is work and kind not in self._zeros:
                row = jax.tree.map(lambda leaf: leaf[0, 0], (states, slots))
                empty = zero_total(self.method, architecture, common, *row)
                self._zeros[kind] = self.devices.split(
                    jax.tree.map(lambda leaf: np.zeros((len(self.devices), *leaf.shape), leaf.dtype), empty)
                )
            program = self._counted(over_slots(stage, self.method, architecture, self.chunk))
            donate = (2,) if stage is work else ()  # trained states take the place of the old ones
            spread = self.devices.spread(program, in_axes=(None, 0, 0, 0, 0), donate=donate)
            lowered = spread.lower(common, self._zeros.get(kind), states, slots, call.trips)
            self._numbers = list(dict.fromkeys([*self._numbers, *lowered.out_info.info]))
            return name, lowered

        for group, architecture in enumerate(self.architectures):
            call = self._empty_call(group, len(self.architectures))
            yield lower(f"client {group}", work, architecture, call)
            yield lower(f"judge {group}", judge, architecture, call)
        if self.method.shared_parts:
            yield lower("shared", work, None, self._empty_call(None, 1))

        totals = list(self._zeros.values())
        if jax.tree.leaves(totals):  # a method may upload nothing
            spread = self.devices.spread(self._counted(sum_over_devices), in_axes=(0,), out_axes=None)
            yield "sum", spread.lower(totals)
            summed = self.devices.replicate(jax.tree.map(lambda leaf: np.zeros(leaf.shape[1:], leaf.dtype), totals))
            yield "update", jax.jit(self._counted(self._server_update)).lower(self.server, summed)

    def _server_update(self, server: Server, totals: list[Tree]) -> Server:
        """The next broadcast, from the sums of all stages over all participants."""
        numerator, weight = {}, {}
        for part in totals:
            numerator.update(part[0])
            weight.update(part[1])
        return self.method.server_update(server, average(server, numerator, weight))

    def _counted(self, function: Callable) -> Callable:
        def traced(*arguments):
            self.traces += 1
            return function(*arguments)

        return traced

    def _common(self, round_index: int) -> Common:
        index = self.devices.replicate(np.int32(round_index))
        return Common(self._images, self._labels, self.server, self._key_data, index)

    def _slot_count(self, num_groups: int) -> int:
        return slots_per_device(self.config.num_participants, num_groups, len(self.devices), self.chunk)

    def _empty_call(self, group: int | None, num_groups: int) -> Call:
        clients = np.full((len(self.devices), self._slot_count(num_groups)), -1)
        return Call(group, clients, np.zeros(len(self.devices), np.int32))

    def _states(self, call: Call) -> Tree:
        """States of a call's clients `[devices, slots, …]`; of the shared parts only where the call is for all groups."""
        if call.group is None:
            return _folded(call, self.store.read_parts(self.method.shared_parts, call.clients.reshape(-1)))
        return _folded(call, self.store.read(call.group, call.clients.reshape(-1)))

    def _slots(self, call: Call, weights: dict[int, float]) -> Slots:
        """Data and weights of a call's clients `[devices, slots, …]`."""
        flat = call.clients.reshape(-1)
        train, test = self._tables

        def count(sizes: np.ndarray) -> np.ndarray:
            return np.where(flat >= 0, sizes[flat], 0).astype(np.int32)

        weight = np.array([weights.get(int(client), 0.0) for client in flat], np.float32)
        client = np.maximum(flat, 0).astype(np.int32)
        rows: Any = (client, train[flat], count(self.num_train), test[flat], count(self.num_test), weight)
        return _folded(call, Slots(*rows))

    # ------------------------------------------------------------------------------------------ rounds

    def run_round(self, round_index: int, participants: Sequence[int] | np.ndarray | None = None) -> RoundResult:
        """One communication round: local work of the participants, then the average becomes the next broadcast."""
        self.compile()
        if participants is None:
            config = self.config
            participants = draw_participants(config.seed, round_index, config.num_clients, config.num_participants)
        order = [int(client) for client in participants]
        weights = self._aggregation_weights(order)
        totals = list(self._zeros.values())  # of `client_update` and, where there is one, `shared_update`
        mine = self._mine(order)
        info: dict[int, dict[str, Any]] = {client: {} for client in mine}
        # Released-code switches make clients depend on one another; otherwise all participants go together.
        for together in [[client] for client in mine] if self.method.sequential else [mine]:
            totals = self._train(round_index, together, weights, totals, info)
        if "sum" in self._programs:
            summed = self._programs["sum"](totals)
            if self.hosts.count > 1:
                summed = self.devices.replicate(self.hosts.sum(summed))
            self.server = self._programs["update"](self.server, summed)
            jax.block_until_ready(self.server)  # collectives of two rounds must never be under way together
        return RoundResult(np.array(order), self._collected(order, info))

    def _mine(self, order: list[int]) -> list[int]:
        """The participants that train in this process; the states of those that trained elsewhere before are fetched."""
        if self.hosts.count == 1:
            return order
        work = self.num_train * np.array([a.macs for a in self.architectures], float)[self.groups]
        process = assign(order, work, self.home, self.hosts.devices)
        moving = [c for c, new in zip(order, process, strict=True) if self.home[c] not in (-1, new)]
        for group in range(len(self.architectures)):
            members = [client for client in moving if self.groups[client] == group]
            for first in range(0, len(members), MOVED_TOGETHER):  # calls of one size: one program an architecture
                rows = np.full(MOVED_TOGETHER, -1)
                rows[: len(members[first:])] = members[first : first + MOVED_TOGETHER]
                here = np.where((rows >= 0) & (self.home[rows] == self.hosts.index), rows, -1)
                states = self.hosts.move(self.store.read(group, here))
                wanted = [c for c, new in zip(order, process, strict=True) if new == self.hosts.index]
                self.store.write(group, np.where(np.isin(rows, wanted), rows, -1), states)
                self.store.forget(here)
        self.home[order] = process
        self.store.changed[order] = True  # as in all other processes
        return [client for client, new in zip(order, process, strict=True) if new == self.hosts.index]

    def _collected(self, order: list[int], info: dict[int, dict[str, Any]]) -> dict[str, np.ndarray]:
        """Numbers of all of `order`, each known to one process: name → `[clients]`."""
        names = [name for name in self._numbers if self.hosts.count > 1 or any(name in own for own in info.values())]
        missing = np.float32(np.nan)  # a client whose first stage failed has no numbers of the second
        table = np.zeros((len(names), len(order)), np.float32)
        for place, client in enumerate(order):
            if client in info:
                table[:, place] = [info[client].get(name, missing) for name in names]
        table = self.hosts.sum(table)
        return {name: row.astype(bool) if name == "finite" else row for name, row in zip(names, table, strict=True)}

    def _train(
        self, round_index: int, clients: list[int], weights: dict[int, float], totals: list[Tree], info: dict[int, dict]
    ) -> list[Tree]:
        """Local work of these clients, judged as they leave it; writes their states, adds to `totals` and `info`."""
        common, total, pending = self._common(round_index), totals[0], []
        for call in self._schedule(clients, self.num_train):
            slots = self._slots(call, weights)
            result: Result = self._programs[f"client {call.group}"](
                common, total, self._states(call), slots, call.trips
            )
            info_now = result.info
            if not any(name.startswith("accuracy/") for name in info_now):  # else the method judged its own view
                judged = self._programs[f"judge {call.group}"](common, None, result.state, slots, call.trips)
                info_now = {**info_now, **judged.info}
            total = result.total
            pending.append((call, result, info_now))
        for call, result, info_now in pending:
            self.store.write(call.group, call.clients.reshape(-1), _unfolded(result.state))
            _report(call, info_now, info)
            self._hand_on(call, result.relay)
        if not self.method.shared_parts:
            return [total]
        shared_total = totals[1]
        trained = {client: weights.get(client, 0.0) for client in clients if info[client]["finite"]}
        common = common._replace(server=self.server)
        for call in self._schedule(list(trained), self.num_train, together=True):
            slots = self._slots(call, trained)
            result = self._programs["shared"](common, shared_total, self._states(call), slots, call.trips)
            shared_total = result.total
            _report(call, result.info, info)
            self._hand_on(call, result.relay)
        return [total, shared_total]

    def _hand_on(self, call: Call, relay: dict[str, Tree]) -> None:
        """Sequential methods: what this client left becomes what the next one receives."""
        if relay:
            device = int(np.argmax(call.trips))
            left = jax.tree.map(lambda leaf: np.asarray(leaf)[device], relay)
            self.server = {**self.server, "relay": self.devices.replicate({**self.server["relay"], **left})}

    def evaluate(self, clients: Sequence[int] | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Accuracy of clients (all of them by default) as they are now, with the current broadcast: name → `[clients]`."""
        self.compile()
        order = list(range(self.config.num_clients)) if clients is None else [int(client) for client in clients]
        home = np.where(self.home >= 0, self.home, np.arange(len(self.home)) % self.hosts.count)
        mine = [client for client in order if self.hosts.count == 1 or home[client] == self.hosts.index]
        common, pending = self._common(0), []
        info: dict[int, dict[str, Any]] = {client: {} for client in mine}
        for call in self._schedule(mine, self.num_test):
            states, slots = self._states(call), self._slots(call, {})
            pending.append((call, self._programs[f"judge {call.group}"](common, None, states, slots, call.trips)))
            if len(pending) > 1:  # memory stays that of two calls, however many clients there are
                call, result = pending.pop(0)
                _report(call, result.info, info)
        for call, result in pending:
            _report(call, result.info, info)
        found = self._collected(order, info)
        return {name: values for name, values in found.items() if name.startswith("accuracy/")}

    def _schedule(self, clients: list[int], samples: np.ndarray, together: bool = False) -> list[Call]:
        """Calls for these clients, balanced by samples times the cost of their models; `together`: as one group."""
        macs = np.array([architecture.macs for architecture in self.architectures], float)
        cost = np.full(len(self.groups), float(self.method.shared.macs)) if together else macs[self.groups]
        calls = schedule(
            clients,
            np.zeros_like(self.groups) if together else self.groups,
            samples * cost,
            num_devices=len(self.devices),
            chunk=self.chunk,
            slots=self._slot_count(1 if together else len(self.architectures)),
        )
        return [call._replace(group=None) for call in calls] if together else calls

    def _aggregation_weights(self, participants: list[int]) -> dict[int, float]:
        """n_k, or equal, or all on the last participant (what the released code does)."""
        if self.config.aggregation == "last":
            return {participants[-1]: 1.0}
        if self.config.aggregation == "uniform":
            return dict.fromkeys(participants, 1.0)
        return {client: float(self.num_train[client]) for client in participants}

    @cached_property
    def predictions(self) -> list[str]:
        """Names of what a client's model predicts, the one that the method is judged by first."""
        architecture = self.architectures[0]
        images = jax.ShapeDtypeStruct((1, *architecture.image_shape), np.float32)
        names: list[str] = []

        def predict(client: Tree, server: Server, images: jax.Array) -> list[jax.Array]:
            scores = self.method.predict(architecture, client, server, images)
            names.extend(scores)  # tracing a dictionary would sort its names
            return list(scores.values())

        jax.eval_shape(predict, self.store.start(0), self.server, images)
        return names

    def costs(self, participants: Sequence[int] | np.ndarray) -> list[Cost]:
        """What a visit costs each of these clients."""
        seen = [len(np.unique(self.dataset.labels[self.partition.train[client]])) for client in participants]
        return [
            self.method.cost(self.architectures[self.groups[client]], float(self.num_train[client]), classes)
            for client, classes in zip(participants, seen, strict=True)
        ]


def _folded(call: Call, tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.reshape(*call.clients.shape, *leaf.shape[1:]), tree)


def _unfolded(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), tree)


def _report(call: Call, numbers: dict[str, jax.Array], info: dict[int, dict[str, Any]]) -> None:
    for name, values in numbers.items():
        for client, value in zip(call.clients.reshape(-1), np.asarray(values).reshape(-1), strict=True):
            if client >= 0:
                info[int(client)][name] = value


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one table, padded with zeros."""
    table = np.zeros((len(rows), max(1, *(len(row) for row in rows))), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
