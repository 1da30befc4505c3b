"""The errors that a user can cause and fix, and their sentences: what it was, what is accepted."""

import difflib
import errno
import os
import shutil
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_OVER = "--fresh (from Python: fresh=True) starts over"  # said if a run cannot be resumed


class PfedafmError(Exception):
    """Bad input or a missing resource; the message says what is wrong and what to do about it.

    Commands print the message without a traceback and exit with `exit_code`.
    """

    exit_code = 2


class StorageError(PfedafmError):
    """A write failed in the middle of a run; the last checkpoint is intact."""

    exit_code = 1


class Interrupted(PfedafmError):
    """The run was asked to stop, and did after saving its state."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number  # the shell's convention: 130 after Ctrl-C


class Unread(PfedafmError):
    """Whoever read the output has gone, as after `| head`; there is nobody to tell."""

    exit_code = 141  # the shell's convention: 128 + SIGPIPE


def reason(error: BaseException) -> str:
    """The first line of an error's message; an `OSError` without its number and file name."""
    return (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turns any exception raised inside into a `PfedafmError` that says `what (reason)`.

    zipfile, numpy, Pillow and TFDS have no common exception for damaged input.
    """
    try:
        with warnings.catch_warnings():  # Pillow warns of images that would fill the memory
            warnings.filterwarnings("error", "Image size .* exceeds limit")
            yield
    except PfedafmError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {reason(error)}".removesuffix(": ")
        raise PfedafmError(f"{what} ({text[:300]})") from error


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that caused it, says that no space (or quota) is left."""
    return _says(error, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _says(error: BaseException | None, *numbers: int) -> bool:
    """Whether an error, or one that caused it, has one of these numbers or quotes its message."""
    words, seen = [os.strerror(number) for number in numbers], set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in numbers or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def storage_error(what: str, folder: Path, error: BaseException) -> StorageError:
    """The error for a failed write: what failed, why, and how to make room on a full disk."""
    if not disk_is_full(error):
        return StorageError(f"{what} could not be written ({reason(error)})")
    try:
        free = f"{shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    except OSError:
        free = "full"
    why = f"no space left on the disk of {folder} ({free})"
    mend = "Free some, for example the checkpoints of finished runs"
    if _says(error, errno.EFBIG):
        why, mend = "files may not grow so large here", "Raise the limit (ulimit -f)"
    return StorageError(
        f"{what} could not be written: {why}. {mend}, then start the same command again: it "
        "resumes from the last checkpoint"
    )


def bad(setting: str, value: object, accepted: str) -> PfedafmError:
    """The error for a bad setting: its name, its value, what is accepted."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4300 digits
        text = "a number of thousands of digits"
    return PfedafmError(f"{setting} = {text} cannot be used; accepted: {accepted}")


def whole(setting: str, value: Any, limit: int, accepted: str) -> int:
    """A whole number from 0 to below the limit, Python's or numpy's; raises for anything else."""
    is_whole = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_whole or not 0 <= value < limit:
        raise bad(setting, value, accepted)
    return int(value)


def suggestion(name: object, names: Iterable[str]) -> str:
    """` (did you mean b?)`, or nothing if no name is similar.

    >>> suggestion("round", ["rounds", "seed"])
    ' (did you mean rounds?)'
    """
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def known(name: object, names: Iterable[str]) -> str:
    """`a, b, c (did you mean b?)`"""
    names = list(names)
    return ", ".join(names) + suggestion(name, names)
