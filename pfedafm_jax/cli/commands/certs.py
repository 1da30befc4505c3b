"""Makes certificates and keys for a federation: `pfedafm certs --out DIR --hosts fl.example.org`."""

from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from pfedafm_jax.base.terminal import clean, console
from pfedafm_jax.cli.options import CommandOptions, read_options


class CertsOptions(CommandOptions):
    """What `pfedafm certs` takes."""

    placeholders: ClassVar[dict[str, str]] = {"out": "DIR"}

    out: str
    """A new folder."""
    hosts: tuple[str, ...] = ("127.0.0.1", "localhost")
    """Names and addresses by which nodes reach the server."""
    clients: Annotated[int, Ge(1), Le(10**5)] = 100
    """Number of client keys."""


def main(words: list[str]) -> int:
    """Writes the certificates that these words ask for."""
    asked = read_options(words, "certs", __doc__ or "", CertsOptions)

    from pfedafm_jax.base.files import check_writable
    from pfedafm_jax.deploy import needed

    check_writable(asked.out, "out")
    needed("certs").make(asked.out, list(asked.hosts), asked.clients)
    where = clean(asked.out)
    for line in (
        f"{where}/ca.crt: for every node",
        f"{where}/nodes/client-K: for node K alone",
        f"{where}/server.key and the rest: for the server alone",
    ):
        console.print(line, soft_wrap=True)
    return 0
