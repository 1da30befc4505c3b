"""The one exception type for everything a user can cause and mend."""

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_OVER = "--fresh (from Python: fresh=True) starts over"  # where a run cannot be resumed


class PfedafmError(Exception):
    """Bad input or a missing resource; the message says what was wrong and what to do next.

    The commands print the message alone and exit with code 2; from Python it is raised as it is.
    """

    exit_code = 2


class StorageError(PfedafmError):
    """Something could not be written in the middle of a run; the last checkpoint is still there."""

    exit_code = 1


class Interrupted(PfedafmError):
    """The run was asked to stop and has saved where it stands."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number  # as shells have it: 130 after Ctrl-C


def reason(error: BaseException) -> str:
    """The first line of what an error says; an `OSError` without its number and file."""
    return (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Whatever a library raises inside becomes a `PfedafmError`, `what (reason)`; ours stay.

    zipfile, numpy, Pillow and TFDS have no common type for damaged input.
    """
    try:
        with warnings.catch_warnings():  # Pillow's, of pictures that would take all memory
            warnings.filterwarnings("error", "Image size .* exceeds limit")
            yield
    except PfedafmError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {reason(error)}".removesuffix(": ")
        raise PfedafmError(f"{what} ({text[:300]})") from error


def disk_is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that there is no space (or quota) left."""
    return _says(error, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _says(error: BaseException | None, *numbers: int) -> bool:
    """Whether an error, or one that it came from, has one of these numbers or speaks of it."""
    words, seen = [os.strerror(number) for number in numbers], set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if getattr(error, "errno", None) in numbers or any(word in str(error) for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def storage_error(what: str, folder: Path, error: BaseException) -> StorageError:
    """For something that could not be written: what, why, and what to free on a full disk."""
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
