"""One client's local training: batches, epochs, SGD. Every method trains through `train`.

Everything here is written for one client; the engine `vmap`s it over many. Clients of different
sizes then run in lockstep: loops are as long as the largest needs, and masks freeze those that have
finished.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pfedafm_jax.base.trees import register
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.augment import augment, normalise
from pfedafm_jax.models import flax_modules, kernels
from pfedafm_jax.models.batch_stats import statistics_of, with_statistics, without_statistics

Tree = Any
EVALUATION_BATCH = 64
ORDER_KEY = 2**20  # for the order of an epoch; above any batch number
# Room, in multiples of the mean client, so that splits of other seeds share compiled programs.
BATCH_ROOM = 1.21  # of a batch: a client a fifth above the mean fits, however its size is rounded
TABLE_ROOM = 1.4  # of tables of rows: ample, since padding there costs hardly any time
LOCKSTEP_ROOM = 1.2  # of tables in lockstep: less, since every client runs to the table's end


class ClientData(NamedTuple):
    """One client's data on the device: rows of the dataset, padded to the longest client."""

    images: jax.Array  # uint8 [all, height, width, channels], or other data; shared by all clients
    labels: jax.Array  # int32 [all]
    train: jax.Array  # int32 [longest]: rows of this client's training images
    num_train: jax.Array  # int32: how many of them are real, the paper's n_k
    test: jax.Array  # int32 [longest test]
    num_test: jax.Array  # int32
    client: jax.Array | int = 0  # int32: its number among the run's clients


class Batch(NamedTuple):
    """The argument of a loss."""

    images: jax.Array  # float32 [size, height, width, channels], normalised and augmented
    labels: jax.Array  # int32 [size]
    weights: jax.Array  # float32 [size]: 1 for a real sample, 0 for padding
    positions: jax.Array  # int32 [size]: index of the sample in `ClientData.train`


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains. A pytree: numbers are leaves, the rest is static."""

    batch_size: int
    rest_size: int  # padded size of a short last batch, see `rest_batch_size`
    local_epochs: int
    learning_rate: float
    momentum: float
    weight_decay: float
    clip_norm: float
    mean: tuple[float, ...]  # of each channel
    std: tuple[float, ...]
    flip: bool = False
    erase: bool = False
    crop: bool = False
    axis: str | None = None  # name of the `vmap` axis of clients; None: a single client
    lockstep: bool = False  # loops have a static length, that of the tables of rows

    @property
    def augments(self) -> bool:
        return self.flip or self.erase or self.crop

    @classmethod
    def of(
        cls, config: Config, mean: tuple[float, ...], std: tuple[float, ...], sizes: Sequence[int]
    ) -> "LocalTraining":
        """The settings of `config` for clients with these numbers of training samples.

        Shapes depend on the rounded mean of `sizes` where possible, so that the split of another
        seed, whose mean differs by a few samples, shares the compiled programs. Short last batches
        are sized for clients of 0.8 to 1.2 times the mean.
        """
        usual = np.mean(sizes)
        longest = max(*sizes, 1, round(BATCH_ROOM * usual))
        batch_size = min(config.batch_size, -(-longest // 32) * 32)
        about = 16 * max(1, int((usual + 7) // 16))
        typical = [round(about * (0.8 + 0.01 * step)) for step in range(41)]
        return cls(
            batch_size=batch_size,
            rest_size=rest_batch_size(batch_size, typical),
            local_epochs=config.local_epochs,
            learning_rate=config.rate,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            clip_norm=config.clip_norm,
            mean=mean,
            std=std,
            flip=config.flip,
            erase=config.erase,
            crop=config.crop,
        )


_NUMBERS = ("learning_rate", "momentum", "weight_decay", "clip_norm", "mean", "std")
register(LocalTraining, lambda kind: _NUMBERS)


def table_width(sizes: Sequence[int], tight: bool = False) -> int:
    """Width of the tables of clients' rows: 2, 3, 4, 6, 8, 12, …, with room for other splits.

    `tight`: in steps of 32 with less room, for lockstep, where every client runs that far.

    >>> table_width([470, 490]), table_width([700, 10]), table_width([470, 490], tight=True)
    (768, 768, 576)
    """
    least = max(*sizes, 1, round((LOCKSTEP_ROOM if tight else TABLE_ROOM) * np.mean(sizes)))
    if tight:
        return -(-least // 32) * 32
    power = 2 ** (least - 1).bit_length()
    return power if least > power * 3 // 4 else power * 3 // 4


def rest_batch_size(batch_size: int, sizes: list[int]) -> int:
    """The padded size of the last, partial batch of an epoch.

    With one compiled size, 18 samples left over from a batch of 512 would cost as much as 512. A
    second, smaller size doubles compile time, so it is used only if it saves a tenth of the work of
    these clients; otherwise this is `batch_size`.
    """
    rests = [size % batch_size for size in sizes]

    def slots(rest_size: int) -> int:
        last = [rest_size if rest <= rest_size else batch_size for rest in rests if rest > 0]
        return sum(sizes) - sum(rests) + sum(last)

    candidates = [math.ceil(batch_size * eighths / 8) for eighths in range(1, 8)]
    best = min(candidates, key=slots)
    return best if slots(best) < 0.9 * slots(batch_size) else batch_size


# ------------------------------------------------------------------------------------------ batches


def epoch_order(key: jax.Array, num: jax.Array, longest: int) -> jax.Array:
    """A random order of positions 0 … num-1, followed by the unused ones: int32 `[longest]`.

    The order does not depend on `longest`: random bits are drawn by position.
    """
    positions = jnp.arange(longest, dtype=jnp.int32)
    scores = jnp.where(positions < num, jax.random.uniform(key, (longest,)), 2.0)
    return jnp.argsort(scores).astype(jnp.int32)


def make_batch(
    training: LocalTraining,
    key: jax.Array,
    data: ClientData,
    positions: jax.Array,
    count: jax.Array,
) -> Batch:
    """The samples at these positions of a client's training data, the first `count` real."""
    rows = data.train[positions]
    images = normalise(data.images[rows], training.mean, training.std)
    if training.augments:
        images = augment(key, images, flip=training.flip, erase=training.erase, crop=training.crop)
    weights = (jnp.arange(len(positions)) < count).astype(jnp.float32)
    return Batch(images, data.labels[rows], weights, positions)


def mean_over(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean over the real samples of a batch."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Softmax cross-entropy, mean over the real samples."""
    return mean_over(optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights)


def loop_bound(training: LocalTraining, count: jax.Array, size: int, width: int):
    """Number of steps of `size` that cover `count` samples: as many as the largest client in
    lockstep needs or, if loops are static, as the table's `width` has room for."""
    if training.lockstep:
        return -(-width // size)
    steps = -(-count // size)
    return steps if training.axis is None else lax.pmax(steps, training.axis)


# ---------------------------------------------------------------------------------------------- SGD


class SGD(NamedTuple):
    """SGD in PyTorch's order: clip, add decay, momentum, step. Its numbers may be traced."""

    learning_rate: jax.typing.ArrayLike
    momentum: jax.typing.ArrayLike
    weight_decay: jax.typing.ArrayLike
    clip_norm: jax.typing.ArrayLike  # infinity: no clipping

    def init(self, params: Tree) -> Tree:
        """The state before the first step: zero momenta."""
        return jax.tree.map(jnp.zeros_like, params)

    def step(self, params: Tree, state: Tree, gradient: Tree, active: jax.typing.ArrayLike = True):
        """New params and state; the old ones if `active` is False."""
        return kernels.sgd(params, state, gradient, active=active, **self._asdict())


class Partitioned(NamedTuple):
    """One optimizer, with its own clipping, for each top-level part of the trained tree."""

    parts: dict[str, SGD]

    def init(self, params: Tree) -> Tree:
        return {name: optimizer.init(params[name]) for name, optimizer in self.parts.items()}

    def step(self, params: Tree, state: Tree, gradient: Tree, active: jax.typing.ArrayLike = True):
        new, moved = {}, {}
        for name, optimizer in self.parts.items():
            part = params[name], state[name], gradient[name]
            new[name], moved[name] = optimizer.step(*part, active)
        return new, moved


def sgd(
    training: LocalTraining,
    *,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
    clip: bool = True,
) -> SGD:
    """The optimizer of a client's training, with some of its numbers replaced."""
    return SGD(
        training.learning_rate if learning_rate is None else learning_rate,
        training.momentum,
        training.weight_decay if weight_decay is None else weight_decay,
        training.clip_norm if clip else jnp.inf,
    )


class Trained(NamedTuple):
    """The result of local training."""

    params: Tree
    loss: jax.Array  # mean over all samples of all epochs
    optimizer_state: Tree


def train(
    training: LocalTraining,
    key: jax.Array,
    params: Tree,
    loss: Callable[[Tree, Batch], jax.Array],
    data: ClientData,
    optimizer: SGD | Partitioned | None = None,
    *,
    project: Callable[[Tree], Tree] | None = None,
) -> Trained:
    """E epochs of SGD on `loss(params, batch)` over the client's training data.

    Only what is in `params` is trained, decayed and carried by momentum; whatever else the loss
    uses is frozen. Running statistics change only by the batches' own. `project` is applied after
    every step and must not change params that are already allowed.
    """
    size, rest_size, longest = training.batch_size, training.rest_size, data.train.shape[0]
    rest = data.num_train % size
    rest_fits = (rest > 0) & (rest <= rest_size) & (rest_size < size)
    full_steps = data.num_train // size + ((rest > 0) & ~rest_fits).astype(jnp.int32)
    full_bound = loop_bound(training, full_steps * size, size, longest)
    rest_bound = loop_bound(training, rest_fits.astype(jnp.int32), 1, 1)
    optimizer = optimizer or sgd(training)
    state = optimizer.init(without_statistics(params))

    def step(epoch_key, order, step_size, index, active, carry):
        params, state, loss_sum = carry
        start = index * size
        count = jnp.clip(data.num_train - start, 0, step_size) * active.astype(jnp.int32)
        positions = lax.dynamic_slice(order, (start,), (step_size,))
        step_key, before = jax.random.fold_in(epoch_key, index), statistics_of(params)
        batch = make_batch(training, step_key, data, positions, count)

        def of_weights(weights):
            whole = with_statistics(weights, before)
            with flax_modules.training(whole, step_key, batch.weights) as running:
                return loss(whole, batch), running.statistics()

        weights = without_statistics(params)
        (value, after), gradient = jax.value_and_grad(of_weights, has_aux=True)(weights)
        # Decay and momentum must not move a client that has finished before others.
        weights, state = optimizer.step(weights, state, gradient, active)
        after = {path: jnp.where(active, after[path], old) for path, old in before.items()}
        params = with_statistics(weights, after)
        if project is not None:
            params = project(params)
        return params, state, loss_sum + value * count.astype(jnp.float32)

    def epoch(index, carry):
        epoch_key = jax.random.fold_in(key, index)
        order = epoch_order(jax.random.fold_in(epoch_key, ORDER_KEY), data.num_train, longest)
        order = jnp.pad(order, (0, size))  # so that no batch's slice runs past the end

        def full(step_index, carry):
            return step(epoch_key, order, size, step_index, step_index < full_steps, carry)

        def last(_, carry):
            return step(epoch_key, order, rest_size, full_steps, rest_fits, carry)

        carry = lax.fori_loop(0, full_bound, full, carry)
        return lax.fori_loop(0, rest_bound, last, carry) if rest_size < size else carry

    carry = params, state, jnp.float32(0)
    params, state, loss_sum = lax.fori_loop(0, training.local_epochs, epoch, carry)
    seen = jnp.maximum(data.num_train * training.local_epochs, 1).astype(jnp.float32)
    return Trained(params, loss_sum / seen, state)


def extract_all(
    training: LocalTraining, extract: Callable[[jax.Array], jax.Array], data: ClientData
) -> jax.Array:
    """Features of a client's training images, not augmented: `[longest + batch, features]`."""
    size, longest = training.batch_size, data.train.shape[0]
    rows = jnp.pad(data.train, (0, size))

    def features_of(images):
        return extract(normalise(images, training.mean, training.std))

    def block(index, table):
        images = data.images[lax.dynamic_slice(rows, (index * size,), (size,))]
        return lax.dynamic_update_slice(table, features_of(images), (index * size, 0))

    some = jax.ShapeDtypeStruct((size, *data.images.shape[1:]), data.images.dtype)
    width = jax.eval_shape(features_of, some).shape[-1]
    blocks = loop_bound(training, data.num_train, size, longest)
    return lax.fori_loop(0, blocks, block, jnp.zeros((longest + size, width)))


def frozen_features(
    training: LocalTraining, extract: Callable[[jax.Array], jax.Array], data: ClientData
) -> Callable[[Batch], jax.Array]:
    """A function from a batch to its features `[size, features]` by an extractor that is not
    trained. Without augmentation they are the same in every epoch, and computed once, here."""
    if training.augments:
        return lambda batch: extract(batch.images)
    table = extract_all(training, extract, data)
    return lambda batch: table[batch.positions]
