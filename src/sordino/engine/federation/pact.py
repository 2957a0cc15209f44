"""A run with shared noise as one site accepts it: whom it knows, and what its noise is worth among them.

Everything is worked out from the charter and from keys that were pinned here; nothing rests on what a server says
about it. A refusal depends on public parameters only, and comes before anything is charged or read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sordino.engine.federation.descriptor import Charter, brief_digest, read_charter
from sordino.engine.federation.limits import Policy, Refused
from sordino.engine.federation.masks import check_keys, public_of, verify_key
from sordino.engine.federation.peers import Peers
from sordino.methods import Method
from sordino.methods.sharing import tell
from sordino.privacy.common import largest
from sordino.privacy.gate import ROUNDING, Terms
from sordino.privacy.trust import SHARED, Shared, Trust, honest


def shared_trust(brief: Mapping[str, Any]) -> Trust | None:
    """How a study wants noise to be shared; None where every site adds its own."""
    said = brief.get("trust")
    if said is None:
        return None
    trust = Trust.parse(said)
    return trust if trust.noise == SHARED else None


def check_willing(trust: Trust, method: Method, policy: Policy, peers: Peers | None, public: bool) -> Peers:
    """Refuse to share noise where this site was not told to, or cannot; ``public``: its records are anyway."""
    if peers is None:
        raise Refused(
            "this study shares noise between sites that know each other by their keys, and this site has none: name "
            "keys.private in its SITE.toml"
        )
    if not method.private or not method.local.descends:
        raise Refused(f"method {method.name!r} cannot share noise: one step of plain descent a round can")
    if public:
        return peers
    if policy.colluders is None:
        raise Refused(
            "this study shares noise between sites, and this site adds all of its own unless it is told otherwise: set "
            "limits.colluders, how many other sites may conspire with the server without breaking its promise"
        )
    if not peers.pinned:
        raise Refused(
            "this study shares noise between sites, and this site knows no other: put the others' public keys, which "
            "they gave it themselves, into a folder and name it as trust.peers"
        )
    if trust.colluders < policy.colluders:
        raise Refused(
            f"this study's promises hold against {trust.colluders} colluding sites, and this site asks for at least "
            f"{policy.colluders} (limits.colluders): raise trust.colluders in the study"
        )
    return peers


@dataclass(frozen=True)
class Member:
    """What a site says about itself in a run: its name, declared records, whether they are public; and its own key."""

    name: str
    records: int
    public: bool
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Pact:
    """A charter that one site has checked. ``keys``: everybody's public key of the run, by name."""

    charter: Charter
    place: int
    keys: Mapping[str, bytes]
    peers: Peers

    @classmethod
    def accept(cls, text: str, study: str, own: Member, peers: Peers) -> Pact:
        """Check a charter against the study, against what this site said of itself, and against the pinned keys.

        ``text`` and ``study``: charter and brief as JSON.
        """
        brief = json.loads(study)
        charter, trust = read_charter(json.loads(text)), shared_trust(brief)
        if charter.run != brief["run"] or charter.brief != brief_digest(brief):
            raise Refused("the charter is of another run or another study than this request")
        if trust is None or (trust.colluders, trust.dropouts) != (charter.colluders, charter.dropouts):
            raise Refused("the charter counts other colluders or lost sites than the study says")
        place = charter.place(own.name)
        seat = charter.seats[place]
        key = X25519PrivateKey.from_private_bytes(own.key)
        said = seat.records, seat.public, public_of(seat.key, seat.name)
        if said != (own.records, own.public, key.public_key().public_bytes_raw()):
            raise Refused("the charter says of this site what it did not say of itself: records, or the run's key")
        keys = {}
        for one in charter.seats:
            known = peers.key_of(one.name)
            keys[one.name] = (
                public_of(one.key, one.name) if known is None else verify_key(one.key, one.name, charter.run, known)
            )
        check_keys(key, {name: public for name, public in keys.items() if name != own.name})
        return cls(charter, place, keys, peers)

    def told(self, terms: Sequence[Terms], widths: Mapping[str, int]) -> list[Terms]:
        """This site's terms of every kind of release, with the lattice and the noise that the charter says."""
        charter = self.charter
        if len(terms) != len(charter.releases):
            raise Refused(f"the charter has {len(charter.releases)} kinds of release, and the method has {len(terms)}")
        found = []
        for place, (own, release) in enumerate(zip(terms, charter.releases)):
            parts = {one.name: one.width for one in release.parts}
            if list(parts) != [name for name, _ in own.parts] or any(widths[name] != parts[name] for name in parts):
                raise Refused(f"the charter's {list(parts)} are not what the method releases, number by number")
            if own.count != 1 or own.sampling.rate != charter.seats[self.place].rates[place]:
                raise Refused("noise is shared in turns of one step, from batches of the rate that the charter says")
            shared = Shared(charter.sites, charter.colluders, charter.dropouts, 1.0, 1)
            found.append(tell(own, release, self.place, shared))
            # A step that no sum fits would be noticed at the first large batch, and how large it was with it.
            for part, common in zip(release.parts, found[-1].common):
                common.lattice(1.0, part.width).check_room(math.ceil(largest(own.divisor)), part.deviation)
        return found

    def check_offer(self, terms: Sequence[Terms]) -> None:
        """Refuse a run whose rounds cannot keep this site's promise: at best n sites take part, and D are lost."""
        charter = self.charter
        pinned = min(charter.sites, self._pinned(one.name for one in charter.seats))
        for place, own in enumerate(terms):
            self._check(place, own, pinned, pinned - charter.colluders - charter.dropouts)

    def check_round(self, place: int, terms: Terms, participants: Sequence[str]) -> None:
        """Refuse a round in which too few others are known here for the promise to hold."""
        if self.charter.seats[self.place].name not in participants:
            raise Refused("this site is asked to take part in a round that it is not a participant of")
        pinned = self._pinned(participants)
        self._check(place, terms, pinned, pinned - self.charter.colluders)

    def _pinned(self, names: Iterable[str]) -> int:
        """How many different sites with noise of their own these are for sure."""
        public = {one.name for one in self.charter.seats if one.public}
        return self.peers.distinct(name for name in names if name not in public)

    def _check(self, place: int, terms: Terms, pinned: int, shares: int) -> None:
        """z of every part, with so many shares of noise (this site's own is always there), against what was planned.

        Shares below h are refused too, where a charter has noise to spare: the ledger tells ε for other c by counts.
        """
        charter, known = self.charter, max(1, shares)
        if charter.seats[self.place].public:
            return  # nobody is promised anything
        short = known < honest(charter.sites, charter.colluders, charter.dropouts)
        for part, (name, noise) in zip(charter.releases[place].parts, terms.parts):
            common = terms.common_of(name)
            if common is None:
                raise Refused(f"the charter says nothing of {name!r}")
            worth = common.multiplier(part.width, known, terms.adjacency.sensitivity)
            if short or not worth >= noise * (1 - ROUNDING):
                raise Refused(
                    f"{name!r} would have noise {worth:.4g}, and {noise:.4g} is planned: {pinned} sites with noise are "
                    f"known here by their keys, of which {charter.colluders} may conspire; pin the other sites' keys "
                    "(trust.peers), or ask more sites"
                )
