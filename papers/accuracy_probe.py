"""A fast probe of ``auto``'s linear heads: many settings side by side, as columns of one matrix product.

All settings of one number of rounds and one rate see the same batches. With weights w_i that the server fixes before,
the noises of all clients add up to one Gaussian,

    Σ w_i N(0, (z_i S/b_i)² I) = N(0, Σ w_i² (z_i S/b_i)² I),

so that one draw a step stands for everybody's: exact in distribution. Nothing here is private or charged; it chooses
settings for runs that are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.server.spread import exchangeable

Array = NDArray[np.float64]
GAMMA = 0.01
"""γ of automatic clipping, C/(‖g‖ + γ) with C = 1."""


@dataclass(frozen=True)
class Point:
    """Settings of ``auto``, as they are searched.

    Attributes
    ----------
    rounds, rate, lr, cooldown, pull: of training.
    spread: of the rule ``balanced``.
    share: of the rounds, over which the server's step ``recent`` averages; 0 shows the last weights.
    """

    rounds: int
    rate: float
    lr: float
    cooldown: float
    pull: float
    spread: float
    share: float

    @property
    def paces(self) -> Array:
        """How long each round's step is beside the first, as ``Training.pace`` has it."""
        falling = self.cooldown * self.rounds
        left = np.arange(self.rounds, 0, -1)
        return np.minimum(1.0, left / falling) if falling else np.ones(self.rounds)


@dataclass(frozen=True)
class Heads:
    """What a probe is made on: features, targets, who has which, and the noise of a step's mean gradient.

    Attributes
    ----------
    x, y: features ``[n, D]`` and targets of all records.
    train, test: by client, the places of its records.
    noise: by client, z_i S/b_i.
    start: the first weights ``[D, k]``.
    classes: k, or None for regression.
    """

    x: Tensor
    y: Tensor
    train: Sequence[NDArray[np.int64]]
    test: Sequence[NDArray[np.int64]]
    noise: Array
    start: Tensor
    classes: int | None

    @property
    def sizes(self) -> Array:
        """How many training records every client has."""
        return np.array([len(one) for one in self.train], dtype=np.float64)

    def weights(self, spread: float, rounds: int) -> Array:
        """What the rule ``balanced`` makes of sizes and noises."""
        shares = self.sizes / self.sizes.sum()
        return exchangeable(self.noise**2 / rounds, spread**2 / self.start.numel(), shares)

    def deviation(self, spread: float, rounds: int) -> float:
        """ν = √(Σ w_i² (z_i S/b_i)²), the noise on a coordinate of the combined gradient."""
        return float(np.sqrt((self.weights(spread, rounds) ** 2 * self.noise**2).sum()))


def train(heads: Heads, points: Sequence[Point], seed: int, noisy: bool = True) -> Tensor:
    """The weights ``[points, D, k]`` that ``auto`` would show at the end; ``points`` share rounds and rate."""
    rounds, rate = points[0].rounds, points[0].rate
    if any((one.rounds, one.rate) != (rounds, rate) for one in points):
        raise ValueError("points that are probed together have the same rounds and rate")
    x, device = heads.x, heads.x.device
    count, outputs = len(points), heads.start.shape[1]
    every = torch.from_numpy(np.concatenate(heads.train)).to(device)
    owner = np.repeat(np.arange(len(heads.train)), [len(one) for one in heads.train])
    each = np.stack([heads.weights(one.spread, rounds) for one in points]) / (rate * heads.sizes)
    share = _column(each[:, owner].T, device)  # of a record in the combined gradient, [n, points]
    deviation = _column([heads.deviation(one.spread, rounds) for one in points], device)[:, None]
    paces = _column(np.stack([one.paces for one in points]), device)
    steps = _column([one.lr for one in points], device)[:, None] * paces
    pulls = _column([one.pull for one in points], device)[:, None] * paces
    random = torch.Generator(device).manual_seed(seed)
    rows, targets = x[every], heads.y[every]
    lengths = rows.float().norm(dim=1)
    start = heads.start.to(device)[:, None, :].expand(-1, count, -1)
    now, shown = start.clone(), start.clone()
    for number in range(1, rounds + 1):
        batch, goal, long, part = rows, targets, lengths, share
        if rate < 1.0:
            drawn = torch.nonzero(torch.rand(len(rows), device=device, generator=random) < rate).ravel()
            batch, goal, long, part = rows[drawn], targets[drawn], lengths[drawn], share[drawn]
        slope = _outputs(batch, now)
        if heads.classes is None:
            slope -= goal[:, None, None]
        else:
            slope = torch.softmax(slope, -1)
            slope[torch.arange(len(goal), device=device), :, goal] -= 1.0
        norms = torch.linalg.vector_norm(slope, dim=-1) * long[:, None]
        slope *= (part / (norms + GAMMA))[..., None]
        gradient = (batch.T @ slope.flatten(1).to(batch.dtype)).float().unflatten(1, (count, outputs))
        if noisy:
            gradient += torch.randn(now.shape, device=device, generator=random) * deviation
        at = number - 1
        now = now - steps[:, at, None] * gradient - pulls[:, at, None] * (now - start)
        kept = [max(0.0, 1.0 - 1.0 / (one.share * number)) if one.share else 0.0 for one in points]
        shown = torch.lerp(now, shown, _column(kept, device)[:, None])
    return shown.transpose(0, 1)


def losses(heads: Heads, weights: Tensor) -> Array:
    """By setting and client, the share of test records that are wrong, or their mean squared error in regression."""
    found = []
    for places in heads.test:
        goal = heads.y[torch.from_numpy(places).to(heads.y.device)]
        out = _outputs(heads.x[torch.from_numpy(places).to(heads.x.device)], weights.transpose(0, 1))
        wrong = (out[..., 0] - goal[:, None]).square() if heads.classes is None else out.argmax(-1) != goal[:, None]
        found.append(wrong.double().mean(0).cpu().numpy())
    return np.stack(found, 1)


def _outputs(x: Tensor, weights: Tensor) -> Tensor:
    """x·W for every setting, ``[n, points, k]``; weights ``[D, points, k]``."""
    found: Tensor = (x @ weights.flatten(1).to(x.dtype)).float()
    return torch.unflatten(found, 1, tuple(weights.shape[1:]))


def _column(values: Sequence[float] | Array, device: torch.device) -> Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.float32, device=device)
