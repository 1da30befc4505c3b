"""What a run computes with: its data on the devices, and its compiled programs.

`Programs` holds nothing that a round changes. What is compiled depends on `Form` alone and is kept
for the process, so that runs of other seeds share it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from pfedafm_jax import kernels
from pfedafm_jax.config import Config
from pfedafm_jax.data import NORMALISATION, Dataset, Partition
from pfedafm_jax.engine.devices import Devices, lowered, sum_over_devices
from pfedafm_jax.engine.processes import Processes
from pfedafm_jax.engine.schedule import slots_per_device
from pfedafm_jax.engine.visit import (
    Common,
    Slots,
    Stage,
    Totals,
    evaluate,
    over_slots,
    work,
    zero_totals,
)
from pfedafm_jax.methods import make_method
from pfedafm_jax.methods.base import Cost, Method, Server, average
from pfedafm_jax.models import Architecture
from pfedafm_jax.training import table_width

Tree = Any
TRACED: Counter[str] = Counter()
"""How often programs were traced, by kind: a second round, or a second seed, must not add to it."""
KEPT = 8  # forms of a run whose programs are kept


class Form(NamedTuple):
    """All that the compiled programs of a run depend on."""

    method: Any  # the tree structure of the method but for its numbers
    architectures: tuple[Architecture, ...]
    num_images: int
    train_width: int  # longest row of the tables of clients' data
    test_width: int
    devices: Devices
    num_participants: int
    clients_per_step: int
    kernels: str  # which form of the kernels is traced

    def slots(self, num_groups: int) -> int:
        """Slots of one device where participants fall into so many groups."""
        sizes = self.num_participants, num_groups, len(self.devices), self.clients_per_step
        return slots_per_device(*sizes)


class Compiled(NamedTuple):
    """Programs of all stages; `train` and `evaluate` have one for each architecture.

    A stage is `(common, totals, states, slots, trips) -> Worked`, all of it `[devices, …]`.
    """

    train: tuple[Callable, ...]
    evaluate: tuple[Callable, ...]  # its totals are empty
    shared: Callable | None  # for clients of all architectures together, if there is such a stage
    update: Callable | None  # (method, server, [Totals]) -> the next server; None: no uploads
    sum: Callable | None  # [Totals] of the stages, over the devices
    zeros: tuple[Totals, ...]  # empty totals of `train` and, if there is one, `shared`
    numbers: tuple[str, ...]  # names of what is reported for each participant


@dataclass(frozen=True, eq=False)
class Programs:
    """A run's settings, its data on the devices, and its compiled programs.

    Attributes:
        architectures: those of the clients; `groups[client]` is the number of a client's own, int
            `[clients]`.
        num_train, num_test: samples of each client, int `[clients]`.
        key: the random key of the run.
        images, labels, key_data: on every device.
        train_rows, test_rows: rows of the dataset by client, int32 `[clients, width]`, padded with
            zeros.
    """

    config: Config
    dataset: Dataset
    partition: Partition
    devices: Devices
    processes: Processes
    method: Method
    architectures: tuple[Architecture, ...]
    groups: np.ndarray
    num_train: np.ndarray
    num_test: np.ndarray
    key: jax.Array
    images: jax.Array
    labels: jax.Array
    key_data: jax.Array
    train_rows: np.ndarray
    test_rows: np.ndarray
    clients_per_step: int

    @property
    def form(self) -> Form:
        """What the compiled programs depend on."""
        return Form(
            method=jax.tree.structure(self.method),
            architectures=self.architectures,
            num_images=len(self.dataset.images),
            train_width=self.train_rows.shape[1],
            test_width=self.test_rows.shape[1],
            devices=self.devices,
            num_participants=self.config.num_participants,
            clients_per_step=self.clients_per_step,
            kernels=str(kernels.form()),
        )

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled programs; made here where no run of this form was before it."""
        assert not only_in_a_plain_loop(self.config), "see `reference`"
        return compiled(self.form)

    def compile(self) -> None:
        """Compiles every program; the first round does it where it was not done before."""
        _ = self.compiled

    @cached_property
    def numbers(self) -> Method:
        """The method with its numbers on the devices."""
        return self.devices.replicate(jax.tree.map(_number, self.method))

    @cached_property
    def macs(self) -> np.ndarray:
        """Multiply-adds of each client's model for one image, float `[clients]`."""
        return np.array([one.macs for one in self.architectures], float)[self.groups]

    def common(self, server: Server, t: int) -> Common:
        """What all clients of round `t` share, on the devices."""
        number = self.devices.replicate(np.int32(t))
        return Common(self.numbers, self.images, self.labels, server, self.key_data, number)

    @cached_property
    def predictions(self) -> list[str]:
        """Names of what a client's model predicts, the one the method is evaluated by first."""
        names: list[str] = []
        method, architecture = self.method, self.architectures[0]

        def predict(key: jax.Array, images: jax.Array) -> list[jax.Array]:
            client, server = method.init_client(key, architecture), method.init_server(key)
            scores = method.predict(architecture, client, server, images)
            names.extend(scores)  # tracing a dictionary would sort its names
            return list(scores.values())

        images = jax.ShapeDtypeStruct((1, *self.dataset.images.shape[1:]), np.float32)
        jax.eval_shape(predict, self.key, images)
        return names

    def costs(self, clients: Sequence[int] | np.ndarray) -> list[Cost]:
        """What a visit costs each of these clients."""

        def cost(client: int) -> Cost:
            seen = len(np.unique(self.dataset.labels[self.partition.train[client]]))
            architecture = self.architectures[self.groups[client]]
            return self.method.cost(architecture, float(self.num_train[client]), seen)

        return [cost(client) for client in clients]


def build(
    config: Config, dataset: Dataset, partition: Partition, devices: Devices | None = None
) -> Programs:
    """Binds settings and data; nothing is compiled yet."""
    devices = devices or Devices(config.devices)
    mean, std = dataset.mean, dataset.std
    if config.normalisation == "imagenet":
        mean, std = NORMALISATION["imagenet"]
    num_train = np.array([len(rows) for rows in partition.train])
    about = dataset.image_shape, dataset.num_classes, tuple(mean), tuple(std)
    method = make_method(config, *about, num_train.tolist())
    architectures = method.architectures
    key = jax.random.key(config.seed)
    # One client at a time on CPU, where a core does one product best; on GPU all of a device's.
    share = -(-config.num_participants // (len(architectures) * len(devices)))
    automatic = 1 if devices.kind == "cpu" else max(1, share)
    return Programs(
        config=config,
        dataset=dataset,
        partition=partition,
        devices=devices,
        processes=Processes(len(devices)),
        method=method,
        architectures=architectures,
        groups=np.arange(config.num_clients) % len(architectures),
        num_train=num_train,
        num_test=np.array([len(rows) for rows in partition.test]),
        key=key,
        images=devices.replicate(dataset.images),
        labels=devices.replicate(dataset.labels.astype(np.int32)),
        key_data=devices.replicate(np.asarray(jax.random.key_data(key))),
        train_rows=_padded(partition.train),
        test_rows=_padded(partition.test),
        clients_per_step=config.clients_per_step or automatic,
    )


def only_in_a_plain_loop(config: Config) -> list[str]:
    """Settings that make clients depend on one another, as in the released code: `reference`."""
    found = ["aggregation = 'last'"] if config.aggregation == "last" else []
    if config.method == "pfedafm":
        switches = ("mix_relay", "leak_momentum")
        found += [f"pfedafm.{name}" for name in switches if getattr(config.pfedafm, name)]
    return found


def _padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Rows of different lengths as one table."""
    table = np.zeros((len(rows), table_width([len(row) for row in rows])), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table


# ---------------------------------------------------------------------------------------- compiling


@partial(jax.jit, static_argnums=2)
def init_client(method: Method, key: jax.Array, architecture: Architecture) -> Tree:
    """A client's start as one program: op by op it takes many seconds."""
    return method.init_client(key, architecture)


@jax.jit
def init_server(method: Method, key: jax.Array) -> Server:
    """The first broadcast as one program."""
    return method.init_server(key)


@lru_cache(maxsize=KEPT)
def compiled(form: Form) -> Compiled:
    """All programs for runs of this form, several compiled at a time."""
    devices, groups, traced = form.devices, len(form.architectures), []
    # Numbers of a method are float32 but for the seed, its last.
    leaves = [_shape(dtype=np.float32)] * (form.method.num_leaves - 1) + [_shape(dtype=np.uint32)]
    method: Method = jax.tree.unflatten(form.method, leaves)
    key = jax.random.key(0)
    server = jax.eval_shape(init_server, method, key)
    images = _shape(form.num_images, *form.architectures[0].image_shape, dtype=np.uint8)
    key_data = jax.eval_shape(jax.random.key_data, key)
    common = Common(method, images, _shape(form.num_images), server, key_data, _shape())
    train, test = _shape(form.train_width), _shape(form.test_width)
    slot = Slots(_shape(), train, _shape(), test, _shape(), _shape(dtype=np.float32))
    starts = [
        jax.eval_shape(partial(init_client, architecture=architecture), method, key)
        for architecture in form.architectures
    ]
    parts = {name: starts[0][name] for name in method.shared_parts}
    zeros = [zero_totals(form.architectures[0], common, starts[0], slot)]
    zeros += [zero_totals(None, common, parts, slot)] if parts else []

    # One program is traced while others are compiled.
    with ThreadPoolExecutor(max_workers=4) as pool:

        def submit(
            kind: str, stage: Stage, architecture: Architecture | None, state: Tree, totals: Totals
        ) -> Future:
            TRACED[kind] += 1
            program = over_slots(stage, architecture, form.clients_per_step)
            donate = (2,) if stage is work else ()  # trained states take the place of the old ones
            spread = devices.spread(program, in_axes=(None, 0, 0, 0, 0), donate=donate)
            rows = form.slots(1 if architecture is None else groups)
            states, slots = _spread(devices, state, rows), _spread(devices, slot, rows)
            sums, trips = _spread(devices, totals), _spread(devices, _shape())
            traced.append(lowered(spread, common, sums, states, slots, trips))
            return pool.submit(traced[-1].compile)

        training, evaluating = [], []
        for architecture, start in zip(form.architectures, starts, strict=True):
            training.append(submit("train", work, architecture, start, zeros[0]))
            evaluating.append(submit("evaluate", evaluate, architecture, start, Totals({}, {})))
        shared = submit("shared", work, None, parts, zeros[1]) if parts else None
        update, sum_ = _server_programs(devices, pool, method, server, zeros)
        return Compiled(
            tuple(job.result() for job in training),
            tuple(job.result() for job in evaluating),
            *(job.result() if job else None for job in (shared, update, sum_)),
            zeros=tuple(devices.split(_zeros(_spread(devices, totals))) for totals in zeros),
            numbers=tuple(dict.fromkeys(name for one in traced for name in one.out_info.info)),
        )


def _server_programs(
    devices: Devices, pool: ThreadPoolExecutor, method: Method, server: Server, totals: list[Totals]
) -> tuple[Future | None, Future | None]:
    """The update of the server and the sum over the devices before it, if anything is uploaded."""
    if not jax.tree.leaves(totals):
        return None, None

    def update(method: Method, server: Server, totals: list[Totals]) -> Server:
        TRACED["update"] += 1
        numerator = {name: part for stage in totals for name, part in stage.numerator.items()}
        weight = {name: part for stage in totals for name, part in stage.weight.items()}
        return method.server_update(server, average(server, numerator, weight))

    spread = devices.spread(sum_over_devices, in_axes=(0,), out_axes=None)
    updated = jax.jit(update).lower(*devices.replicate(_zeros((method, server, totals))))
    summed = lowered(spread, _spread(devices, totals))
    return pool.submit(updated.compile), pool.submit(summed.compile)


def _number(value: Any) -> np.ndarray:
    return np.asarray(value, np.uint32 if isinstance(value, np.unsignedinteger) else np.float32)


def _shape(*shape: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def _spread(devices: Devices, tree: Tree, *rows: int) -> Tree:
    """Shapes with the devices, and so many rows on each, in front."""
    front = (len(devices), *rows)
    return jax.tree.map(lambda leaf: _shape(*front, *leaf.shape, dtype=leaf.dtype), tree)


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)
