"""How far a run is: a bar in a terminal or in a notebook, plain lines now and then elsewhere."""

import contextlib
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

console = Console(highlight=False, soft_wrap=False)


class Cell:
    """A place in a notebook cell's output that is written anew each time (rich's own way needs ipywidgets)."""

    def __init__(self, text: str, html: str = ""):
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        self._place: Any = display(self._both(text, html), raw=True, display_id=True)

    def show(self, text: str, html: str = "") -> None:
        self._place.update(self._both(text, html), raw=True)

    @staticmethod
    def _both(text: str, html: str) -> dict[str, str]:
        return {"text/plain": text, "text/html": html or f"<small>{escape(text)}</small>"}


@contextlib.contextmanager
def waiting(text: str, hidden: bool = False) -> Iterator[None]:
    """Says what is waited for, as long as it lasts."""
    if hidden:
        yield
    elif console.is_jupyter:
        cell = Cell(text)
        yield
        cell.show("")
    else:
        with console.status(text):
            yield


class Watch:
    """A progress bar in a terminal or a notebook; plain lines now and then elsewhere. It may cover several runs."""

    def __init__(self, rounds: int, runs: int = 1, hidden: bool = False):
        self.rounds, self.best, self.before, self.hidden = rounds, 0.0, 0, hidden
        self.cell = Cell("") if console.is_jupyter and not hidden else None
        self.live = console.is_terminal and not console.is_jupyter and not hidden
        self.lines = not (self.live or self.cell or hidden)
        self.every = max(1, rounds // 20)
        self.progress = Progress(
            TextColumn("{task.description}"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not self.live,
        )
        self.task = self.progress.add_task("round", total=rounds * runs, numbers="")

    def __enter__(self) -> "Watch":
        self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.live or self.lines:
            self.progress.stop()

    def _update(self, **changes: Any) -> None:
        self.progress.update(self.task, **changes)
        if self.cell is not None:
            task = self.progress.tasks[0]
            left = task.time_remaining
            words = f"{task.description} {task.completed:.0f}/{task.total:.0f}  {task.fields['numbers']}"
            words += f"  {task.elapsed or 0:.0f} s" + (f", {left:.0f} s left" if left else "")
            bar = f'<progress value="{task.completed}" max="{task.total}" style="width: 16em"></progress> '
            self.cell.show(words, bar + escape(words))

    def next_run(self, name: str, done: bool = False) -> None:
        """Another run begins, or is `done` already."""
        self.best = 0.0
        self._update(description=name, completed=self.before, numbers="")
        if done:
            self.before += self.rounds
            self._update(completed=self.before)
        elif self.lines:
            print(name, flush=True)

    def resume(self, records: Sequence[dict[str, Any]]) -> None:
        """The run goes on after these."""
        self.best = max((record["mean_accuracy"] or 0.0 for record in records), default=0.0)
        self.progress.reset(self.task, completed=self.before + len(records))
        if not self.hidden:
            console.print(f"going on after round {len(records)}")
        if len(records) == self.rounds:
            self.before += self.rounds

    def show(self, record: dict[str, Any]) -> None:
        """One round more."""
        mean, loss = record["mean_accuracy"] or 0.0, record["loss"]
        self.best = max(self.best, mean)
        loss_text = "not finite" if loss is None else f"{loss:.3f}"
        numbers = f"acc {100 * mean:.1f} best {100 * self.best:.1f} loss {loss_text}"
        if record["not_finite"]:
            numbers += f", {record['not_finite']} not finite"
        self._update(completed=self.before + record["round"], numbers=numbers)
        if record["round"] == self.rounds:
            self.before += self.rounds
        if self.lines and (record["round"] % self.every == 0 or record["round"] in (1, self.rounds)):
            everyone = record["all_clients_accuracy"]
            extra = "" if everyone is None else f"  all clients {100 * everyone:.1f}"
            print(f"round {record['round']}/{self.rounds}  {numbers}{extra}  {record['seconds']:.1f} s", flush=True)
