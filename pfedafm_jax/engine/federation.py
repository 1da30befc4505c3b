"""What does not change in a run: settings, method, and what is known of the clients."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.trees import num_values
from pfedafm_jax.config.config import Config
from pfedafm_jax.data import NORMALISATION, Dataset, Partition
from pfedafm_jax.engine.programs import init_server
from pfedafm_jax.engine.state import client_start, start_number
from pfedafm_jax.engine.visit import SERVER_KEY
from pfedafm_jax.methods import make_method
from pfedafm_jax.methods.base import Cost, Method, Server
from pfedafm_jax.methods.server_optimizer import broadcast_of
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.models.batch_stats import statistics_of

Tree = Any


@dataclass(frozen=True)
class DataDescription:
    """What is known of the data without their samples; `config.json` has most of it."""

    name: str
    num_classes: int
    class_names: tuple[str, ...]
    image_shape: tuple[int, ...]  # of a sample, images or not
    dtype: str  # of a sample: uint8 (pixels), float32 (features) or int32 (token ids)
    mean: tuple[float, ...]  # for normalisation: per channel, or per feature; none of token ids
    std: tuple[float, ...]
    digest: str  # sha256 of all samples, or what else tells these data from others
    source: str  # one line for people: where the data come from
    partition: str  # one line for people: how the clients share them
    split: str  # sha256 of which client has which samples
    sample: str = ""  # one line for people: what a sample is
    noun: str = "images"  # what samples are called
    num_users: int = 0  # whose samples they are, where the data say so
    at_nodes: bool = False  # whether the samples are with nodes of a network, and none of them here

    @classmethod
    def of(cls, dataset: Dataset, partition: Partition) -> "DataDescription":
        """The description of a dataset that clients share like this."""
        return cls(
            name=dataset.name,
            num_classes=dataset.num_classes,
            class_names=tuple(dataset.class_names),
            image_shape=dataset.image_shape,
            dtype=dataset.dtype,
            mean=tuple(dataset.mean),
            std=tuple(dataset.std),
            digest=dataset.digest,
            source=dataset.source,
            partition=partition.about,
            split=split_digest(partition),
            sample=dataset.description,
            noun=dataset.noun,
            num_users=0 if dataset.users is None else int(dataset.users.max()) + 1,
        )


def split_digest(partition: Partition) -> str:
    """sha256 (hexadecimal) that changes with any row of any client."""
    digest = hashlib.sha256()
    for rows in (*partition.train, *partition.test, *partition.validation):
        digest.update(f"{len(rows)} ".encode())
        digest.update(np.ascontiguousarray(rows, np.int32).tobytes())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class Federation:
    """What does not change in a run: settings, method, and what is known of the clients.

    It has no samples and no devices: those are an `Executor`'s. A run over a network has one as
    well (`deploy.roster.federation_of`).

    Attributes:
        groups: int `[clients]`: index of each client's architecture in `architectures`.
        num_train, num_test: int `[clients]`: how many samples each client has.
        num_classes_seen: int `[clients]`: of how many classes a client has training samples, which
            the cost of its visits may depend on.
        num_classes_held: int `[clients]`: of how many it has samples of any kind.
    """

    config: Config
    method: Method
    data: DataDescription
    groups: np.ndarray
    num_train: np.ndarray
    num_test: np.ndarray
    num_classes_seen: np.ndarray
    num_classes_held: np.ndarray

    @classmethod
    def of_partition(cls, config: Config, dataset: Dataset, partition: Partition) -> "Federation":
        """A federation of simulated clients.

        Args:
            config: the settings; names in them have been looked up, see `check_names`.
            dataset: of which only a description is kept.
            partition: which client has which of its samples.
        """
        num_train = np.array([len(rows) for rows in partition.train])
        data = DataDescription.of(dataset, partition)
        method = method_for(config, data, num_train.tolist())
        parts = zip(partition.train, partition.test, partition.validation, strict=True)
        held = [np.concatenate(rows) for rows in parts]
        return cls(
            config=config,
            method=method,
            data=data,
            groups=np.arange(config.num_clients) % len(method.architectures),
            num_train=num_train,
            num_test=np.array([len(rows) for rows in partition.test]),
            num_classes_seen=_num_classes(dataset.labels, partition.train),
            num_classes_held=_num_classes(dataset.labels, held),
        )

    @property
    def architectures(self) -> tuple[Architecture, ...]:
        """The clients' architectures."""
        return self.method.architectures

    @cached_property
    def run_key(self) -> jax.Array:
        """The random key of the run, from which all others are made."""
        return jax.random.key(self.config.seed)

    @cached_property
    def macs(self) -> np.ndarray:
        """Multiply-adds of each client's model for one sample, float `[clients]`."""
        return np.array([one.macs for one in self.architectures], float)[self.groups]

    @cached_property
    def prediction_names(self) -> list[str]:
        """Names of the method's predictions; the first is the one it is evaluated by."""
        names: list[str] = []
        method, architecture = self.method, self.architectures[0]

        def predict(key: jax.Array, images: jax.Array) -> list[jax.Array]:
            client, server = method.init_client(key, architecture), method.init_server(key)
            scores = method.predict(architecture, client, server, images)
            names.extend(scores)  # in their own order: tracing sorts a dictionary's names
            return list(scores.values())

        jax.eval_shape(predict, self.run_key, architecture.inputs(1))
        return names

    # ---------------------------------------------------------------------------- the first round

    def initial_client(self, client: int) -> Tree:
        """A client's state before its first visit, as numpy arrays."""
        group = int(self.groups[client])
        number = start_number(self.config, self.method, client, group)
        return client_start(self.method, self.run_key, number, self.architectures[group])

    def initial_server(self) -> Server:
        """The server's state before the first round, as numpy arrays."""
        server_key = jax.random.fold_in(self.run_key, SERVER_KEY)
        return jax.device_get(init_server(self.method, server_key))

    # ---------------------------------------------------------------------------- costs

    @cached_property
    def statistics_sent(self) -> int:
        """Running statistics that travel each way in a visit, where they are averaged."""
        if self.method.statistics != "averaged":
            return 0
        server = jax.eval_shape(init_server, self.method, self.run_key)
        return num_values(statistics_of(broadcast_of(server)))

    def cost_of_visit(self, client: int) -> Cost:
        """What one visit of this client costs: floats sent and received, and FLOPs."""
        architecture = self.architectures[self.groups[client]]
        num_train = float(self.num_train[client])
        cost = self.method.cost(architecture, num_train, int(self.num_classes_seen[client]))
        statistics = self.statistics_sent
        return Cost(cost.floats_up + statistics, cost.floats_down + statistics, cost.flops)

    def adaptation_flops(self) -> float:
        """What adapting all clients costs before they are judged, see `Method.adapt`."""
        clients = zip(self.groups, self.num_train, strict=True)
        return sum(
            self.method.adaptation_flops(self.architectures[group], float(num_train))
            for group, num_train in clients
        )


def _num_classes(labels: np.ndarray, rows: Sequence[np.ndarray]) -> np.ndarray:
    """How many classes these rows of each client are of, int `[clients]`."""
    return np.array([np.count_nonzero(np.bincount(labels[own])) for own in rows])


def method_for(config: Config, data: DataDescription, num_train: Sequence[int]) -> Method:
    """The method of a run on such data, whose clients have `num_train` training samples."""
    mean = data.mean
    std = data.std
    if config.normalisation == "imagenet":
        mean, std = NORMALISATION["imagenet"]
    return make_method(
        config, data.image_shape, data.num_classes, tuple(mean), tuple(std), num_train, data.dtype
    )
