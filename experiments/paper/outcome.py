"""The result of an item: tables, the paper's claims beside our findings, and a plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.base.terminal import console
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.run import Run
from pfedafm_jax.results.tables import markdown, mean_and_deviation, percent
from pfedafm_jax.runs.progress import print_table

PAPER = style.BLACK  # the paper's own numbers in pictures
BEST, LAST_TEN = "best_mean_accuracy", "last_ten_mean_accuracy"
EVERYONE = "final_all_clients_accuracy"
SCORES = ("best, %", "last ten, %", "all clients, %", "rounds", "seeds")


def score(runs: Sequence[Run], name: str = BEST) -> tuple[float | None, float | None]:
    """Mean and deviation over seeds of a number of the summary."""
    return mean_and_deviation([getattr(run.summary, name) for run in runs])


def mean(runs: Sequence[Run], name: str = BEST) -> float:
    """The mean over seeds in percent, for pictures; NaN where there is none."""
    value = score(runs, name)[0]
    return np.nan if value is None else 100 * value


def diverged(runs: Sequence[Run]) -> str:
    """A mark for the first round in which an update was not finite."""
    known = [n for run in runs if (n := run.summary.diverged_at_round) is not None]
    return f" (✗ diverged at round {min(known)})" if known else ""


def lengths(runs: Sequence[Run]) -> str:
    """How long runs were: `20`, or `20 to 40` where they differ."""
    found = sorted({run.summary.rounds for run in runs}) or ["–"]
    return " to ".join(dict.fromkeys(str(number) for number in (found[0], found[-1])))


def scores(runs: Sequence[Run]) -> list[str]:
    """The cells of `SCORES`."""
    best, *others = (percent(*score(runs, name)) for name in (BEST, LAST_TEN, EVERYONE))
    return [best + diverged(runs), *others, lengths(runs), str(len(runs))]


@dataclass(frozen=True)
class Table:
    """Rows of text under a heading; the first column is for names, the others for numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        title = f"**{self.title}**\n\n" if self.title else ""
        return title + markdown(self.columns, self.rows)


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, and whether it holds here; None: not enough data."""

    text: str
    seen: bool | None
    detail: str = ""

    def line(self) -> str:
        answer = {True: "yes", False: "no", None: "cannot be told from these runs"}[self.seen]
        return f"{self.text} Here: {answer}{', ' + self.detail if self.detail else ''}."


def everywhere(text: str, seen: Sequence[bool], where: str) -> Claim:
    """A claim that must hold at each of several points; `where` says what these are.

    >>> everywhere("It is above.", [True, False], "points").line()
    'It is above. Here: no, at 1 of 2 points.'
    """
    detail = f"at {sum(seen)} of {len(seen)} {where}"
    return Claim(text, all(seen), detail) if seen else Claim(text, None)


@dataclass(frozen=True)
class Outcome:
    """An item, finished."""

    title: str
    tables: Sequence[Table]
    figure: Figure
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()

    def markdown(self, head: str = "", picture: str = "") -> str:
        parts = [f"# {self.title}", head, f"![{self.title}]({picture})" if picture else ""]
        parts += [table.markdown().rstrip("\n") for table in self.tables]
        if self.claims:
            lines = "\n".join(f"- {claim.line()}" for claim in self.claims)
            parts.append(f"What the paper says:\n\n{lines}")
        return "\n\n".join(part for part in (*parts, *self.notes) if part) + "\n"

    def save(self, folder: Path, item: str, head: str = "") -> list[Path]:
        """Writes `item.md` and `item.png`; returns their paths."""
        folder.mkdir(parents=True, exist_ok=True)
        picture = plots.save(self.figure, folder / f"{item}.png")
        write_atomically(folder / f"{item}.md", self.markdown(head, picture.name))
        return [folder / f"{item}.md", picture]

    def show(self) -> None:
        console.print(f"\n{self.title}", style="bold")
        for table in self.tables:
            print_table(table.columns, table.rows, table.title)
        for claim in self.claims:
            console.print(f"- {claim.line()}", style="dim")
