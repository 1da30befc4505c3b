"""Two more extractors, and examples of how to write one's own: any Flax module will do.

Both end in the mean over all positions, so that they take images of any size, and are 64 wide:
`models.WithLinear` adds the layer to the wanted width. They are normalised by GroupNorm, which
keeps nothing between batches. Their convolutions are `lax.conv`, slow in XLA on CPU and fine on
GPU.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from pfedafm_jax.initialisers import initialisers

GROUP = 8  # channels that are normalised together


def conv(
    inputs: jax.Array,
    initialisation: str,
    channels: int,
    size: int = 3,
    stride: int = 1,
    groups: int = 1,
):
    """A convolution of the enclosing module, normalised; depthwise with a group each channel."""
    start = initialisers(initialisation, size * size * inputs.shape[-1] // groups)["kernel_init"]
    options = {"feature_group_count": groups, "use_bias": False, "kernel_init": start}
    layer = nn.Conv(channels, (size, size), stride, **options)
    return nn.GroupNorm(num_groups=None, group_size=GROUP)(layer(inputs))


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions and the input beside them, by a 1x1 one where its shape changes."""

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


class ResNetSmall(nn.Module):
    """A 3x3 convolution and a residual block for each width, the image halved in all but one."""

    widths: tuple[int, ...] = (16, 32, 64)
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(conv(images, self.initialisation, self.widths[0]))
        for index, width in enumerate(self.widths):
            hidden = ResidualBlock(width, 1 if index == 0 else 2, self.initialisation)(hidden)
        return jnp.mean(hidden, axis=(1, 2))


class SeparableBlock(nn.Module):
    """A 3x3 convolution of each channel by itself, then a 1x1 convolution across channels."""

    channels: int
    stride: int
    initialisation: str

    @nn.compact
    def __call__(self, inputs):
        alone = inputs.shape[-1]
        hidden = nn.relu(conv(inputs, self.initialisation, alone, stride=self.stride, groups=alone))
        return nn.relu(conv(hidden, self.initialisation, self.channels, size=1))


class MobileNetSmall(nn.Module):
    """A 3x3 convolution and depthwise-separable blocks, the image halved in all but the first."""

    widths: tuple[int, ...] = (16, 32, 64)
    initialisation: str = "torch"

    @nn.compact
    def __call__(self, images):
        hidden = nn.relu(conv(images, self.initialisation, self.widths[0]))
        for index, width in enumerate(self.widths):
            hidden = SeparableBlock(width, 1 if index == 0 else 2, self.initialisation)(hidden)
        return jnp.mean(hidden, axis=(1, 2))
