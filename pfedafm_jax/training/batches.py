"""A client's data, and the batches it trains on: their order, their size, their padding."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pfedafm_jax.base.trees import register
from pfedafm_jax.config.config import Config
from pfedafm_jax.data.augment import augment, normalise

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


def loop_bound(training: LocalTraining, count: jax.Array, size: int, width: int):
    """Number of steps of `size` that cover `count` samples: as many as the largest client in
    lockstep needs or, if loops are static, as the table's `width` has room for."""
    if training.lockstep:
        return -(-width // size)
    steps = -(-count // size)
    return steps if training.axis is None else lax.pmax(steps, training.axis)
