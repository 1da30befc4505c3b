"""Settings as command-line flags: spelling, grouping in the help, parsing."""

import argparse
import itertools
from functools import partial
from textwrap import fill, shorten
from typing import Any, NoReturn

from pfedafm_jax.base.errors import PfedafmError, suggestion
from pfedafm_jax.config.config import GROUPS, METHOD_SETTINGS, Config
from pfedafm_jax.config.method_settings import Setting, settings_of
from pfedafm_jax.models.architecture import extractor_names

ALIASES = {
    "lr": "learning-rate", "epochs": "local-epochs", "batch": "batch-size", "bs": "batch-size",
    "clients": "num-clients", "fraction": "participation", "wd": "weight-decay", "data": "dataset",
    "model": "architectures", "models": "architectures", "arch": "architectures",
    "lr-mix": "pfedafm.mix-learning-rate", "mix-lr": "pfedafm.mix-learning-rate",
    "output": "run-dir", "out": "run-dir", "algorithm": "method",
}  # fmt: skip
"""Common alternative names → ours."""

IN_SHORT = (
    "method", "dataset", "partition", "classes_per_client", "gamma", "protocol", "num_clients",
    "participation", "architectures", "shared_extractor", "rounds", "local_epochs", "batch_size",
    "learning_rate", "seed", "eval_every", "devices", "checkpoint_every",
)  # fmt: skip
"""Settings that `--help` shows; `--help-all` shows all of them."""


class Formatter(argparse.HelpFormatter):
    """Help in 80 columns; a list of names is shown as `A,B`, not `A,B [A,B ...]`."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=80)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        several = action.nargs == "+"
        return str(action.metavar) if several else super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `PfedafmError`, without printing the usage."""

    def __init__(self, **more: Any):
        usual: Any = {"add_help": False, "allow_abbrev": False, "usage": argparse.SUPPRESS}
        super().__init__(formatter_class=Formatter, **usual, **more)

    def error(self, message: str) -> NoReturn:
        raise PfedafmError(message)


def every_setting() -> dict[str, Setting]:
    """All settings by name, `fml.alpha` for one of a method."""
    kinds = {"": Config, **{f"{method}.": kind for method, kind in METHOD_SETTINGS.items()}}
    return {
        prefix + name: setting
        for prefix, kind in kinds.items()
        for name, setting in settings_of(kind).items()
    }


def add_settings(parser: Parser, config: Config, everything: bool = True) -> None:
    """Adds a flag for every setting (`--fml.alpha`), grouped, with the values of `config`.

    `everything`: with full texts and rare settings, for `--help-all`.
    """
    owners: list[Any] = [(kind.__name__, "", config, kind) for kind in GROUPS]
    for method, kind in METHOD_SETTINGS.items():
        owners.append((f"Method {method}", f"{method}.", getattr(config, method), kind))
    for heading, prefix, owner, kind in owners:
        group = parser.add_argument_group(heading)
        for name, setting in settings_of(kind).items():
            value, text = getattr(owner, name), setting.help
            shown = ",".join(value) if isinstance(value, tuple) else str(value)
            shown = shown.lower() if isinstance(value, bool | None) else shown
            if not everything:
                text = shorten(text.split(". ")[0], 51, placeholder=" …")
            if not everything and prefix + name not in IN_SHORT:
                text = argparse.SUPPRESS
            more: dict[str, Any] = {"type": partial(setting.read, prefix=prefix)}
            more["metavar"] = shorten(shown, 20) or "…"
            if setting.kind is tuple:
                more |= {"nargs": "+", "metavar": shown if everything else "A,B"}
            elif setting.kind is bool:
                more |= {"nargs": "?", "const": True}
            names: dict[str, Any] = {"dest": prefix + name, "help": text.replace("%", "%%")}
            names["default"] = argparse.SUPPRESS
            flag = prefix + name.replace("_", "-")
            group.add_argument(f"--{flag}", **names, **more)
            if setting.kind is bool:
                names["help"] = argparse.SUPPRESS
                group.add_argument(f"--no-{flag}", action="store_false", **names)


def spelled(word: str) -> str:
    """An argument in canonical spelling: `--learning_rate=1`, `--lr=1` → `--learning-rate=1`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    method, dot, name = flag.removeprefix("no-").rpartition(".")
    method, name = method.replace("-", "_"), name.replace("_", "-")
    # --fml.no-detach-targets
    off = "no-" if flag.startswith("no-") or (dot and name.startswith("no-")) else ""
    name = name.removeprefix("no-") if dot else name
    name = ALIASES.get(name, name)
    name = name.rpartition(".")[2] if dot else name  # --pfedafm.mix-lr: the alias has it, too
    return f"--{off}{method}{dot}{name}{equals}{value}"


def print_help(parser: Parser, program: str, description: str, everything: bool) -> None:
    """Prints options and settings in groups; `everything`: also rare ones and those of methods."""
    print(f"usage: {program} [--config NAME] [--SETTING VALUE ...]\n\n{description.strip()}\n")
    print(parser.format_help().strip() + "\n")
    for what, names in (("methods", METHOD_SETTINGS), ("architectures", extractor_names())):
        print(fill(f"{what}: {', '.join(names)}", 80, subsequent_indent="  "))
    more = "--help-all: every setting, and those of each method, such as --fml.alpha 0.3"
    print("--SETTING alone switches on, --no-SETTING off" if everything else more)


def given(parser: Parser, words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """The settings that these arguments give, `{"fml.alpha": 0.3}`, beside the options."""
    found, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            usual = "settings are given as --SETTING VALUE"
            raise PfedafmError(f"{unknown[0]!r} belongs to no option; {usual}")
        flags = list(parser._option_string_actions)
        near = suggestion(flag, flags)
        near = near or suggestion(flag, [word.rpartition(".")[2] for word in flags])
        raise PfedafmError(f"unknown option {flag}{near}; --help and --help-all say what there is")
    values = {name: value for name, value in vars(found).items() if name not in vars(options)}
    return {  # names may also have spaces between them
        name: tuple(itertools.chain(*value)) if isinstance(value, list) else value
        for name, value in values.items()
    }
