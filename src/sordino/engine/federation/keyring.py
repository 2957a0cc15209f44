"""Whose key is whose: the public keys in the keys' folder, what became of earlier ones, and what a key has signed.

``sites/NAME.pub`` is the key of NAME. Replacing it by hand changes nothing for a run that has heard from NAME: a name
belongs to one key for the life of a run, unless `sordino certify --rotate` wrote down which key follows which. A key
that was rotated away or revoked is never taken again, under no name.

A site signs its replies with its enrolment key, the one that its SuperNode shows to the server. What is signed is the
site's name, the digest of the whole request and the digest of the whole reply. A request names its run, its round and
everything its answer depends on, so a signed reply answers one request of one run, and nobody can put it in another's
place, or in another round's.
"""

from __future__ import annotations

import datetime
import json
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from sordino.engine.checkpoint import write_atomic
from sordino.engine.federation.certificates import Keys, check_name, new_site_key
from sordino.engine.federation.signing import fingerprint, load_public
from sordino.errors import BadInput

log = logging.getLogger("sordino.coordinator")

FRESH = 1.0  # seconds for which a look into the folder holds


@dataclass(frozen=True)
class Member:
    """A site whose public key lies in the keys' folder."""

    name: str
    public: ec.EllipticCurvePublicKey
    fingerprint: str

    @property
    def node_key(self) -> bytes:
        """The key as Flower carries it."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return self.public.public_bytes(serialization.Encoding.PEM, form)


@dataclass
class Keyring:
    """The members of a federation, by their keys' folder; with ``pins``, as one run knows them.

    ``pins`` is a file in the run's folder: the fingerprint of every site that was heard.
    """

    keys: Keys
    pins: Path | None = None
    _members: dict[str, Member] = field(default_factory=dict)
    _looked: float = -FRESH
    _told: set[str] = field(default_factory=set)

    def members(self) -> dict[str, Member]:
        """Who may speak now, by name."""
        if time.monotonic() - self._looked >= FRESH:
            self._members, self._looked = self._read(), time.monotonic()
        return self._members

    def names(self) -> dict[bytes, str]:
        """The names of those who may speak now, by their keys as Flower carries them."""
        return {one.node_key: name for name, one in self.members().items()}

    def pin(self, name: str) -> None:
        """From now on this name belongs to the key it has, for this run."""
        kept, member = self._pinned(), self.members().get(name)
        if self.pins is not None and member is not None and kept.get(name) != member.fingerprint:
            write_atomic(self.pins, json.dumps({**kept, name: member.fingerprint}, indent=1).encode())

    def _pinned(self) -> dict[str, str]:
        return {} if self.pins is None or not self.pins.exists() else dict(json.loads(self.pins.read_text()))

    def _read(self) -> dict[str, Member]:
        past, pinned = history(self.keys), self._pinned()
        gone = {one["old"] for one in past}
        found: dict[str, Member] = {}
        for name in self.keys.sites():
            try:
                path = self.keys.public(check_name(name))
                public = load_public(path.read_bytes(), str(path))
            except (BadInput, OSError) as error:
                self._tell(f"{name}: {error}")
                continue
            member = Member(name, public, fingerprint(public))
            if member.fingerprint in gone:
                self._tell(f"{name}: its key was revoked, or replaced by another")
            elif name in pinned and not _follows(past, name, pinned[name], member.fingerprint):
                self._tell(f"{name}: its key is not the one this run knows; `sordino certify --rotate` changes keys")
            else:
                found[name] = member
        shared = Counter(one.fingerprint for one in found.values())
        for name in [name for name, one in found.items() if shared[one.fingerprint] > 1 and name not in pinned]:
            self._tell(f"{name}: its key is also another site's")
            del found[name]
        return found

    def _tell(self, what: str) -> None:
        """Log a refusal, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("refused %s", what)


def _follows(past: list[dict[str, Any]], name: str, known: str, now: str) -> bool:
    """Whether a site's key is the known one, or follows it by rotations that were written down."""
    for one in past:
        if one["site"] == name and one["event"] == "rotated" and one["old"] == known:
            known = one["new"]
    return known == now


def history(keys: Keys) -> list[dict[str, Any]]:
    """What became of earlier keys, oldest first."""
    file = keys.history
    return [json.loads(line) for line in file.read_text().splitlines() if line] if file.exists() else []


def rotate(keys: Keys, name: str, public: bytes | None = None) -> str:
    """Give a site a new key, and write down that it follows the old one; the new key's fingerprint.

    ``public``: the new public key, where the site made its own pair; else a pair is made here.
    """
    old = _known(keys, name)
    private, text = (None, public) if public is not None else new_site_key()
    new = fingerprint(load_public(text, "the new key"))
    if new in {old, *(one["old"] for one in history(keys))}:
        raise BadInput(f"{name}: this key was used before; rotate to a new one")
    # The record first: a crash in between leaves a site that is refused, not one that is mistaken.
    _write_down(keys, name, "rotated", old, new)
    if private is not None:
        keys.write_site(name, private, text)
    else:
        keys.private(name).unlink(missing_ok=True)
        write_atomic(keys.public(name), text)
    return new


def revoke(keys: Keys, name: str) -> str:
    """Take a site's key away for good; its fingerprint."""
    old = _known(keys, name)
    _write_down(keys, name, "revoked", old, None)
    for one in (keys.public(name), keys.private(name)):
        one.unlink(missing_ok=True)
    return old


def _known(keys: Keys, name: str) -> str:
    path = keys.public(check_name(name))
    if not path.exists():
        raise BadInput(f"{path} does not exist: {name} has no key here")
    return fingerprint(load_public(path.read_bytes(), str(path)))


def _write_down(keys: Keys, name: str, event: str, old: str, new: str | None) -> None:
    when = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    line = json.dumps({"site": name, "event": event, "old": old, "new": new, "when": when})
    before = keys.history.read_bytes() if keys.history.exists() else b""
    write_atomic(keys.history, before + line.encode() + b"\n")
