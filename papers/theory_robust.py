"""What the Robust-HDP paper proves and tabulates: the noise of an update, its power after combination, Theorem 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.server.facts import Array


def update_variances(noises: ArrayLike, batches: ArrayLike, steps: ArrayLike, *, clip: float, lr: float = 1.0) -> Array:
    """σ_i² = K_i (η C z_i/b_i)²: noise variance of one coordinate of client i's update after K_i local steps.

    The paper's σ_i² is d times that; with lr = 1 it is the variance over η².
    """
    z, b, k = (np.asarray(value, dtype=np.float64) for value in (noises, batches, steps))
    return np.asarray(k * (lr * clip * z / b) ** 2)


def noise_power(weights: ArrayLike, variances: ArrayLike) -> float:
    """Σ w_i²σ_i²: noise variance of one coordinate of the combined update (Table 10 with variances at lr = 1)."""
    w, v = np.asarray(weights, dtype=np.float64), np.asarray(variances, dtype=np.float64)
    if w.shape != v.shape or w.ndim != 1:
        raise BadInput(f"{w.shape} weights and {v.shape} variances: one of each per client is needed")
    return float((w**2 * v).sum())


@dataclass(frozen=True)
class Theorem2:
    """The bound of Theorem 2 on min_e E‖∇f(θ^e)‖², and where it comes from.

    ``start``: from the initial gap; ``noise``: from Ψ_σ; ``bias``: from Ψ_p; ``total`` is their sum. ``holds`` says
    whether the learning rate meets the theorem's conditions, ``largest_lr`` which would.
    """

    start: float
    noise: float
    bias: float
    total: float
    holds: bool
    largest_lr: float


def theorem2(
    *,
    gap: float,
    lr: float,
    steps: ArrayLike,
    gradient_variances: ArrayLike,
    weights: Sequence[ArrayLike],
    objective_weights: ArrayLike,
    smoothness: float,
    lipschitz: float,
    heterogeneity: float,
    weighted_noise: bool = False,
) -> Theorem2:
    """Theorem 2 of Robust-HDP as a function of what it is made of.

    Parameters
    ----------
    gap : f(θ⁰) − f*.
    lr : η_l. steps : E_i, local steps of each client in a round.
    gradient_variances : σ²_{i,g̃} = σ²_{i,g} + d z_i²C²/b_i², variance of client i's noisy gradient.
    weights : w^e of every round, a row each (0 for who did not take part); objective_weights : λ.
    smoothness : β. lipschitz : L₀. heterogeneity : σ, the Lipschitz constant of f_i − f_j.
    weighted_noise : the proof bounds ‖w‖² by 1 where it bounds the combined noise, so the published bound does not
        see better weights. With True that term is βη Σ E_i (w_i)²σ², its value for independent noise.

    Notes
    -----
    12/(11 E_min − 7) · [gap/(E η) + mean_e(Ψ_σ + Ψ_p)] with
    Ψ_σ = 6β²η²(1 + ΣE)(2ΣE⁴σ² + ⅓ΣE³σ²_g̃) + βη ΣE²σ²_g̃ and
    Ψ_p = (8L₀²/3)(n ΣE²(w − λ)² + ‖λ‖² Σ(E − Σ wE)²).
    """
    count = np.asarray(steps, dtype=np.float64)
    noise = np.asarray(gradient_variances, dtype=np.float64)
    rounds = np.asarray(weights, dtype=np.float64)
    aim = np.asarray(objective_weights, dtype=np.float64)
    if rounds.ndim != 2 or not count.shape == noise.shape == aim.shape == rounds.shape[1:]:
        raise BadInput("steps, gradient_variances, objective_weights and every row of weights need one entry a client")
    if (count < 1).any() or lr <= 0 or smoothness <= 0:
        raise BadInput("Theorem 2 needs at least one local step each, a positive learning rate and smoothness")
    spread = 1.0 + count.sum()
    largest = 1.0 / (smoothness * max(6.0 * count.max(), 12.0 * np.sqrt(spread * (count**4).sum())))
    drift = 2.0 * (count**4).sum() * heterogeneity**2 + (count**3 * noise).sum() / 3.0
    direct = (count**2 * noise).sum()
    if weighted_noise:
        direct = float((rounds**2 @ (count * noise)).mean())
    psi_noise = 6.0 * (smoothness * lr) ** 2 * spread * drift + smoothness * lr * direct
    apart = len(aim) * ((rounds - aim) ** 2 @ count**2)
    uneven = (aim @ aim) * ((count[None, :] - (rounds @ count)[:, None]) ** 2).sum(1)
    psi_bias = 8.0 * lipschitz**2 / 3.0 * float((apart + uneven).mean())
    factor = 12.0 / (11.0 * count.min() - 7.0)
    parts = (factor * gap / (len(rounds) * lr), factor * psi_noise, factor * psi_bias)
    start, by_noise, bias = (float(part) for part in parts)
    return Theorem2(start, by_noise, bias, start + by_noise + bias, bool(lr <= largest), float(largest))
