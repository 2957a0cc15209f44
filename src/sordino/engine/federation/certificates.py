"""Certificates and keys for a trial: an authority, the server's certificate, and a key pair for every site.

Good for a trial or a small consortium that trusts one folder. An organisation with its own authority uses that.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sordino.errors import BadInput

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""What a site may be called: the name becomes a file name."""


@dataclass(frozen=True)
class Keys:
    """Where the files of a trial lie: ``ca.crt`` goes to everyone, ``server.*`` to the server, ``site/*`` apart."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The authority's certificate: every site needs it, and it is no secret."""
        return self.folder / "ca.crt"

    @property
    def server(self) -> tuple[Path, Path]:
        """Certificate and private key of the server."""
        return self.folder / "server.crt", self.folder / "server.key"

    def private(self, site: str) -> Path:
        """A site's private key; belongs to that site alone."""
        return self.folder / "sites" / f"{site}.key"

    def public(self, site: str) -> Path:
        """A site's public key; the server needs it."""
        return self.folder / "sites" / f"{site}.pub"

    @property
    def history(self) -> Path:
        """Which keys were replaced or revoked, a line each; the server needs it."""
        return self.folder / "sites" / "history.jsonl"

    def sites(self) -> list[str]:
        """The sites whose public keys lie here."""
        return sorted(one.stem for one in (self.folder / "sites").glob("*.pub"))

    def write_site(self, site: str, private: bytes, public: bytes) -> None:
        """Put a site's key pair in its place."""
        write_secret(self.private(site), private)
        self.public(site).write_bytes(public)


def check_name(site: str) -> str:
    """A site's name, or an error that says what a name looks like."""
    if not NAME.fullmatch(site):
        raise BadInput(f"site name {site!r}: use letters, digits, '.', '_' and '-', at most 63, no leading sign")
    return site


def certify(folder: Path, sites: Sequence[str], hosts: Sequence[str] = (), days: float = 365.0) -> Keys:
    """Make an authority, a server certificate for 127.0.0.1, localhost and ``hosts``, and a key pair for every site.

    A folder that has an authority already keeps its keys: only sites that are missing are added.
    """
    keys = Keys(folder)
    for site in sites:
        check_name(site)
    try:
        (folder / "sites").mkdir(parents=True, exist_ok=True, mode=0o700)
        if not keys.authority.exists():
            _authority_and_server(keys, hosts, days)
        for site in sites:
            if not keys.public(site).exists():
                keys.write_site(site, *new_site_key())
    except OSError as error:
        raise BadInput(f"cannot write keys into {folder}: {error.strerror}") from None
    return keys


def check_in_force(certificate: Path) -> None:
    """Refuse a certificate that is over, or not yet in force, before somebody else does it with fewer words."""
    try:
        found = x509.load_pem_x509_certificate(certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise BadInput(f"{certificate} is no certificate ({error})") from None
    since, until = found.not_valid_before_utc, found.not_valid_after_utc
    if not since <= datetime.datetime.now(datetime.UTC) <= until:
        raise BadInput(
            f"{certificate} is in force from {since:%Y-%m-%d %H:%M} to {until:%Y-%m-%d %H:%M} UTC, and not now: "
            "make new keys with `sordino certify` in a new folder, and give every site the new ca.crt"
        )


def _authority_and_server(keys: Keys, hosts: Sequence[str], days: float) -> None:
    now = datetime.datetime.now(datetime.UTC)
    # A day back, so that clocks need not agree to the second; a certificate that is over already stays so.
    since = now - datetime.timedelta(days=1 if days > 0 else 2 - days)
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sordino trial authority")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sordino server")])
    blank = x509.CertificateBuilder().issuer_name(issuer).not_valid_before(since)
    authority = (
        blank.subject_name(issuer)
        .public_key(authority_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_after(now + datetime.timedelta(days=max(days, 1)))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(sign_certificates=True), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    server = (
        blank.subject_name(subject)
        .public_key(server_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName(_addresses(hosts)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .add_extension(_usage(sign_certificates=False), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    write_secret(keys.folder / "ca.key", _private(authority_key, serialization.PrivateFormat.PKCS8))
    write_secret(keys.server[1], _private(server_key, serialization.PrivateFormat.PKCS8))
    keys.server[0].write_bytes(server.public_bytes(serialization.Encoding.PEM))
    keys.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))  # last: its presence says "done"


def new_site_key() -> tuple[bytes, bytes]:
    """A key pair for a site: the private and the public half, as OpenSSH writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return _private(key, serialization.PrivateFormat.OpenSSH), public


def _usage(sign_certificates: bool) -> x509.KeyUsage:
    never = ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    never += ["encipher_only", "decipher_only"]
    signs = {"key_cert_sign": sign_certificates, "crl_sign": sign_certificates}
    return x509.KeyUsage(digital_signature=not sign_certificates, **signs, **dict.fromkeys(never, False))


def _addresses(hosts: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in dict.fromkeys(("127.0.0.1", "localhost", *hosts)):
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            found.append(x509.DNSName(host))
    return found


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that nobody else may read, not even for a moment."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
