"""What a run computes with: its settings, its data on the devices, and its compiled programs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.base.trees import as_numbers, num_values
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import NORMALISATION, Dataset, Partition
from pfedafm_jax.engine.devices import Devices
from pfedafm_jax.engine.hosts import Processes
from pfedafm_jax.engine.programs import Compiled, Form, compiled, shapes_of
from pfedafm_jax.engine.transfers import Buffers
from pfedafm_jax.engine.visit import Common
from pfedafm_jax.methods import make_method
from pfedafm_jax.methods.base import Cost, Method, Server
from pfedafm_jax.models import kernels
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.batch_stats import statistics_of
from pfedafm_jax.training.batches import table_width

Tree = Any


@dataclass(frozen=True, eq=False)
class Programs:
    """A run's settings, its data on the devices, and its compiled programs: all that stays fixed.

    Attributes:
        architectures: those of the clients.
        groups: the index of each client's architecture, int `[clients]`.
        num_train, num_test: numbers of samples of each client, int `[clients]`.
        key: the random key of the run.
        images, labels, key_data: on every device.
        train_rows, test_rows: each client's rows of the dataset, int32 `[clients, width]`, padded
            with zeros.
        lockstep: whether a device trains all its clients at once, see `programs.py`.
        only: names of the programs to compile; empty: all.
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
    lockstep: bool
    only: tuple[str, ...] = ()

    @property
    def form(self) -> Form:
        """Everything that the compiled programs depend on."""
        return Form(
            method=jax.tree.structure(self.method),
            architectures=self.architectures,
            num_images=self.images.shape[0],
            train_width=self.train_rows.shape[1],
            test_width=self.test_rows.shape[1],
            devices=self.devices,
            num_participants=self.config.num_participants,
            lockstep=self.lockstep,
            clients_per_step=self.config.clients_per_step,
            precision=self.config.precision,
            kernels=str(kernels.implementation()),
            only=self.only,
        )

    @cached_property
    def compiled(self) -> Compiled:
        """The compiled programs, shared with other runs of this form."""
        assert not self.method.in_turn, "clients of this method are trained one after the other"
        return compiled(self.form)

    def compile(self) -> None:
        """Compiles all programs now; otherwise the first round does."""
        _ = self.compiled

    @property
    def clients_per_step(self) -> int:
        """Clients that a device trains at once (of the first kind, if there are several)."""
        return self.form.step(shapes_of(self.form).kinds[0])

    @cached_property
    def kinds(self) -> np.ndarray:
        """The index of each client's kind, int `[clients]`."""
        members = [kind.members for kind in shapes_of(self.form).kinds]
        of_group = {group: number for number, own in enumerate(members) for group in own}
        return np.array([of_group[group] for group in self.groups])

    @cached_property
    def buffers(self) -> Buffers:
        """Buffers for client states on the devices, in lockstep."""
        return Buffers(self)

    @cached_property
    def method_on_devices(self) -> Method:
        """The method with its numbers on every device."""
        return self.devices.replicate(as_numbers(self.method))

    @cached_property
    def macs(self) -> np.ndarray:
        """Multiply-adds of each client's model for one image, float `[clients]`."""
        return np.array([one.macs for one in self.architectures], float)[self.groups]

    def common(self, broadcast: Server, t: int) -> Common:
        """The arguments that all clients of round `t` share, on every device."""
        number = self.devices.replicate(np.int32(t))
        method = self.method_on_devices
        return Common(method, self.images, self.labels, broadcast, self.key_data, number)

    @cached_property
    def predictions(self) -> list[str]:
        """Names of the method's predictions; the first is the one it is evaluated by."""
        names: list[str] = []
        method, architecture = self.method, self.architectures[0]

        def predict(key: jax.Array, images: jax.Array) -> list[jax.Array]:
            client, server = method.init_client(key, architecture), method.init_server(key)
            scores = method.predict(architecture, client, server, images)
            names.extend(scores)  # in their own order: tracing sorts a dictionary's names
            return list(scores.values())

        jax.eval_shape(predict, self.key, architecture.inputs(1))
        return names

    @cached_property
    def statistics_sent(self) -> int:
        """Running statistics that travel each way in a visit, where they are averaged."""
        server = shapes_of(self.form).common.server if self.method.statistics == "averaged" else {}
        return num_values(statistics_of(server))

    def adaptation_flops(self) -> float:
        """What adapting all clients costs before they are judged, see `Method.adapt`."""
        method, clients = self.method, zip(self.groups, self.num_train, strict=True)
        return sum(
            method.adaptation_flops(self.architectures[group], float(num_train))
            for group, num_train in clients
        )

    def costs(self, clients: Sequence[int] | np.ndarray) -> list[Cost]:
        """The cost of one visit of each of these clients."""

        def cost(client: int) -> Cost:
            seen = len(np.unique(self.dataset.labels[self.partition.train[client]]))
            architecture = self.architectures[self.groups[client]]
            own = self.method.cost(architecture, float(self.num_train[client]), seen)
            more = self.statistics_sent
            return Cost(own.floats_up + more, own.floats_down + more, own.flops)

        return [cost(client) for client in clients]


def build(
    config: Config, dataset: Dataset, partition: Partition, devices: Devices | None = None
) -> Programs:
    """Builds the method and copies the data to the devices; compiles nothing yet."""
    devices = devices or Devices(config.devices)
    if config.precision == "tf32" and devices.kind == "cpu":
        raise bad("precision", "tf32", "highest, bfloat16 on a CPU")
    mean, std = dataset.mean, dataset.std
    if config.normalisation == "imagenet":
        mean, std = NORMALISATION["imagenet"]
    num_train = np.array([len(rows) for rows in partition.train])
    about = dataset.image_shape, dataset.num_classes, tuple(mean), tuple(std)
    method = make_method(config, *about, num_train.tolist(), dataset.dtype)
    lockstep = config.layout == "lockstep" or (config.layout == "auto" and devices.kind != "cpu")
    if lockstep:  # the last, short batch of an epoch is padded to a full one
        size = method.training.batch_size
        method = replace(method, training=replace(method.training, rest_size=size, lockstep=True))
    architectures = method.architectures
    key = jax.random.key(config.seed)
    return Programs(
        config=config,
        dataset=dataset,
        partition=partition,
        devices=devices,
        processes=Processes(),
        method=method,
        architectures=architectures,
        groups=np.arange(config.num_clients) % len(architectures),
        num_train=num_train,
        num_test=np.array([len(rows) for rows in partition.test]),
        key=key,
        images=devices.replicate(dataset.images),
        labels=devices.replicate(dataset.labels.astype(np.int32)),
        key_data=devices.replicate(np.asarray(jax.random.key_data(key))),
        train_rows=_padded(partition.train, lockstep),
        test_rows=_padded(partition.test, lockstep),
        lockstep=lockstep,
    )


def _padded(rows: Sequence[np.ndarray], tight: bool) -> np.ndarray:
    """Rows of different lengths as one table `[clients, width]`, padded with zeros."""
    table = np.zeros((len(rows), table_width([len(row) for row in rows], tight)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    return table
