"""The ledger: what every client promised, planned and paid. It cannot be overdrawn, and it forgets nothing.

Order of events (R11): ``declare`` what a run will release → ``charge`` durably → draw the noise → ``store`` the release
durably → send it. Plans are checked against the budget once, by the accountant; charges against the plan, by count.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from sordino.errors import BadInput
from sordino.privacy import accounting
from sordino.privacy.book import Account, Book, Charge, LedgerPlan, check_names, number, plan_body
from sordino.privacy.groups import is_account_of
from sordino.privacy.held import HELD, check_share
from sordino.privacy.ledger_file import FIELDS, check_payload
from sordino.privacy.ledger_format import Entry
from sordino.privacy.levels import LEVELLED
from sordino.privacy.planning import COMPOSITIONS, caps, check_repeated, check_room, filter_order, payable, planned
from sordino.privacy.rolls import Rolls
from sordino.privacy.types import RECORD, Adjacency, Budget, check_promised

__all__ = ["Account", "Charge", "Ledger", "LedgerPlan", "Plan"]

Plan = LedgerPlan  # what it was called in 0.1

# These accountants of accounting.ACCOUNTANTS pick a noise as a paper does; a ledger charges that noise with a real one.
_PICK_NOISE_ONLY = ("closed-form-selection", "wor-paper")

Commit = Callable[[bytes], str]
"""(salt) → hash of a site's records under that salt."""

_REBIND = "if that is meant, its officer records it: sordino ledger rebind SITE.toml --officer NAME --reason WHY"


class Ledger(Rolls):
    """Accounts of one or many clients in one SQLite file. Opens or creates it; use it as a context manager.

    Guarantees: a charge that returns is on disk and survives a crash; a charge that would overdraw raises
    ``BudgetRefused`` and writes nothing; two processes cannot spend the same budget twice; a file that was changed,
    truncated or replaced by an older copy raises ``LedgerDamaged`` and is never started anew.

    Parameters
    ----------
    path: the file. Beside it lies ``<path>.anchor`` (see ``privacy.ledger_format``); keep both together.
    readonly: for statements, ``verify`` and ``export`` only.
    durable: False skips waiting for the disk: a charge then survives a killed process but not a loss of power. For
        simulated accounts only.
    """

    def open_account(
        self,
        client: str,
        budget: Budget,
        accountant: str = "pld",
        simulated: bool = False,
        composition: str | None = None,
        owner: str = "",
    ) -> None:
        """Open an account, or find it as it should be. Another budget than the recorded one is refused.

        ``composition``: ``declared`` (default), what is declared before the first release by the accountant and later
        plans by a filter, if the first leave room for one; ``filter``, everything by a filter, at 4 to 14 % more noise.
        ``owner``: whose records these are, where it is the account of a group of them.
        """
        self.open_accounts({client: budget}, accountant, simulated, composition, {client: owner} if owner else {})

    def open_accounts(
        self,
        budgets: Mapping[str, Budget],
        accountant: str = "pld",
        simulated: bool = False,
        composition: str | None = None,
        owners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Open many accounts in one transaction; ``owners``: of accounts of groups of records, whose they are."""
        if composition not in (None, *COMPOSITIONS):
            raise BadInput(f"composition {composition!r} is unknown: use one of {', '.join(COMPOSITIONS)}")
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
                    if known.owner != owners.get(client, ""):
                        told = (
                            f"of some of {known.owner!r}'s records" if known.owner else "of all of a client's records"
                        )
                        raise BadInput(f"{client!r} is the account {told} in this ledger: keep a new ledger")
                else:
                    check_promised(budget.adjacency)
                    bound = self._file.book.bindings
                    if bound and not simulated and not is_account_of(client, bound[-1].account):
                        raise BadInput(
                            f"this ledger belongs to site {bound[-1].site!r} and has one account: {client!r} needs a "
                            "ledger of its own"
                        )
                    body = {
                        "composition": composition or "declared",
                        "epsilon": number(budget.epsilon),
                        "delta": float(budget.delta),
                        "adjacency": str(budget.adjacency),
                        "accountant": accountant,
                        "simulated": bool(simulated),
                        **({"owner": owners[client]} if client in owners else {}),
                        **({} if budget.unit == RECORD else {"unit": budget.unit}),
                    }
                    draft.add("account", body, client=client)

    def check_account(self, client: str, budget: Budget, composition: str | None = None) -> None:
        """Refuse to go on with a site's account under other terms than it was opened with; writes nothing.

        An account that is not there yet would be opened under these.
        """
        known = self._book().accounts.get(client)
        if known is not None and not _restated(known, budget):
            _check_same(known, budget, "pld", False, composition)

    def declare(self, plans: Sequence[LedgerPlan], run_epsilon: float | None = None) -> dict[str, int]:
        """Declare plans, one per client, in one transaction; returns how many turns each client can pay in full.

        Before a client's first charge the number is the largest m ≤ turns with ε(everything planned elsewhere + m ×
        turn) ≤ budget, by its accountant; after it, what the account's filter admits (``planning``). The caps are
        m × count. The same plan of the same run is returned as it stands, except that it grows after a top-up and is
        measured anew when it had been closed. With ``run_epsilon``, the m turns alone cost at most that, whatever
        was declared for the run before.

        Guarantees: all that may be charged under the plans is (ε, δ)-private together, also when later plans were
        chosen by looking at what earlier ones released.
        """
        if len({plan.client for plan in plans}) != len(plans):
            raise BadInput("declare takes one plan per client: put all its releases into one turn")
        limited = run_epsilon is not None
        if run_epsilon is not None and not run_epsilon > 0:
            raise BadInput(f"run_epsilon is {run_epsilon!r}: the most that one run may cost is a positive number")
        while True:
            book = self._book()
            known = _terms(book, plans)
            turns = payable(book, plans, run_epsilon)  # may take seconds: the ledger is not locked meanwhile
            with self._file.transaction() as draft:
                if _terms(book, plans) != known:
                    continue  # another process opened, closed, declared or first charged something: measure again
                for plan in plans:
                    one, most = book.standing(plan.client, plan.run), turns[plan.client]
                    if one is None or not one.open or one.payable != most or (limited and one.caps is None):
                        limits = caps(book, plan, most, limited)
                        body = plan_body(plan, most, limits, filter_order(book, plan.client))
                        draft.add("plan", body, client=plan.client, run=plan.run)
            return turns

    def charge(self, charges: Sequence[Charge], replay: bool = False, once: bool = False) -> list[Entry]:
        """Charge all rows in one durable transaction, before anything is read or drawn; returns how each is recorded.

        A key that was charged before is charged again as a new attempt (R11). With ``replay``, for simulated accounts
        only, the same key and request is the same draw and is not charged again; another request under it is an error.
        With ``once``, a key that was ever charged in this run is refused: what it names can be used a single time
        (masks that hide one payload would show the difference of two).

        Guarantees: raises ``BudgetRefused`` before anything is written if any row exceeds its plan's cap, rows of the
        same call included. Charges are held against plans by count: no accountant runs here.
        """
        if len({(c.client, c.run, c.key) for c in charges}) != len(charges):
            raise BadInput("two charges of one call have the same client, run and key: a key names one draw")
        recorded: list[Entry] = []
        totals: dict[tuple[str, str, str], int] = {}
        with self._file.transaction() as draft:
            last = self._last_attempts(charges)
            for one in charges:
                standing = planned(self._file.book, one, replay)
                earlier = last.get((one.client, one.run, one.key))
                if replay and earlier is not None:
                    check_repeated(one, earlier)
                    recorded.append(earlier)
                    continue
                if once and earlier is not None:
                    raise BadInput(
                        f"{one.key!r} was charged before, and is used once: repeat the round as a new attempt"
                    )
                place = (one.client, one.run, one.what)
                total = totals.get(place, standing.used.get(one.what, 0)) + int(one.count)
                check_room(self._file.book, one, standing, total)
                totals[place] = total
                entry = draft.add(
                    "charge",
                    client=one.client,
                    run=one.run,
                    what=one.what,
                    key=one.key,
                    attempt=0 if earlier is None else int(earlier.attempt or 0) + 1,
                    amount=int(one.count),
                    used=total,
                    request=one.request,
                )
                recorded.append(entry)
        return recorded

    def _last_attempts(self, charges: Sequence[Charge]) -> dict[tuple[str, str, str], Entry]:
        """The newest earlier charge of each of these draws, in one query, by client, run and key."""
        rows = self._file.db.execute(
            f"SELECT {FIELDS} FROM (SELECT json_extract(value, '$[0]') AS c, json_extract(value, '$[1]') AS r, "
            "json_extract(value, '$[2]') AS k FROM json_each(?)) CROSS JOIN entries "
            "ON kind = 'charge' AND client = c AND run = r AND entries.key = k ORDER BY attempt",
            (json.dumps([(c.client, c.run, c.key) for c in charges]),),
        )
        return {(str(e.client), str(e.run), str(e.key)): e for e in map(Entry._make, rows)}

    def store(self, client: str, run: str, key: str, request: str, payload: bytes) -> None:
        """Keep a durable copy of a release that was charged, before it is sent, so that it can be sent again (R11).

        Guarantees: one charge yields at most one stored release under a key: the same bytes again change nothing, other
        bytes need a charge of this request that is newer than the stored copy.
        """
        check_names(client=client, run=run, key=key, request=request)
        digest = hashlib.sha256(payload).hexdigest()
        with self._file.transaction() as draft:
            self._file.book.declared(client, run)
            charged = self._file.db.execute(
                "SELECT MAX(number) FROM entries WHERE kind = 'charge' AND client = ? AND run = ? AND request = ?",
                (client, run, request),
            ).fetchone()[0]
            if charged is None:
                raise BadInput(
                    f"nothing was charged to client {client!r} for this request of run {run!r}: charge first"
                )
            last = self._last_stored(client, run, key, request)
            if last is not None:
                entry, body, kept = last
                if kept is not None and json.loads(body)["sha256"] == digest:
                    return
                if charged < entry:
                    raise BadInput(
                        f"another release of {key!r} is stored for this request of client {client!r}: "
                        "send that one again, or charge a new draw"
                    )
            noted = {"sha256": digest, "size": len(payload)}
            added = draft.add("stored", noted, client=client, run=run, key=key, request=request)
            draft.releases.append((added.number, bytes(payload)))

    def stored(self, client: str, run: str, key: str, request: str) -> bytes | None:
        """The stored release for exactly this request, byte for byte; None: a new draw is a new charge (R11)."""
        with self._file.reading():
            last = self._last_stored(client, run, key, request)
        if last is None:
            return None
        entry, body, payload = last
        if payload is not None:
            check_payload(self.path, entry, body, payload)
        return payload

    def _last_stored(self, *copy: str) -> tuple[int, str, bytes | None] | None:
        row: tuple[int, str, bytes | None] | None = self._file.db.execute(
            "SELECT number, body, payload FROM entries LEFT JOIN releases USING (number) WHERE kind = 'stored' "
            "AND client = ? AND run = ? AND key = ? AND request = ? ORDER BY number DESC LIMIT 1",
            copy,
        ).fetchone()
        return row

    def forget(self, client: str, run: str, keep: int = 0) -> int:
        """Drop the copies of a run's releases but the newest ``keep``; the charges stay. Returns how many went."""
        with self._file.transaction() as draft:
            self._file.book.declared(client, run)
            numbers = self._file.db.execute(
                "SELECT number FROM entries JOIN releases USING (number) WHERE kind = 'stored' AND client = ? "
                "AND run = ? ORDER BY number DESC LIMIT -1 OFFSET ?",
                (client, run, max(0, keep)),
            ).fetchall()
            if numbers:
                self._file.db.executemany("DELETE FROM releases WHERE number = ?", numbers)
                draft.add("forgotten", {"releases": len(numbers)}, client=client, run=run)
        return len(numbers)

    def close_plan(self, client: str, run: str) -> None:
        """End a plan: what it declared but did not use is free again. A plan that is closed stays closed."""
        with self._file.transaction() as draft:
            if self._file.book.declared(client, run).open:
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
            if self._file.book.account(client).budget.is_public:
                raise BadInput(f"client {client!r} is public (epsilon = inf): there is nothing to top up")
            body = {"epsilon": float(epsilon), "reason": reason, "officer": officer}
            draft.add("top-up", body, client=client)

    def mark_not_private(self, client: str, reason: str) -> None:
        """Record that this client's releases protect nobody (R9), for ever; a repeated reason is not recorded again."""
        check_names(reason=reason)
        with self._file.transaction() as draft:
            if reason not in self._file.book.account(client).not_private:
                draft.add("not-private", {"reason": reason}, client=client)

    def record_unprotected(self, client: str, run: str, what: str) -> int:
        """Record that something is about to be released without noise; returns how often that happened in the run."""
        check_names(run=run, what=what)
        with self._file.transaction() as draft:
            self._file.book.account(client)
            draft.add("unprotected", client=client, run=run, what=what)
        return self.unprotected(client, run, what)

    def bind(self, site: str, commit: Commit) -> str:
        """Tie this ledger to one site and its records, or find it tied to them; returns the site's account here.

        ``commit(salt)`` is a hash of the records under a secret salt. Another site, or other records, are refused: the
        same ledger under another name would be a fresh budget for the same records. A ledger that knows its records by
        their ids (``call_roll``) lets them change: each has the account of its own cohort.
        """
        check_names(site=site)
        if not self._book().bindings:
            salt = secrets.token_bytes(32)
            commitment = commit(salt)  # may read gigabytes, so the ledger is not locked meanwhile
            with self._file.transaction() as draft:
                if not self._file.book.bindings:  # another process may have been first
                    others = sorted(set(_deployed(self._file.book)) - {site})
                    if others:
                        raise BadInput(
                            f"{self.path} holds the account of {others[0]!r}, and a site's ledger has one account: "
                            f"{site!r} needs a ledger of its own for records of its own; {_REBIND}"
                        )
                    draft.add("bound", {"site": site, "commitment": commitment, "salt": salt.hex()}, client=site)
                    return site
        last = self._file.book.bindings[-1]
        if last.site != site:
            raise BadInput(
                f"{self.path} belongs to site {last.site!r}, not to {site!r}: what was spent from these records would "
                f"not count; {_REBIND}"
            )
        if self._file.book.life is None and commit(bytes.fromhex(last.salt)) != last.commitment:
            raise BadInput(
                f"the records of site {site!r} are not those that {self.path} was kept for (new, changed or "
                f"reordered): {_REBIND}"
            )
        return last.account

    def split(self, share: float, ids: str, commit: Commit | None = None) -> bytes:
        """Part this site's records into training and held-out, or find them parted so; returns the hash's secret key.

        ``ids``: the column of the records' ids. Where it is empty they have none and are known by their places in a
        file, of which ``commit`` makes a hash under a secret salt.

        Guarantees: a record never goes from one part to the other: another share, another column of ids, another file
        where there are none are refused.
        """
        check_share(share, "held_out")
        if bool(ids) is (commit is not None):
            raise BadInput("records are known by their ids, or by their places in a file that is committed to")
        if self._book().split is None:
            trained = [client for client in self._book().blocks if not client.endswith(HELD)]
            if trained:
                raise BadInput(
                    f"{self.path} has charged all records of {trained[0]!r} for training: none can be held out any "
                    "more; leave held_out away, or hold records out from a new ledger's first run on"
                )
            key = secrets.token_bytes(32)
            frozen = "" if commit is None else commit(key)
            with self._file.transaction() as draft:
                if self._file.book.split is None:  # another process may have been first
                    draft.add("split", {"share": share, "key": key.hex(), "ids": ids, "frozen": frozen})
                    return key
        known = self._book().split
        assert known is not None
        key = bytes.fromhex(known.key)
        if known.share != share or known.ids != ids:
            by = f"their ids ({known.ids})" if known.ids else "their places in a file"
            told = f"a share of {known.share:g}, by {by}"
            raise BadInput(
                f"{self.path} has parted these records before: {told}; a record is in one part for ever, so leave it so"
            )
        if commit is not None and commit(key) != known.frozen:
            raise BadInput(
                f"{self.path} knows held-out records by their places in a file, and the file is another one now: a "
                "record would go from one part to the other; put the old file back, or give records ids (data.id) and "
                "begin a new ledger"
            )
        return key

    def rebind(self, site: str, commit: Commit, reason: str, officer: str) -> str:
        """Move this ledger, with all that was spent, to another site name or other records; recorded for ever.

        The account that goes along is the bound one, else the only one, else the site's own of several.
        """
        check_names(site=site, reason=reason, officer=officer)
        known_split = self._book().split
        if known_split is not None and not known_split.ids:
            raise BadInput(
                f"{self.path} knows held-out records by their places in one file, which may not change: a record would "
                "go from training to held-out or back; records with ids (data.id) can be bound anew"
            )
        salt = secrets.token_bytes(32)
        commitment = commit(salt)
        if any(LEVELLED in one for one in (commitment, *(known.commitment for known in self.bindings()))):
            raise BadInput(
                f"{self.path}: records with levels of consent cannot be bound anew, for nobody could tell whether one "
                "went to another level, which it has for life; put the old records back, or keep a new ledger for "
                "records of other people"
            )
        body = {"site": site, "commitment": commitment, "salt": salt.hex(), "reason": reason, "officer": officer}
        with self._file.transaction() as draft:
            book = self._file.book
            known = [book.bindings[-1].account] if book.bindings else _deployed(book)
            if len(known) > 1 and site not in known:
                raise BadInput(
                    f"{self.path} holds the accounts of {', '.join(map(repr, known))}: which of them paid for these "
                    "records is not known; name the site as its account is called, and move it from there"
                )
            account = site if site in known or not known else known[0]
            draft.add("bound", body, client=account)
        return account


def _terms(book: Book, plans: Sequence[LedgerPlan]) -> tuple[int, list[bool]]:
    """What a measurement rests on: the last entry that changed terms, and who has been charged at all."""
    return book.terms, [plan.client in book.blocks for plan in plans]


def _deployed(book: Book) -> list[str]:
    own = [account.client for account in book.accounts.values() if not account.simulated]
    return [client for client in own if not client.endswith(HELD)]


def _restated(account: Account, budget: Budget) -> bool:
    """Whether an old budget under add-remove is now stated as zero-out: the same pairs, the same noise, the same ε."""
    old = account.opened.adjacency is Adjacency.ADD_REMOVE and budget.adjacency is Adjacency.ZERO_OUT
    return old and budget in [replace(b, adjacency=Adjacency.ZERO_OUT) for b in (account.opened, account.budget)]


def _check_same(
    account: Account, budget: Budget, accountant: str, simulated: bool, composition: str | None = None
) -> None:
    """Refuse to open a known account with other terms."""
    if (budget.unit == RECORD) != (account.budget.unit == RECORD):
        raise BadInput(
            f"client {account.client!r} has an account whose promise is to every {account.budget.unit}, not to every "
            f"{budget.unit}: one does not follow from the other; keep a new ledger (what was spent stays spent)"
        )
    budget = replace(budget, unit=account.budget.unit)  # the same promise in another word
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
