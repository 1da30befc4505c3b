"""The augmentation against a plain numpy version that is given the same random draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedafm_jax.data import NORMALISATION, augment, normalise
from pfedafm_jax.data.augment import erase_box

KEY = jax.random.key(7)
fast_augment = jax.jit(augment, static_argnames=("flip", "erase", "crop"))


def some_images(num: int, *shape: int) -> np.ndarray:
    # No zeros, so that every zero in the result was put there by erasing or padding.
    shape = shape or (32, 32, 3)
    return np.random.default_rng(0).uniform(1, 2, (num, *shape)).astype(np.float32)


def in_numpy(key, images: np.ndarray, *, flip: bool, erase: bool, crop: bool) -> np.ndarray:
    """One image after the other, the way the released code does it."""
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i), 3))(
        jnp.arange(len(images))
    )
    flips = np.asarray(jax.vmap(lambda key: jax.random.bernoulli(key, 0.5))(keys[:, 0]))
    draws = np.asarray(
        jax.vmap(lambda key: jax.random.uniform(key, (5,), jnp.float32))(keys[:, 1]), np.float64
    )
    corners = np.asarray(jax.vmap(lambda key: jax.random.randint(key, (2,), 0, 9))(keys[:, 2]))
    out = []
    for position, image in enumerate(images):
        image = image.copy()
        height, width, channels = image.shape
        if flip and flips[position]:
            image = np.flip(image, axis=1)
        if erase:
            chance, area, aspect, down, right = draws[position]
            if chance < 0.5:
                area = height * width * (0.04 + 0.16 * area)
                aspect = np.exp(np.log(0.5) + aspect * (np.log(2.0) - np.log(0.5)))
                tall, wide = round(np.sqrt(area * aspect)), round(np.sqrt(area / aspect))
                top, left = int(down * (height - tall + 1)), int(right * (width - wide + 1))
                image = image.copy()
                image[top : top + tall, left : left + wide] = 0
        if crop:
            canvas = np.zeros((height + 8, width + 8, channels), np.float32)
            canvas[4:-4, 4:-4] = image
            top, left = corners[position]
            image = canvas[top : top + height, left : left + width]
        out.append(image)
    return np.stack(out)


@pytest.mark.parametrize("words", ["flip", "erase", "crop", "flip erase", "flip erase crop"])
def test_equals_the_numpy_version(words):
    images, chosen = some_images(48), {name: name in words for name in ("flip", "erase", "crop")}
    found = fast_augment(KEY, images, **chosen)
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, in_numpy(KEY, images, **chosen))


@pytest.mark.parametrize("shape", [(20, 28, 3), (28, 28, 1)])
def test_equals_the_numpy_version_on_other_sizes(shape):
    images = some_images(16, *shape)
    found = fast_augment(KEY, jnp.asarray(images))
    np.testing.assert_array_equal(found, in_numpy(KEY, images, flip=True, erase=True, crop=True))


def test_an_image_does_not_depend_on_the_rest_of_its_batch():
    images = jnp.asarray(some_images(12))
    np.testing.assert_array_equal(fast_augment(KEY, images)[:5], fast_augment(KEY, images[:5]))


def test_works_under_vmap_and_in_a_loop():
    images = jnp.asarray(some_images(6)).reshape(2, 3, 32, 32, 3)
    keys = jax.random.split(KEY, 2)
    one_by_one = jnp.stack(
        [fast_augment(key, batch) for key, batch in zip(keys, images, strict=True)]
    )
    np.testing.assert_array_equal(jax.jit(jax.vmap(augment))(keys, images), one_by_one)
    looped = jax.lax.map(lambda pair: augment(*pair), (keys, images))
    np.testing.assert_array_equal(looped, one_by_one)


def test_nothing_is_traced_when_all_is_off():
    images = jnp.asarray(some_images(2))
    jaxpr = jax.make_jaxpr(lambda key, x: augment(key, x, flip=False, erase=False, crop=False))(
        KEY, images
    )
    assert len(jaxpr.eqns) == 0


def test_erased_rectangles_have_the_documented_frequency_area_and_aspect():
    keys = jax.random.split(KEY, 4000)
    top, left, tall, wide = (
        np.asarray(x) for x in jax.jit(jax.vmap(lambda key: erase_box(key, 32, 32)))(keys)
    )
    erased = tall > 0
    assert abs(erased.mean() - 0.5) < 0.03
    assert (top >= 0).all() and (left >= 0).all() and (top + tall <= 32).all()
    assert (left + wide <= 32).all()
    area, aspect = (tall * wide)[erased] / 1024, (tall / wide)[erased]
    # Rounding to whole pixels moves the ends a little.
    assert 0.03 < area.min() < 0.05 and 0.19 < area.max() < 0.22 and abs(area.mean() - 0.12) < 0.005
    assert 0.43 < aspect.min() < 0.6 and 1.7 < aspect.max() < 2.3
    assert abs(np.log(aspect).mean()) < 0.05


def test_every_crop_and_mirror_occurs():
    images = jnp.broadcast_to(jnp.arange(1.0, 8 * 8 * 3 + 1).reshape(1, 8, 8, 3), (3000, 8, 8, 3))
    cropped = np.asarray(fast_augment(KEY, images, flip=False, erase=False))
    assert len(np.unique(cropped.reshape(3000, -1), axis=0)) == 81
    mirrored = np.asarray(fast_augment(KEY, images, erase=False, crop=False))
    share = (mirrored[:, 0, 0, 0] != 1).mean()
    assert abs(share - 0.5) < 0.04


@pytest.mark.parametrize("name", NORMALISATION)
def test_normalise_by_hand(name):
    mean, std = NORMALISATION[name]
    images = np.random.default_rng(1).integers(0, 256, (2, 5, 4, 4, 3), dtype=np.uint8)
    want = (images / 255 - np.array(mean)) / np.array(std)
    found = jax.jit(lambda x: normalise(x, mean, std))(images)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-6)
