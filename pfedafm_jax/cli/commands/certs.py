"""Makes certificates and keys for a federation: `pfedafm certs --out DIR --hosts fl.example.org`."""

import argparse

from pfedafm_jax.base.errors import bad
from pfedafm_jax.base.files import check_writable
from pfedafm_jax.deploy import needed
from pfedafm_jax.runs.progress import clean, console


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("pfedafm certs", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="a new folder")
    add("--hosts", nargs="+", default=["127.0.0.1", "localhost"], metavar="HOST",
        help="names and addresses by which nodes reach the server (127.0.0.1 localhost)")  # fmt: skip
    add("--clients", type=int, default=100, metavar="N", help="number of client keys (100)")
    asked = parser.parse_args(argv)
    if not 0 < asked.clients <= 10**5:
        raise bad("clients", asked.clients, "1 to 100000")
    check_writable(asked.out, "out")
    hosts = [host for words in asked.hosts for host in words.split(",")]
    needed("certs").make(asked.out, hosts, asked.clients)
    where = clean(asked.out)
    console.print(f"{where}/ca.crt: for every node\n{where}/nodes/client-K: for node K alone")
    console.print(f"{where}/server.key and the rest: for the server alone")
    return 0
