"""The nouns of privacy: what a client promises, how it samples, what it released. Plain values, no torch.

A *budget* is (ε, δ, adjacency). An *event* says what was released, from which sampling, under how much noise and how
often. A *release* is a value that has passed the gate, or was computed from such values and public facts alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from sordino.errors import BadInput, SordinoError
from sordino.privacy.trust import Shared

RECORD = "record"
"""What is protected where nobody says whose records are."""


class Adjacency(StrEnum):
    """Which two data sets count as neighbours. They differ in one unit: a record, or a person with several.

    ``zero-out``: one unit's contribution is erased, the public number of units stays (sensitivity C).
    ``add-remove``: one unit is added or removed (sensitivity C); for accounting only, see ``check_promised``.
    ``replace-one``: one unit is exchanged for any other (sensitivity of a clipped sum is 2C).
    """

    ZERO_OUT = "zero-out"
    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"

    @classmethod
    def parse(cls, name: str | Adjacency) -> Adjacency:
        """The adjacency of that name, or an error that lists the names."""
        try:
            return cls(name)
        except ValueError:
            raise BadInput(f"adjacency {name!r} is unknown: use one of {', '.join(cls)}") from None

    @property
    def sensitivity(self) -> float:
        """How far one record moves a sum of terms clipped to 1, in units of the clip."""
        return 2.0 if self is Adjacency.REPLACE_ONE else 1.0


WHOLE = 1e-9  # how far rate·records may be from the whole number it came from: rounding of batch/records, no more


class Scheme(StrEnum):
    """How a batch is drawn from a client's records."""

    POISSON = "poisson"
    FIXED = "fixed"
    FULL = "full"

    @classmethod
    def parse(cls, name: str | Scheme) -> Scheme:
        """The scheme of that name, or an error that lists the names."""
        try:
            return cls(name)
        except ValueError:
            raise BadInput(f"sampling {name!r} is unknown: use one of {', '.join(cls)}") from None


@dataclass(frozen=True)
class Sampling:
    """How one batch is drawn: each record by a coin of ``rate``, a fixed share without replacement, or everything."""

    scheme: Scheme
    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "scheme", Scheme.parse(self.scheme))
        if not 0.0 < self.rate <= 1.0:
            raise BadInput(f"sampling rate {self.rate!r} must lie in (0, 1]: it is batch size over records")
        if self.scheme is Scheme.FULL and self.rate != 1.0:
            raise BadInput("full-batch sampling has rate 1: use poisson or fixed for a smaller rate")

    @classmethod
    def poisson(cls, rate: float) -> Sampling:
        """Every record enters independently with probability ``rate`` (q)."""
        return cls(Scheme.POISSON, float(rate))

    @classmethod
    def fixed(cls, batch: int, records: int) -> Sampling:
        """Exactly ``batch`` of ``records`` records, without replacement."""
        if not 1 <= batch <= records:
            raise BadInput(f"a fixed batch of {batch} cannot be drawn from {records} records without replacement")
        return cls(Scheme.FIXED, batch / records)

    def size(self, records: int) -> int:
        """How many records a fixed-size batch has: the most that the rate has paid for, never one more."""
        return math.floor(self.rate * records + WHOLE)

    def check_whole(self, records: int) -> None:
        """Refuse a fixed share of so many records that is not a whole number of them."""
        expected = self.rate * records
        if self.scheme is Scheme.FIXED and (abs(expected - round(expected)) > WHOLE or round(expected) < 1):
            raise BadInput(
                f"a fixed batch at rate {self.rate:.6g} would have {expected:.6g} of {records} records: "
                "make the rate a whole number of records over all of them"
            )

    @classmethod
    def full(cls) -> Sampling:
        """All records, every time: no amplification."""
        return cls(Scheme.FULL, 1.0)


def check_pair(scheme: Scheme, adjacency: Adjacency) -> None:
    """Refuse a sampling scheme under an adjacency for which no accountant here has a valid bound."""
    if scheme is Scheme.FIXED and adjacency is not Adjacency.REPLACE_ONE:
        raise BadInput(
            f"fixed-size sampling without replacement has no amplification bound under {adjacency}: "
            "use adjacency='replace-one', or sampling='poisson'"
        )


@dataclass(frozen=True)
class Budget:
    """What one client is willing to spend: (ε, δ) under an adjacency. ε = ∞ marks a public data set.

    ``unit`` is the word for what is protected as one: a record, or whoever has several ("patient").
    """

    epsilon: float
    delta: float
    adjacency: Adjacency = Adjacency.ZERO_OUT
    unit: str = RECORD

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        if math.isnan(self.epsilon) or self.epsilon <= 0:
            raise BadInput(f"epsilon is {self.epsilon!r}: a budget needs epsilon > 0 (inf for public data)")
        if not 0.0 < self.delta < 1.0:
            raise BadInput(f"delta is {self.delta!r}: it must lie strictly between 0 and 1, well below 1/records")

    @property
    def is_public(self) -> bool:
        """Whether the client asks for no protection at all (ε = ∞)."""
        return math.isinf(self.epsilon)


def check_promised(adjacency: Adjacency) -> None:
    """Refuse to promise that nobody learns whether a record is there while the number of records is published (R1)."""
    if adjacency is Adjacency.ADD_REMOVE:
        raise BadInput(
            "a budget under add-remove cannot be promised: the number of records is public in a federation, and it "
            "tells apart data sets that differ by one record; use adjacency 'zero-out', which needs the same noise"
        )


@dataclass(frozen=True)
class Event:
    """One kind of release, ``count`` times: a sum over a sampled batch plus Gaussian noise.

    ``noise`` is the standard deviation over the sum's sensitivity *under this adjacency* (so under replace-one the
    sensitivity of a sum clipped to C is 2C). Two releases from one batch are one event with
    z_eff = (z_1^-2 + z_2^-2)^(-1/2): see ``joined``. ``shared``: where the noise is the sum of several sites' shares,
    how; ``noise`` is then what is left of it against those it is promised against.
    """

    what: str
    sampling: Sampling
    noise: float
    count: int = 1
    adjacency: Adjacency = Adjacency.ZERO_OUT
    shared: Shared | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "adjacency", Adjacency.parse(self.adjacency))
        object.__setattr__(self, "noise", float(self.noise))
        if math.isnan(self.noise) or self.noise < 0:
            raise BadInput(f"noise multiplier {self.noise!r} of {self.what!r} must be ≥ 0")
        if self.count < 0:
            raise BadInput(f"count {self.count!r} of {self.what!r} must be ≥ 0")
        check_pair(self.sampling.scheme, self.adjacency)

    def times(self, count: int) -> Event:
        """The same release, ``count`` times."""
        return replace(self, count=count)

    def against(self, colluders: int) -> Event:
        """The release as if so many other sites conspired with the server: z times √(h(colluders)/h(c))."""
        if self.shared is None:
            return self
        told = replace(self.shared, colluders=colluders)
        return replace(self, noise=self.noise * self.shared.factor(colluders), shared=told)

    def alone(self) -> Event:
        """The release as if everybody else conspired with the server: the site's own share of the noise is left."""
        if self.shared is None:
            return self
        own = replace(self.shared, sites=1, colluders=0, dropouts=0)  # its noise is discrete all the same
        return replace(self, noise=self.noise * self.shared.share, shared=own)


def joined(*noises: float) -> float:
    """z_eff of several releases from one batch: (Σ z_i^-2)^(-1/2). The order of 0 and ∞ is what it should be."""
    if any(z == 0.0 for z in noises):
        return 0.0
    total = sum(z**-2 for z in noises)
    return math.inf if total == 0.0 else total**-0.5


class NotReleased(SordinoError, TypeError):
    """Something that did not pass the gate was about to leave a client."""


class _Seal:
    """The token that only the gate and ``derive`` hold."""


_SEAL = _Seal()


class Release:
    """A value that may leave its client: noised and charged by the gate, or computed from such values.

    Guarantees: an instance can only come from the gate (``privacy.gate``), from ``derive`` over other releases and
    public facts (post-processing is free), or from ``public``. Anything else raises ``NotReleased``.
    """

    __slots__ = ("private", "value", "what")

    def __init__(self, value: Any, what: str, private: bool, seal: _Seal) -> None:
        if seal is not _SEAL:
            raise NotReleased(f"{what!r} did not pass the gate: only the gate makes releases")
        self.value = value
        self.what = what
        self.private = private

    @classmethod
    def public(cls, value: Any, what: str) -> Release:
        """A public fact: what the server sent, a declared size, a constant. Never anything computed from records."""
        return cls(value, what, True, _SEAL)

    def __repr__(self) -> str:
        return f"Release({self.what!r}{'' if self.private else ', NOT PRIVATE'})"


def derive(what: str, function: Callable[..., Any], *inputs: Release) -> Release:
    """Post-process releases: ``function`` sees their values and nothing else.

    Guarantees: the result is as private as the least private input; no charge.
    """
    for one in inputs:
        if not isinstance(one, Release):
            raise NotReleased(f"{what!r} would be computed from a {type(one).__name__} that did not pass the gate")
    return Release(function(*(one.value for one in inputs)), what, all(one.private for one in inputs), _SEAL)
