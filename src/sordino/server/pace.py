"""ALI-DPFL: the number of local steps of the next round follows a convergence bound."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server.facts import Array, Facts, Memory, Outcome
from sordino.server.rule import Aggregate, weighted
from sordino.server.rules import inner_rule

MOST_STEPS = 100
"""ALI-DPFL never takes more local steps than this in a round."""


@part
def ali_dpfl(
    *, combine: str | Aggregate = "data-weighted", convexity: float | None = None, whole_budget: bool = False
) -> Aggregate:
    """ALI-DPFL: combine, and set the local steps of the next round to τ* (``optimal_steps``).

    Γμ and μ are estimated from the updates alone (``heterogeneity``, ``secant``); ``convexity`` fixes μ instead. With
    ``whole_budget`` a run that took fewer steps a round than were planned goes on until all of them are taken.
    """
    inner = inner_rule(combine)

    def both(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        outcome = inner.combine(updates, facts, memory)
        shares, pace = facts.data_shares, facts.steps * facts.lr
        gradients = _Gradients(updates, shares, pace, facts.variances / pace**2)
        counted = np.zeros(len(shares)) if outcome.weights is None else outcome.weights
        kept = _secant(memory, gradients, outcome.delta * facts.server_lr, counted)
        kept["ali_spread"] = memory.get("ali_spread", 0.0) + gradients.spread()
        kept["ali_rounds"] = int(memory.get("ali_rounds", 0)) + 1
        mu = convexity or float(np.clip((1 + kept["ali_product"]) / (1 + kept["ali_square"]), 0.1, 10.0))
        spread = max(0.0, kept["ali_spread"] / kept["ali_rounds"])
        noise = float((shares * facts.variances * facts.batches**2 / (pace * facts.lr)).sum())
        steps = optimal_steps(
            clip=facts.clip,
            noise_variance=noise * updates.shape[1] / float(facts.batches.min()) ** 2,
            convexity=mu,
            heterogeneity=spread / (2 * mu),
            budget=int(np.max(np.asarray(facts.step_budget))),
        )
        left = int(np.max(np.asarray(facts.steps_left)))
        steps = 1 if facts.rounds - facts.round >= left else steps
        shown = {"next_steps": steps, "convexity": mu, "heterogeneity": spread / (2 * mu)}
        remembered = {**outcome.memory, **kept}
        return replace(outcome, memory=remembered, diagnostics={**outcome.diagnostics, **shown}, next_steps=steps)

    return Aggregate("ali-dpfl", both, refuse_small=inner.refuse_small, sets_steps=True, goes_on=whole_budget)


def optimal_steps(
    *, clip: float, noise_variance: float, convexity: float, heterogeneity: float, budget: int, most: int = MOST_STEPS
) -> int:
    """ALI-DPFL's τ* = √(1 + (4/μ² + 3C² + ΓμT + D)/((2 + 2/T)(C² + D))), rounded, in [1, ``most``].

    D = z²C²d/B̂² is ``noise_variance``, T the whole run's ``budget`` of local steps, μ ``convexity``, Γ
    ``heterogeneity``.
    """
    if not (clip > 0 and convexity > 0 and noise_variance >= 0 and heterogeneity >= 0 and budget >= 1):
        raise BadInput(
            f"optimal_steps: clip={clip!r}, convexity={convexity!r} must be positive, noise_variance="
            f"{noise_variance!r}, heterogeneity={heterogeneity!r} not negative, and budget={budget!r} at least 1"
        )
    square = clip**2
    if not math.isfinite(square):
        return 1
    above = 4 / convexity**2 + 3 * square + heterogeneity * convexity * budget + noise_variance
    best = math.sqrt(1 + above / ((2 + 2 / budget) * (square + noise_variance)))
    return int(min(most, max(1, round(best))))


class _Gradients:
    """Mean gradients g_i = −Δ_i/(K_iη) of a round, with the variance v_i of the noise on a coordinate of each."""

    def __init__(self, updates: Tensor, shares: Array, pace: Array, variances: Array) -> None:
        self.shares, self.pace, self.variances, self.dimension = shares, pace, variances, updates.shape[1]
        self.mean = weighted(updates, -shares / pace)
        self.squares = torch.linalg.vector_norm(updates, dim=1, dtype=torch.float64).cpu().numpy() ** 2 / pace**2

    def spread(self) -> float:
        """Σ p_i‖g_i − ḡ‖² less what noise adds to it, d Σ (p_i − p_i²)v_i; twice Γμ for μ-strongly convex losses.

        At the optimum ∇F = 0, so Γ = Σ p_i(F_i(w*) − F_i*) ≤ Σ p_i‖∇F_i − ∇F‖²/(2μ).
        """
        noise = self.dimension * float(((self.shares - self.shares**2) * self.variances).sum())
        return float((self.shares * self.squares).sum()) - float(self.mean.double().square().sum()) - noise


def _secant(memory: Memory, now: _Gradients, step: Tensor, counted: Array) -> Memory:
    """Sums over rounds of ⟨ḡ_t − ḡ_(t−1), Δ⟩/s² and ‖Δ‖²/s², Δ = w_t − w_(t−1): their quotient estimates μ.

    Δ holds the noise of ḡ_(t−1), which adds d Σ p_i c_i K_iη v_i to the product, c_i what the client counted for. The
    quotient of one round errs by s/‖Δ‖, s² = 2 Σ p_i²v_i, so that 1 added to both sums is the prior μ = 1 ± 1, which
    holds until the rounds together know better.
    """
    product, square = float(memory.get("ali_product", 0.0)), float(memory.get("ali_square", 0.0))
    if "ali_step" in memory:
        before: Tensor = memory["ali_step"]
        error = 2 * float((now.shares**2 * now.variances).sum()) + 1e-12
        change = float(((now.mean - memory["ali_mean"]).double() * before.double()).sum())
        product += (change - float(memory["ali_excess"])) / error
        square += float(before.double().square().sum()) / error
    excess = now.dimension * float((now.shares * counted * now.pace * now.variances).sum())
    return {
        "ali_product": product,
        "ali_square": square,
        "ali_step": step,
        "ali_mean": now.mean,
        "ali_excess": excess,
    }
