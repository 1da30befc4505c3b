"""Synthetic images with class structure, for trying things out and for tests.

Every class has a few smooth random patterns. An image is one of them, shifted, at a random
contrast, overlaid with a smooth pattern of no class, and noise. A small network
learns this within a few epochs, but not in one.
"""

import numpy as np

from pfedafm_jax.base.errors import bad
from pfedafm_jax.data.sources.cifar import Arrays

PATTERNS_PER_CLASS = 3
NUM_DISTRACTORS = 32
MAX_SHIFT = 4
SIGNAL, DISTRACTION, NOISE = 30, 45, 70  # amplitudes, in grey levels of 256
AT_A_TIME = 64  # images at a time, so that they stay in the processor's cache


def make_synthetic(
    num_classes: int = 10, num_samples: int = 6000, seed: int = 0, image_size: int = 32
) -> Arrays:
    """Five sixths training, one sixth test images: uint8 [num, image_size, image_size, 3].

    The same arguments give the same images on every machine. Class sizes are equal, or nearly so.
    """
    least = {"num_classes": 2, "num_samples": 2 * num_classes, "seed": 0, "image_size": 4}
    for name, value in zip(least, (num_classes, num_samples, seed, image_size), strict=True):
        if value < least[name]:
            raise bad(name, value, f"{least[name]} or more")
    rng = np.random.Generator(np.random.PCG64(seed))
    # The margin lets a shifted pattern be cut out of a larger one.
    canvas = image_size + 2 * MAX_SHIFT
    patterns = _smooth(rng, num_classes * PATTERNS_PER_CLASS, canvas, SIGNAL)
    distractors = _smooth(rng, NUM_DISTRACTORS, canvas, DISTRACTION)
    num_test = max(num_samples // 6, 1)
    parts: list[np.ndarray] = []
    for num in (num_samples - num_test, num_test):
        labels = rng.permutation(np.arange(num) % num_classes)
        parts += [_images(rng, labels, patterns, distractors, image_size), labels.astype(np.int32)]
    return Arrays(*parts)


def _images(
    rng: np.random.Generator,
    labels: np.ndarray,
    patterns: np.ndarray,
    distractors: np.ndarray,
    size: int,
) -> np.ndarray:
    """uint8 [num, size, size, 3], one image per label."""
    num = len(labels)
    which = labels * PATTERNS_PER_CLASS + rng.integers(PATTERNS_PER_CLASS, size=num)
    contrast = rng.integers(8, 25, num, np.int16)  # in sixteenths
    other = rng.integers(len(distractors), size=num)
    shifts = rng.integers(2 * MAX_SHIFT + 1, size=(num, 4))
    # 16-bit integers hold every intermediate value and give the same images on every machine.
    scaled: dict[tuple[int, int], np.ndarray] = {}  # a pattern at a contrast
    each = zip(which.tolist(), contrast.tolist(), other.tolist(), shifts.tolist(), strict=True)
    images = np.empty((num, size, size, 3), np.uint8)
    for start in range(0, num, AT_A_TIME):
        some = images[start : start + AT_A_TIME]
        grey = np.frombuffer(rng.bytes(some.size), np.int8).reshape(some.shape).astype(np.int16)
        grey *= NOISE
        grey >>= 7
        grey += 128
        for image, (pattern, strength, distractor, shift) in zip(grey, each, strict=False):
            if (pattern, strength) not in scaled:
                scaled[pattern, strength] = (patterns[pattern] * np.int16(strength)) >> 4
            top, left, other_top, other_left = shift
            image += scaled[pattern, strength][top : top + size, left : left + size]
            across = slice(other_left, other_left + size)
            image += distractors[distractor, other_top : other_top + size, across]
        some[...] = grey.clip(0, 255, out=grey)
    return images


def _smooth(
    rng: np.random.Generator, num: int, size: int, amplitude: int, cell: int = 8
) -> np.ndarray:
    """int16 [num, size, size, 3] within +-`amplitude`: random on a coarse grid, linear between."""
    grid = size // cell + 2
    coarse = rng.integers(-amplitude, amplitude + 1, (num, grid, grid, 3))
    at = np.arange(size)
    low, weight = at // cell, at % cell
    down, across = weight[None, :, None, None], weight[None, None, :, None]
    rows = coarse[:, low] * (cell - down) + coarse[:, low + 1] * down
    both = rows[:, :, low] * (cell - across) + rows[:, :, low + 1] * across
    return (both // cell**2).astype(np.int16)
