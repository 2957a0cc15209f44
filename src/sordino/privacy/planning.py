"""How much of a declared plan a budget can pay. Pure functions over the book; the only place the accountant decides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sordino.errors import BadInput, BudgetRefused
from sordino.privacy import accounting, composing
from sordino.privacy.accounting import filters
from sordino.privacy.book import Account, Book, Plan, Standing, account_of, kinds
from sordino.privacy.types import Event

Question = tuple[Plan, list[Event]]  # a plan, and what its client is committed to elsewhere


def check_plan(plan: Plan, account: Account) -> None:
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


def _stands(plan: Plan, account: Account, standing: Standing | None) -> bool:
    """Whether the plan was declared before and is to be returned as it was."""
    if standing is None:
        return False
    if (standing.plan.turn, standing.plan.turns) != (plan.turn, plan.turns):
        raise BadInput(f"run {plan.run!r} of client {plan.client!r} was declared with another plan: use a new run name")
    raised = any(top_up.entry > standing.entry for top_up in account.top_ups)
    return standing.open and not (raised and standing.payable < plan.turns)


def payable(book: Book, plans: Sequence[Plan], run_epsilon: float | None = None) -> dict[str, int]:
    """For each client the largest m ≤ turns that may be declared: within its budget and, alone, within ``run_epsilon``.

    Before a client's first charge: ε(commitments elsewhere + m × turn) ≤ budget, by its accountant. Two vectorised
    calls per accountant settle the plans that fit whole or not at all; only the others are searched. After it, or in an
    account that is a filter from the start: by the filter. A plan that stands is returned as it was declared.
    """
    result: dict[str, int] = {}
    questions: dict[str, list[Question]] = {}
    for plan in plans:
        account = account_of(book, plan.client)
        check_plan(plan, account)
        standing = book.standing(plan.client, plan.run)
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


def _filtered(book: Book, plan: Plan, account: Account) -> int:
    """Turns that the account's filter admits; where the block does not fit it, what is left of the block's kinds."""
    client, others = plan.client, book.commitments(plan.client, but=plan.run)
    block = book.blocks.get(client)
    if block is None:
        return filters.turns_within(plan.turn, account.budget, plan.turns, others, None)
    if composing.block_fits(book, client):
        order = composing.order_of(book, client)
        return filters.turns_within(plan.turn, account.budget, plan.turns, others, order)
    return 0 if book.beyond(client) else _left_of_block(book, plan, others)


def _left_of_block(book: Book, plan: Plan, others: list[Event]) -> int:
    """The most turns made of releases that were declared before the first charge and that nobody else is to make.

    A release is one of those if it has their sampling and noise, under whatever run: the block is a set of releases
    with (q, z) fixed in advance, and which of them happen, in which order, may depend on anything.
    """
    left = kinds(book.block_events(plan.client))
    left.subtract(kinds(others))
    needed = kinds(list(plan.turn))
    return max(0, min(int(plan.turns), *(left[kind] // count for kind, count in needed.items())))


def _alone(book: Book, plan: Plan, turns: int, run_epsilon: float | None) -> int:
    """The largest m ≤ turns whose releases alone cost at most ``run_epsilon``."""
    if run_epsilon is None or turns == 0:
        return turns
    account = book.accounts[plan.client]
    limit = replace(account.budget, epsilon=run_epsilon)
    return int(accounting.affordable(list(plan.turn), limit, turns, (), account.accountant))


def filter_order(book: Book, plan: Plan) -> float | None:
    """The order to record with a plan that the filter admitted; None for plans of the block and public data."""
    account, block = account_of(book, plan.client), book.blocks.get(plan.client)
    if account.budget.is_public or block is None or not composing.block_fits(book, plan.client):
        return None
    return composing.order_of(book, plan.client)


def _fits(book: Book, asked: Sequence[Question], turns: Sequence[int], accountant: str) -> list[bool]:
    """Whether so many turns of each plan fit its client's budget beside what it is committed to."""
    events = [[*others, *(e.times(e.count * m) for e in plan.turn)] for (plan, others), m in zip(asked, turns)]
    budgets = [book.accounts[plan.client].budget for plan, _ in asked]
    costs = accounting.composed_epsilon(events, [budget.delta for budget in budgets], accountant)
    return [bool(cost <= budget.epsilon) for cost, budget in zip(costs, budgets)]


def caps(book: Book, plan: Plan, turns: int, limited: bool = False) -> dict[str, int] | None:
    """How often each release of the plan may happen if ``turns`` turns are paid; None for public data: no limit.

    ``limited``: there is a limit on the run itself, which public data have to keep too.

    A plan that was closed and is declared again may have used more of one release than ``turns`` turns hold (retries);
    then no further turn fits beside it, and the caps are what was used.
    """
    if account_of(book, plan.client).budget.is_public and not limited:
        return None
    standing = book.standing(plan.client, plan.run)
    used = {} if standing is None else standing.used
    limits = {e.what: turns * int(e.count) for e in plan.turn}
    if any(used.get(what, 0) > limit for what, limit in limits.items()):
        return {what: used.get(what, 0) for what in limits}
    return limits
