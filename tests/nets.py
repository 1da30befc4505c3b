"""Networks with BatchNorm and dropout, of Linen and of NNX, and runs of them."""

from functools import partial

import flax.linen as nn
import jax
from flax import nnx
from small import CLASSES, WIDTH, engine_of, small_config, small_data

from pfedafm_jax.models.architecture import describe, register_extractor

PIXELS, HIDDEN, IMAGE = 9, 5, (3, 3, 1)
MEAN, VAR = (f"batch_stats.extractor.BatchNorm_0.{name}" for name in ("mean", "var"))


class Normed(nn.Module):
    """BatchNorm after one dense layer, dropout before the next."""

    hidden: int = HIDDEN
    rate: float = 0.0
    momentum: float = 0.8

    @nn.compact
    def __call__(self, images):
        hidden = nn.Dense(self.hidden)(images.reshape(images.shape[0], -1))
        hidden = nn.relu(nn.BatchNorm(momentum=self.momentum)(hidden))
        return nn.relu(nn.Dense(4)(nn.Dropout(self.rate)(hidden)))


class NormedNNX(nnx.Module):
    """The same."""

    def __init__(self, rate=0.0, *, rngs):
        self.first = nnx.Linear(PIXELS, HIDDEN, rngs=rngs)
        self.norm = nnx.BatchNorm(HIDDEN, momentum=0.8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)
        self.second = nnx.Linear(HIDDEN, 4, rngs=rngs)

    def __call__(self, images):
        hidden = self.norm(self.first(images.reshape(images.shape[0], -1)))
        return nnx.relu(self.second(self.dropout(nnx.relu(hidden))))


class Flagged(nn.Module):
    """The same with Flax's usual flag, in a family of widths."""

    hidden: int = HIDDEN
    features: int = WIDTH

    @nn.compact
    def __call__(self, images, train: bool):
        hidden = nn.Dense(self.hidden)(images.reshape(images.shape[0], -1))
        norm = nn.BatchNorm(use_running_average=not train, momentum=0.8)
        return nn.relu(nn.Dense(self.features)(nn.relu(norm(hidden))))

    @staticmethod
    def widest(modules):
        return modules[0].clone(hidden=max(one.hidden for one in modules))


register_extractor("normed", Normed())
register_extractor("dropped", Normed(rate=0.5))
register_extractor("nnx_normed", NormedNNX)
register_extractor("nnx_dropped", partial(NormedNNX, rate=0.5))
register_extractor("flagged", Flagged())
register_extractor("flagged_wide", Flagged(hidden=8))


def programs(method, network="dropped", **changes):
    networks = {"architectures": (network,), "shared_extractor": network}
    return engine_of(small_config(method, **(networks | changes)), *small_data())


def network(name):
    return describe(name, CLASSES, IMAGE, WIDTH)


def model_of(one, seed=0):
    @jax.jit
    def made(keys):
        return {"extractor": one.init_extractor(keys[0]), "header": one.init_header(keys[1])}

    return made(jax.random.split(jax.random.key(seed)))
