"""From simulation to a real federation: the same methods over a network, on Flower.

`pfedafm serve` is the server and `pfedafm node` a client; `docs/deploy.md` says how they are used.
What differs from the simulator is where a client's work is done, and nothing else.

wire.py      trees of arrays as bytes, messages as JSON and bytes; nothing is ever unpickled
node.py      one client: its data, its answers to the server
server.py    rounds as questions to nodes, an `Executor`; roster.py who they are, and their federation
flower.py    Flower's processes and messages under both; the only file that imports it
launch.py    starts Flower's superlink and supernode
certs.py     an authority, the server's certificate, a key for each node

It may import every folder before it; only the command line imports it.
"""

import errno
import socket
import time
from importlib import import_module
from typing import Any

from pfedafm_jax.base.errors import PfedafmError, bad, reason

LOCAL = ("127.0.0.1", "localhost", "::1")


def needed(module: str) -> Any:
    """`flower` or `certs`; says how to install what it needs."""
    try:
        return import_module(f"pfedafm_jax.deploy.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pfedafm_jax"):
            raise
        words = (
            f"this needs Flower ({error.name} is missing): pip install -e '.[flower]' in a checkout"
        )
        raise PfedafmError(words) from error


def address(setting: str, text: str, certs: str | None) -> tuple[str, int]:
    """`HOST:PORT` in two; without certificates only addresses of this machine."""
    host, _, port = text.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise bad(setting, text, "HOST:PORT, such as 127.0.0.1:18000")
    if certs is None and host not in LOCAL:
        raise bad(setting, text, "127.0.0.1:PORT without --certs DIR (pfedafm certs)")
    return host, int(port)


def check_free(host: str, port: int, patience: float = 10.0) -> None:
    """Raises if nothing can listen there; the superlink of a server that was killed ends soon."""
    family, end = socket.AF_INET6 if ":" in host else socket.AF_INET, time.monotonic() + patience
    while True:
        try:
            with socket.socket(family) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                return one.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                accepted = f"an address of this machine with a port that is free ({reason(error)})"
                raise bad("listen", f"{host}:{port}", accepted) from error
        time.sleep(0.2)
