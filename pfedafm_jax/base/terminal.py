"""What is printed for people: text that is safe to print, and the console.

`console` never interprets markup, since names and paths come from outside. Use `bold` or `style=`.
"""

from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from pfedafm_jax.base.errors import StorageError, Unread, reason


def clean(text: object) -> str:
    """Text that is safe to print: control characters and lone surrogates are escaped.

    >>> clean("a\\x1b[31m \\udcff é")
    'a\\\\x1b[31m \\\\udcff é'
    """
    return "".join(
        one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode()
        for one in str(text)
    )


class _Terminal(Console):
    def print(self, *words: Any, **options: Any) -> None:
        try:
            super().print(*words, **options)
        except OSError as error:  # so that it is not mistaken for an error of the run's files
            raise StorageError(f"standard output cannot be written ({reason(error)})") from error

    def on_broken_pipe(self) -> NoReturn:
        raise Unread

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean(text), **options)


console = _Terminal(markup=False, emoji=False, highlight=False, soft_wrap=False)


def bold(text: object) -> Text:
    """Text in bold, for `console.print`."""
    return Text(clean(text), "bold")
