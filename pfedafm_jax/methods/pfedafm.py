"""pFedAFM: each client has its own model and a small shared extractor; a trained vector mixes their
features.

A round of a participant (Algorithm 1):
  phase 1  the received shared extractor is frozen; local extractor, header, mix vector are trained
  phase 2  the header is frozen; the shared extractor is trained and uploaded

A participant is evaluated after phase 1 with the extractor it received. Phase 2 trains the same
network for every client, so participants of all architectures share one program.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.config.method_settings import MethodSettings, Rate, Share
from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.methods.standalone import init_private_model, private_model
from pfedafm_jax.models.architecture import Architecture
from pfedafm_jax.training.batches import Batch, ClientData
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.sgd import SGD, Partitioned, sgd
from pfedafm_jax.training.train import Trained, frozen_features, train


def mix_features(mix: jax.Array, shared: jax.Array, local: jax.Array) -> jax.Array:
    """Eq. 3: R = (1 - α) ∘ R^G + α ∘ R^F, features `[batch, features]`, mix `[features]` or `[1]`.

    >>> shared, local = jnp.zeros((1, 3)), jnp.full((1, 3), 4.0)
    >>> mix_features(jnp.array([0.0, 0.25, 1.0]), shared, local)
    Array([[0., 1., 4.]], dtype=float32)
    """
    mix = jnp.broadcast_to(mix[None, :], local.shape)
    return (1.0 - mix) * shared + mix * local


class PFedAFM(Method):
    """The method of the paper."""

    name = "pfedafm"
    title = "pFedAFM"

    class Settings(MethodSettings):
        mix_learning_rate: Rate = 1.0
        """Learning rate of the mix vector (the paper's η_α; it tries 0.001, 0.01, 0.1 and 1)."""
        mix_project: bool = True
        """Keep the mix vector in [0, 1] after every step."""
        mix_scalar: bool = False
        """Ablation: one mix weight for all features instead of one for each."""
        mix_start: Share = 1.0
        """Where the mix vector starts; 1: local features alone, 0: shared features alone."""
        mix_fixed: Share | None = None
        """Ablation: hold the mix vector at this value instead of training it."""
        training: Literal["iterative", "end_to_end"] = "iterative"
        """Two phases (the paper), or everything at once (its ablation)."""

    def init_client(self, key, architecture) -> Client:
        fixed = self.settings.mix_fixed
        start = self.settings.mix_start if fixed is None else fixed
        width = 1 if self.settings.mix_scalar else architecture.feature_size
        mix = jnp.full((width,), start, jnp.float32)
        return {**init_private_model(key, architecture), "mix": mix}

    def init_server(self, key) -> Server:
        return {"shared_extractor": self.shared.init_extractor(key)}

    @property
    def averaged_weights(self) -> tuple[str, ...]:
        return ("shared_extractor",)

    @property
    def mix_optimizer(self) -> SGD:
        rate = self.settings.mix_learning_rate if self.settings.mix_fixed is None else 0.0
        return sgd(self.training, learning_rate=rate, weight_decay=0.0, clip=False)

    def project(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Keeps the mix vector in [0, 1]."""
        mix = params["mix"]
        return {**params, "mix": jnp.clip(mix, 0.0, 1.0) if self.settings.mix_project else mix}

    @property
    def shared_parts(self) -> tuple[str, ...]:
        return () if self.settings.training == "end_to_end" else ("header",)

    def client_update(self, key, architecture, client, server, data, weight) -> Update:
        two_phases = self.settings.training == "iterative"
        train_model = train_local_model if two_phases else train_end_to_end
        key, received = jax.random.fold_in(key, 1), server["shared_extractor"]
        trained = train_model(self, architecture, key, client, received, data)
        client = {**client, **trained.params["model"], "mix": trained.params["mix"]}
        info = {"loss": trained.loss, "mix_mean": jnp.mean(client["mix"])}
        if two_phases:  # evaluated with the extractor it received
            return Update(client, {}, {}, info)
        upload = {"shared_extractor": trained.params["shared_extractor"]}
        return Update(client, upload, dict.fromkeys(upload, weight), info, {**server, **upload})

    def shared_update(self, key, client, server, data, weight) -> Update:
        key, received = jax.random.fold_in(key, 2), server["shared_extractor"]
        trained = train_shared_extractor(self, key, client["header"], received, data)
        upload = {"shared_extractor": trained.params}
        return Update({}, upload, {"shared_extractor": weight}, {"shared_loss": trained.loss})

    def predict(self, architecture, client, server, images) -> dict[str, jax.Array]:
        shared = self.shared.extract(server["shared_extractor"], images)
        local = architecture.extract(client["local_extractor"], images)
        classify = partial(architecture.classify, client["header"])
        return {
            "mixed": classify(mix_features(client["mix"], shared, local)),
            "small": classify(shared),
            "large": classify(local),
        }

    def cost(self, architecture, num_train, num_classes_seen) -> Cost:
        floats = self.shared.extractor_params
        # Phase 1 takes 3 passes of the local model and one of the shared extractor; phase 2 takes 3
        # of the small model.
        small = self.shared.extractor_macs
        macs = 3 * architecture.macs + small + 3 * (small + architecture.header_macs)
        if self.settings.training == "end_to_end":
            macs = 3 * architecture.macs + 3 * small
        return Cost(floats, floats, 2.0 * macs * num_train * self.training.local_epochs)


# ----------------------------------------------------------------------------------- the two phases


@partial(jax.jit, static_argnames=("architecture",))
def train_local_model(
    method: PFedAFM,
    architecture: Architecture,
    key: jax.Array,
    client: Client,
    shared_extractor: Tree,
    data: ClientData,
) -> Trained:
    """Phase 1: freeze the shared extractor; train `model` (local extractor, header) and `mix`."""
    training, extract = method.training, partial(method.shared.extract, shared_extractor)
    shared_features = frozen_features(training, extract, data)

    def loss(params: Tree, batch: Batch) -> jax.Array:
        shared = lax.stop_gradient(shared_features(batch))  # Eq. 2
        return mixed_loss(architecture, params, shared, batch)

    params = {"model": private_model(client), "mix": client["mix"]}
    optimizer = Partitioned({"model": sgd(training), "mix": method.mix_optimizer})
    return train(training, key, params, loss, data, optimizer, project=method.project)  # Eq. 6


def mixed_loss(
    architecture: Architecture, params: Tree, shared: jax.Array, batch: Batch
) -> jax.Array:
    """Cross-entropy of the header on the mixture of shared and local features (Eqs. 4 and 5)."""
    local = architecture.extract(params["model"]["local_extractor"], batch.images)  # Eq. 2
    mixed = mix_features(params["mix"], shared, local)  # Eq. 3
    logits = architecture.classify(params["model"]["header"], mixed)  # Eq. 4
    return cross_entropy(logits, batch.labels, batch.weights)  # Eq. 5


@jax.jit
def train_shared_extractor(
    method: Method, key: jax.Array, header: Tree, shared_extractor: Tree, data: ClientData
) -> Trained:
    """Phase 2: freeze the client's header; train the shared extractor under it (Eqs. 7 to 10)."""

    def loss(params: Tree, batch: Batch) -> jax.Array:
        features = method.shared.extract(params, batch.images)  # Eq. 7
        logits = method.shared.classify(lax.stop_gradient(header), features)  # Eq. 8
        return cross_entropy(logits, batch.labels, batch.weights)  # Eq. 9

    return train(method.training, key, shared_extractor, loss, data)  # Eq. 10


@partial(jax.jit, static_argnames=("architecture",))
def train_end_to_end(
    method: PFedAFM,
    architecture: Architecture,
    key: jax.Array,
    client: Client,
    shared_extractor: Tree,
    data: ClientData,
) -> Trained:
    """The paper's ablation: both extractors, header and mix vector at once on the mixture."""

    def loss(params: Tree, batch: Batch) -> jax.Array:
        shared = method.shared.extract(params["shared_extractor"], batch.images)
        return mixed_loss(architecture, params, shared, batch)

    params = {"model": private_model(client), "mix": client["mix"]}
    params["shared_extractor"] = shared_extractor
    optimizers = dict.fromkeys(params, sgd(method.training)) | {"mix": method.mix_optimizer}
    optimizer, project = Partitioned(optimizers), method.project
    return train(method.training, key, params, loss, data, optimizer, project=project)
