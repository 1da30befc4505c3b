"""Normalisation and augmentation as in the released code, on the device, under `jit` and `vmap`.

In its order: normalise, mirror, erase a rectangle, crop. The erased rectangle and the padding are
zero *after* normalisation, that is, the mean colour.
"""

import jax
import jax.numpy as jnp

FLIP_PROBABILITY = 0.5
ERASE_PROBABILITY = 0.5
ERASE_AREA = (0.04, 0.2)  # of the image
ERASE_ASPECT = (0.5, 2.0)  # height / width, uniform in its logarithm
CROP_PADDING = 4


def normalise(images: jax.Array, mean: tuple[float, ...], std: tuple[float, ...]) -> jax.Array:
    """uint8 [..., height, width, channels] to float32: scaled to 0..1, minus `mean`, over `std`.

    Features are not scaled. Without means everything stays as it is: token ids, and features that
    were normalised before, as those of a dataset are.
    """
    if not mean:
        return images
    # Tests forbid implicit rank promotion, so the channel vectors are given all axes.
    per_channel = (1,) * (images.ndim - 1) + (len(mean),)
    scaled = images.astype(jnp.float32) / 255.0 if images.dtype == jnp.uint8 else images
    shift = jnp.array(mean, jnp.float32).reshape(per_channel)
    scale = jnp.array(std, jnp.float32).reshape(per_channel)
    return (scaled - shift) / scale


def augment(
    key: jax.Array, images: jax.Array, *, flip: bool = True, erase: bool = True, crop: bool = True
) -> jax.Array:
    """Randomly mirror, erase and crop normalised images float [batch, height, width, channels].

    The result for image i depends on `key`, i and the image, not on what else is in the batch. The
    switches are static: what is off is not traced, and does not affect the others.
    """
    if not (flip or erase or crop):
        return images
    positions = jnp.arange(images.shape[0], dtype=jnp.uint32)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, positions)

    def one(key: jax.Array, image: jax.Array) -> jax.Array:
        flip_key, erase_key, crop_key = jax.random.split(key, 3)
        if flip:
            image = random_flip(flip_key, image)
        if erase:
            image = random_erase(erase_key, image)
        if crop:
            image = random_crop(crop_key, image)
        return image

    return jax.vmap(one)(keys, images)


def random_flip(key: jax.Array, image: jax.Array) -> jax.Array:
    """Mirror [height, width, channels] left to right with probability 0.5."""
    return jnp.where(jax.random.bernoulli(key, FLIP_PROBABILITY), image[:, ::-1], image)


def random_erase(key: jax.Array, image: jax.Array) -> jax.Array:
    """Set a random rectangle of [height, width, channels] to zero with probability 0.5."""
    height, width, _ = image.shape
    top, left, tall, wide = erase_box(key, height, width)
    rows, columns = jnp.arange(height)[:, None, None], jnp.arange(width)[None, :, None]
    inside_rows = (rows >= top) & (rows < top + tall)
    inside_columns = (columns >= left) & (columns < left + wide)
    return jnp.where(inside_rows & inside_columns, jnp.zeros((), image.dtype), image)


def erase_box(
    key: jax.Array, height: int, width: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(top, left, height, width) of the rectangle to erase, int32; of height 0 for none."""
    draws = jax.random.uniform(key, (5,), jnp.float32)
    area = height * width * (ERASE_AREA[0] + draws[1] * (ERASE_AREA[1] - ERASE_AREA[0]))
    aspect = ERASE_ASPECT[0] * (ERASE_ASPECT[1] / ERASE_ASPECT[0]) ** draws[2]
    # If an image is at most 2.5 times as long as wide, the rectangle fits; otherwise it is cut off.
    tall = jnp.minimum(jnp.round(jnp.sqrt(area * aspect)), height).astype(jnp.int32)
    wide = jnp.minimum(jnp.round(jnp.sqrt(area / aspect)), width).astype(jnp.int32)
    top = _below(draws[3], height - tall + 1)
    left = _below(draws[4], width - wide + 1)
    return top, left, jnp.where(draws[0] < ERASE_PROBABILITY, tall, 0), wide


def random_crop(key: jax.Array, image: jax.Array) -> jax.Array:
    """Pad [height, width, channels] by 4 zeros on every side and crop to the old size."""
    padded = jnp.pad(image, ((CROP_PADDING, CROP_PADDING), (CROP_PADDING, CROP_PADDING), (0, 0)))
    top, left = jax.random.randint(key, (2,), 0, 2 * CROP_PADDING + 1)
    # Under vmap on a CPU, two slices along one axis are faster than one along both.
    rows = jax.lax.dynamic_slice_in_dim(padded, top, image.shape[0], axis=0)
    return jax.lax.dynamic_slice_in_dim(rows, left, image.shape[1], axis=1)


def _below(draw: jax.Array, limit: jax.Array) -> jax.Array:
    """A whole number in 0..limit-1 from a draw in [0, 1); a product can round up to `limit`."""
    return jnp.minimum((draw * limit.astype(jnp.float32)).astype(jnp.int32), limit - 1)
