"""`experiments/run.py` itself, with a network small enough to start and run in seconds:
`--architectures tiny`."""

import runpy
import sys
from pathlib import Path

import flax.linen as nn

from pfedafm_jax.models import linear, register_extractor


class Tiny(nn.Module):
    """The mean of each quarter of the image, and a linear layer."""

    features: int = 8

    @nn.compact
    def __call__(self, images):
        pooled = nn.avg_pool(images, (16, 16), strides=(16, 16))
        return nn.relu(linear(self.features, pooled.reshape(pooled.shape[0], -1), "torch", "fc1"))


SETTINGS = [
    "--dataset", "synthetic", "--synthetic-samples", "240", "--num-clients", "12", "--participation", "0.25",
    "--architectures", "tiny", "--shared-extractor", "tiny", "--feature-size", "8", "--local-epochs", "1",
    "--devices", "1", "--eval-every", "50", "--checkpoint-every", "1",
]  # fmt: skip

if __name__ == "__main__":
    register_extractor("tiny", Tiny())
    command = Path(__file__).parent.parent / "experiments" / "run.py"
    sys.argv = [str(command), *SETTINGS, *sys.argv[1:]]
    runpy.run_path(str(command), run_name="__main__")
