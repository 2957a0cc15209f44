"""The methods room: named compositions of client and server parts, and the plan that they imply."""

from sordino.methods.asking import Ask
from sordino.methods.auto import Learner, settle, wants_auto
from sordino.methods.calibrate import Calibrate
from sordino.methods.method import Method
from sordino.methods.plan import ClientPlan, Plan, adapt, make_plan, noises_of
from sordino.methods.registry import get, names, register
from sordino.methods.training import Population, Training

__all__ = [
    "Ask",
    "Calibrate",
    "ClientPlan",
    "Learner",
    "Method",
    "Plan",
    "Population",
    "Training",
    "adapt",
    "get",
    "make_plan",
    "names",
    "noises_of",
    "register",
    "settle",
    "wants_auto",
]
