"""FedGH: the server trains one header for all, on the class prototypes of single clients.

A participant replaces its header by the broadcast one, trains its whole model on CE(F(x), y), and
sends its prototypes P_c: the mean representation of each of its classes c, without augmentation.
The server takes SGD steps on CE(H(P_c), c), over all prototypes that were sent, and broadcasts H.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.config.method_settings import Count, Epochs, MethodSettings, Rate
from pfedafm_jax.methods.base import Cost, Server, Tree, Update, Uploads
from pfedafm_jax.methods.standalone import Standalone, private_logits
from pfedafm_jax.training.losses import class_means, class_weights, cross_entropy

Loss = Callable[[Tree, jax.Array, jax.Array, jax.Array], jax.Array]


def train_on_prototypes(
    loss: Loss,
    params: Tree,
    uploads: Uploads,
    learning_rate: jax.typing.ArrayLike,
    epochs: int,
    batch_size: int,
) -> Tree:
    """Trains on the server, on the prototypes that clients sent, by plain SGD.

    Args:
        loss: `(params, prototypes [batch, width], classes [batch], weights [batch]) -> loss`, with
            weight 0 for padding.
        uploads: with a part `prototypes` `[K, classes, width]`, weighted by row.

    Returns:
        The trained params. The order of an epoch depends on key, client and class only.
    """
    table = uploads.parts["prototypes"]
    classes, width = table.shape[1:]
    rows, labels = table.reshape(-1, width), jnp.tile(jnp.arange(classes), table.shape[0])
    there = uploads.weight["prototypes"].reshape(-1) > 0
    count, size = jnp.sum(there), min(batch_size, len(rows))

    def epoch(number: jax.Array, params: Tree) -> Tree:
        def own(client: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(uploads.key, number), client)
            return jax.random.uniform(key, (classes,))

        scores = jnp.where(there, jax.vmap(own)(uploads.client).reshape(-1), 2.0)
        order = jnp.pad(jnp.argsort(scores), (0, size))

        def step(index: jax.Array, params: Tree) -> Tree:
            picked = lax.dynamic_slice(order, (index * size,), (size,))
            weights = (index * size + jnp.arange(size) < count).astype(jnp.float32)
            gradient = jax.grad(loss)(params, rows[picked], labels[picked], weights)
            return jax.tree.map(lambda old, slope: old - learning_rate * slope, params, gradient)

        return lax.fori_loop(0, -(-count // size), step, params)

    return lax.fori_loop(0, epochs, epoch, params)


class FedGH(Standalone):
    """The server keeps the header."""

    name = "fedgh"
    title = "FedGH"

    class Settings(MethodSettings):
        server_learning_rate: Rate = 0.01
        """Learning rate of the header on the server (η_θ); plain SGD."""
        server_epochs: Epochs = 1
        """The server's passes per round over the prototypes that were sent."""
        server_batch_size: Count = 1
        """Prototypes per step of the server."""

    def init_server(self, key) -> Server:
        return {"header": self.shared.init_header(key)}

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        model = {**client, **server}
        update = super().client_update(key, architecture, model, server, data, weight)
        extract = partial(architecture.extract, update.client["local_extractor"])
        means, counts = class_means(self.training, extract, data, architecture.num_classes)
        rows = class_weights(self.aggregation, counts, weight)
        return update._replace(upload={"prototypes": means}, weight={"prototypes": rows})

    def uploads_update(self, server, uploads) -> Server:
        settings = self.settings

        def loss(header: Tree, prototypes: jax.Array, classes: jax.Array, weights: jax.Array):
            return cross_entropy(self.shared.classify(header, prototypes), classes, weights)

        steps = settings.server_learning_rate, settings.server_epochs, settings.server_batch_size
        return {"header": train_on_prototypes(loss, server["header"], uploads, *steps)}

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        return {
            "own": private_logits(architecture, client, images),
            "global": private_logits(architecture, {**client, **server}, images),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        # The last pass makes the prototypes.
        header, macs = architecture.header_params, architecture.macs
        cost = self.training_cost(header, macs, num_train, more_passes=1)
        return replace(cost, floats_up=num_classes_seen * architecture.feature_size)
