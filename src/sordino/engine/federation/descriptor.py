"""What all sites must have been told alike, for their masks to cancel: a run's charter, and a round's descriptor.

The *charter* is fixed before the first round and says who takes part, with which key, and how noise is shared in every
kind of release. The *descriptor* of one release names the charter, the round, the attempt, the participants, the
bounds and what was broadcast. Masks are made from its SHA-256 (``masks``): whoever was told anything else, be it one
bit of the weights, has other masks, and the sum says nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from sordino.engine.federation.masks import public_of
from sordino.errors import BadInput, SordinoError
from sordino.methods import Plan
from sordino.methods.sharing import SharedPart, SharedRelease

MOST_SITES = 10_000
DEVIATIONS = (5.0, 2.0**44)
"""What a site's own noise may be, in steps: above 5 sums of discrete Gaussians are as good as one."""


@dataclass(frozen=True)
class Seat:
    """A site of a run.

    Attributes
    ----------
    name, records: as it declared them. public: whether its records are, so that it adds no noise.
    rates: q, its sampling rate in every kind of release.
    key: its key of the run, ``public`` and ``signature`` (``masks.signed_key``).
    """

    name: str
    records: int
    public: bool
    rates: tuple[float, ...]
    key: Mapping[str, str]


@dataclass(frozen=True)
class Charter:
    """How the sites of a run share their noise; plain and public, the same text for everybody.

    Attributes
    ----------
    brief: the SHA-256 of the study as every site gets it.
    colluders, dropouts, sites: c, D, and n, the fewest sites with noise of their own in any sum (``privacy.trust``).
    releases: weights (in the order of the seats), lattice and noise of every kind: the turn, then the questions.
    """

    run: str
    brief: str
    colluders: int
    dropouts: int
    sites: int
    seats: tuple[Seat, ...]
    releases: tuple[SharedRelease, ...]

    @cached_property
    def text(self) -> str:
        """The charter as canonical JSON."""
        return canonical(self.plain())

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def plain(self) -> dict[str, Any]:
        """The charter as JSON holds it."""
        found: dict[str, Any] = asdict(self)
        return found

    def place(self, name: str) -> int:
        """Where a site stands in the charter's order."""
        for place, seat in enumerate(self.seats):
            if seat.name == name:
                return place
        raise BadInput(f"{name!r} is no site of this run")


def charter_of(plan: Plan, brief: Mapping[str, Any], keys: Mapping[str, Mapping[str, str]]) -> Charter:
    """The charter of a planned run; ``keys``: what every site signed, by name."""
    sharing = plan.sharing
    if sharing is None:
        raise SordinoError("a run whose sites add their own noise has no charter")
    seats = tuple(
        Seat(c.name, c.records, c.budget.is_public, tuple(t.sampling.rate for t in (c.terms, *c.asks)), keys[c.name])
        for c in plan.clients
    )
    counts = sharing.trust.colluders, sharing.trust.dropouts, sharing.sites
    return Charter(str(brief["run"]), brief_digest(brief), *counts, seats, sharing.releases)


def canonical(value: Any) -> str:
    """JSON with one spelling for one value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_charter(plain: Any) -> Charter:
    """A charter from JSON that somebody else wrote: every field is checked, and nothing else may be there."""
    try:
        found = _charter(plain)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"the charter of this run makes no sense: {type(error).__name__}: {error}") from None
    names = [one.name for one in found.seats]
    keys = [public_of(one.key, one.name) for one in found.seats]
    if not 1 <= len(names) <= MOST_SITES or len(set(names)) != len(names):
        raise BadInput("the charter of this run lists nobody, or somebody twice")
    if len(set(keys)) != len(keys):
        raise BadInput("the charter of this run gives two sites one key")
    _check(found)
    if found.text != canonical(plain):
        raise BadInput("the charter of this run says more than a charter says")
    return found


def _charter(plain: Any) -> Charter:
    seats = tuple(
        Seat(
            _text(one["name"]),
            _whole(one["records"]),
            _truth(one["public"]),
            tuple(map(_number, one["rates"])),
            {key: _text(one["key"][key]) for key in ("public", "signature")},
        )
        for one in plain["seats"]
    )
    releases = tuple(
        SharedRelease(tuple(map(_number, one["weights"])), tuple(map(_part, one["parts"]))) for one in plain["releases"]
    )
    colluders, dropouts, sites = (_whole(plain[key]) for key in ("colluders", "dropouts", "sites"))
    return Charter(_text(plain["run"]), _text(plain["brief"]), colluders, dropouts, sites, seats, releases)


def _part(plain: Any) -> SharedPart:
    numbers = (_number(plain[key]) for key in ("level", "grain", "deviation"))
    return SharedPart(_text(plain["name"]), _whole(plain["width"]), *numbers)


def _check(charter: Charter) -> None:
    """Refuse numbers that cannot be meant; what they promise is for every site to work out (``pact``)."""
    kinds, sites = len(charter.releases), len(charter.seats)
    sound = kinds > 0 and min(charter.colluders, charter.dropouts) >= 0 and 1 <= charter.sites <= sites
    for seat in charter.seats:
        sound &= seat.records > 0 and len(seat.rates) == kinds and all(0 < q <= 1 for q in seat.rates)
    for one in charter.releases:
        sound &= len(one.weights) == sites and all(0 < w <= 1 for w in one.weights)
        sound &= abs(sum(one.weights) - 1) < 1e-6
        sound &= bool(one.parts) and len({part.name for part in one.parts}) == len(one.parts)
        sound &= all(part.width >= 1 and min(part.level, part.grain) > 0 for part in one.parts)
        sound &= all(DEVIATIONS[0] <= part.deviation <= DEVIATIONS[1] for part in one.parts)
    if not sound:
        raise BadInput("the charter of this run makes no sense: counts, weights, rates or noise cannot be meant")


@dataclass(frozen=True)
class Descriptor:
    """Everything that one release of one round is masked under.

    Attributes
    ----------
    charter: the charter's digest. round, attempt: from 1 and from 0; a repeated round is a new attempt.
    release: which of the charter's releases, 0 being the turn. participants: their names, sorted.
    bounds: C of every part, in order. weights, broadcast: SHA-256 of the model's weights and of what was sent beside.
    """

    charter: str
    round: int
    attempt: int
    release: int
    participants: tuple[str, ...]
    bounds: tuple[float, ...]
    weights: str
    broadcast: str

    @cached_property
    def digest(self) -> bytes:
        """The SHA-256 of the descriptor's canonical text."""
        return hashlib.sha256(canonical(asdict(self)).encode()).digest()


def participants_of(charter: Charter, said: Any) -> tuple[str, ...]:
    """The names of those who take part in a round: sorted, each once, all of the charter."""
    if not isinstance(said, Sequence) or isinstance(said, str) or not all(isinstance(one, str) for one in said):
        raise BadInput("who takes part in a round is a list of names")
    found, known = tuple(said), {one.name for one in charter.seats}
    if list(found) != sorted(set(found)) or not set(found) <= known or not found:
        raise BadInput("those who take part in a round are sites of the run, in order, each once")
    return found


def hashed_tensors(tensors: Mapping[str, Tensor], facts: Mapping[str, Any] | None = None) -> str:
    """SHA-256 over named tensors (kind, shape and bytes of each) and plain facts, in a fixed order."""
    digest = hashlib.sha256(canonical(dict(facts or {})).encode())
    for name, value in sorted(tensors.items()):
        head = f"{name} {value.dtype} {tuple(value.shape)};".encode()
        digest.update(len(head).to_bytes(4, "big") + head)
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def brief_digest(brief: Mapping[str, Any]) -> str:
    """The SHA-256 of a study as sites get it."""
    return hashlib.sha256(canonical(brief).encode()).hexdigest()


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError("a text is missing")
    return value


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r} is neither true nor false")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= 1 << 62:
        raise TypeError(f"{value!r} is no whole number")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise TypeError(f"{value!r} is no number")
    return value
