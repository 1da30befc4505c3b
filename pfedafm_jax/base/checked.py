"""What comes from outside (settings, files, messages) is a pydantic model derived from `Checked`.

Pydantic checks types and ranges; what it refuses is told in our sentence: which name, what it was,
what is accepted, did you mean.
"""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Self,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator

from pfedafm_jax.base.errors import PfedafmError, bad, known, suggestion

AnyDataclass = TypeVar("AnyDataclass")

ACCEPTED = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "finite": "a number",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dict": "a table of names and values",
    "model": "a table of names and values",
}
"""What is accepted, by the first word of pydantic's name of the error (`int_type`, `int_parsing`)."""

BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
    "too_short": ("min_length", "a list of at least"),
    "too_long": ("max_length", "a list of at most"),
}
"""Pydantic's name of the error → the name of the bound in its context, and our words for it."""


class Checked(BaseModel):
    """Base of everything that is read from outside: frozen, and checked when it is made.

    Unknown names, NaN and infinity are refused, and nothing is converted but what says the same:
    lists become tuples, numpy's numbers Python's, whole numbers floats where a float is declared.
    The text below a field is what `texts_of` returns, for the help.

    >>> from typing import Annotated
    >>> from annotated_types import Ge
    >>> class Lamp(Checked):
    ...     watts: Annotated[float, Ge(0)] = 40
    >>> Lamp(watts=-1)
    Traceback (most recent call last):
    pfedafm_jax.base.errors.PfedafmError: watts = -1 cannot be used; accepted: at least 0
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=()
    )

    what: ClassVar[str] = "setting"
    """What an unknown name is called in the error."""

    @classmethod
    def prefix(cls) -> str:
        """What stands before every name in an error: `fml.` for the settings of FML."""
        return ""

    if not TYPE_CHECKING:  # where pydantic says what the fields are

        def __init__(self, /, **values: Any):
            with told(type(self)):
                super().__init__(**values)

        __init__.__pydantic_base_init__ = True  # it takes what pydantic's own takes

    @classmethod
    def model_validate(cls, obj: Any, **options: Any) -> Self:
        with told(cls):
            return super().model_validate(obj, **options)

    @classmethod
    def model_validate_json(cls, json_data: str | bytes | bytearray, **options: Any) -> Self:
        with told(cls):
            return super().model_validate_json(json_data, **options)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        return {name: plain(value) for name, value in values.items()}

    def __replace__(self, /, **changes: Any) -> Self:
        """A copy with these changes, checked; `copy.replace` of Python 3.13 calls it."""
        return type(self)(**{**dict(self), **changes})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with these changes, checked."""
        return self.__replace__(**(update or {}))


@contextmanager
def told(kind: type[Checked]) -> Iterator[None]:
    """Turns what pydantic refuses while a model is made into our error."""
    try:
        yield
    except ValidationError as error:
        raise refused(error, kind) from None


def plain(value: Any) -> Any:
    """A value as models have it: lists become tuples, and numpy's numbers Python's."""
    if isinstance(value, list):
        return tuple(plain(item) for item in value)
    is_array_scalar = getattr(value, "shape", None) == () and hasattr(value, "item")
    return value.item() if is_array_scalar else value


def read_json(kind: type[AnyDataclass], text: str | bytes) -> AnyDataclass:
    """An instance of a dataclass from the JSON of a file; what cannot be one is refused.

    Args:
        kind: the dataclass, with the types and ranges of its fields, and with a
            `__pydantic_config__`. We make it without checks: only what is read is checked.
        text: a JSON object with a value for each field that has no default.
    """
    try:
        return adapter_of(kind).validate_json(text)
    except ValidationError as error:
        raise refused(error, kind) from None


@cache
def adapter_of(kind: type) -> TypeAdapter:
    """What pydantic reads a dataclass with."""
    return TypeAdapter(kind)


def refused(error: ValidationError, kind: type) -> PfedafmError:
    """The error for the first thing that pydantic refuses, in our sentence.

    Args:
        error: what pydantic raised.
        kind: the model, or dataclass, that was to be made; its fields are known names.
    """
    first = error.errors(include_url=False)[0]
    path, problem, context = first["loc"], first["type"], first.get("ctx", {})
    name = prefix_of(kind) + name_of(path)
    value = first["input"]
    if problem == "missing":
        return PfedafmError(f"{name} is missing")
    if problem in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown(str(path[-1]), kind)
    if problem == "json_invalid":
        return PfedafmError(f"no JSON: {context['error']}")
    if problem == "literal_error":
        return bad(name, value, choices(context["expected"], value))
    if problem in ("value_error", "assertion_error"):
        return bad(name or "settings", value, str(context["error"]))
    if problem in BOUNDS:
        bound, words = BOUNDS[problem]
        accepted = f"{words} {shown(context[bound])}"
    else:
        accepted = ACCEPTED.get(problem.partition("_")[0], first["msg"])
    if path and may_be_none(kind, str(path[0])):
        accepted += ", or none"
    return bad(name, value, accepted)


def prefix_of(kind: type) -> str:
    """What stands before the names of a model in errors."""
    return kind.prefix() if issubclass(kind, Checked) else ""


def annotations_of(kind: type) -> dict[str, Any]:
    """The types of the fields of a model or dataclass, by name."""
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def unknown(name: str, kind: type, others: Iterable[str] = ()) -> PfedafmError:
    """The error for a name that a model does not have.

    Args:
        name: the name.
        kind: the model, or dataclass.
        others: names that it knows beside its fields.
    """
    names = known(name, [*annotations_of(kind), *others])
    what = kind.what if issubclass(kind, Checked) else "value"
    return PfedafmError(f"unknown {what} {prefix_of(kind)}{name}; known: {names}")


@cache
def texts_of(kind: type[Checked]) -> dict[str, str]:
    """The text below each field of a model, by the field's name; of its bases, too.

    Pydantic can do this itself (`use_attribute_docstrings`), but where a class is made, and then
    searches all modules that are loaded: 20 to 40 ms for each class of ours beside JAX.
    """
    texts: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if not issubclass(owner, Checked):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
        except (OSError, TypeError, SyntaxError):  # defined in a session: no source to read
            continue
        statements = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, below in itertools.pairwise(statements):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split())
    return {name: texts.get(name, "") for name in kind.model_fields}


def name_of(path: tuple[int | str, ...]) -> str:
    """Where in a model a value stands, as one writes it in Python.

    >>> name_of(("participants", 3)), name_of(("data", "digest"))
    ('participants[3]', 'data.digest')
    """
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


def choices(expected: str, value: Any) -> str:
    """The names that a `Literal` accepts, from pydantic's `'a', 'b' or 'c'`, and the nearest one."""
    names = [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
    near = suggestion(value, names) if isinstance(value, str) else ""
    return ", ".join(names) + near


def shown(bound: float) -> str:
    """A bound as people write it: 10,000,000, 0.5."""
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:g}"


def may_be_none(kind: type, name: str) -> bool:
    """Whether a field accepts None."""
    annotation = annotations_of(kind).get(name)
    if get_origin(annotation) not in (Union, types.UnionType):
        return False
    return type(None) in get_args(annotation)
