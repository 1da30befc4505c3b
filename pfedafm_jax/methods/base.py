"""The contract of a method: what one client and the server do; the engine makes many clients of it.

A method says what a client keeps (`init_client`), what the server broadcasts (`init_server`), what
a client does with both (`client_update`) and what is evaluated (`predict`). It never loops over
clients, averages or evaluates by itself. Types stand here, once for all methods.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.config import Config
from pfedafm_jax.models import Architecture
from pfedafm_jax.pytrees import register
from pfedafm_jax.settings import MethodSettings
from pfedafm_jax.training import ClientData, LocalTraining

Tree = Any
Client = dict[str, Tree]
Server = dict[str, Tree]


class Update(NamedTuple):
    """What a client returns after local work."""

    client: Client  # what it keeps until its next visit (`shared_update` leaves it empty)
    upload: dict[str, Tree]  # parts of the server state, as this client would have them
    weight: dict[str, jax.Array]  # of each part in the average: a number, or one a leading row
    info: dict[
        str, jax.Array
    ]  # numbers for the records; `loss` is required; `floats_up` … replace those of `cost`
    view: Server | None = None  # what it predicts with right after training; None: the broadcast


@dataclass(frozen=True)
class Cost:
    """What a visit costs one client: floats that travel, and FLOPs of the algorithm."""

    floats_up: float
    floats_down: float
    flops: float


@dataclass(frozen=True)
class Method:
    """Base of all methods: what they know of a run, and the defaults of the contract.

    A pytree: the numbers of `settings` and `training`, `rounds` and `seed` are data of the compiled
    programs; the rest decides what is compiled.
    """

    settings: Any  # the method's own, a `Settings`
    training: LocalTraining
    shared: Architecture  # what clients share where a method shares a network
    architectures: tuple[Architecture, ...]  # those of the clients
    aggregation: str  # weights of the average: samples, or uniform
    initialisation: str  # of weights: torch or flax
    rounds: float
    seed: Any

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    # Whether every client has the shared extractor, whatever its architecture.
    one_network: ClassVar[bool] = False
    # A frozen dataclass of the method's own settings.
    Settings: ClassVar[type[MethodSettings]] = MethodSettings

    def __init_subclass__(cls):
        # Each method has a `Settings` of its own, with a learning rate at least, that knows whose
        # it is.
        if "Settings" not in vars(cls):
            place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Settings"}
            kind = type("Settings", (cls.Settings,), {"__doc__": "No more settings.", **place})
            cls.Settings = dataclass(frozen=True)(kind)
        if isinstance(cls.Settings, type) and issubclass(cls.Settings, MethodSettings):
            cls.Settings.method = cls.name
        register(cls, lambda kind: ("settings", "training", "rounds", "seed"))

    @classmethod
    def of(
        cls,
        config: Config,
        training: LocalTraining,
        shared: Architecture,
        architectures: Sequence[Architecture],
    ) -> Self:
        """The method with the settings of `config`."""
        return cls(
            settings=replace(config.of(cls.Settings), learning_rate=None),  # that is in `training`
            training=training,
            shared=shared,
            architectures=tuple(architectures),
            aggregation=config.aggregation,
            initialisation=config.initialisation,
            rounds=float(config.rounds),
            seed=np.uint32(config.seed),
        )

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """Parts of a client's state, alike in all architectures, that `shared_update` reads."""
        return ()  # there is no such stage

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        """What a client of this architecture keeps, at the start."""
        raise TypeError(f"{type(self).__name__} must define init_client")

    def init_server(self, key: jax.Array) -> Server:
        """What the server broadcasts in the first round."""
        return {}

    def client_update(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
        weight: jax.Array,
    ) -> Update:
        """A participant's local work in one round; `weight` is its weight in the average, n_k."""
        raise TypeError(f"{type(self).__name__} must define client_update")

    def shared_update(
        self, key: jax.Array, client: Client, server: Server, data: ClientData, weight: jax.Array
    ) -> Update:
        """A second stage after `client_update` that trains the same network at every client, so
        that participants of all architectures go through one program; `client` holds the
        `shared_parts` only."""
        raise TypeError(f"{type(self).__name__} must define shared_update")

    def server_update(self, server: Server, averaged: dict[str, Tree]) -> Server:
        """The next broadcast, from the average of the uploads."""
        return {**server, **averaged}

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        """Class scores `[batch, classes]` by name; the first is what the method is evaluated by."""
        raise TypeError(f"{type(self).__name__} must define predict")

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        """What one visit costs a client with this many training samples and classes."""
        raise TypeError(f"{type(self).__name__} must define cost")

    def training_cost(self, floats: float, macs: float, num_train: float) -> Cost:
        """That of sending and receiving `floats` and training a model of `macs` multiply-adds."""
        # A step is one pass forward and two backward; a multiply-add is two operations.
        return Cost(floats, floats, 2.0 * 3 * macs * num_train * self.training.local_epochs)


# ------------------------------------------------------------------------------ the one aggregation


def _spread(weight: jax.Array, leaf: jax.Array) -> jax.Array:
    """A weight for the leading axes of a leaf, shaped to multiply it."""
    return weight.reshape(weight.shape + (1,) * (leaf.ndim - weight.ndim))


def weigh(upload: dict[str, Tree], weight: dict[str, jax.Array]) -> dict[str, Tree]:
    """Numerators of the average: each part times its weight.

    >>> weigh({"rows": jnp.ones((2, 2))}, {"rows": jnp.array([3.0, 0.0])})["rows"]
    Array([[3., 3.],
           [0., 0.]], dtype=float32)
    """

    def times(share: jax.Array, part: Tree) -> Tree:
        return jax.tree.map(lambda leaf: leaf * _spread(share, leaf), part)

    return {name: times(weight[name], part) for name, part in upload.items()}


def average(
    server: Server, numerator: dict[str, Tree], weight: dict[str, jax.Array]
) -> dict[str, Tree]:
    """Sums over clients → weighted means (Eq. 11); what nobody sent keeps its old value.

    >>> old, sums = {"rows": jnp.array([[7.0], [7.0]])}, {"rows": jnp.array([[6.0], [0.0]])}
    >>> average(old, numerator=sums, weight={"rows": jnp.array([3.0, 0.0])})["rows"]
    Array([[2.],
           [7.]], dtype=float32)
    """

    def mean(name: str, total: jax.Array, old: jax.Array) -> jax.Array:
        share = _spread(weight[name], total)
        return jnp.where(share > 0, total / jnp.where(share > 0, share, 1.0), old)

    return {
        name: jax.tree.map(lambda total, old, name=name: mean(name, total, old), part, server[name])
        for name, part in numerator.items()
    }
