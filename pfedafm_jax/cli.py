"""What the commands share: reading settings from the command line, and talking to people in a terminal."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill, shorten
from typing import Any, NoReturn

import jax
from rich.table import Table

from pfedafm_jax.config import (
    CONFIGS,
    GROUPS,
    METHOD_SETTINGS,
    Config,
    config_names,
    paper_scale,
    updated,
    with_preset,
)
from pfedafm_jax.data.dataset import check_name
from pfedafm_jax.engine import join, setup_devices
from pfedafm_jax.errors import Interrupted, PfedafmError
from pfedafm_jax.models import extractor_names
from pfedafm_jax.observers import Observer, TensorBoard, WeightsAndBiases
from pfedafm_jax.plugins import load_plugin
from pfedafm_jax.progress import clean, console
from pfedafm_jax.settings import Setting, bad, settings_of, suggestion


@dataclass(frozen=True)
class Options:
    """What the command line says besides the settings of the run."""

    name: str
    run_dir: Path
    data_dir: str | None
    fresh: bool
    command: str
    more: argparse.Namespace  # options of one command alone

    def start(self, devices: int) -> bool:
        """Meets the other processes, if there are any, and sets up the devices; whether this process is the first."""
        if self.more.coordinator is not None:
            join(self.more.coordinator, self.more.num_processes, self.more.process_id)
        setup_devices(devices)
        first = self.more.coordinator is None or jax.process_index() == 0
        console.quiet = not first  # one process speaks for all
        return first

    def observers(self) -> list[Observer]:
        """Those that `--tensorboard` and `--wandb` ask for; raises where one cannot be used."""
        found: list[Observer] = [TensorBoard()] if self.more.tensorboard else []
        if self.more.wandb is not None:
            found.append(WeightsAndBiases(self.more.wandb, self.fresh, console.print))
        return found


def guarded(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command: a `PfedafmError` becomes one message and its exit code, an interruption the conventional 130."""
    try:
        sys.exit(main() or 0)
    except Interrupted as stopped:
        _leave(str(stopped), stopped.exit_code)
    except PfedafmError as error:
        _leave(f"error: {error}", error.exit_code)
    except OSError as error:  # a disk that is full, or gone, outside the rounds
        _leave(f"error: {error}", 1)
    except MemoryError as error:
        _leave(f"error: not enough memory on this machine ({error})", 1)
    except KeyboardInterrupt:
        _leave("\ninterrupted", 130)


def _leave(message: str, code: int) -> NoReturn:
    print(clean(message), file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(code)  # the usual way out waits for the other processes, which may be gone
    sys.exit(code)


# ---------------------------------------------------------------------------------------------- settings from words

ALIASES = {
    "lr": "learning-rate", "epochs": "local-epochs", "batch": "batch-size", "bs": "batch-size", "clients": "num-clients",
    "fraction": "participation", "wd": "weight-decay", "data": "dataset", "model": "architectures",
    "models": "architectures", "arch": "architectures", "lr-mix": "pfedafm.mix-learning-rate",
    "mix-lr": "pfedafm.mix-learning-rate", "output": "run-dir", "out": "run-dir", "algorithm": "method",
}  # fmt: skip
"""Names that people type → ours."""

IN_SHORT = (
    "method", "dataset", "partition", "classes_per_client", "gamma", "protocol", "num_clients", "participation",
    "architectures", "shared_extractor", "rounds", "local_epochs", "batch_size", "learning_rate", "seed",
    "eval_every", "devices", "store", "checkpoint_every",
)  # fmt: skip
"""Settings that `--help` shows; `--help-all` shows all of them."""


class Formatter(argparse.HelpFormatter):
    """As wide as a terminal of 80 columns; a list of names is `A,B` and not `A,B [A,B ...]`."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=80)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return str(action.metavar) if action.nargs == "+" else super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """Raises our error, without the usage."""

    def __init__(self, **more: Any):
        super().__init__(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS, formatter_class=Formatter, **more)

    def error(self, message: str) -> NoReturn:
        raise PfedafmError(message)


def option_parser(program: str, everything: bool = True) -> Parser:
    """What is no setting: where to begin, where files are, who watches, which processes."""
    parser = Parser(prog=program)
    add = parser.add_argument_group("Run").add_argument
    add("--config", nargs="?", const="", default="hetero_cifar10", metavar="NAME",
        help="named settings, or a TOML file; alone: list them")  # fmt: skip
    add("--preset", action="append", default=[], metavar="NAME", help="settings laid over it, e.g. authors_code")
    add("--paper", nargs="?", const=100, type=int, metavar="N", help="the paper's length; N = 100, 50 or 10 clients")
    add("--run-dir", metavar="DIR", help="where the run's files go (runs/NAME)")
    add("--data-dir", metavar="DIR", help="folder or archive with the dataset")
    add(
        "--plugin", action="append", default=[], metavar="FILE.py", help="your methods and networks (docs/extending.md)"
    )
    add("--fresh", action="store_true", help="start over even if the run is there already")
    add("--tensorboard", action="store_true", help="write TensorBoard's files into the run folder")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases (pip install wandb)")
    add("--coordinator", metavar="HOST:PORT", help="where several processes meet; auto: as Slurm says")
    beside = parser.add_argument_group("Processes, beside --coordinator").add_argument
    beside("--num-processes", type=int, metavar="P", help="how many processes" if everything else argparse.SUPPRESS)
    beside("--process-id", type=int, metavar="I", help="which this is, 0 to P - 1" if everything else argparse.SUPPRESS)
    return parser


def setting_parser(config: Config, everything: bool = True) -> Parser:
    """A flag for every setting, in groups, with the values of `config`; those of methods as `--fml.alpha`."""
    parser = Parser(argument_default=argparse.SUPPRESS)

    def add(group: Any, owner: Any, name: str, setting: Setting, prefix: str = "") -> None:
        value = getattr(owner, name)
        shown = ",".join(value) if isinstance(value, tuple) else "none" if value is None else str(value)
        text = setting.help if everything else shorten(setting.help.split(". ")[0], 51, placeholder=" …")
        more: dict[str, Any] = {"type": partial(setting.read, prefix=prefix), "metavar": shorten(shown, 20) or "…"}
        if setting.kind is bool:
            more = {"action": argparse.BooleanOptionalAction}
        elif setting.kind is tuple:
            more = {"nargs": "+", "metavar": shown if everything else "A,B"}
        hidden = not everything and prefix + name not in IN_SHORT
        text = argparse.SUPPRESS if hidden else text.replace("%", "%%")
        flag = "--" + (prefix + name).replace("_", "-").replace(prefix.replace("_", "-"), prefix, 1)
        group.add_argument(flag, dest=prefix + name, help=text, **more)

    for kind in GROUPS:
        group = parser.add_argument_group(kind.__name__)
        for name, setting in settings_of(kind).items():
            add(group, config, name, setting)
    for method in METHOD_SETTINGS:
        group, settings = parser.add_argument_group(f"Method {method}"), getattr(config, method)
        for name, setting in settings_of(type(settings)).items():
            add(group, settings, name, setting, f"{method}.")
    return parser


def _spelled(word: str) -> str:
    """A word with its flag as we spell it: `--learning_rate=1`, `--lr=1` → `--learning-rate=1`."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word[2:].partition("=")
    method, dot, name = flag.rpartition(".")
    method, name = method.replace("-", "_"), name.replace("_", "-")
    name = ALIASES.get(name, name)
    if dot and name.startswith("no-"):  # --pfedafm.no-mix-project
        method, name = f"no-{method}", name[3:]
    return f"--{method}{dot}{name}{equals}{value}"


def _print_help(options: Parser, config: Config, program: str, description: str, everything: bool) -> None:
    settings = setting_parser(config, everything)
    print(f"usage: {program} [--config NAME] [--SETTING VALUE ...]\n\n{description.strip()}\n")
    print(options.format_help().strip() + "\n")
    print(settings.format_help().strip() + "\n")
    for what, names in (("methods", METHOD_SETTINGS), ("architectures", extractor_names())):
        print(fill(f"{what}: {', '.join(names)}", 80, subsequent_indent="  "))
    if not everything:
        print("--help-all: every setting, and those of each method, such as --fml.alpha 0.3")


def parse(
    argv: Sequence[str],
    program: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> tuple[Config, Options]:
    """Settings by `--config`, `--preset` and `--paper`, each over the one before; explicit flags over all.

    Args:
        argv: the words of the command line.
        program: the command, as a user calls it.
        description: what it does, for `--help`.
        add_options: adds what only this command has to a parser; it comes back in `Options.more`.

    Plugins are loaded first of all, so that settings may name what they register.
    """
    words = [_spelled(word) for word in argv]
    asks_help = {"--help", "-h", "--help-all"} & set(words)
    options = option_parser(program, "--help-all" in asks_help)
    add_options(options)
    own, rest = options.parse_known_args([word for word in words if word not in asks_help])
    for plugin in own.plugin:
        load_plugin(plugin)
    if own.coordinator is None and (own.num_processes, own.process_id) != (None, None):
        raise PfedafmError("num_processes and process_id are used beside --coordinator ADDRESS:PORT, which is missing")
    if own.config == "" and not asks_help:
        print_configs()
        sys.exit(0)
    named = own.config or "hetero_cifar10"
    config = base = Config.load(named)
    for preset in own.preset:
        config = with_preset(config, preset)
    if own.paper is not None:
        config = paper_scale(config, own.paper)
    if asks_help:
        _print_help(options, config, program, description, "--help-all" in asks_help)
        sys.exit(0)
    config = _given(config, rest, options).check()
    check_name(config.dataset)
    name = run_name(named)
    if named in config_names():  # which is not the whole story where the data or the method is another
        if config.dataset != base.dataset:
            name = run_name(config.dataset.rpartition(":")[2])
        name = name if config.method == "pfedafm" else f"{name}-{config.method}"
    run_dir = Path(own.run_dir) if own.run_dir else Path("runs") / name
    command = f"python {shlex.join([program, *argv])}"
    return config, Options(name, run_dir, own.data_dir, own.fresh, command, own)


def _given(config: Config, words: list[str], options: Parser) -> Config:
    """`config` with the settings that these words give."""
    parser = setting_parser(config)
    found, unknown = parser.parse_known_args(words)
    if unknown:
        flag = unknown[0].partition("=")[0]
        if not flag.startswith("-"):
            raise PfedafmError(f"{unknown[0]!r} belongs to no option; settings are given as --SETTING VALUE")
        flags = [word for one in (parser, options) for word in one._option_string_actions]
        near = suggestion(flag, flags) or suggestion(flag, [word.rpartition(".")[2] for word in flags])
        raise PfedafmError(f"unknown option {flag}{near}; --help and --help-all say what there is")
    values: dict[str, Any] = {}
    for name, value in vars(found).items():
        method, _, own = name.rpartition(".")
        if isinstance(value, list):  # several names, with commas or spaces between them
            value = tuple(part for word in value for part in word.split(","))
        (values.setdefault(method, {}) if method else values)[own] = value
    return updated(config, values)


def run_name(config: str) -> str:
    """The name of a run, from the name or the file of its configuration: one folder name, never a path.

    >>> run_name("hetero_cifar10"), run_name("../my settings.toml"), run_name("...toml")
    ('hetero_cifar10', 'my_settings', 'run')
    """
    name = re.sub(r"[^\w.-]+", "_", Path(config).stem).lstrip(".-")
    return name[:100] or "run"


def seeds(text: str) -> list[int] | None:
    """`0,1,2` as numbers, each once; None where nothing was said.

    >>> seeds("0,1,1"), seeds("")
    ([0, 1], None)
    """
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(","))) if text else None
    except ValueError:
        raise bad("seeds", text, "whole numbers like 0,1,2") from None


def print_configs() -> None:
    """The named configurations with the first line of each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name in config_names():
        table.add_row(name, (CONFIGS / f"{name}.toml").read_text().splitlines()[0].lstrip("# "))
    console.print(table)
    console.print("\npython experiments/run.py --config NAME", style="dim")
