"""How long and how much: the paper's experiments for a minute, for an evening, or as the paper has them."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import flax.linen as nn

from pfedafm_jax.config import Config, paper_scale, updated
from pfedafm_jax.models import extractor_names, linear, register_extractor
from pfedafm_jax.reproduce import paper


class Miniature(nn.Module):
    """For trying things out: the means of 4 x 4 fields of the image and two linear layers; it compiles in no time."""

    hidden: int
    features: int = 16

    @nn.compact
    def __call__(self, images):
        number, height, width, channels = images.shape
        fields = images.reshape(number, 4, height // 4, 4, width // 4, channels).mean(axis=(2, 4))
        hidden = nn.relu(linear(self.hidden, fields.reshape(number, -1), "torch", "fc1"))
        return nn.relu(linear(self.features, hidden, "torch", "fc2"))


MINIATURE = "miniature"


@dataclass(frozen=True)
class Scale:
    """What an item runs at this scale; `settings` makes the configuration of a column of N from a configuration file."""

    name: str
    about: str
    rounds: int
    settings: Callable[[Config, int], Config]
    columns: tuple[int, ...] = (100,)
    homogeneous: tuple[str, ...] = paper.METHODS  # methods of Table 2
    datasets: tuple[str, ...] = tuple(paper.DATASETS)
    seen_classes: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: paper.SEEN_CLASSES)
    gammas: tuple[float, ...] = paper.GAMMAS
    mix_learning_rates: tuple[float, ...] = paper.MIX_LEARNING_RATES
    mix_seeds: tuple[int, ...] = tuple(range(paper.MIX_SEEDS))
    target: Mapping[str, float] = dataclasses.field(default_factory=lambda: paper.TARGET)
    start_seconds: float = 30.0  # to load and compile, where nothing is known yet


def _as_in_the_file(config: Config, num_clients: int) -> Config:
    return dataclasses.replace(config, num_clients=num_clients)


def _smoke(config: Config, num_clients: int) -> Config:
    if MINIATURE not in extractor_names():
        register_extractor(MINIATURE, Miniature(hidden=24))
    many = config.dataset == "cifar100"
    small = {
        "dataset": "synthetic",
        "synthetic_samples": 320,
        "synthetic_classes": 20 if many else 10,
        "classes_per_client": 4 if many else 2,
        "num_clients": num_clients,
        "participation": 0.5,
        "architectures": (MINIATURE,),  # one for all, in Table 3 too: what is compiled once is found again in the cache
        "shared_extractor": MINIATURE,
        "feature_size": 16,
        "local_epochs": 2,
        "batch_size": 4,  # so small that a short last batch needs no program of its own
        "learning_rate": 0.05,
        "devices": 1,
    }
    return updated(config, small)


SCALES = {
    "smoke": Scale(
        "smoke",
        "generated images, one tiny network, two rounds: shows that everything works, the numbers mean nothing",
        rounds=2,
        settings=_smoke,
        columns=(8,),
        homogeneous=("standalone", "pfedafm"),
        datasets=("cifar10",),
        seen_classes={"cifar10": (2, 5), "cifar100": (4, 10)},
        gammas=(0.5,),
        mix_learning_rates=(0.1, 1.0),
        mix_seeds=(0,),
        target={"cifar10": 0.3, "cifar100": 0.15},
        start_seconds=2.0,
    ),
    "quick": Scale(
        "quick",
        "the settings of experiments/configs, the paper's column N = 100 only, 20 rounds, fewer points in some figures",
        rounds=20,
        settings=_as_in_the_file,
        seen_classes={"cifar10": (2, 6, 10), "cifar100": (10, 50, 100)},
        gammas=(0.1, 0.5),
        mix_learning_rates=(0.001, 0.1, 1.0),
    ),
    "paper": Scale(
        "paper",
        "the paper's own length, T = 500, E = 10, learning rate 0.01, its three columns of N and C, all points",
        rounds=500,
        settings=paper_scale,
        columns=paper.COLUMNS,
    ),
}
