"""Arrays of any kind as inputs of networks: pixels, features, token ids.

pixels      uint8 [num, height, width, channels], kept as bytes and normalised in every batch;
            grey ones may lack the last axis
features    floats and booleans [num, …], and 16-bit pixels: float32, normalised once, each feature
            of the last axis by its mean and deviation over the training rows
token ids   other integers [num, …], from 0 on: int32, as they are
"""

from collections.abc import Sequence

import numpy as np

from pfedafm_jax.base.errors import PfedafmError

ACCEPTED = (
    "uint8 pixels [num, height, width, channels] (grey ones may lack channels), floats [num, …], "
    "or token ids, integers [num, …]"
)
AT_A_TIME = 512  # rows at a time, so that they stay in the processor's cache
LARGEST = 1e30  # limit of a feature, so that its square fits float32
CONSTANT = 1e-6  # a feature that varies by less than this fraction of its mean counts as constant


def kept(values: np.ndarray, what: str) -> np.ndarray:
    """Rows as pixels (uint8, with channels), finite floats, or int32 token ids."""
    kind = values.dtype.kind
    if values.ndim < 2 or 0 in values.shape[1:] or kind not in "buif":
        raise PfedafmError(f"{what} is {values.dtype} {values.shape}; accepted is {ACCEPTED}")
    pixels = values.dtype in (np.uint8, np.uint16) and values.ndim > 2
    if pixels and values.ndim == 3:
        values = values[..., None]
    if values.dtype == np.uint8 and pixels:
        return values
    if pixels or kind == "b" or values.dtype == np.float16:
        values, kind = values.astype(np.float32), "f"
    problem, accepted = np.zeros(0, int), f"finite numbers up to {LARGEST:g}"
    for start in range(0, len(values), AT_A_TIME):
        block = values[start : start + AT_A_TIME]
        fine = np.abs(block) <= LARGEST if kind == "f" else (block >= 0) & (block < 2**31)
        if not fine.all():
            problem = np.argwhere(~fine)[0] + [start, *[0] * (values.ndim - 1)]
            break
    if len(problem):
        if kind != "f":
            accepted = "token ids from 0 to 2^31 - 1; other quantities are given as floats"
        at = ", ".join(map(str, problem))
        raise PfedafmError(f"{what}[{at}] is {values[tuple(problem)]}; accepted: {accepted}")
    return values if kind == "f" else values.astype(np.int32)


def class_labels(
    labels: np.ndarray, count: int, what: str, num_classes: int | None = None
) -> np.ndarray:
    """Labels of so many samples as int32 `[count]`; raises on anything else, or beyond the classes
    where their number is known."""
    labels = np.asarray(labels)
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        found = f"{what} is {labels.dtype} {labels.shape}"
        raise PfedafmError(f"{found}; accepted are {count} integers, one per image")
    most = 2**31 - 1 if num_classes is None else num_classes
    if count and not 0 <= labels.min() <= labels.max() < most:
        accepted = "the first class must be 0"
        if num_classes is not None:
            accepted = f"accepted: 0 to {num_classes - 1}, the classes of the run"
        raise PfedafmError(f"{what} run from {labels.min()} to {labels.max()}; {accepted}")
    return labels.astype(np.int32)


def statistics(values: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of what `kept` returned: of pixels, scaled to 0..1, by channel; of features by
    the last axis; token ids have none."""
    if values.dtype == np.uint8:
        return channel_statistics(values)
    if values.dtype == np.int32:
        return (), ()
    table = values.reshape(-1, values.shape[-1])
    blocks = [table[start : start + AT_A_TIME] for start in range(0, len(table), AT_A_TIME)]
    count, zeros = max(len(table), 1), np.zeros(table.shape[1])
    mean = sum((block.sum(axis=0, dtype=np.float64) for block in blocks), zeros) / count
    squares = sum((np.square(block - mean).sum(axis=0) for block in blocks), zeros)
    return tuple(mean.tolist()), divisors(mean, np.sqrt(squares / count))


def divisors(mean: np.ndarray, std: np.ndarray, pixels: bool = False) -> tuple[float, ...]:
    """Deviations to divide by: those of constants would divide by zero, or amplify rounding."""
    if pixels:
        return tuple(np.maximum(std, 1 / 255).tolist())
    return tuple(np.where(std <= CONSTANT * np.abs(mean), 1.0, std).tolist())


def channel_statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) by channel of uint8 [num, height, width, channels], scaled to 0..1."""
    values, mean, std = np.arange(256) / 255, [], []
    # From histograms of the 256 values, without a float copy of the images; a few images at a time,
    # so that they stay in the cache.
    totals = np.zeros((images.shape[-1], 256), np.int64)
    for start in range(0, len(images), AT_A_TIME):
        pixels = images[start : start + AT_A_TIME].reshape(-1, images.shape[-1])
        for channel, counts in enumerate(totals):
            counts += np.bincount(pixels[:, channel], minlength=256)
    for counts in totals:
        weights = counts / max(counts.sum(), 1)
        mean.append(float(np.sum(weights * values)))
        variance = float(np.sum(weights * (values - mean[-1]) ** 2))
        std.append(variance**0.5)
    return tuple(mean), divisors(np.array(mean), np.array(std), pixels=True)


def standardised(values: np.ndarray, mean: Sequence[float], std: Sequence[float]) -> np.ndarray:
    """Features as float32, minus `mean`, over `std`; pixels and token ids as they are."""
    if values.dtype.kind != "f":
        return values
    found = np.empty(values.shape, np.float32)
    for start in range(0, len(values), AT_A_TIME):
        part = slice(start, start + AT_A_TIME)
        # In float64, to keep small differences of large numbers.
        found[part] = (values[part] - np.asarray(mean)) / np.asarray(std)
    return found
