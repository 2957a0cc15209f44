"""Noise that sites share: which methods can, and the constants of every kind of release, fixed before the run.

See ``server.sharing`` for the weights, ``privacy.trust`` for who is protected against whom, docs/shared-noise.md for
all of it. Constants do not change when a site is lost: h = n − c − D shares count whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from sordino.errors import BadInput
from sordino.methods.method import Method
from sordino.methods.training import Population
from sordino.privacy.common import Common
from sordino.privacy.gate import Terms
from sordino.privacy.lattice import SLACK
from sordino.privacy.trust import Shared, Trust, honest
from sordino.server.projected import budget_shares
from sordino.server.rules import SHARED_SPREAD
from sordino.server.select import NOBODY, Schedule
from sordino.server.sharing import balance

Array = NDArray[np.float64]

FINENESS = 20
"""The lattice's step is 2⁻²⁰/√d of the least that a record may move the sum: discrete noise then costs nothing."""

MOST_STEPS = 2.0**62
"""How far from zero a sum may be on its lattice: sites add up modulo 2⁶⁴, and the sum is read with its sign."""

FAINTEST = 1e-6
"""The smallest share that anybody is to count for: a rule that wants to hear nobody else would need endless noise."""


@dataclass(frozen=True)
class SharedPart:
    """One quantity of a release: ``level`` v and ``grain`` γ in units of its bound C, ``deviation`` s in steps of γ.

    Every site adds discrete Gaussian noise of deviation s·γ to its weighted mean, the same for all.
    """

    name: str
    width: int
    level: float
    grain: float
    deviation: float


@dataclass(frozen=True)
class SharedRelease:
    """What all sites release together from one kind of batch: their weights w, and its parts."""

    weights: tuple[float, ...]
    parts: tuple[SharedPart, ...]


@dataclass(frozen=True)
class Sharing:
    """How a run shares noise: the turn's release first, then those of the questions with batches of their own.

    ``sites`` is n, the fewest sites with noise of their own in any round.
    """

    trust: Trust
    sites: int
    releases: tuple[SharedRelease, ...]

    @property
    def honest(self) -> int:
        """h: how many shares count."""
        return honest(self.sites, self.trust.colluders, self.trust.dropouts)

    @property
    def noise(self) -> float:
        """v√(n/h): deviation of one coordinate of the gradients' weighted sum, in units of the clip."""
        return self.releases[0].parts[0].level * math.sqrt(self.sites / self.honest)

    @property
    def needed(self) -> int:
        """The fewest sites with noise of their own that a round must have: h + c, or any where a share is all."""
        return 1 if self.honest == 1 else self.honest + self.trust.colluders


def check(method: Method, steps: Sequence[int], population: Population) -> None:
    """Refuse what cannot be done with a sum alone, and say why."""
    told = f"trust.noise = 'shared' does not go with method {method.name!r}: "
    if not method.private:
        raise BadInput(told + "it adds no noise (NOT PRIVATE); use a private method, or leave trust out")
    if not method.aggregate.foreseen:
        raise BadInput(
            f"{told}its rule {method.aggregate.name!r} looks at single updates, and the server sees their sum alone; "
            "use auto, dp-fedavg, weiavg or declared-variance, or aggregate = 'balanced'"
        )
    if not method.local.descends:
        raise BadInput(
            f"{told}local {method.local.name!r} goes on from what one client released, which under shared noise only "
            "the sum of all protects; use local = 'sgd'"
        )
    if max(steps) > 1:
        raise BadInput(
            f"{told}it takes {max(steps)} local steps, and the second would start from the first one's own gradient, "
            "which nobody released; use training.steps = 1 and more rounds"
        )
    if method.select.choose is not None or any(one.of == "candidates" for one in method.ask):
        raise BadInput(
            f"{told}select {method.select.name!r} looks at single answers, and the server sees their sum alone; use "
            "select = 'everyone', 'uniform' or 'privacy-aware'"
        )
    if method.select.resolve is not None:
        raise BadInput(f"{told}select.headroom changes who takes part during the run; leave it at 1")
    for one in method.ask:
        if getattr(one.conclude, "per_client", False):
            raise BadInput(f"{told}ask.per_client needs single answers, and the server sees their sum; leave it out")
    if all(budget.is_public for budget in population.budgets):
        raise BadInput(
            f"{told}nobody has a finite budget, so there is no noise to share; give somebody one, or leave trust out"
        )


def distinct(schedule: Schedule) -> Schedule:
    """The schedule with every client at most once in a round: virtual copies of a site have no noise of others."""
    asked = schedule.asked.copy()
    for row in asked:
        _, first = np.unique(row, return_index=True)
        again = np.ones(len(row), bool)
        again[first] = False
        row[again] = NOBODY
    return replace(schedule, asked=asked)


def fewest(schedule: Schedule, population: Population) -> int:
    """n: the fewest clients with noise of their own in any round."""
    noisy = np.array([not budget.is_public for budget in population.budgets])
    asked = schedule.asked
    found = int(np.where(asked != NOBODY, noisy[np.maximum(asked, 0)], False).sum(axis=1).min())
    if found == 0:
        raise BadInput(
            "trust.noise = 'shared': in some round nobody with a finite budget is asked, so there is no noise to "
            "share; ask more clients a round (training.select), or everyone"
        )
    return found


def template(terms: Terms, trust: Trust, sites: int, widths: Mapping[str, int]) -> Terms:
    """Terms with relative noises, told how their noise will be shared; the deviation is the least it can become."""
    own = terms.adjacency.sensitivity / math.sqrt(honest(sites, trust.colluders, trust.dropouts))
    least = [(widths[name], z * own * 2.0**FINENESS * math.sqrt(widths[name])) for name, z in terms.parts]
    return replace(terms, shared=Shared(sites, trust.colluders, trust.dropouts, *_typical(least)))


def _typical(parts: Sequence[tuple[int, float]]) -> tuple[float, int]:
    """One deviation for all numbers of a release, and how many there are: 1/s² is averaged over them."""
    width = sum(count for count, _ in parts)
    return math.sqrt(width / sum(count / deviation**2 for count, deviation in parts)), width


def wanted(method: Method, population: Population, schedule: Schedule | None) -> tuple[Array, float]:
    """(p, spread): what every client should count for, by the method's rule, and how far apart clients' gradients lie.

    The spread is in clips; 0 where the rule asks for the least noise whatever the bias.
    """
    rule, count = method.aggregate, len(population.names)
    if rule.aims == "budget":
        shares = budget_shares(np.array([b.epsilon for b in population.budgets]))
    elif rule.aims == "equal":
        shares = np.full(count, 1.0 / count)
    else:
        shares = population.sizes / population.sizes.sum()
    if schedule is not None and schedule.importance is not None:
        shares = shares * schedule.importance
    shares = np.maximum(shares / shares.sum(), FAINTEST)
    options = {} if rule.made is None else dict(rule.made.options)
    spread = 0.0 if rule.aims == "least" else float(options.get("spread") or SHARED_SPREAD)
    return np.asarray(shares / shares.sum()), spread


def balanced(
    most: Array, shares: Array, spread: float, ratio: float, private: NDArray[np.bool_]
) -> tuple[Array, float]:
    """(w, v) over all clients: public ones count for their shares, the others share the rest (``server.sharing``)."""
    weights, rest = shares.copy(), float(shares[private].sum())
    own, level = balance(most[private], shares[private] / rest, spread, ratio)
    weights[private] = own * rest
    return weights, level * rest


def levelled(
    shapes: Sequence[Sequence[tuple[Terms, int]]],
    noises: Sequence[Sequence[Sequence[float]]],
    shares: Array,
    spread: float,
    widths: Mapping[str, int],
    rounds: int,
) -> list[list[list[float]]]:
    """Multipliers raised from what budgets need to what everybody gets: z_i = v b_i/(w_i S)."""
    found = [[list(kind) for kind in one] for one in noises]
    private = np.array([one[0][0] > 0 for one in noises])
    for kind in range(len(shapes[0])):
        terms = [shape[kind][0] for shape in shapes]
        shared = terms[0].shared
        assert shared is not None
        most = np.array([_reach(t, z[kind][0]) for t, z in zip(terms, noises)])
        each = spread**2 / widths[terms[0].parts[0][0]]
        weights, level = balanced(most, shares, each, shared.sites / (shared.honest * rounds), private)
        for i in np.flatnonzero(private).tolist():
            factor = max(1.0, level * most[i] / weights[i])
            found[i][kind] = [z * factor for z in noises[i][kind]]
    return found


def _reach(terms: Terms, noise: float) -> float:
    """a = b/(z S): the largest weight per unit of v."""
    return terms.divisor / (noise * terms.adjacency.sensitivity) if noise > 0 else math.inf


def settled(
    trust: Trust, kinds: Sequence[Sequence[Terms]], shares: Array, widths: Mapping[str, int]
) -> tuple[Sharing, list[list[Terms]]]:
    """The constants that follow from everybody's final terms, and the terms told about them.

    ``kinds``: by kind of release, every client's terms. z_i = v b_i/(w_i S) for all, so w_i ∝ b_i/z_i.
    """
    releases, told, sites = [], [], 0
    for terms in kinds:
        first = terms[0].shared
        assert first is not None
        most = np.array([_reach(t, t.parts[0][1]) for t in terms])
        private = np.isfinite(most)
        rest = float(shares[private].sum())
        weights = shares.copy()
        weights[private] = rest * most[private] / most[private].sum()
        divisors = np.array([t.divisor for t in terms])
        smallest = float((weights / divisors)[private].min())
        parts = []
        for place, (name, _) in enumerate(terms[0].parts):
            noises = np.array([t.parts[place][1] for t in terms])
            level = float((noises * weights / divisors)[private].max()) * terms[0].adjacency.sensitivity
            grain = smallest * 2.0**-FINENESS / math.sqrt(widths[name])
            # Rounding a record's term moves it by at most half a step, of √d numbers; see Lattice.sensitivity.
            slack = 1 + SLACK + 2.0 ** -(FINENESS + 1)
            deviation = first.share * level * slack / grain
            # A batch may be everybody's every record, 1/q times as many as expected.
            furthest = float((weights / np.array([t.sampling.rate for t in terms])).sum()) / grain
            if furthest + 40 * deviation * math.sqrt(len(terms)) >= MOST_STEPS:
                raise BadInput(
                    f"trust.noise = 'shared': the sum of {name!r} does not fit 64 bits, for the weights of sites that "
                    f"add noise begin at {float(weights[private].min()):.1e}; use aggregate = 'balanced', or leave "
                    "the sites with public data out"
                )
            parts.append(SharedPart(name, widths[name], level, grain, deviation))
        releases.append(SharedRelease(tuple(weights.tolist()), tuple(parts)))
        told.append([tell(t, releases[-1], place, first) for place, t in enumerate(terms)])
        sites = first.sites
    return Sharing(trust, sites, tuple(releases)), told


def tell(terms: Terms, release: SharedRelease, place: int, shared: Shared) -> Terms:
    """One client's terms of a release, told how its noise is shared and which lattice all use.

    ``place``: the client's among the weights. ``shared``: n, c and D; the rest follows from the release.
    """
    deviation, width = _typical([(one.width, one.deviation) for one in release.parts])
    reach = terms.divisor / release.weights[place]
    noisy = [z > 0 for _, z in terms.parts]  # public clients have none
    common = tuple(Common(p.grain * reach, p.deviation if own else 0.0) for p, own in zip(release.parts, noisy))
    return replace(terms, shared=replace(shared, deviation=deviation, width=width), common=common)
