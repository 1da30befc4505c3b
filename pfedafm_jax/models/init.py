"""Initial weights: as in PyTorch by default, or as in Flax."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax


def initialisers(initialisation: str, fan_in: int) -> dict[str, Any]:
    """`kernel_init` and `bias_init` of a Flax layer with `fan_in` inputs.

    `torch`: U(±1/√fan_in) for both; `flax`: LeCun normal weights and zero biases.
    """
    if initialisation == "flax":
        kernel, bias = nn.initializers.lecun_normal(), nn.initializers.zeros_init()
        return {"kernel_init": kernel, "bias_init": bias}
    bound = 1.0 / math.sqrt(fan_in)

    def uniform(key, shape, dtype=jnp.float32):
        # XLA's own generator compiles faster than threefry; Philox, since its default is not fixed.
        seed, philox = jnp.resize(jax.random.key_data(key), (4,)), lax.RandomAlgorithm.RNG_PHILOX
        _, bits = lax.rng_bit_generator(seed, shape, jnp.uint32, algorithm=philox)
        return ((bits >> 8).astype(dtype) * (2.0 * bound / 2**24) - bound).astype(dtype)

    return {"kernel_init": uniform, "bias_init": uniform}
