"""The one evaluation of all methods and conventions: a client's accuracy on its own test images."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.data.augment import normalise
from pfedafm_jax.training.batches import ClientData, LocalTraining, loop_bound


def accuracy(
    training: LocalTraining, predict: Callable[[jax.Array], dict[str, jax.Array]], data: ClientData
) -> dict[str, jax.Array]:
    """The fraction of a client's test images that each of its predictions gets right.

    Args:
        training: how the client trains; its normalisation and loop layout are used here.
        predict: from normalised images `[batch, …]` to logits `[batch, classes]` by name.
        data: the client's data.

    Returns:
        Accuracy by name; NaN for a client without test images, so that means leave it out.
    """
    size, shape = EVALUATION_BATCH, (1, *data.images.shape[1:])
    rows = jnp.pad(data.test, (0, size))

    def logits_of(images: jax.Array) -> dict[str, jax.Array]:
        return predict(normalise(images, training.mean, training.std))

    names = jax.eval_shape(logits_of, jax.ShapeDtypeStruct(shape, data.images.dtype)).keys()

    def block(index, correct):
        batch = lax.dynamic_slice(rows, (index * size,), (size,))
        real = index * size + jnp.arange(size) < data.num_test
        labels = data.labels[batch]
        return {
            name: correct[name] + jnp.sum((jnp.argmax(logits, axis=-1) == labels) & real)
            for name, logits in logits_of(data.images[batch]).items()
        }

    blocks = loop_bound(training, data.num_test, size, data.test.shape[0])
    correct = lax.fori_loop(0, blocks, block, dict.fromkeys(names, jnp.int32(0)))
    total = data.num_test.astype(jnp.float32)  # 0 / 0 is NaN
    return {name: count.astype(jnp.float32) / total for name, count in correct.items()}


EVALUATION_BATCH = 64
