"""Dense layers, for data of any shape."""

import flax.linen as nn
import jax.numpy as jnp

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.models.init import initialisers


class MLP(nn.Module):
    """Two dense layers with ReLU on the flattened sample."""

    hidden: int
    features: int = 500
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, values):
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise PfedafmError("takes numbers; token ids need a network with nn.Embed")
        row = values.reshape(values.shape[0], -1)
        for width in (self.hidden, self.features):
            row = nn.relu(nn.Dense(width, **initialisers(self.initialisation, row.shape[-1]))(row))
        return row
