"""The server's half of the fairness methods: what released losses tell, q-FFL, SCAFFOLD, FedDyn, ALI-DPFL's pace.

Everything is computed from releases and public facts, so it is free. ``combine`` names the rule that weighs the
updates in those that add something to a combination.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import broadcast
from sordino.server.facts import Facts, Memory, Outcome, Told
from sordino.server.pace import ali_dpfl
from sordino.server.rule import Aggregate, weighted
from sordino.server.rules import inner_rule


def hear_loss(
    kappa: float = 2.5, floor: float = 0.1, ceiling: float = 10.0, adapt: bool = True
) -> Callable[[Tensor, Facts], Told]:
    """F(w_t) = Σ p_i F_i as ``mean_loss`` and, with ``adapt``, the next bound C_l = max(floor, κ F) ≤ ceiling.

    p_i = n_i/Σn over those who answered. The published bound, C_l = F, shrinks in expectation and 0 absorbs; the
    ceiling is there because large noise would otherwise feed on itself.
    """
    if adapt and not 0 < floor <= ceiling < math.inf:
        raise BadInput(f"floor={floor!r} and ceiling={ceiling!r} of the loss bound: 0 < floor ≤ ceiling is needed")
    if adapt and not (math.isfinite(kappa) and kappa > 1):
        raise BadInput(f"kappa={kappa!r}: the next loss bound is κ times the mean loss, with κ > 1")

    def conclude(answers: Tensor, facts: Facts) -> Told:
        losses = answers.detach().double().cpu().numpy()
        shares = facts.data_shares * facts.selection * np.isfinite(losses)
        if not shares.sum() > 0:
            return Told()
        mean = float((shares * np.where(np.isfinite(losses), losses, 0.0)).sum() / shares.sum())
        bound = {"loss_bound": min(ceiling, max(floor, kappa * mean))} if adapt else {}
        return Told({"mean_loss": mean, **bound})

    return conclude


LOSS_BROADCASTS = {"mean_loss": broadcast.number(-1e4, 1e4), "loss_bound": broadcast.number(1e-6, 1e6)}
"""What ``hear_loss`` broadcasts."""


@part
def q_ffl(*, q: float = 0.1, least: float = 0.01, corrected: bool = False) -> Aggregate:
    """q-FedAvg (Li et al. 2020): Δ_k = F_k^q(w − w_k)/η, h_k = qF_k^(q−1)‖(w − w_k)/η‖² + F_k^q/η, w ← w − ΣΔ/Σh.

    F_k is the released loss at w, raised to ``least``: noise can make it negative. q = 0 is the plain mean. With
    ``corrected``, ‖w − w_k‖² is without the declared noise that it holds, dσ_k².
    """
    if not (math.isfinite(q) and q >= 0 and least > 0):
        raise BadInput(f"q-ffl has q={q!r} and least={least!r}: q ≥ 0 and least > 0 are needed")

    def combine(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        heard, rate = facts.answers["loss"], facts.lr
        losses = np.maximum(np.where(np.isfinite(heard), heard, least), least)
        amplified = losses**q
        noise = updates.shape[1] * facts.variances if corrected else 0.0
        squares = np.maximum(0.0, np.asarray(facts.norms) ** 2 - noise)
        curvature = q * losses ** (q - 1) * squares / rate**2 + amplified / rate
        weights = facts.selection * amplified / rate / float((facts.selection * curvature).sum())
        return Outcome(weighted(updates, weights), weights, memory, {"mean_loss": float(losses.mean())})

    return Aggregate("q-ffl", combine, needs=("loss",))


@part
def scaffold(*, combine: str | Aggregate = "data-weighted") -> Aggregate:
    """SCAFFOLD: combine, and c ← c + Σ (n_i/n)(c_i⁺ − c_i), c_i⁺ − c_i = −Δ_i/(K_iη) − c, over those who took part.

    n counts all clients, so that c = Σ (n_i/n) c_i stays true under any participation. c is broadcast as ``control``.
    """
    inner = inner_rule(combine)

    def both(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        outcome = inner.combine(updates, facts, memory)
        control = facts.public.get("control", torch.zeros_like(updates[0]))
        rows = _last_rows(facts.clients)
        shares = facts.sizes[rows] / float(facts.records)
        pace = facts.steps[rows] * facts.lr
        change = weighted(_rows(updates, rows), -shares / pace) - float(shares.sum()) * control
        return replace(outcome, told=Told({"control": control + change}))

    known = {"control": broadcast.vector(1e6)}
    return Aggregate("scaffold", both, partner="scaffold", refuse_small=inner.refuse_small, broadcasts=known)


@part
def feddyn(*, combine: str | Aggregate = "data-weighted") -> Aggregate:
    """FedDyn: h ← h − α Σ (n_i/n)Δ_i, w ← w + ΣwΔ − h/α. The server keeps −h/α, which does not depend on α."""
    inner = inner_rule(combine)

    def both(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        outcome = inner.combine(updates, facts, memory)
        rows = _last_rows(facts.clients)
        shares = facts.sizes[rows] / float(facts.records)
        moved = memory.get("feddyn_moved", torch.zeros_like(updates[0])) + weighted(_rows(updates, rows), shares)
        return replace(outcome, delta=outcome.delta + moved, memory={**outcome.memory, "feddyn_moved": moved})

    return Aggregate("feddyn", both, partner="feddyn", refuse_small=inner.refuse_small)


def _last_rows(clients: NDArray[np.int64]) -> NDArray[np.int64]:
    """The last row of every client: where one was drawn twice, its state is what its last turn left."""
    return np.array(sorted({int(client): row for row, client in enumerate(clients)}.values()), dtype=np.int64)


def _rows(updates: Tensor, rows: NDArray[np.int64]) -> Tensor:
    return updates if len(rows) == len(updates) else updates[torch.from_numpy(rows).to(updates.device)]


FAIR_RULES: dict[str, Callable[..., Aggregate]] = {
    "q-ffl": q_ffl,
    "scaffold": scaffold,
    "feddyn": feddyn,
    "ali-dpfl": ali_dpfl,
}
