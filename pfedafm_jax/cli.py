"""What the commands share: reading settings from the command line, and talking to people in a terminal."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import tyro
from rich.table import Table

from pfedafm_jax.compare import COLUMNS, cell, human
from pfedafm_jax.config import PRESETS, Config, check_types, known, load_config, paper_scale, with_preset
from pfedafm_jax.engine import join, setup_devices
from pfedafm_jax.errors import Interrupted, PfedafmError
from pfedafm_jax.experiment import Experiment
from pfedafm_jax.methods import check_method
from pfedafm_jax.observers import Observer, TensorBoard, WeightsAndBiases
from pfedafm_jax.plots import architecture_label
from pfedafm_jax.plugins import load_plugins, registered
from pfedafm_jax.progress import Watch as Watch  # commands have it from here
from pfedafm_jax.progress import console


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
    print(message, file=sys.stderr, flush=True)
    if jax.distributed.is_initialized():
        os._exit(code)  # the usual way out waits for the other processes, which may be gone
    sys.exit(code)


def config_files(folder: Path) -> dict[str, Path]:
    """The named configurations of a folder."""
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def parse(
    argv: Sequence[str],
    configs: Path,
    program: str,
    description: str,
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
) -> tuple[Config, Options]:
    """Settings by `--config`, `--preset` and `--paper`, each over the one before; explicit flags over all.

    Plugins come first of all, so that settings may name what they register.
    `add_options` adds what only one command has; it comes back in `Options.more`.
    """
    load_plugins(argv)
    parser = argparse.ArgumentParser(prog=program, description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", nargs="?", const="", default="hetero_cifar10", metavar="NAME",
                        help="named settings, or a TOML file; alone: list the names")  # fmt: skip
    parser.add_argument("--preset", action="append", default=[], metavar="NAME",
                        help=f"settings laid over it: {', '.join(PRESETS)}")  # fmt: skip
    parser.add_argument("--paper", nargs="?", const=100, type=int, metavar="N",
                        help="the paper's length, T = 500 and E = 10, with N = 100, 50 or 10 clients")  # fmt: skip
    parser.add_argument("--run-dir", metavar="DIR", help="where the files of the run go (default: runs/NAME)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder or archive with the dataset")
    parser.add_argument("--plugin", action="append", metavar="FILE.py",
                        help="methods and extractors of your own, see docs/extending.md; may be given several times")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="start over even if the run is there already")
    parser.add_argument(
        "--tensorboard", action="store_true", help="write TensorBoard's event files into the run folder"
    )
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases (pip install wandb)")
    parser.add_argument("--coordinator", metavar="ADDRESS:PORT",
                        help="where the processes of a run over several meet; auto: as Slurm or MPI say")  # fmt: skip
    parser.add_argument("--num-processes", type=int, metavar="P", help="how many processes, beside --coordinator")
    parser.add_argument("--process-id", type=int, metavar="I", help="which of them this is, 0 to P - 1")
    add_options(parser)
    asks_help = any(word in ("--help", "-h") for word in argv)
    own, rest = parser.parse_known_args([word for word in argv if word not in ("--help", "-h")])
    if own.coordinator is None and (own.num_processes, own.process_id) != (None, None):
        raise PfedafmError("num_processes and process_id are used beside --coordinator ADDRESS:PORT, which is missing")
    files = config_files(configs)
    if own.config == "" and not asks_help:
        print_configs(files)
        sys.exit(0)
    config = named_config(own.config or "hetero_cifar10", files)
    for preset in own.preset:
        config = with_preset(config, preset)
    if own.paper is not None:
        config = paper_scale(config, own.paper)
    if asks_help:
        parser.print_help()
        print(f"\n{registered()}")
        print(f"\nSettings, with the values of {own.config or 'hetero_cifar10'}:")
        rest = ["--help"]
    if any(word.split("=")[0].replace("_", "-") == "--learning-rate" for word in rest):  # of every method
        config = replace(config, learning_rates=())
    config = tyro.cli(Config, args=rest, default=config, prog=program, description="")
    check_types(config)
    names = [name for word in config.architectures for name in word.split(",")]  # with commas or spaces between them
    config = replace(config, architectures=tuple(names))
    check_method(config)
    name = run_name(own.config or "hetero_cifar10")
    if name in files:  # which is not the whole story where the data or the method is another
        if config.dataset != named_config(own.config or "hetero_cifar10", files).dataset:
            name = run_name(config.dataset.rpartition(":")[2])
        name = name if config.method == "pfedafm" else f"{name}-{config.method}"
    run_dir = Path(own.run_dir) if own.run_dir else Path("runs") / name
    command = shlex.join([program, *argv])
    return config.check().check_split(), Options(name, run_dir, own.data_dir, own.fresh, f"python {command}", own)


def run_name(config: str) -> str:
    """The name of a run, from the name or the file of its configuration: one folder name, never a path.

    >>> run_name("hetero_cifar10"), run_name("../my settings.toml"), run_name("...toml")
    ('hetero_cifar10', 'my_settings', 'run')
    """
    name = re.sub(r"[^\w.-]+", "_", Path(config).stem).lstrip(".-")
    return name[:100] or "run"


def named_config(name: str, files: dict[str, Path]) -> Config:
    """The configuration of this name, or of this TOML file."""
    if name in files:
        return load_config(files[name])
    if name.endswith(".toml"):
        return load_config(name)
    raise PfedafmError(f"config = {name!r} cannot be used; accepted: {known(name, list(files))}, or a TOML file")


def print_configs(files: dict[str, Path]) -> None:
    """The named configurations with the first line of each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, path in files.items():
        about = path.read_text().splitlines()[0].lstrip("# ")
        table.add_row(f"[bold]{name}[/bold]", about)
    console.print(table)
    console.print("\npython experiments/run.py --config NAME", style="dim")


# ---------------------------------------------------------------------------------------------- words


def print_plan(experiment: Experiment, name: str = "", run_dir: str | Path | None = None) -> None:
    """What the run will do."""
    config, federation = experiment.config, experiment.federation
    method = federation.method
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()

    def networks() -> str:
        if method.one_network:
            return f"{config.num_clients} × {architecture_label(method.shared.name)} ({human(method.shared.params)})"
        sizes = np.bincount(federation.groups, minlength=len(federation.architectures))
        return ", ".join(
            f"{size} × {architecture_label(a.name)} ({human(a.params)})"
            for size, a in zip(sizes, federation.architectures, strict=True)
        )

    dealt = (
        f"{config.classes_per_client} of {experiment.dataset.num_classes} classes a client"
        if config.partition == "pathological"
        else f"Dirichlet({config.gamma:g})"
    )
    sizes = federation.num_train
    costs = federation.costs(range(config.num_clients))
    per_round = config.num_participants
    up, down, flops = (float(np.mean([getattr(c, k) for c in costs])) for k in ("floats_up", "floats_down", "flops"))
    table.add_row("data", f"{experiment.dataset.source}")
    table.add_row("split", f"{dealt}, {sizes.min()} to {sizes.max()} training images each ({config.protocol} protocol)")
    table.add_row("clients", f"{config.num_clients}, {per_round} a round; parameters: {networks()}")
    table.add_row(
        "shared",
        f"{architecture_label(method.shared.name)}, {human(method.shared.extractor_params)} parameters without header",
    )
    table.add_row(
        "training",
        f"{config.rounds} rounds, E = {config.local_epochs}, batch {config.batch_size}, learning rate {config.learning_rate:g}",
    )
    table.add_row(
        "a round", f"{human(up * per_round)} floats up, {human(down * per_round)} down, {human(flops * per_round)}FLOP"
    )
    table.add_row(
        "device", f"{federation.devices}, {federation.chunk} client{'s' if federation.chunk > 1 else ''} a step"
    )
    if run_dir is not None:
        table.add_row("files", f"{run_dir}/")
    if run_dir is not None and config.checkpoint_every:
        table.add_row("saved", f"every {config.checkpoint_every} rounds; the same command goes on where it stopped")
    title = ", ".join(part for part in (config.dataset, name, f"seed {config.seed}") if part)
    console.print(f"[bold]{method.title}[/bold] on {title}")
    console.print(table)


def percent(value: float | None) -> str:
    """0.9212 → `92.12 %`."""
    return "–" if value is None else f"{100 * value:.2f} %"


def print_summary(summary: dict[str, Any], paths: Sequence[Path]) -> None:
    """The end of a run: a short table and where the plots are."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(style="dim")
    table.add_row(
        "best mean of participants",
        percent(summary["best_mean_accuracy"]),
        f"round {summary['best_round']}; the paper's convention",
    )
    table.add_row("last mean of participants", percent(summary["last_mean_accuracy"]), f"round {summary['rounds']}")
    table.add_row("all clients at the end", percent(summary["final_all_clients_accuracy"]), "unbiased")
    if summary["spread_over_clients"] is not None:
        table.add_row("spread over clients", f"{100 * summary['spread_over_clients']:.2f} points", "standard deviation")
    if summary["rounds_to_target"]:
        table.add_row(f"rounds to {100 * summary['target_accuracy']:.0f} %", str(summary["rounds_to_target"]), "")
    table.add_row("time", f"{summary['seconds'] / 60:.1f} min", f"and {summary['compile_seconds']:.0f} s to compile")
    if summary["diverged_at_round"] is not None:
        table.add_row(
            "[red]diverged[/red]",
            f"round {summary['diverged_at_round']}",
            f"{summary['clients_not_finite']} updates not finite, kept out",
        )
    console.print(table)
    for path in paths:
        console.print(f"  {path}")


def print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """Methods side by side; floats and FLOPs are per client and round."""
    table = Table(box=None, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for row in rows:
        diverged = "" if row["diverged"] is None else f" [red]diverged at {row['diverged']}[/red]"
        table.add_row(row["method"] + diverged, *(cell(column, row[column]) for column in COLUMNS))
    console.print(table)
