"""What a ledger tells: accounts, plans, counts, figures. Everything here looks at the book and changes nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from sordino.privacy import accounting, composing
from sordino.privacy.book import Account, Binding, Standing, account_of, standing_of
from sordino.privacy.ledger_file import LedgerFile
from sordino.privacy.types import Adjacency, Event


class Reading:
    """The questions that a ledger answers."""

    _file: LedgerFile

    @property
    def path(self) -> Path:
        """Where the file lies."""
        return self._file.path

    @property
    def head(self) -> tuple[int, str]:
        """Number of entries and last hash: noted elsewhere, it shows later that nothing was rolled back."""
        self._file.refresh()
        return self._file.entries, self._file.head

    def bindings(self) -> list[Binding]:
        """Whose ledger this is and was, the last one last; none for simulations and where no site ever used it."""
        self._file.refresh()
        return list(self._file.book.bindings)

    def unprotected(self, client: str, run: str, what: str) -> int:
        """How often the client released ``what`` without noise in a run."""
        self._file.refresh()
        return self._file.book.unprotected.get((client, run, what), 0)

    def account(self, client: str) -> Account:
        """One account."""
        self._file.refresh()
        return account_of(self._file.book, client)

    def accounts(self) -> list[Account]:
        """All accounts, in the order they were opened."""
        self._file.refresh()
        return list(self._file.book.accounts.values())

    def standings(self, client: str) -> list[Standing]:
        """The client's plans with their caps and use, in the order they were declared."""
        self.account(client)
        return list(self._file.book.standings.get(client, {}).values())

    def left(self, client: str, run: str) -> dict[str, int | None]:
        """How often each release may still happen under the run's plan (None: no limit)."""
        self._file.refresh()
        one = standing_of(self._file.book, client, run)
        return {
            e.what: None if one.caps is None else (one.caps[e.what] - one.used.get(e.what, 0) if one.open else 0)
            for e in one.plan.turn
        }

    def charges(self, client: str, run: str, what: str) -> int:
        """How many charges of ``what`` there were in a run, repeated ones included, whatever each counted."""
        self._file.refresh()
        standing = self._file.book.standing(client, run)
        return 0 if standing is None else standing.charges.get(what, 0)

    def spent(self, client: str) -> list[Event]:
        """Everything that was ever charged to the client, one event for each run and kind of release."""
        self.account(client)
        return self._file.book.spent(client)

    def run_events(self, client: str, run: str) -> list[Event]:
        """What was charged to the client in one run."""
        self.account(client)
        return self._file.book.spent(client, run)

    def epsilon(self, clients: Sequence[str] | None = None, run: str | None = None) -> dict[str, float]:
        """ε of what was charged, over all runs or in one: one vectorised call for each accountant.

        Where the account rests on its filter, the total is what the filter's meter shows: an odometer, at most the
        budget. One run's figure is what its own releases cost, by the accountant.
        It is the cost of the recorded noise; whether that noise was secret is the statement's business.
        """
        self._file.refresh()
        book = self._file.book
        names = list(book.accounts) if clients is None else list(clients)
        groups: dict[str, list[str]] = {}
        for client in names:
            groups.setdefault(account_of(book, client).accountant, []).append(client)
        result: dict[str, float] = {}
        for accountant, members in groups.items():
            deltas = [book.accounts[client].budget.delta for client in members]
            costs = accounting.composed_epsilon([book.spent(c, run) for c in members], deltas, accountant)
            result.update({client: float(cost) for client, cost in zip(members, costs)})
        if run is not None:
            return {client: result[client] for client in names}
        return {client: composing.metered(book, client, result[client]) for client in names}

    def composition(self, client: str) -> str:
        """What the client's figures rest on: declared in advance, or a filter and its order."""
        self.account(client)
        return composing.in_words(self._file.book, client)

    def rests_on_filter(self, client: str) -> bool:
        """Whether what the client released is covered by its filter rather than by the accountant alone."""
        self.account(client)
        return composing.rests_on_filter(self._file.book, client)

    def overdrawn(self, client: str) -> bool:
        """Whether the client's releases do not fit the filter they need: only earlier versions let that happen."""
        self.account(client)
        return composing.overdrawn(self._file.book, client)

    def replace_one_epsilon(self, client: str) -> float:
        """ε of the client's releases when neighbours differ by an exchange of one record (by PLD, R7).

        ∞ where a filter is what holds and neighbours differ otherwise: that filter bounds its own divergence, and a
        figure for another one would promise something that nothing enforced.
        """
        account = self.account(client)
        if account.budget.adjacency is Adjacency.REPLACE_ONE:
            return self.epsilon([client])[client]
        events = self._file.book.spent(client)
        if events and composing.rests_on_filter(self._file.book, client):
            return math.inf
        return float(accounting.replace_one_epsilon(events, account.budget.delta)) if events else 0.0

    def remaining(self, clients: Sequence[str] | None = None) -> dict[str, float]:
        """Budget minus ε spent, never below 0. Open plans are not subtracted: they are in ``standings``."""
        costs = self.epsilon(clients)
        budgets = {client: self._file.book.accounts[client].budget for client in costs}
        return {
            client: math.inf if budgets[client].is_public else max(0.0, budgets[client].epsilon - cost)
            for client, cost in costs.items()
        }
