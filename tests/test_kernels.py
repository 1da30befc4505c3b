"""The native operations and XLA's: against plain convolutions and numpy, under every map, and how
they are built."""

import dataclasses
import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from marks import slow_but
from small import METHODS

from pfedafm_jax import engine, kernels
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.kernels import build, conv_pool, sgd
from pfedafm_jax.reference import plain

FORMS = ("native", "xla")


@pytest.fixture(params=FORMS)
def form(request):
    with kernels.using(request.param) as chosen:
        assert chosen.name == request.param
        yield request.param


def plain_conv_pool(images, kernel, bias):
    """The layer as the paper has it: convolution, bias, ReLU, pooling."""
    scores = lax.conv_general_dilated(
        images, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
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


# ----------------------------------------------------------------------------- values and gradients

SHAPES = [
    (32, 32, 3, 16),
    (14, 14, 16, 32),
    (14, 14, 16, 16),
    (28, 28, 1, 16),
    (6, 10, 2, 3),
    (8, 6, 5, 17),
    (12, 16, 33, 40),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_layer_equals_a_plain_convolution(form, shape):
    inputs = random_layer(*shape)
    out, plain = jax.jit(conv_pool)(*inputs), jax.jit(plain_conv_pool)(*inputs)
    assert out.shape == (3, shape[0] // 2 - 2, shape[1] // 2 - 2, shape[3])
    assert 0.2 < np.mean(np.asarray(plain) > 0) < 1, "nothing to compare"
    chex.assert_trees_all_close(out, plain, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(with_gradients(conv_pool)(*inputs), with_gradients(plain_conv_pool)(*inputs),
                                rtol=1e-3, atol=1e-3)  # fmt: skip


def test_random_layers_equal_plain_convolutions():
    rng = np.random.default_rng(1)
    with kernels.using("native"):
        for seed in range(12):
            height, width = 2 * rng.integers(3, 12, 2)
            inputs = random_layer(
                height, width, *rng.integers(1, 40, 2), batch=int(rng.integers(1, 5)), seed=seed
            )
            out, pull = jax.vjp(conv_pool, *inputs)
            plain, plain_pull = jax.vjp(plain_conv_pool, *inputs)
            slope = rng.normal(size=out.shape).astype(np.float32)
            chex.assert_trees_all_close(out, plain, rtol=1e-3, atol=1e-4)
            chex.assert_trees_all_close(pull(slope), plain_pull(slope), rtol=1e-2, atol=1e-3)


def test_odd_sides_lose_their_last_row_and_column_as_in_pooling(form):
    inputs = random_layer(13, 15, 2, 3)
    out = conv_pool(*inputs)
    assert out.shape == (3, 4, 5, 3)
    chex.assert_trees_all_close(out, plain_conv_pool(*inputs), rtol=1e-4, atol=1e-5)


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


def test_both_forms_agree_where_many_outputs_are_equal():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 2, (4, 14, 14, 3)).astype(np.float32)
    kernel = rng.integers(-1, 2, (5, 5, 3, 8)).astype(np.float32)
    found = {}
    for name in FORMS:
        with kernels.using(name):
            found[name] = with_gradients(conv_pool)(images, kernel, np.zeros(8, np.float32))
    chex.assert_trees_all_close(found["native"], found["xla"], rtol=1e-5, atol=1e-4)


def test_relu_at_zero_has_no_gradient(form):
    images, kernel = jnp.ones((1, 6, 6, 1)), jnp.zeros((5, 5, 1, 1))
    _, pull = jax.vjp(conv_pool, images, kernel, jnp.zeros(1))
    assert not any(np.any(np.asarray(slope)) for slope in pull(jnp.ones((1, 1, 1, 1))))


@pytest.mark.parametrize("place", [(0, 0), (0, 5), (5, 0), (5, 5), (2, 3)])
def test_nan_in_an_image_passes_forward_and_backward(form, place):
    images, kernel, bias = random_layer(6, 6, 1, 4, batch=2)
    images[0, place[0], place[1], 0] = np.nan
    out, pull = jax.vjp(conv_pool, images, kernel, bias)
    assert np.all(np.isnan(out[0])) and not np.any(np.isnan(out[1]))
    to_images, to_kernel, _ = pull(jnp.ones_like(out))
    assert np.any(np.isnan(to_kernel)), "the gradient must see it"
    assert not np.any(np.isnan(to_images[1]))


@pytest.mark.parametrize("what", [0, 1, 2])
def test_nan_and_infinity_in_gradient_kernel_and_bias_pass(form, what):
    images, kernel, bias = random_layer(6, 6, 1, 4, batch=1)
    if what == 0:
        out, pull = jax.vjp(conv_pool, images, kernel, jnp.full(4, 100.0))
        to_images, to_kernel, to_bias = pull(jnp.full_like(out, jnp.nan))
        assert all(np.any(np.isnan(slope)) for slope in (to_images, to_kernel, to_bias))
    elif what == 1:
        kernel[0, 0, 0, 2] = np.inf
        out = np.asarray(conv_pool(np.abs(images), kernel, bias))
        assert np.all(np.isinf(out[..., 2])) and np.all(np.isfinite(out[..., [0, 1, 3]]))
    else:
        bias[1] = np.nan
        out = np.asarray(conv_pool(images, kernel, bias))
        assert np.all(np.isnan(out[..., 1])) and np.all(np.isfinite(out[..., [0, 2, 3]]))


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

    found = jax.grad(partial(slope_norm, conv_pool))(kernel)
    chex.assert_trees_all_close(
        found, jax.grad(partial(slope_norm, plain_conv_pool))(kernel), rtol=1e-3, atol=1e-2
    )


def test_other_types_take_the_form_of_xla():
    inputs = [array.astype(jnp.bfloat16) for array in random_layer(8, 8, 2, 3)]
    with kernels.using("native"):
        assert conv_pool(*inputs).dtype == jnp.bfloat16


# ----------------------------------------------------------------------------- maps, loops, devices


def test_many_clients_at_once_are_each_of_them_alone(form):
    inputs = random_layer(14, 14, 3, 4, lead=(3,))
    together = jax.jit(jax.vmap(jax.value_and_grad(loss_of(conv_pool), (0, 1, 2))))(*inputs)
    alone = [with_gradients(conv_pool)(*(array[k] for array in inputs)) for k in range(3)]
    chex.assert_trees_all_close(
        together, jax.tree.map(lambda *rows: jnp.stack(rows), *alone), rtol=1e-5, atol=1e-4
    )


def test_a_kernel_that_all_clients_share_may_stay_one():
    images, kernel, bias = random_layer(8, 8, 3, 4)
    with kernels.using("native"):
        many = jax.jit(jax.vmap(conv_pool, in_axes=(0, None, None)))(
            np.stack([images, images]), kernel, bias
        )
        chex.assert_trees_all_equal(many[1], conv_pool(images, kernel, bias))


def steps(images, weights, count):
    """Steps of SGD on a layer in a compiled loop."""

    def body(_, carry):
        weights, momenta = carry
        slopes = jax.grad(lambda w: jnp.mean(conv_pool(images, *w) ** 2))(weights)
        return sgd(
            weights,
            momenta,
            slopes,
            learning_rate=0.05,
            momentum=0.9,
            weight_decay=1e-3,
            clip_norm=1.0,
        )

    return lax.fori_loop(0, count, body, (weights, jax.tree.map(jnp.zeros_like, weights)))


def test_loops_devices_and_donated_arguments_give_the_same_bits():
    images, *weights = random_layer(14, 14, 3, 4, batch=5)
    with kernels.using("native"):
        once = jax.jit(steps, static_argnums=2)(images, weights, 6)
        one, two = (
            jax.jit(steps, static_argnums=2, donate_argnums=1),
            jax.pmap(steps, static_broadcasted_argnums=2),
        )
        chex.assert_trees_all_equal(one(images, jax.tree.map(jnp.array, weights), 6), once)
        both = two(np.stack([images] * 4), [np.stack([leaf] * 4) for leaf in weights], 6)
        for device in range(4):
            chex.assert_trees_all_equal(jax.tree.map(lambda leaf, d=device: leaf[d], both), once)
    with kernels.using("xla"):
        chex.assert_trees_all_close(
            jax.jit(steps, static_argnums=2)(images, weights, 6), once, rtol=1e-4, atol=1e-5
        )


# ---------------------------------------------------------------------------------------------- SGD


def test_a_step_by_hand(form):
    """|(3, 4)| = 5 is clipped to 1: (0.6, 0.8); decay 0.5 adds (0.5, 1); momentum 0.5 · (2, 2) adds
    (1, 1)."""
    weights, momenta = {"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([2.0, 2.0])}
    slopes = {"w": jnp.array([3.0, 4.0])}
    new, speed = sgd(
        weights, momenta, slopes, learning_rate=0.1, momentum=0.5, weight_decay=0.5, clip_norm=1.0
    )
    np.testing.assert_allclose(speed["w"], [2.1, 2.8], rtol=1e-6)
    np.testing.assert_allclose(new["w"], [1 - 0.21, 2 - 0.28], rtol=1e-6)


def test_the_norm_is_over_all_leaves_together(form):
    zeros = {"a": jnp.zeros(200), "b": jnp.zeros((3, 7))}
    slopes = {"a": jnp.full(200, 0.3), "b": jnp.full((3, 7), -0.4)}
    norm = np.sqrt(200 * 0.09 + 21 * 0.16)
    new, _ = sgd(zeros, zeros, slopes, learning_rate=1.0, clip_norm=2.0)
    np.testing.assert_allclose(new["a"], -0.3 * 2 / norm, rtol=1e-5)
    np.testing.assert_allclose(new["b"], 0.4 * 2 / norm, rtol=1e-5)


def test_numbers_that_are_zero_or_off_leave_plain_descent(form):
    rng = np.random.default_rng(0)
    weights, slopes = rng.normal(size=(2, 130)).astype(np.float32)
    new, speed = sgd([weights], [np.ones(130, np.float32)], [slopes], learning_rate=0.5)
    np.testing.assert_allclose(new[0], weights - 0.5 * slopes, rtol=1e-6)
    np.testing.assert_array_equal(speed[0], slopes)


def test_who_is_not_active_does_not_move_by_a_bit(form):
    weights = {"w": jnp.linspace(-1, 1, 70)}
    momenta, slopes = {"w": jnp.full(70, 3.0)}, {"w": jnp.full(70, jnp.nan)}

    @jax.jit
    @partial(jax.vmap, in_axes=(None, None, None, 0))
    def step(weights, momenta, slopes, active):
        return sgd(
            weights,
            momenta,
            slopes,
            learning_rate=0.1,
            momentum=0.9,
            weight_decay=0.1,
            active=active,
        )

    new, speed = step(weights, momenta, slopes, jnp.array([False, True]))
    chex.assert_trees_all_equal((new["w"][0], speed["w"][0]), (weights["w"], momenta["w"]))
    assert np.all(np.isnan(new["w"][1])), "a gradient that is not finite must be seen"


def test_other_numbers_are_no_other_program(form):
    traces = []

    @jax.jit
    def step(rate, clip):
        traces.append(1)
        return sgd(
            [jnp.ones(3)], [jnp.zeros(3)], [jnp.ones(3)], learning_rate=rate, clip_norm=clip
        )[0][0]

    results = [
        float(step(rate, clip)[0]) for rate, clip in ((0.1, 50.0), (0.2, 50.0), (0.1, np.inf))
    ]
    assert results == pytest.approx([0.9, 0.8, 0.9]) and len(traces) == 1


# ------------------------------------------------------------------------------------ in the engine


@pytest.mark.parametrize("method", slow_but(("fedproto",), METHODS))
def test_the_engine_is_the_plain_loop_with_both_forms(method, config, dataset, partition):
    found = {}
    for name in FORMS:
        with kernels.using(name):
            programs = engine.build(dataclasses.replace(config, method=method), dataset, partition)
            for loop in (engine, plain):
                state = engine.start(programs)
                for t in (1, 2):
                    state, _ = loop.run_round(programs, state, t)
                clients = [state.store.state(client) for client in range(config.num_clients)]
                found[name, loop] = (
                    clients,
                    jax.device_get(state.server),
                    loop.evaluate(programs, state),
                )
    for other in found.values():
        chex.assert_trees_all_close(found["native", engine][:2], other[:2], rtol=2e-3, atol=2e-4)
        chex.assert_trees_all_close(
            found["native", engine][2], other[2], atol=0.21
        )  # one of five images


# ----------------------------------------------------------------------------------------- building

TRY = "import sys; from pfedafm_jax import kernels; print(kernels.choose(sys.argv[1], lambda line: print('LOG', line)))"


def try_kernels(cache: Path, wanted: str = "auto", **environment: str) -> subprocess.Popen:
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, "-c", TRY, wanted]
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_it_is_built_once_by_processes_that_do_not_harm_each_other_and_anew_when_damaged(tmp_path):
    several = [try_kernels(tmp_path) for _ in range(3)]
    for process in several:
        out, error = process.communicate(timeout=300)
        assert out.startswith("native") and "LOG" not in out, error
    (folder,) = (tmp_path / "pfedafm_jax" / "kernels").iterdir()  # nothing half-built is left
    library = folder / "native.so"
    first = library.stat().st_mtime_ns
    with pytest.MonkeyPatch.context() as patch:
        loads = []
        patch.setattr(
            build.ctypes,
            "CDLL",
            lambda path: loads.append(Path(path).stat().st_mtime_ns) or object(),
        )
        build.load(folder.parent)
        assert loads == [first], "built again without need"
        library.write_bytes(library.read_bytes()[:-7] + b"garbage")
        build.load(folder.parent)
        assert loads[1] > first and b"garbage" not in library.read_bytes()[-7:]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"CXX": "no-such-compiler"}, "CXX=no-such-compiler is not found"),
        ({"CXX": "false"}, "false failed"),
    ],
)
def test_without_a_compiler_one_line_says_so_and_the_form_of_xla_runs(environment, said, tmp_path):
    out, error = try_kernels(tmp_path, **environment).communicate(timeout=120)
    lines = out.splitlines()
    assert lines[0].startswith("LOG rounds take about twice as long") and said in lines[0]
    assert len(lines) == 2 and lines[1].startswith("xla (") and not error
    _, error = try_kernels(tmp_path, "native", **environment).communicate(timeout=120)
    assert "PfedafmError: kernels = 'native' cannot be used" in error


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "pfedafm_jax").write_text("a file where the folder should be")
    out, _ = try_kernels(tmp_path).communicate(timeout=120)
    assert "cannot be written" in out and "XDG_CACHE_HOME" in out


def test_a_library_of_somebody_else_is_not_loaded(tmp_path, monkeypatch):
    folder = tmp_path / "native-x"
    folder.mkdir()
    (folder / "native.so").write_bytes(b"library")
    (folder / "sha256").write_text(build.hashlib.sha256(b"library").hexdigest())
    assert build._is_whole(folder)
    others = os.stat_result((stat.S_IFREG, 0, 0, 1, os.getuid() + 1, 0, 7, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda self: others)
    assert not build._is_whole(folder)


def test_a_form_that_is_not_known_is_refused():
    with pytest.raises(
        PfedafmError, match="kernels = 'fast' cannot be used; accepted: auto, native, xla"
    ):
        kernels.choose("fast")


# --------------------------------------------------------------------------------------- sanitizers

CHECKED = """
import jax, jax.numpy as jnp, numpy as np
from pfedafm_jax import kernels
assert kernels.choose("native").name == "native"
rng = np.random.default_rng(0)
for _ in range(15):
    height, width = 2 * rng.integers(3, 10, 2)
    channels, outputs, batch, clients = rng.integers(1, 36, 4) % [36, 36, 5, 3] + 1
    images = rng.normal(size=(clients, batch, height, width, channels)).astype(np.float32)
    kernel = rng.normal(size=(clients, 5, 5, channels, outputs)).astype(np.float32)
    bias = rng.normal(size=(clients, outputs)).astype(np.float32)
    loss = lambda i, w: jnp.sum(kernels.conv_pool(i, *w) ** 2)
    slopes = jax.vmap(jax.grad(loss, (0, 1)))(images, (kernel, bias))
    jax.block_until_ready(jax.vmap(lambda w, g: kernels.sgd(w, w, g, learning_rate=0.1))((kernel, bias), slopes[1]))
print("clean")
"""


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["native", "x86-64-v3", "x86-64"])
def test_no_kernel_reads_or_writes_where_it_must_not(processor, tmp_path):
    """Address and undefined-behaviour sanitizers over random shapes, in the three forms of an x86
    processor."""
    names = (
        "libasan.so",
        "libstdc++.so",
    )  # the second, since exceptions of other libraries pass through
    ask = [["g++", f"-print-file-name={name}"] for name in names]
    found = [
        subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        for words in ask
    ]
    environment = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "JAX_PLATFORMS": "cpu",
        "CXX": "g++",
        "CXXFLAGS": f"-march={processor} -g -O1 -fsanitize=address,undefined -fno-sanitize-recover=all",
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    result = subprocess.run(
        [sys.executable, "-c", CHECKED], env=environment, capture_output=True, text=True
    )
    assert result.stdout.strip() == "clean", result.stderr[-3000:]
