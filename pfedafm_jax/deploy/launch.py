"""Flower's own superlink or supernode as a child of ours: `started`.

This file is what the child runs, `launch.py superlink|supernode PARENT …`, so that it imports Flower
and nothing of this package. Four things are added: it ends with its parent, however that ends; a
supernode asks for work more often than every three seconds, and again sooner for what is still on
its way; a superlink takes no request that is larger than any piece of a message.
"""

# pyright: reportMissingImports=false

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

POLL = 0.1  # seconds between two questions for something that is on its way
LARGEST = 8 * 2**20  # bytes of a request: Flower cuts messages into pieces of 5 MiB
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}

# ------------------------------------------------------------------------------------- the parent


@contextlib.contextmanager
def started(which: str, flags: list[str], place: Path) -> Iterator[tuple[subprocess.Popen, bytes]]:
    """A process of Flower's, and the secret by which we may take its tasks; its files and its log
    are in `place`."""
    place.mkdir(parents=True, exist_ok=True)
    secret = secrets.token_bytes(32)
    with tempfile.NamedTemporaryFile() as file, (place / f"{which}.log").open("ab") as lines:
        file.write(secret)
        file.flush()
        words = [sys.executable, "-P", __file__, which, str(os.getpid()), *flags]
        process = subprocess.Popen(
            [*words, "--superexec-auth-secret-file", file.name],
            env={**os.environ, **QUIET, "FLWR_HOME": str(place.absolute())},
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        try:
            yield process, secret
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    """A port of this machine that nobody uses at the moment."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def last_words(path: Path) -> str:
    """What a process of Flower's said of its end, from its log."""
    from pfedafm_jax.base.files import read_bytes  # here, since the child imports nothing of ours

    with contextlib.suppress(OSError):
        text = re.sub("\x1b\\[\\d+m", "", read_bytes(path)[-6000:].decode(errors="replace"))
        lines = text[max(text.rfind("ERROR"), 0) :].removeprefix("ERROR").strip(" :").splitlines()
        return "; ".join(line.strip() for line in lines[:3])
    return "it has ended"


# -------------------------------------------------------------------------------------- the child


def main() -> None:
    which, parent = sys.argv[1], int(sys.argv[2])
    sys.argv = [f"flower-{which}", *sys.argv[3:]]
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        if which == "superlink":
            import uvicorn
            from flwr.superlink.cli.flower_superlink import flower_superlink

            run: Any = uvicorn.run
            uvicorn.run = lambda app, **options: run(
                limited(app), **options | {"access_log": False, "log_config": None}
            )
            flower_superlink()
        else:
            from flwr.supernode import start_client_internal as loop
            from flwr.supernode.cli.flower_supernode import flower_supernode

            retry_soon()
            sooner = {"sleep": lambda seconds: time.sleep(seconds / 10)}  # it has 3 s and 0.5 s
            setattr(loop, "time", types.SimpleNamespace(**vars(time) | sooner))  # noqa: B010
            flower_supernode()
    finally:  # a supernode that has lost its superlink would stay with its threads
        sys.stderr.flush()
        os._exit(1)


def retry_soon() -> None:
    """Has Flower ask again soon for a piece that is still on its way; it would wait a second."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects

    assert pull_objects.__kwdefaults__ is not None
    pull_objects.__kwdefaults__ |= {"initial_backoff": POLL, "backoff_cap": 1.0}


def limited(app: Any) -> Any:
    """An ASGI application that answers 413 to requests of more than `LARGEST` bytes."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        seen = 0

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > LARGEST:
                raise ValueError(f"more than {LARGEST} bytes in a request")
            return message

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) <= LARGEST:
            return await app(scope, counted, send)
        words = f"refused: {length.decode(errors='replace')[:20]} bytes from {scope.get('client')}"
        print(words, file=sys.stderr, flush=True)
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"too large"})

    return handle


def _end_with(parent: int) -> None:
    """Ends this process after its parent, if possible in order: a supernode then tells the superlink
    that it goes."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(3.0)
    os._exit(1)


if __name__ == "__main__":
    main()
