"""Several versions of every image in a step: as it is, moved, mirrored. A record stays one unit of privacy.

The gradients of a record's copies are averaged before clipping (De and others, 2022), so a record still adds at most C
to a sum, and noise and charges are what they are without copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.errors import BadInput

MOST = 64
"""Copies of a record: a site computes so many gradients for each at most."""


class Move(NamedTuple):
    """One version of an image: moved down and to the right by so many pixels, after mirroring it left to right."""

    down: int
    right: int
    mirrored: bool

    def of(self, x: Tensor) -> Tensor:
        """Images ``[…, height, width]``, moved; the pixels at an edge are repeated where nothing moved in."""
        rows, columns = (torch.arange(size, device=x.device) for size in x.shape[-2:])
        columns = (columns - self.right).clamp_(0, x.shape[-1] - 1)
        columns = x.shape[-1] - 1 - columns if self.mirrored else columns
        return x.index_select(-2, (rows - self.down).clamp_(0, x.shape[-2] - 1)).index_select(-1, columns)


@dataclass(frozen=True)
class Augment:
    """How many copies of every record a step looks at, and how they differ; ``training.augment`` of a study.

    Attributes
    ----------
    copies: m, versions of every record, all different; the first is the record itself.
    shift: the most pixels that an image is moved up or down, and left or right.
    mirror: whether images may be mirrored left to right.

    Guarantees
    ----------
    Which m moves a step takes follows from the numbers of the round and of the step alone: they are public, and the
    same for all records and clients. No record and no secret has a part in them, so they tell nothing, and a record's
    mean gradient is a function of the weights, of these moves and of that record alone. Runs that are compared see the
    same moves.
    """

    copies: int
    shift: int = 2
    mirror: bool = False

    def __post_init__(self) -> None:
        for key, least in (("copies", 1), ("shift", 0)):
            value = getattr(self, key)
            if type(value) is not int or value < least:
                raise BadInput(f"training.augment.{key} is {value!r}: it is a whole number from {least}")
        if type(self.mirror) is not bool:
            raise BadInput(f"training.augment.mirror is {self.mirror!r}: it is true or false")
        there = (2 * self.shift + 1) ** 2 * (1 + self.mirror)
        if self.copies > min(there, MOST):
            few = f"shift = {self.shift} gives {there} different ones; use fewer copies or a larger shift"
            why = few if there < MOST else f"at most {MOST} are made"
            raise BadInput(f"training.augment.copies is {self.copies}: {why}")

    @staticmethod
    def parse(given: Augment | Mapping[str, Any]) -> Augment:
        """From the table of a study, such as ``{copies = 4, shift = 2, mirror = true}``."""
        if isinstance(given, Augment):
            return given
        known = ("copies", "shift", "mirror")
        if not isinstance(given, Mapping) or "copies" not in given or set(given) - set(known):
            raise BadInput(
                f"training.augment is {given!r}: it is a table of {', '.join(known)}, of which copies is needed, such "
                "as {copies = 4, shift = 2, mirror = true}"
            )
        return Augment(**given)

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse records that are no images, or too small to be moved so far."""
        if len(shape) != 3:
            raise BadInput(
                "training.augment moves and mirrors images (channels, height, width), and these records have shape "
                f"{tuple(shape)}: leave it out"
            )
        if self.shift >= min(shape[1:]):
            raise BadInput(
                f"training.augment.shift is {self.shift}, and the images have {shape[1]}×{shape[2]} pixels: use less"
            )

    def moves(self, number: int, step: int) -> tuple[Move, ...]:
        """The m moves of a step of round ``number``: none, and those whose digests with both numbers are smallest."""
        return _moves(self, number, step)

    def of(self, x: Tensor, number: int, step: int) -> Tensor:
        """The copies of images ``[…, channels, height, width]`` as ``[…, copies, channels, height, width]``.

        A single copy has no axis of its own, as gradient engines want it.
        """
        each = [move.of(x) for move in self.moves(number, step)]
        return each[0] if self.copies == 1 else torch.stack(each, -4)


@lru_cache(maxsize=8)  # a site asks for every few records of a step
def _moves(augment: Augment, number: int, step: int) -> tuple[Move, ...]:
    sides = range(-augment.shift, augment.shift + 1)
    every = [Move(*one) for one in product(sides, sides, (False, True)[: 1 + augment.mirror])]
    # The image itself comes first: it is what the model will be asked about.
    ordered = sorted(every, key=lambda move: (any(move), blake2b(f"{number} {step} {tuple(move)}".encode()).digest()))
    return tuple(ordered[: augment.copies])
