"""Accountants: what noisy releases cost, how much noise a budget needs, how many releases it affords. No torch."""

from sordino.privacy.accounting.accountants import ACCOUNTANTS, label
from sordino.privacy.accounting.compose import (
    affordable,
    calibrate_events,
    composed_epsilon,
    replace_one_epsilon,
    split,
    steps_within,
)
from sordino.privacy.accounting.front import calibrate, epsilon

__all__ = [
    "ACCOUNTANTS",
    "affordable",
    "calibrate",
    "calibrate_events",
    "composed_epsilon",
    "epsilon",
    "label",
    "replace_one_epsilon",
    "split",
    "steps_within",
]
