"""A site's half of a survey: one release of declared tables, from its held-out records as they are in its file."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from sordino.data.survey import Places, Survey, parse_survey
from sordino.engine.federation import wire
from sordino.engine.federation.job import safe
from sordino.engine.federation.limits import Declared, Policy, Refused
from sordino.engine.federation.release_log import note_release
from sordino.engine.federation.wire import Packet, pack
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.privacy.gate import Gate, Terms, key_of
from sordino.privacy.generators import Turn
from sordino.privacy.held import HELD
from sordino.privacy.ledger import LedgerPlan
from sordino.privacy.types import Budget, Scheme

if TYPE_CHECKING:
    from sordino.engine.federation.site import Site

log = logging.getLogger("sordino.site")

PART = wire.SURVEY
"""What a survey's tables are called in the ledger and in replies."""

Raw = Callable[[Survey], tuple[Places, NDArray[np.int64] | None]]
"""(survey) → the cells of every held-out record, [records, f], read from the site's file as it is; and whose each is,
where a unit of privacy has several."""


def check_survey(
    policy: Policy, brief: Mapping[str, Any], declared: Declared, raw: Raw | None, budget: Budget
) -> Survey:
    """The survey that a server asks for; refused where this site does not allow it. Public facts alone decide."""
    if not policy.survey:
        raise Refused("surveys are not allowed here: this site's limits.survey is false")
    if raw is None or not declared.held:
        raise Refused("this site has no held-out records that a survey could ask: its data.held_out says how many")
    if str(brief["adjacency"]) != str(budget.adjacency):
        raise Refused(f"the survey accounts under {brief['adjacency']}, this site's budget is under {budget.adjacency}")
    try:
        return parse_survey(brief["survey"])
    except BadInput:
        raise
    except (AttributeError, ArithmeticError, TypeError, ValueError) as error:
        raise Refused(f"the survey makes no sense: {type(error).__name__}") from error


def check_terms(policy: Policy, terms: Terms, budget: Budget) -> None:
    """Refuse anything but one release of one part from a full batch, with the noise that this site insists on."""
    if [name for name, _ in terms.parts] != [PART] or terms.sampling.scheme is not Scheme.FULL or terms.count != 1:
        raise Refused("a survey is one release of its tables, from all held-out records")
    if terms.divisor != 1.0 or terms.shared is not None or terms.groups:
        raise Refused("a survey releases counts, with noise of the site's own")
    if terms.adjacency is not budget.adjacency:
        raise Refused(f"the survey accounts under {terms.adjacency}, this site's budget is under {budget.adjacency}")
    if not budget.is_public and not terms.noise(PART) >= policy.least_noise:
        raise Refused(
            f"{PART!r} would have noise {terms.noise(PART):.3g}: this site adds at least {policy.least_noise:g}"
        )


def answer_survey(site: Site, packet: Packet, request: str) -> bytes:
    """Declare, charge, count, store, send: stored bytes for a request that was answered before (R11).

    Guarantees: (1) held-out records' accounts alone are charged, before the file is read; (2) a unit adds one in all to
    each of f tables, whatever its records hold: sensitivity √f; (3) a refusal depends on public facts only.
    """
    brief = packet.facts["brief"]
    account, run = site.account + HELD, safe(str(brief["run"]))
    survey = check_survey(site.policy, brief, site.declared_in(run), site.raw, site.budget)
    terms = wire.terms_from_plain(packet.facts["terms"])
    check_terms(site.policy, terms, site.budget)
    plan = LedgerPlan(account, run, (terms.event,), 1, str(brief.get("name", "")))
    party, payable = site.agree([plan], held=True)
    if not payable:
        raise BudgetRefused("what is left of this site's budget for held-out records does not pay for this survey")
    terms = replace(terms, payers=party.payers)
    payers, members = [account + one for one in party.payers], site.attendance.members(True, party.seats)
    turn, first = Turn(account, 1), payers[0]
    key = key_of(turn, terms, "")
    stored = site.ledger.stored(first, run, key, request)
    if stored is not None:
        log.info("survey of run %s: sent again as it was", run)
        return stored
    gate = Gate(site.ledger, site.source, run)
    permit = gate.grant([turn], [terms], request)
    try:  # from here on records are read, and what goes wrong is nobody's business
        assert site.raw is not None
        cells, whose = site.raw(survey)
        units = np.arange(len(cells)) if whose is None else whose
        if len(np.unique(units)) != site.declared.held:
            raise SordinoError(f"the file has other than the {site.declared.held} held-out units that were declared")
        here = np.isin(units, members)  # of those who take part
        flat = torch.from_numpy(cells[here] + survey.starts)
        whole = None if whose is None else torch.from_numpy(np.unique(whose[here], return_inverse=True)[1])
        found = gate.count(permit, 0, {PART: (flat, survey.width)}, whole)[PART]
        spent = {
            "survey_epsilon": max(site.ledger.epsilon(payers, run).values()),
            "held_epsilon": max(site.ledger.epsilon(payers).values()),
            "not_private": list(dict.fromkeys(why for one in payers for why in site.ledger.account(one).not_private)),
        }
        reply = pack(Packet(wire.ANSWER, spent, {PART: found.value}))
    except Exception:
        log.exception("the survey of run %s failed after it was charged; the server is told 'unavailable'", run)
        return wire.unavailable()
    site.ledger.store(first, run, key, request, reply)
    for one in payers:
        note_release(site.ledger, one, run, terms.what)
    log.info("survey of run %s: %d tables released, ε %.4g", run, len(survey.columns), spent["survey_epsilon"])
    return reply
