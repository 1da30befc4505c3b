"""Networks from elsewhere: pretrained weights, and what cannot be an extractor."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from nets import HIDDEN, MEAN, PIXELS, Normed, NormedNNX, model_of, network, programs
from safetensors.numpy import save_file
from small import same, start

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.engine.visit import PRIVATE_STATISTICS
from pfedafm_jax.models.architecture import register_extractor
from pfedafm_jax.models.batch_stats import statistics_of


def test_pretrained_weights_arrive(registered, tmp_path):
    weights = jax.tree.map(np.asarray, model_of(network("normed"), 7)["extractor"])
    statistics = {"BatchNorm_0": {"mean": np.full(HIDDEN, 2.0), "var": np.full(HIDDEN, 3.0)}}
    variables = {"params": weights["extractor"], "batch_stats": statistics}
    flat: dict[Any, Any] = flatten_dict(variables)
    named: dict[str, Any] = {".".join(path): np.float32(leaf) for path, leaf in flat.items()}
    save_file(named, tmp_path / "weights.safetensors")
    module = NormedNNX(rngs=nnx.Rngs(3))
    sources = {
        "tree": (Normed(), variables),
        "file": (Normed(), tmp_path / "weights.safetensors"),
        "nnx": (NormedNNX, nnx.state(module)),
        "made": (NormedNNX, module),
    }
    for name, (extractor, source) in sources.items():
        register_extractor(f"from_{name}", extractor, pretrained=source)
        found = jax.jit(network(f"from_{name}").init_extractor)(jax.random.key(0))
        inner, own = found["extractor"], found["batch_stats"]["extractor"]
        if extractor is NormedNNX:
            assert same(inner["first"]["kernel"], module.first.kernel[...])
            assert same(own["norm"]["var"], np.ones(HIDDEN))
        else:
            assert same(inner, weights["extractor"])
            assert same(own, jax.tree.map(np.float32, statistics))
        assert not same(found["match"], weights["match"])  # the added layer is drawn as ever
    (client, *_), server = start(programs("pfedafm", "from_file"))
    assert same(client["local_extractor"]["extractor"], weights["extractor"])
    assert same(
        client[PRIVATE_STATISTICS][f"shared_extractor.{MEAN}"], np.full(HIDDEN, 2.0, np.float32)
    )
    assert same(statistics_of(server), client[PRIVATE_STATISTICS])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"Dense_0": None}, r"they lack Dense_0\.bias, lack Dense_0\.kernel$"),
        ({"Dense_9": {"kernel": np.ones(2)}}, r"they have Dense_9\.kernel, which it lacks"),
        ({"Dense_1": {"kernel": np.ones((4, 5)), "bias": np.ones(4)}},
         r"they have Dense_1\.kernel \[4, 5\] instead of \[5, 4\]"),
        ({"batch_stats": {}}, r"they lack batch_stats\.BatchNorm_0\.mean"),
    ],
)  # fmt: skip
def test_pretrained_weights_that_do_not_fit_are_refused(registered, change, said):
    whole = jax.tree.map(np.asarray, model_of(network("normed"))["extractor"])
    tree = {**whole["extractor"], "batch_stats": whole["batch_stats"]["extractor"], **change}
    register_extractor("wrong", Normed(), pretrained=tree)
    with pytest.raises(PfedafmError, match=f"'wrong' cannot start from these weights: {said}"):
        network("wrong")


def test_a_file_that_holds_no_weights_is_named(registered, tmp_path):
    (tmp_path / "other.safetensors").write_bytes(b"nothing of the kind")
    for name in ("other", "absent"):
        with pytest.raises(PfedafmError, match=f"{name}.safetensors"):
            register_extractor("wrong", Normed(), pretrained=tmp_path / f"{name}.safetensors")


# ---------------------------------------------------------------------------------- what is refused


class Folded(nn.Module):
    """Normalises pixels, whose first axis is not the batch."""

    @nn.compact
    def __call__(self, images):
        pixels = nn.BatchNorm()(images.reshape(-1, 1))
        return nn.Dense(4)(pixels.reshape(images.shape[0], -1))


class Always(nn.Module):
    @nn.compact
    def __call__(self, images):
        hidden = nn.Dense(4)(images.reshape(images.shape[0], -1))
        return nn.BatchNorm(use_running_average=False)(hidden)


class Counting(nn.Module):
    @nn.compact
    def __call__(self, images):
        self.variable("counts", "calls", lambda: jnp.zeros(()))
        return nn.Dense(4)(images.reshape(images.shape[0], -1))


class CountingNNX(nnx.Module):
    def __init__(self, *, rngs):
        self.layer, self.calls = nnx.Linear(PIXELS, 4, rngs=rngs), nnx.Variable(jnp.zeros(()))

    def __call__(self, images):
        return self.layer(images.reshape(images.shape[0], -1))


@pytest.mark.parametrize(
    ("extractor", "said"),
    [
        (Folded(), r"normalises \(18, 1\) over a batch of 2"),
        (Always(), "changes its statistics in evaluation, too"),
        (Counting(), r"carries state besides parameters and batch_stats \(counts\)"),
        (CountingNNX, r"carries state besides parameters and batch_stats \(other\)"),
        (lambda rngs: rngs, "is made by a function that gives Rngs, no module"),
    ],
)
def test_networks_that_cannot_be_trained_here_say_why(registered, extractor, said):
    register_extractor("wrong", extractor)
    with pytest.raises(PfedafmError, match=f"architecture 'wrong' {said}"):
        network("wrong")


@pytest.mark.parametrize("extractor", [Normed, NormedNNX(rngs=nnx.Rngs(0)), 3])
def test_what_is_no_network_is_refused(registered, extractor):
    with pytest.raises(
        PfedafmError, match=r"of Linen made, MyModule\(\); of NNX a class or a func"
    ):
        register_extractor("wrong", extractor)
