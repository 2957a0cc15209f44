"""Charges against plans, by count. No accountant runs here, so a round of a thousand clients takes milliseconds."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.book import Book, Charge, Receipt, Standing, account_of, check_names, standing_of
from sordino.privacy.chain import Entry
from sordino.privacy.ledger_file import FIELDS, Draft, LedgerFile

LATER = (
    "The run was declared after the account's first release and needs room in its filter: where the first plans leave "
    "none, closing one frees only releases of its own rate and noise; open "
    "accounts with composition 'filter', or begin with a smaller run (limits.run_epsilon at a site)"
)

Draw = tuple[str, str, str]  # client, run, key


def draft_charges(file: LedgerFile, draft: Draft, charges: Sequence[Charge], replay: bool) -> list[Receipt]:
    """Draft the entries of all charges, or raise at the first that is refused; the caller's transaction decides.

    Guarantees: every entry's running total is at most its plan's cap, rows of the same call included.
    """
    if len({(c.client, c.run, c.key) for c in charges}) != len(charges):
        raise BadInput("two charges of one call have the same client, run and key: a key names one draw")
    receipts: list[Receipt] = []
    totals: dict[tuple[str, str, str], int] = {}
    last = _last_attempts(file, charges)
    for charge in charges:
        standing = _planned(file.book, charge, replay)
        earlier = last.get((charge.client, charge.run, charge.key))
        if replay and earlier is not None:
            receipts.append(_replayed(charge, earlier, standing.cap(charge.what)))
            continue
        place = (charge.client, charge.run, charge.what)
        total = totals.get(place, standing.used.get(charge.what, 0)) + int(charge.count)
        _check_room(charge, standing, total, _is_late(file.book, charge, standing))
        totals[place] = total
        entry = draft.add(
            "charge",
            client=charge.client,
            run=charge.run,
            what=charge.what,
            key=charge.key,
            attempt=0 if earlier is None else int(earlier.attempt or 0) + 1,
            amount=int(charge.count),
            used=total,
            request=charge.request,
        )
        receipts.append(_receipt(entry, standing.cap(charge.what)))
    return receipts


def _planned(book: Book, charge: Charge, replay: bool) -> Standing:
    """The plan that a charge falls under; charges outside any plan are refused."""
    check_names(client=charge.client, run=charge.run, key=charge.key, request=charge.request)
    if charge.count < 1:
        raise BadInput(f"charge {charge.key!r} of client {charge.client!r} has count {charge.count!r}: it is ≥ 1")
    if replay and not account_of(book, charge.client).simulated:
        raise BadInput(
            f"client {charge.client!r} is not simulated: at a site a repeated draw is a new charge (replay=False)"
        )
    standing = standing_of(book, charge.client, charge.run)
    if all(event.what != charge.what for event in standing.plan.turn):
        raise BadInput(f"the plan of client {charge.client!r} for run {charge.run!r} has no {charge.what!r}")
    return standing


def _last_attempts(file: LedgerFile, charges: Sequence[Charge]) -> dict[Draw, Entry]:
    """The newest earlier charge of each of these draws, in one query."""
    asked = json.dumps([(c.client, c.run, c.key) for c in charges])
    rows = file.db.execute(
        f"SELECT {FIELDS} FROM (SELECT json_extract(value, '$[0]') AS c, json_extract(value, '$[1]') AS r, "
        "json_extract(value, '$[2]') AS k FROM json_each(?)) CROSS JOIN entries "
        "ON kind = 'charge' AND client = c AND run = r AND entries.key = k ORDER BY attempt",
        (asked,),
    )
    return {(str(e.client), str(e.run), str(e.key)): e for e in map(Entry._make, rows)}


def _is_late(book: Book, charge: Charge, standing: Standing) -> bool:
    """Whether the plan was cut short, and is one that was declared after the account's first charge."""
    block = book.blocks.get(charge.client)
    return block is not None and standing.payable < standing.plan.turns and charge.run not in block.payable


def _check_room(charge: Charge, standing: Standing, total: int, late: bool) -> None:
    """Refuse a charge on a closed plan or beyond the plan's cap; ``late``: say what a later plan is paid from."""
    if not standing.open:
        raise BudgetRefused(
            f"the plan of client {charge.client!r} for run {charge.run!r} is closed: declare it again to go on"
        )
    cap = standing.cap(charge.what)
    if cap is not None and total > cap:
        raise BudgetRefused(
            f"client {charge.client!r} would overdraw in run {charge.run!r}: {charge.what!r} was released "
            f"{total - charge.count} of at most {cap} times, {charge.count} more asked; nothing was charged. "
            "Leave the client out, or have its officer approve a top_up and declare the plan again"
            + (f". {LATER}" if late else "")
        )


def _receipt(entry: Entry, cap: int | None, replayed: bool = False) -> Receipt:
    return Receipt(
        client=str(entry.client),
        run=str(entry.run),
        key=str(entry.key),
        what=str(entry.what),
        count=int(entry.amount or 0),
        entry=entry.number,
        attempt=int(entry.attempt or 0),
        used=int(entry.used or 0),
        cap=cap,
        replayed=replayed,
    )


def _replayed(charge: Charge, earlier: Entry, cap: int | None) -> Receipt:
    """The receipt of a draw that a simulation repeats: keyed streams repeat a release only for the same request."""
    if (earlier.what, earlier.amount, earlier.request) != (charge.what, charge.count, charge.request):
        raise BadInput(
            f"draw {charge.key!r} of client {charge.client!r} in run {charge.run!r} was charged for another request: "
            "its noise must not be used twice; start a new run, or resume from the checkpoint that belongs to this one"
        )
    return _receipt(earlier, cap, replayed=True)
