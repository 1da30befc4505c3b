"""Own networks' layers in their fast form: the values and gradients of XLA's and Flax's."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

from pfedafm_jax.models import kernels
from pfedafm_jax.models.architecture import describe
from pfedafm_jax.models.flax_modules import FromNNX
from pfedafm_jax.models.kernels.layers import conv_general_dilated, fast_layers

AXES = ("NHWC", "HWIO", "NHWC")


@pytest.fixture(autouse=True)
def native():
    with kernels.using("native"):
        yield


def layer_of(function, strides=(1, 1), padding="SAME", dilation=(1, 1), groups=1):
    """A convolution as a function of images and kernel."""
    options = {"rhs_dilation": dilation, "feature_group_count": groups, "dimension_numbers": AXES}
    return lambda images, kernel: function(images, kernel, strides, padding, **options)


def with_gradients(layer):
    """Output and gradients of images and kernel, every output weighed differently."""

    def run(images, kernel):
        out, pull = jax.vjp(layer, images, kernel)
        return out, *pull(jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return run


def random_arrays(images, kernel, seed=0):
    rng = np.random.default_rng(seed)
    made = (rng.normal(size=shape).astype(np.float32) for shape in (images, kernel))
    return tuple(made)


def check(images, kernel, **options):
    arrays = random_arrays(images, kernel)
    native = jax.jit(with_gradients(layer_of(conv_general_dilated, **options)))
    assert "ConvWeightGradient" in native.lower(*arrays).as_text()
    expected = with_gradients(layer_of(lax.conv_general_dilated, **options))(*arrays)
    scale = np.sqrt(np.prod(kernel[:3])), np.sqrt(np.prod(kernel)), np.sqrt(np.prod(images[:3]))
    for ours, theirs, size in zip(native(*arrays), expected, scale, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * size)


CASES = {
    "3x3": ((3, 9, 20, 3), (3, 3, 3, 20), {}),
    "3x3 on a small image": ((5, 4, 4, 33), (3, 3, 33, 40), {}),
    "one image": ((1, 4, 4, 5), (3, 3, 5, 7), {"strides": (2, 1)}),
    "1x1": ((2, 9, 9, 4), (1, 1, 4, 17), {}),
    "1x1 with a stride": ((2, 9, 9, 4), (1, 1, 4, 17), {"strides": (2, 2)}),
    "strides and pads of any kind": (
        (2, 11, 19, 4),
        (4, 3, 4, 6),
        {"strides": (3, 2), "padding": ((0, 4), (2, 1))},
    ),
    "dilation": ((2, 9, 30, 4), (3, 2, 4, 6), {"dilation": (2, 3), "padding": "VALID"}),
    "groups": ((2, 9, 12, 6), (3, 3, 2, 9), {"groups": 3, "strides": (2, 2)}),
    "depthwise": ((2, 9, 20, 18), (3, 3, 1, 18), {"groups": 18}),
    "depthwise 7x7 with a stride": (
        (2, 9, 20, 18),
        (7, 7, 1, 18),
        {"groups": 18, "strides": (2, 2), "dilation": (1, 2)},
    ),
    "two outputs a channel": ((2, 5, 9, 5), (3, 3, 1, 10), {"groups": 5}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_convolution_and_its_gradients_are_those_of_xla(case):
    images, kernel, options = CASES[case]
    check(images, kernel, **options)


@pytest.mark.slow
def test_so_are_those_of_random_shapes():
    rng = np.random.default_rng(0)
    for _ in range(150):
        groups, size = int(rng.choice([1, 1, 2, 3])), rng.integers(1, 6, 2)
        channels, outputs = groups * rng.integers(1, 40, 2)
        if rng.random() < 0.3:
            groups = channels = int(rng.integers(2, 40))
            outputs = channels * rng.integers(1, 3)
        strides, dilation = rng.integers(1, 4, (2, 2)).tolist()
        sides = (size - 1) * dilation + rng.integers(1, 20, 2)
        pads = ["SAME", "VALID", rng.integers(0, 4, (2, 2)).tolist()][rng.integers(3)]
        options = {"strides": strides, "padding": pads, "dilation": dilation, "groups": groups}
        batch = int(rng.choice([1, 2, 7, 16, 17]))
        check((batch, *sides, channels), (*size, channels // groups, outputs), **options)


def test_many_clients_at_once_are_each_of_them_alone():
    images, kernel = random_arrays((3, 2, 6, 9, 4), (3, 3, 3, 4, 5))
    run = with_gradients(layer_of(conv_general_dilated, strides=(2, 2)))
    together = jax.jit(jax.vmap(run))(images, kernel)
    alone = [jax.jit(run)(images[client], kernel[client]) for client in range(3)]
    chex.assert_trees_all_equal(together, jax.tree.map(lambda *rows: jnp.stack(rows), *alone))
    shared = jax.vmap(layer_of(conv_general_dilated), in_axes=(0, None))(images, kernel[0])
    chex.assert_trees_all_equal(shared[2], layer_of(conv_general_dilated)(images[2], kernel[0]))


def test_nan_and_infinity_pass():
    images, kernel = random_arrays((2, 6, 12, 3), (3, 3, 3, 4))
    images[0, 3, 3, 1] = np.nan
    out, pull = jax.vjp(layer_of(conv_general_dilated), images, kernel)
    assert np.all(np.isnan(out[0, 2:5, 2:5])) and np.sum(np.isnan(out)) == 9 * 4
    to_images, to_kernel = pull(jnp.ones_like(out))
    assert np.all(np.isnan(to_kernel[:, :, 1])) and np.all(np.isfinite(to_images))
    kernel[1, 1, 0, 2] = np.inf
    out = layer_of(conv_general_dilated)(np.abs(images[1:]), kernel)
    assert np.all(np.isinf(out[..., 2])) and np.all(np.isfinite(out[..., 3]))


def test_other_types_are_computed_by_xla():
    half = [array.astype(jnp.bfloat16) for array in random_arrays((2, 6, 5, 2), (3, 3, 2, 3))]
    assert layer_of(conv_general_dilated)(*half).dtype == jnp.bfloat16


def test_a_derivative_of_a_derivative_is_that_of_xla():
    images, kernel = random_arrays((2, 6, 5, 2), (3, 3, 2, 3))

    def slope_norm(function):
        layer = layer_of(function, strides=(2, 2))
        slope = jax.grad(lambda kernel: jnp.sum(jnp.sin(layer(images, kernel))))
        return jax.jit(jax.grad(lambda kernel: jnp.sum(slope(kernel) ** 2)))(kernel)

    ours, theirs = slope_norm(conv_general_dilated), slope_norm(lax.conv_general_dilated)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-3)


class Layers(nn.Module):
    """All that is taken over, and some that must not be."""

    @nn.compact
    def __call__(self, images):
        hidden = nn.Conv(6, (3, 3), 2)(images)
        hidden = nn.GroupNorm(num_groups=3)(hidden)
        hidden = nn.Conv(6, (3, 3), padding="CIRCULAR", feature_group_count=6)(hidden)
        hidden = nn.GroupNorm(None, group_size=1, use_scale=False)(nn.relu(hidden))
        hidden = nn.Conv(4, (3, 3), padding=1, input_dilation=2)(hidden)  # XLA's
        hidden = nn.GroupNorm(2)(hidden)
        return nn.Conv(4, (3,))(hidden.mean(1)).mean(1)  # one dimension: XLA's


def test_own_networks_are_computed_natively_and_come_out_as_flax_has_them():
    images = jnp.asarray(np.random.default_rng(0).normal(size=(3, 8, 8, 2)), jnp.float32)
    network = Layers()
    params = jax.jit(network.init)(jax.random.key(0), images)["params"]

    def steps(params, images, fast):
        def loss(params):
            if not fast:
                return jnp.sum(jnp.sin(network.apply({"params": params}, images)))
            with fast_layers():
                return jnp.sum(jnp.sin(network.apply({"params": params}, images)))

        def body(_, params):
            slopes = jax.grad(loss)(params)
            return jax.tree.map(lambda param, slope: param - 0.05 * slope, params, slopes)

        return lax.fori_loop(0, 3, body, params)

    program = jax.jit(steps, static_argnums=2)
    fast, plain = (program(params, images, fast) for fast in (True, False))
    chex.assert_trees_all_close(fast, plain, rtol=1e-3, atol=1e-5)
    text = program.lower(params, images, True).as_text()
    assert text.count("ConvWeightGradient") == 2 and "stablehlo.convolution" in text


def test_convolutions_of_nnx_are_native_too():
    class Own(nnx.Module):
        def __init__(self, rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), 2, rngs=rngs)

        def __call__(self, images):
            return jnp.mean(self.conv(images), axis=(1, 2))

    module, images = FromNNX(Own), random_arrays((2, 6, 6, 3), ())[0]
    variables = module.init(jax.random.key(0), images)
    plain = module.apply(variables, images)
    with fast_layers():
        fast = jax.jit(module.apply)
        chex.assert_trees_all_close(fast(variables, images), plain, rtol=1e-5, atol=1e-6)
        assert "_Conv" in fast.lower(variables, images).as_text()


@pytest.mark.parametrize("form", ["native", "xla"])
def test_the_setting_decides_who_computes_an_architecture(form):
    network = describe("resnet_small", num_classes=10, image_shape=(8, 8, 3), feature_size=16)
    params = jax.eval_shape(network.init_extractor, jax.random.key(0))
    images = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    with kernels.using(form):
        text = jax.jit(network.extract).lower(params, images).as_text()
    assert ("stablehlo.convolution" in text) == (form == "xla")
    assert text.count("_Conv") >= 9 or form == "xla"
