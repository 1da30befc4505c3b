"""Every setting of a run: type, default, meaning and range.

The defaults are those of the configuration `hetero_cifar10` (N = 100, C = 10 %, 2 of 10 classes per
client), at a length that two CPU cores finish in about five minutes; but methods have one learning
rate, and their own defaults. `Config.load` reads named configurations and files.

The text below a setting is its help: the first sentence in `--help`, all of it in `--help-all`.
Names of data, methods and networks are checked where they are looked up, since a plugin may
register them later.
"""

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, cast

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import ConfigDict, Field, model_validator

from pfedafm_jax.base.checked import Checked, unknown
from pfedafm_jax.base.errors import PfedafmError, bad, known, suggestion
from pfedafm_jax.base.files import read_bytes
from pfedafm_jax.config.method_settings import (
    Count,
    Epochs,
    MethodSettings,
    Positive,
    Rate,
    every_method,
)

CONFIGS = Path(__file__).parent / "configs"
Protocol = Literal["paper", "authors"]
# Beyond these, shares are all-or-nothing or equal anyway, and the sampler overflows.
GAMMA_RANGE = (1e-3, 1e6)

BUILT_IN_METHODS = (
    *("pfedafm", "standalone", "lg_fedavg", "fd", "fedproto", "fml", "fedkd", "fedapen"),
    *("fedper", "fedrep", "fedavg", "fedprox", "fedavg_priors", "fedavg_finetuned", "ditto"),
    *("fedgh", "fedtgp", "pfedafm_released"),
)
BUILT_IN_NETWORKS = (
    *("cnn1", "cnn2", "cnn3", "cnn4", "cnn5", "resnet_small", "mobilenet_small", "mlp"),
    *("mlp_small", "resnet18"),
)
"""Names of the methods and networks that come with the library, for a help that does not wait for
JAX; they are registered in `methods` and `models`."""

OneMethods = TypeVar("OneMethods", bound=MethodSettings)


class Data(Checked):
    """Settings of the data and its split."""

    dataset: str = "cifar10"
    """cifar10, cifar100, synthetic, or your own data. Synthetic images are generated, for trying
    things out; your own are folder:PATH (a folder of images per class), leaf:PATH (LEAF's JSON),
    npz:PATH or tfds:NAME."""
    image_size: Annotated[int, Ge(0), Le(4096)] = 0
    """Height and width of images in folder: and tfds:. They are resized to it; in leaf:, flat lists
    are images of this size; 0: as they are."""
    synthetic_classes: Annotated[int, Ge(2), Le(1000)] = 10
    """Number of classes of the synthetic dataset."""
    synthetic_samples: Count = 6000
    """Number of images of the synthetic dataset."""
    partition: str = "pathological"
    """pathological, dirichlet, iid, natural, or a file. pathological: a few classes each;
    dirichlet: Dirichlet(gamma) shares; iid: even shares; natural: each user of the data (npz,
    folder, leaf) is a client; or NAME.npz, which `Partition.save` wrote."""
    classes_per_client: Annotated[int, Ge(1), Le(1000)] = 2
    """Pathological: number of classes per client."""
    gamma: Annotated[float, Ge(GAMMA_RANGE[0]), Le(GAMMA_RANGE[1])] = 0.5
    """Dirichlet: smaller is more uneven."""
    min_samples: Annotated[int, Ge(2), Le(10_000_000)] = 10
    """Dirichlet: least number of images per client. One of them is for testing."""
    protocol: Protocol = "paper"
    """paper or authors: which images train, which test. paper: all are split over clients, each
    client's 8:2; authors: 4/5 of the official training images and the official test images, in the
    same proportions."""
    validation_fraction: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Fraction of training data held out. Each client's own, for choosing settings."""
    normalisation: Literal["dataset", "imagenet"] = "dataset"
    """Channel means and deviations. dataset: the dataset's own; imagenet: ImageNet's, as in the
    released code for CIFAR-10."""
    flip: bool = False
    """Augmentation: random horizontal flips."""
    erase: bool = False
    """Augmentation: random erasing."""
    crop: bool = False
    """Augmentation: random crops after padding by 4."""


class Clients(Checked):
    """Settings of the clients and their networks."""

    num_clients: Count = 100
    """Number of clients (N; letters as in the paper)."""
    held_out_clients: Annotated[int, Ge(0), Le(1_000_000)] = 0
    """Newcomers for later. This many more clients get a share of the data but never take part."""
    participation: Annotated[float, Gt(0), Le(1)] = 0.1
    """Fraction of clients drawn each round (C)."""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Probability that a drawn client drops out. It sends nothing and keeps its state."""
    architectures: Annotated[tuple[str, ...], MinLen(1)] = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
    """Networks; client k gets the (k mod count)th. Names with commas between them."""
    shared_extractor: str = "cnn5"
    """Network that clients share (G)."""
    feature_size: Annotated[int, Ge(1), Le(65_536)] = 500
    """Width of the feature vector."""
    initialisation: Literal["torch", "flax"] = "torch"
    """Weight initialisation. torch: PyTorch's default; flax: Flax's."""
    same_start: bool = True
    """Clients of one architecture start from the same weights."""


class Training(Checked):
    """Settings of the method, rounds, local epochs, SGD and aggregation."""

    method: str = "pfedafm"
    """The federated method, one of those below. fedper, fedrep, fedavg and fedprox give every
    client the shared extractor, whatever `architectures` says."""
    rounds: Count = 40
    """Communication rounds (T)."""
    local_epochs: Epochs = 4
    """Epochs per visit, and per phase (E)."""
    batch_size: Annotated[int, Ge(1), Le(1_000_000)] = 64
    """Images per step. The last, partial batch of an epoch is kept."""
    learning_rate: Rate = 0.02
    """For the networks (η_ω = η_θ). The paper's is 0.01, for longer runs; a method may have its
    own: --fml.learning-rate."""
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    """SGD momentum. It starts at zero at each visit of a client."""
    weight_decay: Rate = 1e-3
    """SGD weight decay."""
    clip_norm: Positive = 50.0
    """Gradients of each network are clipped to this norm."""
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
    """BatchNorm's running statistics in shared networks. private: each client's own; averaged: like
    weights, which BatchNorm's scale and bias are."""
    precision: Literal["highest", "tf32", "bfloat16"] = "highest"
    """Precision of matrix products on GPUs. It changes results. highest: float32; tf32, bfloat16:
    faster and less precise."""
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    """For split, initial weights, participants, batches."""
    eval_every: Count = 10
    """Rounds between evaluations of all clients. The last round always has one."""


class Machine(Checked):
    """Settings of the machine; results are the same within rounding."""

    devices: Annotated[int, Ge(0), Le(4096)] = 0
    """Devices to use; 0: all GPUs, or one per CPU core."""
    layout: Literal["auto", "loop", "lockstep"] = "auto"
    """How a device trains its clients. loop: one after another, one program per architecture;
    lockstep: all at once, architectures of a family padded into one program; auto: loop on CPUs."""
    clients_per_step: Annotated[int, Ge(0), Le(65_536)] = 0
    """Clients that a device trains at once. 0: one (loop) or all (lockstep)."""
    kernels: Literal["auto", "native", "xla"] = "auto"
    """Convolution and SGD on a CPU. native: code of ours, built at first use; xla: XLA's; auto:
    native where it can be built."""
    store: Literal["auto", "memory", "disk"] = "auto"
    """Where clients' states are kept between visits. auto: in memory, or on disk where all would
    fill more than a third of it."""
    checkpoint_every: Annotated[int, Ge(0), Le(10_000_000)] = 5
    """Rounds between checkpoints; 0: none at all. The last round has one as well."""


GROUPS = (Data, Clients, Training, Machine)
REMOVED = frozenset({"backend"})
"""Settings of earlier versions that changed no result: files of runs may name them still."""


class Config(Machine, Training, Clients, Data):
    """All settings of a run; types and ranges are checked when it is made.

    A method's own settings stand under its name, as in a file: `Config(fml={"alpha": 0.3})`, or
    `Config(fml=FML.Settings(alpha=0.3))`. `config.fml` returns them, whether they were given or
    not. A config cannot be changed; `updated` makes changed copies.

    >>> Config(dataset="synthetic", num_clients=20, participation=0.2).num_participants
    4
    >>> Config(participation=0.001)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    pfedafm_jax.base.errors.PfedafmError: participation = 0.001 cannot be used; accepted: at least 0.01...
    """

    # A method's settings are what pydantic calls extra: their names are known once it is registered.
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, MethodSettings] = Field(init=False)  # pyright: ignore[reportIncompatibleVariableOverride]

    @model_validator(mode="before")
    @classmethod
    def _make_method_settings(cls, values: Any) -> Any:
        """Tables of methods become their `Settings`; those that are all defaults are left out, so
        that equivalent configurations are equal."""
        made = {}
        for name, value in dict(values).items():
            if name in cls.model_fields:
                made[name] = value
                continue
            if name in REMOVED:
                continue
            kind = every_method().get(name)
            if kind is None:
                raise unknown(name, cls, every_method())
            if not isinstance(value, kind | Mapping):
                fields = ", ".join(kind.model_fields)
                raise bad(name, value, f"settings of {name}: {fields}")
            settings = kind.model_validate(value)
            if settings != kind():
                made[name] = settings
        return made

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        """Raises `PfedafmError` for settings that are fine alone and impossible together."""
        if self.num_participants < 1:
            least = f"at least {1 / self.num_clients:g}"
            accepted = f"{least}: one of {self.num_clients} clients per round"
            raise bad("participation", self.participation, accepted)
        least_samples = 6 * self.synthetic_classes
        if self.dataset == "synthetic" and self.synthetic_samples < least_samples:
            accepted = f"at least {least_samples} for {self.synthetic_classes} classes"
            raise bad("synthetic_samples", self.synthetic_samples, accepted)
        return self

    @classmethod
    def load(cls, name: str | Path) -> "Config":
        """The named configuration (`hetero_cifar10`), or the TOML file (`mine.toml`).

        >>> Config.load("hetero_cifar100").classes_per_client
        10
        """
        return Config(**read_settings(name))

    def of(self, kind: type[OneMethods]) -> OneMethods:
        """The settings of one method: `config.of(FML.Settings).alpha`."""
        given = self.__pydantic_extra__.get(kind.method)
        return kind() if given is None else cast(OneMethods, given)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # `config.fml`: the settings of a registered method.
            if name.startswith("_"):
                return super().__getattr__(name)
            kind = every_method().get(name)
            if kind is None:
                near = suggestion(name, type(self).model_fields)
                raise AttributeError(f"Config has no setting {name!r}{near}")
            return self.of(kind)

    else:

        def __getattr__(self, name: str) -> Any: ...

    def __replace__(self, /, **changes: Any) -> "Config":
        return updated(self, changes)

    def __hash__(self) -> int:
        settings = sorted(dict(self).items(), key=lambda item: item[0])
        return hash(tuple(settings))

    @property
    def num_participants(self) -> int:
        """How many clients are drawn each round: K = C · N."""
        return round(self.participation * self.num_clients)

    @property
    def rate(self) -> float:
        """The learning rate of this run's method: its own, or the common one."""
        own = getattr(self, self.method).learning_rate
        return self.learning_rate if own is None else own

    def as_dict(self) -> dict[str, Any]:
        """The settings as JSON values, those of the run's method under its name."""
        names = list(type(self).model_fields)
        values = {name: getattr(self, name) for name in names}
        if self.method in every_method():
            values[self.method] = dict(getattr(self, self.method))
        return values

    def toml(self, comment: str = "") -> str:
        """The settings that differ from the defaults, as a file that `load` reads.

        Args:
            comment: what the first lines say, without `#`.
        """
        lines = [f"# {line}".rstrip() for line in comment.splitlines()]
        lines += ["", *toml_lines(self)]
        for method, settings in sorted(self.__pydantic_extra__.items()):
            lines += ["", f"[{method}]", *toml_lines(settings)]
        return "\n".join(lines) + "\n"


def toml_lines(settings: Checked) -> list[str]:
    """A line of TOML for each field that has not its default."""
    lines = []
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if value != field.default and value is not None:
            text = json.dumps(value, ensure_ascii=False)  # a value of TOML is one of JSON
            text = text.encode(errors="backslashreplace").decode()
            lines.append(f"{name} = {text}")
    return lines


def updated(config: Config, values: Mapping[str, Any] | None = None, /, **more: Any) -> Config:
    """A copy of `config` with some settings changed, and checked.

    Args:
        config: the settings; they stay as they are.
        values: names and new values, as in a file: a method's own as a table, `{"fml": {"alpha":
            0.3}}`, or by their full name, `{"fml.alpha": 0.3}`.
        more: the same as keywords.

    A new `learning_rate` is that of every method, except those with one of their own in `values`.

    >>> updated(Config(), rounds=5, pfedafm={"mix_fixed": 0.5}).pfedafm.mix_fixed
    0.5
    """
    return Config(**merged(dict(config), {**(values or {}), **more}))


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two layers of settings as one, where `above` has the last word; nothing is checked.

    Args:
        below, above: settings as a file has them; methods' own as tables or as `fml.alpha`.

    A `learning_rate` above is that of every method, except those with one of their own above.
    """
    result = {name: dict(value) if is_table(value) else value for name, value in below.items()}
    if "learning_rate" in above:
        for value in result.values():
            if isinstance(value, dict):
                value.pop("learning_rate", None)
    for name, value in above.items():
        method, dot, setting = name.partition(".")
        table = {setting: value} if dot else value
        if is_table(table):
            existing = result.get(method, {})
            result[method] = {**existing, **dict(table)} if is_table(existing) else table
        else:
            result[name] = value
    return result


def is_table(value: object) -> bool:
    """Whether a value is a method's own settings."""
    return isinstance(value, Mapping | MethodSettings)


def read_settings(name: str | Path) -> dict[str, Any]:
    """The settings of a named configuration or of a TOML file, unchecked."""
    names = config_names()
    if str(name) in names:
        return read_toml(CONFIGS / f"{name}.toml")
    if str(name).endswith(".toml"):
        return read_toml(Path(name))
    raise bad("config", str(name), f"{known(name, names)}, or a TOML file")


def read_toml(path: Path) -> dict[str, Any]:
    """What stands in a TOML file, unchecked."""
    try:
        return tomllib.loads(read_bytes(path).decode())
    except (OSError, ValueError, RecursionError) as error:  # of the name or of the content
        raise PfedafmError(f"cannot read the configuration {path}: {error}") from error


def config_names() -> list[str]:
    """The named configurations, files of `config/configs/`."""
    return sorted(path.stem for path in CONFIGS.glob("*.toml"))
