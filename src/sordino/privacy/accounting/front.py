"""ε of a noise multiplier, and the noise multiplier of an ε: scalars or arrays, broadcast against each other."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from sordino.errors import BadInput
from sordino.privacy.accounting.compose import scales, spent
from sordino.privacy.accounting.parts import LARGEST_COUNT, Composition, Floats, normal_form
from sordino.privacy.types import Adjacency, Event, Sampling, Scheme, check_pair


def epsilon(
    noise: ArrayLike,
    delta: ArrayLike,
    rate: ArrayLike,
    steps: ArrayLike,
    sampling: str = "poisson",
    accountant: str = "pld",
    adjacency: str = "zero-out",
) -> float | Floats:
    """ε of ``steps`` Gaussian releases from sampled batches.

    Parameters
    ----------
    noise
        z: standard deviation over the true sensitivity under ``adjacency`` (C for zero-out, 2C for replace-one).
    delta, rate, steps
        δ in (0, 1), q in (0, 1], T ≥ 0.
    sampling
        ``poisson``, ``fixed`` (without replacement, needs replace-one) or ``full`` (rate 1).
    accountant
        ``pld`` (tight; for fixed batches the tightened Rényi bound), ``rdp``, or as published: ``rdp-robust-hdp``,
        ``closed-form-selection`` (not a valid guarantee), ``wor-paper``.

    Returns
    -------
    ε ≥ 0; ∞ for noise 0, 0 for no steps. A float when every argument is a scalar.
    """
    z, d, q, t = _arrays(("noise", noise), ("delta", delta), ("rate", rate), ("steps", steps))
    _refuse(np.isnan(z) | (z < 0), "noise", z, "a noise multiplier is ≥ 0")
    own = _compositions(z, d, q, t, sampling, adjacency)
    return _shaped(spent(own, d.ravel(), accountant), z.shape)


def calibrate(
    epsilon: ArrayLike,
    delta: ArrayLike,
    rate: ArrayLike,
    steps: ArrayLike,
    sampling: str = "poisson",
    accountant: str = "pld",
    adjacency: str = "zero-out",
) -> float | Floats:
    """The smallest noise multiplier with which ``steps`` releases cost at most ``epsilon`` at ``delta``.

    Arguments as in ``epsilon``. ε = ∞ (public data) gives 0, and so do no steps.

    Guarantees
    ----------
    ``epsilon`` of the result is at most the ε asked for (exactly that function, on the safe side), and with ``pld``
    within 0.05 % of it.
    """
    e, d, q, t = _arrays(("epsilon", epsilon), ("delta", delta), ("rate", rate), ("steps", steps))
    _refuse(np.isnan(e) | (e <= 0), "epsilon", e, "a budget needs epsilon > 0 (inf for public data)")
    own = _compositions(np.ones_like(e), d, q, t, sampling, adjacency)
    return _shaped(scales(own, e.ravel(), d.ravel(), accountant), e.shape)


def _arrays(*named: tuple[str, ArrayLike]) -> list[Floats]:
    out = []
    for name, value in named:
        try:
            out.append(np.asarray(value, dtype=float))
        except (TypeError, ValueError):
            raise BadInput(f"{name} is {value!r}: it must be a number or an array of numbers") from None
    try:
        return list(np.broadcast_arrays(*out))
    except ValueError:
        shapes = ", ".join(f"{name} {value.shape}" for (name, _), value in zip(named, out))
        raise BadInput(f"the arguments do not broadcast to one shape: {shapes}") from None


def _refuse(wrong: np.ndarray, name: str, values: Floats, why: str) -> None:
    if np.any(wrong):
        raise BadInput(f"{name} is {float(values[wrong].ravel()[0])!r}: {why}")


def _compositions(
    noise: Floats, delta: Floats, rate: Floats, steps: Floats, sampling: str, adjacency: str
) -> list[Composition]:
    """Checked, flattened: one release kind per client."""
    scheme, relation = Scheme.parse(sampling), Adjacency.parse(adjacency)
    check_pair(scheme, relation)
    _refuse(~((delta > 0) & (delta < 1)), "delta", delta, "it must lie strictly between 0 and 1, well below 1/records")
    _refuse(~((rate > 0) & (rate <= 1)), "rate", rate, "it must lie in (0, 1]: it is batch size over records")
    wrong = ~((steps >= 0) & (steps <= LARGEST_COUNT)) | (steps != np.round(steps))
    _refuse(wrong, "steps", steps, f"it must be a whole number between 0 and {LARGEST_COUNT:g}")
    return [
        normal_form([Event("step", Sampling(scheme, float(q)), float(z), int(t), relation)])
        for z, q, t in zip(noise.ravel(), rate.ravel(), steps.ravel())
    ]


def _shaped(values: Floats, shape: tuple[int, ...]) -> float | Floats:
    return float(values[0]) if shape == () else values.reshape(shape)
