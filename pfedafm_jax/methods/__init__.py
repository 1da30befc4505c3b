"""The federated methods, by name."""

import difflib
from collections.abc import Sequence

from pfedafm_jax.config import Config, bad, known
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods.base import Cost, Method, Update
from pfedafm_jax.methods.fd import FD
from pfedafm_jax.methods.fedapen import FedAPEN
from pfedafm_jax.methods.fedkd import FedKD
from pfedafm_jax.methods.fedper import FedPer
from pfedafm_jax.methods.fedproto import FedProto
from pfedafm_jax.methods.fedrep import FedRep
from pfedafm_jax.methods.fml import FML
from pfedafm_jax.methods.lg_fedavg import LGFedAvg
from pfedafm_jax.methods.own import check_kind, own_settings, parts
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.methods.standalone import Standalone

_BUILT_IN = (PFedAFM, Standalone, LGFedAvg, FD, FedProto, FML, FedKD, FedAPEN, FedPer, FedRep)
_METHODS: dict[str, type[Method]] = {method.name: method for method in _BUILT_IN}
PAPER_METHODS = tuple(method.name for method in _BUILT_IN[:8])
"""The methods of the paper's tables, pFedAFM first."""


def register_method(method: type[Method]) -> type[Method]:
    """Makes a method usable by its name; works as a class decorator. See `docs/extending.md`.

    >>> @register_method
    ... class Lonely(Standalone):
    ...     name = "lonely"
    >>> find_method("lonely").title, "lonely" in method_names()
    ('lonely', True)
    """
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise PfedafmError(
            f"{method!r} cannot be registered; accepted: a class derived from pfedafm_jax.methods.Method"
        )
    name = method.name
    if not name.isidentifier() or name in (built_in.name for built_in in _BUILT_IN):
        raise bad(f"{method.__name__}.name", name, "letters, digits and underscores, not the name of a built-in method")
    missing = [part for part in _REQUIRED if getattr(method, part) is getattr(Method, part)]
    if missing:
        raise PfedafmError(f"method {name!r} lacks {', '.join(missing)}: a method defines {', '.join(_REQUIRED)}")
    if method.Settings is not None:
        check_kind(method.Settings, name)
    method.title = method.title if "title" in vars(method) else name
    _METHODS[name] = method
    return method


_REQUIRED = ("init_client", "client_update", "predict", "cost")


def method_names() -> list[str]:
    """The registered methods."""
    return list(_METHODS)


def find_method(name: str) -> type[Method]:
    """The method registered under `name`."""
    if name not in _METHODS:
        near = difflib.get_close_matches(name, _METHODS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise PfedafmError(f"method = {name!r} cannot be used; accepted: {', '.join(_METHODS)}{hint}")
    return _METHODS[name]


def chosen_methods(wanted: str | Sequence[str]) -> list[str]:
    """Names from a list, or a text like `all,fedper`, where `all` is the paper's eight."""
    listed = wanted.split(",") if isinstance(wanted, str) else wanted
    names = [found for name in listed for found in (PAPER_METHODS if name == "all" else (name,))]
    return [find_method(name).name for name in dict.fromkeys(names)]


def check_method(config: Config) -> None:
    """Raises where the method is not known, or `Config.set` says what no registered method understands."""
    find_method(config.method)
    for name in config.rates:
        if name not in _METHODS:
            raise bad("learning_rates", name, known(name, method_names()))
    own = {name: method.Settings for name, method in _METHODS.items() if method.Settings is not None}
    for text in config.set:
        name = parts(text)[0]
        if name not in own:
            accepted = known(name, list(own)) if own else "nothing, as no method with settings of its own is registered"
            raise bad("set", text, f"settings of {accepted}" if own else accepted)
    for name, kind in own.items():
        own_settings(kind, name, config.set)


__all__ = [
    "PAPER_METHODS",
    "Cost",
    "Method",
    "PFedAFM",
    "Update",
    "check_method",
    "chosen_methods",
    "find_method",
    "method_names",
    "register_method",
]
