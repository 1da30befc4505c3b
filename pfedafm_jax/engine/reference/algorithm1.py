"""Algorithm 1 of the paper, written out: losses, clipping, SGD and the average by hand.

Parameters, keys and the order of samples are the engine's, so both compute the same numbers up to
rounding.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.data import augment, normalise
from pfedafm_jax.engine.executor import RoundResult, State
from pfedafm_jax.engine.reference.plain import PlainLoop, columns, finite, with_server
from pfedafm_jax.engine.round import participants_of, weights_of
from pfedafm_jax.engine.visit import client_key
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.methods.standalone import private_model
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import ORDER_KEY, LocalTraining, epoch_order

Tree = Any
SIZE_STEP = 64  # short batches above it are filled to a multiple, so that few sizes are compiled


class Batch(NamedTuple):
    """Images and labels; `weights` are 0 for padding."""

    images: jax.Array
    labels: jax.Array
    weights: jax.Array


class Visit(NamedTuple):
    """What a client has done in a round."""

    client: Tree  # its new state
    extractor: Tree | None  # the shared extractor it uploads; None: nothing, it is not finite
    left: dict[str, Tree]  # its mix vector, and momenta after the last step, see `visit`
    report: dict[str, Any]


# ---------------------------------------------------------------------------------------- the round


class Algorithm1(PlainLoop):
    """Rounds of pFedAFM as the paper has them; evaluation is the plain loop's."""

    method: PFedAFM  # pyright: ignore[reportIncompatibleVariableOverride]

    def run_round(
        self, state: State, t: int, participants: Sequence[int] | np.ndarray | None = None
    ) -> tuple[State, RoundResult]:
        """One iteration of the outer loop; `participants` instead of those drawn."""
        received = jax.device_get(state.server)["shared_extractor"]
        order, dropped = participants_of(self.federation.config, t, participants)
        uploads, reports = [], []
        for k, weight in zip(order, weights_of(self.federation, order), strict=True):
            client = state.clients.state(k)
            done = self.visit_of(t, k, client, received, momenta(client, received))
            state.clients.write(k, done.client)
            reports.append(done.report)
            if done.extractor is not None:
                uploads.append((weight, done.extractor))
        new = {"shared_extractor": aggregated(self.method.aggregation, uploads, received)}
        return with_server(state, new), RoundResult(np.array(order, int), columns(reports), dropped)

    def visit_of(
        self, t: int, k: int, client: Tree, received: Tree, left: dict[str, Tree]
    ) -> Visit:
        """Both phases of client `k` in round `t`.

        Args:
            client: its state.
            received: the shared extractor.
            left: `mix_velocity` and `shared_velocity`, the momenta that it starts from.
        """
        method, settings = self.method, self.method.settings
        architecture, key = self.architecture_of(k), client_key(self.federation.run_key, t, k)

        # Phase 1: freeze the shared extractor, train the local model and the mix vector.
        params = {"model": private_model(client), "mix": client["mix"]}
        frozen = {"shared_extractor": received}
        if settings.training == "end_to_end":
            params, frozen = {**params, **frozen}, {}
        velocity = {**zeros(params), "mix": left["mix_velocity"]}
        losses = []
        for batch in self.batches(k, jax.random.fold_in(key, 1)):
            step = mixed_step(architecture, method, params, velocity, frozen, batch)
            params, velocity, loss = step
            losses.append((loss, jnp.sum(batch.weights)))
        left = {**left, "mix": params["mix"], "mix_velocity": velocity["mix"]}
        report = {"loss": mean(losses), "mix_mean": float(jnp.mean(params["mix"]))}
        trained = {**frozen, **params}["shared_extractor"]

        # Evaluate between the phases, with the extractor received (end to end: the one trained).
        good = finite((params, report))
        client = {**client, **params["model"], "mix": params["mix"]} if good else client
        report |= self.accuracy(k, client, {"shared_extractor": trained if good else received})

        # Phase 2: freeze the header, train the shared extractor.
        if good and settings.training == "iterative":
            moved, losses = left["shared_velocity"], []
            for batch in self.batches(k, jax.random.fold_in(key, 2)):
                step = shared_step(method, trained, moved, client["header"], batch)
                trained, moved, loss = step
                losses.append((loss, jnp.sum(batch.weights)))
            left["shared_velocity"], report["shared_loss"] = moved, mean(losses)
            good = finite((trained, report["shared_loss"]))
        return Visit(client, trained if good else None, left, {**report, "finite": good})

    def batches(self, client: int, key: jax.Array) -> Iterator[Batch]:
        """All batches of all local epochs of a client; the last of an epoch may be short."""
        config, dataset = self.federation.config, self.dataset
        rows = self.partition.train[client]
        width = self.train_rows.shape[1]
        num = len(rows)
        for epoch in range(config.local_epochs):
            epoch_key = jax.random.fold_in(key, epoch)
            order_key = jax.random.fold_in(epoch_key, ORDER_KEY)
            order = np.asarray(ordered(order_key, np.int32(num), width))
            for number, first in enumerate(range(0, num, config.batch_size)):
                real = rows[order[first : min(first + config.batch_size, num)]]
                size = (
                    len(real) if len(real) < SIZE_STEP else -(-len(real) // SIZE_STEP) * SIZE_STEP
                )
                filled = np.resize(real, min(size, config.batch_size))
                batch_key = jax.random.fold_in(epoch_key, number)
                images = prepared(self.method.training, batch_key, dataset.images[filled])
                weights = (np.arange(len(filled)) < len(real)).astype(np.float32)
                yield Batch(images, jnp.asarray(dataset.labels[filled]), jnp.asarray(weights))


@partial(jax.jit, static_argnums=0)
def mixed_step(
    architecture: Architecture,
    method: PFedAFM,
    params: Tree,
    velocity: Tree,
    frozen: Tree,
    batch: Batch,
) -> tuple[Tree, Tree, jax.Array]:
    """Trains `params` (`model`, `mix`, perhaps the shared extractor) on a batch of mixed features.

    Returns:
        New params, new velocity, and the loss before the step.
    """
    settings, training = method.settings, method.training

    def loss(params: Tree) -> jax.Array:
        extractor = {**frozen, **params}["shared_extractor"]
        small = method.shared.extract(extractor, batch.images)  # Eq. 2
        large = architecture.extract(params["model"]["local_extractor"], batch.images)
        mix = params["mix"][None, :]
        mixed = small * (1.0 - mix) + large * mix  # Eq. 3
        logits = architecture.classify(params["model"]["header"], mixed)  # Eq. 4
        return cross_entropy(logits, batch)  # Eq. 5

    value, gradient = jax.value_and_grad(loss)(params)
    new, moved = dict(params), dict(velocity)
    for name in params.keys() - {"mix"}:  # Eq. 6; each network is clipped separately
        part = params[name], gradient[name], velocity[name]
        new[name], moved[name] = network_step(training, *part)
    if settings.mix_fixed is None:
        *numbers, _ = method.mix_optimizer  # learning rate, momentum, decay; it is not clipped
        new["mix"], moved["mix"] = sgd(params["mix"], gradient["mix"], velocity["mix"], *numbers)
    if settings.mix_project:
        new["mix"] = jnp.clip(new["mix"], 0.0, 1.0)
    return new, moved, value


@jax.jit
def shared_step(
    method: PFedAFM, params: Tree, velocity: Tree, header: Tree, batch: Batch
) -> tuple[Tree, Tree, jax.Array]:
    """Trains the shared extractor on a batch, under the frozen header; returns as `mixed_step`."""

    def loss(params: Tree) -> jax.Array:  # Eqs. 7 to 9
        features = method.shared.extract(params, batch.images)
        return cross_entropy(method.shared.classify(header, features), batch)

    value, gradient = jax.value_and_grad(loss)(params)
    return *network_step(method.training, params, gradient, velocity), value  # Eq. 10


# ---------------------------------------------------------------------------------------- its parts


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
    """The gradient of one network, scaled down to this global norm if it is larger."""
    length = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradient)))  # pyright: ignore
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, norm / jnp.maximum(length, 1e-30)), gradient)


def sgd(
    params: Tree, gradient: Tree, velocity: Tree, learning_rate, momentum, decay
) -> tuple[Tree, Tree]:
    """One step of SGD as in PyTorch; returns new params and velocity."""
    gradient = jax.tree.map(lambda g, p: g + decay * p, gradient, params)
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, gradient)
    return jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity), velocity


def network_step(
    training: LocalTraining, params: Tree, gradient: Tree, velocity: Tree
) -> tuple[Tree, Tree]:
    """One step of a network: clip, then SGD; returns new params and velocity."""
    gradient = clipped(gradient, training.clip_norm)
    numbers = training.learning_rate, training.momentum, training.weight_decay
    return sgd(params, gradient, velocity, *numbers)


def weighted_mean(uploads: list[tuple[float, Tree]], old: Tree) -> Tree:
    """Σ n_k / n · θ_k over the uploads, given as `(n_k, θ_k)`; `old` if there are none."""
    total = sum(weight for weight, _ in uploads)
    if total == 0:
        return old

    def mean(*leaves: jax.Array) -> Any:
        each = zip(uploads, leaves, strict=True)
        return sum(weight / total * leaf for (weight, _), leaf in each)

    return jax.tree.map(mean, *(tree for _, tree in uploads))


def mean(losses: list[tuple[jax.Array, jax.Array]]) -> float:
    """Mean loss over samples, from the loss and the number of samples of each batch."""
    return float(sum(loss * count for loss, count in losses) / sum(count for _, count in losses))


def aggregated(aggregation: str, uploads: list[tuple[float, Tree]], old: Tree) -> Tree:
    """The next shared extractor (Eq. 11), or the median, from `(n_k, θ_k)` of the uploads."""
    if not uploads or aggregation != "median":
        return weighted_mean(uploads, old)
    each = (extractor for _, extractor in uploads)
    return jax.tree.map(lambda *leaves: jnp.median(jnp.stack(leaves), axis=0), *each)


def momenta(client: Tree, extractor: Tree) -> dict[str, Tree]:
    """Momenta at the start of a visit: zeros."""
    return {"mix_velocity": zeros(client["mix"]), "shared_velocity": zeros(extractor)}


def zeros(params: Tree) -> Tree:
    """Initial momenta."""
    return jax.tree.map(jnp.zeros_like, params)
