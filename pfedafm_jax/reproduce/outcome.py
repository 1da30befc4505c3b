"""What an item gives: tables, the paper's claims beside what was seen here, and a picture; as files and in a terminal."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table as TerminalTable

from pfedafm_jax import plots
from pfedafm_jax.data.atomic import write_atomically

PAPER = "#111111"  # the paper's own numbers in pictures


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column is for names, the others for numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"**{self.title}**\n"] if self.title else []
        lines.append("| " + " | ".join(self.columns) + " |")
        lines.append("|---|" + "---:|" * (len(self.columns) - 1))
        lines += ["| " + " | ".join(row) + " |" for row in self.rows]
        return "\n".join(lines) + "\n"

    def show(self, console: Console) -> None:
        table = TerminalTable(box=None, pad_edge=False, title=self.title or None, title_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="right" if index else "left", style=None if index else "bold")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)


@dataclass(frozen=True)
class Claim:
    """Something the paper says, and whether it was seen here; None: there was nothing to tell it by."""

    text: str
    seen: bool | None
    detail: str = ""

    def line(self) -> str:
        answer = {True: "yes", False: "no", None: "cannot be told from these runs"}[self.seen]
        return f"{self.text} Here: {answer}{', ' + self.detail if self.detail else ''}."


@dataclass(frozen=True)
class Outcome:
    """An item, finished."""

    title: str
    tables: Sequence[Table]
    figure: Figure
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    numbers: dict[str, Any] = field(default_factory=dict)  # for the JSON file

    def markdown(self, head: str = "", picture: str = "") -> str:
        parts = [f"# {self.title}\n"]
        if head:
            parts.append(head + "\n")
        if picture:
            parts.append(f"![{self.title}]({picture})\n")
        parts += [table.markdown() for table in self.tables]
        if self.claims:
            parts.append("What the paper says:\n\n" + "\n".join(f"- {claim.line()}" for claim in self.claims) + "\n")
        if self.notes:
            parts.append("\n".join(self.notes) + "\n")
        return "\n".join(parts)

    def save(self, folder: Path, item: str, head: str = "") -> list[Path]:
        """Writes `item.md`, `item.png` and `item.json`."""
        folder.mkdir(parents=True, exist_ok=True)
        picture = plots.save(self.figure, folder / f"{item}.png")
        content = {
            "item": item,
            "title": self.title,
            "about": head,
            "tables": [{"title": t.title, "columns": list(t.columns), "rows": [list(r) for r in t.rows]}
                       for t in self.tables],
            "claims": [{"text": c.text, "seen": c.seen, "detail": c.detail} for c in self.claims],
            "notes": list(self.notes),
            "numbers": self.numbers,
        }  # fmt: skip
        text = self.markdown(head, picture.name)
        write_atomically(folder / f"{item}.md", lambda file: file.write(text.encode()))
        data = json.dumps(content, indent=2) + "\n"
        write_atomically(folder / f"{item}.json", lambda file: file.write(data.encode()))
        return [folder / f"{item}.md", picture, folder / f"{item}.json"]

    def show(self, console: Console) -> None:
        console.print(f"\n[bold]{self.title}[/bold]")
        for table in self.tables:
            table.show(console)
        for claim in self.claims:
            console.print(f"- {claim.line()}", style="dim")
        for note in self.notes if not self.tables else ():
            console.print(note, markup=False)


# ---------------------------------------------------------------------------------------------- numbers and pictures


def percent(value: float | None, deviation: float | None = None) -> str:
    """A share as a number of percent.

    >>> percent(0.9168), percent(0.9168, 0.0041), percent(None)
    ('91.68', '91.68 ± 0.41', '–')
    """
    if value is None:
        return "–"
    return f"{100 * value:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def mean_and_deviation(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Over seeds; the deviation of one value, and the mean of none, are None."""
    known = [value for value in values if value is not None]
    deviation = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return (float(np.mean(known)) if known else None), deviation


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure of `rows` x `columns` plain axes, each of this size."""
    figure = Figure(figsize=(max(6.5, width * columns), max(3.0, height * rows)), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, **options)
    for axes in grid.reshape(-1):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
    return figure, grid.tolist()
