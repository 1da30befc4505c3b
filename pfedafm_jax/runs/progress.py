"""Output of a run, in a terminal, a notebook or a log: plan, progress and result."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import progress as bars
from rich.table import Table
from rich.text import Text

from pfedafm_jax.base.terminal import clean, console
from pfedafm_jax.data.partition.partition import PARTITIONS
from pfedafm_jax.engine import Engine, Executor, Federation
from pfedafm_jax.models import kernels
from pfedafm_jax.results.plots import architecture_label
from pfedafm_jax.results.records import Record, Summary
from pfedafm_jax.results.tables import human, percent
from pfedafm_jax.runs.observers import Observation, Observer


class Progress(Observer):
    """A bar in a terminal, plain lines now and then elsewhere; over several runs.

    `total` is the rounds of all runs; a run begins with `next_run`.
    """

    def __init__(self, total: int, hidden: bool = False):
        self.hidden, self.rounds, self.before, self.best = hidden, total, 0, 0.0
        self.live = console.is_terminal and not console.is_jupyter and not hidden
        self.lines = not (self.live or hidden)
        self.bar = bars.Progress(
            bars.TextColumn("{task.description}", markup=False),
            bars.MofNCompleteColumn(),
            bars.BarColumn(bar_width=None),
            bars.TextColumn("{task.fields[numbers]}", markup=False),
            bars.TimeElapsedColumn(),
            bars.TextColumn("left"),
            bars.TimeRemainingColumn(compact=True),
            console=console,
            disable=not self.live,
        )
        self.task = self.bar.add_task("round", total=total, numbers="")

    def __enter__(self) -> "Progress":
        self.bar.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live or self.lines:
            self.bar.stop()

    def next_run(self, name: str, rounds: int) -> None:
        """Starts the next run."""
        self.best, self.rounds = 0.0, rounds
        self.bar.update(self.task, description=clean(name), completed=self.before, numbers="")
        if self.lines:
            left = self.bar.tasks[0].time_remaining
            words = f", about {in_words(left)} left" if left else ""
            console.print(f"{name}{words}", soft_wrap=True)

    def compiling(self) -> None:
        """Says that programs are being compiled, which takes up to a minute the first time."""
        self.bar.update(self.task, numbers="compiling, up to a minute the first time")

    def start(
        self, run_dir: Path | None, config: dict[str, Any], past: Sequence[Observation]
    ) -> None:
        if past:
            self.resume([observation.record for observation in past])

    def round(self, observation: Observation) -> None:
        self.show(observation.record)

    def resume(self, records: Sequence[Record]) -> None:
        """Continues after these rounds."""
        self.best = max((record.mean_accuracy or 0.0 for record in records), default=0.0)
        self.bar.reset(self.task, completed=self.before + len(records))
        if not self.hidden:
            console.print(f"resumed after round {len(records)}")
        if len(records) == self.rounds:
            self.before += self.rounds

    def show(self, record: Record) -> None:
        """Shows another round."""
        accuracy, number = record.mean_accuracy or 0.0, record.round
        self.best = max(self.best, accuracy)
        loss = "not finite" if record.loss is None else f"{record.loss:.3f}"
        words = f"acc {100 * accuracy:.1f} best {100 * self.best:.1f} loss {loss}"
        if not record.participants:
            words = f"all dropped out, best {100 * self.best:.1f}"
        elif record.dropped:
            words += f", {len(record.dropped)} dropped out"
        if record.not_finite:
            words += f", {record.not_finite} not finite"
        self.bar.update(self.task, completed=self.before + number, numbers=words)
        if number == self.rounds:
            self.before += self.rounds
        if self.lines and (number % max(1, self.rounds // 20) == 0 or number in (1, self.rounds)):
            everyone = record.all_clients_accuracy
            words += "" if everyone is None else f"  all clients {100 * everyone:.1f}"
            line = f"round {number}/{self.rounds}  {words}  {record.seconds:.1f} s"
            console.print(line, soft_wrap=True)


def in_words(seconds: float) -> str:
    """A duration, rounded for display.

    >>> in_words(40), in_words(290), in_words(9000), in_words(400_000)
    ('40 s', '5 min', '2.5 h', '4.6 days')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"


# -------------------------------------------------------------------------------- plan and result


def print_plan(
    federation: Federation, executor: Executor, name: str = "", run_dir: str | Path | None = None
) -> None:
    """Prints what the run will do; `name` is that of its settings, `run_dir` its folder."""
    config, method, data = federation.config, federation.method, federation.data
    pixels = "" if data.dtype == "uint8" or not data.sample else f"; {data.sample}"
    rows = {
        "data": data.source + pixels,
        "split": _split_in_words(federation),
        "clients": _clients_in_words(federation),
        "shared": f"{architecture_label(method.shared.name)}, "
        f"{human(method.shared.extractor_params)} parameters without header",
        "training": f"{config.rounds} rounds, E = {config.local_epochs}, "
        f"batch {config.batch_size}, learning rate {config.rate:g}",
        "per round": _costs_in_words(federation),
        "device": _devices_in_words(executor),
        "kernels": str(kernels.implementation()),
    }
    if run_dir is not None:
        rows["files"] = f"{run_dir}/"
        if config.checkpoint_every:
            rows["saved"] = f"every {config.checkpoint_every} rounds; the same command resumes"
    where = ", ".join(part for part in (config.dataset, name, f"seed {config.seed}") if part)
    console.print(Text.assemble((method.title, "bold"), f" on {clean(where)}"))
    print_table([], list(rows.items()))


def _split_in_words(federation: Federation) -> str:
    """How the clients share the data."""
    data, sizes = federation.data, federation.num_train
    words = f"{data.partition}; {sizes.min()} to {sizes.max()} training {data.noun} each"
    if data.num_users and federation.config.partition in PARTITIONS[:-1]:
        words += f"; the data's {data.num_users} users are not used (--partition natural)"
    return words


def _clients_in_words(federation: Federation) -> str:
    """How many clients there are, how many take part, and their networks."""
    config, method = federation.config, federation.method
    networks = [(config.num_clients, method.shared)]
    if not method.one_network:
        counts = np.bincount(federation.groups, minlength=len(federation.architectures))
        networks = list(zip(counts, federation.architectures, strict=True))
    shown = (f"{n} × {architecture_label(one.name)} ({human(one.params)})" for n, one in networks)
    dropping = f", {config.dropout:.0%} of them drop out" if config.dropout else ""
    return (
        f"{config.num_clients}, {config.num_participants} per round{dropping}; "
        f"parameters: {', '.join(shown)}"
    )


def _costs_in_words(federation: Federation) -> str:
    """What a round costs, in the mean over the clients that may be drawn."""
    config = federation.config
    costs = [federation.cost_of_visit(client) for client in range(config.num_clients)]
    up, down, flops = (
        human(config.num_participants * float(np.mean([getattr(cost, name) for cost in costs])))
        for name in ("floats_up", "floats_down", "flops")
    )
    return f"{up} floats up, {down} down, {flops}FLOP"


def _devices_in_words(executor: Executor) -> str:
    """What the run is computed on."""
    at_once = executor.clients_per_step if isinstance(executor, Engine) else 1
    return f"{executor.devices}, {at_once} client{'s' if at_once > 1 else ''} per step"


def print_summary(summary: Summary, paths: Sequence[Path]) -> None:
    """Prints the result of a run: a short table and the paths of the plots."""
    best, last_ten = summary.best_mean_accuracy, summary.last_ten_mean_accuracy
    everyone, spread = summary.final_all_clients_accuracy, summary.spread_over_clients
    note = f"round {summary.best_round}; the paper's convention"
    rows = [
        ["best mean of participants", f"{percent(best)} %", note],
        ["mean of the last ten rounds", f"{percent(last_ten)} %", "participants"],
        ["all clients at the end", f"{percent(everyone)} %", "no round chosen"],
    ]
    if spread is not None:
        rows.append(["spread over clients", f"{percent(spread)} points", "standard deviation"])
    compiling = f"and {summary.compile_seconds:.0f} s to compile"
    rows.append(["time", f"{summary.seconds / 60:.1f} min", compiling])
    if summary.diverged_at_round is not None:
        count = f"{summary.clients_not_finite} updates not finite, kept out"
        rows.append(["diverged", f"round {summary.diverged_at_round}", count])
    print_table([], rows)
    for path in paths:
        console.print(f"  {path}")


def _fitted(headings: Sequence[str], widths: Sequence[int], space: int) -> list[int]:
    """Widths of a table's columns, from those of their values: where space is short, headings are
    broken between words, and then names of the first column and words."""
    found = [max(len(heading), width) for heading, width in zip(headings, widths, strict=True)]
    words = [max(map(len, heading.split()), default=0) for heading in headings]
    for least in (list(map(max, words, widths)), [min(widths[0], 12), *widths[1:]]):
        while sum(found) + 2 * (len(found) - 1) > space and found != least:
            spare = [have - need for have, need in zip(found, least, strict=True)]
            found[spare.index(max(spare))] -= 1
    return found


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table, with its first column bold; below headings the others are right-aligned."""
    table = Table(box=None, pad_edge=False, title=title or None, title_justify="left")
    table.show_header, right = bool(headings), "right" if headings else "left"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Long names and headings are broken into lines rather than numbers, if that helps.
    if headings and rows and sum(widths[1:]) + 2 * len(widths) + 12 <= console.width:
        fitted = _fitted(headings, widths, console.width)
    else:
        fitted = [None] * len(headings or rows[0])
    for index, (heading, width) in enumerate(zip(headings or rows[0], fitted, strict=True)):
        style: Any = {"justify": right} if index else {"style": "bold"}
        narrow = not index and (not rows or widths[0] <= 24) and width is None
        table.add_column(heading, **style, width=width, no_wrap=narrow, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
