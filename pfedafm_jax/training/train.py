"""One client's local training: batches, epochs, SGD. Every method trains through `train`.

Everything here is written for one client; the engine `vmap`s it over many. Clients of different
sizes then run in lockstep: loops are as long as the largest needs, and masks freeze those that have
finished.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.data.augment import normalise
from pfedafm_jax.models import flax_modules
from pfedafm_jax.models.batch_stats import statistics_of, with_statistics, without_statistics
from pfedafm_jax.training.batches import (
    ORDER_KEY,
    Batch,
    ClientData,
    LocalTraining,
    epoch_order,
    loop_bound,
    make_batch,
)
from pfedafm_jax.training.sgd import SGD, Partitioned, sgd

Tree = Any


# ---------------------------------------------------------------------------------------------- SGD


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
