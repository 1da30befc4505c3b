"""Flower's own superlink or supernode as a child of ours: `launch.py superlink|supernode PARENT …`.

Run as a file, so that it imports Flower and nothing of this package. Three things are added: it
ends with its parent, however that ends; a supernode asks for work more often than every three
seconds; a superlink takes no request that is larger than any piece of a message.
"""

# pyright: reportMissingImports=false

import os
import sys
import threading
import time
import types
from typing import Any

POLL = 0.25  # seconds between two questions of a supernode
LARGEST = 8 * 2**20  # bytes of a request: Flower cuts messages into pieces of 5 MiB


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

            shorter = {"sleep": lambda seconds: time.sleep(min(seconds, POLL))}
            setattr(loop, "time", types.SimpleNamespace(**vars(time) | shorter))  # noqa: B010
            flower_supernode()
    finally:  # a supernode that has lost its superlink would stay with its threads
        sys.stderr.flush()
        os._exit(1)


def limited(app: Any) -> Any:
    """An ASGI application that answers 413 to requests of more than `LARGEST` bytes."""

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        headers, seen = dict(scope["headers"]), 0

        async def refuse(why: str) -> None:
            print(f"refused: {why} from {scope.get('client')}", file=sys.stderr, flush=True)
            await send({"type": "http.response.start", "status": 413, "headers": []})
            await send({"type": "http.response.body", "body": b"too large"})

        async def counted() -> Any:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > LARGEST:
                raise ValueError(f"more than {LARGEST} bytes in a request")
            return message

        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LARGEST:
            return await refuse(f"{length.decode(errors='replace')[:20]} bytes")
        await app(scope, counted, send)

    return handle


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


if __name__ == "__main__":
    main()
