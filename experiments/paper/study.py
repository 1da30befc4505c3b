"""Which runs the paper's tables and figures need, how long and how much: scales, folders, time."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flax.linen as nn

from paper import numbers
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.presets import with_preset
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.models.architecture import extractor_names, register_extractor
from pfedafm_jax.models.cnn import linear
from pfedafm_jax.results.run import Run
from pfedafm_jax.runs.existing import Task

MINIATURE = "miniature"

Found = Mapping[tuple[Any, ...], Run]
"""The finished runs of an item by what they are, the seed last: `("cifar10", "fedproto", 0)`."""


def at(found: Found, *start: Any) -> list[Run]:
    """The finished runs whose key starts like this: those of all seeds."""
    return [run for key, run in found.items() if key[: len(start)] == start]


class Miniature(nn.Module):
    """For trying things out: means of 4 x 4 fields, two linear layers; it compiles in no time."""

    hidden: int
    features: int = 16

    @nn.compact
    def __call__(self, images):
        number, height, width, channels = images.shape
        fields = images.reshape(number, 4, height // 4, 4, width // 4, channels).mean(axis=(2, 4))
        hidden = nn.relu(linear(self.hidden, fields.reshape(number, -1), "torch", "fc1"))
        return nn.relu(linear(self.features, hidden, "torch", "fc2"))


@dataclass(frozen=True)
class Scale:
    """What items run at this scale; to add one, add an entry to `SCALES`."""

    name: str
    about: str
    rounds: Mapping[str, int]  # by dataset
    settings: Callable[[Config, int], Config]  # from a named configuration and a column of N
    columns: tuple[int, ...] = (100,)
    methods: tuple[str, ...] = numbers.METHODS  # of Table 3
    homogeneous: tuple[str, ...] = numbers.METHODS  # of Table 2
    curves: tuple[str, ...] = ("pfedafm", "standalone", "fedproto")  # of the curves by round
    pair: tuple[str, ...] = ("pfedafm", "fedproto")  # of the other figures
    datasets: tuple[str, ...] = tuple(numbers.DATASETS)
    seen_classes: Mapping[str, tuple[int, ...]] = field(
        default_factory=lambda: numbers.SEEN_CLASSES
    )
    gammas: tuple[float, ...] = numbers.GAMMAS
    mix_learning_rates: tuple[float, ...] = numbers.MIX_LEARNING_RATES
    mix_seeds: tuple[int, ...] = tuple(range(numbers.MIX_SEEDS))
    target: Mapping[str, float] = field(default_factory=lambda: numbers.TARGET_ACCURACY)


def _as_in_the_file(config: Config, num_clients: int) -> Config:
    return updated(config, num_clients=num_clients)


def _full(config: Config, num_clients: int) -> Config:
    chosen = {"local_epochs": 4, "flip": True, "crop": True}  # experiments/results/epochs.md
    return updated(config, num_clients=num_clients, **chosen)


def _as_in_the_paper(config: Config, num_clients: int) -> Config:
    participation = numbers.COLUMNS[num_clients]
    config = with_preset(config, "paper")
    return updated(config, num_clients=num_clients, participation=participation)


def _smoke(config: Config, num_clients: int) -> Config:
    if MINIATURE not in extractor_names():
        register_extractor(MINIATURE, Miniature(hidden=24))
    many = config.dataset == "cifar100"
    return updated(
        config,
        dataset="synthetic",
        synthetic_samples=320,
        synthetic_classes=20 if many else 10,
        classes_per_client=4 if many else 2,
        num_clients=num_clients,
        participation=0.5,
        architectures=(MINIATURE,),  # one for all: what is compiled once is found again
        shared_extractor=MINIATURE,
        feature_size=16,
        local_epochs=2,
        batch_size=4,  # so small that a short last batch needs no program of its own
        learning_rate=0.05,
        devices=1,
    )


SCALES = {
    scale.name: scale
    for scale in (
        Scale(
            "smoke",
            "generated images, one tiny network: shows that all works, the numbers mean nothing",
            dict.fromkeys(numbers.DATASETS, 2),
            _smoke,
            columns=(8,),
            homogeneous=("standalone", "pfedafm"),
            datasets=("cifar10",),
            seen_classes={"cifar10": (2, 5), "cifar100": (4, 10)},
            gammas=(0.5,),
            mix_learning_rates=(0.1, 1.0),
            mix_seeds=(0,),
            target={"cifar10": 0.3, "cifar100": 0.15},
        ),
        Scale(
            "quick",
            "the named configurations, the column N = 100 only, fewer points in some figures",
            dict.fromkeys(numbers.DATASETS, 20),
            _as_in_the_file,
            seen_classes={"cifar10": (2, 6, 10), "cifar100": (10, 50, 100)},
            gammas=(0.1, 0.5),
            mix_learning_rates=(0.001, 0.1, 1.0),
        ),
        Scale(
            "full",
            "as quick, with flips and crops, 500 or 200 rounds of E = 4; FedPer and FedRep as controls",
            {"cifar10": 500, "cifar100": 200},
            _full,
            methods=(*numbers.METHODS, *numbers.CONTROLS),
            curves=("pfedafm", "standalone", "fedproto", "fedrep"),
            pair=("pfedafm", "fedproto", "fedrep"),
        ),
        Scale(
            "paper",
            "the paper's settings, E = 10, learning rate 0.01, its columns of N and C, all points",
            dict.fromkeys(numbers.DATASETS, 500),
            _as_in_the_paper,
            columns=tuple(numbers.COLUMNS),
        ),
    )
}


@dataclass(frozen=True)
class Study:
    """What was asked for: a scale, and what the command line changes of it."""

    scale: Scale
    base: Path  # where the runs and the results go
    datasets: tuple[str, ...]
    methods: Sequence[str] | None = None  # None: those that the item compares
    seeds: Sequence[int] | None = None  # None: 0, or those of the scale where it has several
    rounds: int | None = None  # None: those of the scale
    data_dir: str | None = None
    only_finished: bool = False

    def task(
        self,
        method: str,
        dataset: str,
        seed: int = 0,
        family: str = "hetero",
        column: int | None = None,
        *,
        variation: str = "",
        **changes: Any,
    ) -> Task:
        """A run of a method in a column of N; `variation` names the `changes` of its settings.

        Where these change nothing it is the run without them.
        """
        column, name = column or self.scale.columns[-1], f"{family}_{dataset}"
        usual = self.scale.settings(Config.load(name), column)
        config = updated(usual, changes)
        variation = "" if changes and config == usual else variation
        rounds = self.rounds or self.scale.rounds[dataset]
        config = updated(config, method=method, seed=seed, rounds=rounds)
        place = f"{name}-n{column}{'-' if variation else ''}{variation}"
        return Task(check_names(config), self.base / place / f"{method}-seed{seed}")

    def chosen(self, default: Sequence[str]) -> Sequence[str]:
        """The methods of an item: those asked for, or its own."""
        return default if self.methods is None else self.methods

    @property
    def one_seed(self) -> Sequence[int]:
        """Seeds of the items that the paper ran once."""
        return self.seeds or (0,)

    def command(self, item: str) -> str:
        """What makes an item here, but for the folders."""
        words = ["python experiments/reproduce.py", item, "--scale", self.scale.name]
        words += ["--rounds", str(self.rounds)] if self.rounds else []
        words += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        words += ["--methods", ",".join(self.methods)] if self.methods else []
        if self.datasets != self.scale.datasets:
            words += ["--datasets", ",".join(self.datasets)]
        return " ".join([*words, "--only-finished"] if self.only_finished else words)

    def label(self, dataset: str) -> str:
        """`CIFAR-10`, or what stands in its place."""
        config = self.task("pfedafm", dataset).config
        return numbers.DATASETS.get(config.dataset, f"{config.dataset} {config.synthetic_classes}")


def name_of(task: Task) -> str:
    """`hetero_cifar10-n100/pfedafm-seed0`"""
    return f"{task.folder.parent.name}/{task.folder.name}" if task.folder else "in memory"


def estimator(tasks: Iterable[Task]) -> Callable[[Task], float | None]:
    """Seconds that are left of a run, from those that a round took in finished runs; None: none is."""
    done = [one.run.summary for one in tasks if one.run is not None and one.run.finished]
    rounds = sum(summary.rounds for summary in done)
    seconds = sum(summary.seconds + summary.compile_seconds for summary in done)

    def left(task: Task) -> float | None:
        if task.state == "done":
            return 0.0
        return (task.config.rounds - task.rounds_done) * seconds / rounds if rounds else None

    return left
