"""Losses and per-class means shared by several methods; means leave out padding."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from pfedafm_jax.training.batches import ClientData, LocalTraining
from pfedafm_jax.training.train import extract_all


def mean_over(values: jax.Array, weights: jax.Array) -> jax.Array:
    """Mean over the real samples of a batch."""
    return jnp.sum(values * weights) / jnp.maximum(jnp.sum(weights), 1.0)


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> jax.Array:
    """Softmax cross-entropy, mean over the real samples."""
    return mean_over(optax.softmax_cross_entropy_with_integer_labels(logits, labels), weights)


def kl_divergence(
    target: jax.Array, logits: jax.Array, weights: jax.Array, mean: str = "batch_mean"
) -> jax.Array:
    """KL(softmax(target) ‖ softmax(logits)), mean over the batch.

    Args:
        target, logits: `[batch, classes]`.
        weights: `[batch]`, 0 for padding.
        mean: `batch_mean` sums over classes, as the divergence does; `element_mean` divides by the
            number of classes, as PyTorch's `kl_div` does by default: 10 or 100 times weaker on
            CIFAR.
    """
    log_target, log_guess = jax.nn.log_softmax(target), jax.nn.log_softmax(logits)
    each = jnp.sum(jnp.exp(log_target) * (log_target - log_guess), axis=-1)
    divergence = mean_over(each, weights)
    return divergence / logits.shape[-1] if mean == "element_mean" else divergence


def soft_cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    """-Σ_c q_c log softmax(z)_c for each sample `[batch]`; `target` holds probabilities."""
    return -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)


def squared_distance(features: jax.Array, target: jax.Array) -> jax.Array:
    """Mean squared difference over the features, for each sample `[batch]`."""
    return jnp.mean((features - target) ** 2, axis=-1)


def class_means(
    training: LocalTraining,
    function: Callable[[jax.Array], jax.Array],
    data: ClientData,
    num_classes: int,
) -> tuple[jax.Array, jax.Array]:
    """Means `[classes, width]` of `function(images)` over a client's training images of each class,
    and their counts `[classes]`.

    Images are not augmented. A class without images has a row of zeros and count 0.
    """
    values = extract_all(training, function, data)
    rows = jnp.pad(data.train, (0, values.shape[0] - data.train.shape[0]))
    real = jnp.arange(values.shape[0]) < data.num_train
    # Padding counts as an extra class, dropped below.
    labels = jnp.where(real, data.labels[rows], num_classes)
    sums = jax.ops.segment_sum(values, labels, num_classes + 1)[:-1]
    counts = jax.ops.segment_sum(jnp.ones(labels.shape), labels, num_classes + 1)[:-1]
    return sums / jnp.maximum(counts, 1.0)[:, None], counts


def class_weights(aggregation: str, counts: jax.Array, weight: jax.Array) -> jax.Array:
    """Weight `[classes]` of a client's per-class rows in the average: n_{k,c}, or, with `uniform`
    aggregation, 1 for each class it has.

    `weight` is the client's own weight; if that is 0, all are 0.
    """
    rows = counts if aggregation == "samples" else jnp.minimum(counts, 1.0)
    return rows * (weight > 0).astype(rows.dtype)
