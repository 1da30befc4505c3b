"""Flags from models: every field of a `Checked` model is a flag, its text the help.

Cyclopts splits the words of a command line, knows spellings (`--learning_rate`, `--no-flip`) and
draws the help; pydantic reads the values, so that a flag has the range and the error of its setting.
"""

import inspect
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, get_origin

import cyclopts
from cyclopts import App, Group, Parameter
from pydantic.fields import FieldInfo

from pfedafm_jax.base.checked import Checked, may_be_none, texts_of
from pfedafm_jax.base.errors import PfedafmError, bad, suggestion
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.page import WIDTH, Page, first_sentence

LONGEST_VALUE = 16
"""Of a longer value the short help shows the beginning."""


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one model, under one heading of the help."""

    heading: str
    kind: type[Checked]
    prefix: str = ""
    """What stands before each name: `fml.` for `--fml.alpha`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """What the help shows as the present values; those that are missing have their defaults."""
    names: Sequence[str] | None = None
    """The fields that are flags of this group; None: all of them."""
    positional: Sequence[str] = ()
    """The fields that are no flags but words by their place, `RUN`."""
    repeated: Sequence[str] = ()
    """Lists whose items may have commas: the flag is repeated for each item."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other names that people type, by field: `{"learning_rate": ["lr"]}`."""


def read_flags(
    groups: Sequence[FlagGroup], words: Sequence[str], ignore_unknown: bool = False
) -> dict[str, Any]:
    """The values of the flags among these words, by name, `{"rounds": 5, "fml.alpha": 0.3}`.

    Args:
        groups: the flags that exist.
        words: the words of a command line behind the command's name.
        ignore_unknown: leave out what is no flag of these groups, instead of raising.
    """
    app = _app(groups)
    try:
        if ignore_unknown:
            _, bound, _, _ = app.parse_known_args(words)
        else:
            _, bound, _ = app.parse_args(words)
    except cyclopts.CycloptsError as error:
        raise _refused(error) from None
    texts: dict[tuple[type[Checked], str], dict[str, Any]] = {}
    for group in groups:  # several may have parts of one model
        texts_of_model = texts.setdefault((group.kind, group.prefix), {})
        for name in _names(group):
            words_of_flag = bound.arguments.get(_identifier(group.prefix + name))
            if isinstance(words_of_flag, str):  # a positional argument
                words_of_flag = [words_of_flag]
            if not words_of_flag:
                continue
            if name not in group.repeated:
                words_of_flag = as_pydantic_reads(group.kind, name, words_of_flag)
            texts_of_model[name] = words_of_flag
    values = {}
    for (kind, prefix), texts_of_model in texts.items():
        if texts_of_model:
            model = kind.model_validate(texts_of_model, strict=False)  # a text may be a number
            values |= {prefix + name: getattr(model, name) for name in texts_of_model}
    return values


def print_help(
    groups: Sequence[FlagGroup],
    usage: str,
    description: str,
    short: Iterable[str] | None = None,
    epilogue: Sequence[str] = (),
) -> None:
    """Prints the help page of a command.

    Args:
        groups: its flags.
        usage: what to type, `pfedafm run [--SETTING VALUE …]`.
        description: what it does.
        short: full names of the flags to show, with the first sentence of their text; None: all
            flags, with all of it.
        epilogue: paragraphs that stand below.
    """
    app = _app(groups, short)
    app.usage = f"usage: {usage}"
    app.help = description.strip()
    app.help_print([], console=console)
    if epilogue:
        print()
    for paragraph in epilogue:
        print(textwrap.fill(paragraph, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def as_pydantic_reads(kind: type[Checked], name: str, words: Sequence[Any]) -> Any:
    """The words of a flag as pydantic reads them, not strictly, for a field.

    Args:
        kind: the model.
        name: its field.
        words: all that were given for this flag, texts, or true and false of a switch. Lists take
            all of them, and the commas inside; of other fields the last one counts.
    """
    if is_list(kind.model_fields[name]):
        return tuple(item for word in words for item in word.split(","))
    last = words[-1]
    if may_be_none(kind, name) and str(last).lower() == "none":
        return None
    return last


def read_text(kind: type[Checked], name: str, text: str) -> Any:
    """The value of one field from a text, as a flag of this name would have it.

    >>> from pfedafm_jax.config.config import Training
    >>> read_text(Training, "rounds", "3")
    3
    """
    texts = {name: as_pydantic_reads(kind, name, [text])}
    return getattr(kind.model_validate(texts, strict=False), name)


def is_list(field_info: FieldInfo) -> bool:
    """Whether a field is a list of names."""
    return get_origin(field_info.annotation) is tuple


def _names(group: FlagGroup) -> Sequence[str]:
    return list(group.kind.model_fields) if group.names is None else group.names


def _identifier(name: str) -> str:
    return name.replace(".", "__")


def _app(groups: Sequence[FlagGroup], short: Iterable[str] | None = None) -> App:
    """An application whose only command takes these flags."""
    shown = None if short is None else set(short)
    parameters = []
    headings: dict[str, Group] = {}
    for group in groups:
        heading = Group(group.heading, sort_key=len(headings))
        heading = headings.setdefault(group.heading, heading)
        for name in _names(group):
            full_name = group.prefix + name
            visible = shown is None or full_name in shown
            parameter = _parameter(group, name, heading, visible, short is not None)
            parameters.append(parameter)

    def command(**flags: Any) -> None:
        """Takes the flags; `read_flags` reads them from the binding."""

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app = App(
        help_flags=[],
        version_flags=[],
        exit_on_error=False,
        print_error=False,
        help_format="plaintext",
        help_formatter=Page(),
    )
    app.default(command)
    return app


def _parameter(
    group: FlagGroup, name: str, heading: Group, visible: bool, short: bool
) -> inspect.Parameter:
    """A keyword of the command function, with all that cyclopts knows of the flag."""
    field_info = group.kind.model_fields[name]
    is_switch = field_info.annotation is bool
    text = texts_of(group.kind)[name]
    if field_info.is_required() and name not in group.positional:
        text += " Required."
    shown = _shown(group.values.get(name, field_info.default))
    if short and len(shown) > LONGEST_VALUE:
        shown = shown.partition(",")[0][:LONGEST_VALUE] + ",…"
    names = [name, *group.aliases.get(name, [])]
    flag = Parameter(
        name=[f"--{group.prefix}{each}".replace("_", "-") for each in names],
        negative=[f"--{group.prefix}no-{name}".replace("_", "-")] if is_switch else [],
        group=heading,
        show=visible,
        help=first_sentence(text) if short else text,
        metavar=shown,
        show_default="on" if is_switch and shown == "true" else False,
        consume_multiple=is_list(field_info) and name not in group.repeated,
        json_list=False,
    )
    identifier = _identifier(group.prefix + name)
    if name in group.positional:
        kind = list[str] if is_list(field_info) else str
        annotation = Annotated[kind, Parameter(name=shown, group=heading, help=text)]
        place = inspect.Parameter.POSITIONAL_ONLY
        return inspect.Parameter(identifier, place, annotation=annotation)
    # Lists, so that the last word counts where a flag is given twice.
    kind = list[bool] if is_switch else list[str]
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(identifier, place, default=[], annotation=Annotated[kind, flag])


def _shown(value: Any) -> str:
    """A value as one types it."""
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)


def _refused(error: cyclopts.CycloptsError) -> PfedafmError:
    """The error for words that are no flags, in our sentence."""
    if isinstance(error, cyclopts.UnknownOptionError):
        flag = (error.token.keyword or error.token.value).partition("=")[0]
        known_flags = [name for argument in error.argument_collection for name in argument.names]
        near = suggestion(flag, known_flags)
        if not near:  # `--alpha` for `--fml.alpha`
            without_method = {
                f"--{name.rpartition('.')[2]}".replace("----", "--"): name for name in known_flags
            }
            near = suggestion(flag, without_method)
        return PfedafmError(f"unknown option {flag}{near}; --help and --help-all say what there is")
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        is_flag = error.argument.name.startswith("--")
        return PfedafmError(f"{error.argument.name} {'needs a value' if is_flag else 'is missing'}")
    if isinstance(error, cyclopts.UnusedCliTokensError):
        word = (error.unused_tokens or ["?"])[0]
        usual = "settings are given as --SETTING VALUE, switches as --flip or --no-flip"
        return PfedafmError(f"{word!r} belongs to no option; {usual}")
    if isinstance(error, cyclopts.CoercionError) and error.token is not None:
        return bad(str(error.token.keyword), error.token.value, "true or false")
    return PfedafmError(str(error))
