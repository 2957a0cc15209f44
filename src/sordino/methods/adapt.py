"""Adaptive selection: when a client runs dry or cannot pay at all, Problem 1 is solved again for those who are left.

Rates and noise multipliers stay as they were fixed before training; only counts adapt, under caps that the noise was
calibrated for (R6). So no filter is needed: the ledger compares counts with the declared caps, as always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sordino.methods.plan import Plan
from sordino.methods.selection import Setting
from sordino.server.select import Schedule, redraw, without


def adapt(plan: Plan, payable: Mapping[str, int], dimension: int, seed: int) -> Plan:
    """The plan with a schedule that nobody's payable turns are exceeded by.

    Rounds are drawn until a client would be asked more often than it can pay; from that round on the rule is solved for
    the others and the rest of the schedule is drawn again. Depends on public facts only.

    Guarantees: every client's scheduled turns are at most its payable ones, which are at most its plan's cap.
    """
    rule = plan.method.select
    if rule.resolve is None:
        return plan
    setting = Setting(plan.population, plan.training, plan.method.calibration.accountant, dimension, seed)
    left = np.array([payable.get(c.name, c.turns) for c in plan.clients], dtype=np.int64)
    schedule, start, alive = plan.schedule, 1, left > 0
    changed = not alive.all()
    while True:
        if not alive.any():
            schedule = without(schedule, range(schedule.clients), start)
            break
        if changed:
            schedule = redraw(schedule, rule.resolve(setting, alive), start)
        dry = _first_overdraw(schedule, left, start)
        if dry is None:
            break
        kept = schedule.asked[start - 1 : dry - 1].ravel()
        left = left - np.bincount(kept[kept >= 0], minlength=len(left))
        asked = np.bincount(schedule.asked[dry - 1][schedule.asked[dry - 1] >= 0], minlength=len(left))
        alive, start, changed = alive & (asked <= left) & (left > 0), dry, True
    return replace(plan, schedule=schedule)


def _first_overdraw(schedule: Schedule, left: np.ndarray, start: int) -> int | None:
    """The first round from ``start`` on in which some client is asked beyond what it has left."""
    taken = np.zeros_like(left)
    for number in range(start, schedule.rounds + 1):
        asked = schedule.asked[number - 1]
        np.add.at(taken, asked[asked >= 0], 1)
        if (taken > left).any():
            return number
    return None
