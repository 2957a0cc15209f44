"""What a run is told before it starts: public facts about the clients, and the settings of training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sordino.client.augment import Augment
from sordino.errors import BadInput
from sordino.privacy.groups import is_account_of
from sordino.privacy.levels import Levels
from sordino.privacy.types import Budget, Sampling, Scheme

SMALLEST, LARGEST = 1e-30, 1e30
"""Settings beyond these are zero or infinite in the single precision that training computes in."""


@dataclass(frozen=True)
class Population:
    """Who could take part: names, sizes n_i and budgets, all public by declaration (R5)."""

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    budgets: tuple[Budget, ...]
    batches: NDArray[np.float64] | None = None
    """Batch sizes that came with the budgets (the published distributions have them)."""
    levels: tuple[Levels, ...] = ()
    """By client the levels of consent of its records, where anybody has some; the budget is the strictest one's."""

    def __post_init__(self) -> None:
        if not self.names:
            raise BadInput("there are no clients: a federation needs at least one")
        if len(self.names) != len(self.sizes) or len(self.names) != len(self.budgets):
            raise BadInput(
                f"{len(self.names)} clients, {len(self.sizes)} sizes and {len(self.budgets)} budgets do not match"
            )
        for name, size in zip(self.names, self.sizes):
            if size < 1:
                raise BadInput(f"client {name!r} has no training records: leave it out, or use fewer clients")
        for name, size, own in zip(self.names, self.sizes, self.levels):
            if own and sum(one.records for one in own) != size:
                raise BadInput(f"client {name!r} has {size} training records, and levels of another number of them")
            others = [other for other in self.names if own and other != name and is_account_of(other, name)]
            if others:
                raise BadInput(f"client {others[0]!r} is called like an account of {name!r}: rename one of them")

    def levels_of(self, place: int) -> Levels:
        """A client's levels; empty where all of its records have one budget."""
        return self.levels[place] if self.levels else ()

    def only(self, some: NDArray[np.bool_]) -> Population:
        """The same, as if only some of the clients were there."""
        where = np.flatnonzero(some)
        names, budgets = tuple(self.names[i] for i in where), tuple(self.budgets[i] for i in where)
        batches = None if self.batches is None else self.batches[where]
        levels = tuple(self.levels[i] for i in where) if self.levels else ()
        return Population(names, self.sizes[where], budgets, batches, levels)


@dataclass(frozen=True)
class Training:
    """The settings of training; the keys of ``[training]`` in a study and keywords of ``sd.train``.

    Attributes
    ----------
    rounds: T.
    batch: expected batch size b, for all clients or one each; or ``rate`` = q = b/n. Default: a tenth of
        n, between 64 and 512 but never more than n: with the number of steps fixed, larger batches need less noise.
    steps: K local steps a round; or ``epochs`` of n/b steps (independent draws, never a shuffle). Default: 1 step.
    lr: η, the clients' learning rate. ``server_lr``: η_s.
    cooldown: the share of the rounds, the last ones, over which η_s falls in equal steps to almost nothing: first long
        steps through the noise, then short ones that settle. Free, like all that the server does with releases.
    pull: ρ, the share of the way back to where it started that the model is drawn every round. Noise adds up over the
        rounds in every direction, and ρ forgets it after 1/ρ of them; what gradients keep asking for stays. Free too.
    clip: C, the largest norm a record's gradient may have.
    sampling: ``poisson`` (zero-out), ``fixed`` (without replacement, replace-one) or ``full``.
    select: participations a round, for rules that draw clients.
    evaluate: evaluate every this many rounds (the last round always).
    augment: look at several versions of every image in a step, moved and mirrored: ``{copies, shift, mirror}``, see
        :class:`~sordino.client.augment.Augment`. Their gradients are averaged before clipping, so privacy costs the
        same; computing costs ``copies`` times as much.
    exact_noise: compute and draw as a site does: one record at a time, sums and noise on a lattice, exact. Slower;
        what a simulation normally uses is float32 noise from keyed streams.
    """

    rounds: int = 40
    batch: float | Sequence[float] | None = None
    rate: float | Sequence[float] | None = None
    steps: int | None = None
    epochs: float | None = None
    lr: float = 0.5
    server_lr: float = 1.0
    cooldown: float = 0.0
    pull: float = 0.0
    clip: float = 1.0
    sampling: str = "poisson"
    select: int | None = None
    evaluate: int = 1
    exact_noise: bool = False
    augment: Augment | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for key in ("rounds", "evaluate", "lr", "server_lr", "clip", "steps", "epochs", "select"):
            value, whole = getattr(self, key), key in ("rounds", "evaluate", "steps", "select")
            if value is None and key in ("steps", "epochs", "select"):
                continue
            good = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
            if not good or (whole and value != int(value)):
                raise BadInput(f"training.{key} is {value!r}: it must be a positive {'whole ' * whole}number")
            if key in ("lr", "clip") and not SMALLEST <= value <= LARGEST:
                raise BadInput(
                    f"training.{key} is {value!r}: training computes in single precision, and takes it from "
                    f"{SMALLEST:g} to {LARGEST:g}"
                )
        if not (isinstance(self.cooldown, (int, float)) and 0.0 <= self.cooldown <= 1.0):
            raise BadInput(f"training.cooldown is {self.cooldown!r}: it is a share of the rounds, from 0 to 1")
        if not (isinstance(self.pull, (int, float)) and 0.0 <= self.pull < 1.0):
            raise BadInput(f"training.pull is {self.pull!r}: it is a share of the way back, from 0 to less than 1")
        if not isinstance(self.exact_noise, bool):
            raise BadInput(f"training.exact_noise is {self.exact_noise!r}: it is true or false")
        if self.augment is not None:
            object.__setattr__(self, "augment", Augment.parse(self.augment))
        for one, other in (("batch", "rate"), ("steps", "epochs")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise BadInput(f"training.{one} and training.{other} say the same thing twice: keep one of them")
        for key, most in (("batch", math.inf), ("rate", 1.0)):
            given = getattr(self, key)
            if given is not None and not all(0 < one <= most for one in np.atleast_1d(np.asarray(given))):
                told = "rates lie in (0, 1]" if key == "rate" else "batch sizes are positive"
                raise BadInput(f"training.{key} is {given!r}: {told}")
        Scheme.parse(self.sampling)

    @property
    def augmented(self) -> Augment | None:
        """``augment`` as the value that its table was read into."""
        return None if self.augment is None else Augment.parse(self.augment)

    def pace(self, number: int, rounds: int) -> float:
        """The length of a round's step beside the first one's: in the last ones in proportion to how many are left."""
        falling = self.cooldown * rounds
        return min(1.0, (rounds - number + 1) / falling) if falling else 1.0

    def server_rate(self, number: int, rounds: int) -> float:
        """η_s of a round, counted from 1."""
        return self.server_lr * self.pace(number, rounds)

    def only(self, some: NDArray[np.bool_]) -> Training:
        """The same settings for some of the clients: lists with an entry for each are cut."""
        lists = {
            key: np.asarray(value)[some].tolist()
            for key, value in (("batch", self.batch), ("rate", self.rate))
            if isinstance(value, Sequence)
        }
        return replace(self, **lists) if lists else self

    def batches(self, population: Population) -> NDArray[np.float64]:
        """b_i, expected batch sizes; checked against n_i."""
        sizes = population.sizes.astype(np.float64)
        if self.sampling == Scheme.FULL:
            return sizes
        if self.rate is not None:
            return _per_client("rate", self.rate, len(sizes)) * sizes
        if self.batch is not None:
            batches = _per_client("batch", self.batch, len(sizes))
        elif population.batches is not None:
            batches = population.batches
        else:
            batches = np.minimum(sizes, np.clip(np.round(sizes / 10), 64, 512))
        for name, size, batch in zip(population.names, sizes, batches):
            if batch > size:
                raise BadInput(
                    f"training.batch {batch:g} is larger than client {name!r}'s {size:g} records: "
                    "use a smaller batch, or training.rate"
                )
        return batches

    def sampling_of(self, batch: float, records: int) -> Sampling:
        """How one client draws a batch."""
        if self.sampling == Scheme.FIXED:
            return Sampling.fixed(max(1, round(batch)), records)
        return Sampling.full() if self.sampling == Scheme.FULL else Sampling.poisson(batch / records)

    def local_steps(self, sizes: NDArray[np.int64], batches: NDArray[np.float64]) -> NDArray[np.int64]:
        """K_i: local steps of each client in one round."""
        if self.epochs is not None:
            return np.maximum(1, np.round(self.epochs * sizes / batches)).astype(np.int64)
        return np.full(len(sizes), self.steps or 1, dtype=np.int64)


def _per_client(key: str, value: float | Sequence[float], clients: int) -> NDArray[np.float64]:
    array = np.asarray(value, dtype=np.float64)
    if array.ndim and len(array) != clients:
        raise BadInput(
            f"training.{key} lists {len(array)} values for {clients} clients: give one each, or a single one"
        )
    return np.broadcast_to(array, (clients,)).copy()
