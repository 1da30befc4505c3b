"""How weights start: as in PyTorch by default, or as in Flax."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def initialisers(initialisation: str, fan_in: int) -> dict[str, Any]:
    """PyTorch's default, U(±1/√fan_in) for all, or Flax's, LeCun normal weights and no biases."""
    if initialisation == "flax":
        kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
        return {"kernel_init": kernel, "bias_init": bias}
    bound = 1.0 / math.sqrt(fan_in)

    def uniform(key, shape, dtype=jnp.float32):
        # XLA's own generator compiles faster than threefry; its algorithm is not left to chance.
        seed, philox = jnp.resize(jax.random.key_data(key), (4,)), lax.RandomAlgorithm.RNG_PHILOX
        _, bits = lax.rng_bit_generator(seed, shape, jnp.uint32, algorithm=philox)
        return ((bits >> 8).astype(dtype) * (2.0 * bound / 2**24) - bound).astype(dtype)

    return {"kernel_init": uniform, "bias_init": uniform}
