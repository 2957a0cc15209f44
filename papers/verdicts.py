"""When a difference counts: paired over seeds, with an interval, and a word only where the interval has one.

For a seed all methods of a table have the same partition, budgets and first model, so their difference is free of what
those did. With d_s the difference at seed s, n seeds, mean d̄ and deviation s_d, the 95 % interval is

    d̄ ± t(0.975, n − 1) · s_d / √n,

and the word is "level" where it holds 0, else "above" or "below": better or worse, whichever way the measure runs. One
seed has no interval, and gets no word. Intervals are each by itself at 95 %: where several are looked at together, the
sentence says how many, and how many words stand when all are to hold together at 5 % (Holm's correction).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from papers.experiment import Entry, Measure, Place

LEVEL = 0.95
ABOVE, EVEN, BELOW, NONE = "above", "level", "below", "no verdict"
NO_VERDICT = "one seed: no verdict"
SPOKEN = {ABOVE: "better", BELOW: "worse"}
"""What the words are called where less is better."""


@dataclass(frozen=True)
class Gap:
    """Paired differences of one comparison by seed, what it is about in words, and whether more is better."""

    pairs: Mapping[int, float]
    about: str = ""
    more_is_better: bool = True

    @property
    def differences(self) -> list[float]:
        """The differences without their seeds."""
        return list(self.pairs.values())

    @property
    def interval(self) -> tuple[float, float, float]:
        """Mean and 95 % t-interval; without limits where there is one pair."""
        return interval(self.differences)

    @property
    def p_value(self) -> float:
        """How likely a difference as large is where there is none; 1 where there is one pair."""
        if len(self.differences) < 2:
            return 1.0
        spread = float(np.std(self.differences, ddof=1))
        if spread == 0.0:
            return 1.0 if self.interval[0] == 0.0 else 0.0
        t = self.interval[0] / (spread / math.sqrt(len(self.differences)))
        return float(2 * stats.t.sf(abs(t), len(self.differences) - 1))

    @property
    def word(self) -> str:
        """``above``, ``level``, ``below``, or ``no verdict`` for one seed."""
        if len(self.differences) < 2:
            return NONE
        _, low, high = self.interval
        if low <= 0.0 <= high:
            return EVEN
        return ABOVE if (low > 0.0) == self.more_is_better else BELOW

    @property
    def spoken(self) -> str:
        """The word as sentences have it: where less is better, ``better`` and ``worse`` for above and below."""
        return self.word if self.more_is_better else SPOKEN.get(self.word, self.word)

    def show(self, form: str = ".1f") -> str:
        """``above (+3.1 [+2.0, +4.2])``, or for one seed ``+3.1, one seed: no verdict``."""
        mean, low, high = self.interval
        if self.word == NONE:
            return f"{mean:+{form}}, {NO_VERDICT}"
        return f"{self.spoken} ({mean:+{form}} [{low:+{form}}, {high:+{form}}])"


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t-interval of paired differences; without limits where there is one pair."""
    mean = float(np.mean(differences))
    if len(differences) < 2:
        return mean, -math.inf, math.inf
    quantile = float(stats.t.ppf(0.5 + LEVEL / 2, len(differences) - 1))
    half = quantile * float(np.std(differences, ddof=1)) / math.sqrt(len(differences))
    return mean, mean - half, mean + half


def between(here: Entry | None, there: Entry | None, measure: Measure, about: str = "") -> Gap | None:
    """One place against another, on the seeds that both have; None where there is none."""
    if here is None or there is None:
        return None
    one, two = here.seeds.get(measure.key, {}), there.seeds.get(measure.key, {})
    pairs = {seed: one[seed] - two[seed] for seed in sorted(set(one) & set(two))}
    return Gap(pairs, about, measure.more_is_better) if pairs else None


def rows(
    measured: Mapping[Place, Entry], measure: Measure, block: str, ours: str, other: str, elsewhere: str | None = None
) -> dict[str, Gap]:
    """By column: a row of a block against another row, of the same block or of ``elsewhere``."""
    found = {}
    for column in dict.fromkeys(place[2] for place in measured if place[0] == block):
        there = measured.get((elsewhere or block, other, column))
        gap = between(measured.get((block, ours, column)), there, measure, column)
        if gap:
            found[column] = gap
    return found


def against(entry: Entry, number: float, measure: Measure, about: str = "") -> Gap | None:
    """A place against a number without a deviation, as papers print them: the interval is that of our own mean."""
    own = {seed: value - number for seed, value in entry.seeds.get(measure.key, {}).items()}
    return Gap(own, about, measure.more_is_better) if own else None


def average(gaps: Iterable[Gap]) -> Gap | None:
    """The mean of several comparisons, seed by seed, over the seeds that all of them have: one comparison."""
    every = list(gaps)
    if not every:
        return None
    shared = set.intersection(*(set(one.pairs) for one in every))
    means = {seed: float(np.mean([one.pairs[seed] for one in every])) for seed in sorted(shared)}
    return Gap(means, "on average", every[0].more_is_better) if means else None


def stand(gaps: Sequence[Gap]) -> list[bool]:
    """Holm: which differences stand when all of them together are to hold at 5 %."""
    order = sorted(range(len(gaps)), key=lambda k: gaps[k].p_value)
    kept = [False] * len(gaps)
    for rank, k in enumerate(order):
        if gaps[k].p_value > (1 - LEVEL) / (len(gaps) - rank):
            break
        kept[k] = True
    return kept


def count(gaps: Sequence[Gap], at: str = " on") -> str:
    """``above on 3 of 4 (s = 100, …), level on 1 (…); with 4 …``, or that one seed says nothing."""
    if all(one.word == NONE for one in gaps):
        return NO_VERDICT
    words = Counter(one.word for one in gaps)
    parts: list[str] = []
    for word in (ABOVE, EVEN, BELOW, NONE):
        if words[word]:
            named = ", ".join(one.about for one in gaps if one.word == word)
            whole = f" of {len(gaps)}" if not parts else ""
            said = next(one.spoken for one in gaps if one.word == word)
            parts.append(f"{said}{at} {words[word]}{whole}" + (f" ({named})" if words[word] < len(gaps) else ""))
    told = ", ".join(parts)
    differ = words[ABOVE] + words[BELOW]
    if differ and len(gaps) > 1:
        told += f"; with {len(gaps)} comparisons at once {sum(stand(gaps))} of {differ} stand (Holm)"
    return told


def sentence(gaps: Mapping[str, Gap], form: str = ".1f") -> str:
    """Comparisons of two rows: on average over the columns, and how many columns have which word."""
    every = list(gaps.values())
    mean = average(every)
    if mean is None:
        return "nothing to compare"
    if len(every) == 1:
        return f"{mean.show(form)} on {every[0].about}"
    if mean.word == NONE:
        return f"{mean.show(form)} (mean over {len(every)} columns)"
    return f"{mean.show(form)} on average over {len(every)} columns; by column {count(every)}"
