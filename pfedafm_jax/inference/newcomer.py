"""A new client joins a trained run."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from pfedafm_jax.base.errors import PfedafmError, bad, whole
from pfedafm_jax.data.arrays import class_labels, standardised
from pfedafm_jax.data.images import read_pictures
from pfedafm_jax.engine.state import client_start, start_number
from pfedafm_jax.engine.visit import SingleClient
from pfedafm_jax.inference.client import TrainedClient
from pfedafm_jax.inference.opened import TrainedRun
from pfedafm_jax.training.batches import table_width


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
) -> TrainedClient:
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
    visits, seed = (
        whole(name, value, 2**30, "0 to 2^30 - 1")
        for name, value in {"visits": visits, "seed": seed}.items()
    )
    network = run.architecture(architecture or usual)
    pixels, numbers, rows = _own_data(run, images, labels, test_images, test_labels, seed)
    count, most = len(rows[0]), 2 * max(len(pixels) // 2, *run.sizes)
    method, number = run.method_for([*run.sizes, count]), run.num_clients + seed
    key = jax.random.key(config.seed)
    state = client_start(method, key, start_number(config, method, number, None), network)
    # Padded, so that newcomers of similar size share one program.
    padding = table_width([most]) - len(pixels)
    client = SingleClient.of(
        method,
        network,
        seed=config.seed,
        precision=config.precision,
        client=number,
        images=np.pad(pixels, [(0, padding)] + [(0, 0)] * (pixels.ndim - 1)),
        labels=np.pad(numbers, (0, padding)),
        rows=rows,
        widths=[table_width([len(own), *run.sizes]) for own in rows],
        weight=count,
    )
    history: list[dict[str, float]] = []
    for visit in range(visits + 1):
        if visit:
            state, stages = client.visit(state, run.server, run.round + visit, upload=False)
            if not stages[0].info["finite"]:
                raise PfedafmError(
                    f"visit {visit}: the newcomer's weights are no longer finite; a lower learning "
                    f"rate than {config.rate:g} is needed for this data"
                )
        found = client.evaluate(state, run.judged)
        # In the method's own order, since tracing sorts a dictionary.
        history.append({name: float(found[f"accuracy/{name}"]) for name in run.run.predictions})
        if log is not None:
            log(visit, history[-1])
    joined = {"visits": visits, "num_train": count, "seed": seed}
    card = run.card(network, None) | {"newcomer": joined, "accuracy": history[-1]}
    return TrainedClient(method, network, jax.device_get(state), run.judged, card, history)


def _own_data(
    run: TrainedRun, images: Any, labels: Any, test_images: Any, test_labels: Any, seed: int
) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """A newcomer's images and labels, checked, and which of them are to train and to test on."""
    if (test_images is None) != (test_labels is None):
        raise PfedafmError("test_images and test_labels are given together, or neither")
    data = run.run.about["data"]

    def ready(images: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
        rows, _ = read_pictures(np.asarray(images), run.method.shared.stored(1))
        pixels = standardised(rows, data["mean"], data["std"])
        return pixels, class_labels(labels, len(pixels), "labels", len(run.classes))

    pixels, numbers = ready(images, labels)
    if test_images is None:
        order = np.random.default_rng([seed, len(pixels)]).permutation(len(pixels))
        train, test = np.sort(order[len(order) // 5 :]), np.sort(order[: len(order) // 5])
    else:
        more = ready(test_images, test_labels)
        train, test = np.arange(len(pixels)), len(pixels) + np.arange(len(more[0]))
        pixels, numbers = np.concatenate([pixels, more[0]]), np.concatenate([numbers, more[1]])
    if not len(train) or not len(test):
        raise PfedafmError(
            f"{len(train)} images to train on and {len(test)} to test on; both are needed (5 images "
            "or more)"
        )
    return pixels, numbers, (train, test)
