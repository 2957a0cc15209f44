"""Whom to trust how much: weights from an update matrix with a *column* per client.

    w = robust_hdp(updates)         # updates[d, n] → w[n], w ≥ 0, Σw = 1; the combined update is updates @ w

Arrays give arrays, tensors give tensors. A column of zeros (a client that sent nothing) gets weight 0. The rules that
run in a round, with public facts and memory, are in ``server.rules``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.server import factor, pursuit, spread
from sordino.server.columns import Matrix, as_columns, gram, inverse_weights, like
from sordino.server.facts import Array


def robust_hdp(updates: Matrix, *, rows: int | None = pursuit.SAMPLE, seed: int = 0) -> Any:
    """Robust-HDP: w_i ∝ 1/σ̂_i², σ̂_i² = ‖S_:,i‖²/d of the noise part S of principal component pursuit.

    ``rows``: for larger d a random subset of rows estimates the same weights; None looks at all. Warns ``NotSettled``
    when the iteration limit came first.
    """
    columns = as_columns(updates)
    found = pursuit.solve(columns, residual=pursuit.FOR_WEIGHTS, rows=rows, seed=seed, parts=False)
    pursuit.warn_unsettled(found)
    return _spread_out(updates, _sent(found.variances), inverse_weights(found.variances[found.variances > 0]))


def factor_hdp(updates: Matrix, *, rank: int | None = None) -> Any:
    """w_i ∝ 1/ψ_i, ψ the noise variances of factor analysis of the Gram matrix; the rank is chosen unless given."""
    columns = as_columns(updates)
    inner, sent = _gram_of_those_who_sent(columns)
    found = factor.fit(inner, columns.shape[0], rank)
    return _spread_out(updates, sent, inverse_weights(found.variances))


def random_effects(
    updates: Matrix,
    variances: ArrayLike | None = None,
    *,
    steps: ArrayLike | None = None,
    shares: ArrayLike | None = None,
    spread_by: str = "reml",
    horizon: float = 100.0,
) -> Any:
    """w_i ∝ ω_i/K_i, ω the votes that balance noise against the bias of not hearing a client (``server.spread``).

    Parameters
    ----------
    variances : σ_i², noise variance of one coordinate, as declared; None estimates them by factor analysis.
    steps : K_i, local steps behind each update; None for equal numbers.
    shares : p, what each client should count for; None for equal shares.
    spread_by : ``reml`` (exchangeable clients) or ``structured`` (who resembles whom).
    horizon : κ, how much more bias counts than the noise of one round.
    """
    columns = as_columns(updates)
    inner, sent = _gram_of_those_who_sent(columns)
    count, effort = (
        np.ones(columns.shape[1]) if given is None else np.asarray(given, dtype=np.float64) for given in (shares, steps)
    )
    wanted, effort = count[sent] / count[sent].sum(), effort[sent]
    if variances is None:
        noise = factor.fit(inner, columns.shape[0]).variances
    else:
        noise = np.asarray(variances, dtype=np.float64)[sent]
    votes, _ = spread.weigh(
        inner / np.outer(effort, effort), noise / effort**2, wanted, len(columns), spread_by=spread_by, horizon=horizon
    )
    return _spread_out(updates, sent, (votes / effort) / (votes / effort).sum())


def _sent(sizes: Array) -> NDArray[np.int64]:
    sent = np.flatnonzero(sizes > 0)
    if len(sent) == 0:
        raise BadInput("every update is zero: there is nothing to combine")
    return sent


def _gram_of_those_who_sent(columns: Tensor) -> tuple[Array, NDArray[np.int64]]:
    """MᵀM/d of the columns that are not all zero, and which they are: one pass over the matrix."""
    inner = gram(columns)
    sent = _sent(np.diag(inner))
    return inner[np.ix_(sent, sent)], sent


def _spread_out(updates: Matrix, sent: NDArray[np.int64], weights: Array) -> Any:
    """The weights at their places among all columns, in the kind of ``updates``."""
    everyone = np.zeros(updates.shape[1])
    everyone[sent] = weights
    return like(updates, everyone)
