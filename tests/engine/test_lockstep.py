"""All clients of a device at once, architectures of a family in one program: equal to the loop."""

import logging
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    METHODS,
    Dense,
    assert_close,
    assert_equals_plain_loop,
    engine_of,
    play,
    same,
    slow_but,
    small_config,
    small_data,
)

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.data import dataset_from_arrays
from pfedafm_jax.engine import Devices, setup_devices
from pfedafm_jax.engine.engine import programs_of_clients
from pfedafm_jax.engine.programs import TRACED, client_bytes, compiled, shapes_of, traced
from pfedafm_jax.models.architecture import describe, register_extractor
from pfedafm_jax.models.padding import architecture_groups, narrow, widen
from pfedafm_jax.training.losses import cross_entropy
from pfedafm_jax.training.sgd import sgd

register_extractor("dense_c", Dense(hidden=11))


class Alone(Dense):
    """A network that has no family."""

    widest = None


register_extractor("dense_alone", Alone(hidden=7))


def lockstep(method="pfedafm", **changes):
    return engine_of(small_config(method, layout="lockstep", **changes), *small_data())


@pytest.mark.parametrize("method", slow_but(["pfedafm"], METHODS))
def test_lockstep_equals_the_plain_loop(method):
    programs = lockstep(method, devices=2)
    assert programs.clients_per_step == 2
    assert len(compiled(programs.program_key).train) == 1
    assert_equals_plain_loop(programs)


@pytest.mark.slow
def test_a_network_of_no_family_has_a_program_of_its_own():
    programs = lockstep("standalone", architectures=("dense_a", "dense_alone", "dense_b"))
    kinds = [kind.members for kind in shapes_of(programs.program_key).groups]
    assert kinds == [(0, 2), (1,)]
    assert programs_of_clients(programs.federation, programs.program_key).tolist() == [0, 1, 0, 0]
    assert_equals_plain_loop(programs)


def test_states_that_differ_in_more_than_the_extractor_are_not_padded():
    both = [describe(name, 4, (3, 3, 1), 6) for name in ("dense_a", "dense_b")]
    starts = [{"own": jnp.zeros(width)} for width in (3, 4)]
    assert [kind.members for kind in architecture_groups(both, starts)] == [(0,), (1,)]


def test_padding_changes_nothing_and_stays_zero():
    """Steps of CNNs that differ in both widths, narrow and padded: the same weights, and zeros around them."""
    names = [f"cnn{number}" for number in (2, 5)]
    narrow_ones = [describe(name, 10, (16, 16, 3), 20) for name in names]
    key = jax.random.key(0)
    starts = [{"local_extractor": jax.jit(one.init_extractor)(key)} for one in narrow_ones]
    (kind,) = architecture_groups(narrow_ones, starts)
    images, labels = jax.random.normal(key, (8, 16, 16, 3)), jnp.arange(8) % 10
    optimizer = sgd(lockstep().method.training)

    @partial(jax.jit, static_argnums=0)
    def step(architecture, params, momenta):
        def loss(params):
            return cross_entropy(architecture.extract(params, images), labels, jnp.ones(8))

        return optimizer.step(params, momenta, jax.grad(loss)(params))

    def steps(architecture, params):
        momenta = optimizer.init(params)
        for _ in range(3):
            params, momenta = step(architecture, params, momenta)
        return params

    for architecture, first in zip(narrow_ones, starts, strict=True):
        own = steps(architecture, first["local_extractor"])
        wide = widen(kind, architecture, first)["local_extractor"]
        padded = {"local_extractor": steps(kind.architecture, wide)}
        cut = narrow(kind, architecture, padded)
        assert_close(cut["local_extractor"], own, rtol=1e-4, atol=1e-6)
        assert same(widen(kind, architecture, cut), padded), "what was zero is not"


def test_nothing_is_traced_in_a_second_round():
    programs = lockstep(devices=2)  # as compiled above
    play(programs, [0, 1, 2])
    counts = TRACED.copy()
    with jax.log_compiles(False):
        play(programs, [3], [1, 2])
    assert counts == TRACED


@pytest.mark.slow
def test_as_many_clients_at_once_as_fit(monkeypatch):
    """A device with room for two of three: two calls, and nothing else changes."""
    whole = lockstep("standalone")
    expected = play(whole, [0, 1, 2], [3, 1])
    room = client_bytes(whole.program_key) * 2.5 / 0.8 + 3000
    monkeypatch.setattr(Devices, "memory", property(lambda self: int(room)))
    programs = engine_of(whole.federation.config, *small_data())
    compiled.cache_clear()
    assert (whole.program_key.step(), programs.clients_per_step) == (2, 2)
    assert_close(play(programs, [0, 1, 2], [3, 1]), expected, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize(
    ("precision", "words"), [("highest", "HIGHEST"), ("tf32", "tf32"), ("bfloat16", "bf16")]
)
def test_precision_is_that_of_every_product(precision, words):
    form = lockstep().program_key._replace(
        devices=Devices(1, lower_for="cuda"), precision=precision
    )
    name, program = next(traced(form, shapes_of(form)))
    products = [line for line in program.as_text().splitlines() if "dot_general" in line]
    assert name == "train" and products and all(words in line for line in products)


def test_cuda_without_a_driver_costs_one_line(caplog):
    setup_devices(cache=False)
    try:
        raise RuntimeError("helpers.cc:135: operation cuInit(0) failed: error 303; no name. More")
    except RuntimeError:
        logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error: …")
    (record,) = caplog.records
    words = "no GPU can be used, so the CPU is; JAX says: operation cuInit(0) failed: error 303"
    assert record.getMessage() == f"warning: {words}" and record.exc_info is None


def test_a_cpu_has_no_tf32():
    with pytest.raises(PfedafmError, match=r"precision = 'tf32' .* highest, bfloat16 on a CPU"):
        lockstep(precision="tf32")


@pytest.mark.parametrize("layout", ["loop", "lockstep"])
@pytest.mark.parametrize("method", slow_but(["pfedafm"], METHODS))
def test_every_program_lowers_for_cuda(method, layout):
    architectures = ("cnn1", "cnn2", "cnn5")
    config = small_config(method, layout=layout, architectures=architectures, feature_size=20,
                          shared_extractor="cnn5", devices=2, kernels="xla")  # fmt: skip
    images, labels = np.zeros((60, 16, 16, 3), np.uint8), np.arange(60) % 4
    data = dataset_from_arrays("empty", images, labels, images, labels)
    programs = engine_of(config, data, small_data()[1])
    form = programs.program_key._replace(devices=Devices(2, lower_for="cuda"))
    names = {name for name, program in traced(form, shapes_of(form)) if program.as_text()}
    assert {"train", "evaluate"} <= names
