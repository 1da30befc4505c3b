"""Which runs the paper's tables and figures need, where they are kept, what is done of them, how long the rest takes."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pfedafm_jax.checkpoint import Checkpoints
from pfedafm_jax.config import Config, updated
from pfedafm_jax.data import NORMALISATION
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import find_method
from pfedafm_jax.models import describe
from pfedafm_jax.records import RunFolder, differences
from pfedafm_jax.reproduce.scales import Scale
from pfedafm_jax.runner import checkpoint_folder
from pfedafm_jax.training import LocalTraining

FLOPS_PER_SECOND = 6e10  # two CPU cores, heterogeneous pFedAFM at N = 100: 14 s a round of 0.85 TFLOP

Summary = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One training and its folder."""

    folder: Path
    config: Config

    @property
    def name(self) -> str:
        """`hetero_cifar10-n100/pfedafm-seed0`"""
        return f"{self.folder.parent.name}/{self.folder.name}"


@dataclass(frozen=True)
class Study:
    """What was asked for: a scale, and what the command line changes of it. Makes the runs that items ask for."""

    scale: Scale
    base: Path  # where the runs and the results go
    configs: Mapping[str, Config]  # hetero_cifar10, homo_cifar10, …
    datasets: tuple[str, ...]
    methods: tuple[str, ...] | None = None  # None: what the item of the paper compares
    seeds: tuple[int, ...] | None = None  # None: 0, and in the item with several trials those of the scale
    rounds: int | None = None  # None: those of the scale
    data_dir: str | None = None
    only_finished: bool = False
    log: Callable[[str], None] = print

    def run(
        self,
        method: str,
        dataset: str,
        seed: int = 0,
        *,
        family: str = "hetero",
        column: int | None = None,
        variation: str = "",
        **changes: Any,
    ) -> Run:
        """A run of a method in a column of N; `variation` names the `changes` of its settings."""
        column = column or self.scale.columns[-1]
        name = f"{family}_{dataset}"
        config = updated(self.scale.settings(self.configs[name], column), changes)
        config = dataclasses.replace(config, method=method, seed=seed, rounds=self.rounds or self.scale.rounds)
        folder = self.base / f"{name}-n{column}{'-' if variation else ''}{variation}" / f"{method}-seed{seed}"
        return Run(folder, config.check())

    def chosen(self, default: Sequence[str]) -> list[str]:
        """The methods of an item: those asked for, or its own."""
        return list(default if self.methods is None else self.methods)

    @property
    def one_seed(self) -> tuple[int, ...]:
        """Seeds of the items that the paper ran once."""
        return self.seeds or (0,)


# ---------------------------------------------------------------------------------------------- what is there


@dataclass(frozen=True)
class Standing:
    """A run as its folder shows it. `again`: it must start over, since it cannot be made longer."""

    run: Run
    state: Literal["done", "started", "new", "again"]
    rounds_done: int = 0
    summary: Summary | None = None  # of a finished run, also of one that is shorter than asked


def look(run: Run) -> Standing:
    """What is done of a run; raises where its folder holds a run with other settings.

    A run that was started with more rounds keeps its number: the one in the result may be larger than the one asked for.
    """
    folder = RunFolder(run.folder)
    stored, summary = folder.config(), folder.summary()
    if stored is None:
        return Standing(run, "new")
    started = int(stored.get("rounds", 0))
    longer = Run(run.folder, dataclasses.replace(run.config, rounds=max(run.config.rounds, started)))
    found = differences(stored, dataclasses.replace(run.config, rounds=started))
    if found:
        lines = "\n  ".join(found)
        raise PfedafmError(
            f"{run.folder} holds a run with other settings:\n  {lines}\nanother --run-dir leaves it as it is"
        )
    if summary is not None and summary["rounds"] >= run.config.rounds:
        return Standing(longer, "done", summary["rounds"], summary)
    saved = max(Checkpoints(checkpoint_folder(run.folder)).manifests(), default=0)
    if summary is not None and (not saved or differences(stored, longer.config)):  # FedKD's coding knows the last round
        return Standing(longer, "again", 0, summary)
    if differences(stored, longer.config):
        return Standing(longer, "again")
    return Standing(longer, "started" if saved else "new", saved, summary)


# ---------------------------------------------------------------------------------------------- how long


def flops_of_a_round(config: Config) -> float:
    """Floating-point operations of all participants of a round, for clients of equal size."""
    classes = {"cifar10": 10, "cifar100": 100, "synthetic": config.synthetic_classes}[config.dataset]
    images = config.synthetic_samples if config.dataset == "synthetic" else 60_000
    samples = max(1, round(0.8 * images / config.num_clients))
    seen = min(classes, config.classes_per_client if config.partition == "pathological" else classes)
    how = LocalTraining.of(config, *NORMALISATION["cifar10"], [samples])
    shared = describe(config.shared_extractor, classes, feature_size=config.feature_size)
    method = find_method(config.method)(config, how, shared)
    each = [
        method.cost(describe(name, classes, feature_size=config.feature_size), samples, seen).flops
        for name in config.architectures
    ]
    return sum(each) / len(each) * config.num_participants


def checkpoint_gigabytes(config: Config) -> float:
    """About what a finished run keeps: the states of the clients that were drawn."""
    classes = {"cifar10": 10, "cifar100": 100, "synthetic": config.synthetic_classes}[config.dataset]
    sizes = [describe(name, classes, feature_size=config.feature_size).params for name in config.architectures]
    drawn = config.num_clients * (1 - (1 - config.participation) ** config.rounds)
    return 4e-9 * drawn * sum(sizes) / len(sizes)


def estimator(standings: Sequence[Standing], start_seconds: float) -> Callable[[Standing], float]:
    """Seconds that are left of a run, from its FLOPs and the speed of the finished runs (else that of two CPU cores)."""
    finished = [standing.summary for standing in standings if standing.summary is not None]
    work = sum(s["flops_per_client_round"] * s["rounds"] * _participants(s["config"]) for s in finished)
    seconds = sum(s["seconds"] for s in finished)
    speed = work / seconds if seconds > 1 else FLOPS_PER_SECOND
    if finished:
        start_seconds = sum(s["compile_seconds"] for s in finished) / len(finished) + start_seconds / 10

    def left(standing: Standing) -> float:
        if standing.state == "done":
            return 0.0
        config = standing.run.config
        rounds = config.rounds - (0 if standing.state == "again" else standing.rounds_done)
        return start_seconds + flops_of_a_round(config) * rounds / speed

    return left


def _participants(config: dict[str, Any]) -> int:
    return round(config["participation"] * config["num_clients"])


def in_words(seconds: float) -> str:
    """For people.

    >>> in_words(40), in_words(290), in_words(9000), in_words(400_000)
    ('40 s', '5 min', '2.5 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
