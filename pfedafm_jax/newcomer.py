"""A new client joins a trained run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pfedafm_jax.data.pictures import read_pictures
from pfedafm_jax.data.values import standardised
from pfedafm_jax.engine.devices import matmul_precision
from pfedafm_jax.engine.state import client_start
from pfedafm_jax.engine.visit import Common, Slots, accuracies, work
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods.base import Client
from pfedafm_jax.models import Architecture
from pfedafm_jax.settings import bad
from pfedafm_jax.statistics import OWN
from pfedafm_jax.trained import TrainedClient, TrainedRun
from pfedafm_jax.training import ClientData, table_width


@dataclass(frozen=True)
class Newcomer(TrainedClient):
    """A client that joined after training; `history[v]` has its accuracies after v visits."""

    history: list[dict[str, float]] = field(default_factory=list)


def join(
    run: TrainedRun,
    images: np.ndarray,
    labels: np.ndarray,
    architecture: str | None = None,
    visits: int = 5,
    *,
    test_images: np.ndarray | None = None,
    test_labels: np.ndarray | None = None,
    seed: int = 0,
    log: Callable[[int, dict[str, float]], None] | None = None,
) -> Newcomer:
    """Trains a client that was never there, as a participant would; the run stays as it is.

    It starts from new weights of its own and from what the run's clients share, and at every visit
    meets the same server: it uploads nothing, and a stage that only makes an upload is left out,
    unless there are statistics of the shared network to be had from it.

    Args:
        images, labels: as the run's: uint8 `[num, height, width, channels]`, or features or token
            ids; and classes `[num]`.
        architecture: that of its network; by default the run's first. Methods in which all clients
            have the shared network accept only that.
        visits: rounds of local training.
        test_images, test_labels: what it is evaluated on; by default a fifth of the images, held
            out of training.
        seed: for its initial weights and its batches.
        log: called with the number and the accuracies of each visit, from 0.

    Returns:
        The client, with its accuracies in `history`.
    """
    kind, config = type(run.method), run.config
    usual = config.shared_extractor if kind.one_network else config.architectures[0]
    if kind.one_network and architecture not in (None, usual):
        raise bad("architecture", architecture, f"{usual}, which all clients of {kind.title} have")
    for name, value in {"visits": visits, "seed": seed}.items():
        if not 0 <= value < 2**30:
            raise bad(name, value, "0 to 2^30 - 1")
    network = run.architecture(architecture or usual)
    data = _client_data(run, images, labels, test_images, test_labels, seed)
    method = run.method_for([*run.sizes, int(data.num_train)])
    number, key = run.num_clients + seed, jax.random.key(config.seed)
    state = client_start(method, key, len(method.architectures) + number, network)
    common = Common(
        jax.tree.map(jnp.asarray, method),
        data.images,
        data.labels,
        jax.device_put(run.server),
        jax.random.key_data(key),
        jnp.int32(0),
    )
    slot = Slots(
        client=jnp.int32(number),
        train=data.train,
        num_train=data.num_train,
        test=data.test,
        num_test=data.num_test,
        weight=jnp.float32(data.num_train),
        place=jnp.int32(0),
    )
    history: list[dict[str, float]] = []
    for visit in range(visits + 1):
        if visit:
            now = common._replace(round=jnp.int32(run.round + visit))
            with matmul_precision(config.precision):
                state, finite = _visit(now, network, state, slot)
            if not finite:
                raise PfedafmError(
                    f"visit {visit}: the newcomer's weights are no longer finite; a lower learning "
                    f"rate than {config.rate:g} is needed for this data"
                )
        with matmul_precision(config.precision):
            found = _accuracies(common, network, state, data)
        # In the method's own order, since tracing sorts a dictionary.
        history.append({name: float(found[f"accuracy/{name}"]) for name in run.run.predictions})
        if log is not None:
            log(visit, history[-1])
    joined = {"visits": visits, "num_train": int(data.num_train), "seed": seed}
    card = run.card(network, None) | {"newcomer": joined, "accuracy": history[-1]}
    return Newcomer(method, network, jax.device_get(state), run.server, card, history)


@partial(jax.jit, static_argnums=1)
def _visit(common: Common, architecture: Architecture, state: Client, slot: Slots):
    visit = work(architecture, common, state, slot)
    state, finite = visit.state, visit.info["finite"]
    if OWN in state and common.method.shared_parts:
        parts = {name: state[name] for name in (*common.method.shared_parts, OWN)}
        state = {**state, OWN: work(None, common, parts, slot).state[OWN]}
    return state, finite


@partial(jax.jit, static_argnums=1)
def _accuracies(common: Common, architecture: Architecture, state: Client, data: ClientData):
    return accuracies(common.method, architecture, state, common.server, data)


def _client_data(run: TrainedRun, images, labels, test_images, test_labels, seed) -> ClientData:
    """A newcomer's images as a client's data, checked."""
    if (test_images is None) != (test_labels is None):
        raise PfedafmError("test_images and test_labels are given together, or neither")
    data, classes = run.run.about["data"], len(run.classes)

    def ready(images: Any) -> np.ndarray:
        rows, _ = read_pictures(np.asarray(images), run.method.shared.stored(1))
        return standardised(rows, data["mean"], data["std"])

    pixels = ready(images)
    numbers = _labels(labels, len(pixels), classes)
    order = np.random.default_rng([seed, len(pixels)]).permutation(len(pixels))
    train, test = np.sort(order[len(order) // 5 :]), np.sort(order[: len(order) // 5])
    if test_images is not None:
        more = ready(test_images)
        train, test = np.arange(len(pixels)), len(pixels) + np.arange(len(more))
        numbers = np.concatenate([numbers, _labels(test_labels, len(more), classes)])
        pixels = np.concatenate([pixels, more])
    if not len(train) or not len(test):
        raise PfedafmError(
            f"{len(train)} images to train on and {len(test)} to test on; both are needed (5 images "
            "or more)"
        )
    # Padded, so that newcomers of similar size share one program.
    total = table_width([2 * max(len(pixels) // 2, *run.sizes)])
    rows = [_padded(part, table_width([len(part), *run.sizes])) for part in (train, test)]
    return ClientData(
        jnp.asarray(_padded(pixels, total)),
        jnp.asarray(_padded(numbers, total), jnp.int32),
        jnp.asarray(rows[0], jnp.int32),
        jnp.int32(len(train)),
        jnp.asarray(rows[1], jnp.int32),
        jnp.int32(len(test)),
    )


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def _labels(labels: Any, count: int, num_classes: int) -> np.ndarray:
    found = np.asarray(labels)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise PfedafmError(
            f"labels: {found.dtype} {list(found.shape)}; accepted: {count} integers, one an image"
        )
    if count and not (found.min() >= 0 and found.max() < num_classes):
        raise PfedafmError(
            f"labels run from {found.min()} to {found.max()}; accepted: 0 to {num_classes - 1}, the "
            "classes of the run"
        )
    return found
