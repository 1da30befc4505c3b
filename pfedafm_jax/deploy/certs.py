"""Certificates and keys of a federation: an authority, the server's certificate, a key a node."""

# pyright: reportMissingImports=false

import contextlib
import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pfedafm_jax.base.errors import PfedafmError, bad
from pfedafm_jax.base.files import write_atomically
from pfedafm_jax.deploy import LOCAL

YEARS = 5


def make(folder: str | Path, hosts: Sequence[str], clients: int) -> list[Path]:
    """Writes `ca.crt`, `server.crt`, `server.key`, and `nodes/client-K` with `nodes/client-K.pub`.

    The authority's own key is thrown away: nobody can sign a second server. What is there already
    is refused, since nodes that have it would be locked out.

    Args:
        hosts: names and addresses by which nodes reach the server.
        clients: how many keys of nodes.
    """
    place = Path(folder)
    if (place / "ca.crt").exists():
        raise PfedafmError(f"{place} has certificates already; choose another folder")
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    names = [_name(host) for host in dict.fromkeys((*hosts, *LOCAL))]  # the server calls itself
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "pfedafm federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    now = datetime.datetime.now(datetime.UTC)

    def signed(name: x509.Name, key: ec.EllipticCurvePrivateKey, *more: tuple) -> bytes:
        builder = x509.CertificateBuilder(issuer, name, key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))
        builder = builder.not_valid_after(now + datetime.timedelta(days=365 * YEARS))
        for extension, critical in more:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM)

    own = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    usage = {name: False for name in ("content_commitment", "data_encipherment", "key_agreement",
                                      "encipher_only", "decipher_only", "key_encipherment")}  # fmt: skip
    signs = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **usage)
    serves = x509.KeyUsage(digital_signature=True, key_cert_sign=False, crl_sign=False, **usage)
    of_authority = (x509.BasicConstraints(True, 0), True), (signs, True), (own, False)
    of_server = (
        (x509.SubjectAlternativeName(names), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.BasicConstraints(False, None), True),
        (serves, True),
        (by, False),
    )
    files = {
        "ca.crt": signed(issuer, authority, *of_authority),
        "server.crt": signed(subject, server, *of_server),
        "server.key": _private(server, PrivateFormat.PKCS8),
    }
    for client in range(clients):
        key = ec.generate_private_key(ec.SECP384R1())
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        files[f"nodes/client-{client}"] = _private(key, PrivateFormat.OpenSSH)
        files[f"nodes/client-{client}.pub"] = public + b"\n"
    before = os.umask(0o077)  # private keys are their owner's
    try:
        for name, content in reversed(files.items()):  # ca.crt last: where it is, all are
            write_atomically(place / name, content)
    finally:
        os.umask(before)
    return [place / name for name in files]


def _private(key: ec.EllipticCurvePrivateKey, format: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, format, NoEncryption())


def _name(host: str) -> x509.GeneralName:
    """A host as a certificate has it: an address, or a name."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    with contextlib.suppress(ValueError):
        if re.fullmatch(r"[^\W_][\w-]*(\.[^\W_][\w-]*)*", host):
            return x509.DNSName(host)
    accepted = (
        "names and addresses, such as 192.168.1.5 and fl.example.org, without port or https://"
    )
    raise bad("hosts", host, accepted)
