"""One evaluation for all methods and conventions: which test images a client classifies rightly."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.data.augment import normalise
from pfedafm_jax.training import EVALUATION_BATCH, ClientData, LocalTraining, loop_bound


def accuracy(
    training: LocalTraining, predict: Callable[[jax.Array], dict[str, jax.Array]], data: ClientData
) -> dict[str, jax.Array]:
    """Accuracy of each named prediction, as a share of the client's own test images; NaN without
    any, so that such a client counts in no mean."""
    size, shape = EVALUATION_BATCH, (1, *data.images.shape[1:])
    rows = jnp.pad(data.test, (0, size))
    names = jax.eval_shape(predict, jax.ShapeDtypeStruct(shape, jnp.float32)).keys()

    def block(index, correct):
        batch = lax.dynamic_slice(rows, (index * size,), (size,))
        real = index * size + jnp.arange(size) < data.num_test
        labels = data.labels[batch]
        logits = predict(normalise(data.images[batch], training.mean, training.std))
        hits = {
            name: jnp.sum((jnp.argmax(scores, axis=-1) == labels) & real)
            for name, scores in logits.items()
        }
        return {name: correct[name] + hits[name] for name in names}

    blocks = loop_bound(training, data.num_test, size, data.test.shape[0])
    correct = lax.fori_loop(0, blocks, block, dict.fromkeys(names, jnp.int32(0)))
    total = data.num_test.astype(jnp.float32)  # 0 / 0 is NaN
    return {name: count.astype(jnp.float32) / total for name, count in correct.items()}
