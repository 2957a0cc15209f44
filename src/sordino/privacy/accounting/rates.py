"""Sampling rates by level: one noise for a client's records, and every level as often as its own ε allows.

A level that allows more is sampled more often (individualised DP-SGD by sampling). With z common to all, q_l is such
that (q_l, z, T) costs ε_l, and z is the smallest with which the mean rate Σ q_l n_l/n is the wanted one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sordino.errors import BadInput
from sordino.privacy import accounting
from sordino.privacy.accounting.parts import Floats, halved
from sordino.privacy.levels import Level
from sordino.privacy.types import Event, Sampling, Scheme

AGREE = 4e-4
"""Levels' own scales of noise agree when they are this close, relatively: about what calibration leaves unspent."""

_ROUNDS = 12


@dataclass
class _Search:
    """One client's levels: factors on rates so far, the scales of noise they need, and d ln scale/d ln factor."""

    template: Sequence[Event]
    levels: Sequence[Level]
    factors: Floats
    scales: Floats
    slopes: Floats
    done: bool = False

    @property
    def shares(self) -> Floats:
        sizes = np.array([one.records for one in self.levels], dtype=float)
        return np.asarray(sizes / sizes.sum())

    @property
    def most(self) -> float:
        """The factor with which the first event's rate is 1."""
        return 1.0 / self.template[0].sampling.rate

    def events(self, place: int) -> list[Event]:
        return at_rate(self.template, float(self.factors[place]))

    def heard(self, scales: Floats) -> None:
        """Take what every level needs at its factor, and look whether they agree."""
        self.scales = scales
        free = self.factors < self.most
        far = math.log(float(scales.max() / scales[free].min())) if free.any() else 0.0
        self.done = far <= AGREE

    def move(self) -> None:
        """Factors with which all levels would need one scale, if ln scale were linear in ln factor; their mean is 1."""
        before = np.log(self.factors), np.log(self.scales)

        def at(log_scale: Floats) -> Floats:
            return np.minimum(self.most, np.exp(before[0] + (log_scale - before[1]) / self.slopes))

        def enough(log_scale: Floats) -> bool:
            return bool((self.shares * at(log_scale)).sum() >= 1.0)

        low, high = before[1].min() - 30.0, before[1].max() + 30.0
        found = at(halved(enough, low, high, 80)[1])
        self.factors = mean_one(found, self.shares, self.most)

    def learn(self, factors: Floats, scales: Floats) -> None:
        """Slopes from the last step."""
        moved = np.log(self.factors / factors)
        far = np.abs(moved) > 1e-6
        slope = np.log(self.scales / scales) / np.where(far, moved, 1.0)
        self.slopes = np.where(far, np.clip(slope, 0.1, 3.0), self.slopes)


def at_rate(events: Sequence[Event], factor: float) -> list[Event]:
    """The events with every rate multiplied, at most 1."""
    return [replace(e, sampling=Sampling(e.sampling.scheme, min(1.0, factor * e.sampling.rate))) for e in events]


def mean_one(factors: Floats, shares: Floats, most: float) -> Floats:
    """Factors in the same proportions with Σ shares·factors = 1, none above ``most`` ≥ 1."""
    capped = np.zeros(len(factors), dtype=bool)
    while not capped.all():
        rest = 1.0 - most * shares[capped].sum()
        found = factors * rest / (shares * factors)[~capped].sum()
        over = ~capped & (found > most)
        if not over.any():
            return np.where(capped, most, found)
        capped |= over
    return np.full(len(factors), most)


def level_rates(
    templates: Sequence[Sequence[Event]], levels: Sequence[Sequence[Level]], accountant: str = "pld"
) -> list[tuple[float, Floats]]:
    """For each client (s, f): the factor s on its events' noises, and for each of its levels f_l on their rates.

    ``templates``: every client's events of the whole run at the mean rate, with relative noises, the first one that
    whose mean rate is to be kept. ``levels``: those that have records.

    Guarantees: at noise s·z and rates min(1, f_l·q) the composition costs every level at most its ε_l, by
    ``composed_epsilon``; Σ f_l n_l = n, so that the first event's mean rate is q. The levels that are not capped at
    rate 1 come within 0.2 % of their ε_l.
    """
    searches = []
    for template, own in zip(templates, levels, strict=True):
        if any(event.sampling.scheme is not Scheme.POISSON for event in template):
            raise BadInput("levels differ in how often their records are sampled: they need sampling = 'poisson'")
        # Where noise is large, ε grows like the rate over the noise, and the rate like the ε.
        wanted = np.array([one.budget.epsilon for one in own])
        one = np.ones(len(own))
        search = _Search(template, own, one, one, one)
        search.factors = mean_one(wanted, search.shares, search.most)
        searches.append(search)
    for number in range(_ROUNDS):
        left = [search for search in searches if not search.done]
        if not left:
            break
        before = [(search.factors, search.scales) for search in left]
        for search in left if number else ():
            search.move()
        places = [(search, place) for search in left for place in range(len(search.levels))]
        events = [search.events(place) for search, place in places]
        found = accounting.calibrate_events(events, [s.levels[place].budget for s, place in places], accountant)
        ends = np.cumsum([len(search.levels) for search in left])[:-1]
        for search, scales, old in zip(left, np.split(found, ends), before):
            search.heard(scales)
            if number:
                search.learn(*old)
    return [(_settled(search, accountant), search.factors) for search in searches]


def _settled(search: _Search, accountant: str) -> float:
    """The scale of noise that every level's budget pays for at its rate."""
    scale, deltas = float(search.scales.max()), [one.budget.delta for one in search.levels]
    most = np.array([one.budget.epsilon for one in search.levels])
    for power in range(64):
        events = [
            [replace(e, noise=e.noise * scale) for e in search.events(place)] for place in range(len(search.levels))
        ]
        if np.all(accounting.composed_epsilon(events, deltas, accountant) <= most):
            return scale
        scale *= 1 + 1e-5 * 2**power  # what was rounded elsewhere
    raise BadInput("no amount of noise meets the ε of these levels of consent: give the strictest more")
