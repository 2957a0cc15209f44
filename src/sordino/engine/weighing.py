"""Who counted how much, beside who should have: by the noise clients declare, and by the noise the simulation drew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sordino.server.columns import inverse_weights
from sordino.server.facts import Array, Facts

NOTE = "seen in simulation, not released"


def weighed(facts: Facts, weights: Array, names: Sequence[str], seen: Mapping[str, Any]) -> dict[str, Any]:
    """What to record of a round's combination beside its weights; nothing where nobody adds noise.

    ``declared_weights``: 1/σ_i² by declared variances, sum 1. Under ``observer``: ``optimum_weights``, the same by the
    variances that the noise really had, and the noise power Σ w_i²σ_i²/η² of the combination with those variances
    (Table 10 of Robust-HDP, per coordinate: its σ² is d times ours), beside the least that any weights could reach.
    Virtual copies of a client are added up. ``seen`` is what the observer noted before; it is kept.
    """
    truth = facts.variances if facts.true_variances is None else facts.true_variances
    if not (facts.variances > 0).any():
        return {}
    quiet = bool((truth == 0).any())
    found = {
        "optimum_weights": _by_client(inverse_weights(truth), facts, names),
        "noise_power": float((weights**2 * truth).sum()) / facts.lr**2,
        "least_noise_power": 0.0 if quiet else 1.0 / float((1.0 / truth).sum()) / facts.lr**2,
        "note": NOTE,
    }
    declared = _by_client(inverse_weights(facts.variances), facts, names)
    return {"declared_weights": declared, "observer": {**seen, **found}}


def _by_client(weights: Array, facts: Facts, names: Sequence[str]) -> dict[str, float]:
    total = np.bincount(facts.clients, weights, minlength=len(names))
    return {names[i]: float(f"{total[i]:.6g}") for i in dict.fromkeys(facts.clients.tolist())}
