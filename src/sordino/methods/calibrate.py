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

SHARES = ("limit", "accountant")


@dataclass(frozen=True)
class Calibrate:
    """How budgets become noise.

    ``by`` picks the noise: ``tight`` (PLD), ``rdp``, or a published rule. Whatever picked it, the ledger charges that
    noise with the real accountant. ``strictest``: everyone uses the noise of the strictest client's budget. ``shares``:
    what a question's share of the budget is a share of. ``limit``: Σ count·q²/z², in which releases add up where they
    are many and their noise is large. ``accountant``: every kind of release alone costs what a Gaussian with that
    share of μ² would, which also holds for a few releases with little noise beside many with more.
    """

    by: str = "tight"
    strictest: bool = False
    shares: str = "limit"

    def __post_init__(self) -> None:
        if self.by not in ACCOUNTANTS:
            raise BadInput(f"calibrate {self.by!r} is unknown: use one of {', '.join(ACCOUNTANTS)}")
        if self.shares not in SHARES:
            raise BadInput(f"calibrate.shares = {self.shares!r} is unknown: use one of {', '.join(SHARES)}")
        if self.shares != "limit" and self.by not in ("tight", "rdp"):
            raise BadInput(f"calibrate.shares = {self.shares!r} needs noise picked by tight or rdp, not {self.by!r}")

    @property
    def accountant(self) -> str:
        """The accountant that picks the noise."""
        return ACCOUNTANTS[self.by]
