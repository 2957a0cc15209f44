"""Groups of one client's records, each with an account of its own and sampled at a rate of its own.

A record is in one group for ever, whatever it says, and how many records a group has is public. One batch is drawn from
all groups, every record by a coin of its group's rate, and one noise is added to their sum: for a record of group g the
release is a sampled Gaussian of rate q_g, which g's own account is charged for, whatever rates others have. A record
spends nothing of another group's account (parallel composition). Levels of consent are such groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sordino.errors import BadInput
from sordino.privacy.held import HELD
from sordino.privacy.types import Sampling, Scheme

CLOSE = 1e-9  # how far two computations of one expected batch may be apart
LONGEST = 60  # letters of a group's name


@dataclass(frozen=True)
class Group:
    """Some of a client's records: what they are called, the rate q_g they are sampled at, how many there are.

    ``name`` may be empty: these records are charged to the client's own account.
    """

    name: str
    rate: float
    records: int

    def __post_init__(self) -> None:
        check_group_name(self.name)
        if not 0.0 < self.rate <= 1.0:
            raise BadInput(f"group {self.name!r} would be sampled at rate {self.rate!r}: a rate lies in (0, 1]")
        if self.records < 1:
            raise BadInput(f"group {self.name!r} has {self.records} records: leave a group without records out")

    @property
    def suffix(self) -> str:
        """What the group's account is called, after the client's own."""
        return suffix_of(self.name)

    @property
    def expected(self) -> float:
        """q_g·n_g: how many of its records a batch has on average."""
        return self.rate * self.records


def suffix_of(name: str) -> str:
    """What the account of a group of that name is called, after the client's own."""
    return f" ({name})" if name else ""


def check_group_name(name: str) -> str:
    """A group's name as accounts can bear it: short, printable, without brackets, and not that of held-out records."""
    odd = not name.isprintable() or len(name) > LONGEST or name != name.strip() or set(name) & set("()")
    if odd or suffix_of(name) == HELD:
        raise BadInput(
            f"a group of records cannot be called {name!r}: a name has at most {LONGEST} letters, no brackets, and is "
            "not 'held out'"
        )
    return name


def is_account_of(account: str, client: str) -> bool:
    """Whether an account is a client's own, or that of some of its records (a group, or those held out)."""
    return account == client or (account.startswith(f"{client} (") and account.endswith(")"))


def expected_batch(groups: Sequence[Group]) -> float:
    """Σ q_g n_g: the expected batch size, a public number (R2)."""
    return math.fsum(one.expected for one in groups)


def mean_rate(groups: Sequence[Group]) -> float:
    """Σ q_g n_g / Σ n_g."""
    return min(1.0, expected_batch(groups) / sum(one.records for one in groups))


def check_groups(groups: Sequence[Group], sampling: Sampling, divisor: float) -> None:
    """Refuse groups that are named twice, fixed-size batches, and a rate or a divisor that are not those of the groups.

    ``sampling``: of all records together; its rate is the mean one.
    """
    names = [one.name for one in groups]
    if len(set(names)) != len(names):
        raise BadInput(f"a group of records is named twice: {', '.join(names)}")
    if sampling.scheme is Scheme.FIXED:
        raise BadInput("batches of a fixed size are drawn from all records alike: groups need sampling = 'poisson'")
    if sampling.scheme is Scheme.FULL and any(one.rate != 1.0 for one in groups):
        raise BadInput("a full batch has every record: no group of them can have a smaller rate")
    for what, said, found in (
        ("divisor", divisor, expected_batch(groups)),
        ("rate", sampling.rate, mean_rate(groups)),
    ):
        if not math.isclose(said, found, rel_tol=CLOSE):
            raise BadInput(f"the {what} {said:.9g} is not that of the groups together, {found:.9g}")
