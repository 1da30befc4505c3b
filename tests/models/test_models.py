"""The networks of Table 1 to the last parameter, and networks of one's own."""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.models import cnn
from pfedafm_jax.models.architecture import describe, register_extractor

CNNS = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
EXTRACTOR_PARAMS = (2_616_548, 1_810_132, 1_315_548, 1_055_348, 665_048)
PARAMS = {
    10: (2_621_558, 1_815_142, 1_320_558, 1_060_358, 670_058),
    100: (2_666_648, 1_860_232, 1_365_648, 1_105_448, 715_148),
}
MACS = (4.826, 3.386, 3.526, 3.266, 2.876)  # millions, 10 classes


@pytest.mark.parametrize("index", range(5))
def test_parameters_and_multiply_adds(index):
    for num_classes in (10, 100):
        found = describe(CNNS[index], num_classes)
        assert found.params == PARAMS[num_classes][index]
        assert found.extractor_params == EXTRACTOR_PARAMS[index]
        assert found.header_params == 501 * num_classes
    assert describe(CNNS[index], 10).macs / 1e6 == pytest.approx(MACS[index], abs=5e-4)


def test_counts_are_those_of_the_arrays():
    found = describe("cnn5", 10)
    extractor = jax.eval_shape(found.init_extractor, jax.random.key(0))
    header = jax.eval_shape(found.init_header, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(extractor)) == 665_048
    assert extractor["conv1"]["kernel"].shape == (5, 5, 3, 16)
    assert extractor["conv2"]["kernel"].shape == (5, 5, 16, 32)
    assert extractor["fc1"]["kernel"].shape == (800, 500)
    assert header["kernel"].shape == (500, 10)
    # Odd images lose what pooling drops: 29 → 25 → 12 → 8 → 4 and 31 → 27 → 13 → 9 → 4.
    odd = describe("cnn5", 10, (29, 31, 1))
    extractor = jax.eval_shape(odd.init_extractor, jax.random.key(0))
    assert extractor["fc1"]["kernel"].shape == (4 * 4 * 32, 500)


@pytest.mark.parametrize(
    ("layer", "fan_in"), [("conv1", 75), ("conv2", 400), ("fc1", 800), ("fc2", 500)]
)
def test_torch_initialisation_is_uniform_within_its_bound(layer, fan_in):
    params = jax.jit(describe("cnn5", 10).init_extractor)(jax.random.key(1))[layer]
    for values in (np.asarray(params["kernel"]).ravel(), np.asarray(params["bias"]).ravel()):
        scaled = np.sort((values * math.sqrt(fan_in) + 1) / 2)  # should be U(0, 1)
        assert scaled[0] >= -1e-6 and scaled[-1] <= 1 + 1e-6
        # Kolmogorov-Smirnov: 2.2 / √n is passed once in 10,000
        distance = np.max(np.abs(scaled - (np.arange(len(scaled)) + 0.5) / len(scaled)))
        assert distance < 2.2 / math.sqrt(len(scaled))


def test_no_two_layers_and_no_two_keys_start_alike():
    init = jax.jit(describe("cnn5", 10).init_extractor)
    one, other = init(jax.random.key(1)), init(jax.random.key(2))
    chex.assert_trees_all_equal(one, init(jax.random.key(1)))
    firsts = [np.asarray(leaf).ravel()[:3] for leaf in jax.tree.leaves((one, other))]
    assert len({tuple((first / np.abs(first).max()).tolist()) for first in firsts}) == len(firsts)


def test_header_is_initialised_by_the_feature_size():
    header = jax.jit(describe("small_a", 10, (8, 8, 3), 12).init_header)(jax.random.key(0))
    assert 0.8 / math.sqrt(12) < np.abs(header["kernel"]).max() <= 1 / math.sqrt(12)
    assert np.abs(header["bias"]).max() > 0


def test_flax_initialisation_has_zero_biases_and_lecun_variance():
    layer = cnn.Convolution(64, "flax")
    header = describe("cnn5", 10, initialisation="flax").header
    for module, inputs, fan_in in ((layer, 3, 75), (header, jnp.zeros((1, 500)), 500)):
        init = jax.jit(lambda key, m=module, i=inputs: m.init(key, i)["params"])
        params = init(jax.random.key(0))
        assert not np.any(params["bias"])
        assert np.var(params["kernel"]) * fan_in == pytest.approx(1, abs=0.1)


def test_representation_is_not_negative():
    found = describe("small_a", 4, (8, 8, 3), 12)
    params = jax.jit(found.init_extractor)(jax.random.key(0))
    features = jax.jit(found.extract)(params, jax.random.normal(jax.random.key(1), (9, 8, 8, 3)))
    assert float(jnp.min(features)) == 0


class Flat(nn.Module):
    width: int = 7

    @nn.compact
    def __call__(self, images):
        return nn.Dense(self.width)(images.reshape(images.shape[0], -1))


def test_another_width_gets_a_linear_layer_and_the_right_one_none(registered):
    register_extractor("flat", Flat(7))
    found = describe("flat", 4, (8, 8, 3), 12)
    assert found.extractor_params == (192 * 7 + 7) + (7 * 12 + 12)
    assert found.extractor_macs == pytest.approx(192 * 7 + 7 * 12, rel=0.02)
    params = jax.eval_shape(found.init_extractor, jax.random.key(0))
    assert jax.eval_shape(found.extract, params, jnp.zeros((2, 8, 8, 3))).shape == (2, 12)
    register_extractor("flat", Flat(12))  # which replaces it, and has the right width
    assert describe("flat", 4, (8, 8, 3), 12).extractor_params == 192 * 12 + 12


def test_a_features_field_is_set_to_the_wanted_width():
    for size in (12, 20):
        found = describe("small_b", 4, (8, 8, 3), size)
        # conv 5·5·3·3 + 3, fc1 12·10 + 10, fc2 10·size + size
        assert found.extractor_params == 228 + 130 + 11 * size


def test_images_that_do_not_fit_are_named():
    for size in (8, 15):
        said = rf"'cnn1' .*needs images of 16 x 16 or more; these are {size} x 32.*such as mlp"
        with pytest.raises(PfedafmError, match=said):
            describe("cnn1", 10, (size, 32, 3))
    assert describe("cnn1", 10, (16, 16, 3)).params > 0


def test_a_module_that_gives_no_vectors_is_refused(registered):
    class Image(nn.Module):
        features: int = 3

        @nn.compact
        def __call__(self, images):
            return images

    register_extractor("image", Image())
    with pytest.raises(PfedafmError, match=r"'image' gives \(1, 8, 8, 3\) .* expected \(1, 12\)"):
        describe("image", 4, (8, 8, 3), 12)


@pytest.mark.parametrize("width", ["features", "any"])
@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda images: (images, images), "gives tuple, expected one array"),
        (lambda images: None, "gives NoneType, expected one array"),
        (lambda images: jnp.argmax(images.reshape(1, -1, 12), 1), "gives int32, expected floats"),
        (lambda images: images.reshape(1, -1)[:, :12], "has no parameters"),
    ],
)
def test_what_cannot_be_trained_on_is_named(registered, returned, said, width):
    class Known(nn.Module):
        features: int = 12

        def __call__(self, images):
            return returned(images)

    class Unknown(nn.Module):
        def __call__(self, images):
            return returned(images)

    register_extractor("odd", Known() if width == "features" else Unknown())
    with pytest.raises(PfedafmError, match=f"architecture 'odd' {said}"):
        describe("odd", 4, (8, 8, 3), 12)


def test_bad_names_are_refused(registered):
    with pytest.raises(PfedafmError, match=r"my net"):
        register_extractor("my net", Flat())
    with pytest.raises(PfedafmError, match=r"architecture = 'cnn9' .*cnn1"):
        describe("cnn9", 10)
