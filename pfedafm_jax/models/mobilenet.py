"""A small MobileNet, with group normalisation."""

import flax.linen as nn
import jax.numpy as jnp

from pfedafm_jax.models.resnet import conv


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
