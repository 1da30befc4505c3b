"""Settings as typed fields of frozen dataclasses, with default, range and meaning.

    rounds: Count = 40
    \"\"\"Communication rounds, the paper's T.\"\"\"

The type says what is accepted (ranges are `annotated_types`); the text below it is the help on the
command line. This module reads, checks and changes `Config` and every method's `Settings`.
"""

import ast
import dataclasses
import inspect
import itertools
import math
import textwrap
import typing
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from operator import ge, gt, le, lt
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from annotated_types import Ge, Gt, Le, Lt

from pfedafm_jax.base.errors import PfedafmError, bad, known, suggestion
from pfedafm_jax.base.trees import register

# Upper limits keep numbers within what 32-bit floats and the machine can hold.
Rate = Annotated[float, Ge(0), Le(1e6)]
Positive = Annotated[float, Ge(1e-30), Le(1e30)]
Share = Annotated[float, Ge(0), Le(1)]
Count = Annotated[int, Ge(1), Le(10_000_000)]
Epochs = Annotated[int, Ge(1), Le(1_000_000)]

Kind = TypeVar("Kind")
_KINDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text",
    tuple: "a list of names",
}  # fmt: skip
_LIMITS = {Ge: (" from ", ge), Gt: (" above ", gt), Le: (" to ", le), Lt: (", below ", lt)}


@cache
def numbers(kind: type) -> list[str]:
    """Names of a class's float fields, which are data of compiled programs."""
    # From the types alone, without `settings_of`: this is called while programs are traced.
    return [name for name, hint in get_type_hints(kind).items() if float in (hint, *get_args(hint))]


@dataclass(frozen=True)
class MethodSettings:
    """Base of every method's `Settings`, a pytree: floats are leaves, the rest is static."""

    method: ClassVar[str] = ""  # the method's name; set when the method is defined

    learning_rate: Rate | None = dataclasses.field(default=None, kw_only=True)
    """Learning rate of the networks for this method; none: the run's."""

    @property
    def length_matters(self) -> bool:
        """Whether a round's result depends on the total number of rounds (FedKD's does)."""
        return False

    def __init_subclass__(cls):
        register(cls, numbers)


def plain(value: Any) -> Any:
    """A value as settings have it: lists become tuples, and numpy's numbers Python's."""
    if isinstance(value, list):
        return tuple(value)
    return value.item() if isinstance(value, np.generic) else value


@dataclass(frozen=True)
class Setting:
    """One setting, from its declaration."""

    name: str
    kind: type  # bool, int, float, str, or tuple of names
    optional: bool  # whether None is accepted
    choices: tuple[str, ...]  # of a Literal
    limits: tuple[tuple[str, Callable[[Any, Any], bool], float], ...]  # word, comparison, end
    default: Any
    help: str

    @property
    def accepted(self) -> str:
        """What is accepted, in words: `a whole number from 1 to 10,000,000`."""
        if self.choices:
            return ", ".join(self.choices)
        words = _KINDS[self.kind]
        for word, _, end in self.limits:
            words += word + (f"{end:,}" if isinstance(end, int) else f"{end:g}")
        return words + (" or none" if self.optional else "")

    def check(self, value: Any, prefix: str = "") -> None:
        """Raises if a value has the wrong type, is out of range or not one of the choices."""
        if not (value is None and self.optional) and not self._fits(value):
            near = suggestion(value, self.choices) if isinstance(value, str) else ""
            raise bad(prefix + self.name, value, self.accepted + near)

    def _fits(self, value: Any) -> bool:
        if self.kind is tuple:
            return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or (isinstance(value, bool) and self.kind is not bool):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        within = all(holds(value, end) for _, holds, end in self.limits)
        return within and (not self.choices or value in self.choices)

    def read(self, text: str, prefix: str = "") -> Any:
        """A value from the command line; names have commas between them."""
        if self.optional and text.lower() == "none":
            return None
        words: dict[type, Callable[[str], Any]] = {
            bool: lambda text: {"true": True, "false": False}[text.lower()],
            tuple: lambda text: tuple(text.split(",")),
        }
        try:
            return words.get(self.kind, self.kind)(text)
        except (ValueError, KeyError):
            raise bad(prefix + self.name, text, self.accepted) from None


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a class by name, in the order of its fields; raises `TypeError` for a type
    that a setting cannot have."""
    hints, texts, found = get_type_hints(kind, include_extras=True), _texts(kind), {}
    for field in dataclasses.fields(kind):
        name, hint, limits = field.name, hints[field.name], ()
        if get_origin(hint) is tuple and get_args(hint) != (str, ...):
            continue  # `Config.settings`, which is made of settings
        either = get_args(hint) if get_origin(hint) in (typing.Union, UnionType) else (hint,)
        base, *others = [one for one in either if one is not NoneType]
        if get_origin(base) is Annotated:
            base, *ends = get_args(base)
            limits = tuple((*_LIMITS[type(end)], astuple(end)[0]) for end in ends)
        choices = get_args(base) if get_origin(base) is Literal else ()
        base = str if choices else get_origin(base) or base
        if others or base not in _KINDS or field.default is dataclasses.MISSING:
            raise TypeError(f"{name}: {hint}")
        more = choices, limits, field.default, texts.get(name, "")
        found[name] = Setting(name, base, NoneType in either, *more)
    return found


def _texts(kind: type) -> dict[str, str]:
    """The text below each field, of the class and its bases."""
    found: dict[str, str] = {}
    for owner in reversed(kind.__mro__[:-1]):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):  # defined in a session: no source to read
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, after in itertools.pairwise(body):
            match field, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def check_settings(settings: Any, prefix: str = "") -> None:
    """Raises `PfedafmError` for the first setting with a wrong type or out of range."""
    for name, setting in settings_of(type(settings)).items():
        setting.check(getattr(settings, name), prefix)


def changed(settings: Kind, values: Mapping[str, Any], prefix: str = "") -> Kind:
    """`settings` with some changed. Checks names only."""
    names = list(settings_of(type(settings)))
    for name in values:
        if name not in names:
            raise PfedafmError(f"unknown setting {prefix + str(name)}; known: {known(name, names)}")
    new = {name: plain(value) for name, value in values.items()}
    try:
        return dataclasses.replace(settings, **new)  # type: ignore[type-var]
    except (ValueError, TypeError) as error:  # a `__post_init__` that checks for itself
        raise bad(prefix.rstrip(".") or "settings", dict(values), str(error)) from error
