"""A small ResNet and the blocks of others, which show how to write your own: any Flax module will do.

It ends in the mean over all positions, so that it takes images of any size, and is as wide as its
last block: `architecture.WithLinear` adds a layer to the required width. It uses GroupNorm, which
keeps no state between batches. On a CPU, `kernels/layers.py` runs its convolutions.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfedafm_jax.models.init import initialisers

GROUP = 8  # channels that are normalised together


def conv(
    inputs: jax.Array,
    initialisation: str,
    channels: int,
    size: int = 3,
    stride: int = 1,
    groups: int = 1,
):
    """A convolution of the enclosing module, normalised; depthwise if each channel is a group."""
    start = initialisers(initialisation, size * size * inputs.shape[-1] // groups)["kernel_init"]
    options = {"feature_group_count": groups, "use_bias": False, "kernel_init": start}
    layer = nn.Conv(channels, (size, size), stride, **options)
    return nn.GroupNorm(num_groups=None, group_size=GROUP)(layer(inputs))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with a residual connection, a 1x1 convolution if the shape changes."""

    channels: int
    stride: int
    initialisation: str

    @nn.compact
    def __call__(self, inputs):
        hidden = nn.relu(conv(inputs, self.initialisation, self.channels, stride=self.stride))
        hidden = conv(hidden, self.initialisation, self.channels)
        if inputs.shape != hidden.shape:
            inputs = conv(inputs, self.initialisation, self.channels, size=1, stride=self.stride)
        return nn.relu(hidden + inputs)


class ResNet(nn.Module):
    """A 3x3 convolution and residual blocks of each width, the image halved in all but the first."""

    widths: tuple[int, ...] = (16, 32, 64)
    blocks: int = 1  # of each width
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(conv(images, self.initialisation, self.widths[0]))
        for index, width in enumerate(self.widths):
            for block in range(self.blocks):
                stride = 2 if index and not block else 1
                hidden = ResidualBlock(width, stride, self.initialisation)(hidden)
        return jnp.mean(hidden, axis=(1, 2))
