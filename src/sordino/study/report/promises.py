"""Is it private? Each client's standing against its own budget, the verdict of the page, and the words for both.

A result is believed only as far as it goes: a run that does not say ``"private": true`` is NOT PRIVATE, a client whose
spent ε is missing or above its budget is not "within budget".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sordino.study.report.gather import Client, Group, Run
from sordino.study.report.numbers import as_epsilon, listed, percent, plain, span

ROUNDING = 1e-6
"""Relative slack when spent is held against budget: JSON and display rounding, nothing more."""

WEAK = 10.0
"""Above this ε a promise rules out little: the page says so beside it."""


PHRASES = (
    ". Someone who sees all of that, knows every other record, and cannot tell whether one given record ",
    "was used or blanked out (50 : 50) can become ",
    ", leaving aside a chance of about δ.",
    " If the question is which of two records was used (replace-one): ",
    " its budget pays for no further turn.",
    " What is left of its budget would pay for at least one more turn like these.",
)
"""What most statements share, word for word: the page stores each once."""


class Standing(StrEnum):
    """How a client stands against its own budget."""

    KEPT = "within budget"
    EXCEEDED = "EXCEEDED"
    PUBLIC = "public data"
    NONE = "NOT PRIVATE"
    UNKNOWN = "not recorded"


@dataclass(frozen=True)
class Verdict:
    """One panel of the first screen: what holds, for which methods, in a headline and a sentence."""

    good: bool
    headline: str
    methods: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Sheet:
    """The clients of one method under seeds that share the same privacy record."""

    group: Group
    seeds: tuple[str, ...]
    run: Run


def standing(client: Client, private: bool) -> Standing:
    """Hold what a client spent against what it allowed: spent ≤ ε (1 + 1e-6)."""
    if not private:
        return Standing.NONE
    if client.epsilon is None or client.spent is None:
        return Standing.UNKNOWN
    if math.isinf(client.epsilon):
        return Standing.PUBLIC
    return Standing.KEPT if client.spent <= client.epsilon * (1 + ROUNDING) else Standing.EXCEEDED


def share(client: Client) -> float | None:
    """Spent ε over budget ε; None where either is missing or infinite."""
    if client.epsilon is None or client.spent is None or math.isinf(client.epsilon) or math.isinf(client.spent):
        return None
    return client.spent / client.epsilon


def certainty(epsilon: float) -> str:
    """How sure an undecided observer can become under ε: posterior e^ε/(1 + e^ε) from a prior of one half."""
    value = 1.0 / (1.0 + math.exp(-epsilon))
    return "all but certain" if value > 0.9995 else f"at most {percent(value)} sure"


def releases(client: Client, limit: int = 4) -> str:
    """What left the client: count × kind (sampling rate, noise multiplier)."""
    parts = [_release(one) for one in client.releases[:limit]]
    if len(client.releases) > limit:
        parts.append(f"{len(client.releases) - limit} more kinds")
    return "; ".join(parts) or "nothing"


def statement(client: Client, private: bool) -> str:
    """What one client's record of this run means, in plain words, with the replace-one figure beside it.

    Guarantees
    ----------
    Says how sure an observer can become only for a client that stayed within a finite budget; every other standing
    is named as what it is.
    """
    who = client.name
    match standing(client, private):
        case Standing.NONE:
            return (
                f"{who} has NO privacy guarantee from this run: what it sent was not protected, "
                "so any of its records may be recoverable."
            )
        case Standing.UNKNOWN:
            return f"The result does not record what {who} spent, so nothing can be promised to it."
        case Standing.PUBLIC:
            return f"{who} declared its data public (ε = ∞): it asked for no protection and has none."
        case Standing.EXCEEDED:
            return (
                f"{who} allowed {_epsilon(client.epsilon)} and spent {_epsilon(client.spent)}: "
                "its budget was EXCEEDED and the promise it was given does not hold."
            )
    return _kept(client)


def verdicts(groups: Sequence[Group]) -> list[Verdict]:
    """The panels of the first screen, bad news first."""
    bare = [group for group in groups if not group.private]
    rest = [group for group in groups if group.private]
    worst = {group.label: _worst(group) for group in rest}
    panels = []
    if bare:
        panels.append(
            Verdict(
                False,
                "NOT PRIVATE",
                _names(bare),
                "Trained without a privacy guarantee: the model and every update may reveal the records behind them. "
                "Good as a yardstick on public data; do not release it.",
            )
        )
    for bad, headline, text in (
        (Standing.EXCEEDED, "BUDGET EXCEEDED", "At least one client spent more than it allowed: {clients}."),
        (
            Standing.UNKNOWN,
            "NOT SHOWN TO BE PRIVATE",
            "The result does not record what every client allowed and spent, so no guarantee can be read from it.",
        ),
        (
            Standing.PUBLIC,
            "NOT PRIVATE",
            "Every client declared its data public (ε = ∞), so nothing was protected.",
        ),
    ):
        hit = [group for group in rest if worst[group.label] is bad]
        if hit:
            clients = listed(sorted({c.name for g in hit for r in g.runs for c in r.clients if _over(c)}))
            panels.append(Verdict(False, headline, _names(hit), text.format(clients=clients)))
    kept = [group for group in rest if worst[group.label] is Standing.KEPT]
    if kept:
        panels.append(Verdict(True, "Private", _names(kept), _kept_text(kept)))
    return panels


def sheets(groups: Sequence[Group]) -> list[Sheet]:
    """One sheet per method and distinct privacy record: seeds that charged alike share a sheet."""
    found: list[Sheet] = []
    for group in groups:
        alike: dict[tuple[Any, ...], list[Run]] = {}
        for run in group.runs:
            key = tuple(
                (c.name, c.epsilon, c.delta, c.spent, c.run, c.replace_one, c.size, c.ends, releases(c))
                for c in run.clients
            )
            alike.setdefault((run.private, key), []).append(run)
        found += [Sheet(group, tuple(str(run.seed) for run in runs), runs[0]) for runs in alike.values()]
    return found


def loosest(sheet: Sheet) -> Client | None:
    """The client of a sheet whose promise is the weakest: the largest finite spent ε, or simply the first client."""
    spent = [client for client in sheet.run.clients if client.spent is not None and math.isfinite(client.spent)]
    return max(spent, key=lambda client: client.spent or 0.0) if spent else next(iter(sheet.run.clients), None)


def terms(groups: Sequence[Group]) -> str:
    """Adjacency, sampling and accountant of the private runs, as the result names them."""
    clients = [client for group in groups if group.private for run in group.runs for client in run.clients]
    found = []
    for word, values in (
        ("adjacency", {client.adjacency for client in clients}),
        ("sampling", {client.sampling for client in clients}),
        ("accountant", {client.accountant for client in clients}),
    ):
        named = sorted(value for value in values if value)
        if named:
            found.append(f"{listed(named)} {word}")
    return ", ".join(found)


def _names(groups: Sequence[Group]) -> tuple[str, ...]:
    return tuple(group.label for group in groups)


def _over(client: Client) -> bool:
    return standing(client, True) is Standing.EXCEEDED


def _worst(group: Group) -> Standing:
    """The standing that decides a private group's verdict. Public clients do not spoil it unless all are public."""
    seen = {standing(client, True) for run in group.runs for client in run.clients}
    if any(not run.clients for run in group.runs):
        seen.add(Standing.UNKNOWN)
    order = (Standing.EXCEEDED, Standing.UNKNOWN, Standing.KEPT, Standing.PUBLIC)
    return next(one for one in order if one in seen)


def _kept_text(groups: Sequence[Group]) -> str:
    clients = [client for group in groups for run in group.runs for client in run.clients]
    spent = [c.spent for c in clients if c.spent is not None and standing(c, True) is Standing.KEPT]
    public = {client.name for client in clients if standing(client, True) is Standing.PUBLIC}
    weak = {c.name for c in clients if c.spent is not None and WEAK < c.spent < math.inf}
    text = f"Every client stayed within the budget it set for itself. Spent: ε\u00a0=\u00a0{span(spent, as_epsilon)}."
    if public:
        text += f" Declared public, without protection: {listed(sorted(public))}."
    if weak:
        text += f" A promise of ε above {plain(WEAK)} rules out little; that concerns {listed(sorted(weak))}."
    return text


def _release(one: Mapping[str, Any]) -> str:
    count, rate, noise = one.get("count"), one.get("rate"), one.get("noise")
    text = f"{count} × {one.get('what', 'release')}" if count is not None else str(one.get("what", "release"))
    facts = []
    if rate is not None:
        facts.append(f"rate {plain(float(rate))}")
    if noise is not None:
        facts.append(f"noise {plain(float(noise))}")
    return f"{text} ({', '.join(facts)})" if facts else text


def _kept(client: Client) -> str:
    epsilon, spent = client.epsilon or 0.0, client.spent or 0.0
    used = percent(spent / epsilon)
    text = (
        f"{client.name} allowed {_epsilon(epsilon)} at δ = {plain(client.delta)} and has spent {_epsilon(spent)} "
        f"({used} of it). "
    )
    if client.run is not None and client.run < spent * (1 - ROUNDING):
        text += f"This run accounts for {_epsilon(client.run)}; the rest was spent by earlier runs on its ledger. "
    text += (
        f"It released: {releases(client)}. Someone who sees all of that, knows every other record, and cannot tell "
        f"whether one given record {_difference(client)} (50 : 50) can become {certainty(spent)}, "
        "leaving aside a chance of about δ."
    )
    if spent > WEAK:
        text += " That is a weak promise."
    if client.adjacency != "replace-one":
        text += (
            " No finite replace-one figure was recorded."
            if client.replace_one is None
            else f" If the question is which of two records was used (replace-one): {_epsilon(client.replace_one)}, "
            f"{certainty(client.replace_one)}."
        )
    return text + _end(client)


def _end(client: Client) -> str:
    """When its budget ended, in words; nothing where the result does not say."""
    if client.ends is None:
        return ""
    if math.isinf(client.ends):
        return " What is left of its budget would pay for at least one more turn like these."
    if client.ends == 0:
        return " Its budget could not pay for a single turn of this run."
    return f" After round {int(client.ends)} its budget pays for no further turn."


def _epsilon(value: float | None) -> str:
    return f"ε\u00a0=\u00a0{as_epsilon(value)}"


def _difference(client: Client) -> str:
    return "was used or another in its place" if client.adjacency == "replace-one" else "was used or blanked out"
