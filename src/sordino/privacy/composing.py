"""Which composition an account rests on: declared in advance, or a filter. Pure functions over the book.

*Declared*: an account's block, the plans that were open when it was first charged, is composed by its accountant (PLD)
at the whole (ε, δ). *Filter*: whatever is declared later, a closed plan declared again and a plan that grows included,
is admitted only while Σ ρ_α over everything fits ρ_max (``accounting.filters``), and only if the whole block fits it
too. Otherwise some paths would be covered by PLD alone and others by the filter alone, and both together by neither:
then nothing is admitted later but releases of the block itself that a closed plan did not make. See
docs/accounting.md.
"""

from __future__ import annotations

from sordino.privacy.accounting import filters
from sordino.privacy.book import Account, Book, Standing, kinds

COMPOSITIONS = ("declared", "filter")


def order_of(book: Book, client: str) -> float:
    """α of the account's filter: recorded with the first plan it admitted; until then it follows from the block."""
    if client in book.orders:
        return book.orders[client]
    block = book.blocks.get(client)
    budget = book.accounts[client].budget if block is None else block.budget
    return filters.order_for(book.block_events(client), budget)


def block_fits(book: Book, client: str) -> bool:
    """Whether everything declared before the first charge fits the filter: only then may it admit anything later."""
    order = order_of(book, client)
    return filters.divergence(book.block_events(client), order) <= filters.room(book.accounts[client].budget, order)


def rests_on_filter(book: Book, client: str) -> bool:
    """Whether the client's releases so far are covered by the filter rather than by the accountant alone."""
    account = book.accounts[client]
    return not account.budget.is_public and (account.composition == "filter" or book.beyond(client))


def metered(book: Book, client: str, declared: float) -> float:
    """ε spent: ``declared``, the accountant's figure, or what the filter's meter shows where that is what holds."""
    if not rests_on_filter(book, client):
        return declared
    delta = book.accounts[client].budget.delta
    return max(declared, filters.odometer(book.spent(client), order_of(book, client), delta))


def in_words(book: Book, client: str) -> str:
    """The composition that a statement about the client rests on."""
    account = book.accounts[client]
    if rests_on_filter(book, client):
        return f"filter (Rényi, order {order_of(book, client):g})"
    return f"declared in advance ({account.accountant.upper()})"


def overdrawn(book: Book, client: str) -> bool:
    """Whether releases went beyond the block without fitting the filter: ledgers of earlier versions allowed that."""
    if book.accounts[client].budget.is_public or not book.beyond(client):
        return False
    order, budget = order_of(book, client), book.accounts[client].budget
    return not block_fits(book, client) or filters.divergence(book.spent(client), order) > filters.room(budget, order)


def unfit(book: Book) -> list[Standing]:
    """Open plans that an earlier version admitted by the accountant and that the filter does not cover."""
    found = []
    for client, own in book.standings.items():
        account, block = book.accounts[client], book.blocks.get(client)
        if account.budget.is_public or block is None:
            continue
        if not _all_fit(book, account):
            late = book.beyond(client)  # then what is left of the block needs the filter too
            found += [s for run, s in own.items() if s.open and (late or s.caps != block.caps.get(run))]
    return found


def _all_fit(book: Book, account: Account) -> bool:
    if not kinds(book.commitments(account.client, but="")) - kinds(book.block_events(account.client)):
        return True
    order = order_of(book, account.client)
    committed = filters.divergence(book.commitments(account.client, but=""), order)
    return block_fits(book, account.client) and committed <= filters.room(account.budget, order)
