"""A federation of clients and its rounds."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.data import NORMALISATION, Dataset, Partition
from pfedafm_jax.engine.devices import Devices, sum_over_devices
from pfedafm_jax.engine.program import Common, Slots, judging_program, training_program, zero_total
from pfedafm_jax.engine.schedule import Call, schedule, slots_per_device
from pfedafm_jax.engine.store import ClientStore
from pfedafm_jax.methods import find_method
from pfedafm_jax.methods.base import Cost, Method, Server, average
from pfedafm_jax.models import Architecture, describe
from pfedafm_jax.training import LocalTraining

Tree = Any
START_KEY, SERVER_KEY = 2**31 - 1, 2**31 - 2  # rounds are numbered far below


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

    `groups[client]` is the number of the client's architecture; `server` lives on the devices, clients in `store`.
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
        image_shape: tuple[int, int, int] = dataset.images.shape[1:]  # type: ignore[assignment]

        def architecture(name: str) -> Architecture:
            return describe(name, dataset.num_classes, image_shape, config.feature_size, config.initialisation)

        self.architectures = [architecture(name) for name in config.architectures]
        mean, std = NORMALISATION["imagenet"] if config.normalisation == "imagenet" else (dataset.mean, dataset.std)
        self.num_train = np.array([len(rows) for rows in partition.train])
        how = LocalTraining.of(config, tuple(mean), tuple(std), self.num_train.tolist())
        self.method: Method = find_method(config.method)(config, how, architecture(config.shared_extractor))
        self.groups = np.arange(config.num_clients) % len(self.architectures)

        self.key = jax.random.key(config.seed)
        start_key = jax.random.fold_in(self.key, START_KEY)
        init = jax.jit(self.method.init_client, static_argnums=1)  # as one program: op by op it takes many seconds

        def start(number: int, group: int) -> Tree:
            return jax.device_get(init(jax.random.fold_in(start_key, number), self.architectures[group]))

        with ThreadPoolExecutor() as pool:
            server = pool.submit(jax.jit(self.method.init_server), jax.random.fold_in(self.key, SERVER_KEY))
            starts = list(pool.map(start, range(len(self.architectures)), range(len(self.architectures))))
        self.server: Server = self.devices.replicate(jax.device_get(server.result()))

        def own_start(client: int) -> Tree:
            return start(len(self.architectures) + client, self.groups[client])

        self.store = ClientStore(
            starts,
            self.groups,
            place=config.store,
            folder=store_folder,
            start_of=None if config.same_start else own_start,
        )
        self._images = self.devices.replicate(dataset.images)
        self._labels = self.devices.replicate(dataset.labels.astype(np.int32))
        self._tables = _padded(partition.train), _padded(partition.test)
        self._num_test = np.array([len(rows) for rows in partition.test])

        num_groups = len(self.architectures)
        self.chunk = config.clients_per_step or self._automatic_chunk()
        self.slots = slots_per_device(config.num_participants, num_groups, len(self.devices), self.chunk)
        self.traces = 0  # how often a program was traced: a round must not add to it
        self._programs: dict[str, list[Callable]] = {}

    def _automatic_chunk(self) -> int:
        """One client at a time on CPU, where a core does one product best; on GPU all that fall to a device."""
        if self.devices.kind == "cpu":
            return 1
        return max(1, -(-self.config.num_participants // (len(self.architectures) * len(self.devices))))

    # ------------------------------------------------------------------------------------------ programs

    def _counted(self, function: Callable) -> Callable:
        def traced(*arguments):
            self.traces += 1
            return function(*arguments)

        return traced

    def compile(self) -> None:
        """Compiles every program, several at a time; the first round does it where it was not done before."""
        if self._programs:
            return
        common, total = self._common(0), self._zero()
        spread = self.devices.spread
        jobs = []
        for group, architecture in enumerate(self.architectures):
            states, slots, trips = self._slots(self._empty_call(group), {})
            train = spread(
                self._counted(training_program(self.method, architecture, self.chunk)), (None, 0, 0, 0, 0), donate=(2,)
            )
            judge = spread(self._counted(judging_program(self.method, architecture, self.chunk)), (None, 0, 0, 0))
            jobs += [train.lower(common, total, states, slots, trips), judge.lower(common, states, slots, trips)]

        def combine(server: Server, total: Tree) -> Server:
            return self.method.server_update(server, average(server, *sum_over_devices(total)))

        jobs.append(spread(self._counted(combine), (None, 0), out_axes=None).lower(self.server, total))
        with ThreadPoolExecutor(max_workers=8) as pool:
            compiled = list(pool.map(lambda job: job.compile(), jobs))
        self._programs = {"train": compiled[0:-1:2], "judge": compiled[1:-1:2], "combine": compiled[-1:]}

    def _common(self, round_index: int) -> Common:
        key = self.devices.replicate(jax.random.key_data(self.key))
        return Common(
            self._images, self._labels, self.server, key, self.devices.replicate(np.int32(round_index))
        )

    def _zero(self) -> Tree:
        common = Common(self._images, self._labels, self.server, jax.random.key_data(self.key), np.int32(0))
        states, slots, _ = self._slots(self._empty_call(0), {})
        slot = jax.tree.map(lambda leaf: leaf[0, 0], slots._replace(state=states))
        total = zero_total(self.method, self.architectures[0], common, slot)
        return self.devices.split(jax.tree.map(lambda leaf: np.zeros((len(self.devices), *leaf.shape), leaf.dtype), total))

    def _empty_call(self, group: int) -> Call:
        clients = np.full((len(self.devices), self.slots), -1)
        return Call(group, clients, np.zeros(len(self.devices), np.int32))

    def _slots(self, call: Call, weights: dict[int, float]) -> tuple[Tree, Slots, np.ndarray]:
        """The states, the data and the number of chunks of a call's clients, as arrays `[devices, slots, …]`."""
        shape, flat = call.clients.shape, call.clients.reshape(-1)
        present = flat >= 0
        train, test = self._tables

        def fold(array: np.ndarray) -> np.ndarray:
            return array.reshape(*shape, *array.shape[1:])

        def count(sizes: np.ndarray) -> np.ndarray:
            return fold(np.where(present, sizes[flat], 0).astype(np.int32))

        slots = Slots(
            client=fold(np.maximum(flat, 0).astype(np.int32)),
            train=fold(train[flat]),
            num_train=count(self.num_train),
            test=fold(test[flat]),
            num_test=count(self._num_test),
            weight=fold(np.array([weights.get(int(client), 0.0) for client in flat], np.float32)),
        )
        return jax.tree.map(fold, self.store.read(call.group, flat)), slots, call.trips

    # ------------------------------------------------------------------------------------------ rounds

    def run_round(self, round_index: int, participants: Sequence[int] | np.ndarray | None = None) -> RoundResult:
        """One communication round: local work of the participants, then the average becomes the next broadcast."""
        self.compile()
        if participants is None:
            config = self.config
            participants = draw_participants(config.seed, round_index, config.num_clients, config.num_participants)
        order = [int(client) for client in participants]
        weights = self._aggregation_weights(order)
        total, info = self._zero_total, {client: {} for client in order}
        batches = [[client] for client in order] if self.method.sequential else [order]
        for batch in batches:
            total = self._train(round_index, batch, weights, total, info)
        self.server = self._programs["combine"][0](self.server, total)
        jax.block_until_ready(self.server)  # collectives of two rounds must never be under way together
        names = info[order[0]].keys()
        return RoundResult(np.array(order), {name: np.array([info[c][name] for c in order]) for name in names})

    def _train(
        self, round_index: int, clients: list[int], weights: dict[int, float], total: Tree, info: dict[int, dict]
    ) -> Tree:
        """Local work of these clients; adds to `total`, writes states to the store and numbers to `info`."""
        common, pending = self._common(round_index), []
        for call in self._schedule(clients, self.work(self.num_train)):
            states, slots, trips = self._slots(call, weights)
            states, total, numbers, relay = self._programs["train"][call.group](common, total, states, slots, trips)
            pending.append((call, states, numbers))
            if self.method.sequential:
                device = int(np.argmax(trips))
                relay = jax.tree.map(lambda leaf, device=device: np.asarray(leaf)[device], relay)
                self.server = {**self.server, "relay": self.devices.replicate(relay)}
        for call, states, numbers in pending:
            flat = call.clients.reshape(-1)
            self.store.write(call.group, flat, jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:]), states))
            for name, values in numbers.items():
                for client, value in zip(flat, np.asarray(values).reshape(-1), strict=True):
                    if client >= 0:
                        info[int(client)][name] = value
        return total

    def evaluate(self, clients: Sequence[int] | np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Accuracy of clients (all of them by default) as they are now, with the current broadcast: name → `[clients]`."""
        self.compile()
        order = list(range(self.config.num_clients)) if clients is None else [int(client) for client in clients]
        common, scores, pending = self._common(0), {}, []
        for call in self._schedule(order, self.work(self._num_test)):
            states, slots, trips = self._slots(call, {})
            pending.append((call, self._programs["judge"][call.group](common, states, slots, trips)))
            if len(pending) > 1:  # memory stays that of two calls, however many clients there are
                self._collect(*pending.pop(0), scores)
        for call, result in pending:
            self._collect(call, result, scores)
        return {name: np.array([values[client] for client in order]) for name, values in scores.items()}

    @staticmethod
    def _collect(call: Call, result: dict[str, jax.Array], scores: dict[str, dict[int, float]]) -> None:
        for name, values in result.items():
            for client, value in zip(call.clients.reshape(-1), np.asarray(values).reshape(-1), strict=True):
                if client >= 0:
                    scores.setdefault(name, {})[int(client)] = value

    def _schedule(self, clients: list[int], work: np.ndarray) -> list[Call]:
        return schedule(
            clients, self.groups, work, num_devices=len(self.devices), chunk=self.chunk, slots=self.slots
        )

    def work(self, samples: np.ndarray) -> np.ndarray:
        """Work of each client, for balance: its samples times the cost of its models."""
        macs = np.array([architecture.macs for architecture in self.architectures], float) + self.method.shared.macs
        return samples * macs[self.groups]

    def _aggregation_weights(self, participants: list[int]) -> dict[int, float]:
        """n_k, or equal, or all on the last participant (what the released code does)."""
        if self.config.aggregation == "last":
            return {participants[-1]: 1.0}
        if self.config.aggregation == "uniform":
            return dict.fromkeys(participants, 1.0)
        return {client: float(self.num_train[client]) for client in participants}

    @property
    def _zero_total(self) -> Tree:
        if not hasattr(self, "_empty_total"):
            self._empty_total = self._zero()
        return self._empty_total

    def costs(self, participants: Sequence[int] | np.ndarray) -> list[Cost]:
        """What a visit costs each of these clients."""
        seen = [len(np.unique(self.dataset.labels[self.partition.train[client]])) for client in participants]
        return [
            self.method.cost(self.architectures[self.groups[client]], float(self.num_train[client]), classes)
            for client, classes in zip(participants, seen, strict=True)
        ]


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one table, padded with zeros."""
    table = np.zeros((len(rows), max(1, *(len(row) for row in rows))), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
