"""FedTGP: FedProto with global prototypes that the server trains to be far apart.

Clients train as in FedProto: CE(F(x), y) + λ · mean over batch and features of
(r(x) - T_y)². The server computes the global prototypes T_c from trainable vectors v_c by a small
network, T_c = W₂ ReLU(W₁ v_c + b₁) + b₂, and trains both on every prototype P that a client sent
for a class c, so that P is nearer to T_c than to all others by a margin δ:

    L = -log softmax_c(-‖P - T_c‖ - δ [c = own class])

δ = min(max_c min_c' ‖Q_c - Q_c'‖, τ), where Q_c is the aggregated prototype of a class that was
sent in this round: as large as the distances between the clients' classes, but at most τ.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfedafm_jax.config.method_settings import Count, Epochs, Rate
from pfedafm_jax.methods.base import Server, Tree, combined
from pfedafm_jax.methods.fedgh import train_on_prototypes
from pfedafm_jax.methods.fedproto import FedProto
from pfedafm_jax.models.cnn import linear
from pfedafm_jax.training.losses import cross_entropy


class Generator(nn.Module):
    """A trainable vector for each class, and the network from it to the prototype."""

    classes: int
    width: int
    initialisation: str

    @nn.compact
    def __call__(self) -> jax.Array:
        shape = self.classes, self.width
        vectors = self.param("vectors", nn.initializers.normal(1.0), shape)
        hidden = nn.relu(linear(self.width, vectors, self.initialisation, "hidden"))
        return linear(self.width, hidden, self.initialisation, "output")


def distances(rows: jax.Array, others: jax.Array) -> jax.Array:
    """‖row - other‖ `[rows, others]`, with gradient 0 where they are equal."""
    squares = jnp.sum((rows[:, None] - others[None]) ** 2, axis=-1)
    return jnp.sqrt(jnp.maximum(squares, 1e-12))


def adaptive_margin(means: jax.Array, sent: jax.Array, most: jax.typing.ArrayLike) -> jax.Array:
    """The largest distance between a class that was sent and its nearest other, at most `most`.

    Args:
        means: the aggregated prototypes `[classes, width]`.
        sent: whether any client sent the class, bool `[classes]`.
    """
    other = sent[None] & ~jnp.eye(len(means), dtype=bool)
    nearest = jnp.min(jnp.where(other, distances(means, means), jnp.inf), axis=1)
    return jnp.minimum(jnp.max(jnp.where(sent, nearest, -jnp.inf)), most)


def contrastive_loss(
    made: jax.Array,
    margin: jax.Array,
    prototypes: jax.Array,
    classes: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """Cross-entropy of clients' prototypes `[batch, width]` by distance to the global ones."""
    own = jax.nn.one_hot(classes, len(made))
    return cross_entropy(-distances(prototypes, made) - margin * own, classes, weights)


class FedTGP(FedProto):
    """The server keeps the prototypes, which of their classes were ever sent, and the generator."""

    name = "fedtgp"
    title = "FedTGP"

    class Settings(FedProto.Settings):
        lambda_mse: Rate = 10.0
        """Weight of the squared distance to the prototypes, a mean over features (λ)."""
        server_learning_rate: Rate = 0.01
        """Learning rate of the prototypes on the server; plain SGD."""
        server_epochs: Epochs = 100
        """The server's passes per round over the prototypes that were sent (S)."""
        server_batch_size: Count = 10
        """Prototypes per step of the server."""
        margin_threshold: Rate = 100.0
        """The largest margin (τ)."""

    @property
    def generator(self) -> Generator:
        """The network on the server."""
        return Generator(self.shared.num_classes, self.shared.feature_size, self.initialisation)

    def init_server(self, key) -> Server:
        # No client needs the generator; over a network it is sent with the rest all the same.
        return {**super().init_server(key), "generator": self.generator.init(key)["params"]}

    def uploads_update(self, server, uploads) -> Server:
        settings, generator = self.settings, self.generator
        averaged = combined(self.aggregation, server, uploads)
        sent = jnp.any(uploads.weight["prototypes"] > 0, axis=0)
        margin = adaptive_margin(averaged["prototypes"], sent, settings.margin_threshold)

        def made(params: Tree) -> jax.Array:
            return generator.apply({"params": params})  # pyright: ignore[reportReturnType]

        def loss(params: Tree, *batch: jax.Array) -> jax.Array:
            return contrastive_loss(made(params), margin, *batch)

        steps = settings.server_learning_rate, settings.server_epochs, settings.server_batch_size
        trained = train_on_prototypes(loss, server["generator"], uploads, *steps)
        return {**averaged, "prototypes": made(trained), "generator": trained}
