"""The contract of a method: what one client and the server do; the engine runs it for many clients.

A method says what a client keeps (`init_client`), what the server broadcasts (`init_server`), what
a client does with both (`client_update`) and what is evaluated (`predict`). It never loops over
clients, averages or evaluates itself. What it must define has a *; the rest has a default.

      the server                              one participant, in one round

    init_server                                init_client *
         │                                          │  before its first visit
         ▼                                          ▼
     broadcast ──────────── server ────────►  client_update *(key, architecture, client, server,
         ▲                                          │          data, weight) -> Update
         │                                          │
         │                                          ├─ Update.client ──► its state until it comes again
         │                                          ├─ Update.info ────► what it reports: loss, …
         │                                          ├─ Update.view ────► predict * right after training
         │                                          │                    (None: with the broadcast)
         │     upload: {part: this client's version}│
         │     weight: {part: its weight}           ▼
    server_update  ◄── average ◄── Σ weight·upload ─┤
    (or uploads_update,                             │  if there are `shared_parts`
     from single uploads)                           ▼
                                              shared_update(key, those parts, server, data, weight)
                                                       -> Update: more parts of the upload

Every `eval_every` rounds all clients `predict` on their own test samples, each with its state and
the broadcast, or with what `adapt` makes of them. A part is a named entry of a client's or of the
server's state, such as `header`. `cost` says what a visit costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.base.trees import register
from pfedafm_jax.config.config import Config
from pfedafm_jax.config.method_settings import MethodSettings, float_fields
from pfedafm_jax.methods.aggregation import average, median, weigh
from pfedafm_jax.methods.server_optimizer import MEMORY, RUNNING_MEAN, ServerOptimizer, broadcast_of
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import ClientData, LocalTraining

Tree = Any
Client = dict[str, Tree]
Server = dict[str, Tree]


# The fields of a method that are leaves, or trees of leaves; the last is the seed.
_LEAVES = ("settings", "training", "server_optimizer", "rounds", "seed")


class Update(NamedTuple):
    """What a client returns after local training."""

    client: Client  # what it keeps until its next visit (`shared_update` leaves it empty)
    upload: dict[str, Tree]  # this client's version of parts of the server's state
    weight: dict[str, jax.Array]  # of each part in the average: one number, or one per leading row
    # Numbers for the records; `loss` is required; `floats_up` … replace those of `cost`.
    info: dict[str, jax.Array]
    view: Server | None = None  # what it predicts with right after training; None: the broadcast


class Uploads(NamedTuple):
    """The uploads of a round's K participants, one per row, in the order drawn.

    Rows of participants that sent nothing, or not this part, are zeros with weight 0.
    """

    client: jax.Array  # int32 [K]: its number, or `num_clients` where nobody sent anything, so
    # that `table.at[client].set(rows)` writes no such row
    parts: dict[str, Tree]  # by name, each leaf [K, …]: `Update.upload` of both stages
    weight: dict[str, jax.Array]  # by name, [K] or, where weights are by row, [K, rows]
    key: jax.Array  # for the server's random numbers, by seed and round


@dataclass(frozen=True)
class Cost:
    """The cost of a visit for one client: floats sent and received, and the algorithm's FLOPs."""

    floats_up: float
    floats_down: float
    flops: float


@dataclass(frozen=True)
class Method:
    """Base of all methods: what they know of a run, and the defaults of the contract.

    A pytree: the numbers of `settings`, `training` and `server_optimizer`, `rounds` and `seed` are
    leaves, hence data of compiled programs; the rest is static.
    """

    settings: Any  # the method's own, a `Settings`
    training: LocalTraining
    shared: Architecture  # the shared network, if the method has one
    architectures: tuple[Architecture, ...]  # those of the clients
    num_clients: int  # of the run
    aggregation: str  # samples or uniform, weights of the average; or median
    initialisation: str  # of weights: torch or flax
    rounds: float
    seed: Any
    statistics: str = "private"  # of shared networks: each client's own, or averaged
    server_optimizer: ServerOptimizer = field(default_factory=ServerOptimizer)

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    # Whether every client has the shared extractor, whatever its architecture.
    one_network: ClassVar[bool] = False
    # Whether clients depend on one another, so that no engine can train them at once.
    in_turn: ClassVar[bool] = False
    # The method's own settings.
    Settings: ClassVar[type[MethodSettings]] = MethodSettings

    def __init_subclass__(cls):
        # Each method has its own `Settings` class, with at least a learning rate, which holds the
        # method's name.
        if "Settings" not in vars(cls):
            place = {"__module__": cls.__module__, "__qualname__": f"{cls.__qualname__}.Settings"}
            cls.Settings = type(
                "Settings", (cls.Settings,), {"__doc__": "No more settings.", **place}
            )
        if isinstance(cls.Settings, type) and issubclass(cls.Settings, MethodSettings):
            cls.Settings.method = cls.name
            register(cls.Settings, float_fields)
        register(cls, lambda kind: _LEAVES)

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
            settings=cls.settings_of(config),
            training=training,
            shared=shared,
            architectures=tuple(architectures),
            num_clients=config.num_clients,
            aggregation=config.aggregation,
            initialisation=config.initialisation,
            rounds=float(config.rounds),
            seed=np.uint32(config.seed),
            statistics=config.statistics,
            server_optimizer=ServerOptimizer.of(config),
        )

    @classmethod
    def settings_of(cls, config: Config) -> MethodSettings:
        """The method's own settings in `config`, without the learning rate: `training` has that."""
        values = dict(config.of(cls.Settings)) | {"learning_rate": None}
        return cls.Settings(**values)

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        """Parts of the broadcast that are weights of networks, averaged over clients: what a server
        optimizer moves."""
        return ()

    @property
    def trains_on_the_server(self) -> bool:
        """Whether the server makes something of its own of single uploads."""
        return type(self).uploads_update is not Method.uploads_update

    @property
    def sees_uploads(self) -> bool:
        """Whether the server needs single uploads instead of their sums."""
        return self.trains_on_the_server or self.aggregation == "median"

    @property
    def adapts(self) -> bool:
        """Whether a client is adapted to its data before it is judged, see `adapt`."""
        return False

    @property
    def counts_missed(self) -> bool:
        """Whether a client's next visit reports the floats of a broadcast that it did not use,
        since it dropped out of that round."""
        return False

    @property
    def shared_parts(self) -> tuple[str, ...]:
        """Parts of a client's state that `shared_update` reads, with the same shapes in all
        architectures; empty: there is no such stage."""
        return ()

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        """The initial state of a client of this architecture."""
        raise TypeError(f"{type(self).__name__} must define init_client")

    def init_server(self, key: jax.Array) -> Server:
        """The first broadcast."""
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
        """A participant's local training; `weight` is its weight in the average, such as n_k."""
        raise TypeError(f"{type(self).__name__} must define client_update")

    def shared_update(
        self, key: jax.Array, client: Client, server: Server, data: ClientData, weight: jax.Array
    ) -> Update:
        """A second stage after `client_update` that trains the same network for every client, so
        that participants of all architectures share one program; `client` has only the
        `shared_parts`."""
        raise TypeError(f"{type(self).__name__} must define shared_update")

    def adapt(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
    ) -> tuple[Client, Server]:
        """What a client is judged with, if the method `adapts`: its state and the broadcast after a
        last step on its own training data. Neither is kept."""
        return client, server

    def adaptation_flops(self, architecture: Architecture, num_train: float) -> float:
        """The FLOPs of `adapt` for a client with this many training samples."""
        return 0.0

    def server_update(self, server: Server, averaged: dict[str, Tree]) -> Server:
        """The next broadcast, from the average of the uploads."""
        return {**server, **averaged}

    def uploads_update(self, server: Server, uploads: Uploads) -> Server:
        """The next broadcast from single uploads, for methods whose server needs them; uploads then
        need not be parts of the server's state. By default, and only then, their average or median
        goes through the server's optimizer to `server_update`."""
        raise TypeError(f"{type(self).__name__} has no server that trains on single uploads")

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        """Class scores `[batch, classes]` by name; the first is what the method is evaluated by."""
        raise TypeError(f"{type(self).__name__} must define predict")

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        """The cost of a visit for a client with this many training samples and classes."""
        raise TypeError(f"{type(self).__name__} must define cost")

    def training_cost(
        self, floats: float, macs: float, num_train: float, more_passes: int = 0
    ) -> Cost:
        """The cost of sending and receiving `floats` and training a model of this many `macs`, with
        `more_passes` over the data, forward only, after training."""
        # A step is one pass forward and two backward; a multiply-add is two operations.
        passes = 3 * self.training.local_epochs + more_passes
        return Cost(floats, floats, 2.0 * passes * macs * num_train)


# ------------------------------------------------------------------------------ the one aggregation


def combined(aggregation: str, server: Server, uploads: Uploads) -> dict[str, Tree]:
    """The weighted mean or median of single uploads, for each part of the server's state."""
    if aggregation == "median":
        return {
            name: jax.tree.map(partial(median, weight=uploads.weight[name]), server[name], part)
            for name, part in uploads.parts.items()
        }
    sums = jax.tree.map(
        lambda rows: jnp.sum(rows, axis=0), (weigh(uploads.parts, uploads.weight), uploads.weight)
    )
    return average(server, *sums)


def next_broadcast(
    method: Method,
    server: Server,
    clients: jax.typing.ArrayLike,
    parts: dict[str, Tree],
    weight: dict[str, jax.Array],
    key: jax.Array,
) -> Server:
    """The next broadcast of a method from single uploads; see `Uploads` for the shapes.

    If no client sent anything, it is the old one.
    """
    each = [jnp.any(rows.reshape(len(rows), -1) > 0, axis=1) for rows in weight.values()]
    sent = jnp.any(jnp.stack(each), axis=0)
    numbers = jnp.where(sent, clients, method.num_clients).astype(jnp.int32)
    uploads = Uploads(numbers, parts, weight, key)
    if method.trains_on_the_server:
        return if_any(weight, method.uploads_update(server, uploads), server)
    return after_average(method, server, combined(method.aggregation, server, uploads), weight)


def after_average(
    method: Method, server: Server, averaged: dict[str, Tree], weight: dict[str, jax.Array]
) -> Server:
    """The server's next state, from the clients' average: the step of its optimizer, the method's
    `server_update`, and the running mean. If no client sent anything, it is the old one.

    Args:
        server: its state: the broadcast, and what its optimizer keeps.
        averaged: parts of the broadcast.
        weight: of each part, of which any above 0 says that somebody sent something.
    """
    optimizer = method.server_optimizer
    if optimizer.is_plain:
        return if_any(weight, method.server_update(server, averaged), server)
    names = method.averaged_weights
    kept: dict[str, Tree] = {}
    if optimizer.kind != "average":
        old = {name: server[name] for name in names}
        mean = {name: averaged[name] for name in names}
        moved, kept[MEMORY] = optimizer.step(server[MEMORY], old, mean)
        averaged = {**averaged, **moved}
    new = method.server_update(broadcast_of(server), averaged)
    if optimizer.mean_decay is not None:
        weights = {name: new[name] for name in names}
        kept[RUNNING_MEAN] = optimizer.mean(server[RUNNING_MEAN], weights)
    return if_any(weight, {**new, **kept}, server)


def start_server(method: Method, key: jax.Array) -> Server:
    """The server's first state: the broadcast, and what its optimizer keeps."""
    server = method.init_server(key)
    weights = {name: server[name] for name in method.averaged_weights}
    return {**server, **method.server_optimizer.init(weights)}


def if_any(weight: dict[str, jax.Array], new: Server, old: Server) -> Server:
    """The new broadcast, or the old one where nobody sent anything."""
    sent = jnp.any(jnp.stack([jnp.any(one > 0) for one in weight.values()]))
    return jax.tree.map(lambda after, before: jnp.where(sent, after, before), new, old)
