"""Whom a promise holds against. Noise per site holds against everybody; shared noise against some.

With shared noise the server sees nothing but the sum of all sites' messages, so each site adds a share of the noise and
all shares together protect everybody. Whoever conspires with the server knows its own share and can take it away; what
is left must be enough. With n sites of which at most c conspire and D may be lost in a round, h = n − c − D shares are
left for sure, and each site adds noise of deviation z/√h where noise per site would be z, in units of the sensitivity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sordino.errors import BadInput

PER_SITE, SHARED = "per-site", "shared"

EVERYBODY = "against the server and all other sites together"
"""What noise per site promises, in words."""

_NUMBERS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]


@dataclass(frozen=True)
class Trust:
    """A study's choice of trust: the keys of ``[trust]``, and of ``sd.train(trust={…})``.

    Attributes
    ----------
    noise: ``per-site``, every site adds all the noise that its budget asks for; or ``shared``.
    colluders: c, how many other sites may conspire with the server without anybody's promise being broken.
    dropouts: D, how many sites may be lost in a round; so many repeated rounds are also reserved in every budget.
    """

    noise: str = PER_SITE
    colluders: int = 0
    dropouts: int = 0

    def __post_init__(self) -> None:
        if self.noise not in (PER_SITE, SHARED):
            raise BadInput(f"trust.noise = {self.noise!r} is unknown: use '{PER_SITE}' or '{SHARED}'")
        for key in ("colluders", "dropouts"):
            value = getattr(self, key)
            if type(value) is not int or value < 0:
                raise BadInput(f"trust.{key} = {value!r}: it is a number of sites, from 0 upwards")
            if value and not self.shared:
                raise BadInput(
                    f"trust.{key} = {value} goes with trust.noise = '{SHARED}': noise per site holds against everybody"
                )

    @classmethod
    def parse(cls, given: Trust | Mapping[str, Any] | None) -> Trust:
        """The choice in a table of its keys; nothing given is noise per site."""
        if given is None or isinstance(given, Trust):
            return given or cls()
        known = list(cls.__dataclass_fields__)
        if not isinstance(given, Mapping) or (unknown := [key for key in given if key not in known]):
            told = f"it has no key {unknown[0]!r}" if isinstance(given, Mapping) else "it is a table"
            raise BadInput(f"trust = {given!r}: {told}; known: {', '.join(known)}")
        return cls(**given)

    @property
    def shared(self) -> bool:
        """Whether sites share their noise."""
        return self.noise == SHARED


NOBODY_TRUSTED = Trust()
"""Noise per site, the default."""


@dataclass(frozen=True)
class Shared:
    """How the noise of a release is shared: what ε was computed with, and what another c would make of it.

    Attributes
    ----------
    sites: n, the fewest distinct sites with noise of their own in any sum.
    colluders, dropouts: c and D.
    deviation: s, a site's own noise in steps of the common lattice; where parts differ, 1/s² is averaged over numbers.
    width: how many numbers the release has.
    """

    sites: int
    colluders: int
    dropouts: int
    deviation: float
    width: int

    @property
    def honest(self) -> int:
        """h = n − c − D, the number of shares that count; a site always knows that its own is there."""
        return honest(self.sites, self.colluders, self.dropouts)

    @property
    def share(self) -> float:
        """A site's own noise over the noise that protects it: 1/√h."""
        return 1.0 / math.sqrt(self.honest)

    def factor(self, colluders: int) -> float:
        """z against so many colluders, over z against c: √(h(colluders)/h(c)).

        Where h = 1 a round may have nobody else in it, so that fewer colluders leave no more noise for sure.
        """
        if self.honest == 1:
            return 1.0
        return math.sqrt(honest(self.sites, colluders, self.dropouts) / self.honest)

    def words(self) -> str:
        """Whom the promise holds against: "against the server and any two of the nine other sites"."""
        return Against.weakest([self]).words()


@dataclass(frozen=True)
class Against:
    """Whom a figure holds against: the server, and any ``colluders`` of the ``others`` together.

    ``colluders`` is None where it holds against everybody, ``others`` where it is not the same number in all runs.
    """

    colluders: int | None = None
    others: int | None = None

    @classmethod
    def weakest(cls, releases: Iterable[Shared | None]) -> Against:
        """What the promises of several releases together hold against: the fewest colluders of any of them.

        z against c sites is at least as large against fewer, so the ε composed of all releases, each at its own c,
        holds for c* = min c. A release that nobody else's noise protects (None, or h = 1) holds against everybody.
        """
        shared = [one for one in releases if one is not None and one.honest > 1]
        if not shared:
            return cls()
        sites = {one.sites for one in shared}
        return cls(min(one.colluders for one in shared), sites.pop() - 1 if len(sites) == 1 else None)

    def and_also(self, other: Against) -> Against:
        """Whom two figures together hold against: the fewer colluders of both."""
        if self.colluders is None or other.colluders is None:
            return other if self.colluders is None else self
        return Against(min(self.colluders, other.colluders), self.others if self.others == other.others else None)

    def words(self) -> str:
        """As a part of a sentence that begins with "against"."""
        if self.colluders is None:
            return EVERYBODY
        if self.others is not None:
            return words(self.others + 1, self.colluders)
        if self.colluders == 0:
            return "against the server, while no other site conspires with it"
        return f"against the server and any {spelt(self.colluders)} other site{'s' if self.colluders > 1 else ''}"


def honest(sites: int, colluders: int, dropouts: int = 0) -> int:
    """max(1, n − c − D)."""
    return max(1, sites - colluders - dropouts)


def words(sites: int, colluders: int) -> str:
    """Whom noise shared by so many sites protects against."""
    others = sites - 1
    if colluders >= others:
        return EVERYBODY
    rest = f"the {spelt(others)} other sites" if others > 1 else "the other site"
    if colluders == 0:
        return f"against the server, while none of {rest} conspires with it"
    return f"against the server and any {spelt(colluders)} of {rest}"


def spelt(count: int) -> str:
    """A small number as a word."""
    return _NUMBERS[count] if count < len(_NUMBERS) else str(count)
