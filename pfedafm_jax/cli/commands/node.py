"""A client of a real federation: `pfedafm node --server HOST:PORT --client 3 --data my.npz`."""

import argparse
import os
from pathlib import Path

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.deploy import address, needed
from pfedafm_jax.deploy.node import Node
from pfedafm_jax.engine import setup_devices
from pfedafm_jax.inference.states import States
from pfedafm_jax.runs.progress import console


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("pfedafm node", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--server", default="127.0.0.1:18000", metavar="HOST:PORT", help="where the server listens")
    add("--client", type=int, required=True, metavar="K", help="its number, 0 to N - 1")
    add("--data", required=True, metavar="PATH",
        help=".npz with images, labels, test_images, test_labels; one folder per class in train/ and "
             "test/; or, to rehearse, a dataset that all can have: its share is taken")  # fmt: skip
    add("--state", required=True, metavar="DIR", help="a folder for its private weights")
    add("--architecture", metavar="NAME", help="of its network (as the simulator would have it)")
    add("--certs", metavar="DIR", help="has ca.crt and nodes/client-K, this node's key")
    add("--data-dir", metavar="DIR", help="folder or archive with the dataset, to rehearse")
    add("--plugin", action="append", default=[], metavar="FILE.py", help="as the server has it")
    return parser


def node_of(argv: list[str]) -> Node:
    """The node that these words describe."""
    asked = _parser().parse_args(argv)
    os.umask(0o077)  # what it writes is for its owner alone
    if asked.client < 0:
        raise bad("client", asked.client, "0 to N - 1")
    for file in asked.plugin:
        load_plugin(file)
    setup_devices(1)
    states = States(asked.state)
    return Node(asked.client, states, asked.data, asked.architecture, asked.data_dir, console.print)


def main(argv: list[str]) -> int:
    asked = _parser().parse_args(argv)
    address("server", asked.server, asked.certs)
    flower, authority, key = needed("flower"), None, None
    if asked.certs is not None:
        authority = Path(asked.certs) / "ca.crt"
        key = Path(asked.certs) / "nodes" / f"client-{asked.client}"
        for path in (authority, key):
            if not path.is_file():
                raise PfedafmError(f"{path} is missing; whoever ran pfedafm certs has it")
    node = node_of(argv)
    with node.states.locked():
        console.print(f"client {node.client}, server {asked.server}, state in {node.states.place}")
        place = node.states.place / "flower"
        console.print(f"it waits for the server, however long; {place}/supernode.log is Flower's")
        flower.answer_forever(asked.server, authority, key, place, node, console.print)
    if node.left:
        raise PfedafmError(node.left)
    console.print("the federation is finished")
    return 0
