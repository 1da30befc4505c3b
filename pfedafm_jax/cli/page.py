"""The look of the help: headings, flags with their present values, and what they mean, in 80 columns."""

import textwrap
from typing import Any

from cyclopts.help import HelpEntry, HelpPanel
from rich.console import Console, ConsoleOptions

WIDTH = 80
LABEL = 26
"""Columns of a flag and its value; a longer one has its text on the next line."""


def first_sentence(text: str) -> str:
    """The first sentence of a help text, for `--help`.

    >>> first_sentence("Images per step. The last, partial batch of an epoch is kept.")
    'Images per step.'
    """
    sentence, dot, _ = text.partition(". ")
    return sentence + "." if dot else sentence


class Page:
    """A formatter of cyclopts: what it calls a panel becomes a heading and lines below it."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if panel.entries:
            write(console, ["", f"{panel.title}:"])
        for entry in panel.entries:
            write(console, entry_lines(label_of(entry), text_of(entry)))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        write(console, [str(usage).strip(), ""])

    def render_description(
        self, console: Console, options: ConsoleOptions, description: Any
    ) -> None:
        write(console, textwrap.wrap(text_of(description), WIDTH, break_on_hyphens=False))


def label_of(entry: HelpEntry) -> str:
    """A flag with its value, `--rounds 40`, or, if it is a switch, `--same-start (on)` and `--flip`;
    or the name of an argument."""
    if entry.positional_label:
        return entry.positional_label
    name = entry.positive_names[0]
    if entry.metavar:
        return f"{name} {entry.metavar}"
    return f"{name} ({entry.default})" if entry.default else name


def entry_lines(label: str, text: str) -> list[str]:
    """A flag and its text in two columns."""
    indent = " " * (LABEL + 2)
    wrapped = textwrap.wrap(text, WIDTH - len(indent), break_on_hyphens=False)
    if len(label) > LABEL - 2:
        return [f"  {label}", *(indent + line for line in wrapped)]
    first, *rest = wrapped or [""]
    return [f"  {label:<{LABEL}}{first}".rstrip(), *(indent + line for line in rest)]


def text_of(value: Any) -> str:
    """The plain text of an entry, or of whatever cyclopts made of a text."""
    if isinstance(value, HelpEntry):
        value = value.description
    if value is None:
        return ""
    console = Console(width=10_000, force_terminal=False, no_color=True)
    with console.capture() as captured:
        console.print(value, end="")
    return captured.get().strip()


def write(console: Console, lines: list[str]) -> None:
    """Prints lines as they are."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
