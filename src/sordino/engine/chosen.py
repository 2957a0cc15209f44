"""What a run chooses by its paid estimates: when to end, and which model to end with; in simulation and deployed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sordino.engine.checkpoint import Checkpoint
from sordino.methods import Plan
from sordino.server import choosing


def evaluations(history: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was paid for to judge the model, over all rounds."""
    return [one for record in history for one in record.get("evaluation", ())]


def settled(plan: Plan, history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the paid estimates say that the run is to end: ``evaluation.stop`` of them in a row were no better."""
    patience = None if plan.judging is None else plan.judging.settings.stop
    return patience is not None and choosing.stalled(evaluations(history), patience)


def keep_best(plan: Plan, state: Checkpoint) -> None:
    """After a round: with ``evaluation.keep = "best"``, remember its model where its paid estimate is the best yet."""
    if plan.judging is None or plan.judging.settings.keep != "best" or "evaluation" not in state.history[-1]:
        return
    found = choosing.best(evaluations(state.history))
    if found is not None and found["round"] == state.round:
        state.best = state.shown.clone()


def kept(state: Checkpoint) -> dict[str, Any] | None:
    """What a result says of the model that a run ended with, where it was chosen: its round, and by which estimate."""
    found = choosing.best(evaluations(state.history)) if state.best is not None else None
    return None if found is None else {"round": found["round"], "of": state.round, "by": dict(found)}
