"""FedKD: a private mentor and a shared mentee distil into each other, more strongly the better both
are; the mentee's updates are sent as truncated singular value decompositions.

With c = CE(z_F, y) + CE(z_G, y), the loss of a batch is the sum of

    L_F = CE(z_F, y) + KL(softmax z_G ‖ softmax z_F) / c + MSE(r_F, W r_G) / c
    L_G = CE(z_G, y) + KL(softmax z_F ‖ softmax z_G) / c + MSE(r_F, W r_G) / c

where r are representations and W is a private projection. Coding, the compression by SVD, keeps the
smallest rank whose squared singular values reach the fraction T(t) of their sum, which rises from
T_start to T_end over the rounds.
"""

from functools import partial
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from annotated_types import Gt, Le
from jax import lax

from pfedafm_jax.config.method_settings import MethodSettings, Rate
from pfedafm_jax.methods.base import Client, Server, Tree, Update
from pfedafm_jax.methods.standalone import private_model
from pfedafm_jax.methods.two_models import PrivateAndShared
from pfedafm_jax.models.batch_stats import statistics_of, with_statistics, without_statistics
from pfedafm_jax.training.losses import cross_entropy, kl_divergence, mean_over, squared_distance
from pfedafm_jax.training.sgd import Partitioned, sgd
from pfedafm_jax.training.train import train

# ------------------------------------------------------------------------------------- what travels


def eigh(matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors of a symmetric matrix.

    Many at once on a GPU, one by one on a CPU, where jaxlib's batched call waits in XLA's thread
    pool for tasks of the same pool: two of them, of several clients each, wait for ever.
    """

    def plain(one: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tuple(jnp.linalg.eigh(one))

    one_by_one = jax.custom_batching.sequential_vmap(plain)
    return jax.lax.platform_dependent(matrix, cpu=one_by_one, default=plain)


def code_matrix(leaf: jax.Array, energy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A parameter as received after coding, and the number of floats sent for it.

    Kernels are matrices with one column per output, `[25·in, out]` for a 5x5 convolution. The
    rank is at least one. Biases, and matrices whose factors would not be smaller, are sent as they
    are.
    """
    if leaf.ndim < 2:
        return leaf, jnp.uint32(leaf.size)
    matrix = leaf.reshape(-1, leaf.shape[-1])
    rows, columns = matrix.shape
    # Squared singular values and the vectors of one side come from the smaller Gram matrix: several
    # times faster than an SVD, and precise enough, since coding drops whole percents of the energy.
    tall = matrix if rows >= columns else matrix.T
    # Scaled, since squares of small updates would underflow.
    scaled = tall / jnp.maximum(jnp.max(jnp.abs(tall)), 1e-30)
    product = partial(jnp.matmul, precision="highest")  # whatever the setting is
    energies, vectors = eigh(product(scaled.T, scaled))
    held = jnp.cumsum(jnp.maximum(energies, 0.0)[::-1])
    rank = 1 + jnp.sum(held[:-1] < energy * held[-1])
    kept = jnp.where(jnp.arange(len(held)) < rank, 1.0, 0.0)[::-1]
    decoded = product(product(tall, vectors * kept[None, :]), vectors.T)  # = U_r S_r V_rᵀ
    factors = (rank * (rows + columns + 1)).astype(jnp.uint32)
    raw = factors >= leaf.size
    decoded = jnp.where(raw, tall, decoded)
    decoded = decoded if rows >= columns else decoded.T
    return decoded.reshape(leaf.shape), jnp.where(raw, jnp.uint32(leaf.size), factors)


def code_tree(tree: Tree, energy: jax.Array) -> tuple[Tree, jax.Array]:
    """`code_matrix` of every leaf, and the number of floats sent."""
    leaves, structure = jax.tree.flatten(tree)
    decoded, floats = zip(*(code_matrix(leaf, energy) for leaf in leaves), strict=True)
    return jax.tree.unflatten(structure, decoded), jnp.sum(jnp.stack(floats), dtype=jnp.uint32)


def send(coding: str, known: Tree, model: Tree, energy: jax.Array) -> tuple[Tree, jax.Array]:
    """The model as the other side, which has `known`, gets it, and the floats of weights sent."""
    statistics, model, known = statistics_of(model), *map(without_statistics, (model, known))
    if coding == "none":
        floats = jnp.uint32(sum(leaf.size for leaf in jax.tree.leaves(model)))
    elif coding == "weight":
        model, floats = code_tree(model, energy)
    else:
        update, floats = code_tree(jax.tree.map(jnp.subtract, model, known), energy)
        model = jax.tree.map(jnp.add, known, update)
    return with_statistics(model, statistics), floats


# ----------------------------------------------------------------------------------------- the loss


def distillation_loss(
    settings: "FedKD.Settings",
    private: tuple[jax.Array, jax.Array],
    shared: tuple[jax.Array, jax.Array],
    labels: jax.Array,
    weights: jax.Array,
) -> jax.Array:
    """L_F + L_G from (logits, representations) of both models, the shared one's projected."""
    target = lax.stop_gradient if settings.detach_targets else (lambda array: array)
    kl = partial(kl_divergence, weights=weights, mean=settings.kl)
    (logits_f, features_f), (logits_g, features_g) = private, shared
    ce = cross_entropy(logits_f, labels, weights) + cross_entropy(logits_g, labels, weights)
    strength = jnp.maximum(ce, settings.denominator_floor)
    strength = jnp.where(jnp.sum(weights) > 0, strength, 1.0)  # an all-padding batch
    if settings.detach_denominator:
        strength = lax.stop_gradient(strength)
    hidden_f = mean_over(squared_distance(features_f, target(features_g)), weights)
    hidden_g = mean_over(squared_distance(target(features_f), features_g), weights)
    kl_f, kl_g = kl(target(logits_g), logits_f), kl(target(logits_f), logits_g)
    return ce + (kl_f + kl_g + hidden_f + hidden_g) / strength


# --------------------------------------------------------------------------------------- the method


class FedKD(PrivateAndShared):
    """A private mentor and a shared mentee.

    Server state: the mentee as every client can reconstruct it, the round, and the numbers of
    floats in the last broadcast and in all of them. The counts are integers that may wrap around;
    only differences are used. `cost` ignores coding: what is sent then depends on the ranks, and
    each visit reports it.
    """

    name = "fedkd"
    title = "FedKD"

    class Settings(MethodSettings):
        coding: Literal["update", "weight", "none"] = "update"
        """What is sent as a truncated SVD: updates (the paper), weights (HtFLlib), nothing."""
        t_start: Annotated[float, Gt(0), Le(1)] = 0.95
        """Fraction of the squared singular values kept by coding in the first round (T_start)."""
        t_end: Annotated[float, Gt(0), Le(1)] = 0.98
        """The same in the last round (T_end)."""
        kl: Literal["batch_mean", "element_mean"] = "batch_mean"
        """The divergence itself, or divided by the number of classes (authors, HtFLlib)."""
        detach_targets: bool = False
        """No gradient through the teacher's outputs and representations."""
        detach_denominator: bool = True
        """No gradient through the divisor of the distillation terms; the authors have one."""
        denominator_floor: Rate = 1e-2
        """Lower limit of that divisor, the sum of both cross-entropies."""
        mentee_learning_rate: Rate | None = None
        """Learning rate of the shared model; none: that of the networks."""

        @property
        def length_matters(self) -> bool:
            return self.coding != "none"  # what coding keeps rises until the last round

    def init_client(self, key, architecture) -> Client:
        size = architecture.feature_size
        bound = (3.0 if self.initialisation == "flax" else 1.0) ** 0.5 * size**-0.5
        shape, key_2 = (size, size), jax.random.fold_in(key, 2)
        projection = jax.random.uniform(key_2, shape, minval=-bound, maxval=bound)
        counts = {"visited": jnp.float32(0), "floats_received": jnp.uint32(0)}
        return {**super().init_client(key, architecture), "projection": projection, **counts}

    def init_server(self, key) -> Server:
        floats = {"floats_last": jnp.uint32(0), "floats_sent": jnp.uint32(0)}
        return {**super().init_server(key), "round": jnp.float32(0), **floats}

    @property
    def counts_missed(self) -> bool:
        return self.settings.coding != "none"

    def energy(self, server: Server) -> jax.Array:
        """T(t), the fraction of the squared singular values that coding keeps in this round."""
        progress = jnp.minimum((1.0 + server["round"]) / self.rounds, 1.0)
        return self.settings.t_start + (self.settings.t_end - self.settings.t_start) * progress

    def floats_down(self, client: Client, server: Server) -> jax.Array:
        """Floats that the client had to receive: at its first visit the whole model, then updates.

        Coded updates build on each other, so a returning client needs all that it missed, or the
        whole model if that is less.
        """
        whole = jnp.uint32(self.shared.params)
        coded = server["floats_last"]
        if self.settings.coding == "update":
            coded = server["floats_sent"] - client["floats_received"]
        return jnp.where((client["visited"] > 0) & (coded < whole), coded, whole)

    def loss(self, architecture, client, server, params, batch) -> jax.Array:
        model, shared = params["model"], params["shared_model"]
        features_f = architecture.extract(model["local_extractor"], batch.images)
        features_g = self.shared.extract(shared["extractor"], batch.images)
        logits_g = self.shared.classify(shared["header"], features_g)
        private = architecture.classify(model["header"], features_f), features_f
        mentee = logits_g, features_g @ params["projection"]
        return distillation_loss(self.settings, private, mentee, batch.labels, batch.weights)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        settings, training, received = self.settings, self.training, server["shared_model"]
        params = {"model": private_model(client), "shared_model": received}
        params["projection"] = client["projection"]
        optimizers = dict.fromkeys(params, sgd(training))
        optimizers["shared_model"] = sgd(training, learning_rate=settings.mentee_learning_rate)
        loss, key = partial(self.loss, architecture, client, server), jax.random.fold_in(key, 1)
        trained = train(training, key, params, loss, data, Partitioned(optimizers))

        mentee = trained.params["shared_model"]
        shared_model, floats_up = send(settings.coding, received, mentee, self.energy(server))
        info = {"loss": trained.loss}
        if settings.coding != "none":
            floats_down = self.floats_down(client, server)
            info |= {"floats_up": floats_up.astype(jnp.float32)}
            info |= {"floats_down": floats_down.astype(jnp.float32)}
        client = {
            **trained.params["model"],
            "projection": trained.params["projection"],
            "visited": jnp.ones_like(client["visited"]),
            "floats_received": server["floats_sent"],
        }
        return Update(client, {"shared_model": shared_model}, {"shared_model": weight}, info)

    def server_update(self, server, averaged) -> Server:
        known, new = server["shared_model"], averaged["shared_model"]
        shared_model, floats = send(self.settings.coding, known, new, self.energy(server))
        return {
            "shared_model": shared_model,
            "round": server["round"] + 1.0,
            "floats_last": floats,
            "floats_sent": server["floats_sent"] + floats,
        }
