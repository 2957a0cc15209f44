"""How budgets become noise, as a part of a method."""

from __future__ import annotations

from dataclasses import dataclass

from sordino.errors import BadInput

ACCOUNTANTS = {
    "tight": "pld",
    "rdp": "rdp",
    "rdp-robust-hdp": "rdp-robust-hdp",
    "closed-form-selection": "closed-form-selection",
    "wor-paper": "wor-paper",
}


@dataclass(frozen=True)
class Calibrate:
    """How budgets become noise.

    ``by`` picks the noise: ``tight`` (PLD), ``rdp``, or a published rule. Whatever picked it, the ledger charges that
    noise with the real accountant. ``strictest``: everyone uses the noise of the strictest client's budget.
    """

    by: str = "tight"
    strictest: bool = False

    def __post_init__(self) -> None:
        if self.by not in ACCOUNTANTS:
            raise BadInput(f"calibrate {self.by!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")

    @property
    def accountant(self) -> str:
        """The accountant that picks the noise."""
        return ACCOUNTANTS[self.by]
