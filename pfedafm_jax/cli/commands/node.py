"""A client of a real federation: `pfedafm node --server HOST:PORT --client 3 --data my.npz`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.base.terminal import console
from pfedafm_jax.cli.options import CommandOptions, read_options
from pfedafm_jax.cli.plugins import load_plugin

if TYPE_CHECKING:
    from pfedafm_jax.deploy.node import Node


class NodeOptions(CommandOptions):
    """What `pfedafm node` takes."""

    placeholders: ClassVar[dict[str, str]] = {
        "client": "K",
        "data": "PATH",
        "state": "DIR",
        "architecture": "NAME",
        "certs": "DIR",
        "data_dir": "DIR",
        "plugin": "FILE.py",
    }

    server: str = "127.0.0.1:18000"
    """Where the server listens."""
    client: Annotated[int, Ge(0)]
    """Its number, 0 to N - 1."""
    data: str
    """.npz with images, labels, test_images, test_labels; one folder per class in train/ and test/;
    or, to rehearse, a dataset that all can have: its share is taken."""
    state: str
    """A folder for its private weights."""
    architecture: str | None = None
    """Of its network (as the simulator would have it)."""
    certs: str | None = None
    """Has ca.crt and nodes/client-K, this node's key."""
    data_dir: str | None = None
    """Folder or archive with the dataset, to rehearse."""
    plugin: tuple[str, ...] = ()
    """As the server has it."""


def read(words: list[str]) -> NodeOptions:
    """The options of these words."""
    return read_options(words, "node", __doc__ or "", NodeOptions)


def node_of(words: list[str]) -> "Node":
    """The node that these words describe."""
    asked = read(words)

    from pfedafm_jax.deploy.node import Node
    from pfedafm_jax.engine import setup_devices
    from pfedafm_jax.inference.states import States

    os.umask(0o077)  # what it writes is for its owner alone
    for file in asked.plugin:
        load_plugin(file)
    setup_devices(1)
    states = States(asked.state)
    return Node(asked.client, states, asked.data, asked.architecture, asked.data_dir, console.print)


def main(words: list[str]) -> int:
    """Answers a server until the federation is finished."""
    asked = read(words)

    from pfedafm_jax.deploy import address, needed

    address("server", asked.server, asked.certs)
    flower = needed("flower")
    authority = key = None
    if asked.certs is not None:
        authority = Path(asked.certs) / "ca.crt"
        key = Path(asked.certs) / "nodes" / f"client-{asked.client}"
        for path in (authority, key):
            if not path.is_file():
                raise PfedafmError(f"{path} is missing; whoever ran pfedafm certs has it")
    node = node_of(words)
    with node.states.locked():
        console.print(f"client {node.client}, server {asked.server}, state in {node.states.place}")
        folder = node.states.place / "flower"
        console.print(f"it waits for the server, however long; {folder}/supernode.log is Flower's")
        flower.answer_forever(asked.server, authority, key, folder, node, console.print)
    if node.left:
        raise PfedafmError(node.left)
    console.print("the federation is finished")
    return 0
