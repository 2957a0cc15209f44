"""sordino: federated learning in which every participant sets its own privacy.

import sordino as sd

clients = sd.data.load("digits").partition("dirichlet", clients=12, beta=0.3, seed=0)
clients = clients.with_budgets("dist2", delta=1e-5, seed=0)
run = sd.train(clients, model="cnn-small", method="dp-fedavg", rounds=40, seed=0)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sordino._version import __version__
from sordino.errors import BadInput, BudgetRefused, LedgerDamaged, SordinoError

if TYPE_CHECKING:
    from sordino import data, methods, models, parts, privacy, server
    from sordino.methods import Method
    from sordino.study.estimator import Classifier, Regressor
    from sordino.study.prepared import Run
    from sordino.study.run import load, plan, train

__all__ = [
    "BadInput",
    "BudgetRefused",
    "Classifier",
    "LedgerDamaged",
    "Method",
    "Regressor",
    "Run",
    "SordinoError",
    "__version__",
    "data",
    "load",
    "methods",
    "models",
    "parts",
    "plan",
    "privacy",
    "server",
    "train",
]

_ROOMS = {"data", "methods", "models", "parts", "privacy", "server"}
_NAMES = {
    "Classifier": "study.estimator",
    "Method": "methods",
    "Regressor": "study.estimator",
    "Run": "study.prepared",
    "load": "study.run",
    "plan": "study.run",
    "train": "study.run",
}


def __getattr__(name: str) -> Any:
    """Rooms and names are loaded when first used, so that a ledger can be read without loading torch."""
    if name in _ROOMS:
        return importlib.import_module(f"sordino.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(f"sordino.{_NAMES[name]}"), name)
    raise AttributeError(f"module 'sordino' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
