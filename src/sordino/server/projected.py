"""PFA and PFA+: noisy updates projected on the directions of the less noisy ones.

Participants are split into *public* (large ε) and *private*. V, k orthonormal columns per parameter tensor, are the top
principal directions of the public updates, around their mean m (around 0 when there is one public client). Private
updates enter by their ε-weighted mean, replaced by m + V Vᵀ(private − m):

    Δ = (Σ_pub ε/Σε)·Δ_pub + (Σ_pri ε/Σε)·[(I − V Vᵀ) m + V Vᵀ Δ_pri]

PFA+ saves upload: after a warm-up round private clients send only Vᵀ·update, k numbers per tensor, in the basis that
the server broadcast from the round before (``client.projected``); ``expand`` puts them back in d dimensions. That basis
is d×k, each tensor's rows hold its own orthonormal columns. Who is private is told with it: what a client was in the
last round that it took part in.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.errors import BadInput
from sordino.made import part
from sordino.server import broadcast
from sordino.server.directions import coefficients, expand, principal_directions, tensors
from sordino.server.facts import Array, Facts, Memory, Outcome, Told
from sordino.server.rule import Aggregate, weighted


def budget_shares(epsilons: Array) -> Array:
    """ε_i/Σε; rows with ε = ∞ share everything, the limit of the formula."""
    public = np.isinf(epsilons)
    if public.any():
        return np.asarray(public / public.sum())
    return np.asarray(epsilons / epsilons.sum())


@part
def pfa(*, directions: int = 1, split: str = "mixture", share: float = 0.1) -> Aggregate:
    """Projected federated averaging with this round's basis.

    Parameters
    ----------
    directions : k, principal directions per tensor (as many as the public updates have, if fewer).
    split : ``mixture`` (two Gaussians over ε) or ``top-share`` (the largest ``share`` of the budgets is public).
    """
    _check(directions, split, share)

    def combine(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        public = public_rows(facts.epsilons, split, share)
        basis = principal_directions(updates[_index(public, updates)], facts.layout, directions)
        return _combine(updates, facts, public, basis)

    return Aggregate("pfa", combine)


@part
def pfa_plus(*, directions: int = 1, split: str = "mixture", share: float = 0.1) -> Aggregate:
    """PFA with the basis of the round before, in which private clients upload; broadcasts this round's for the next.

    Private clients may upload whole updates or coefficients: the result is the same, because V Vᵀ is a projection. In
    the first round (no basis yet) it is ``pfa``, and it has the same options. It broadcasts ``basis`` (V),
    ``basis_sizes`` (the length of every tensor) and to every client whether it is ``private``.
    """
    _check(directions, split, share)

    def receive(uploads: Mapping[str, Tensor], facts: Facts) -> Tensor:
        updates, sent = uploads["update"], uploads.get("coefficients")
        if sent is None or "basis" not in facts.public:
            return updates
        short = torch.from_numpy(_told_private(facts)).to(updates.device)
        return torch.where(short[:, None], expand(sent, facts.public["basis"], facts.layout), updates)

    def combine(updates: Tensor, facts: Facts, memory: Memory) -> Outcome:
        large = public_rows(facts.epsilons, split, share)
        public = large & ~_told_private(facts)
        fresh = principal_directions(updates[_index(public, updates)], facts.layout, directions)
        basis = facts.public.get("basis", fresh)
        lengths = [part.stop - part.start for part in tensors(facts.layout, updates.shape[1])]
        before = facts.each.get("private", basis.new_zeros(facts.population, 1))
        told = basis.new_zeros(max(len(before), int(facts.clients.max()) + 1), 1)
        told[: len(before)] = before
        told[torch.from_numpy(facts.clients).to(told.device), 0] = torch.from_numpy(~large).to(told)
        news = {"basis": fresh if public.any() else basis, "basis_sizes": lengths}
        return replace(_combine(updates, facts, public, basis), told=Told(news, {"private": told}))

    broadcasts = {
        "basis": broadcast.together("basis_sizes", broadcast.directions),
        "basis_sizes": broadcast.together("basis", broadcast.lengths),
        "private": broadcast.number(0, 1, whole=True),
    }
    return Aggregate("pfa-plus", combine, broadcasts=broadcasts, receive=receive)


def _told_private(facts: Facts) -> NDArray[np.bool_]:
    """Which rows belong to clients that were told to send coefficients."""
    if "private" not in facts.each:
        return np.zeros(len(facts.clients), dtype=bool)
    told = facts.each["private"].cpu().numpy()[:, 0] > 0
    known = facts.clients < len(told)
    return np.asarray(known & told[np.where(known, facts.clients, 0)])


def _combine(updates: Tensor, facts: Facts, public: NDArray[np.bool_], basis: Tensor) -> Outcome:
    mix = budget_shares(facts.epsilons)
    shown = {"public": facts.clients[public].tolist(), "public_share": float(mix[public].sum())}
    if public.all() or not public.any():
        return Outcome(weighted(updates, mix), mix, {}, shown)
    quiet, noisy = updates[_index(public, updates)], updates[_index(~public, updates)]
    centre = quiet.mean(0) if len(quiet) > 1 else torch.zeros_like(quiet[0])
    private = weighted(noisy, budget_shares(facts.epsilons[~public]))
    projected = centre + expand(coefficients(private - centre, basis, facts.layout), basis, facts.layout)
    open_part = weighted(quiet, budget_shares(facts.epsilons[public]))
    part = float(mix[public].sum())
    return Outcome(part * open_part + (1.0 - part) * projected, None, {}, shown)


def _check(directions: int, split: str, share: float) -> None:
    if directions < 1:
        raise BadInput(f"directions = {directions} must be at least 1")
    if split not in ("mixture", "top-share"):
        raise BadInput(f"split {split!r} is unknown: use mixture or top-share")
    if not 0.0 < share < 1.0:
        raise BadInput(f"share {share!r} of public clients must lie between 0 and 1")


def public_rows(epsilons: Array, split: str, share: float) -> NDArray[np.bool_]:
    """Which rows count as public. All of them when budgets do not differ; ε = ∞ is public and leaves no one else so."""
    unbounded = np.isinf(epsilons)
    if unbounded.any():
        return unbounded
    if np.ptp(epsilons) == 0.0:
        return np.ones(len(epsilons), dtype=bool)
    if split == "mixture" and len(np.unique(epsilons)) > 2:
        return np.array(_mixture(tuple(epsilons.tolist())))
    count = max(1, math.ceil(share * len(epsilons) - 1e-9)) if split == "top-share" else 1
    return np.asarray(epsilons >= np.sort(epsilons)[-count])


@lru_cache(maxsize=256)
def _mixture(budgets: tuple[float, ...]) -> tuple[bool, ...]:
    """The rows of the component with the larger mean, of two Gaussians fitted to ε; the same every round."""
    from sklearn.mixture import GaussianMixture  # heavy, and only this rule needs it

    epsilons = np.array(budgets)
    column = epsilons[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few clients: the fit is rough, and that is no news to anyone
        model = GaussianMixture(2, n_init=3, random_state=0).fit(column)
        upper = int(np.argmax(model.means_))
        belongs = model.predict(column) == upper
    # A wide component can claim both ends of the line; public means large ε.
    above = epsilons[belongs & (epsilons > float(model.means_[1 - upper, 0]))]
    return tuple((epsilons >= (above.min() if len(above) else epsilons.max())).tolist())


def _index(rows: NDArray[np.bool_], updates: Tensor) -> Tensor:
    return torch.from_numpy(np.flatnonzero(rows)).to(updates.device)
