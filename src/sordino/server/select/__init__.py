"""Whom to ask: selection rules, Problem 1, schedules drawn before training, and what they do to budgets.

>>> p = privacy_aware(sizes, variances, weight)
>>> schedule = draw(p, rounds=100, select=10, seed=0, rule="privacy-aware")
>>> schedule.counts          # T_k: what each client's noise is calibrated for
"""

from sordino.server.select.noise import closed_form_factors, default_weight, noise_factors
from sordino.server.select.problem import compensation, privacy_aware, unbiased, uniform
from sordino.server.select.schedule import NOBODY, Round, Schedule, choose, draw, everyone, power_of_choice
from sordino.server.select.turns import last_rounds, redraw, within, without

__all__ = [
    "NOBODY",
    "Round",
    "Schedule",
    "choose",
    "closed_form_factors",
    "compensation",
    "default_weight",
    "draw",
    "everyone",
    "last_rounds",
    "noise_factors",
    "power_of_choice",
    "privacy_aware",
    "redraw",
    "unbiased",
    "uniform",
    "within",
    "without",
]
