"""The native operations and XLA's: against plain convolutions and numpy, and under every map."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small import METHODS, engine_of, plain_loop, slow_but

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import updated
from pfedafm_jax.engine import Engine
from pfedafm_jax.models import kernels
from pfedafm_jax.models.kernels import conv_pool, sgd

FORMS = ("native", "xla")


@pytest.fixture(params=FORMS)
def form(request):
    with kernels.using(request.param) as chosen:
        assert chosen.name == request.param
        yield request.param


@jax.jit
def plain_conv_pool(images, kernel, bias):
    """The layer as the paper has it: convolution, bias, ReLU, pooling."""
    axes = ("NHWC", "HWIO", "NHWC")
    scores = lax.conv_general_dilated(images, kernel, (1, 1), "VALID", dimension_numbers=axes)
    scores = jax.nn.relu(scores + bias[None, None, None, :])
    return lax.reduce_window(scores, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def random_layer(height, width, channels, outputs, batch=3, lead=(), seed=0):
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(*lead, batch, height, width, channels)).astype(np.float32),
        (rng.normal(size=(*lead, 5, 5, channels, outputs)) / 5).astype(np.float32),
        rng.normal(size=(*lead, outputs)).astype(np.float32),
    )


def loss_of(layer):
    """A scalar that weighs every output differently."""

    def loss(*inputs):
        out = layer(*inputs)
        return jnp.sum(out * jnp.sin(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape))

    return loss


def with_gradients(layer):
    return jax.jit(jax.value_and_grad(loss_of(layer), (0, 1, 2)))


# Those of the paper, of grey images, and odd numbers of channels; odd sides lose their last row.
SHAPES = [(32, 32, 3, 16), (14, 14, 16, 32), (28, 28, 1, 16), (6, 10, 2, 3), (8, 6, 5, 17), (12, 16, 33, 40),
          (10, 22, 7, 1), (13, 15, 2, 9)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layer_equals_a_plain_convolution(form, shape):
    inputs = random_layer(*shape)
    out, expected = jax.jit(conv_pool)(*inputs), plain_conv_pool(*inputs)
    assert out.shape == (3, (shape[0] - 4) // 2, (shape[1] - 4) // 2, shape[3])
    assert 0.2 < np.mean(np.asarray(expected) > 0) < 1, "nothing to compare"
    chex.assert_trees_all_close(out, expected, rtol=1e-4, atol=1e-5)
    ours, theirs = with_gradients(conv_pool)(*inputs), with_gradients(plain_conv_pool)(*inputs)
    chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_the_first_of_equal_outputs_has_the_gradient(form):
    """A constant image: all four outputs under a pixel are 25 · 2 · 0.5 = 25, so the window of the
    first one counts."""
    images, kernel, bias = jnp.full((1, 6, 6, 1), 2.0), jnp.full((5, 5, 1, 1), 0.5), jnp.zeros(1)
    out, pull = jax.vjp(conv_pool, images, kernel, bias)
    assert out.shape == (1, 1, 1, 1) and float(out[0, 0, 0, 0]) == 25
    to_images, to_kernel, to_bias = pull(jnp.ones_like(out))
    expected = np.zeros((6, 6))
    expected[:5, :5] = 0.5
    np.testing.assert_array_equal(to_images[0, :, :, 0], expected)
    np.testing.assert_array_equal(to_kernel[..., 0, 0], np.full((5, 5), 2.0))
    assert float(to_bias[0]) == 1
    # And ReLU at zero has none.
    _, pull = jax.vjp(conv_pool, images, 0 * kernel, bias)
    assert not any(np.any(np.asarray(slope)) for slope in pull(jnp.ones_like(out)))


def test_both_forms_agree_where_many_outputs_are_equal():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 2, (4, 14, 14, 3)).astype(np.float32)
    kernel = rng.integers(-1, 2, (5, 5, 3, 8)).astype(np.float32)
    found = {}
    for name in FORMS:
        with kernels.using(name):
            found[name] = with_gradients(conv_pool)(images, kernel, np.zeros(8, np.float32))
    chex.assert_trees_all_close(found["native"], found["xla"], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("place", [(0, 0), (5, 5), (2, 3)])
def test_nan_in_an_image_passes_forward_and_backward(form, place):
    images, kernel, bias = random_layer(6, 6, 1, 4, batch=2)
    images[0, place[0], place[1], 0] = np.nan
    out, pull = jax.vjp(conv_pool, images, kernel, bias)
    assert np.all(np.isnan(out[0])) and not np.any(np.isnan(out[1]))
    to_images, to_kernel, _ = pull(jnp.ones_like(out))
    assert np.any(np.isnan(to_kernel)), "the gradient must see it"
    assert not np.any(np.isnan(to_images[1]))


def test_nan_and_infinity_in_gradient_kernel_and_bias_pass(form):
    images, kernel, bias = random_layer(6, 6, 1, 4, batch=1)
    out, pull = jax.vjp(conv_pool, images, kernel, jnp.full(4, 100.0))
    assert all(np.any(np.isnan(slope)) for slope in pull(jnp.full_like(out, jnp.nan)))
    kernel[0, 0, 0, 2], bias[1] = np.inf, np.nan
    out = np.asarray(conv_pool(np.abs(images), kernel, bias))
    assert np.all(np.isinf(out[..., 2])) and np.all(np.isnan(out[..., 1]))
    assert np.all(np.isfinite(out[..., [0, 3]]))


def test_an_image_without_gradient_changes_nothing():
    images, kernel, bias = random_layer(14, 14, 3, 5, batch=4)
    with kernels.using("native"):
        out, pull = jax.vjp(conv_pool, images, kernel, bias)
        slope = np.random.default_rng(0).normal(size=out.shape).astype(np.float32)
        slope[2:] = 0
        to_images, to_kernel, to_bias = pull(slope)
        _, pull = jax.vjp(conv_pool, images[:2], kernel, bias)
        chex.assert_trees_all_equal((to_images[:2], to_kernel, to_bias), pull(slope[:2]))
        assert not np.any(to_images[2:])


def test_a_derivative_of_a_derivative_is_that_of_the_plain_layer(form):
    images, kernel, bias = random_layer(10, 8, 2, 3)

    def slope_norm(layer, kernel):
        return jnp.sum(jax.grad(lambda k: jnp.sum(jnp.sin(layer(images, k, bias))))(kernel) ** 2)

    ours, theirs = (
        jax.jit(jax.grad(partial(slope_norm, layer)))(kernel)
        for layer in (conv_pool, plain_conv_pool)
    )
    chex.assert_trees_all_close(ours, theirs, rtol=1e-3, atol=1e-2)


def test_other_types_take_the_form_of_xla():
    inputs = [array.astype(jnp.bfloat16) for array in random_layer(8, 8, 2, 3)]
    with kernels.using("native"):
        assert conv_pool(*inputs).dtype == jnp.bfloat16


def test_many_clients_at_once_are_each_of_them_alone(form):
    inputs = random_layer(14, 14, 3, 4, lead=(3,))
    together = jax.jit(jax.vmap(jax.value_and_grad(loss_of(conv_pool), (0, 1, 2))))(*inputs)
    alone = [with_gradients(conv_pool)(*(array[k] for array in inputs)) for k in range(3)]
    stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *alone)
    chex.assert_trees_all_close(together, stacked, rtol=1e-5, atol=1e-4)


def test_a_kernel_that_all_clients_share_may_stay_one():
    images, kernel, bias = random_layer(8, 8, 3, 4)
    with kernels.using("native"):
        mapped = jax.jit(jax.vmap(conv_pool, in_axes=(0, None, None)))
        many = mapped(np.stack([images, images]), kernel, bias)
        chex.assert_trees_all_equal(many[1], conv_pool(images, kernel, bias))


def steps(images, weights, count):
    """Steps of SGD on a layer in a compiled loop."""
    rates = {"learning_rate": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "clip_norm": 1.0}

    def body(_, carry):
        weights, momenta = carry
        slopes = jax.grad(lambda w: jnp.mean(conv_pool(images, *w) ** 2))(weights)
        return sgd(weights, momenta, slopes, **rates)

    return lax.fori_loop(0, count, body, (weights, jax.tree.map(jnp.zeros_like, weights)))


def test_loops_devices_and_donated_arguments_give_the_same_bits():
    images, *weights = random_layer(14, 14, 3, 4, batch=5)
    with kernels.using("native"):
        once = jax.jit(steps, static_argnums=2)(images, weights, 6)
        donated = jax.jit(steps, static_argnums=2, donate_argnums=1)
        chex.assert_trees_all_equal(donated(images, jax.tree.map(jnp.array, weights), 6), once)
        mapped = jax.pmap(steps, static_broadcasted_argnums=2)
        each = mapped(np.stack([images] * 4), [np.stack([leaf] * 4) for leaf in weights], 6)
        for device in range(4):
            chex.assert_trees_all_equal(jax.tree.map(lambda leaf, d=device: leaf[d], each), once)
    with kernels.using("xla"):
        other = jax.jit(steps, static_argnums=2)(images, weights, 6)
        chex.assert_trees_all_close(other, once, rtol=1e-4, atol=1e-5)


def test_a_step_by_hand(form):
    """|(3, 4)| = 5 is clipped to 1: (0.6, 0.8); decay 0.5 adds (0.5, 1); momentum 0.5 · (2, 2) adds
    (1, 1). The norm is over all leaves together."""
    weights, momenta = ({"v": jnp.full(1, v), "w": jnp.full(1, w)} for v, w in ((1.0, 2.0), (2.0, 2.0)))  # fmt: skip
    slopes = {"v": jnp.array([3.0]), "w": jnp.array([4.0])}
    rates = {"learning_rate": 0.1, "momentum": 0.5, "weight_decay": 0.5, "clip_norm": 1.0}
    new, speed = sgd(weights, momenta, slopes, **rates)
    np.testing.assert_allclose([speed["v"], speed["w"]], [[2.1], [2.8]], rtol=1e-6)
    np.testing.assert_allclose([new["v"], new["w"]], [[1 - 0.21], [2 - 0.28]], rtol=1e-6)


def test_numbers_that_are_zero_or_off_leave_plain_descent(form):
    rng = np.random.default_rng(0)
    weights, slopes = rng.normal(size=(2, 130)).astype(np.float32)
    new, speed = sgd([weights], [np.ones(130, np.float32)], [slopes], learning_rate=0.5)
    np.testing.assert_allclose(new[0], weights - 0.5 * slopes, rtol=1e-6)
    np.testing.assert_array_equal(speed[0], slopes)


def test_who_is_not_active_does_not_move_by_a_bit(form):
    weights = {"w": jnp.linspace(-1, 1, 70)}
    momenta, slopes = {"w": jnp.full(70, 3.0)}, {"w": jnp.full(70, jnp.nan)}
    rates = {"learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    step = jax.jit(jax.vmap(lambda active: sgd(weights, momenta, slopes, active=active, **rates)))
    new, speed = step(jnp.array([False, True]))
    chex.assert_trees_all_equal((new["w"][0], speed["w"][0]), (weights["w"], momenta["w"]))
    assert np.all(np.isnan(new["w"][1])), "a gradient that is not finite must be seen"


def test_other_numbers_are_no_other_program(form):
    traces = []

    @jax.jit
    def step(rate, clip):
        traces.append(1)
        start = [jnp.ones(3)], [jnp.zeros(3)], [jnp.ones(3)]
        return sgd(*start, learning_rate=rate, clip_norm=clip)[0][0]

    numbers = (0.1, 50.0), (0.2, 50.0), (0.1, np.inf)
    results = [float(step(rate, clip)[0]) for rate, clip in numbers]
    assert results == pytest.approx([0.9, 0.8, 0.9]) and len(traces) == 1


@pytest.mark.parametrize("method", slow_but((), METHODS))
def test_the_engine_is_the_plain_loop_with_both_forms(method, config, dataset, partition):
    found, config = {}, updated(config, method=method, architectures=("small_b",))
    for name in FORMS:
        with kernels.using(name):
            programs = engine_of(config, dataset, partition)
            for loop in (programs, plain_loop(programs)):
                state = programs.start()
                for t in (1, 2):
                    state, _ = loop.run_round(state, t)
                clients = [state.clients.state(client) for client in range(config.num_clients)]
                scores = loop.evaluate(state)
                found[name, type(loop)] = clients, jax.device_get(state.server), scores
    ours = found["native", Engine]
    for other in found.values():
        chex.assert_trees_all_close(ours[:2], other[:2], rtol=2e-3, atol=2e-4)
        chex.assert_trees_all_close(ours[2], other[2], atol=0.21)  # one of five images


def test_a_form_that_is_not_known_is_refused():
    with pytest.raises(PfedafmError, match="'fast' cannot be used; accepted: auto, native, xla"):
        kernels.choose("fast")
