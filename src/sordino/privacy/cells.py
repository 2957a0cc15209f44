"""The cells of a table of scores: which there are, and which one a record falls into. Client and server share them.

A model is judged by one histogram over held-out records: every record adds one to one cell, so the table has an L2
sensitivity of 1, and from the counts the server works out every metric (``server.scores``). No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sordino.errors import BadInput

Array = NDArray[np.float64]

KINDS = ("binary", "classes", "regression")

NO_CELL = -1
"""The cell of a record that adds nothing: a null record, or one for which the model has no finite answer."""


@dataclass(frozen=True)
class Cells:
    """The declared cells of a table of scores.

    ``binary``: (class, bin) has the number class·B + bin, bin = ⌊B·P(class 1)⌋ (1 falls into the last); B is even, so
    that 1/2 is an edge and a record is right when its bin lies on its class's side. ``classes``: (true, predicted) has
    the number true·k + predicted. ``regression``: bin ⌊B·(r + 1)/2⌋ of the residual r = (prediction − target)/width,
    the first and last bins open to the outside.

    Parameters
    ----------
    kind : ``binary``, ``classes`` or ``regression``.
    size : B, the number of bins (even), or for ``classes`` k, the number of classes.
    width : the width of the target's declared range (``regression``).
    """

    kind: str
    size: int
    width: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadInput(f"cells of kind {self.kind!r} are unknown: use one of {', '.join(KINDS)}")
        if int(self.size) != self.size or self.size < 2 or (self.kind != "classes" and self.size % 2):
            least = "a whole number of at least 2" if self.kind == "classes" else "an even number of at least 2"
            raise BadInput(f"size = {self.size!r} must be {least}: of classes, or of bins with an edge in the middle")
        if not (np.isfinite(self.width) and self.width > 0):
            raise BadInput(f"width = {self.width!r} must be positive: the width of the target's declared range")

    @property
    def classes(self) -> int:
        """How many classes there are; 0 for regression."""
        return {"binary": 2, "classes": self.size, "regression": 0}[self.kind]

    @property
    def count(self) -> int:
        """How many cells the table has."""
        return {"binary": 2 * self.size, "classes": self.size**2, "regression": self.size}[self.kind]

    @property
    def right(self) -> NDArray[np.bool_]:
        """Which cells hold records that the model gets right; none for regression."""
        if self.kind == "binary":
            above = np.arange(self.size) >= self.size // 2
            return np.concatenate([~above, above])
        return np.eye(self.size, dtype=bool).ravel() if self.kind == "classes" else np.zeros(self.size, dtype=bool)

    def rows(self, table: ArrayLike) -> Array:
        """The table as ``[class, bin or predicted class]``; for regression as one row."""
        return np.asarray(table, dtype=np.float64).reshape(max(self.classes, 1), self.size)

    def place(self, outputs: ArrayLike, targets: ArrayLike) -> NDArray[np.int64]:
        """The cell of every record, from outputs ``[n, k]`` (logits) or ``[n]`` (a prediction) and targets ``[n]``.

        A record whose outputs or target are no finite numbers, or whose class is none of the declared, gets
        ``NO_CELL``. Each record's cell depends on that record alone.
        """
        found = np.asarray(outputs, dtype=np.float64)
        wanted: Array = np.asarray(targets, dtype=np.float64).reshape(-1)
        found = found.reshape(len(wanted), -1)
        columns = self.classes or 1
        if found.shape[1] != columns:
            raise BadInput(f"the model has {found.shape[1]} outputs, cells of kind {self.kind!r} need {columns}")
        known = np.isfinite(found).all(1) & np.isfinite(wanted)
        if self.classes:
            known &= (wanted == np.floor(wanted)) & (wanted >= 0) & (wanted < self.classes)
        safe, truth = np.where(known[:, None], found, 0.0), np.where(known, wanted, 0.0)
        return np.where(known, self._cell(safe, truth), NO_CELL).astype(np.int64)

    def _cell(self, outputs: Array, targets: Array) -> Any:
        """Differences and comparisons only, no exponential: those of a vector may depend on a record's neighbours."""
        if self.kind == "classes":
            return targets * self.size + outputs.argmax(1)
        if self.kind == "regression":
            with np.errstate(over="ignore"):
                residual = (outputs[:, 0] - targets) / self.width
                return np.clip(np.floor(self.size * (residual + 1.0) / 2.0), 0, self.size - 1)
        edges = np.log([bin / (self.size - bin) for bin in range(1, self.size)])
        with np.errstate(over="ignore"):
            gaps = outputs[:, 1] - outputs[:, 0]
        return targets * self.size + np.searchsorted(edges, gaps, side="right")
