"""Whose ledger it is. A site's ledger is tied to the site's name and to a commitment to its records.

Without that, the same ledger under another name, or a new ledger's account beside the old one, would be a fresh budget
for the same records. Moving a ledger, and going on with other records, are acts of an officer, recorded for ever.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from sordino.errors import BadInput
from sordino.privacy.book import Book, check_names
from sordino.privacy.ledger_file import LedgerFile

Commit = Callable[[bytes], str]
"""(salt) → hash of a site's records under that salt."""

REMEDY = "if that is meant, its officer records it: sordino ledger rebind SITE.toml --officer NAME --reason WHY"


def bind(file: LedgerFile, site: str, commit: Commit) -> str:
    """Tie the ledger to this site and these records, or check that it is; returns the name of its account."""
    check_names(site=site)
    file.refresh()
    if file.book.bindings:
        return _check(file, site, commit)
    salt = secrets.token_bytes(32)
    commitment = commit(salt)  # may read gigabytes, so the ledger is not locked meanwhile
    with file.transaction() as draft:
        if not file.book.bindings:  # another process may have been first
            others = sorted(set(_deployed(file.book)) - {site})
            if others:
                raise BadInput(
                    f"{file.path} holds the account of {others[0]!r}, and a site's ledger has one account: {site!r} "
                    f"needs a ledger of its own for records of its own; {REMEDY}"
                )
            draft.add("bound", {"site": site, "commitment": commitment, "salt": salt.hex()}, client=site)
            return site
    return _check(file, site, commit)


def _check(file: LedgerFile, site: str, commit: Commit) -> str:
    last = file.book.bindings[-1]
    if last.site != site:
        raise BadInput(
            f"{file.path} belongs to site {last.site!r}, not to {site!r}: what was spent from these records would not "
            f"count; {REMEDY}"
        )
    if commit(bytes.fromhex(last.salt)) != last.commitment:
        raise BadInput(
            f"the records of site {site!r} are not those that {file.path} was kept for (new, changed or reordered): "
            f"{REMEDY}"
        )
    return last.account


def rebind(file: LedgerFile, site: str, commit: Commit, reason: str, officer: str) -> str:
    """Record that an officer moved the ledger to this site name and these records; what was spent stays spent."""
    check_names(site=site, reason=reason, officer=officer)
    salt = secrets.token_bytes(32)
    commitment = commit(salt)
    with file.transaction() as draft:
        account = _account(file, site)
        body = {"site": site, "commitment": commitment, "salt": salt.hex(), "reason": reason, "officer": officer}
        draft.add("bound", body, client=account)
    return account


def _account(file: LedgerFile, site: str) -> str:
    """The account that goes along: the bound one, else the only one, else the site's own of several."""
    if file.book.bindings:
        return file.book.bindings[-1].account
    known = _deployed(file.book)
    if site in known:
        return site
    if len(known) > 1:
        raise BadInput(
            f"{file.path} holds the accounts of {', '.join(map(repr, known))}: which of them paid for these records is "
            "not known; name the site as its account is called, and move it from there"
        )
    return known[0] if known else site


def _deployed(book: Book) -> list[str]:
    return [account.client for account in book.accounts.values() if not account.simulated]


def check_free(book: Book, client: str, simulated: bool) -> None:
    """Refuse a second account in the ledger of a site."""
    if book.bindings and not simulated and client != book.bindings[-1].account:
        raise BadInput(
            f"this ledger belongs to site {book.bindings[-1].site!r} and has one account: {client!r} needs a ledger of "
            "its own"
        )
