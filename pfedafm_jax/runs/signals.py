"""Ctrl-C, SIGTERM, SIGHUP: the first lets the round finish and save, the second exits at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
    NAMES[signal.SIGHUP] = "SIGHUP"


class Signals:
    """A context in which the first signal, inside `saved_at_the_end_of_a_round`, only sets
    `received`; the second, or the first elsewhere, ends the process.

    Python runs signal handlers only between bytecodes of the main thread, which a round blocks for
    long. So a separate thread reads the signals.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._saving = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can set handlers
        read, write = os.pipe()
        os.set_blocking(write, False)
        threading.Thread(target=self._listen, args=(read,), daemon=True).start()
        self._before = {number: signal.signal(number, _noted) for number in NAMES}
        self._wakeup, self._write = signal.set_wakeup_fd(write), write
        return self

    def __exit__(self, *error: object) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup)
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            os.close(self._write)  # ends the thread

    @contextlib.contextmanager
    def saved_at_the_end_of_a_round(self) -> Iterator[None]:
        """Inside this context, a first signal waits for the round to end."""
        self._saving = True
        try:
            yield
        finally:
            self._saving = False

    def _listen(self, read: int) -> None:
        while received := os.read(read, 1):
            number = received[0]
            if number not in NAMES:
                continue
            name = NAMES[signal.Signals(number)]
            if not self._saving or self.received is not None:
                print(f"\nstopped immediately ({name})", file=sys.stderr, flush=True)
                os._exit(128 + number)
            self.received = number
            words = f"\n{name}: finishing this round and saving; once more stops immediately"
            print(words, file=sys.stderr, flush=True)
        os.close(read)


def _noted(number: int, frame: FrameType | None) -> None:
    """Does nothing: the thread handles the signal."""
