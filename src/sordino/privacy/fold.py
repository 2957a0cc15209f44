"""How every kind of entry changes the book: a ledger's entries, added up one after the other."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sordino.errors import LedgerDamaged
from sordino.privacy.book import Account, Binding, Block, Book, Plan, Standing, TopUp, figure
from sordino.privacy.chain import RESTORE, Entry
from sordino.privacy.types import Adjacency, Budget, Event, Sampling, Scheme


def _plan(client: str, run: str, body: dict[str, Any], adjacency: Adjacency) -> Plan:
    turn = tuple(
        Event(e["what"], Sampling(Scheme(e["scheme"]), e["rate"]), figure(e["noise"]), e["count"], adjacency)
        for e in body["turn"]
    )
    return Plan(client, run, turn, body["turns"])


def _open(book: Book, e: Entry, body: dict[str, Any]) -> None:
    budget = Budget(figure(body["epsilon"]), body["delta"], Adjacency.parse(body["adjacency"]))
    client = str(e.client)
    composition = body.get("composition", "declared")
    book.accounts[client] = Account(client, budget, budget, body["accountant"], body["simulated"], e.time, composition)


def _declare(book: Book, e: Entry, body: dict[str, Any]) -> None:
    client, run = str(e.client), str(e.run)
    plan = _plan(client, run, body, book.accounts[client].budget.adjacency)
    earlier = book.standing(client, run)
    standing = Standing(plan, body["payable"], body["caps"], e.number)
    if earlier is not None:
        standing.used, standing.charges = earlier.used, earlier.charges
    book.standings.setdefault(client, {})[run] = standing
    if body.get("order") is not None:
        book.orders.setdefault(client, float(body["order"]))


def _charge(book: Book, e: Entry, body: dict[str, Any]) -> None:
    standing = book.standings[str(e.client)][str(e.run)]
    what, count = str(e.what), int(e.amount or 0)
    total = standing.used.get(what, 0) + count
    cap = standing.cap(what)
    if count < 1 or e.used != total or not standing.open or (cap is not None and total > cap):
        raise ValueError(f"charge {e.number} does not follow from the plan and the charges before it")
    if str(e.client) not in book.blocks:
        book.blocks[str(e.client)] = _block(book, str(e.client))
    standing.used[what] = total
    standing.charges[what] = standing.charges.get(what, 0) + 1


def _block(book: Book, client: str) -> Block:
    own = {run: s for run, s in book.standings[client].items() if s.open}
    payable, caps = {run: s.payable for run, s in own.items()}, {run: s.caps for run, s in own.items()}
    return Block(book.accounts[client].budget, payable, caps)


def _close(book: Book, e: Entry, body: dict[str, Any]) -> None:
    book.standings[str(e.client)][str(e.run)].open = False


def _top_up(book: Book, e: Entry, body: dict[str, Any]) -> None:
    old = book.accounts[str(e.client)]
    raised = replace(old.budget, epsilon=old.budget.epsilon + body["epsilon"])
    note = TopUp(e.number, e.time, body["epsilon"], body["reason"], body["officer"])
    book.accounts[old.client] = replace(old, budget=raised, top_ups=(*old.top_ups, note))


def _restate(book: Book, e: Entry, body: dict[str, Any]) -> None:
    """The account and all its releases under another name of the same neighbours (add-remove is zero-out)."""
    adjacency, old = Adjacency.parse(body["adjacency"]), book.accounts[str(e.client)]
    budget, opened = (replace(one, adjacency=adjacency) for one in (old.budget, old.opened))
    book.accounts[old.client] = replace(old, budget=budget, opened=opened)
    if old.client in book.blocks:
        block = book.blocks[old.client]
        book.blocks[old.client] = replace(block, budget=replace(block.budget, adjacency=adjacency))
    for standing in book.standings.get(old.client, {}).values():
        turn = tuple(replace(event, adjacency=adjacency) for event in standing.plan.turn)
        standing.plan = replace(standing.plan, turn=turn)


def _not_private(book: Book, e: Entry, body: dict[str, Any]) -> None:
    old = book.accounts[str(e.client)]
    book.accounts[old.client] = replace(old, not_private=(*old.not_private, body["reason"]))


def _bind(book: Book, e: Entry, body: dict[str, Any]) -> None:
    said = (body["site"], body["commitment"], body["salt"], body.get("reason", ""), body.get("officer", ""))
    book.bindings.append(Binding(e.number, e.time, str(e.client), *said))


def _unprotected(book: Book, e: Entry, body: dict[str, Any]) -> None:
    place = (str(e.client), str(e.run), str(e.what))
    book.unprotected[place] = book.unprotected.get(place, 0) + 1


def _begin(book: Book, e: Entry, body: dict[str, Any]) -> None:
    book.identity = body["id"]


def _nothing(book: Book, e: Entry, body: dict[str, Any]) -> None:
    """Stored and forgotten copies and migrations change no balance."""


_KINDS: dict[str, Callable[[Book, Entry, dict[str, Any]], None]] = {
    "ledger": _begin,
    "migrated": _nothing,
    "account": _open,
    "plan": _declare,
    "charge": _charge,
    "closed": _close,
    "top-up": _top_up,
    "not-private": _not_private,
    "bound": _bind,
    "restated": _restate,
    "unprotected": _unprotected,
    "stored": _nothing,
    "forgotten": _nothing,
}
_RUNNING = ("charge", "stored", "forgotten", "unprotected")


def apply(book: Book, entry: Entry) -> None:
    """Add one entry to the book; an entry that cannot follow from those before it raises ``LedgerDamaged``."""
    try:
        _KINDS[entry.kind](book, entry, json.loads(entry.body) if entry.body else {})
    except (KeyError, ValueError, TypeError) as error:
        raise LedgerDamaged(f"entry {entry.number} of the ledger makes no sense ({error}): {RESTORE}") from error
    if entry.kind not in _RUNNING:
        book.terms = entry.number
