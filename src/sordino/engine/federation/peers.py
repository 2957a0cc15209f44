"""The other sites as this one knows them: by enrolment keys that it pinned itself, not by what a server says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec

from sordino.engine.federation.certificates import check_name
from sordino.engine.federation.signing import fingerprint, load_public
from sordino.errors import BadInput


@dataclass(frozen=True, eq=False)
class Peers:
    """A site's enrolment key, and the public enrolment keys of others that it pinned, by name."""

    name: str
    private: ec.EllipticCurvePrivateKey
    pinned: Mapping[str, ec.EllipticCurvePublicKey] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, private: ec.EllipticCurvePrivateKey, folder: Path | None) -> Peers:
        """The keys in a folder of NAME.pub, one line of OpenSSH each; this site's own name needs none."""
        if folder is None:
            return cls(name, private)
        if not folder.is_dir():
            raise BadInput(f"trust.peers: {folder} is no folder; put the other sites' public keys there, as NAME.pub")
        files = {check_name(one.stem): one for one in sorted(folder.glob("*.pub"))}
        pinned = {who: load_public(one.read_bytes(), f"trust.peers: {one}") for who, one in files.items()}
        own = pinned.pop(name, None)
        if own is not None and fingerprint(own) != fingerprint(private.public_key()):
            raise BadInput(f"trust.peers: {files[name]} is not the public half of keys.private; remove or replace it")
        return cls(name, private, pinned)

    @cached_property
    def _prints(self) -> dict[str, str]:
        """Fingerprints of all keys, this site's own among them."""
        return {name: fingerprint(key) for name, key in {**self.pinned, self.name: self.private.public_key()}.items()}

    def key_of(self, name: str) -> ec.EllipticCurvePublicKey | None:
        """The enrolment key by which this site knows another, or itself; None where it pinned none."""
        return self.private.public_key() if name == self.name else self.pinned.get(name)

    def distinct(self, names: Iterable[str]) -> int:
        """How many different sites these names are for sure: pinned keys count once, names without one do not."""
        return len({self._prints[one] for one in names if one in self._prints})
