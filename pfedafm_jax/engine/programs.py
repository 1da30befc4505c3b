"""What a run computes with: its data on the devices, and programs that are compiled once for all
runs of one form.

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
import jax.numpy as jnp
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
"""How often programs were traced in this process, by kind: a second round, or a second seed, must
not add to it."""
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
        return slots_per_device(
            self.num_participants, num_groups, len(self.devices), self.clients_per_step
        )


class Compiled(NamedTuple):
    """Programs of all stages; `train` and `evaluate` have one for each architecture."""

    train: tuple[
        Callable, ...
    ]  # (common, totals, states, slots, trips) -> Worked, all of it [devices, …]
    evaluate: tuple[Callable, ...]  # the same; its totals are empty
    shared: (
        Callable | None
    )  # the same for clients of all architectures together, where the method has such a stage
    update: (
        Callable | None
    )  # (method, server, [Totals]) -> the next server; None: nothing is uploaded
    sum: Callable | None  # [Totals] of the stages, over the devices
    zeros: tuple[
        Totals, ...
    ]  # empty totals of `train` and, if there is one, `shared`, [devices, …]
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
            jax.tree.structure(self.method),
            self.architectures,
            len(self.dataset.images),
            self.train_rows.shape[1],
            self.test_rows.shape[1],
            self.devices,
            self.config.num_participants,
            self.clients_per_step,
            str(kernels.form()),
        )

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled programs; made here where no run of this form was before it."""
        assert not only_in_a_plain_loop(self.config), "see `reference`"
        return compiled(self.form)

    @cached_property
    def numbers(self) -> Method:
        """The method with its numbers on the devices."""
        return self.devices.replicate(jax.tree.map(_number, self.method))

    def compile(self) -> None:
        """Compiles every program; the first round does it where it was not done before."""
        _ = self.compiled

    def common(self, server: Server, t: int) -> Common:
        """What all clients of round `t` share, on the devices."""
        return Common(
            self.numbers,
            self.images,
            self.labels,
            server,
            self.key_data,
            self.devices.replicate(np.int32(t)),
        )

    @cached_property
    def predictions(self) -> list[str]:
        """Names of what a client's model predicts, the one that the method is evaluated by
        first."""
        names: list[str] = []

        def predict(key: jax.Array, images: jax.Array) -> list[jax.Array]:
            client = self.method.init_client(key, self.architectures[0])
            scores = self.method.predict(
                self.architectures[0], client, self.method.init_server(key), images
            )
            names.extend(scores)  # tracing a dictionary would sort its names
            return list(scores.values())

        images = jax.ShapeDtypeStruct((1, *self.dataset.images.shape[1:]), np.float32)
        jax.eval_shape(predict, self.key, images)
        return names

    def costs(self, clients: Sequence[int] | np.ndarray) -> list[Cost]:
        """What a visit costs each of these clients."""
        seen = [
            len(np.unique(self.dataset.labels[self.partition.train[client]])) for client in clients
        ]
        return [
            self.method.cost(
                self.architectures[self.groups[client]], float(self.num_train[client]), classes
            )
            for client, classes in zip(clients, seen, strict=True)
        ]


def build(
    config: Config, dataset: Dataset, partition: Partition, devices: Devices | None = None
) -> Programs:
    """Binds settings and data; nothing is compiled yet."""
    devices = devices or Devices(config.devices)
    mean, std = (
        NORMALISATION["imagenet"]
        if config.normalisation == "imagenet"
        else (dataset.mean, dataset.std)
    )
    num_train = np.array([len(rows) for rows in partition.train])
    method = make_method(
        config,
        dataset.image_shape,
        dataset.num_classes,
        tuple(mean),
        tuple(std),
        num_train.tolist(),
    )
    architectures = method.architectures
    key = jax.random.key(config.seed)
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
        clients_per_step=config.clients_per_step
        or _clients_per_step(config, len(architectures), devices),
    )


def only_in_a_plain_loop(config: Config) -> list[str]:
    """Settings of a run that make clients depend on one another, as in the released code:
    `reference` has them."""
    found = ["aggregation = 'last'"] if config.aggregation == "last" else []
    if config.method == "pfedafm":
        found += [
            f"pfedafm.{name}"
            for name in ("mix_relay", "leak_momentum")
            if getattr(config.pfedafm, name)
        ]
    return found


def _clients_per_step(config: Config, num_groups: int, devices: Devices) -> int:
    """One client at a time on CPU, where a core does one product best; on GPU all that fall to a
    device."""
    return (
        1
        if devices.kind == "cpu"
        else max(1, -(-config.num_participants // (num_groups * len(devices))))
    )


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
    devices, counted = form.devices, form.method.num_leaves
    # Numbers of a method are float32 but for the seed, its last.
    numbers = [jax.ShapeDtypeStruct((), np.float32)] * (counted - 1) + [
        jax.ShapeDtypeStruct((), np.uint32)
    ]
    method: Method = jax.tree.unflatten(form.method, numbers)
    server = jax.eval_shape(init_server, method, jax.random.key(0))
    common = _common(form, method, server)

    def lower(
        kind: str,
        stage: Stage,
        architecture: Architecture | None,
        states: Tree,
        zeros: Totals,
        slots: Slots,
    ):
        TRACED[kind] += 1
        program = over_slots(stage, architecture, form.clients_per_step)
        donate = (2,) if stage is work else ()  # trained states take the place of the old ones
        spread = devices.spread(program, in_axes=(None, 0, 0, 0, 0), donate=donate)
        return lowered(spread, common, zeros, states, slots, _spread(devices, (), jnp.int32(0)))

    def rows(num_groups: int, tree: Tree) -> Tree:
        return _spread(devices, (form.slots(num_groups),), tree)

    groups = len(form.architectures)
    slot = _slot(form)
    starts = [
        jax.eval_shape(partial(init_client, architecture=architecture), method, jax.random.key(0))
        for architecture in form.architectures
    ]
    zeros = [zero_totals(form.architectures[0], common, starts[0], slot)]
    with ThreadPoolExecutor(
        max_workers=4
    ) as pool:  # one program is traced while others are compiled
        traced, train, evaluating, shared = [], [], [], None
        for architecture, start in zip(form.architectures, starts, strict=True):
            states, slots = rows(groups, start), rows(groups, slot)
            for jobs, stage, sums in (
                (train, work, zeros[0]),
                (evaluating, evaluate, Totals({}, {})),
            ):
                traced.append(lower("train" if stage is work else "evaluate", stage, architecture, states,
                                     _spread(devices, (), sums), slots))  # fmt: skip
                jobs.append(pool.submit(traced[-1].compile))
        if method.shared_parts:
            parts = {name: starts[0][name] for name in method.shared_parts}
            zeros.append(zero_totals(None, common, parts, slot))
            traced.append(
                lower(
                    "shared",
                    work,
                    None,
                    rows(1, parts),
                    _spread(devices, (), zeros[1]),
                    rows(1, slot),
                )
            )
            shared = pool.submit(traced[-1].compile)
        update, sum_ = _server_programs(form, pool, method, server, zeros)
        return Compiled(
            tuple(job.result() for job in train),
            tuple(job.result() for job in evaluating),
            shared.result() if shared else None,
            update.result() if update else None,
            sum_.result() if sum_ else None,
            tuple(devices.split(_zeros(_spread(devices, (), totals))) for totals in zeros),
            tuple(dict.fromkeys(name for program in traced for name in program.out_info.info)),
        )


def _server_programs(
    form: Form, pool: ThreadPoolExecutor, method: Method, server: Server, totals: list[Totals]
) -> tuple[Future | None, Future | None]:
    """The update of the server and the sum over the devices before it, where anything is
    uploaded."""
    if not jax.tree.leaves(totals):
        return None, None
    devices = form.devices

    def update(method: Method, server: Server, totals: list[Totals]) -> Server:
        TRACED["update"] += 1
        numerator = {name: part for stage in totals for name, part in stage.numerator.items()}
        weight = {name: part for stage in totals for name, part in stage.weight.items()}
        return method.server_update(server, average(server, numerator, weight))

    spread = devices.spread(sum_over_devices, in_axes=(0,), out_axes=None)
    summed = jax.jit(update).lower(*devices.replicate(_zeros((method, server, totals))))
    return pool.submit(summed.compile), pool.submit(
        lowered(spread, _spread(devices, (), totals)).compile
    )


def _number(value: Any) -> np.ndarray:
    return np.asarray(value, np.uint32 if isinstance(value, np.unsignedinteger) else np.float32)


def _spread(devices: Devices, rows: tuple[int, ...], tree: Tree) -> Tree:
    """Shapes with the devices, and so many rows on each, in front."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((len(devices), *rows, *leaf.shape), leaf.dtype), tree
    )


def _zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), tree)


def _common(form: Form, method: Method, server: Server) -> Common:
    image = form.architectures[0].image_shape
    struct: Any = jax.ShapeDtypeStruct
    key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return Common(
        method, struct((form.num_images, *image), np.uint8), struct((form.num_images,), np.int32), server, key, struct((), np.int32)
    )  # fmt: skip


def _slot(form: Form) -> Slots:
    def struct(*shape: int, dtype: Any = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    train, test = struct(form.train_width), struct(form.test_width)
    return Slots(struct(), train, struct(), test, struct(), struct(dtype=np.float32))
