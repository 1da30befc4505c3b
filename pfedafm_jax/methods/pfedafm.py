"""pFedAFM: a shared small extractor beside each client's own model, their features mixed by a
trained weight vector.

A round of a participant (Algorithm 1):
  phase 1  the received shared extractor is frozen; local extractor, header and mix vector are
  trained
  phase 2  the header is frozen; the shared extractor is trained and uploaded

A participant is judged after phase 1 with the extractor it received. Phase 2 trains the same
network at every client, so participants of all architectures go through it together.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from pfedafm_jax.methods.base import Client, Cost, Method, Server, Tree, Update
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import MethodSettings, Rate, Share
from pfedafm_jax.training import (
    SGD,
    Batch,
    ClientData,
    Partitioned,
    Trained,
    cross_entropy,
    extract_all,
    sgd,
    train,
)


def mix_features(mix: jax.Array, shared: jax.Array, local: jax.Array) -> jax.Array:
    """Eq. 3: R = (1 - α) ∘ R^G + α ∘ R^F, features `[batch, features]`, mix `[features]` or `[1]`.

    >>> mix_features(mix=jnp.array([0.0, 0.25, 1.0]), shared=jnp.zeros((1, 3)), local=jnp.full((1, 3), 4.0))
    Array([[0., 1., 4.]], dtype=float32)
    """
    mix = jnp.broadcast_to(mix[None, :], local.shape)
    return (1.0 - mix) * shared + mix * local


@dataclass(frozen=True)
class PFedAFM(Method):
    """The method of the paper."""

    name = "pfedafm"
    title = "pFedAFM"

    @dataclass(frozen=True)
    class Settings(MethodSettings):
        """Settings of pFedAFM's own; the last five reproduce what the released code does instead of
        the paper."""

        mix_learning_rate: Rate = 1.0
        """Learning rate of the mix vector (the paper's η_α; it tries 0.001, 0.01, 0.1 and 1)."""
        mix_project: bool = True
        """Keep the mix vector in [0, 1] after every step."""
        mix_scalar: bool = False
        """Ablation: one mix weight for all features instead of one for each."""
        mix_fixed: Share | None = None
        """Ablation: hold the mix vector at this value instead of training it."""
        training: Literal["iterative", "end_to_end"] = "iterative"
        """Two phases (the paper), or everything at once (its ablation)."""
        mix_weight_decay: Rate = 0.0
        """Released code: weight decay on the mix vector (1e-3 there)."""
        mix_relay: bool = False
        """Released code: one mix vector handed from client to client instead of one each."""
        leak_momentum: bool = False
        """Released code: momentum of the shared extractor and the mix vector carried from client to
        client."""
        send_header: bool = False
        """Released code: an untrained header travels with the shared extractor (counted as
        traffic)."""

    def init_client(self, key: jax.Array, architecture: Architecture) -> Client:
        extractor_key, header_key = jax.random.split(key)
        start = 1.0 if self.settings.mix_fixed is None else self.settings.mix_fixed
        return {
            "local_extractor": architecture.init_extractor(extractor_key),
            "header": architecture.init_header(header_key),
            "mix": jnp.full(
                (1 if self.settings.mix_scalar else architecture.feature_size,), start, jnp.float32
            ),
        }

    def init_server(self, key: jax.Array) -> Server:
        return {"shared_extractor": self.shared.init_extractor(key)}

    @property
    def mix_optimizer(self) -> SGD:
        rate = self.settings.mix_learning_rate if self.settings.mix_fixed is None else 0.0
        return sgd(
            self.training,
            learning_rate=rate,
            weight_decay=self.settings.mix_weight_decay,
            clip=False,
        )

    def project(self, params: dict[str, Tree]) -> dict[str, Tree]:
        """Keeps the mix vector in [0, 1]."""
        return (
            {**params, "mix": jnp.clip(params["mix"], 0.0, 1.0)}
            if self.settings.mix_project
            else params
        )

    @property
    def shared_parts(self) -> tuple[str, ...]:
        return () if self.settings.training == "end_to_end" else ("header",)

    def client_update(
        self,
        key: jax.Array,
        architecture: Architecture,
        client: Client,
        server: Server,
        data: ClientData,
        weight: jax.Array,
    ) -> Update:
        train_model = (
            train_end_to_end if self.settings.training == "end_to_end" else train_local_model
        )
        key = jax.random.fold_in(key, 1)
        trained = train_model(self, architecture, key, client, server["shared_extractor"], data)
        client = {**client, **trained.params["model"], "mix": trained.params["mix"]}
        upload = {
            name: trained.params[name] for name in ("shared_extractor",) if name in trained.params
        }
        info = {"loss": trained.loss, "mix_mean": jnp.mean(client["mix"])}
        # Iterative: judged with the extractor it received (the paper). End to end: with the one it
        # has just trained.
        view = {**server, **upload} if upload else None
        return Update(client, upload, dict.fromkeys(upload, weight), info, view)

    def shared_update(
        self, key: jax.Array, client: Client, server: Server, data: ClientData, weight: jax.Array
    ) -> Update:
        key = jax.random.fold_in(key, 2)
        trained = train_shared_extractor(
            self, key, client["header"], server["shared_extractor"], data
        )
        upload = {"shared_extractor": trained.params}
        return Update({}, upload, {"shared_extractor": weight}, {"shared_loss": trained.loss})

    def predict(
        self, architecture: Architecture, client: Client, server: Server, images: jax.Array
    ) -> dict[str, jax.Array]:
        shared = self.shared.extract(server["shared_extractor"], images)
        local = architecture.extract(client["local_extractor"], images)
        classify = partial(architecture.classify, client["header"])
        return {
            "mixed": classify(mix_features(client["mix"], shared, local)),
            "small": classify(shared),
            "large": classify(local),
        }

    def cost(self, architecture: Architecture, num_train: float, num_classes_seen: float) -> Cost:
        floats = self.shared.extractor_params + (
            self.shared.header_params if self.settings.send_header else 0
        )
        forward, shared = architecture.macs, self.shared.extractor_macs + architecture.header_macs
        # Phase 1 is 3 passes of the local model and one of the shared extractor; phase 2 is 3 of
        # the small model.
        macs = 3 * forward + self.shared.extractor_macs + 3 * shared
        if self.settings.training == "end_to_end":
            macs = 3 * forward + 3 * self.shared.extractor_macs
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
    """Phase 1: freeze the shared extractor; train local extractor, header (`model`) and mix vector
    together."""
    training = method.training
    extract_shared = partial(method.shared.extract, shared_extractor)
    # Frozen, and on images that do not change, the shared features are the same in every epoch:
    # compute them once.
    table = None if training.augments else extract_all(training, extract_shared, data)

    def loss(params: Tree, batch: Batch) -> jax.Array:
        shared = extract_shared(batch.images) if table is None else table[batch.positions]
        local = architecture.extract(params["model"]["local_extractor"], batch.images)  # Eq. 2
        mixed = mix_features(params["mix"], lax.stop_gradient(shared), local)  # Eq. 3
        return cross_entropy(
            architecture.classify(params["model"]["header"], mixed), batch.labels, batch.weights
        )

    params = {
        "model": {part: client[part] for part in ("local_extractor", "header")},
        "mix": client["mix"],
    }
    optimizer = Partitioned({"model": sgd(training), "mix": method.mix_optimizer})
    return train(training, key, params, loss, data, optimizer, project=method.project)  # Eq. 6


@jax.jit
def train_shared_extractor(
    method: PFedAFM, key: jax.Array, header: Tree, shared_extractor: Tree, data: ClientData
) -> Trained:
    """Phase 2: freeze the client's header; train the shared extractor on top of it (Eqs. 7 to
    10)."""

    def loss(params: Tree, batch: Batch) -> jax.Array:
        logits = method.shared.classify(
            lax.stop_gradient(header), method.shared.extract(params, batch.images)
        )
        return cross_entropy(logits, batch.labels, batch.weights)

    return train(method.training, key, shared_extractor, loss, data, sgd(method.training))


@partial(jax.jit, static_argnames=("architecture",))
def train_end_to_end(
    method: PFedAFM,
    architecture: Architecture,
    key: jax.Array,
    client: Client,
    shared_extractor: Tree,
    data: ClientData,
) -> Trained:
    """The paper's ablation: both extractors, header and mix vector trained at once on the mixed
    features."""
    training = method.training

    def loss(params: Tree, batch: Batch) -> jax.Array:
        shared = method.shared.extract(params["shared_extractor"], batch.images)
        local = architecture.extract(params["model"]["local_extractor"], batch.images)
        mixed = mix_features(params["mix"], shared, local)
        return cross_entropy(
            architecture.classify(params["model"]["header"], mixed), batch.labels, batch.weights
        )

    model = {part: client[part] for part in ("local_extractor", "header")}
    params = {"model": model, "mix": client["mix"], "shared_extractor": shared_extractor}
    optimizer = Partitioned(
        {"model": sgd(training), "mix": method.mix_optimizer, "shared_extractor": sgd(training)}
    )
    return train(training, key, params, loss, data, optimizer, project=method.project)
