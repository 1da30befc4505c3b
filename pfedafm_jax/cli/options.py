"""What the commands share: options and settings from the command line."""

import argparse
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import jax

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import check_writable
from pfedafm_jax.cli.flags import Parser, add_settings, given, print_help, spelled
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.config.config import CONFIGS, Config, config_names, updated
from pfedafm_jax.config.presets import with_preset
from pfedafm_jax.engine import join, setup_devices
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.runs.observers import Observer, TensorBoard, WeightsAndBiases
from pfedafm_jax.runs.progress import console, print_table


@dataclass(frozen=True)
class Options:
    """The options on the command line that are not settings of the run."""

    name: str
    run_dir: Path
    command: str  # as it was typed
    more: argparse.Namespace  # the other options, those of a single command included

    def start(self, devices: int) -> dict[str, Any]:
        """Connects to other processes and sets up the devices; returns arguments for `run_all`.

        Raises if an observer that `--tensorboard` or `--wandb` asks for cannot be used.
        """
        if self.more.coordinator is not None:
            join(self.more.coordinator, self.more.num_processes, self.more.process_id)
        setup_devices(devices)
        first = self.more.coordinator is None or jax.process_index() == 0
        console.quiet = not first  # only process 0 prints
        shared = {"data_dir": self.more.data_dir, "name": self.name, "command": self.command}
        return shared | {"observers": self.observers() if first else []}

    def observers(self) -> list[Observer]:
        """The observers for `--tensorboard` and `--wandb`; raises if one cannot be used."""
        found: list[Observer] = [TensorBoard()] if self.more.tensorboard else []
        if self.more.wandb is not None:
            found.append(WeightsAndBiases(self.more.wandb, self.more.fresh, console.print))
        return found


def outputs(name: Path, *suffixes: str) -> list[Path]:
    """Files of this name, `NAME.md` and others, which can be written; checked before the work."""
    if not name.name or name.is_dir():
        raise bad("out", str(name), f"a name for files, without {' and '.join(suffixes)}")
    check_writable(name.parent, "out")
    return [name.with_name(name.name + suffix) for suffix in suffixes]


def option_parser(everything: bool = True) -> Parser:
    """Options that are not settings: configuration, folders, observers, processes."""
    parser = Parser()
    add = parser.add_argument_group("Run").add_argument
    several: dict[str, Any] = {"action": "append", "default": []}
    add("--config", nargs="?", const="", metavar="NAME",
        help="named settings, or a TOML file; alone: list them")  # fmt: skip
    add("--preset", metavar="NAME", help="settings laid over it: paper, authors_code, …", **several)
    add("--run-dir", metavar="DIR", help="where the run's files go (runs/NAME)")
    add("--data-dir", metavar="DIR", help="folder or archive with the dataset")
    plugins = "your methods and networks (docs/extending.md)"
    add("--plugin", metavar="FILE.py", help=plugins, **several)
    add("--fresh", action="store_true", help="start over even if the run is there already")
    add("--tensorboard", action="store_true", help="write TensorBoard's files into the run folder")
    add("--wandb", metavar="PROJECT", help="log to Weights & Biases (pip install wandb)")
    add("--coordinator", metavar="HOST:PORT",
        help="where several processes meet; auto: as Slurm says")  # fmt: skip
    add = parser.add_argument_group("Processes, beside --coordinator").add_argument
    hidden = None if everything else argparse.SUPPRESS
    add("--num-processes", type=int, metavar="P", help=hidden or "how many processes")
    add("--process-id", type=int, metavar="I", help=hidden or "which this is, 0 to P - 1")
    return parser


def parse(
    argv: Sequence[str],
    program: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> tuple[Config, Options]:
    """Settings from `--config` and `--preset`, in this order, then from flags.

    Args:
        argv: the arguments.
        program: the name of the command, `run` for `pfedafm run`.
        description: what it does, for `--help`.
        add_options: adds this command's own options to a parser; they end up in `Options.more`.

    Plugins are loaded first, so that settings may name what they register.
    """
    words = [spelled(word) for word in argv]
    asks_help = {"--help", "-h", "--help-all"} & set(words)
    everything = not asks_help or "--help-all" in asks_help
    parser = option_parser(everything)
    add_options(parser)
    words = [word for word in words if word not in asks_help]
    options, _ = parser.parse_known_args(words)  # settings are known once plugins are loaded
    for plugin in options.plugin:
        load_plugin(plugin)
    if options.coordinator is None and (options.num_processes, options.process_id) != (None, None):
        beside = "are used beside --coordinator ADDRESS:PORT, which is missing"
        raise PfedafmError(f"num_processes and process_id {beside}")
    if options.config == "" and not asks_help:
        print_configs()
        sys.exit(0)
    named = options.config or "hetero_cifar10"

    def configured(flags: dict[str, Any]) -> Config:
        # Presets go by the dataset and the architectures, which flags may have.
        config = reduce(with_preset, options.preset, updated(Config.load(named), flags))
        return updated(config, flags)

    add_settings(parser, configured({}), everything)
    if asks_help:
        print_help(parser, f"pfedafm {program}", description, everything)
        sys.exit(0)
    config = check_names(configured(given(parser, words, options)))
    name = default_name(named, config)
    run_dir = Path(options.run_dir) if options.run_dir else Path("runs") / name
    script = sys.argv[0].endswith(f"{program}.py")
    command = ["python", sys.argv[0]] if script else ["pfedafm", program]
    return config, Options(name, run_dir, shlex.join([*command, *argv]), options)


def default_name(named: str, config: Config) -> str:
    """The name of a run, from its configuration; from data and method where those are others."""
    if named not in config_names():
        return run_name(named)
    if config.dataset != Config.load(named).dataset:
        named = run_name(config.dataset.rpartition(":")[2])
    return named if config.method == "pfedafm" else f"{named}-{config.method}"


def run_name(config: str) -> str:
    """The name of a run, from that of its configuration or file: one folder name, never a path.

    >>> run_name("hetero_cifar10"), run_name("../my settings.toml"), run_name("...toml")
    ('hetero_cifar10', 'my_settings', 'run')
    """
    return re.sub(r"[^\w.-]+", "_", Path(config).stem).lstrip(".-")[:100] or "run"


def seeds(text: str) -> list[int] | None:
    """`0,1,2` as numbers, without repetition; None for an empty text.

    >>> seeds("0,1,1"), seeds("")
    ([0, 1], None)
    """
    try:
        return list(dict.fromkeys(int(seed) for seed in text.split(","))) if text else None
    except ValueError:
        raise bad("seeds", text, "whole numbers like 0,1,2") from None


def print_configs() -> None:
    """The named configurations with the first line of each."""
    texts = {name: (CONFIGS / f"{name}.toml").read_text() for name in config_names()}
    print_table([], [[name, text.splitlines()[0].lstrip("# ")] for name, text in texts.items()])
    console.print("\npfedafm run --config NAME", style="dim")
