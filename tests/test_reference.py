"""The plain loop itself, by hand, and the engine against it."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pfedafm_jax.config import Config
from pfedafm_jax.engine import Federation
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.reference import Reference, aggregation_shares, clipped, cross_entropy, sgd, weighted_sum

PARTS = ("local_extractor", "header", "mix")


def changed(config: Config, **values) -> Config:
    """`config` with some settings changed; those of pFedAFM's own by their names too."""
    own = {f.name for f in dataclasses.fields(config.pfedafm)}
    mine = {name: values.pop(name) for name in list(values) if name in own}
    return dataclasses.replace(config, pfedafm=dataclasses.replace(config.pfedafm, **mine), **values)


SETTINGS = {
    "paper": {},
    "end_to_end": {"training": "end_to_end"},
    "uniform": {"aggregation": "uniform"},
    "last": {"aggregation": "last"},
    "mix_fixed": {"mix_fixed": 0.25},
    "mix_scalar": {"mix_scalar": True},
    "mix_unprojected": {"mix_project": False, "mix_learning_rate": 0.3},
    "mix_decay": {"mix_weight_decay": 0.1},
    "mix_relay": {"mix_relay": True},
    "leak_momentum": {"leak_momentum": True},
    "released_code": {
        "mix_relay": True,
        "leak_momentum": True,
        "mix_weight_decay": 1e-3,
        "aggregation": "last",
        "mix_learning_rate": 0.1,
        "flip": True,
        "erase": True,
        "crop": True,
    },
    "augmentation": {"flip": True, "erase": True, "crop": True},
    "own_starts": {"same_start": False},
    "no_momentum": {"momentum": 0.0, "weight_decay": 0.0},
    "clipping": {"clip_norm": 0.05},
    "flax_initialisation_imagenet": {"initialisation": "flax", "normalisation": "imagenet"},
    "one_batch": {"batch_size": 512},
    "two_devices_by_two": {"devices": 2, "clients_per_step": 2},
    "relay_by_two": {"mix_relay": True, "leak_momentum": True, "devices": 2, "clients_per_step": 2},
    "relay_end_to_end": {"mix_relay": True, "leak_momentum": True, "training": "end_to_end"},
    "relay_fixed": {"mix_relay": True, "mix_fixed": 0.25},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_engine_equals_plain_loop(config, dataset, partition, settings):
    config = changed(config, **settings).check()
    federation, reference = Federation(config, dataset, partition), Reference(config, dataset, partition)
    for client in range(config.num_clients):  # the same start, bit for bit
        start, other = federation.store.state(client), reference.clients[client]
        chex.assert_trees_all_equal({p: start[p] for p in PARTS}, {p: other[p] for p in PARTS})
    for index in range(3):
        result, plain = federation.run_round(index), reference.run_round(index)
        assert set(plain) == set(result.info) - {"finite"}
        assert np.all(result.info["finite"])
        for name, values in plain.items():
            np.testing.assert_allclose(result.info[name], values, rtol=2e-4, atol=2e-5, err_msg=f"{name}, round {index}")
        shared = federation.server["shared_extractor"]
        chex.assert_trees_all_close(shared, reference.server["shared_extractor"], rtol=2e-3, atol=2e-5)
    for client in range(config.num_clients):
        state, other = federation.store.state(client), reference.clients[client]
        chex.assert_trees_all_close({p: state[p] for p in PARTS}, {p: other[p] for p in PARTS}, rtol=2e-3, atol=2e-5)
    scores, plain = federation.evaluate(), reference.evaluate()
    assert set(scores) == set(plain)
    for name, values in plain.items():
        np.testing.assert_allclose(scores[name], values, rtol=1e-5, err_msg=name)
