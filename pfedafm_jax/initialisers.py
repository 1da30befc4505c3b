"""How weights start: as in PyTorch by default, or as in Flax."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def initialisers(initialisation: str, fan_in: int) -> dict[str, Any]:
    """PyTorch's default is U(±1/√fan_in) for weights and biases; Flax's is LeCun normal weights and
    zero biases."""
    if initialisation == "flax":
        return {
            "kernel_init": nn.initializers.lecun_normal(),
            "bias_init": nn.initializers.zeros_init(),
        }
    bound = 1.0 / math.sqrt(fan_in)

    def uniform(key, shape, dtype=jnp.float32):
        # XLA's own generator with its algorithm named, so not left to the backend; it compiles
        # faster than threefry.
        seed = jnp.resize(jax.random.key_data(key), (4,))
        _, bits = lax.rng_bit_generator(
            seed, shape, jnp.uint32, algorithm=lax.RandomAlgorithm.RNG_PHILOX
        )
        return ((bits >> 8).astype(dtype) * (2.0 * bound / 2**24) - bound).astype(dtype)

    return {"kernel_init": uniform, "bias_init": uniform}
