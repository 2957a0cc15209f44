"""The gate: the only way from a private tensor to a released one.

A turn's releases are *granted* in one durable charge before any record is read; the permit that comes back is used up
by the draws. The gate bounds every record's contribution itself, adds the noise that was charged, divides by a public
constant, and hands out a sealed ``Release``. No method can forget a step, because no method does them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sordino.errors import BadInput, SordinoError
from sordino.privacy.common import Common, ceiling, within
from sordino.privacy.generators import Keyed, Source, Turn
from sordino.privacy.groups import Group, check_groups
from sordino.privacy.lattice import Lattice
from sordino.privacy.ledger import Charge, Ledger
from sordino.privacy.threads import one_thread, side_by_side
from sordino.privacy.trust import Shared
from sordino.privacy.types import _SEAL, Adjacency, Event, Release, Sampling, joined

# What a clipping rule may multiply a record by: a tiny gradient times a huge factor would rest on its last bits.
LARGEST_FACTOR = 1e6
TINY = 1.2e-38  # the smallest float32 that has all its digits
ROUNDING = 1e-12  # how far a multiplier may be off that was worked out twice, in float64
COUNTED = 2.0**-16  # the lattice that noise on counts lies on
HASHED = 1 << 22  # bytes of a tensor that one thread hashes at a time

log = logging.getLogger("sordino.gate")


@dataclass(frozen=True)
class Piece:
    """Some of a batch's records, before the gate: per-record norms and factors, and a way to add them up.

    ``norms`` are upper bounds of what each record adds per unit of its factor, rounding included, in float64.
    ``pull(factors)`` is Σ_j a_j g_j per row, [rows, width]; ``spread`` takes a per-row vector to the factors' shape.
    """

    norms: Tensor
    factors: Tensor
    pull: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """What some records would add to a sum: a vector each, its norm in float64, and how often it counts."""

    vectors: Tensor
    norms: Sequence[float]
    factors: Sequence[float]


@dataclass(frozen=True)
class OneByOne:
    """A batch of ``count`` records whose terms are computed one by one, for exact sums.

    ``terms(some)`` are those of some records (at most ``block`` of them), by part. What a record's are may depend on
    nothing but that record; a record that made the model raise has factor 0, and why is noted in ``troubles``.
    """

    count: int
    terms: Callable[[Sequence[int]], Mapping[str, Block]]
    block: int = 1
    troubles: list[str] = field(default_factory=list)


Batch = Iterable[Mapping[str, Piece]] | OneByOne
"""A batch before the gate: in pieces of many records, or one record at a time."""


@dataclass(frozen=True)
class Terms:
    """What a client releases from one kind of batch in a turn; public constants, fixed before training (R6).

    ``parts`` are the quantities released from each batch with their noise multipliers: several parts of one batch are
    ONE event with z_eff = (Σ z⁻²)^(-1/2) (R4). ``divisor`` is the expected batch size q·n (R2). ``shared``: how sites
    share the noise; z is then what protects the client in the sum of all, of which it adds its own share, and
    ``common`` has the lattice of every part. ``groups``: where records fall into groups with accounts and rates of
    their own (``privacy.groups``); the rate of ``sampling`` is then the mean one. ``payers``: what the accounts are
    called, after the client's own, that pay for it alike, each for its own records (``privacy.living``).
    """

    sampling: Sampling
    parts: tuple[tuple[str, float], ...]
    count: int
    divisor: float
    adjacency: Adjacency = Adjacency.ZERO_OUT
    shared: Shared | None = None
    common: tuple[Common, ...] = ()
    groups: tuple[Group, ...] = ()
    payers: tuple[str, ...] = ("",)

    def __post_init__(self) -> None:
        if not (self.divisor > 0 and math.isfinite(self.divisor)):
            raise BadInput(f"divisor {self.divisor!r} must be positive: it is the expected batch size")
        if self.groups:
            check_groups(self.groups, self.sampling, self.divisor)

    @cached_property
    def what(self) -> str:
        """The event's name in the ledger."""
        return "+".join(name for name, _ in self.parts)

    @cached_property
    def event(self) -> Event:
        """What the ledger charges for one turn, where all records have one account; see ``events``."""
        if self.groups:
            raise SordinoError(f"{self.what!r} costs every group of records another ε: ask for its events")
        return self._event(self.sampling)

    @cached_property
    def events(self) -> Mapping[str, Event]:
        """What the ledger charges for one turn, by what the account is called after the client's own."""
        if not self.groups:
            return dict.fromkeys(self.payers, self.event)
        found = {one.suffix: self._event(Sampling(self.sampling.scheme, one.rate)) for one in self.groups}
        return {payer + suffix: event for payer in self.payers for suffix, event in found.items()}

    def _event(self, sampling: Sampling) -> Event:
        noise = joined(*(z for _, z in self.parts))
        return Event(self.what, sampling, noise, self.count, self.adjacency, self.shared)

    def noise(self, part: str) -> float:
        """The noise multiplier z of one part."""
        return dict(self.parts)[part]

    def own_noise(self, part: str) -> float:
        """What the client itself adds, over the sensitivity: z, or its share of it."""
        return self.noise(part) * (1.0 if self.shared is None else self.shared.share)

    def common_of(self, part: str) -> Common | None:
        """The common lattice of one part, where sites share noise."""
        return dict(zip((name for name, _ in self.parts), self.common)).get(part)

    def lattice(self, part: str, bound: float, width: int) -> Lattice:
        """What exact sums of one part lie on."""
        common = self.common_of(part)
        return Lattice(bound, width) if common is None else common.lattice(bound, width)


@dataclass(frozen=True)
class Booked:
    """What the releases of one part need, an entry a row: C, the noise's deviation, 1/divisor, and the streams' keys.

    ``keys`` is None where nothing is noised.
    """

    bound: Tensor
    spread: Tensor
    inverse: Tensor
    keys: Tensor | None

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in one order."""
        yield from (self.bound, self.spread, self.inverse)
        if self.keys is not None:
            yield self.keys

    def copied(self) -> Booked:
        """The same in places of their own."""
        keys = None if self.keys is None else self.keys.clone()
        return Booked(self.bound.clone(), self.spread.clone(), self.inverse.clone(), keys)


@dataclass
class Permit:
    """The right to release, for each of these rows, every part of ``count`` batches once."""

    turns: list[Turn]
    terms: list[Terms]
    used: set[tuple[str, int]] = field(default_factory=set)
    _scales: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def what(self) -> str:
        """The event these rows were charged for, one for all of them."""
        names = {terms.what for terms in self.terms}
        if len(names) != 1:
            raise SordinoError(f"a permit for {' and '.join(sorted(names))} is split by events before it is used")
        return names.pop()

    @cached_property
    def _count(self) -> int:
        return min(terms.count for terms in self.terms)

    @cached_property
    def _parts(self) -> set[str]:
        return set.intersection(*({name for name, _ in terms.parts} for terms in self.terms))

    def scales(self, part: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """Noise std per unit of bound, and 1/divisor, of every row; made once for all steps."""
        if part not in self._scales:
            noise = [terms.own_noise(part) * terms.adjacency.sensitivity for terms in self.terms]
            inverse = [1.0 / terms.divisor for terms in self.terms]
            self._scales[part] = like.new_tensor(noise), like.new_tensor(inverse)
        return self._scales[part]

    def use(self, part: str, step: int) -> None:
        """Consume the right to release ``part`` of batch ``step``; a second use, or one beyond the charge, raises."""
        if (part, step) in self.used or not 0 <= step < self._count or part not in self._parts:
            raise SordinoError(f"{part!r} of batch {step} was not charged, or was released already")
        self.used.add((part, step))

    def split(self, rows: Iterable[int]) -> Permit:
        """The permit of some of the rows, for a chunk. Each row must be handed out once."""
        chosen = list(rows)
        return Permit([self.turns[i] for i in chosen], [self.terms[i] for i in chosen])


def bounded(factors: Tensor, norms: Tensor, bound: Tensor | float) -> Tensor:
    """Limit factors so that no record moves the sum by more than C: a ← a·min(1, C/(|a|·‖g‖)).

    Guarantees: |result|·‖g‖ ≤ C (up to the rounding of the result) for every record, whatever the factors, if the norms
    are upper bounds; a record whose norm or factor is not finite contributes zero.
    """
    if isinstance(bound, Tensor) and factors.is_cuda and factors.dtype == torch.float32:
        from sordino.privacy import bounded_cuda  # needs triton, which comes with CUDA builds of torch only

        return bounded_cuda.bounded(factors, norms, bound, LARGEST_FACTOR, TINY)
    wide, limit = norms.double(), bound.double() if isinstance(bound, Tensor) else bound
    kept = factors.clamp(-LARGEST_FACTOR, LARGEST_FACTOR)
    # Not finite where norm or factor is not, and NaN is not below ∞: one comparison finds them all.
    size = torch.where(factors.abs() < math.inf, kept.abs() * wide, math.inf)
    # A bound that is not a number lets nothing through unbounded: it spoils the sum, which is seen.
    scale = torch.where(size <= limit, 1.0, limit / size)
    found = torch.where(size < math.inf, kept * scale, 0.0).to(factors.dtype)
    return torch.where(found.abs() < TINY, 0.0, found)  # below that float32 rounds by more than a last digit


class Gate:
    """The only way out of a client: it charges a turn, bounds its records, adds noise, divides by a constant and seals.

    Guarantees: (1) the charge is durable before noise is drawn; (2) noise used = noise charged, both come from the
    same ``Terms``; (3) the sum's sensitivity is at most the bound, enforced here; (4) divisors are public; an empty
    batch is released like any other; (5) a permit can be used once.
    """

    def __init__(self, ledger: Ledger | None, source: Source, run: str) -> None:
        self.ledger = ledger
        self.source = source
        self.run = run

    @property
    def private(self) -> bool:
        """Whether releases are noised and charged. A gate without a ledger is NOT PRIVATE and says so."""
        return self.ledger is not None

    def grant(self, turns: Sequence[Turn], terms: Sequence[Terms], request: str, masks: str = "") -> Permit:
        """Charge these turns in one durable transaction; raises ``BudgetRefused`` before any record is read.

        Where records fall into groups every group's account is charged; one that cannot pay refuses all.

        ``masks``: the digest of what the release will be masked under, where it is; a second release under it is
        refused, whatever became of the first.
        """
        if self.ledger is not None:
            charges = [
                Charge(turn.client + suffix, self.run, key_of(turn, t, masks), t.what, t.count, request)
                for turn, t in zip(turns, terms, strict=True)
                for suffix in t.events
            ]
            self.ledger.charge(charges, replay=self.source.simulated, once=bool(masks))
        return Permit(list(turns), list(terms))

    def release(
        self, permit: Permit, step: int, pieces: Batch, bounds: Mapping[str, Tensor], width: int
    ) -> dict[str, Release]:
        """Release (Σ a_j g_j + z·S·N(0, I)) / divisor of one batch, for every part and row.

        Parameters
        ----------
        pieces: the batch, in as many pieces as memory wants; none at all for an empty batch. Or one record at a time:
            then sums are exact and noise is a rounded Gaussian, which is how a site releases.
        bounds: C per row for each part; |a_j|·‖g_j‖ ≤ C is enforced here. S is C, or 2C under replace-one.
        width: length of the gradient; every other part is a scalar.
        """
        for part in bounds:
            permit.use(part, step)
        if isinstance(pieces, OneByOne):
            lattices = _lattices(permit, bounds, width)
            exact = exact_sums(pieces, lattices)
            if self.source.simulated and len(pieces.troubles) >= pieces.count > 0:
                raise SordinoError(f"not one record of a batch could be computed: {pieces.troubles[0]}")
            return {p: self._seal(permit, p, step, exact[p], bounds[p], one) for p, one in lattices.items()}
        totals = _totals(pieces, bounds, width)
        return {part: self._seal(permit, part, step, totals[part], bound) for part, bound in bounds.items()}

    def terms_of(self, permit: Permit, bounds: Mapping[str, Tensor]) -> dict[str, Booked]:
        """What the releases under a permit need, as tensors; nothing is booked. Streams must be keyed: a simulation."""
        if not isinstance(self.source, Keyed):
            raise SordinoError("steps are recorded in a simulation only: a site's randomness is secret and drawn once")
        found = {}
        for part, bound in bounds.items():
            spread, inverse = permit.scales(part, bound)
            name = f"{permit.what}/{part}"
            keys = self.source.keys_on(permit.turns, name, bound.device) if self.private else None
            found[part] = Booked(bound, spread * bound, inverse, keys)
        return found

    def book(self, permit: Permit, parts: Iterable[str], steps: range) -> None:
        """Consume the right to release these parts of all these batches: what ``release_booked`` will then release."""
        for part in parts:
            for step in steps:
                permit.use(part, step)

    def release_booked(
        self, booked: Mapping[str, Booked], step: Tensor, pieces: Iterable[Mapping[str, Piece]], width: int
    ) -> dict[str, Release]:
        """The releases of one batch, as ``release`` makes them, whose number only the device knows.

        Guarantees: the same bounds, sums, streams and divisors as in ``release``. That a batch was booked is for the
        caller to see to (``client.recorded``), in a simulation, where a draw that is repeated is the same draw.
        """
        totals = _totals(pieces, {part: one.bound for part, one in booked.items()}, width)
        found = {}
        for part, one in booked.items():
            if one.keys is not None and isinstance(self.source, Keyed):
                self.source.normal_by(one.keys, step, totals[part], one.spread)
            found[part] = Release(totals[part].mul_(one.inverse[:, None]), part, self.private, _SEAL)
        return found

    def release_whole(
        self, permit: Permit, step: int, batch: OneByOne, bounds: Mapping[str, Tensor], width: int
    ) -> dict[str, Release]:
        """Release Σ⌊a_j g_j/γ⌉ + ξ on the common lattice as integers, [1, width] each, to be added up with others'.

        ξ is a discrete Gaussian, this client's share of the noise. A release is private once it is masked: its noise
        protects nobody before it is added to others'.

        Guarantees: with the noise of as many sites as were charged for, every part has at least the multiplier z that
        was charged; checked here, from the terms, before the batch is read.
        """
        terms, turn = permit.terms[0], permit.turns[0]
        if len(permit.turns) != 1 or terms.shared is None or not self.private:
            raise SordinoError("integers are released one row at a time, under terms that say how noise is shared")
        lattices = _lattices(permit, bounds, width)
        owns = {part: common for part in bounds if (common := terms.common_of(part)) is not None}
        for part, lattice in lattices.items():
            permit.use(part, step)
            worth = owns[part].multiplier(lattice.width, terms.shared.honest, terms.adjacency.sensitivity)
            if not worth >= terms.noise(part) * (1 - ROUNDING):
                raise SordinoError(f"{part!r} would have noise {worth:.6g}, and {terms.noise(part):.6g} was charged")
        units, found = exact_units(batch, lattices), {}
        for part, lattice in lattices.items():
            whole = within(units[part], ceiling(lattice, terms.divisor)).to(torch.int64)
            if owns[part].deviation:
                name = f"{permit.what}/{part}"
                whole += self.source.discrete(turn, name, step, lattice.width, owns[part].deviation)
            found[part] = Release(whole, part, True, _SEAL)
        return found

    def count(
        self, permit: Permit, step: int, tables: Mapping[str, tuple[Tensor, int]], whose: Tensor | None = None
    ) -> dict[str, Release]:
        """Release how many units fall into every cell of some tables, with noise: [rows of the table] a part.

        Parameters
        ----------
        tables: for each part the cells of every record, [records, f], from 0 to width − 1, and width. A record is in
            one cell of each of f questions; a cell outside adds nothing (a null record, say).
        whose: the number of every record's unit, [records]; None where every record is one. Each of a unit's R records
            adds 1/R, as multiples of 2⁻¹⁶ that make one together.

        Guarantees: a unit adds one in all to the cells of each of f questions, whatever they are, and moves a part by
        at most √f (√(2f) if it is exchanged, charged as 2√f); sums and noise are exact, on multiples of 2⁻¹⁶, noise z
        times that. It is not divided: counts are what is asked.
        """
        if len(permit.turns) != 1:
            raise SordinoError("records are counted for one client at a time")
        terms, found = permit.terms[0], {}
        for part, (cells, width) in tables.items():
            permit.use(part, step)
            own = cells.sort(1).values
            inside = (own >= 0) & (own < width)
            inside[:, 1:] &= own[:, 1:] != own[:, :-1]  # a cell counts a record once
            added = shares_of(whose, len(own))[:, None].expand_as(own)[inside]
            total = torch.bincount(own[inside], added, minlength=width).double()
            if self.private:
                far = terms.noise(part) * terms.adjacency.sensitivity * math.sqrt(cells.shape[1])
                name = f"{permit.what}/{part}"
                total += COUNTED * self.source.rounded(permit.turns[0], name, step, width, far / COUNTED)
            found[part] = Release(total, part, self.private, _SEAL)
        return found

    def _seal(
        self, permit: Permit, part: str, step: int, total: Tensor, bound: Tensor, lattice: Lattice | None = None
    ) -> Release:
        """Noise, division, seal. With a ``lattice``, ``total`` (S̃) lies on it and so does the noise.

        The value is then γ(S̃ + ξ)/divisor, ξ = ⌊N(0, (z·Δ/γ)²)⌉ on the integers: z times the Δ that was charged. Where
        noise is shared, ξ is the client's own discrete share of it.
        """
        name = f"{permit.what}/{part}"  # two events of a turn may release parts of one name
        if lattice is None:
            spread, inverse = permit.scales(part, bound)
            if self.private:
                self.source.normal(permit.turns, name, step, total, spread * bound)
            return Release(total.mul_(inverse[:, None]), part, self.private, _SEAL)
        terms = permit.terms[0]
        units, common = total / lattice.step, terms.common_of(part)
        if self.private and common is not None:
            if common.deviation:
                units += self.source.discrete(permit.turns[0], name, step, lattice.width, common.deviation)
        elif self.private:
            deviation = terms.noise(part) * terms.adjacency.sensitivity * lattice.sensitivity / lattice.step
            lattice.check_room(0, deviation)
            noise = self.source.rounded(permit.turns[0], name, step, lattice.width, deviation)
            units += noise.to(units.device)
        value = units.mul_(lattice.step).div_(terms.divisor).float()
        return Release(value, part, self.private, _SEAL)


def _totals(pieces: Iterable[Mapping[str, Piece]], bounds: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    """Σ_j a_j g_j of a batch with |a_j|·‖g_j‖ ≤ C, [rows, width]; for every other part [rows, 1]."""
    totals: dict[str, Tensor] = {}
    for piece in pieces:
        for part, bound in bounds.items():
            one = piece[part]
            pulled = one.pull(bounded(one.factors, one.norms, one.spread(bound)))
            totals[part] = totals[part].add_(pulled) if part in totals else pulled
    for part, bound in bounds.items():
        if part not in totals:  # an empty batch
            totals[part] = bound.new_zeros(len(bound), width if part == "gradient" else 1)
    return totals


def shares_of(whose: Tensor | None, records: int) -> Tensor:
    """What each record adds to a count, [records] in float64: 1, or its part of its unit's 1, a multiple of 2⁻¹⁶.

    The k-th of a unit's R records has ⌊(k+1)/R·2¹⁶⌋ − ⌊k/R·2¹⁶⌋ of them: nothing is lost to rounding.
    """
    if whose is None:
        return torch.ones(records, dtype=torch.float64)
    order = whose.sort(stable=True).indices
    counts = torch.bincount(whose)
    of = counts[whose[order]]
    place = torch.arange(records) - (counts.cumsum(0) - counts)[whose[order]]
    whole = round(1 / COUNTED)
    found = torch.empty(records, dtype=torch.float64)
    found[order] = COUNTED * ((place + 1) * whole // of - place * whole // of).double()
    return found


def key_of(turn: Turn, terms: Terms, masks: str = "") -> str:
    """What a charge is called in the ledger: a draw, or the one release that these masks are for."""
    if masks:
        return f"round {turn.round} attempt {turn.copy} {terms.what} masks {masks}"
    return f"round {turn.round} copy {turn.copy} {terms.what}"


def _lattices(permit: Permit, bounds: Mapping[str, Tensor], width: int) -> dict[str, Lattice]:
    """What the sums of every part of a row lie on."""
    terms = permit.terms[0]
    return {p: terms.lattice(p, float(b), width if p == "gradient" else 1) for p, b in bounds.items()}


def exact_sums(batch: OneByOne, lattices: Mapping[str, Lattice]) -> dict[str, Tensor]:
    """The sum of every record's clipped and rounded terms, [1, width] in float64; exact where steps are powers of 2."""
    return {part: units * lattices[part].step for part, units in exact_units(batch, lattices).items()}


def exact_units(batch: OneByOne, lattices: Mapping[str, Lattice]) -> dict[str, Tensor]:
    """The sum of every record's clipped and rounded terms in steps, [1, width] in float64, exactly; on all threads.

    Guarantees: a record moves each sum by at most its lattice's ``sensitivity``, and by nothing but its own term.
    """
    for lattice in lattices.values():
        lattice.check_room(batch.count, 0.0)
    threads = torch.get_num_threads()
    block = max(1, min(batch.block, -(-batch.count // threads)))
    blocks = [range(start, min(batch.count, start + block)) for start in range(0, batch.count, block)]
    shares = side_by_side(lambda first: _share(batch, lattices, blocks[first::threads]), range(threads))
    if batch.troubles:
        log.warning("%d of %d records raised an error and added nothing", len(batch.troubles), batch.count)
    return {p: sum((one[p] for one in shares[1:]), shares[0][p])[None] for p in lattices}


def _share(batch: OneByOne, lattices: Mapping[str, Lattice], blocks: Iterable[Sequence[int]]) -> dict[str, Tensor]:
    """Sums over some of the records, in lattice units."""
    totals = {part: torch.zeros(one.width, dtype=torch.float64) for part, one in lattices.items()}
    with one_thread():
        for found in (each for block in blocks for each in _terms(batch, block)):
            for part in totals.keys() & found.keys():
                one = found[part]
                lattices[part].add(totals[part], one.vectors, one.norms, one.factors)
    return totals


def _terms(batch: OneByOne, block: Sequence[int]) -> Iterator[Mapping[str, Block]]:
    """The terms of a block of records; where one raises, of each by itself, so that no neighbour is lost (R10)."""
    try:
        yield batch.terms(block)
    except Exception as error:  # whatever a record makes a model or a rule do, it stays at the client
        if len(block) > 1:
            for k in block:
                yield from _terms(batch, [k])
        else:
            log.debug("a record raised an error", exc_info=True)
            batch.troubles.append(f"{type(error).__name__}: {error}")


def fingerprint(*parts: object) -> str:
    """A hash of a complete request (weights, clip, steps, broadcasts): what a resend is compared by (R11).

    SHA-256 over the parts' lengths and values; a tensor's value is the hashes of its blocks, on all threads.
    """
    digest = hashlib.sha256()
    for part in parts:
        body = _hashes(part) if isinstance(part, Tensor) else repr(part).encode()
        digest.update(len(body).to_bytes(8, "big") + body)
    return digest.hexdigest()


def _hashes(tensor: Tensor) -> bytes:
    """SHA-256 of every block of a tensor's bytes, end to end."""
    plain = memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    blocks = [plain[start : start + HASHED] for start in range(0, max(1, len(plain)), HASHED)]
    return b"".join(side_by_side(lambda block: hashlib.sha256(block).digest(), blocks))
