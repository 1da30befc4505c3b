"""A C++ library that aborts, such as for lack of memory: what is said then."""

import ctypes
import faulthandler
import os
import signal
from collections.abc import Callable
from typing import Any

_handlers: list[Any] = []  # keeps them alive: C has only their addresses


def on_abort(handle: Callable[[int], None]) -> None:
    """Calls `handle` with the signal's number if a C++ library aborts."""
    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(handle))
    ctypes.CDLL(None).signal(signal.SIGABRT, _handlers[-1])


def explain_aborts() -> None:
    """Prints a message, and exits with code 1, if a C++ library aborts for lack of memory."""

    def aborted(number: int) -> None:
        os.write(
            2, b"error: not enough memory on this machine, or a library failed as it says above\n"
        )
        os._exit(1)

    if os.name == "posix" and not faulthandler.is_enabled():
        on_abort(aborted)
