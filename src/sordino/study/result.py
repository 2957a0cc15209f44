"""The result of a run: what result.json holds, and how it is written and read. Infinite ε is null in JSON."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sordino._version import __version__
from sordino.engine import rounds
from sordino.engine.checkpoint import Checkpoint, write_atomic
from sordino.engine.evaluate import Observer, by_budget
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Event, Scheme

SCHEMA = 1
_EPSILONS = ("epsilon", "spent_epsilon", "run_epsilon", "replace_one_epsilon")


def build_result(
    study: dict[str, Any], plan: Plan, state: Checkpoint, book: Ledger | None, run: str, seed: int, observer: Observer
) -> dict[str, Any]:
    """The dict of design: study, rounds, final, privacy, versions."""
    last = observer.look(state.shown)
    final = {key: last.get(key) for key in ("accuracy", "loss", "psi", "worst_accuracy", "client_accuracy")}
    others = ("client_loss", "accuracy_variance", "worst_decile", "best_decile")
    final |= {key: value for key, value in last.items() if key.startswith("central") or key in others}
    final |= observer.look_back(state.shown)
    final["by_budget"] = by_budget(
        [c.budget.epsilon for c in plan.clients], last["client_accuracy"], last["client_loss"]
    )
    early = rounds.stopped(plan, state.round)
    return {
        "schema": SCHEMA,
        "study": study,
        "method": plan.method.name,
        "seed": seed,
        "rounds": state.history,
        "final": final,
        "privacy": _privacy(plan, state, book, run),
        "private": plan.private,
        "simulated": True,
        **({"stopped": early} if early else {}),
        "seconds": state.seconds,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """What a result was made with."""
    return {
        "sordino": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _privacy(plan: Plan, state: Checkpoint, book: Ledger | None, run: str) -> list[dict[str, Any]]:
    if book is None:
        return [
            {
                "client": c.name,
                **dict.fromkeys(_EPSILONS, math.inf),
                "delta": c.budget.delta,
                "adjacency": str(c.budget.adjacency),
                "sampling": str(c.terms.sampling.scheme),
                "accountant": "none",
                "releases": [],
            }
            for c in plan.clients
        ]
    spent, here = book.epsilon(), book.epsilon(run=run)
    ends = budget_ends(plan, state, book)
    return [
        {
            "client": c.name,
            "epsilon": c.budget.epsilon,
            "delta": c.budget.delta,
            "spent_epsilon": spent[c.name],
            "run_epsilon": here[c.name],
            "replace_one_epsilon": book.replace_one_epsilon(c.name),
            "composition": book.composition(c.name),
            "adjacency": str(c.budget.adjacency),
            "sampling": str(c.terms.sampling.scheme),
            "accountant": accountant_used(book.spent(c.name) or [c.terms.event]),
            "releases": [
                {"what": e.what, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
                for e in book.run_events(c.name, run)
            ],
            "budget_ends": ends[c.name],
        }
        for c in plan.clients
    ]


def accountant_used(events: list[Event]) -> str:
    """What the ledger's tight accountant is for these releases: PLD has no fixed-size batches, full ones are exact."""
    schemes = {event.sampling.scheme for event in events}
    if Scheme.FIXED in schemes:
        return "rdp-tightened"
    return "gaussian-exact" if schemes == {Scheme.FULL} else "pld"


def budget_ends(plan: Plan, state: Checkpoint, book: Ledger) -> dict[str, int | None]:
    """By client: the round after which its budget cannot pay another turn; 0 when it never could pay one.

    None where the budget outlasts the run, or never ends (public data).
    """
    last = {name: record["round"] for record in state.history for name in record["participants"]}
    bounded = [c for c in plan.clients if not c.budget.is_public]
    another = [[*book.spent(c.name), c.terms.event, *(one.event for one in c.asks)] for c in bounded]
    budgets = [book.account(c.name).budget for c in bounded]
    costs = composed_epsilon(another, [b.delta for b in budgets]) if bounded else ()
    over = {c.name for c, b, cost in zip(bounded, budgets, costs) if cost > b.epsilon}
    return {c.name: last.get(c.name, 0) if c.name in over else None for c in plan.clients}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        return _plain(value.tolist())
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with null for every number that is not finite."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> dict[str, Any]:
    """A result as it was in Python: a null ε is ∞ again."""
    result: dict[str, Any] = json.loads(text)
    for one in result.get("privacy", []):
        one |= {key: math.inf for key in _EPSILONS if one.get(key) is None}
    return result


def read_result(file: Path) -> dict[str, Any]:
    """The result in a file; what is none is refused."""
    try:
        result = from_json(file.read_text())
        if {"rounds", "final", "privacy"} <= result.keys():
            return result
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: name finished run folders or result.json files") from None
    except (OSError, ValueError, AttributeError):
        pass
    raise BadInput(f"{file} is not a result of sordino: it is damaged, or another program's")


def save_run(path: Path, result: dict[str, Any], weights: Tensor) -> None:
    """Weights and result in one safetensors file."""
    write_atomic(path, save({"weights": weights.contiguous()}, {"sordino": to_json(result)}))


def load_run(path: Path) -> tuple[dict[str, Any], Tensor]:
    """What ``save_run`` wrote; a run folder stands for the file in it."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        with safe_open(str(file), framework="pt") as opened:
            return from_json((opened.metadata() or {})["sordino"]), opened.get_tensor("weights")
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: a finished run's folder has one, and run.save writes one") from None
    except (SafetensorError, KeyError, OSError, json.JSONDecodeError) as error:
        raise BadInput(f"{file} is not a saved run of sordino ({error})") from None
