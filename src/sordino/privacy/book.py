"""What a ledger's entries add up to: accounts, plans, counts. Values in memory; ``fold`` adds entries to them.

An account's *commitments* are what must fit its budget: for every open plan its caps, used or not, and for every
closed plan what was really used. Its *block* is what was declared before its first charge: the part of its releases
whose (q, z) no release can have influenced (see ``composing``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sordino.errors import BadInput
from sordino.privacy.types import Budget, Event, Sampling


@dataclass(frozen=True)
class Plan:
    """What a client means to release in a run: ``turns`` times everything in ``turn`` (counts are per turn).

    A schedule without equal turns is one turn that holds the totals.
    """

    client: str
    run: str
    turn: tuple[Event, ...]
    turns: int


@dataclass(frozen=True)
class Charge:
    """A request to release ``what`` ``count`` times. ``key`` names the draw, ``request`` is the request's hash."""

    client: str
    run: str
    key: str
    what: str
    count: int
    request: str


@dataclass(frozen=True)
class Receipt:
    """A charge as recorded: ``used`` of ``cap`` (None: no cap) in its run, counting this one.

    ``replayed``: a simulation repeated a draw that was paid for, so nothing was charged now.
    """

    client: str
    run: str
    key: str
    what: str
    count: int
    entry: int
    attempt: int
    used: int
    cap: int | None
    replayed: bool


@dataclass(frozen=True)
class TopUp:
    """A raise of a budget that an officer approved."""

    entry: int
    time: str
    epsilon: float
    reason: str
    officer: str


@dataclass(frozen=True)
class Account:
    """A client's account. ``budget`` includes the top-ups; ``opened`` is the budget it was opened with."""

    client: str
    budget: Budget
    opened: Budget
    accountant: str
    simulated: bool
    since: str
    composition: str = "declared"
    """``declared``: the first plans by the accountant, later ones by a filter; ``filter``: everything by a filter."""
    top_ups: tuple[TopUp, ...] = ()
    not_private: tuple[str, ...] = ()


@dataclass
class Standing:
    """A declared plan: how many turns could be paid, the caps by count (None: no limit), and the use so far."""

    plan: Plan
    payable: int
    caps: dict[str, int] | None
    entry: int
    open: bool = True
    used: dict[str, int] = field(default_factory=dict)
    charges: dict[str, int] = field(default_factory=dict)
    """How many charges there were of each release: turns and attempts, whatever they counted."""

    def cap(self, what: str) -> int | None:
        """How often ``what`` may be released in this run altogether."""
        return None if self.caps is None else self.caps[what]

    def events(self, counts: dict[str, int]) -> list[Event]:
        """The plan's events with these counts; events that did not happen are left out."""
        return [e.times(counts[e.what]) for e in self.plan.turn if counts.get(e.what, 0) > 0]


@dataclass(frozen=True)
class Block:
    """What a client had declared when it was first charged: by run the turns and caps of the plans that were open.

    ``budget`` is what the account had then. None of this can depend on a release.
    """

    budget: Budget
    payable: dict[str, int]
    caps: dict[str, dict[str, int] | None]


@dataclass(frozen=True)
class Binding:
    """Whose ledger this is: a site, its account here, and a commitment to its records under a secret ``salt``.

    ``officer`` and ``reason`` say who moved it there; the first binding has none.
    """

    entry: int
    time: str
    account: str
    site: str
    commitment: str
    salt: str
    reason: str = ""
    officer: str = ""


@dataclass
class Book:
    """The sum of all entries so far. ``terms`` is the last entry that was not a charge or a stored copy.

    ``orders``: the Rényi order of an account's filter, once a plan was admitted by it. ``unprotected``: how often a
    client released something without noise, by run and kind.
    """

    identity: str = ""
    terms: int = 0
    accounts: dict[str, Account] = field(default_factory=dict)
    standings: dict[str, dict[str, Standing]] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)
    orders: dict[str, float] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    unprotected: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def standing(self, client: str, run: str) -> Standing | None:
        """The plan that the client declared for the run, if any."""
        return self.standings.get(client, {}).get(run)

    def spent(self, client: str, run: str | None = None) -> list[Event]:
        """What was charged, one event for each run and kind of release."""
        return [e for s in self._of(client, run) for e in s.events(s.used)]

    def commitments(self, client: str, but: str) -> list[Event]:
        """What must fit the budget besides run ``but``: caps of open plans, use of closed ones."""
        others = (s for run, s in self.standings.get(client, {}).items() if run != but)
        return [e for s in others for e in s.events(s.caps if s.open and s.caps is not None else s.used)]

    def block_events(self, client: str) -> list[Event]:
        """What the client had declared before its first charge, all of it; before that, what is declared now."""
        block, own = self.blocks.get(client), self.standings.get(client, {})
        caps = {run: s.caps for run, s in own.items() if s.open} if block is None else block.caps
        return [e for run, most in caps.items() if most is not None for e in own[run].events(most)]

    def beyond(self, client: str) -> bool:
        """Whether anything was charged that was not declared before the first charge, so often and of that kind."""
        if client not in self.blocks or self.accounts[client].budget.is_public:
            return False
        return bool(kinds(self.spent(client)) - kinds(self.block_events(client)))

    def _of(self, client: str, run: str | None) -> Iterator[Standing]:
        own = self.standings.get(client, {})
        return (s for name, s in own.items() if run is None or name == run)


def kinds(events: list[Event]) -> Counter[tuple[Sampling, float]]:
    """How often each (sampling, noise) occurs: all that composition knows of a release."""
    found: Counter[tuple[Sampling, float]] = Counter()
    for event in events:
        found[event.sampling, event.noise] += event.count
    return found


def check_names(**names: str) -> None:
    """Refuse empty names; each argument's name is what the error calls it."""
    for role, name in names.items():
        if not isinstance(name, str) or not name.strip():
            raise BadInput(f"{role} {name!r} must be a text that is not empty")


def account_of(book: Book, client: str) -> Account:
    """The client's account, or an error that says how to get one."""
    try:
        return book.accounts[client]
    except KeyError:
        raise BadInput(f"client {client!r} has no account in this ledger: open_account first") from None


def standing_of(book: Book, client: str, run: str) -> Standing:
    """The client's plan for a run, or an error that says how to get one."""
    account_of(book, client)
    standing = book.standing(client, run)
    if standing is None:
        raise BadInput(f"client {client!r} declared no plan for run {run!r}: declare it first")
    return standing


def number(value: float) -> float | None:
    """A figure for JSON, where infinity is null."""
    return None if math.isinf(value) else float(value)


def figure(value: float | None) -> float:
    """A figure from JSON, where infinity is null."""
    return math.inf if value is None else float(value)


def plan_body(plan: Plan, payable: int, caps: dict[str, int] | None, order: float | None = None) -> dict[str, Any]:
    """A plan as an entry holds it; the adjacency is the account's. ``order``: of the filter that admitted it."""
    turn = [
        {"what": e.what, "scheme": str(e.sampling.scheme), "rate": float(e.sampling.rate), "noise": number(e.noise),
         "count": int(e.count)}
        for e in plan.turn
    ]  # fmt: skip
    body = {"turn": turn, "turns": int(plan.turns), "payable": payable, "caps": caps}
    return body if order is None else {**body, "order": order}


def account_body(budget: Budget, accountant: str, simulated: bool, composition: str) -> dict[str, Any]:
    """An account as an entry holds it."""
    return {
        "composition": composition,
        "epsilon": number(budget.epsilon),
        "delta": float(budget.delta),
        "adjacency": str(budget.adjacency),
        "accountant": accountant,
        "simulated": bool(simulated),
    }
