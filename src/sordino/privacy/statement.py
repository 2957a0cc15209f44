"""What a client has spent, in plain words: a statement that a privacy officer can read, and the same as JSON."""

from __future__ import annotations

import math
from typing import Any

from sordino.privacy import accounting
from sordino.privacy.book import Account, Standing, number
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Adjacency, Sampling, Scheme

UNIT = "one record of this client"
SIMULATION = "simulation: keyed streams, no secret noise"
ADJACENCY = {
    Adjacency.ZERO_OUT: "one record's contribution is erased; the number of records is public",
    Adjacency.ADD_REMOVE: "one record is added or removed; the number of records is public all the same, so this is "
    "not what holds: read it as zero-out, which costs the same",
    Adjacency.REPLACE_ONE: "one record is exchanged for any other",
}
DECLARED = "rate and noise of everything released were fixed before the first release"
FILTER = (
    "rate and noise of later runs may follow from earlier releases; the filter guarantees that the budget is kept, and "
    "the spent figure is its meter, not a guarantee of its own"
)
OVERDRAWN = (
    "runs of an earlier version, declared after the account's first release, do not fit the filter that they need: the "
    "budget is NOT guaranteed, the spent figure is what the filter's meter shows, and nothing more is released"
)
NOT_COVERED = (
    "releases that are not in this ledger, and anything sent without passing the gate",
    "tuning: choosing settings, a round, a seed or a method by looking at results",
    "metrics that an observer computes on records in a simulation (client accuracy, Ψ)",
    "public facts, by declaration: number of records, budget, batch size, noise multipliers, who takes part",
)


def statement(ledger: Ledger, client: str) -> dict[str, Any]:
    """Everything the ledger knows about one client's spending, as plain values; infinity is None.

    ``spent_epsilon`` is None when nothing is guaranteed: noise 0, or an account marked NOT PRIVATE (then
    ``nominal_epsilon`` still gives what the recorded noise would cost if it were secret).
    """
    return _statement(ledger, client, ledger.epsilon([client])[client])


def _statement(ledger: Ledger, client: str, nominal: float) -> dict[str, Any]:
    account = ledger.account(client)
    standings = ledger.standings(client)
    private = not account.not_private
    spent = nominal if private else math.inf
    budget = account.budget
    replaced = ledger.replace_one_epsilon(client) if private else math.inf
    return {
        "client": client,
        "unit": UNIT,
        "adjacency": str(budget.adjacency),
        "adjacency_in_words": ADJACENCY[budget.adjacency],
        "epsilon": number(budget.epsilon),
        "opened_epsilon": number(account.opened.epsilon),
        "delta": budget.delta,
        "spent_epsilon": number(spent),
        "nominal_epsilon": number(nominal),
        "left_epsilon": number(budget.epsilon if budget.is_public else max(0.0, budget.epsilon - spent)),
        "replace_one_epsilon": number(replaced),
        "composition": ledger.composition(client),
        "composition_in_words": _composition_in_words(ledger, client),
        "accountant": account.accountant,
        "accountant_in_words": _accountants(account, standings),
        "sampling": sorted({str(e.sampling.scheme) for s in standings for e in s.plan.turn}),
        "public": budget.is_public,
        "private": private,
        "not_private": list(account.not_private),
        "simulated": account.simulated,
        "releases": [release for s in standings for release in _releases(s)],
        "open_plans": [_open_plan(s) for s in standings if s.open],
        "top_ups": [
            {"time": t.time, "epsilon": t.epsilon, "reason": t.reason, "officer": t.officer} for t in account.top_ups
        ],
        "bindings": [
            {"time": b.time, "site": b.site, "commitment": b.commitment, "reason": b.reason, "officer": b.officer}
            for b in ledger.bindings()
            if not account.simulated
        ],
        "since": account.since,
        "not_covered": list(NOT_COVERED),
    }


def _composition_in_words(ledger: Ledger, client: str) -> str:
    """What the composition guarantees, and what the figure of the spent ε is."""
    if ledger.overdrawn(client):
        return OVERDRAWN
    return FILTER if ledger.rests_on_filter(client) else DECLARED


def _accountants(account: Account, standings: list[Standing]) -> str:
    schemes = sorted({str(e.sampling.scheme) for s in standings for e in s.plan.turn}) or [str(Scheme.POISSON)]
    return "; ".join(dict.fromkeys(accounting.label(account.accountant, scheme) for scheme in schemes))


def _releases(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "run": standing.plan.run,
            "what": e.what,
            "sampling": str(e.sampling.scheme),
            "rate": e.sampling.rate,
            "noise": number(e.noise),
            "count": e.count,
        }
        for e in standing.events(standing.used)
    ]


def _open_plan(standing: Standing) -> dict[str, Any]:
    return {
        "run": standing.plan.run,
        "turns": standing.plan.turns,
        "payable_turns": standing.payable,
        "used": {e.what: standing.used.get(e.what, 0) for e in standing.plan.turn},
        "caps": standing.caps,
    }


def export(ledger: Ledger, clients: list[str] | None = None) -> dict[str, Any]:
    """The statements of all clients (or of these) and the chain's head, ready for JSON."""
    names = [account.client for account in ledger.accounts()] if clients is None else clients
    entries, head = ledger.head
    costs = ledger.epsilon(names)
    return {
        "schema": 1,
        "ledger": {"file": ledger.path.name, "entries": entries, "head": head},
        "statements": [_statement(ledger, client, costs[client]) for client in names],
    }


def _epsilon(value: float | None) -> str:
    """A figure that never looks smaller than it is: rounded up to four digits."""
    if value is None:
        return "infinite"
    if value == 0.0:
        return "0"
    scale = 10.0 ** (3 - math.floor(math.log10(value)))
    return f"{math.ceil(value * scale - 1e-9) / scale:.6g}"


def _figure(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.6g}"


def _draw(release: dict[str, Any]) -> str:
    sampling = Sampling(Scheme(release["sampling"]), release["rate"])
    if sampling.scheme is Scheme.POISSON:
        return f"each record drawn with probability {sampling.rate:.6g}"
    if sampling.scheme is Scheme.FIXED:
        return f"a fixed {sampling.rate:.6g} of the records drawn without replacement"
    return "all records used"


def statement_text(told: dict[str, Any]) -> str:
    """A statement, as ``statement`` gives it, in plain words."""
    lines = [f"Privacy statement of client {told['client']}"]
    if not told["private"]:
        lines += ["", "NOT PRIVATE: " + "; ".join(told["not_private"])]
    if told["simulated"]:
        lines += ["", f"This is a {SIMULATION}. It protects nobody; it shows what a deployment would spend."]
    lines += ["", *_promise(told), "", "Released so far:"]
    lines += [
        f"  run {r['run']}: {r['what']}, {r['count']} times, {_draw(r)}, "
        + ("without noise" if r["noise"] == 0 else f"noise {_figure(r['noise'])} times the sensitivity")
        for r in told["releases"]
    ] or ["  nothing"]
    if told["open_plans"]:
        lines += ["", "Planned and still open:"]
    for plan in told["open_plans"]:
        caps = plan["caps"]
        parts = [
            f"{what} {used} of {'any number' if caps is None else f'at most {caps[what]}'}"
            for what, used in plan["used"].items()
        ]
        turns = f"{plan['payable_turns']} of {plan['turns']} turns can be paid"
        lines.append(f"  run {plan['run']}: {turns}; used: {', '.join(parts)}")
    if told["top_ups"]:
        lines += ["", "Budget raised:"]
    lines += [
        f"  {t['time']}: by {t['epsilon']:.6g}, approved by {t['officer']}: {t['reason']}" for t in told["top_ups"]
    ]
    if told["bindings"]:
        lines += ["", "Whose ledger this is:"]
    for one in told["bindings"]:
        why = f", approved by {one['officer']}: {one['reason']}" if one["officer"] else ""
        lines.append(f"  {one['time']}: site {one['site']}, records {one['commitment'][:16]}…{why}")
    lines += ["", "Not covered by this statement:", *(f"  - {item}" for item in told["not_covered"])]
    return "\n".join(lines) + "\n"


def _replaced(told: dict[str, Any]) -> str:
    value = told["replace_one_epsilon"]
    if value is None and told["spent_epsilon"] is not None:
        return "not claimed (the filter bounds its own notion of neighbours only)"
    return f"epsilon {_epsilon(value)}"


def _promise(told: dict[str, Any]) -> list[str]:
    """The figures: what is protected, under which notion, how much was spent and is left."""
    spent, left = _epsilon(told["spent_epsilon"]), told["left_epsilon"]
    budget = "none: the data are public" if told["public"] else f"epsilon {told['epsilon']:.6g}"
    return [
        f"Protected unit:  {told['unit']}",
        f"Neighbours:      {told['adjacency']} ({told['adjacency_in_words']})",
        f"Sampling:        {', '.join(told['sampling']) or 'nothing sampled yet'}",
        f"Accountant:      {told['accountant']}: {told['accountant_in_words']}",
        f"Composition:     {told['composition']}: {told['composition_in_words']}",
        f"Budget:          {budget}, delta {told['delta']:.6g}",
        f"Spent:           epsilon {spent}"
        + ("" if told["private"] else f" ({_epsilon(told['nominal_epsilon'])} if the noise had been secret)"),
        f"  the same under replace-one: {_replaced(told)}",
        f"Left:            {'no limit' if left is None else f'epsilon {math.floor(left * 1e4) / 1e4:.6g}'}",
    ]
