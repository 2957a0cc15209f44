"""The ledger: what every client promised, planned and paid. It cannot be overdrawn, and it forgets nothing.

Order of events (R11): ``declare`` what a run will release → ``charge`` durably → draw the noise → ``store`` the release
durably → send it. Plans are checked against the budget once, by the accountant; charges against the plan, by count.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy import accounting, binding, composing, resend
from sordino.privacy.binding import Commit
from sordino.privacy.book import (
    Account,
    Charge,
    Plan,
    Receipt,
    Standing,
    TopUp,
    account_body,
    account_of,
    check_names,
    plan_body,
    standing_of,
)
from sordino.privacy.charging import draft_charges
from sordino.privacy.ledger_file import LedgerFile
from sordino.privacy.planning import caps, filter_order, payable
from sordino.privacy.reading import Reading
from sordino.privacy.types import Adjacency, Budget, check_promised

__all__ = ["Account", "Charge", "Ledger", "Plan", "Receipt", "Standing", "TopUp"]

# These accountants of accounting.ACCOUNTANTS pick a noise as a paper does; a ledger charges that noise with a real one.
_PICK_NOISE_ONLY = ("closed-form-selection", "wor-paper")


class Ledger(Reading):
    """Accounts of one or many clients in one SQLite file. Opens or creates it; use it as a context manager.

    Guarantees: a charge that returns is on disk and survives a crash; a charge that would overdraw raises
    ``BudgetRefused`` and writes nothing; two processes cannot spend the same budget twice; a file that was changed,
    truncated or replaced by an older copy raises ``LedgerDamaged`` and is never started anew.

    Parameters
    ----------
    path: the file. Beside it lies ``<path>.anchor`` (see ``privacy.chain``); keep both together.
    readonly: for statements, ``verify`` and ``export`` only.
    durable: False skips waiting for the disk: a charge then survives a killed process but not a loss of power. For
        simulated accounts only.
    """

    def __init__(self, path: str | os.PathLike[str], readonly: bool = False, durable: bool = True) -> None:
        self._file = LedgerFile(path, readonly, durable)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, BudgetRefused):
            self._file.close()
        else:
            self._file.close_after(error)

    def close(self) -> None:
        """Close the file in order, sealing it."""
        self._file.close()

    def open_account(
        self,
        client: str,
        budget: Budget,
        accountant: str = "pld",
        simulated: bool = False,
        composition: str | None = None,
    ) -> None:
        """Open an account, or find it as it should be. Another budget than the recorded one is refused.

        ``composition``: ``declared`` (default), what is declared before the first release by the accountant and later
        plans by a filter, if the first leave room for one; ``filter``, everything by a filter, at 4 to 14 % more noise.
        """
        self.open_accounts({client: budget}, accountant, simulated, composition)

    def open_accounts(
        self,
        budgets: Mapping[str, Budget],
        accountant: str = "pld",
        simulated: bool = False,
        composition: str | None = None,
    ) -> None:
        """Open many accounts in one transaction."""
        if composition not in (None, *composing.COMPOSITIONS):
            raise BadInput(f"composition {composition!r} is unknown: use one of {', '.join(composing.COMPOSITIONS)}")
        usable = [a for a in accounting.ACCOUNTANTS if a not in _PICK_NOISE_ONLY]
        if accountant not in usable:
            raise BadInput(f"accountant {accountant!r} cannot keep a ledger: use one of {', '.join(usable)}")
        if not (simulated or self._file.durable):
            raise BadInput("a ledger with durable=False is for simulated accounts only: leave durable=True at a site")
        with self._file.transaction() as draft:
            for client, budget in budgets.items():
                check_names(client=client)
                known = self._file.book.accounts.get(client)
                if known is not None and _restated(known, budget):
                    draft.add("restated", {"adjacency": str(budget.adjacency)}, client=client)
                elif known is not None:
                    _check_same(known, budget, accountant, simulated, composition)
                else:
                    check_promised(budget.adjacency)
                    binding.check_free(self._file.book, client, simulated)
                    body = account_body(budget, accountant, simulated, composition or "declared")
                    draft.add("account", body, client=client)

    def declare(self, plans: Sequence[Plan], run_epsilon: float | None = None) -> dict[str, int]:
        """Declare plans, one per client, in one transaction; returns how many turns each client can pay in full.

        Before a client's first charge the number is the largest m ≤ turns with ε(everything planned elsewhere + m ×
        turn) ≤ budget, by its accountant; after it, what the account's filter admits (``composing``). The caps are
        m × count. The same plan of the same run is returned as it stands, except that it grows after a top-up and is
        measured anew when it had been closed. With ``run_epsilon``, the m turns alone cost at most that, whatever
        was declared for the run before.

        Guarantees: all that may be charged under the plans is (ε, δ)-private together, also when later plans were
        chosen by looking at what earlier ones released.
        """
        if len({plan.client for plan in plans}) != len(plans):
            raise BadInput("declare takes one plan per client: put all its releases into one turn")
        if run_epsilon is not None and not run_epsilon > 0:
            raise BadInput(f"run_epsilon is {run_epsilon!r}: the most that one run may cost is a positive number")
        while True:
            self._file.refresh()
            known = self._terms(plans)
            turns = payable(self._file.book, plans, run_epsilon)  # may take seconds: the ledger is not locked meanwhile
            with self._file.transaction() as draft:
                if self._terms(plans) != known:
                    continue  # another process opened, closed, declared or first charged something: measure again
                for plan in plans:
                    if self._differs(plan, turns[plan.client], run_epsilon is not None):
                        most = caps(self._file.book, plan, turns[plan.client], run_epsilon is not None)
                        body = plan_body(plan, turns[plan.client], most, filter_order(self._file.book, plan))
                        draft.add("plan", body, client=plan.client, run=plan.run)
            return turns

    def _terms(self, plans: Sequence[Plan]) -> tuple[int, list[bool]]:
        """What a measurement rests on: the last entry that changed terms, and who has been charged at all."""
        return self._file.book.terms, [plan.client in self._file.book.blocks for plan in plans]

    def _differs(self, plan: Plan, turns: int, limited: bool) -> bool:
        """Whether a plan has to be written: it is new, was closed, or has other caps now."""
        standing = self._file.book.standing(plan.client, plan.run)
        if standing is None or not standing.open or standing.payable != turns:
            return True
        return limited and standing.caps is None

    def charge(self, charges: Sequence[Charge], replay: bool = False) -> list[Receipt]:
        """Charge all rows in one durable transaction, before anything is read or drawn.

        A key that was charged before is charged again as a new attempt (R11). With ``replay``, for simulated accounts
        only, the same key and request is the same draw and is not charged again; another request under it is an error.

        Guarantees: raises ``BudgetRefused`` before anything is written if any row exceeds its plan's cap; no
        accountant runs here.
        """
        with self._file.transaction() as draft:
            return draft_charges(self._file, draft, charges, replay)

    def store(self, client: str, run: str, key: str, request: str, payload: bytes) -> None:
        """Keep a durable copy of a release that was charged, before it is sent (see ``resend.keep``)."""
        resend.keep(self._file, resend.Copy(client, run, key, request), payload)

    def stored(self, client: str, run: str, key: str, request: str) -> bytes | None:
        """The stored release for exactly this request, byte for byte; None: a new draw is a new charge (R11)."""
        return resend.kept(self._file, resend.Copy(client, run, key, request))

    def forget(self, client: str, run: str, keep: int = 0) -> int:
        """Drop the copies of a run's releases but the newest ``keep``; the charges stay. Returns how many went."""
        return resend.drop(self._file, client, run, keep)

    def close_plan(self, client: str, run: str) -> None:
        """End a plan: what it declared but did not use is free again. A plan that is closed stays closed."""
        with self._file.transaction() as draft:
            if standing_of(self._file.book, client, run).open:
                draft.add("closed", client=client, run=run)

    def close_run(self, run: str) -> None:
        """End the plans of all clients for a run, in one transaction."""
        with self._file.transaction() as draft:
            for client, standings in self._file.book.standings.items():
                if run in standings and standings[run].open:
                    draft.add("closed", client=client, run=run)

    def top_up(self, client: str, epsilon: float, reason: str, officer: str) -> None:
        """Raise a client's budget by ``epsilon``. Who approved it and why are recorded for ever."""
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise BadInput(f"a top-up of {epsilon!r} is not possible: epsilon is a positive finite number to add")
        check_names(reason=reason, officer=officer)
        with self._file.transaction() as draft:
            if account_of(self._file.book, client).budget.is_public:
                raise BadInput(f"client {client!r} is public (epsilon = inf): there is nothing to top up")
            body = {"epsilon": float(epsilon), "reason": reason, "officer": officer}
            draft.add("top-up", body, client=client)

    def mark_not_private(self, client: str, reason: str) -> None:
        """Record that this client's releases protect nobody (R9), for ever; a repeated reason is not recorded again."""
        check_names(reason=reason)
        with self._file.transaction() as draft:
            if reason not in account_of(self._file.book, client).not_private:
                draft.add("not-private", {"reason": reason}, client=client)

    def bind(self, site: str, commit: Commit) -> str:
        """Tie this ledger to one site and its records, or find it tied to them; returns the site's account here.

        ``commit(salt)`` is a hash of the records under a secret salt. Another site, or other records, are refused: the
        same ledger under another name would be a fresh budget for the same records.
        """
        return binding.bind(self._file, site, commit)

    def rebind(self, site: str, commit: Commit, reason: str, officer: str) -> str:
        """Move this ledger, with all that was spent, to another site name or other records; recorded for ever."""
        return binding.rebind(self._file, site, commit, reason, officer)

    def record_unprotected(self, client: str, run: str, what: str) -> int:
        """Record that something is about to be released without noise; returns how often that happened in the run."""
        check_names(run=run, what=what)
        with self._file.transaction() as draft:
            account_of(self._file.book, client)
            draft.add("unprotected", client=client, run=run, what=what)
        return self.unprotected(client, run, what)

    def copy(self, path: str | os.PathLike[str]) -> None:
        """Write a copy of file and anchor as they stand, so that a simulation can go back to this moment.

        A ledger of real budgets has one past: with ``durable=True`` this is refused.
        """
        if self._file.durable:
            raise BadInput("only the ledger of a simulation can be copied while it is in use: a budget is spent once")
        self._file.copy(Path(path))

    def verify(self) -> bool:
        """Check the whole file anew: pages, triggers, chain, anchor, stored releases. Raises ``LedgerDamaged``.

        Returns whether a seal covered every byte of it; see ``LedgerFile.verify``.
        """
        return self._file.verify()


def _restated(account: Account, budget: Budget) -> bool:
    """Whether an old budget under add-remove is now stated as zero-out: the same pairs, the same noise, the same ε."""
    old = account.opened.adjacency is Adjacency.ADD_REMOVE and budget.adjacency is Adjacency.ZERO_OUT
    return old and budget in [replace(b, adjacency=Adjacency.ZERO_OUT) for b in (account.opened, account.budget)]


def _check_same(
    account: Account, budget: Budget, accountant: str, simulated: bool, composition: str | None = None
) -> None:
    """Refuse to open a known account with other terms."""
    if budget not in (account.budget, account.opened):
        raise BadInput(
            f"client {account.client!r} has the budget {account.budget} in this ledger, not {budget}: "
            "raise it with top_up, which is recorded, or keep a new ledger"
        )
    if account.accountant != accountant:
        raise BadInput(f"client {account.client!r} is accounted by {account.accountant!r}, not {accountant!r}")
    if composition is not None and account.composition != composition:
        raise BadInput(
            f"client {account.client!r} has an account of composition {account.composition!r}, not {composition!r}: it "
            "is fixed when the account is opened; keep a new ledger for the other"
        )
    if account.simulated != simulated:
        kind = "a simulated account" if account.simulated else "an account of a deployment"
        raise BadInput(f"client {account.client!r} has {kind}: simulation and deployment need ledgers of their own")
