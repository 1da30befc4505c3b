"""The federated methods, by name; one file each.

`base` is the contract: what one client and the server do. `aggregation` is what averages, `two_models`
what FML, FedKD and FedAPEN share; `checks` looks up the names in settings. A method never loops over
clients: the engine does. Imports `base` to `training`.
"""

from collections.abc import Sequence

from pfedafm_jax.base.errors import PfedafmError, bad, known
from pfedafm_jax.config.config import Config
from pfedafm_jax.config.method_settings import MethodSettings, problem_of_fields, register_settings
from pfedafm_jax.methods.base import Cost, Method, Update, Uploads
from pfedafm_jax.methods.ditto import Ditto
from pfedafm_jax.methods.fd import FD
from pfedafm_jax.methods.fedapen import FedAPEN
from pfedafm_jax.methods.fedavg import FedAvg
from pfedafm_jax.methods.fedavg_finetuned import FedAvgFinetuned
from pfedafm_jax.methods.fedavg_priors import FedAvgPriors
from pfedafm_jax.methods.fedgh import FedGH
from pfedafm_jax.methods.fedkd import FedKD
from pfedafm_jax.methods.fedper import FedPer
from pfedafm_jax.methods.fedproto import FedProto
from pfedafm_jax.methods.fedprox import FedProx
from pfedafm_jax.methods.fedrep import FedRep
from pfedafm_jax.methods.fedtgp import FedTGP
from pfedafm_jax.methods.fml import FML
from pfedafm_jax.methods.lg_fedavg import LGFedAvg
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.methods.pfedafm_released import PFedAFMReleased
from pfedafm_jax.methods.standalone import Standalone
from pfedafm_jax.models.architecture import Architecture, describe
from pfedafm_jax.training.batches import LocalTraining

_BUILT_IN = (
    *(PFedAFM, Standalone, LGFedAvg, FD, FedProto, FML, FedKD, FedAPEN),  # of the paper's tables
    *(FedPer, FedRep, FedAvg, FedProx),  # one network for all
    *(FedAvgPriors, FedAvgFinetuned, Ditto),
    *(FedGH, FedTGP),  # whose server sees single uploads
    PFedAFMReleased,
)
_METHODS: dict[str, type[Method]] = {method.name: method for method in _BUILT_IN}
for _method in _BUILT_IN:
    register_settings(_method.name, _method.Settings)
PAPER_METHODS = tuple(method.name for method in _BUILT_IN[:8])
"""The methods of the paper's tables, pFedAFM first."""
CONTROLS = ("fedavg", "fedavg_priors", "fedper", "fedrep")
"""Methods in which all clients have one network, or one extractor: what a new method is to beat."""


def register_method(method: type[Method]) -> type[Method]:
    """Class decorator that registers a method under its name. See `docs/extending.md`.

    >>> @register_method
    ... class Lonely(Standalone):
    ...     name = "lonely"
    >>> find_method("lonely").title, "lonely" in method_names()
    ('lonely', True)
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        accepted = "a class derived from pfedafm_jax.methods.Method"
        raise PfedafmError(f"{method!r} cannot be registered; accepted: {accepted}")
    name = method.name
    taken = [built_in.name for built_in in _BUILT_IN] + [*Config.model_fields]
    taken += ["paper", "controls", "all"]
    if not name.isidentifier() or name in taken:
        accepted = "an identifier, not the name of a built-in method, of a group of methods or of a setting"
        raise bad(f"{method.__name__}.name", name, accepted)
    required = ("init_client", "client_update", "predict", "cost")
    missing = [part for part in required if getattr(method, part) is getattr(Method, part)]
    if missing:
        lacks = f"method {name!r} lacks {', '.join(missing)}"
        raise PfedafmError(f"{lacks}: a method defines {', '.join(required)}")
    _check_settings(method.Settings, name)
    method.title = method.title if "title" in vars(method) else name
    _METHODS[name] = method
    register_settings(name, method.Settings)
    return method


def _check_settings(kind: object, name: str) -> None:
    """Raises if a method's `Settings` cannot be settings."""
    accepted = "a class derived from MethodSettings"
    if not (isinstance(kind, type) and issubclass(kind, MethodSettings)):
        raise bad(f"{name}.Settings", kind, accepted)
    if problem := problem_of_fields(kind):
        raise bad(f"{name}.Settings", kind, f"{accepted}, {problem}")


def method_names() -> list[str]:
    """The registered methods."""
    return list(_METHODS)


def find_method(name: str) -> type[Method]:
    """The method registered under `name`."""
    if name not in _METHODS:
        raise bad("method", name, known(name, _METHODS))
    return _METHODS[name]


def make_method(
    config: Config,
    image_shape: tuple[int, ...],
    num_classes: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    num_train: Sequence[int],
    dtype: str = "uint8",
) -> Method:
    """The method of a run.

    Args:
        image_shape, num_classes: those of the data.
        mean, std: of each channel, for normalisation.
        num_train: number of training images of each client.
        dtype: of the data; only images, uint8, are normalised in training.
    """

    def architecture(name: str) -> Architecture:
        settings = config.feature_size, config.initialisation
        return describe(name, num_classes, image_shape, *settings, dtype)

    kind, shared = find_method(config.method), architecture(config.shared_extractor)
    names = (shared.name,) if kind.one_network else config.architectures
    mean, std = (mean, std) if dtype == "uint8" else ((), ())
    training = LocalTraining.of(config, mean, std, num_train)
    method = kind.of(config, training, shared, [architecture(name) for name in names])
    _check_server_optimizer(config, method)
    return method


def _check_server_optimizer(config: Config, method: Method) -> None:
    """Raises if the settings ask for what the server of this method cannot do."""
    averages_weights = method.averaged_weights and not method.trains_on_the_server
    if method.server_optimizer.is_plain or (averages_weights and not method.in_turn):
        return
    able = f"since the server of {type(method).title} averages no weights of networks"
    if config.server_optimizer != "average":
        raise bad("server_optimizer", config.server_optimizer, f"average, {able}")
    raise bad("server_mean", config.server_mean, f"0, {able}")


def chosen_methods(wanted: str | Sequence[str]) -> list[str]:
    """Checked names of methods, without repetition.

    Args:
        wanted: names, as a list or a text like `paper,ditto`. Three stand for several: `paper` for
            the paper's eight, `controls` for `CONTROLS`, `all` for every registered method.

    >>> chosen_methods("controls,ditto,fedper")
    ['fedavg', 'fedavg_priors', 'fedper', 'fedrep', 'ditto']
    """
    groups = {"paper": PAPER_METHODS, "controls": CONTROLS, "all": method_names()}
    listed = wanted.split(",") if isinstance(wanted, str) else wanted
    names: list[str] = []
    for name in listed:
        names.extend(groups.get(name, (name,)))
    for name in names:
        if name not in _METHODS:
            raise bad("methods", name, known(name, [*groups, *_METHODS]))
    return list(dict.fromkeys(names))
