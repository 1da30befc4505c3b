"""Settings of a method that is not built in: a frozen dataclass `Settings` on its class, filled from `Config.set`.

`Config.set` is a tuple of texts `METHOD.SETTING=VALUE`, so that a configuration with them can still be hashed, written to
JSON and compared with a stored one like any other.
"""

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pfedafm_jax.config import bad, check_types, known

FORM = "METHOD.SETTING=VALUE, as in fedprox.strength=0.1"


def own_settings(kind: type, method: str, texts: tuple[str, ...]) -> Any:
    """A `kind` with what these texts say about this method; the last word on a setting counts."""
    hints, values = get_type_hints(kind), {}
    for text in texts:
        owner, name, value = parts(text)
        if owner != method:
            continue
        if name not in hints:
            raise bad("set", text, f"settings of {method}: {known(name, list(hints))}")
        values[name] = _read(text, value, hints[name])
    try:
        settings = kind(**values)
    except ValueError as error:  # a `__post_init__` that checks ranges
        raise bad("set", texts, str(error)) from error
    check_types(settings, f"{method}.")
    return settings


def parts(text: str) -> tuple[str, str, str]:
    """`fedprox.strength=0.1` → method, setting, value."""
    name, equals, value = text.partition("=")
    method, dot, setting = name.strip().partition(".")
    if not (equals and dot and method and setting):
        raise bad("set", text, FORM)
    return method, setting.replace("-", "_"), value.strip()


def _read(text: str, value: str, kind: Any) -> Any:
    """A value as its setting's type has it."""
    if type(None) in get_args(kind) and value.lower() == "none":
        return None
    accepted = [str] if get_origin(kind) is Literal else [t for t in get_args(kind) or (kind,) if t is not type(None)]
    for kind in accepted:
        try:
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        except (ValueError, KeyError):
            continue
    raise bad("set", text, " or ".join("true or false" if kind is bool else kind.__name__ for kind in accepted))


def check_kind(kind: Any, method: str) -> None:
    """Raises where a `Settings` cannot be one: frozen, a default for everything, plain values."""
    plain = (bool, int, float, str, type(None))
    good = isinstance(kind, type) and dataclasses.is_dataclass(kind) and getattr(kind, "__hash__", None) is not None
    if good:
        hints = get_type_hints(kind)
        inner = [
            kinds for hint in hints.values() if get_origin(hint) is not Literal for kinds in get_args(hint) or (hint,)
        ]
        good = all(kinds in plain for kinds in inner) and all(
            field.default is not dataclasses.MISSING for field in dataclasses.fields(kind)
        )
    if not good:
        raise bad(
            f"{method}.Settings", kind, "a frozen dataclass of bool, int, float, str or Literal, all with defaults"
        )
