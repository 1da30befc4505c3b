"""The command line of the commands that train: settings as flags, and the options beside them.

Imports of JAX stand inside functions, so that the help does not wait for it.
"""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeVar

from annotated_types import Ge

from pfedafm_jax.base.checked import Checked
from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.flags import FlagGroup, print_help, read_flags
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.config.config import (
    BUILT_IN_METHODS,
    BUILT_IN_NETWORKS,
    CONFIGS,
    GROUPS,
    Clients,
    Config,
    Data,
    config_names,
    merged,
    read_settings,
)
from pfedafm_jax.config.method_settings import every_method
from pfedafm_jax.config.presets import preset_settings

if TYPE_CHECKING:
    from pfedafm_jax.runs.observers import Observer

HELP_FLAGS = ("--help", "-h", "--help-all")

IN_SHORT_HELP = (
    *("config", "preset", "run_dir", "data_dir", "plugin", "fresh", "tensorboard", "wandb"),
    *("dataset", "partition", "classes_per_client", "gamma", "protocol"),
    *("num_clients", "participation", "architectures", "shared_extractor"),
    *("method", "rounds", "local_epochs", "batch_size", "learning_rate", "seed", "eval_every"),
    *("devices", "checkpoint_every"),
)
"""What `--help` shows; `--help-all` shows everything."""

ALIASES = {
    "dataset": ["data"],
    "num_clients": ["clients"],
    "participation": ["fraction"],
    "architectures": ["model", "models", "arch"],
    "method": ["algorithm"],
    "local_epochs": ["epochs"],
    "batch_size": ["batch", "bs"],
    "learning_rate": ["lr"],
    "weight_decay": ["wd"],
    "run_dir": ["output", "out"],
}
"""Other names that people type, by setting or option."""

ALIASES_OF_METHODS = {"learning_rate": ["lr"], "mix_learning_rate": ["mix-lr", "lr-mix"]}
"""The same for methods' own settings: `--fml.lr`."""


class CommandOptions(Checked):
    """Base of what a command takes: a field is a flag, the text below it its help."""

    what: ClassVar[str] = "option"
    heading: ClassVar[str] = "Options"
    """What stands above the options in the help."""
    placeholders: ClassVar[dict[str, str]] = {}
    """What stands in the help for the value of an option, by its name."""
    positional: ClassVar[tuple[str, ...]] = ()
    """Options that are given by their place instead of a flag."""
    repeated: ClassVar[tuple[str, ...]] = ("plugin",)
    """Lists whose items may have commas: the flag is repeated for each item."""


class RunOptions(CommandOptions):
    """What a command that trains takes beside the settings of its run."""

    heading: ClassVar[str] = "Run"
    placeholders: ClassVar[dict[str, str]] = {
        "config": "NAME",
        "preset": "NAME",
        "run_dir": "DIR",
        "data_dir": "DIR",
        "plugin": "FILE.py",
        "wandb": "PROJECT",
        "coordinator": "HOST:PORT",
        "num_processes": "P",
        "process_id": "I",
    }

    config: str = "hetero_cifar10"
    """Named settings or a TOML file; alone: lists them."""
    preset: tuple[str, ...] = ()
    """Settings laid over it: authors_code, paper, others. Several, with commas between them, are
    laid over it one after another."""
    run_dir: str | None = None
    """Where the run's files go (runs/NAME)."""
    data_dir: str | None = None
    """Folder or archive with the dataset."""
    plugin: tuple[str, ...] = ()
    """Your methods and networks (docs/extending.md)."""
    fresh: bool = False
    """Start over even if the run is there already."""
    tensorboard: bool = False
    """Write TensorBoard's files into the run folder."""
    wandb: str | None = None
    """Log to Weights & Biases (pip install wandb)."""
    coordinator: str | None = None
    """Where several processes meet; auto: as Slurm says. Each is started with the same command."""
    num_processes: Annotated[int, Ge(1)] | None = None
    """How many processes. Beside --coordinator ADDRESS:PORT."""
    process_id: Annotated[int, Ge(0)] | None = None
    """Which one this is, 0 to P - 1. Beside --coordinator ADDRESS:PORT."""


Simple = TypeVar("Simple", bound=CommandOptions)
AnyOptions = TypeVar("AnyOptions", bound=RunOptions)


def read_options(
    words: Sequence[str], command: str, description: str, kind: type[Simple]
) -> Simple:
    """The options of a command that has no settings; with `--help` prints it and exits.

    Args:
        words: the words behind the command's name.
        command: the name of the command, `plot` for `pfedafm plot`.
        description: what it does, for `--help`.
        kind: its options.
    """
    groups = option_flags(kind)
    if set(HELP_FLAGS) & set(words):
        places = "".join(f" {kind.placeholders[name]}" for name in kind.positional)
        print_help(groups, f"pfedafm {command}{places} [--OPTION VALUE …]", description)
        sys.exit(0)
    return kind(**read_flags(groups, words))


def option_flags(kind: type[CommandOptions]) -> list[FlagGroup]:
    """The flags of a command's options: those that it shares with others, then its own."""
    groups = []
    shared: set[str] = set()
    for owner in reversed(kind.__mro__):
        if not issubclass(owner, CommandOptions) or not owner.model_fields:
            continue
        names = [name for name in owner.model_fields if name not in shared]
        shared |= set(names)
        group = FlagGroup(
            owner.heading,
            kind,
            names=names,
            values=kind.placeholders,
            positional=kind.positional,
            repeated=kind.repeated,
            aliases=ALIASES,
        )
        groups.append(group)
    return groups


@dataclass(frozen=True)
class Invocation(Generic[AnyOptions]):
    """What a command line asks for."""

    config: Config
    options: AnyOptions
    name: str
    """The run's name, for plans, folders and observers."""
    command: str
    """The command as it was typed."""
    flags: Mapping[str, Any]
    """The settings that were given as flags, `{"fml.alpha": 0.3}`."""

    @property
    def run_dir(self) -> Path:
        """Where the run's files go."""
        if self.options.run_dir is not None:
            return Path(self.options.run_dir)
        return Path("runs") / self.name

    def start(self, devices: int | None = None) -> dict[str, Any]:
        """Connects to other processes and sets up the devices; returns arguments for `run_all`.

        Raises if an observer that `--tensorboard` or `--wandb` asks for cannot be used.

        Args:
            devices: how many; None: as the settings say.
        """
        import jax

        from pfedafm_jax.engine import join, setup_devices

        options = self.options
        if options.coordinator is not None:
            join(options.coordinator, options.num_processes, options.process_id)
        setup_devices(self.config.devices if devices is None else devices)
        is_first = options.coordinator is None or jax.process_index() == 0
        console.quiet = not is_first  # only process 0 prints
        return {
            "data_dir": options.data_dir,
            "name": self.name,
            "command": self.command,
            "observers": observers(options) if is_first else [],
        }


def observers(options: RunOptions) -> "list[Observer]":
    """The observers for `--tensorboard` and `--wandb`; raises if one cannot be used."""
    from pfedafm_jax.runs.observers import TensorBoard, WeightsAndBiases

    wanted = []
    if options.tensorboard:
        wanted.append(TensorBoard())
    if options.wandb is not None:
        wanted.append(WeightsAndBiases(options.wandb, options.fresh, console.print))
    return wanted


def parse(
    words: Sequence[str], command: str, description: str, kind: type[AnyOptions]
) -> Invocation[AnyOptions]:
    """Settings and options of a command that trains.

    Settings are laid one over the other: those of `--config`, of each `--preset`, and flags.
    Plugins are loaded before flags are read, so that settings may name what they register.

    Args:
        words: the words behind the command's name.
        command: the name of the command, `run` for `pfedafm run`.
        description: what it does, for `--help`.
        kind: its options.
    """
    groups = option_flags(kind)
    asked_help = [word for word in words if word in HELP_FLAGS]
    words_of_flags = [word for word in words if word not in HELP_FLAGS]
    if words_of_flags[-1:] == ["--config"] and not asked_help:
        print_configs()
        sys.exit(0)
    options = kind(**read_flags(groups, words_of_flags, ignore_unknown=True))
    for plugin in options.plugin:
        load_plugin(plugin)
    if asked_help:
        _print_help(groups, options, command, description, "--help-all" in asked_help)
        sys.exit(0)

    from pfedafm_jax.methods.checks import check_names

    given = read_flags([*groups, *setting_flags({})], words_of_flags)
    flags = {name: value for name, value in given.items() if name not in kind.model_fields}
    if options.coordinator is None and (options.num_processes, options.process_id) != (None, None):
        beside = "are used beside --coordinator ADDRESS:PORT, which is missing"
        raise PfedafmError(f"num_processes and process_id {beside}")
    config = check_names(Config(**layers(options, flags)))
    is_script = sys.argv[0].endswith(f"{command}.py")
    program = ["python", sys.argv[0]] if is_script else ["pfedafm", command]
    name = default_name(options.config, config)
    return Invocation(config, options, name, shlex.join([*program, *words]), flags)


def layers(options: RunOptions, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `--config`, of each `--preset`, and of flags, laid one over the other.

    Which variant of a preset it is goes by the dataset and the architectures, which flags may have.
    """
    settings = read_settings(options.config)
    for preset in options.preset:
        so_far = merged(settings, flags)
        dataset = part_of(Data, so_far).dataset
        architectures = part_of(Clients, so_far).architectures
        settings = merged(settings, preset_settings(preset, dataset, architectures))
    return merged(settings, flags)


def part_of(kind: type[Any], settings: Mapping[str, Any]) -> Any:
    """The part of some settings that a group has, checked by itself."""
    return kind(**{name: settings[name] for name in kind.model_fields if name in settings})


def setting_flags(settings: Mapping[str, Any], methods: bool = True) -> list[FlagGroup]:
    """The flags of all settings, in groups.

    Args:
        settings: what the help shows as present values, as a file has them.
        methods: with those of every registered method, which imports JAX.
    """
    groups = [FlagGroup(kind.__name__, kind, values=settings, aliases=ALIASES) for kind in GROUPS]
    for method, kind in every_method().items() if methods else ():
        own = settings.get(method, {})
        heading = f"Method {method}"
        groups.append(FlagGroup(heading, kind, f"{method}.", own, aliases=ALIASES_OF_METHODS))
    return groups


def _print_help(
    groups: Sequence[FlagGroup],
    options: RunOptions,
    command: str,
    description: str,
    everything: bool,
) -> None:
    """Prints `--help`, or with `everything` `--help-all`, which waits for JAX."""
    description = f"{description.strip()}\nBehind each setting stands the value that it has."
    settings = layers(options, {})
    usage = f"pfedafm {command} [--config NAME] [--SETTING VALUE …]"
    groups = [*groups, *setting_flags(settings, methods=everything)]
    names = names_in_help(registered=everything or bool(options.plugin))
    if everything:
        last = "Settings without a value are off: --flip switches on, --no-flip off."
        print_help(groups, usage, description, epilogue=[*names, last])
    else:
        last = "--help-all: every setting, and those of each method, such as --fml.alpha 0.3"
        own_options = type(options).model_fields.keys() - RunOptions.model_fields.keys()
        short = [*IN_SHORT_HELP, *own_options]
        print_help(groups, usage, description, short, epilogue=[*names, last])


def names_in_help(registered: bool) -> list[str]:
    """The paragraphs of the help with the names of methods and networks.

    Args:
        registered: all that are registered, which imports JAX; else those of the library.
    """
    methods, networks = BUILT_IN_METHODS, BUILT_IN_NETWORKS
    if registered:
        from pfedafm_jax.methods import method_names
        from pfedafm_jax.models.architecture import extractor_names

        methods, networks = method_names(), extractor_names()
    return [f"methods: {', '.join(methods)}", f"networks: {', '.join(networks)}"]


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


def outputs(name: Path, *suffixes: str) -> list[Path]:
    """Files of this name, `NAME.md` and others, which can be written; checked before the work."""
    from pfedafm_jax.base.files import check_writable

    if not name.name or name.is_dir():
        raise bad("out", str(name), f"a name for files, without {' and '.join(suffixes)}")
    check_writable(name.parent, "out")
    return [name.with_name(name.name + suffix) for suffix in suffixes]


def print_configs() -> None:
    """The named configurations with the first line of each."""
    for name in config_names():
        first_line, *_ = (CONFIGS / f"{name}.toml").read_text().splitlines()
        console.print(f"{name:<16} {first_line.lstrip('# ')}", soft_wrap=True)
    console.print("\npfedafm run --config NAME", style="dim")
