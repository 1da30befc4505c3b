"""Every setting of a run: type, default, meaning and range.

The defaults are those of the configuration `hetero_cifar10` (N = 100, C = 10 %, 2 of 10 classes per
client), at a length that two CPU cores finish in about five minutes; but methods have one learning
rate, and their own defaults. `Config.load` reads named configurations and files.
"""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from annotated_types import Ge, Gt, Le, Lt

from pfedafm_jax.base.errors import PfedafmError, bad, known, suggestion
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.config.method_settings import (
    Count,
    Epochs,
    MethodSettings,
    Positive,
    Rate,
    changed,
    check_settings,
    plain,
    settings_of,
)

CONFIGS = Path(__file__).parent / "configs"
Protocol = Literal["paper", "authors"]
# Beyond these, shares are all-or-nothing or equal anyway, and the sampler overflows.
GAMMA_RANGE = (1e-3, 1e6)
METHOD_SETTINGS: dict[str, type[MethodSettings]] = {}
"""The `Settings` of every registered method, by the method's name; `register_method` adds to it."""

Own = TypeVar("Own", bound=MethodSettings)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Settings of the data and its split."""

    dataset: str = "cifar10"
    """cifar10, cifar100, synthetic, or your own data. Synthetic images are generated, for trying
    things out; your own are folder:PATH (a folder of images per class), leaf:PATH (LEAF's JSON),
    npz:PATH or tfds:NAME."""
    image_size: Annotated[int, Ge(0), Le(4096)] = 0
    """folder: and tfds: resize images to this height and width; leaf: flat lists are images of this
    size; 0: as they are."""
    synthetic_classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Number of classes of the synthetic dataset."""
    synthetic_samples: Count = 6000
    """Number of images of the synthetic dataset."""
    partition: str = "pathological"
    """pathological: a few classes each; dirichlet: Dirichlet(gamma) shares; iid: even shares;
    natural: each user of the data (npz, folder, leaf) is a client; or a file NAME.npz that
    `Partition.save` wrote."""
    classes_per_client: Annotated[int, Ge(1), Le(1000)] = 2
    """Pathological: number of classes per client."""
    gamma: Annotated[float, Ge(GAMMA_RANGE[0]), Le(GAMMA_RANGE[1])] = 0.5
    """Dirichlet: smaller is more uneven."""
    min_samples: Annotated[int, Ge(2), Le(10_000_000)] = 10
    """Dirichlet: minimum number of images per client, one of them for testing."""
    protocol: Protocol = "paper"
    """Which images are for training and testing. paper: all are split over clients, each client's
    8:2; authors: 4/5 of the official training images and the official test images, in the same
    proportions."""
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of each client's training data held out for choosing settings."""
    normalisation: Literal["dataset", "imagenet"] = "dataset"
    """Channel means and deviations: the dataset's own, or ImageNet's (released code, CIFAR-10)."""
    flip: bool = False
    """Augmentation: random horizontal flips."""
    erase: bool = False
    """Augmentation: random erasing."""
    crop: bool = False
    """Augmentation: random crops after padding by 4."""


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Settings of the clients and their networks."""

    num_clients: Count = 100
    """Number of clients, the paper's N."""
    held_out_clients: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """This many more clients get a share of the data but never take part: newcomers for later."""
    participation: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of clients drawn each round, the paper's C."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that a drawn client drops out of the round: it sends nothing and keeps its state."""
    architectures: tuple[str, ...] = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
    """Client k gets the (k mod count)th of these."""
    shared_extractor: str = "cnn5"
    """Architecture of the shared network (the paper's G)."""
    feature_size: Annotated[int, Ge(1), Le(65_536)] = 500
    """Width of the feature vector."""
    initialisation: Literal["torch", "flax"] = "torch"
    """Weight initialisation: PyTorch's default or Flax's."""
    same_start: bool = True
    """Clients of one architecture start from the same weights."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings of the method, rounds, local epochs, SGD and aggregation."""

    method: str = "pfedafm"
    """The federated method, one of those below. fedper, fedrep, fedavg and fedprox give
    every client the shared extractor, whatever `architectures` says."""
    rounds: Count = 40
    """Communication rounds, the paper's T."""
    local_epochs: Epochs = 4
    """Epochs per visit (and phase), the paper's E."""
    batch_size: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """Images per step. The last, partial batch of an epoch is kept."""
    learning_rate: Rate = 0.02
    """For the networks (η_ω = η_θ). The paper's is 0.01, for longer runs; a method may have its
    own: --fml.learning-rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """SGD momentum, reset at each visit of a client."""
    weight_decay: Rate = 1e-3
    """SGD weight decay."""
    clip_norm: Positive = 50.0
    """Gradients of each network are clipped to this global norm."""
    aggregation: Literal["samples", "uniform", "median"] = "samples"
    """How uploads become one. An average, weighted by samples: n_k (the paper); uniform: all equal;
    median: of each number the median."""
    server_optimizer: Literal["average", "momentum", "adam", "yogi"] = "average"
    """How the average of shared networks becomes the next broadcast. average: it is that; else a
    step along the averaged change (FedAvgM, FedAdam, FedYogi)."""
    server_learning_rate: Rate | None = None
    """Of the server's optimizer; none: 1 with momentum, 0.01 with adam and yogi."""
    server_momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """Server optimizer: decay of its momentum (adam, yogi: of the first moment)."""
    server_second_moment: Annotated[float, Ge(0), Lt(1)] = 0.99
    """Server optimizer: decay of the second moment of adam and yogi."""
    server_epsilon: Positive = 1e-3
    """Server optimizer: what adam and yogi add to the root of the second moment (FedOpt's τ)."""
    server_mean: Annotated[float, Ge(0), Lt(1)] = 0.0
    """All clients are judged with a running mean of the broadcasts, of which this share is kept
    each round; 0: with the last broadcast. Training never sees it."""
    statistics: Literal["private", "averaged"] = "private"
    """Running statistics (BatchNorm) of networks that clients share: each client's own, or averaged
    like weights. BatchNorm's scale and bias are weights."""
    precision: Literal["highest", "tf32", "bfloat16"] = "highest"
    """Precision of matrix products on GPUs. Changes results: float32, or faster and less precise."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """Determines split, initial weights, participants and batches."""
    eval_every: Count = 10
    """Rounds between evaluations of all clients; the last round always has one."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Settings of the machine; results are the same within rounding."""

    devices: Annotated[int, Ge(0), Le(4096)] = 0
    """Devices to use; 0: all GPUs, or one per CPU core."""
    layout: Literal["auto", "loop", "lockstep"] = "auto"
    """loop: a device trains its clients one after another, one program per architecture; lockstep:
    all at once, architectures of a family padded into one program; auto: loop on CPUs."""
    clients_per_step: Annotated[int, Ge(0), Le(65_536)] = 0
    """Clients that a device trains at once; 0: one (loop) or all (lockstep)."""
    kernels: Literal["auto", "native", "xla"] = "auto"
    """Convolution and SGD on a CPU: native code, built at first use, or XLA's; auto: native where
    it can be built."""
    store: Literal["auto", "memory", "disk"] = "auto"
    """Where clients' states are kept between visits."""
    checkpoint_every: Annotated[int, Ge(0), Le(10_000_000)] = 5
    """Rounds between checkpoints; the last round has one as well. 0: none at all."""


GROUPS = (Data, Clients, Training, Machine)
REMOVED = frozenset({"backend"})
"""Settings of earlier versions that changed no result: files of runs may name them still."""


@dataclass(frozen=True, kw_only=True)
class Config(Machine, Training, Clients, Data):
    """All settings of a run. Frozen: `dataclasses.replace` and `updated` make changed copies.

    A method's settings are in its class, `Config(settings=(FML.Settings(alpha=0.3),))`, or as in a
    file, `updated(Config(), {"fml": {"alpha": 0.3}})`; `config.fml` returns them.

    >>> Config(dataset="synthetic", num_clients=20, participation=0.2).num_participants
    4
    >>> Config(participation=0.001).check()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    pfedafm_jax.base.errors.PfedafmError: participation = 0.001 cannot be used; accepted: at least 0.01...
    """

    settings: tuple[MethodSettings, ...] = ()
    """At most one per method; methods not listed have their defaults."""

    def __post_init__(self):
        vars(self).update({name: plain(value) for name, value in vars(self).items()})
        given: Any = self.settings if isinstance(self.settings, tuple) else [None]
        if not all(isinstance(one, MethodSettings) for one in given):
            accepted = "a tuple of methods' settings, such as FML.Settings(alpha=0.3)"
            raise bad("settings", self.settings, accepted)
        for one in given:
            check_settings(one, f"{one.method}.")
        latest = {one.method: one for one in given}
        # Defaults are left out, so that equivalent configurations are equal.
        kept = tuple(one for _, one in sorted(latest.items()) if one != type(one)())
        object.__setattr__(self, "settings", kept)

    @classmethod
    def load(cls, name: str | Path) -> "Config":
        """The named configuration (`hetero_cifar10`), or the TOML file (`mine.toml`).

        >>> Config.load("hetero_cifar100").classes_per_client
        10
        """
        names = config_names()
        if str(name) not in names and not str(name).endswith(".toml"):
            raise bad("config", str(name), f"{known(name, names)}, or a TOML file")
        path = CONFIGS / f"{name}.toml" if str(name) in names else Path(name)
        return updated(Config(), read_toml(path))

    def of(self, kind: type[Own]) -> Own:
        """The settings of one method: `config.of(FML.Settings).alpha`."""
        found = [one for one in self.settings if one.method == kind.method]
        return cast(Own, found[0]) if found else kind()

    def __getattr__(self, name: str) -> Any:
        # `config.fml`: the settings of a registered method.
        if name not in METHOD_SETTINGS:
            near = suggestion(name, settings_of(Config))
            raise AttributeError(f"Config has no setting {name!r}{near}")
        return self.of(METHOD_SETTINGS[name])

    @property
    def num_participants(self) -> int:
        """K = C · N."""
        return round(self.participation * self.num_clients)

    @property
    def rate(self) -> float:
        """The learning rate of this run's method: its own, or the common one."""
        own = self.of(METHOD_SETTINGS.get(self.method, MethodSettings)).learning_rate
        return self.learning_rate if own is None else own

    def check(self) -> "Config":
        """Returns itself, or raises `PfedafmError` for the first setting that is of a wrong type or
        out of range. Names of data, networks and methods are looked up by `methods.checks.check_names`."""
        check_settings(self)
        if self.image_size and not self.dataset.startswith(("folder:", "leaf:", "tfds:")):
            accepted = f"0 for {self.dataset}, where all have one size; N for folder:, leaf:, tfds:"
            raise bad("image_size", self.image_size, accepted)
        least = 6 * self.synthetic_classes
        if self.dataset == "synthetic" and self.synthetic_samples < least:
            accepted = f"at least {least} for {self.synthetic_classes} classes"
            raise bad("synthetic_samples", self.synthetic_samples, accepted)
        if self.num_participants < 1:
            accepted = (
                f"at least {1 / self.num_clients:g}: one of {self.num_clients} clients per round"
            )
            raise bad("participation", self.participation, accepted)
        if not self.architectures:
            raise bad("architectures", self.architectures, "at least one, such as cnn1")
        return self

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON values, those of the run's method under its name."""
        values = {name: getattr(self, name) for name in settings_of(Config)}
        if self.method in METHOD_SETTINGS:
            values[self.method] = dataclasses.asdict(getattr(self, self.method))
        return values

    def toml(self, comment: str = "") -> str:
        """The settings that differ from the defaults, as a file that `load` reads."""
        lines = [f"# {line}".rstrip() for line in comment.splitlines()] + [""]
        for owner in (self, *self.settings):
            lines += ["", f"[{owner.method}]"] if owner is not self else []
            for name, setting in settings_of(type(owner)).items():
                value = getattr(owner, name)
                if value not in (setting.default, None):
                    text = json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace")
                    lines.append(f"{name} = {text.decode()}")
        return "\n".join(lines) + "\n"


def updated(config: Config, values: Mapping[str, Any]) -> Config:
    """`config` with some settings changed; a method's are nested, or named `fml.alpha`.

    A new `learning_rate` applies to every method except those with one of their own in `values`.

    >>> updated(Config(), {"rounds": 5, "pfedafm": {"mix_fixed": 0.5}}).pfedafm.mix_fixed
    0.5
    """
    common: dict[str, Any] = {}
    of_methods: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        method, dot, setting = name.partition(".")
        if kind := METHOD_SETTINGS.get(method):
            new = {setting: value} if dot else value
            if not isinstance(new, Mapping):
                raise bad(name, value, f"settings of {name}: {', '.join(settings_of(kind))}")
            of_methods.setdefault(method, {}).update(new)
        elif name in settings_of(Config):
            common[name] = value
        elif name not in REMOVED:
            names = [*settings_of(Config), *METHOD_SETTINGS]
            raise PfedafmError(f"unknown setting {name}; known: {known(name, names)}")
    found = {one.method: one for one in config.settings}
    if "learning_rate" in common:
        found = {name: dataclasses.replace(one, learning_rate=None) for name, one in found.items()}
    for name, own in of_methods.items():
        found[name] = changed(found.get(name, METHOD_SETTINGS[name]()), own, f"{name}.")
    return dataclasses.replace(changed(config, common), settings=tuple(found.values()))


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a file, unchecked."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:  # of the name or of the content
        raise PfedafmError(f"cannot read the configuration {path}: {error}") from error


def config_names() -> list[str]:
    """The named configurations, files of `pfedafm_jax/config/configs/`."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))
