"""Accountants: what noisy releases cost, how much noise a budget needs, how many releases it affords. No torch."""

from sordino.privacy.accounting.accountants import (
    ACCOUNTANTS,
    affordable,
    calibrate,
    calibrate_events,
    composed_epsilon,
    epsilon,
    label,
    replace_one_epsilon,
    split,
    steps_within,
)

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
