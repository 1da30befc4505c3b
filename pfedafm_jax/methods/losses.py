"""Losses and per-class means that several methods share; means are over real samples only."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pfedafm_jax.training import ClientData, LocalTraining, extract_all, mean_over


def kl_divergence(
    target: jax.Array, logits: jax.Array, weights: jax.Array, mean: str = "batch_mean"
) -> jax.Array:
    """KL(softmax(target) ‖ softmax(logits)), both given as logits `[batch, classes]`.

    `batch_mean` is the divergence itself: the sum over classes, its mean over samples.
    `element_mean` divides that by the number of classes as well, as PyTorch's `kl_div` does by
    default: 10 or 100 times weaker on CIFAR.
    """
    log_target, log_guess = jax.nn.log_softmax(target), jax.nn.log_softmax(logits)
    each = jnp.sum(jnp.exp(log_target) * (log_target - log_guess), axis=-1)
    divergence = mean_over(each, weights)
    return divergence / logits.shape[-1] if mean == "element_mean" else divergence


def soft_cross_entropy(logits: jax.Array, target: jax.Array) -> jax.Array:
    """-Σ_c q_c log softmax(z)_c for each sample `[batch]`; `target` holds probabilities."""
    return -jnp.sum(target * jax.nn.log_softmax(logits), axis=-1)


def squared_distance(features: jax.Array, target: jax.Array) -> jax.Array:
    """Squared difference, mean over the features, for each sample `[batch]`."""
    return jnp.mean((features - target) ** 2, axis=-1)


def class_means(
    training: LocalTraining,
    function: Callable[[jax.Array], jax.Array],
    data: ClientData,
    num_classes: int,
) -> tuple[jax.Array, jax.Array]:
    """Means `[classes, width]` of `function(images)` over a client's training images of each class,
    and their counts.

    A clean pass: images are not augmented. A class without an image has a row of zeros and count 0.
    """
    values = extract_all(training, function, data)
    rows = jnp.pad(data.train, (0, values.shape[0] - data.train.shape[0]))
    real = jnp.arange(values.shape[0]) < data.num_train
    labels = jnp.where(real, data.labels[rows], num_classes)  # padding is a class of its own
    sums = jax.ops.segment_sum(values, labels, num_classes + 1)[:-1]
    counts = jax.ops.segment_sum(jnp.ones(labels.shape), labels, num_classes + 1)[:-1]
    return sums / jnp.maximum(counts, 1.0)[:, None], counts


def class_weights(aggregation: str, counts: jax.Array, weight: jax.Array) -> jax.Array:
    """Weight `[classes]` of a client's rows in the average: n_{k,c}, or 1 where it has the class.

    `weight` is the client's own weight; with 0 it has no part in any row.
    """
    rows = counts if aggregation == "samples" else jnp.minimum(counts, 1.0)
    return rows * (weight > 0).astype(rows.dtype)
