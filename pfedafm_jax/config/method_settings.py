"""What a method's `Settings` are made of, and the settings of every registered method."""

import importlib
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le

from pfedafm_jax.base.checked import Checked

# Upper limits keep numbers within what 32-bit floats and the machine can hold.
Rate = Annotated[float, Ge(0), Le(1e6)]
Positive = Annotated[float, Ge(1e-30), Le(1e30)]
Share = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(1), Le(10_000_000)]
Epochs = Annotated[int, Ge(1), Le(1_000_000)]

BUILT_IN = "pfedafm_jax.methods"
"""Where the methods that come with the library are. The module is imported when a method's settings
are first asked for, and registers them; it needs JAX, which nobody waits for who reads the help."""


class MethodSettings(Checked):
    """Base of every method's `Settings`; the text below a field is its help on the command line.

    class Settings(MethodSettings):
        alpha: Share = 0.5
        \"\"\"Weight of the private model's cross-entropy.\"\"\"
    """

    method: ClassVar[str] = ""
    """The method's name, set when the method is defined."""

    learning_rate: Rate | None = None
    """Learning rate of the networks for this method; none: the run's."""

    @property
    def length_matters(self) -> bool:
        """Whether a round's result depends on the total number of rounds (FedKD's does)."""
        return False

    @classmethod
    def prefix(cls) -> str:
        return f"{cls.method}." if cls.method else ""


_registered: dict[str, type[MethodSettings]] = {}


def register_settings(method: str, kind: type[MethodSettings]) -> None:
    """Makes a method's settings known to `Config`, files and flags; `register_method` calls it."""
    _registered[method] = kind


def every_method() -> dict[str, type[MethodSettings]]:
    """The `Settings` of every registered method, by its name, built-in methods first."""
    importlib.import_module(BUILT_IN)
    return _registered


@cache
def float_fields(kind: type[MethodSettings]) -> tuple[str, ...]:
    """Names of a class's float fields, which are data of compiled programs; the rest is static."""
    return tuple(
        name for name, field in kind.model_fields.items() if float in types_of(field.annotation)
    )


def problem_of_fields(kind: type[MethodSettings]) -> str:
    """Why a class's fields cannot be settings (flags, files and programs need them to); or nothing."""
    if "__dataclass_params__" in vars(kind):
        return "without @dataclass, whose __init__ checks nothing"
    usual = "whose fields are bool, int, float, str, Literal or tuple[str, ...], with defaults"
    for name, field in kind.model_fields.items():
        types = types_of(field.annotation) - {NoneType}
        if field.is_required() or len(types) != 1 or not types <= SETTING_TYPES:
            return f"{usual} ({name}: {kind.__annotations__.get(name, field.annotation)})"
    return ""


SETTING_TYPES = {bool, int, float, str, tuple}


def types_of(annotation: Any) -> set[Any]:
    """The types that an annotation allows, without their ranges: `{float, NoneType}`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return set().union(*map(types_of, arguments))
    if origin is Annotated:
        return types_of(arguments[0])
    if origin is Literal:
        return {type(choice) for choice in arguments}
    if origin is tuple:
        return {tuple} if arguments == (str, ...) else {annotation}
    return {annotation}
