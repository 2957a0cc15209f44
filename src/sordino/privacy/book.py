"""What a ledger's entries add up to: accounts, plans, counts. Values in memory; ``apply`` adds one entry to them.

An account's *commitments* are what must fit its budget: for every open plan its caps, used or not, and for every
closed plan what was really used. Its *block* is what was declared before its first charge: the part of its releases
whose (q, z) no release can have influenced (see ``planning``).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sordino.errors import BadInput, LedgerDamaged
from sordino.privacy.ledger_format import RESTORE, Entry
from sordino.privacy.living import Change, Life, Seats
from sordino.privacy.trust import Shared
from sordino.privacy.types import RECORD, Adjacency, Budget, Event, Sampling, Scheme


@dataclass(frozen=True)
class LedgerPlan:
    """What a client means to release in a run: ``turns`` times everything in ``turn`` (counts are per turn).

    A schedule without equal turns is one turn that holds the totals. ``study``: what people call the run; a label that
    decides nothing.
    """

    client: str
    run: str
    turn: tuple[Event, ...]
    turns: int
    study: str = field(default="", compare=False)


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
class TopUp:
    """A raise of a budget that an officer approved."""

    entry: int
    time: str
    epsilon: float
    reason: str
    officer: str


@dataclass(frozen=True)
class Account:
    """A client's account. ``budget`` includes the top-ups; ``opened`` is the budget it was opened with.

    ``composition``: ``declared``, the first plans by the accountant and later ones by a filter; or ``filter``,
    everything by a filter. ``owner``: whose records these are, where it is the account of a group of them
    (``privacy.groups``).
    """

    client: str
    budget: Budget
    opened: Budget
    accountant: str
    simulated: bool
    since: str
    composition: str = "declared"
    owner: str = ""
    top_ups: tuple[TopUp, ...] = ()
    not_private: tuple[str, ...] = ()


@dataclass
class Standing:
    """A declared plan: how many turns could be paid, the caps by count (None: no limit), and the use so far.

    ``charges`` counts the charges of each release: turns and attempts, whatever each of them counted; ``days`` has how
    often each was released on each day (YYYY-MM-DD), in order.
    """

    plan: LedgerPlan
    payable: int
    caps: dict[str, int] | None
    entry: int
    open: bool = True
    used: dict[str, int] = field(default_factory=dict)
    charges: dict[str, int] = field(default_factory=dict)
    days: dict[str, dict[str, int]] = field(default_factory=dict)

    def cap(self, what: str) -> int | None:
        """How often ``what`` may be released in this run altogether."""
        return None if self.caps is None else self.caps[what]

    def events(self, counts: dict[str, int]) -> list[Event]:
        """The plan's events with these counts; events that did not happen are left out."""
        return [e.times(counts[e.what]) for e in self.plan.turn if counts.get(e.what, 0) > 0]


@dataclass(frozen=True)
class OpeningBlock:
    """What a client had declared when it was first charged: the caps of the plans that were open, by run.

    ``budget`` is what the account had then. None of this can depend on a release.
    """

    budget: Budget
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


@dataclass(frozen=True)
class Split:
    """How a site's records were parted into training and held-out, once and for ever.

    ``key`` is the secret key of the hash, ``ids`` the column of the records' ids; where they have none (an empty
    text), ``frozen`` is a commitment to the file that their places are in.
    """

    entry: int
    time: str
    share: float
    key: str
    ids: str
    frozen: str = ""


@dataclass
class Book:
    """The sum of all entries so far. ``terms`` is the last entry that was not a charge or a stored copy.

    ``orders``: the Rényi order of an account's filter, once a plan was admitted by it. ``unprotected``: how often a
    client released something without noise, by run and kind. ``life``: ids that come and go, where they do.
    """

    identity: str = ""
    terms: int = 0
    accounts: dict[str, Account] = field(default_factory=dict)
    standings: dict[str, dict[str, Standing]] = field(default_factory=dict)
    blocks: dict[str, OpeningBlock] = field(default_factory=dict)
    orders: dict[str, float] = field(default_factory=dict)
    bindings: list[Binding] = field(default_factory=list)
    split: Split | None = None
    life: Life | None = None
    unprotected: Counter[tuple[str, str, str]] = field(default_factory=Counter)

    def account(self, client: str) -> Account:
        """The client's account, or an error that says how to get one."""
        try:
            return self.accounts[client]
        except KeyError:
            raise BadInput(f"client {client!r} has no account in this ledger: open_account first") from None

    def standing(self, client: str, run: str) -> Standing | None:
        """The plan that the client declared for the run, if any."""
        return self.standings.get(client, {}).get(run)

    def declared(self, client: str, run: str) -> Standing:
        """The plan that the client declared for the run, or an error that says how to get one."""
        self.account(client)
        standing = self.standing(client, run)
        if standing is None:
            raise BadInput(f"client {client!r} declared no plan for run {run!r}: declare it first")
        return standing

    def spent(self, client: str, run: str | None = None) -> list[Event]:
        """What was charged in one run or in all, one event for each run and kind of release."""
        own = self.standings.get(client, {})
        return [e for name, s in own.items() if run in (None, name) for e in s.events(s.used)]

    def commitments(self, client: str, but: str | None = None) -> list[Event]:
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


def kinds(events: list[Event]) -> Counter[tuple[Sampling, float, Shared | None]]:
    """How often each (sampling, noise, how it is shared) occurs: all that composition knows of a release."""
    found: Counter[tuple[Sampling, float, Shared | None]] = Counter()
    for event in events:
        found[event.sampling, event.noise, event.shared] += event.count
    return found


def check_names(**names: str) -> None:
    """Refuse empty names; each argument's name is what the error calls it."""
    for role, name in names.items():
        if not isinstance(name, str) or not name.strip():
            raise BadInput(f"{role} {name!r} must be a text that is not empty")


def label(text: str) -> str:
    """A name for people, which somebody else may have chosen: one line of at most 80 characters that can be shown."""
    shown = "".join(one if one.isprintable() else " " for one in text)
    return " ".join(shown.split())[:80]


def number(value: float) -> float | None:
    """A figure for JSON, where infinity is null."""
    return None if math.isinf(value) else float(value)


def _figure(value: float | None) -> float:
    """A figure from JSON, where infinity is null."""
    return math.inf if value is None else float(value)


def plan_body(
    plan: LedgerPlan, payable: int, caps: dict[str, int] | None, order: float | None = None
) -> dict[str, Any]:
    """A plan as an entry holds it; the adjacency is the account's. ``order``: of the filter that admitted it."""
    turn = [
        {"what": e.what, "scheme": str(e.sampling.scheme), "rate": float(e.sampling.rate), "noise": number(e.noise),
         "count": int(e.count), **({} if e.shared is None else {"shared": asdict(e.shared)})}
        for e in plan.turn
    ]  # fmt: skip
    body = {"turn": turn, "turns": int(plan.turns), "payable": payable, "caps": caps}
    study = label(plan.study)
    return {**body, **({} if order is None else {"order": order}), **({"study": study} if study else {})}


def apply(book: Book, entry: Entry) -> None:
    """Add one entry to the book; an entry that cannot follow from those before it raises ``LedgerDamaged``."""
    try:
        _add(book, entry, json.loads(entry.body) if entry.body else {})
    except (KeyError, ValueError, TypeError) as error:
        raise LedgerDamaged(f"entry {entry.number} of the ledger makes no sense ({error}): {RESTORE}") from error
    if entry.kind not in ("charge", "stored", "forgotten", "unprotected"):
        book.terms = entry.number


def _add(book: Book, e: Entry, body: dict[str, Any]) -> None:
    """How every kind of entry changes the book."""
    client, run = str(e.client), str(e.run)
    match e.kind:
        case "ledger":
            book.identity = body["id"]
        case "account":
            neighbours = Adjacency.parse(body["adjacency"])
            budget = Budget(_figure(body["epsilon"]), body["delta"], neighbours, body.get("unit", RECORD))
            said = body["accountant"], body["simulated"], e.time, body.get("composition", "declared")
            book.accounts[client] = Account(client, budget, budget, *said, owner=body.get("owner", ""))
        case "plan":
            _declare(book, e, body)
        case "charge":
            _charge(book, e)
        case "closed":
            book.standings[client][run].open = False
        case "top-up":
            old = book.accounts[client]
            raised = replace(old.budget, epsilon=old.budget.epsilon + body["epsilon"])
            note = TopUp(e.number, e.time, body["epsilon"], body["reason"], body["officer"])
            book.accounts[client] = replace(old, budget=raised, top_ups=(*old.top_ups, note))
        case "not-private":
            old = book.accounts[client]
            book.accounts[client] = replace(old, not_private=(*old.not_private, body["reason"]))
        case "bound":
            book.bindings.append(Binding(e.number, e.time, client, **body))
        case "split":
            if book.split is not None:
                raise ValueError("records are parted once")
            book.split = Split(e.number, e.time, **body)
        case "living":
            if book.life is not None:
                raise ValueError("a ledger begins to know ids once")
            book.life = Life(e.number, e.time, body["column"], body["key"])
        case "ids":
            _life(book).happened(Change(e.number, e.time, str(e.what), body["cohort"], body["count"]))
        case "seated":
            seats = Seats(e.number, e.time, tuple(body["cohorts"]), body["count"])
            _life(book).seated(run, body["held"], seats)
        case "restated":
            _restate(book, client, Adjacency.parse(body["adjacency"]))
        case "unprotected":
            book.unprotected[client, run, str(e.what)] += 1
        case "migrated" | "stored" | "forgotten":
            pass  # these change no balance
        case _:
            raise KeyError(e.kind)


def _life(book: Book) -> Life:
    if book.life is None:
        raise ValueError("the ledger knows no ids yet")
    return book.life


def _declare(book: Book, e: Entry, body: dict[str, Any]) -> None:
    client, run = str(e.client), str(e.run)
    adjacency = book.accounts[client].budget.adjacency
    turn = tuple(
        Event(
            one["what"],
            Sampling(Scheme(one["scheme"]), one["rate"]),
            _figure(one["noise"]),
            one["count"],
            adjacency,
            Shared(**one["shared"]) if "shared" in one else None,
        )
        for one in body["turn"]
    )
    earlier = book.standing(client, run)
    study = str(body.get("study") or (earlier.plan.study if earlier else ""))
    plan = LedgerPlan(client, run, turn, body["turns"], study)
    standing = Standing(plan, body["payable"], body["caps"], e.number)
    if earlier is not None:
        standing.used, standing.charges, standing.days = earlier.used, earlier.charges, earlier.days
    book.standings.setdefault(client, {})[run] = standing
    if body.get("order") is not None:
        book.orders.setdefault(client, float(body["order"]))


def _charge(book: Book, e: Entry) -> None:
    client = str(e.client)
    standing = book.standings[client][str(e.run)]
    what, count = str(e.what), int(e.amount or 0)
    total = standing.used.get(what, 0) + count
    cap = standing.cap(what)
    if count < 1 or e.used != total or not standing.open or (cap is not None and total > cap):
        raise ValueError(f"charge {e.number} does not follow from the plan and the charges before it")
    if client not in book.blocks:
        caps = {run: s.caps for run, s in book.standings[client].items() if s.open}
        book.blocks[client] = OpeningBlock(book.accounts[client].budget, caps)
    standing.used[what] = total
    today = standing.days.setdefault(e.time[:10], {})
    today[what] = today.get(what, 0) + count
    standing.charges[what] = standing.charges.get(what, 0) + 1


def _restate(book: Book, client: str, adjacency: Adjacency) -> None:
    """The account and all its releases under another name of the same neighbours (add-remove is zero-out)."""
    old = book.accounts[client]
    budget, opened = (replace(one, adjacency=adjacency) for one in (old.budget, old.opened))
    book.accounts[client] = replace(old, budget=budget, opened=opened)
    if client in book.blocks:
        block = book.blocks[client]
        book.blocks[client] = replace(block, budget=replace(block.budget, adjacency=adjacency))
    for standing in book.standings.get(client, {}).values():
        turn = tuple(replace(event, adjacency=adjacency) for event in standing.plan.turn)
        standing.plan = replace(standing.plan, turn=turn)
