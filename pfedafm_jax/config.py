"""Every setting of a run, typed, with its default, its meaning and its check.

The defaults are the heterogeneous CIFAR-10 run of the paper (N = 100, C = 10 %, 2 of 10 classes a client) at the length
that two CPU cores finish in about ten minutes. `Config` is frozen: derive another with `dataclasses.replace`.
"""

import dataclasses
import difflib
import math
import tomllib
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.method_settings import FD, FML, FedAPEN, FedKD, FedProto, FedRep, LGFedAvg, PFedAFM
from pfedafm_jax.models import extractor_names
from pfedafm_jax.presets import PRESETS

if TYPE_CHECKING:
    from pfedafm_jax.data import Dataset

DATASETS = ("cifar10", "cifar100", "synthetic")
OWN_DATA = ("folder:", "npz:", "tfds:")  # data of one's own: what it is, then where it is
PAPER_COLUMNS = {10: 1.0, 50: 0.2, 100: 0.1}  # N: C, the three columns of the paper's tables


@dataclass(frozen=True)
class Config:
    """Everything that decides a run.

    >>> Config(dataset="synthetic", num_clients=20, participation=0.2).num_participants
    4
    >>> Config(participation=0.001).check()
    Traceback (most recent call last):
    pfedafm_jax.errors.PfedafmError: participation = 0.001 cannot be used; accepted: at least 0.01: one of 100 clients a round
    """

    method: str = "pfedafm"
    """The federated method: pfedafm, standalone, lg_fedavg, fd, fedproto, fml, fedkd, fedapen, or one that gives every client the shared extractor, whatever `architectures` says: fedper, fedrep."""

    # Data
    dataset: str = "cifar10"
    """cifar10, cifar100, synthetic (generated, for trying things out), or your own: folder:PATH (images in one folder a class), npz:PATH, tfds:NAME."""
    image_size: int = 0
    """folder: and tfds: resize images to this height and width; 0: all have one size."""
    synthetic_classes: int = 10
    """Number of classes of the synthetic dataset."""
    synthetic_samples: int = 6000
    """Number of images of the synthetic dataset."""
    partition: Literal["pathological", "dirichlet"] = "pathological"
    """How classes fall to clients: a few classes each, or Dirichlet(gamma) shares of all classes."""
    classes_per_client: int = 2
    """Pathological: classes that a client sees."""
    gamma: float = 0.5
    """Dirichlet: smaller is more uneven."""
    min_samples: int = 10
    """Dirichlet: the least number of images a client gets."""
    protocol: Literal["paper", "authors"] = "paper"
    """paper: all images dealt, each client's data 8:2 into train and test. authors: 4/5 of the official training images and the official test images, dealt by the same shares."""
    validation_fraction: float = 0.0
    """Part of each client's training data held out for choosing settings."""
    normalisation: Literal["dataset", "imagenet"] = "dataset"
    """Channel means and deviations: the dataset's own, or ImageNet's (released code, CIFAR-10)."""
    flip: bool = False
    """Augmentation: random horizontal flips."""
    erase: bool = False
    """Augmentation: random erasing."""
    crop: bool = False
    """Augmentation: random crops after padding by 4."""

    # Clients and models
    num_clients: int = 100
    """Number of clients, the paper's N."""
    participation: float = 0.1
    """Share of clients drawn each round, the paper's C."""
    architectures: tuple[str, ...] = ("cnn1", "cnn2", "cnn3", "cnn4", "cnn5")
    """Client k gets architecture number k mod their count."""
    shared_extractor: str = "cnn5"
    """Architecture of what clients share (the paper's G)."""
    feature_size: int = 500
    """Width of a representation."""
    initialisation: Literal["torch", "flax"] = "torch"
    """Weight initialisation: PyTorch's default or Flax's."""
    same_start: bool = True
    """Clients of one architecture start from the same weights."""

    # Training
    rounds: int = 40
    """Communication rounds, the paper's T."""
    local_epochs: int = 4
    """Epochs over a client's data per round (per phase), the paper's E."""
    batch_size: int = 64
    """Images in a step; the last, partial batch of an epoch is kept."""
    learning_rate: float = 0.02
    """Learning rate of the networks (η_ω = η_θ); the paper's is 0.01, for longer runs."""
    learning_rates: tuple[str, ...] = ()
    """METHOD=RATE, one or more: what comparisons and commands use for these methods instead, see `for_method`."""
    momentum: float = 0.9
    """SGD momentum, fresh at each visit of a client."""
    weight_decay: float = 1e-3
    """SGD weight decay."""
    clip_norm: float = 50.0
    """Gradients of each network are clipped to this global norm."""
    aggregation: Literal["samples", "uniform", "last"] = "samples"
    """Weights of the average: n_k (the paper), all equal, or the last participant alone (released code)."""
    seed: int = 0
    """Decides split, start, draws and batches."""
    eval_every: int = 10
    """Evaluate all clients every so many rounds, and after the last."""

    # Methods
    pfedafm: PFedAFM = field(default_factory=PFedAFM)
    lg_fedavg: LGFedAvg = field(default_factory=LGFedAvg)
    fd: FD = field(default_factory=FD)
    fedproto: FedProto = field(default_factory=FedProto)
    fml: FML = field(default_factory=FML)
    fedkd: FedKD = field(default_factory=FedKD)
    fedapen: FedAPEN = field(default_factory=FedAPEN)
    fedrep: FedRep = field(default_factory=FedRep)
    set: tuple[str, ...] = ()
    """Settings of methods of your own: METHOD.SETTING=VALUE, one or more."""

    # Machine
    devices: int = 0
    """Devices to use; 0: every GPU, or one device per CPU core."""
    clients_per_step: int = 0
    """Clients of one architecture trained in one vectorized step; 0: 1 on CPU, all that fall to a device on GPU."""
    store: Literal["auto", "memory", "disk"] = "auto"
    """Where clients' states wait between visits."""
    checkpoint_every: int = 5
    """Rounds from one checkpoint to the next (there is one after the last round as well); 0: no checkpoints."""

    @property
    def num_participants(self) -> int:
        """K = C · N."""
        return round(self.participation * self.num_clients)

    def check(self, dataset: "Dataset | None" = None) -> "Config":
        """Raises `PfedafmError` on the first setting that cannot work; returns itself.

        The dataset may have any name, as data given by hand has; with the data at hand its classes and channels count.
        """
        check_types(self)
        for name, (test, accepted) in _RANGES.items():
            value = attrgetter(name)(self)
            if value is not None and not ((isinstance(value, int) or math.isfinite(value)) and test(value)):
                raise bad(name, value, accepted)
        self._check_data(dataset)
        if self.num_participants < 1:
            raise bad(
                "participation",
                self.participation,
                f"at least {1 / self.num_clients:g}: one of {self.num_clients} clients a round",
            )
        if not self.architectures:
            raise bad("architectures", self.architectures, "at least one of " + ", ".join(extractor_names()))
        for name in (*self.architectures, self.shared_extractor):
            if name not in extractor_names():
                setting = "shared_extractor" if name == self.shared_extractor else "architectures"
                raise bad(setting, name, known(name, extractor_names()))
        _ = self.rates  # raises on one that cannot be read
        layers = self.lg_fedavg.shared_layers
        if not layers or len(set(layers)) < len(layers):
            raise bad("lg_fedavg.shared_layers", layers, "one or more names, each once")
        return self

    @property
    def rates(self) -> dict[str, float]:
        """`learning_rates` by method."""
        rates = {}
        for word in self.learning_rates:
            method, _, rate = word.partition("=")
            try:
                rates[method] = float(rate)
            except ValueError:
                rates[method] = math.nan
            test, accepted = _RANGES["learning_rate"]
            if not (math.isfinite(rates[method]) and test(rates[method])):
                raise bad("learning_rates", word, f"METHOD=RATE such as fml=0.005, the rate {accepted}")
        return rates

    def for_method(self, method: str | None = None) -> "Config":
        """These settings for one method (default: theirs), with the learning rate that `learning_rates` has for it.

        >>> Config(learning_rates=("fml=0.005",)).for_method("fml").learning_rate
        0.005
        """
        method = method or self.method
        rate = self.rates.get(method, self.learning_rate)
        return dataclasses.replace(self, method=method, learning_rate=rate, learning_rates=())

    def _check_data(self, dataset: "Dataset | None") -> None:
        if self.image_size and not self.dataset.startswith(("folder:", "tfds:")):
            raise bad("image_size", self.image_size, f"0 (as they are) for {self.dataset}, where all have one size")
        if self.dataset == "synthetic" and self.synthetic_samples < 6 * self.synthetic_classes:
            raise bad(
                "synthetic_samples",
                self.synthetic_samples,
                f"at least {6 * self.synthetic_classes} for {self.synthetic_classes} classes",
            )
        classes = self._num_classes if dataset is None else dataset.num_classes
        if classes == 1:
            raise bad("dataset", self.dataset, "data of two or more classes; this has one only")
        if classes is not None and self.partition == "pathological" and self.classes_per_client > classes:
            raise bad("classes_per_client", self.classes_per_client, f"1 to {classes}, the classes of {self.dataset}")
        if dataset is not None and self.normalisation == "imagenet" and dataset.image_shape[-1] != 3:
            raise bad(
                "normalisation",
                "imagenet",
                f"dataset, for images that have {dataset.image_shape[-1]} and not 3 channels",
            )

    @property
    def _num_classes(self) -> int | None:
        """Classes of the dataset, where its name tells."""
        return {"cifar10": 10, "cifar100": 100, "synthetic": self.synthetic_classes}.get(self.dataset)

    def check_split(self) -> "Config":
        """Raises `PfedafmError` where the dataset is not known or too small for the split, before it is loaded; returns
        itself.

        What is not known yet (how many images of a class the authors' protocol keeps) is left to the split itself.
        """
        images, classes = self.synthetic_samples if self.dataset == "synthetic" else 60_000, self._num_classes
        if classes is None:
            if not self.dataset.startswith(OWN_DATA) or self.dataset in OWN_DATA:
                accepted = known(self.dataset, DATASETS)
                raise bad("dataset", self.dataset, f"{accepted}, or your own: folder:PATH, npz:PATH, tfds:NAME")
            return self
        held_out = 1 if self.validation_fraction > 0 else 0
        if self.protocol == "paper":
            pools, largest, least = [images], [images], [2 + held_out]
        else:
            train, test = images - images // 6, images // 6
            pools, largest, least = [round(train * 4 / 5), test], [train, test], [1 + held_out, 1]
        for pool, bound, low in zip(pools, largest, least, strict=True):
            if self.partition == "dirichlet":
                most = pool // max(low, -(-self.min_samples * pool // sum(pools)))
            else:
                owners = -(-bound // classes) // -(-low // self.classes_per_client)  # of one class, at most
                most = owners * classes // self.classes_per_client
            if self.num_clients > most:
                raise bad("num_clients", self.num_clients, f"at most {most} for this dataset and split")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Plain nested dictionary, for JSON."""
        return dataclasses.asdict(self)


# Upper ends keep numbers within what 32-bit floats and the machine can hold.
_RATE = (lambda v: 0 <= v <= 1e6, "0 or more, up to 1e6")
_POSITIVE = (lambda v: 1e-30 <= v <= 1e30, "a number above 0, up to 1e30")
_SHARE = (lambda v: 0 <= v <= 1, "0 to 1")
_COUNT = (lambda v: 1 <= v <= 10_000_000, "1 to 10,000,000")

_RANGES = {
    "synthetic_classes": (lambda v: 2 <= v <= 1000, "2 to 1000"),
    "synthetic_samples": (lambda v: 1 <= v <= 10_000_000, "up to 10,000,000"),
    "image_size": (lambda v: 0 <= v <= 4096, "0 (as they are) to 4096"),
    "classes_per_client": (lambda v: 1 <= v <= 1000, "1 or more, up to 1000"),
    "gamma": (lambda v: 1e-3 <= v <= 1e6, "a number above 0: 0.001 to 1e6"),
    "min_samples": (lambda v: 2 <= v <= 10_000_000, "2 or more (one to train on, one to test on), up to 10,000,000"),
    "validation_fraction": (lambda v: 0 <= v < 1, "0 up to, but not including, 1"),
    "num_clients": _COUNT,
    "participation": (lambda v: 0 < v <= 1, "above 0, up to 1"),
    "feature_size": (lambda v: 1 <= v <= 65_536, "1 to 65,536"),
    "rounds": _COUNT,
    "local_epochs": (lambda v: 1 <= v <= 1_000_000, "1 to 1,000,000"),
    "batch_size": (lambda v: 1 <= v <= 1_000_000, "1 to 1,000,000"),
    "learning_rate": _RATE,
    "momentum": (lambda v: 0 <= v < 1, "0 up to, but not including, 1"),
    "weight_decay": _RATE,
    "clip_norm": _POSITIVE,
    "seed": (lambda v: 0 <= v < 2**32, "0 to 4294967295"),
    "eval_every": _COUNT,
    "devices": (lambda v: 0 <= v <= 4096, "0 (automatic) to 4096"),
    "clients_per_step": (lambda v: 0 <= v <= 65_536, "0 (automatic) to 65,536"),
    "checkpoint_every": (lambda v: 0 <= v <= 10_000_000, "0 (never) to 10,000,000"),
    "pfedafm.mix_learning_rate": _RATE,
    "pfedafm.mix_weight_decay": _RATE,
    "pfedafm.mix_fixed": (lambda v: 0 <= v <= 1, "a number from 0 to 1, or none"),
    "fd.gamma": _RATE,
    "fd.temperature": _POSITIVE,
    "fedproto.lambda_mse": _RATE,
    "fml.alpha": _SHARE,
    "fml.beta": _SHARE,
    "fedkd.t_start": (lambda v: 0 < v <= 1, "above 0, up to 1"),
    "fedkd.t_end": (lambda v: 0 < v <= 1, "above 0, up to 1"),
    "fedkd.denominator_floor": _RATE,
    "fedkd.mentee_learning_rate": (lambda v: 0 <= v <= 1e6, "0 or more, up to 1e6, or none"),
    "fedapen.lambda_start": _SHARE,
    "fedapen.lambda_learning_rate": _RATE,
    "fedapen.lambda_epochs": (lambda v: 0 <= v <= 1_000_000, "0 or more, up to 1,000,000"),
    "fedapen.adaptability_fraction": (lambda v: 0 < v < 1, "above 0, below 1"),
    "fedrep.head_epochs": (lambda v: 1 <= v <= 1_000_000, "1 to 1,000,000"),
}


def bad(setting: str, value: Any, accepted: str) -> PfedafmError:
    """The error for a setting: which one, what it was, what is accepted."""
    return PfedafmError(f"{setting} = {value!r} cannot be used; accepted: {accepted}")


def known(name: str, names: Any) -> str:
    """`a, b, c (did you mean b?)`"""
    near = difflib.get_close_matches(str(name), names, n=1)
    return ", ".join(names) + (f" (did you mean {near[0]}?)" if near else "")


def check_types(settings: Any, prefix: str = "") -> None:
    """Raises where a setting is not of the type it is declared with."""
    for name, kind in get_type_hints(type(settings)).items():
        value, setting = getattr(settings, name), prefix + name
        if dataclasses.is_dataclass(kind):
            if not isinstance(value, kind):  # type: ignore[arg-type]
                raise bad(setting, value, f"{getattr(kind, '__name__', kind)}(...)")
            check_types(value, setting + ".")
        elif get_origin(kind) is Literal:
            if not isinstance(value, str) or value not in get_args(kind):
                raise bad(setting, value, known(value, get_args(kind)))
        elif get_origin(kind) is tuple:
            if not (isinstance(value, tuple) and all(isinstance(item, str) for item in value)):
                raise bad(setting, value, "a tuple of names")
        else:
            accepted = tuple(t for t in (get_args(kind) or (kind,)))
            numeric = (*accepted, int) if float in accepted else accepted
            if not isinstance(value, numeric) or (isinstance(value, bool) and bool not in accepted):
                raise bad(setting, value, " or ".join("none" if t is type(None) else t.__name__ for t in accepted))


# ---------------------------------------------------------------------------------------------- named settings


def updated(config: Config, values: dict[str, Any]) -> Config:
    """`config` with some settings changed; nested dictionaries change nested settings.

    A learning rate that is set is that of every method.

    >>> updated(Config(), {"rounds": 5, "pfedafm": {"mix_fixed": 0.5}}).pfedafm.mix_fixed
    0.5
    """
    if "learning_rate" in values:
        values = {"learning_rates": (), **values}
    return _updated(config, values, "")


def _updated(settings: Any, values: dict[str, Any], prefix: str) -> Any:
    names = [f.name for f in dataclasses.fields(settings)]
    changes = {}
    for name, value in values.items():
        if name not in names:
            raise PfedafmError(f"unknown setting {prefix + name}; known: {known(name, names)}")
        current = getattr(settings, name)
        if dataclasses.is_dataclass(current) and isinstance(value, dict):
            value = _updated(current, value, f"{prefix}{name}.")
        changes[name] = tuple(value) if isinstance(value, list) else value
    return dataclasses.replace(settings, **changes)


def with_preset(config: Config, preset: str) -> Config:
    """`config` with a named set of settings laid over it.

    >>> with_preset(Config(), "authors_code").aggregation
    'last'
    """
    if preset not in PRESETS:
        raise bad("preset", preset, known(preset, PRESETS))
    changed = updated(config, PRESETS[preset])
    if preset == "authors_code":
        homogeneous = len(config.architectures) == 1
        changed = dataclasses.replace(
            changed,
            normalisation="imagenet" if config.dataset == "cifar10" else "dataset",
            shared_extractor="cnn1" if homogeneous else "cnn5",
            pfedafm=dataclasses.replace(changed.pfedafm, mix_learning_rate=0.1 if homogeneous else 0.01),
        )
    return changed


def paper_scale(config: Config, num_clients: int = 100) -> Config:
    """The paper's own length, T = 500 and E = 10 at a learning rate of 0.01, at one of its three columns of N and C."""
    if num_clients not in PAPER_COLUMNS:
        raise bad("paper", num_clients, "10, 50 or 100 clients (with C = 100 %, 20 %, 10 %)")
    return dataclasses.replace(
        config,
        rounds=500,
        local_epochs=10,
        learning_rate=0.01,
        learning_rates=(),
        num_clients=num_clients,
        participation=PAPER_COLUMNS[num_clients],
    )


def load_config(path: str | Path) -> Config:
    """Reads a TOML file of settings over the defaults.

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile("w", suffix=".toml") as file:
    ...     print("rounds = 5", file=file, flush=True)
    ...     load_config(file.name).rounds
    5
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a name or a content that no such file can have
        raise PfedafmError(f"cannot read the configuration {path}: {error}") from error
    return updated(Config(), values)
