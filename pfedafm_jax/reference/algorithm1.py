"""Algorithm 1 of the paper, written out: losses, clipping, SGD and the average by hand.

Parameters, keys and the order of samples are those of the engine, so both compute the same numbers
up to rounding. Three
settings do what the released code does instead of the paper: `aggregation = "last"`, where the
average is the last participant's extractor; `mix_relay`, where one mix vector goes from client to
client; `leak_momentum`, where momentum does.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax import engine
from pfedafm_jax.data import augment, normalise
from pfedafm_jax.engine import Programs, RoundResult, State
from pfedafm_jax.engine.round import participants_of
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.models import Architecture
from pfedafm_jax.reference.plain import accuracy, columns, finite, weights, with_server, write
from pfedafm_jax.training import LocalTraining, epoch_order

Tree = Any
MODEL = ("local_extractor", "header")  # F_k
SIZE_STEP = (
    64  # a large short batch is filled to a multiple of this, so that few sizes are compiled
)


class Batch(NamedTuple):
    """Images and labels; `weights` are 0 for what only fills the batch."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


class Rates(NamedTuple):
    """The numbers of SGD."""

    learning_rate: float
    momentum: float
    weight_decay: float
    clip_norm: float
    mix_learning_rate: float
    mix_weight_decay: float


# ---------------------------------------------------------------------------------------- the round


def start(programs: Programs, folder: str | None = None) -> State:
    """As the engine's; what one client leaves for the next is kept beside the shared extractor, at
    first nothing."""
    state, settings = engine.start(programs, folder), programs.config.pfedafm
    if programs.config.method == "pfedafm" and (settings.mix_relay or settings.leak_momentum):
        extractor, mix = (
            state.server["shared_extractor"],
            jax.device_get(state.store.start(0)["mix"]),
        )
        relay = {
            "mix": mix,
            "mix_velocity": 0 * mix,
            "shared_velocity": zeros(jax.device_get(extractor)),
        }
        state = state._replace(server={**state.server, "relay": programs.devices.replicate(relay)})
    return state


def run_round(
    programs: Programs, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
) -> tuple[State, RoundResult]:
    """One pass of the outer loop, see `engine.run_round`."""
    settings, rates, shared = programs.config.pfedafm, rates_of(programs), programs.method.shared
    server = jax.device_get(state.server)
    received, relay = server["shared_extractor"], server.get("relay", {})
    order = participants_of(programs, t, participants)
    uploads, reports = [], []
    for k, weight in zip(order, weights(programs, order), strict=True):
        architecture, key = (
            programs.architectures[programs.groups[k]],
            client_key(programs.key, t, k),
        )
        client = state.store.state(k)
        if settings.mix_relay and state.store.visited[k]:
            client = {**client, "mix": relay["mix"]}  # whatever the last client left

        # Phase 1: freeze the shared extractor, train the local model and the mix vector.
        params = {"model": {part: client[part] for part in MODEL}, "mix": client["mix"]}
        frozen = {"shared_extractor": received}
        if settings.training == "end_to_end":
            params, frozen = {**params, **frozen}, {}
        velocity = zeros(params)
        if settings.leak_momentum:
            velocity["mix"] = relay["mix_velocity"]
        losses = []
        for batch in batches(programs, k, jax.random.fold_in(key, 1)):
            fixed, project = settings.mix_fixed is not None, settings.mix_project
            step = mixed_step(
                architecture, shared, fixed, project, rates, params, velocity, frozen, batch
            )
            params, velocity, loss = step
            losses.append((loss, jnp.sum(batch.weights)))
        relay = {**relay, "mix": params["mix"], "mix_velocity": velocity["mix"]} if relay else relay
        report = {"loss": mean(losses), "mix_mean": float(jnp.mean(params["mix"]))}
        trained = {**frozen, **params}["shared_extractor"]

        # Evaluated between the phases, with the extractor received (end to end: with the one
        # trained).
        good = finite((params, report))
        client = {**client, **params["model"], "mix": params["mix"]} if good else client
        write(state, k, client)
        report |= accuracy(programs, k, client, {"shared_extractor": trained if good else received})

        # Phase 2: freeze the header, train the shared extractor.
        if good and settings.training == "iterative":
            moved, losses = (
                relay["shared_velocity"] if settings.leak_momentum else zeros(received),
                [],
            )
            for batch in batches(programs, k, jax.random.fold_in(key, 2)):
                trained, moved, loss = shared_step(
                    shared, rates, trained, moved, client["header"], batch
                )
                losses.append((loss, jnp.sum(batch.weights)))
            relay = {**relay, "shared_velocity": moved} if relay else relay
            report["shared_loss"] = mean(losses)
            good = finite((trained, report["shared_loss"]))
        if good:
            uploads.append((weight, trained))
        reports.append({**report, "finite": good})

    new = {"shared_extractor": weighted_mean(uploads, received)}  # Eq. 11
    state = with_server(state, {**new, "relay": relay} if relay else new)
    return state, RoundResult(np.array(order), columns(reports))


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def mixed_step(
    architecture: Architecture, shared: Architecture, fixed: bool, project: bool, rates: Rates,
    params: Tree, velocity: Tree, frozen: Tree, batch: Batch,
):  # fmt: skip
    """One batch on the mixed features; trains `model` and `mix`, and the shared extractor if it is
    among `params`."""

    def loss(params: Tree) -> jax.Array:
        small = shared.extract({**frozen, **params}["shared_extractor"], batch.images)  # Eq. 2
        large = architecture.extract(params["model"]["local_extractor"], batch.images)
        mix = params["mix"][None, :]
        mixed = small * (1.0 - mix) + large * mix  # Eq. 3
        return cross_entropy(
            architecture.classify(params["model"]["header"], mixed), batch
        )  # Eqs. 4, 5

    value, gradient = jax.value_and_grad(loss)(params)
    new, moved = dict(params), dict(velocity)
    for name in params.keys() - {"mix"}:  # Eq. 6, with a norm for each network
        new[name], moved[name] = network_step(rates, params[name], gradient[name], velocity[name])
    if not fixed:
        numbers = rates.mix_learning_rate, rates.momentum, rates.mix_weight_decay
        new["mix"], moved["mix"] = sgd(params["mix"], gradient["mix"], velocity["mix"], *numbers)
    if project:
        new["mix"] = jnp.clip(new["mix"], 0.0, 1.0)
    return new, moved, value


@partial(jax.jit, static_argnums=0)
def shared_step(
    shared: Architecture, rates: Rates, params: Tree, velocity: Tree, header: Tree, batch: Batch
):
    """One batch of phase 2: the shared extractor under the client's frozen header."""

    def loss(params: Tree) -> jax.Array:  # Eqs. 7 to 9
        return cross_entropy(shared.classify(header, shared.extract(params, batch.images)), batch)

    value, gradient = jax.value_and_grad(loss)(params)
    return *network_step(rates, params, gradient, velocity), value  # Eq. 10


# ---------------------------------------------------------------------------------------- its parts


def batches(programs: Programs, client: int, key: jax.Array) -> Iterator[Batch]:
    """Every batch of every local epoch of a client; the last of an epoch is short, and filled up
    where it is large."""
    rows, training, config = (
        programs.partition.train[client],
        programs.method.training,
        programs.config,
    )
    for epoch in range(config.local_epochs):
        epoch_key = jax.random.fold_in(key, epoch)
        order = np.asarray(
            ordered(
                jax.random.fold_in(epoch_key, 2**20),
                np.int32(len(rows)),
                programs.train_rows.shape[1],
            )
        )
        for number, first in enumerate(range(0, len(rows), config.batch_size)):
            real = rows[order[first : min(first + config.batch_size, len(rows))]]
            size = len(real) if len(real) < SIZE_STEP else -(-len(real) // SIZE_STEP) * SIZE_STEP
            filled = np.resize(real, min(size, config.batch_size))
            images = prepared(
                training, jax.random.fold_in(epoch_key, number), programs.dataset.images[filled]
            )
            weights = (np.arange(len(filled)) < len(real)).astype(np.float32)
            yield Batch(images, jnp.asarray(programs.dataset.labels[filled]), jnp.asarray(weights))


ordered = jax.jit(epoch_order, static_argnums=2)


@jax.jit
def prepared(training: LocalTraining, key: jax.Array, images: jax.Array) -> jax.Array:
    """Training images, normalised and augmented."""
    images = normalise(images, training.mean, training.std)
    return augment(key, images, flip=training.flip, erase=training.erase, crop=training.crop)


def cross_entropy(logits: jax.Array, batch: Batch) -> jax.Array:
    """-log softmax(logits)[label], mean over the real samples."""
    log_softmax = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    each = -jnp.take_along_axis(log_softmax, batch.labels[:, None], axis=-1)[:, 0]
    return jnp.sum(each * batch.weights) / jnp.sum(batch.weights)


def clipped(gradient: Tree, norm: float | jax.Array) -> Tree:
    """The gradient of one network, shortened to this global norm where it is longer."""
    length = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))  # pyright: ignore
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, norm / jnp.maximum(length, 1e-30)), gradient)


def sgd(
    params: Tree, gradient: Tree, velocity: Tree, learning_rate, momentum, decay
) -> tuple[Tree, Tree]:
    """One step of SGD as PyTorch has it: decay joins the gradient, momentum gathers it. Returns
    (params, velocity)."""
    gradient = jax.tree.map(lambda g, p: g + decay * p, gradient, params)
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity), velocity


def network_step(rates: Rates, params: Tree, gradient: Tree, velocity: Tree) -> tuple[Tree, Tree]:
    """One step of a network: clip, then SGD."""
    gradient = clipped(gradient, rates.clip_norm)
    return sgd(params, gradient, velocity, rates.learning_rate, rates.momentum, rates.weight_decay)


def weighted_mean(uploads: list[tuple[float, Tree]], old: Tree) -> Tree:
    """Σ n_k / n · θ_k over what was sent; the old one where nothing was."""
    total = sum(weight for weight, _ in uploads)
    if total == 0:
        return old
    shares = [weight / total for weight, _ in uploads]
    trees = [tree for _, tree in uploads]
    return jax.tree.map(
        lambda *leaves: sum(s * leaf for s, leaf in zip(shares, leaves, strict=True)), *trees
    )


def mean(losses: list[tuple[jax.Array, jax.Array]]) -> float:
    """Mean over samples of the losses of batches, each with its number of samples."""
    return float(sum(loss * count for loss, count in losses) / sum(count for _, count in losses))


def zeros(params: Tree) -> Tree:
    """A fresh momentum."""
    return jax.tree.map(jnp.zeros_like, params)


def rates_of(programs: Programs) -> Rates:
    """The numbers of a run's SGD."""
    config, settings = programs.config, programs.config.pfedafm
    return Rates(
        config.rate, config.momentum, config.weight_decay, config.clip_norm,
        settings.mix_learning_rate, settings.mix_weight_decay,
    )  # fmt: skip
