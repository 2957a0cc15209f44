"""Which composition an account rests on, how much of a plan it pays for, and whether a charge is within its plan.

Pure functions over the book; charges are held against plans by count, without an accountant.

*Declared*: an account's block, the plans that were open when it was first charged, is composed by its accountant (PLD)
at the whole (ε, δ). *Filter*: whatever is declared later, a closed plan declared again and a plan that grows included,
is admitted only while Σ ρ_α over everything fits ρ_max (``accounting.filters``), and only if the whole block fits it
too. Otherwise some paths would be covered by PLD alone and others by the filter alone, and both together by neither:
then nothing is admitted later but releases of the block itself that a closed plan did not make. See
docs/accounting.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy import accounting
from sordino.privacy.accounting import filters
from sordino.privacy.book import Account, Book, Charge, LedgerPlan, Standing, check_names, kinds
from sordino.privacy.ledger_format import Entry
from sordino.privacy.types import Event

COMPOSITIONS = ("declared", "filter")

_LATER = (
    ". The run was declared after the account's first release and needs room in its filter: where the first plans "
    "leave none, closing one frees only releases of its own rate and noise; open "
    "accounts with composition 'filter', or begin with a smaller run (limits.run_epsilon at a site)"
)

Question = tuple[LedgerPlan, list[Event]]  # a plan, and what its client is committed to elsewhere


def order_of(book: Book, client: str) -> float:
    """α of the account's filter: recorded with the first plan it admitted; until then it follows from the block."""
    if client in book.orders:
        return book.orders[client]
    block = book.blocks.get(client)
    budget = book.accounts[client].budget if block is None else block.budget
    return filters.order_for(book.block_events(client), budget)


def _fits_filter(book: Book, client: str, events: list[Event]) -> bool:
    order = order_of(book, client)
    return filters.divergence(events, order) <= filters.room(book.accounts[client].budget, order)


def _block_fits(book: Book, client: str) -> bool:
    """Whether everything declared before the first charge fits the filter: only then may it admit anything later."""
    return _fits_filter(book, client, book.block_events(client))


def admits(book: Book, client: str) -> bool:
    """Whether the account can take on a plan of any other kind than those of its first release, however small."""
    return client not in book.blocks or _block_fits(book, client)


def rests_on_filter(book: Book, client: str) -> bool:
    """Whether the client's releases so far are covered by the filter rather than by the accountant alone."""
    account = book.accounts[client]
    return not account.budget.is_public and (account.composition == "filter" or book.beyond(client))


def overdrawn(book: Book, client: str) -> bool:
    """Whether releases went beyond the block without fitting the filter: ledgers of earlier versions allowed that."""
    return book.beyond(client) and not (_block_fits(book, client) and _fits_filter(book, client, book.spent(client)))


def unfit(book: Book) -> list[Standing]:
    """Open plans that an earlier version admitted by the accountant and that the filter does not cover."""
    found = []
    for client, own in book.standings.items():
        block, committed = book.blocks.get(client), book.commitments(client)
        if book.accounts[client].budget.is_public or block is None:
            continue
        more = kinds(committed) - kinds(book.block_events(client))
        if more and not (_block_fits(book, client) and _fits_filter(book, client, committed)):
            late = book.beyond(client)  # then what is left of the block needs the filter too
            found += [s for run, s in own.items() if s.open and (late or s.caps != block.caps.get(run))]
    return found


def _check_plan(plan: LedgerPlan, account: Account) -> None:
    """Refuse plans that no ledger can keep: another adjacency (R7), a name twice, a finite budget without noise."""
    if not isinstance(plan.run, str) or not plan.run:
        raise BadInput(f"the plan of client {plan.client!r} needs a run name, got {plan.run!r}")
    if plan.turns < 0 or not plan.turn:
        raise BadInput(f"the plan of client {plan.client!r} needs turns ≥ 0 and at least one release in a turn")
    names = [event.what for event in plan.turn]
    if len(set(names)) != len(names) or not all(names):
        raise BadInput(f"the plan of client {plan.client!r} names a release twice, or not at all: {names}")
    for event in plan.turn:
        if event.count < 1:
            raise BadInput(f"{event.what!r} in the plan of client {plan.client!r} has count {event.count}: it is ≥ 1")
        if event.adjacency is not account.budget.adjacency:
            raise BadInput(
                f"{event.what!r} is accounted under {event.adjacency}, the account of client {plan.client!r} under "
                f"{account.budget.adjacency}: one account has one adjacency, keep another ledger for the other"
            )
        if event.noise == 0.0 and not account.budget.is_public:
            raise BudgetRefused(
                f"{event.what!r} of client {plan.client!r} has no noise: no finite epsilon pays for that; "
                "calibrate a noise, or declare the client public with epsilon = inf"
            )


def _stands(plan: LedgerPlan, account: Account, standing: Standing) -> bool:
    """Whether a plan that was declared before is to be returned as it was."""
    if (standing.plan.turn, standing.plan.turns) != (plan.turn, plan.turns):
        raise BadInput(f"run {plan.run!r} of client {plan.client!r} was declared with another plan: use a new run name")
    raised = any(top_up.entry > standing.entry for top_up in account.top_ups)
    return standing.open and not (raised and standing.payable < plan.turns)


def payable(book: Book, plans: Sequence[LedgerPlan], run_epsilon: float | None = None) -> dict[str, int]:
    """For each client the largest m ≤ turns that may be declared: within its budget and, alone, within ``run_epsilon``.

    Before a client's first charge: ε(commitments elsewhere + m × turn) ≤ budget, by its accountant. Two vectorised
    calls per accountant settle the plans that fit whole or not at all; only the others are searched. After it, or in an
    account that is a filter from the start: by the filter. A plan that stands is returned as it was declared.
    """
    result: dict[str, int] = {}
    questions: dict[str, list[Question]] = {}
    for plan in plans:
        account, standing = book.account(plan.client), book.standing(plan.client, plan.run)
        _check_plan(plan, account)
        if standing is not None and _stands(plan, account, standing):
            result[plan.client] = standing.payable
        elif account.budget.is_public:
            result[plan.client] = int(plan.turns)
        elif account.composition == "filter" or plan.client in book.blocks:
            result[plan.client] = _filtered(book, plan, account)
        else:
            others = book.commitments(plan.client, but=plan.run)
            questions.setdefault(account.accountant, []).append((plan, others))
    for accountant, asked in questions.items():
        whole = _fits(book, asked, [plan.turns for plan, _ in asked], accountant)
        rest = [question for question, fits in zip(asked, whole) if not fits]
        one = _fits(book, rest, [1] * len(rest), accountant)
        result.update({plan.client: int(plan.turns) for (plan, _), fits in zip(asked, whole) if fits})
        for (plan, others), fits in zip(rest, one):
            budget = book.accounts[plan.client].budget
            most = accounting.affordable(list(plan.turn), budget, plan.turns, others, accountant) if fits else 0
            result[plan.client] = int(most)
    return {plan.client: _alone(book, plan, result[plan.client], run_epsilon) for plan in plans}


def _fits(book: Book, asked: Sequence[Question], turns: Sequence[int], accountant: str) -> list[bool]:
    """Whether so many turns of each plan fit its client's budget beside what it is committed to."""
    events = [[*others, *(e.times(e.count * m) for e in plan.turn)] for (plan, others), m in zip(asked, turns)]
    budgets = [book.accounts[plan.client].budget for plan, _ in asked]
    costs = accounting.composed_epsilon(events, [budget.delta for budget in budgets], accountant)
    return [bool(cost <= budget.epsilon) for cost, budget in zip(costs, budgets)]


def _filtered(book: Book, plan: LedgerPlan, account: Account) -> int:
    """Turns that the account's filter admits; where the block does not fit it, what is left of the block's kinds.

    A release is one of the block's if it has their sampling and noise, under whatever run: the block is a set of
    releases with (q, z) fixed in advance, and which of them happen, in which order, may depend on anything.
    """
    client, others = plan.client, book.commitments(plan.client, but=plan.run)
    if client not in book.blocks:
        return filters.turns_within(plan.turn, account.budget, plan.turns, others, None)
    if _block_fits(book, client):
        return filters.turns_within(plan.turn, account.budget, plan.turns, others, order_of(book, client))
    if book.beyond(client):
        return 0
    left = kinds(book.block_events(client))
    left.subtract(kinds(others))
    needed = kinds(list(plan.turn))
    return max(0, min(int(plan.turns), *(left[kind] // count for kind, count in needed.items())))


def _alone(book: Book, plan: LedgerPlan, turns: int, run_epsilon: float | None) -> int:
    """The largest m ≤ turns whose releases alone cost at most ``run_epsilon``."""
    if run_epsilon is None or turns == 0:
        return turns
    account = book.accounts[plan.client]
    limit = replace(account.budget, epsilon=run_epsilon)
    return int(accounting.affordable(list(plan.turn), limit, turns, (), account.accountant))


def filter_order(book: Book, client: str) -> float | None:
    """The order to record with a plan that the filter admitted; None for plans of the block and public data."""
    if book.account(client).budget.is_public or client not in book.blocks or not _block_fits(book, client):
        return None
    return order_of(book, client)


def caps(book: Book, plan: LedgerPlan, turns: int, limited: bool = False) -> dict[str, int] | None:
    """How often each release of the plan may happen if ``turns`` turns are paid; None for public data: no limit.

    ``limited``: there is a limit on the run itself, which public data have to keep too.

    A plan that was closed and is declared again may have used more of one release than ``turns`` turns hold (retries);
    then no further turn fits beside it, and the caps are what was used.
    """
    if book.account(plan.client).budget.is_public and not limited:
        return None
    standing = book.standing(plan.client, plan.run)
    used = {} if standing is None else standing.used
    limits = {e.what: turns * int(e.count) for e in plan.turn}
    if any(used.get(what, 0) > limit for what, limit in limits.items()):
        return {what: used.get(what, 0) for what in limits}
    return limits


def planned(book: Book, charge: Charge, replay: bool) -> Standing:
    """The plan that a charge falls under; charges outside any plan are refused."""
    check_names(client=charge.client, run=charge.run, key=charge.key, request=charge.request)
    if charge.count < 1:
        raise BadInput(f"charge {charge.key!r} of client {charge.client!r} has count {charge.count!r}: it is ≥ 1")
    if replay and not book.account(charge.client).simulated:
        raise BadInput(
            f"client {charge.client!r} is not simulated: at a site a repeated draw is a new charge (replay=False)"
        )
    standing = book.declared(charge.client, charge.run)
    if all(event.what != charge.what for event in standing.plan.turn):
        raise BadInput(f"the plan of client {charge.client!r} for run {charge.run!r} has no {charge.what!r}")
    return standing


def check_repeated(charge: Charge, earlier: Entry) -> None:
    """A simulation may repeat a draw: keyed streams repeat a release only for the same request."""
    if (earlier.what, earlier.amount, earlier.request) != (charge.what, charge.count, charge.request):
        raise BadInput(
            f"draw {charge.key!r} of client {charge.client!r} in run {charge.run!r} was charged for another request: "
            "its noise must not be used twice; start a new run, or resume from the checkpoint that belongs to this one"
        )


def check_room(book: Book, charge: Charge, standing: Standing, total: int) -> None:
    """Refuse a charge on a closed plan or beyond the plan's cap, and say what a later plan is paid from."""
    if not standing.open:
        raise BudgetRefused(
            f"the plan of client {charge.client!r} for run {charge.run!r} is closed: declare it again to go on"
        )
    cap = standing.cap(charge.what)
    if cap is not None and total > cap:
        block = book.blocks.get(charge.client)
        late = block is not None and standing.payable < standing.plan.turns and charge.run not in block.caps
        raise BudgetRefused(
            f"client {charge.client!r} would overdraw in run {charge.run!r}: {charge.what!r} was released "
            f"{total - charge.count} of at most {cap} times, {charge.count} more asked; nothing was charged. "
            "Leave the client out, or have its officer approve a top_up and declare the plan again"
            + (_LATER if late else "")
        )
