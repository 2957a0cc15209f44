"""Is it private? How each client's promise was kept, the verdict of the page, and the words for both.

A result is believed only as far as it goes: a run that does not say ``"private": true`` is NOT PRIVATE, a client whose
spent ε is missing or above its budget is not "within budget".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sordino.privacy.statement import words_of
from sordino.privacy.trust import EVERYBODY
from sordino.study.report.gather import Client, Group, SeedRun
from sordino.study.report.numbers import listed, plain, short, upward
from sordino.study.report.page import filled

ROUNDING = 1e-6
"""Relative slack when spent is held against budget: JSON and display rounding, nothing more."""

WEAK = 10.0
"""Above this ε a promise rules out little: the page says so beside it."""


class Promise(StrEnum):
    """What became of the promise to a client: how it stands against its own budget."""

    KEPT = "within budget"
    EXCEEDED = "EXCEEDED"
    PUBLIC = "public data"
    NONE = "NOT PRIVATE"
    UNKNOWN = "not recorded"


def promise_to(client: Client, private: bool) -> Promise:
    """Hold what a client spent against what it allowed: spent ≤ ε (1 + 1e-6), for every level where it has some."""
    if not private:
        return Promise.NONE
    pairs = [(client.epsilon, client.spent), *((allowed, spent) for _, allowed, spent in client.levels)]
    known = [(allowed, spent) for allowed, spent in pairs if allowed is not None and spent is not None]
    if len(known) < len(pairs):
        return Promise.UNKNOWN
    if client.epsilon == math.inf:
        return Promise.PUBLIC
    kept = all(spent <= allowed * (1 + ROUNDING) for allowed, spent in known)
    return Promise.KEPT if kept else Promise.EXCEEDED


def share(client: Client) -> float | None:
    """Spent ε over budget ε; None where either is missing or infinite."""
    if client.epsilon is None or client.spent is None or math.isinf(client.epsilon) or math.isinf(client.spent):
        return None
    return client.spent / client.epsilon


# ---- the first screen ----


def verdicts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """What the first screen says, bad news first: what became of the promises, under which methods, to whom."""
    found = []
    for verdict in (Promise.NONE, Promise.EXCEEDED, Promise.UNKNOWN, Promise.PUBLIC, Promise.KEPT):
        hit = [group for group in groups if _worst(group) is verdict]
        clients = [(client, promise_to(client, run.private)) for group in hit for client, run in group.clients]
        found.append(
            {
                "promise": verdict,
                "methods": [group.label for group in hit],
                "names": {one: sorted({client.name for client, told in clients if told is one}) for one in Promise},
                "weak": sorted({client.name for client, _ in clients if WEAK < (client.spent or 0.0) < math.inf}),
                "spent": [client.spent for client, told in clients if told is Promise.KEPT],
            }
        )
    return [one for one in found if one["methods"]]


def _worst(group: Group) -> Promise:
    """What decides a group's verdict. Public clients do not spoil it unless all are public."""
    if not group.private:
        return Promise.NONE
    seen = {promise_to(client, True) for client, _ in group.clients}
    if any(not run.clients for run in group.runs):
        seen.add(Promise.UNKNOWN)
    order = (Promise.EXCEEDED, Promise.UNKNOWN, Promise.KEPT, Promise.PUBLIC)
    return next(one for one in order if one in seen)


def terms(groups: Sequence[Group]) -> str:
    """What is protected, adjacency, sampling and accountant of the private runs, as the result names them."""
    clients = [client for group in groups if group.private for client, _ in group.clients]
    named = {
        word: sorted({getattr(client, word) for client in clients} - {""})
        for word in ("adjacency", "sampling", "accountant")
    }
    said = ", ".join(f"{listed(values)} {word}" for word, values in named.items() if values)
    units = listed(sorted({f"{client.unit}-level" for client in clients}))
    return said and f"{units[0].upper()}{units[1:]} (ε, δ)-differential privacy: {said}"


def is_shared(client: Client) -> bool:
    """Whether the client's promise rests on noise that it shared with others."""
    return client.trust not in ("", EVERYBODY)


def trusts(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """The promises that hold against some only: whom, under which methods, and what own shares alone would promise."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        for client, run in group.clients:
            if is_shared(client) and promise_to(client, run.private) in (Promise.KEPT, Promise.EXCEEDED):
                one = found.setdefault(client.trust, {"trust": client.trust, "methods": [], "own": []})
                one["methods"] += [] if group.label in one["methods"] else [group.label]
                one["own"].append(client.own or math.inf)
    return list(found.values())


def trust_of(group: Group) -> str:
    """Whom the promises of a method hold against, in words, as far as its results say; empty where they do not."""
    clients = [client for client, run in group.clients if run.private and client.epsilon != math.inf]
    return "; ".join(dict.fromkeys(client.trust for client in clients if client.trust))


# ---- client by client ----


def sheets(groups: Sequence[Group]) -> dict[str, Any]:
    """The client table's sheets, one per method and distinct privacy record: seeds that charged alike share a sheet.

    Texts are stored once; a row has their places.
    """
    texts: dict[str, int] = {}

    def stored(value: Any) -> Any:
        return [stored(one) for one in value] if isinstance(value, list) else texts.setdefault(value, len(texts))

    found = []
    for group in groups:
        alike: dict[str, tuple[list[list[Any]], list[SeedRun]]] = {}
        for run in group.runs:
            rows = [_row(client, run.private) for client in run.clients]
            alike.setdefault(repr((run.private, rows)), (rows, []))[1].append(run)
        for rows, runs in alike.values():
            seeds = f"seed{'s' if len(runs) > 1 else ''} {', '.join(str(run.seed) for run in runs)}"
            found.append(
                {
                    "label": group.label if seeds == "seed None" else f"{group.label}, {seeds}",
                    "rows": [[*row[:7], *map(stored, row[7:10]), row[10]] for row in rows],
                    "private": runs[0].private,
                }
            )
    return {"sheets": found, "texts": list(texts)}


def _row(client: Client, private: bool) -> list[Any]:
    """name, records, budget, δ, spent, share, replace-one, releases, standing, the statement's parts, budget's end."""

    def shown(epsilon: float | None) -> float | int | str | None:
        """Rounded up, ∞ as a sign; a run that is not private has no ε to show."""
        if epsilon is not None and math.isinf(epsilon):
            return "∞" if private else None
        return short(upward(epsilon))

    end: int | str | None = None
    if private and client.ends is not None:
        lasting = "never" if client.epsilon == math.inf else "outlasts the run"
        end = lasting if math.isinf(client.ends) else int(client.ends)
    return [
        client.name,
        short(client.size),
        shown(client.epsilon),
        client.delta,
        shown(client.spent),
        short(share(client), 4),
        short(upward(client.replace_one)),
        releases(client),
        promise_to(client, private).value,
        _sentences(client, private),
        end,
    ]


def releases(client: Client, limit: int = 4) -> str:
    """What left the client: count × kind (sampling rate, noise multiplier)."""
    parts = [_release(one) for one in client.releases[:limit]]
    if len(client.releases) > limit:
        parts.append(f"{len(client.releases) - limit} more kinds")
    return "; ".join(parts) or "nothing"


def _release(one: Mapping[str, Any]) -> str:
    counted = "" if one.get("count") is None else f"{one['count']} × "
    facts = ", ".join(f"{key} {plain(float(one[key]))}" for key in ("rate", "noise") if one.get(key) is not None)
    return f"{counted}{one.get('what', 'release')}{f' ({facts})' if facts else ''}"


def statement(client: Client, private: bool) -> str:
    """What one client's record of this run means, in plain words, with the replace-one figure beside it.

    Guarantees
    ----------
    Says how sure an observer can become only for a client that stayed within a finite budget; every other promise
    is named as what it is.
    """
    return " ".join(_sentences(client, private))


def _sentences(client: Client, private: bool) -> list[str]:
    """The statement's sentences; the page stores once what several statements share."""
    told = filled(
        "statement.txt",
        client=client,
        promise=promise_to(client, private),
        share=share(client),
        earlier=client.run is not None and client.run < (client.spent or 0.0) * (1 - ROUNDING),
        releases=releases(client),
        weak=WEAK,
        lasting=client.ends == math.inf,
        shared=is_shared(client),
        units=words_of(client.unit)["units"],
    )
    return told.strip("\n").split("\n")
