"""Signatures of replies: a site signs what it answers, and to what; the coordinator believes nothing else."""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sordino.errors import BadInput

MARK = b"sordino signed reply 1\n"


"""How a signed reply begins. Part of what is signed, too: no other use of the key says the same."""


class NotSigned(BadInput):
    """A reply that its site's key did not sign, for this request."""


def load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key: OpenSSH, on a NIST curve, without a passphrase."""
    try:
        found = serialization.load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise BadInput(f"keys.private: {path} is no OpenSSH private key without a passphrase ({error})") from None
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise BadInput(f"keys.private: {path} is not on a NIST curve; `sordino certify` makes keys that are")
    return found


def load_public(text: bytes, whose: str) -> ec.EllipticCurvePublicKey:
    """A site's public key: one line of OpenSSH, on a NIST curve."""
    try:
        found = serialization.load_ssh_public_key(text)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise BadInput(f"{whose} is no OpenSSH public key ({error})") from None
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise BadInput(f"{whose} is not on a NIST curve")
    return found


def fingerprint(public: ec.EllipticCurvePublicKey) -> str:
    """What a key is called where it is written down: SHA-256 of its standard form."""
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return hashlib.sha256(public.public_bytes(serialization.Encoding.DER, form)).hexdigest()


def seal(private: ec.EllipticCurvePrivateKey, name: str, request: bytes, reply: bytes) -> bytes:
    """A reply to this request with the signature of the site of this name before it."""
    signature = private.sign(_said(name, request, reply), ec.ECDSA(hashes.SHA256()))
    return MARK + len(signature).to_bytes(2, "big") + signature + reply


def unseal(public: ec.EllipticCurvePublicKey, name: str, request: bytes, sealed: bytes) -> bytes:
    """The reply in these bytes, if this key signed it for this name and request."""
    start = len(MARK) + 2
    size = int.from_bytes(sealed[len(MARK) : start], "big")
    if not sealed.startswith(MARK) or len(sealed) < start + size:
        raise NotSigned("its reply is not signed")
    signature, reply = sealed[start : start + size], sealed[start + size :]
    try:
        public.verify(signature, _said(name, request, reply), ec.ECDSA(hashes.SHA256()))
    except InvalidSignature:
        raise NotSigned("its reply is not signed with its key, for this request") from None
    return reply


def _said(name: str, request: bytes, reply: bytes) -> bytes:
    """What is signed: the mark, the name with its length, the digests of request and reply."""
    who = name.encode()
    return MARK + len(who).to_bytes(2, "big") + who + hashlib.sha256(request).digest() + hashlib.sha256(reply).digest()
