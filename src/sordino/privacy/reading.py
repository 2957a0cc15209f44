"""What a ledger tells: accounts, plans, counts, figures. Everything here looks at the book and changes nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy import accounting, planning
from sordino.privacy.accounting import filters
from sordino.privacy.accounting.attack import Attack, best_attack, from_promise
from sordino.privacy.book import Account, Binding, Book, Split, Standing
from sordino.privacy.ledger_file import LedgerFile
from sordino.privacy.trust import Against
from sordino.privacy.types import Adjacency, Event


class Day(NamedTuple):
    """What was released on one day: (run, what, how often), and ε of everything until its end."""

    date: str
    releases: list[tuple[str, str, int]]
    epsilon: float


def _counted(standing: Standing, until: str) -> dict[str, int]:
    """How often each release of a plan had happened when a day ended."""
    found: dict[str, int] = {}
    for date, released in standing.days.items():
        for what, count in released.items() if date <= until else ():
            found[what] = found.get(what, 0) + count
    return found


class Reading:
    """An open ledger file, and the questions that it answers."""

    def __init__(self, path: str | os.PathLike[str], readonly: bool = False, durable: bool = True) -> None:
        self._file = LedgerFile(path, readonly, durable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or isinstance(error, BudgetRefused):
            self._file.close()
        else:
            self._file.close_after(error)

    def close(self) -> None:
        """Close the file in order, sealing it."""
        self._file.close()

    def verify(self) -> bool:
        """Check the whole file anew: pages, triggers, chain, anchor, stored releases. Raises ``LedgerDamaged``.

        Returns whether a seal covered every byte of it; see ``LedgerFile.verify``.
        """
        return self._file.verify()

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of file and anchor as they stand, so that a simulation can go back to this moment.

        A ledger of real budgets has one past: with ``durable=True`` this is refused.
        """
        if self._file.durable:
            raise BadInput("only the ledger of a simulation can be copied while it is in use: a budget is spent once")
        self._file.copy(Path(path))

    def _book(self) -> Book:
        """The book, with what other processes have written since."""
        self._file.refresh()
        return self._file.book

    def _book_with(self, client: str) -> Book:
        """The book, which has an account of this client."""
        book = self._book()
        book.account(client)
        return book

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
        return list(self._book().bindings)

    def parted(self) -> Split | None:
        """How this site's records were parted into training and held-out; None where they were not."""
        return self._book().split

    def unprotected(self, client: str, run: str, what: str) -> int:
        """How often the client released ``what`` without noise in a run."""
        return self._book().unprotected[client, run, what]

    def account(self, client: str) -> Account:
        """The account of one client."""
        return self._book().account(client)

    def accounts(self) -> list[Account]:
        """All accounts, in the order they were opened."""
        return list(self._book().accounts.values())

    def standings(self, client: str) -> list[Standing]:
        """The client's plans with their caps and use, in the order they were declared."""
        return list(self._book_with(client).standings.get(client, {}).values())

    def charges(self, client: str, run: str, what: str) -> int:
        """How many charges of ``what`` there were in a run, repeated ones included, whatever each counted."""
        standing = self._book().standing(client, run)
        return 0 if standing is None else standing.charges.get(what, 0)

    def spent(self, client: str) -> list[Event]:
        """Everything that was ever charged to the client, one event for each run and kind of release."""
        return self._book_with(client).spent(client)

    def run_events(self, client: str, run: str) -> list[Event]:
        """What was charged to the client in one run."""
        return self._book_with(client).spent(client, run)

    def days(self, client: str) -> list[Day]:
        """What the client released on each day that it released anything, and ε of all until that day's end.

        Where the account rests on its filter, ε is what the accountant makes of it, which the filter's cap bounds.
        """
        standings = self.standings(client)
        account = self._book().account(client)
        dates = sorted({date for one in standings for date in one.days})
        until: list[list[Event]] = []
        for date in dates:
            counts = [_counted(one, date) for one in standings]
            until.append([event for one, own in zip(standings, counts) for event in one.events(own)])
        costs = accounting.composed_epsilon(until, [account.budget.delta] * len(dates), account.accountant)
        return [
            Day(
                date, [(one.plan.run, what, n) for one in standings for what, n in one.days.get(date, {}).items()], cost
            )
            for date, cost in zip(dates, costs.tolist())
        ]

    def epsilon(self, clients: Sequence[str] | None = None, run: str | None = None) -> dict[str, float]:
        """ε of what was charged, over all runs or in one: one vectorised call for each accountant.

        Where the account rests on its filter, the total is what the filter's meter shows: an odometer, at most the
        budget. One run's figure is what its own releases cost, by the accountant.
        It is the cost of the recorded noise; whether that noise was secret is the statement's business.
        """
        book = self._book()
        names = list(book.accounts) if clients is None else list(clients)
        return self._costs({client: book.spent(client, run) for client in names}, metered=run is None)

    def epsilon_before(self, client: str, entries: Sequence[int]) -> dict[int, float]:
        """ε of what was charged to the client before each of these entries of the ledger."""
        own, found = {one.plan.run: one for one in self.standings(client)}, dict[int, float]()
        known: dict[tuple[Event, ...], float] = {}
        for entry in entries:
            used: dict[str, dict[str, int]] = {}
            for run, what, count in self._file.db.execute(
                "SELECT run, what, SUM(amount) FROM entries WHERE kind = 'charge' AND client = ? AND number < ? "
                "GROUP BY run, what ORDER BY MIN(number)",
                (client, entry),
            ):
                used.setdefault(run, {})[what] = count
            events = tuple(event for run, counts in used.items() for event in own[run].events(counts))
            if events not in known:
                known[events] = self._costs({client: events})[client]
            found[entry] = known[events]
        return found

    def left(self, clients: Sequence[str]) -> dict[str, float]:
        """ε that each account has for another run: its budget less what was charged; open plans may claim some of it.

        0 where an account admits nothing that was not declared before its first release (``planning``).
        """
        book = self._book()
        found = {client: math.inf if book.account(client).budget.is_public else 0.0 for client in clients}
        able = [client for client, left in found.items() if left == 0.0 and planning.admits(book, client)]
        costs = self.epsilon(able)
        return found | {c: max(0.0, book.accounts[c].budget.epsilon - cost) for c, cost in costs.items()}

    def epsilon_against(self, colluders: int | None, clients: Sequence[str] | None = None) -> dict[str, float]:
        """ε of what was charged if so many other sites conspired with the server; None: all of them did.

        Noise of a client's own does not depend on it. Shared noise does: z·√(h(colluders)/h(c)), its own share alone at
        worst (``Event.against``, ``Event.alone``).
        """
        book = self._book()
        names = list(book.accounts) if clients is None else list(clients)
        changed = {
            client: [e.alone() if colluders is None else e.against(colluders) for e in book.spent(client)]
            for client in names
        }
        return self._costs(changed)

    def own_epsilon(self, clients: Sequence[str] | None = None) -> dict[str, float]:
        """ε of what was charged if everybody else conspired with the server: each site's own share of noise alone.

        Equal to ``epsilon`` where nothing was shared.
        """
        book, found = self._book(), self.epsilon(clients)
        shared = [client for client in found if any(event.shared is not None for event in book.spent(client))]
        costs = self.epsilon_against(None, shared)
        return found | {client: max(found[client], cost) for client, cost in costs.items()}

    def epsilon_by_trust(self, client: str) -> tuple[float, float]:
        """(ε of the releases with noise of the client's own, ε of those with shared noise): each kind as if alone.

        The first holds against everybody, the second against whom ``trust`` says. Both kinds together cost ``epsilon``.
        """
        kinds: tuple[list[Event], list[Event]] = ([], [])
        for event in self._book_with(client).spent(client):
            kinds[event.shared is not None].append(event)
        own, shared = (self._costs({client: kind})[client] for kind in kinds)
        return own, shared

    def _costs(self, events: Mapping[str, Sequence[Event]], metered: bool = True) -> dict[str, float]:
        """ε of such events by each client's own accountant; at least what its filter's meter shows."""
        book, result = self._book(), dict.fromkeys(events, 0.0)
        groups: dict[str, list[str]] = {}
        for client in events:
            groups.setdefault(book.account(client).accountant, []).append(client)
        for accountant, members in groups.items():
            deltas = [book.accounts[client].budget.delta for client in members]
            costs = accounting.composed_epsilon([list(events[c]) for c in members], deltas, accountant)
            result.update({client: float(cost) for client, cost in zip(members, costs)})
        for client in events if metered else ():
            if planning.rests_on_filter(book, client):
                order, delta = planning.order_of(book, client), book.accounts[client].budget.delta
                result[client] = max(result[client], filters.odometer(list(events[client]), order, delta))
        return result

    def attack(self, clients: Sequence[str] | None = None) -> dict[str, Attack]:
        """The best that an attacker can do who sees all that a client ever released, by the recorded noise.

        It follows from the releases themselves; where only the promise bounds them (batches of fixed size, a filter),
        from ε and δ: of a filter its budget, which is what it guarantees.
        """
        book, found = self._book(), {}
        for client, spent in self.epsilon(clients).items():
            budget, filtered = book.accounts[client].budget, planning.rests_on_filter(book, client)
            epsilon = max(spent, budget.epsilon) if filtered else spent
            if planning.overdrawn(book, client):
                found[client] = from_promise(math.inf, budget.delta)
            else:
                found[client] = best_attack(book.spent(client), epsilon, budget.delta, not filtered)
        return found

    def against(self, client: str) -> Against:
        """Whom the client's figures hold against: of all its runs, the fewest that may conspire."""
        return Against.weakest(event.shared for event in self._book_with(client).spent(client))

    def trust(self, client: str) -> str:
        """The same in words."""
        return self.against(client).words()

    def composition(self, client: str) -> str:
        """What the client's figures rest on: declared in advance, or a filter and its order."""
        book = self._book_with(client)
        if planning.rests_on_filter(book, client):
            return f"filter (Rényi, order {planning.order_of(book, client):g})"
        return f"declared in advance ({book.accounts[client].accountant.upper()})"

    def rests_on_filter(self, client: str) -> bool:
        """Whether what the client released is covered by its filter rather than by the accountant alone."""
        return planning.rests_on_filter(self._book_with(client), client)

    def overdrawn(self, client: str) -> bool:
        """Whether the client's releases do not fit the filter they need: only earlier versions let that happen."""
        return planning.overdrawn(self._book_with(client), client)

    def replace_one_epsilon(self, client: str) -> float:
        """ε of the client's releases when neighbours differ by an exchange of one record (by PLD, R7).

        ∞ where a filter is what holds and neighbours differ otherwise: that filter bounds its own divergence, and a
        figure for another one would promise something that nothing enforced.
        """
        book = self._book_with(client)
        budget = book.accounts[client].budget
        if budget.adjacency is Adjacency.REPLACE_ONE:
            return self.epsilon([client])[client]
        events = book.spent(client)
        if events and planning.rests_on_filter(book, client):
            return math.inf
        return float(accounting.replace_one_epsilon(events, budget.delta)) if events else 0.0
