"""The federated methods, by name."""

import difflib

from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods.base import Cost, Method, Update
from pfedafm_jax.methods.fd import FD
from pfedafm_jax.methods.fedapen import FedAPEN
from pfedafm_jax.methods.fedkd import FedKD
from pfedafm_jax.methods.fedproto import FedProto
from pfedafm_jax.methods.fml import FML
from pfedafm_jax.methods.lg_fedavg import LGFedAvg
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.methods.standalone import Standalone

_METHODS: dict[str, type[Method]] = {
    method.name: method for method in (PFedAFM, Standalone, LGFedAvg, FD, FedProto, FML, FedKD, FedAPEN)
}


def register_method(method: type[Method]) -> type[Method]:
    """Makes a method usable by its name; works as a class decorator."""
    _METHODS[method.name] = method
    return method


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


__all__ = ["Cost", "Method", "PFedAFM", "Update", "find_method", "method_names", "register_method"]
