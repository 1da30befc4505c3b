"""`pfedafm serve` and `pfedafm node` as apps of Flower, for superlinks and supernodes of one's own."""

# pyright: reportMissingImports=false

import shlex
from functools import cache

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from pfedafm_jax.cli.commands.node import node_of
from pfedafm_jax.cli.commands.serve import serve
from pfedafm_jax.deploy.flower import Link, reply_to
from pfedafm_jax.deploy.node import Node

server_app = ServerApp()  # on lines of their own: Flower looks for them without importing this
client_app = ClientApp()


@server_app.main()
def _serve(grid: Grid, context: Context) -> None:
    serve(shlex.split(str(context.run_config["arguments"])), Link(grid))


@client_app.train()
@client_app.query()
def _node(message: Message, context: Context) -> Message:
    words = [(f"--{name}", str(value)) for name, value in context.node_config.items()]
    return reply_to(message, _node_of(tuple(sum(words, ()))).answer)


@cache
def _node_of(words: tuple[str, ...]) -> Node:
    return node_of(list(words))
