"""The CNNs of the paper's Table 1, without their header.

An extractor maps images `[batch, height, width, channels]` to representations `[batch,
feature_size]`. The five CNNs are conv 5x5 → max-pool 2x2, twice, then FC1 and FC2, all with ReLU;
the representation is FC2's output after ReLU, and the header, FC3, comes after it.
"""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.models.init import initialisers
from pfedafm_jax.models.kernels import conv_pool

Params = Any  # a pytree of arrays


FEATURE_SIZE = 500


class Convolution(nn.Module):
    """Kernel `(5, 5, in, out)` and bias of a layer of convolution, ReLU and pooling."""

    features: int
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, channels: int) -> tuple[jax.Array, jax.Array]:
        init = initialisers(self.initialisation, 25 * channels)
        kernel = self.param("kernel", init["kernel_init"], (5, 5, channels, self.features))
        return kernel, self.param("bias", init["bias_init"], (self.features,))


def linear(width: int, inputs: jax.Array, initialisation: str, name: str) -> jax.Array:
    """A dense layer of the enclosing module, with the chosen initialisation."""
    return nn.Dense(width, **initialisers(initialisation, inputs.shape[-1]), name=name)(inputs)


class CNN(nn.Module):
    """An extractor of Table 1: everything but FC3."""

    conv2: int
    fc1: int
    features: int = FEATURE_SIZE
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        if images.ndim != 4 or not jnp.issubdtype(images.dtype, jnp.floating):
            raise PfedafmError(
                f"needs images [height, width, channels]; these data are {images.dtype} "
                f"{list(images.shape[1:])}. Choose others for these (architectures and "
                "shared_extractor), such as mlp and mlp_small"
            )
        if min(images.shape[1:3]) < 16:
            raise PfedafmError(
                f"needs images of 16 x 16 or more; these are {images.shape[1]} x {images.shape[2]}. "
                "Choose others for these (architectures and shared_extractor), such as mlp and "
                "mlp_small, or a larger image_size where the data have one"
            )
        conv1 = Convolution(16, self.initialisation, name="conv1")(images.shape[-1])
        conv2 = Convolution(self.conv2, self.initialisation, name="conv2")(16)
        hidden = conv_pool(conv_pool(images, *conv1), *conv2)
        hidden = hidden.reshape(hidden.shape[0], -1)
        hidden = nn.relu(linear(self.fc1, hidden, self.initialisation, "fc1"))
        return nn.relu(linear(self.features, hidden, self.initialisation, "fc2"))

    # A family, see `padding.py`.

    @staticmethod
    def widest(modules: Sequence["CNN"]) -> "CNN":
        """The narrowest network that all of these fit into."""
        conv2, fc1 = (max(getattr(one, name) for one in modules) for name in ("conv2", "fc1"))
        return modules[0].clone(conv2=conv2, fc1=fc1)

    def unfold(self, params: Params) -> Params:
        """FC1's inputs, which are pixels times channels, as two axes."""
        kernel = params["fc1"]["kernel"]
        kernel = kernel.reshape(-1, self.conv2, kernel.shape[-1])
        return {**params, "fc1": {**params["fc1"], "kernel": kernel}}

    def fold(self, params: Params) -> Params:
        """The inverse of `unfold`."""
        kernel = params["fc1"]["kernel"]
        kernel = kernel.reshape(-1, kernel.shape[-1])
        return {**params, "fc1": {**params["fc1"], "kernel": kernel}}
