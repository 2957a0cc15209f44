"""Masks that cancel in a sum: every two sites share a secret, one adds what it makes of it, the other takes it away.

A site's message is m_i = x_i + Σ_{j≠i} ±mask_ij mod 2⁶⁴, with + where i's name comes before j's and − otherwise; x_i is
what passed the gate. Over all participants the masks cancel and what is left is Σ x_i. A message alone, or the sum of
any but all of them, is a uniform vector to whoever lacks the secret of one pair in it.

How two sites come to share a secret through a server that neither trusts: for every run a site makes an X25519 key of
its own, which lies on its disk until the run is over, and signs it with its enrolment key, together with its name and
the run's. Others believe a key only by the enrolment key that they pinned themselves. A pair's mask of a round is
ChaCha20 under HKDF-SHA256(X25519(own, other's), info = both names in order, SHA-256(descriptor)): sites that were told
different things about a round (``descriptor``) have masks that do not cancel.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from sordino.errors import BadInput, SordinoError

MARK = b"sordino mask key 1\n"
"""How what is signed of a key begins: no other use of an enrolment key says the same (``signing.MARK``)."""

PAIR = b"sordino pair mask 1\n"
"""How the derivation of a pair's mask begins."""

SIZE = 32  # bytes of an X25519 key, private or public
NONCE = bytes(16)  # a derived key is used for one stream


class NotTheirs(BadInput):
    """A key that its site's enrolment key did not sign, for this run."""


def keep_key(file: Path) -> X25519PrivateKey:
    """A run's key on this site's disk; made where there is none, readable by its owner alone, durable on return."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f"{file.name}.{os.getpid()}.part")
        made.unlink(missing_ok=True)
        with open(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(X25519PrivateKey.generate().private_bytes_raw())
            out.flush()
            os.fsync(out.fileno())
        try:
            os.link(made, file)  # fails where another process was first: a run has one key
        except FileExistsError:
            pass
        finally:
            made.unlink()
        _sync(file.parent)
    return load_key(file)


def load_key(file: Path) -> X25519PrivateKey:
    """The run's key, which must be there: a run that was promised one key never goes on with another."""
    try:
        return X25519PrivateKey.from_private_bytes(file.read_bytes())
    except (OSError, ValueError) as error:
        raise SordinoError(f"{file}: the run's key cannot be read ({error})") from None


def erase_key(file: Path) -> None:
    """Overwrite and remove a run's key: from now on nobody can take the masks off what was sent."""
    if file.exists():
        with open(file, "r+b") as out:
            out.write(bytes(SIZE))
            out.flush()
            os.fsync(out.fileno())
        file.unlink()
        _sync(file.parent)


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def signed_key(enrolment: ec.EllipticCurvePrivateKey, name: str, run: str, key: X25519PrivateKey) -> dict[str, str]:
    """The public half of a run's key, with the signature of the site of this name, as JSON holds it."""
    public = key.public_key().public_bytes_raw()
    signature = enrolment.sign(_said(name, run, public), ec.ECDSA(hashes.SHA256()))
    return {"public": public.hex(), "signature": signature.hex()}


def verify_key(said: Mapping[str, Any], name: str, run: str, enrolled: ec.EllipticCurvePublicKey) -> bytes:
    """The public key in what was said, if this enrolment key signed it for this name and run."""
    public = public_of(said, name)
    try:
        enrolled.verify(bytes.fromhex(str(said["signature"])), _said(name, run, public), ec.ECDSA(hashes.SHA256()))
    except (InvalidSignature, KeyError, ValueError):
        raise NotTheirs(
            f"the key of {name!r} is not signed for this run with the key that is pinned here: somebody speaks in its "
            f"name, or its enrolment key was changed; compare keys with {name!r} itself, not through the server"
        ) from None
    return public


def public_of(said: Mapping[str, Any], name: str) -> bytes:
    """The public key in what was said, whoever signed it."""
    try:
        public = bytes.fromhex(str(said["public"]))
    except (KeyError, TypeError, ValueError):
        public = b""
    if len(public) != SIZE:
        raise NotTheirs(f"the key of {name!r} is not an X25519 key: {2 * SIZE} hexadecimal digits were expected")
    return public


def _said(name: str, run: str, public: bytes) -> bytes:
    """What is signed: the mark, name and run with their lengths, the key."""
    return MARK + _framed(name) + _framed(run) + public


def _framed(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(4, "big") + data


def masked(
    values: NDArray[np.int64], own: str, key: X25519PrivateKey, peers: Mapping[str, bytes], descriptor: bytes
) -> NDArray[np.int64]:
    """values + Σ_{own<j} mask_j − Σ_{own>j} mask_j mod 2⁶⁴, over all others who take part.

    Parameters
    ----------
    key: this site's key of the run. peers: the others' public keys, by name.
    descriptor: the SHA-256 of the round's descriptor. One of them masks one payload, ever: whoever calls this has
        written down that it is used.

    Guarantees: integers wrap and nothing saturates, so that whatever the values are, the result tells nothing about
    them to whoever lacks one pair's secret. A key for which everybody knows the secret (of low order) is refused.
    """
    if own in peers or len(descriptor) != hashes.SHA256.digest_size:
        raise SordinoError("masks are shared with others, under the SHA-256 of a descriptor")
    total = np.array(values, dtype=np.int64).view(np.uint64)
    if not peers:
        return total.view(np.int64)
    blank = bytes(8 * total.size)
    for name, public in sorted(peers.items()):
        stream = Cipher(ChaCha20(_pair_key(own, key, name, public, descriptor), NONCE), None).encryptor()
        mask = np.frombuffer(stream.update(blank), dtype="<u8").reshape(total.shape)
        if own < name:
            total += mask
        else:
            total -= mask
    return total.view(np.int64)


def check_keys(key: X25519PrivateKey, peers: Mapping[str, bytes]) -> None:
    """Refuse keys of low order among the others', before anything else is done."""
    for name, public in peers.items():
        _secret(key, name, public)


def _secret(key: X25519PrivateKey, name: str, public: bytes) -> bytes:
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:  # all zero: everybody knows it
        raise NotTheirs(f"the key of {name!r} is of low order: everybody would know what it is shared with") from None


def _pair_key(own: str, key: X25519PrivateKey, name: str, public: bytes, descriptor: bytes) -> bytes:
    """HKDF-SHA256 of what two sites share, bound to both names in order, both keys and the descriptor."""
    ends = sorted([(own, key.public_key().public_bytes_raw()), (name, public)])
    about = b"".join(_framed(who) + their for who, their in ends)
    return HKDF(hashes.SHA256(), SIZE, salt=PAIR, info=about + descriptor).derive(_secret(key, name, public))
