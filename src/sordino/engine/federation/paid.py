"""What a site does for every release, whatever it is asked: the stored bytes again, or charge → draw → store → send."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sordino.engine.federation import wire
from sordino.engine.federation.limits import Refused
from sordino.engine.federation.release_log import note_release
from sordino.engine.federation.wire import Packet, pack
from sordino.privacy.attacker import attack_on_either
from sordino.privacy.gate import Gate, Permit, Terms, key_of
from sordino.privacy.generators import Source, Turn
from sordino.privacy.held import OF_HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Release

log = logging.getLogger("sordino.site")

RESENDABLE = 8
"""How many of a run's newest releases are kept for resending: a server may repeat the round under way."""


@dataclass(frozen=True)
class Till:
    """Where one run's releases from one account are paid.

    Attributes
    ----------
    account: of the ledger; that of the records which are read, and of no others.
    private: whether the method adds noise; without it nothing is charged, and every release is noted.
    most: how often a release of one name may be made in the run.
    """

    ledger: Ledger
    source: Source
    account: str
    run: str
    private: bool
    most: int

    def release(
        self,
        turn: Turn,
        terms: Terms,
        request: str,
        make: Callable[[Permit, Gate], Packet],
        masks: str = "",
    ) -> bytes:
        """The reply that ``make`` gives once it is paid for; stored bytes where exactly this was answered before (R11).

        ``masks``: the digest that a message is masked under, which is used for one message ever.

        Guarantees: no record is read before the charge is on disk; whatever goes wrong after it is told as
        ``unavailable``; a reply is stored before it is sent.
        """
        key = key_of(turn, terms, masks)
        if self.private:
            stored = self.ledger.stored(self.account, self.run, key, request)
            if stored is not None:
                log.info("%s: sent again as it was", key)
                return stored
        self._count(terms.what)
        gate = Gate(self.ledger if self.private else None, self.source, self.run)
        permit = gate.grant([turn], [terms], request, masks)
        try:  # from here on records are read, and what goes wrong is nobody's business
            reply = pack(make(permit, gate))
        except Exception:
            log.exception("%s failed after it was charged; the server is told 'unavailable'", key)
            return wire.unavailable()
        if self.private:
            self.ledger.store(self.account, self.run, key, request, reply)
            self.ledger.forget(self.account, self.run, keep=RESENDABLE)
        note_release(self.ledger, self.account, self.run, terms.what)
        log.info("%s: released", key)
        return reply

    def _count(self, what: str) -> None:
        """Refuse a release beyond the most that the run may have; note it where nothing is charged."""
        so_far = (self.ledger.charges if self.private else self.ledger.unprotected)(self.account, self.run, what)
        if so_far >= self.most:
            raise Refused(f"{what!r} was released {so_far} times in this run: this site allows {self.most} turns of it")
        if not self.private:
            self.ledger.record_unprotected(self.account, self.run, what)


def sealed(parts: Mapping[str, Release]) -> dict[str, Tensor]:
    """The values of releases, the only thing that a reply is made of."""
    for name, one in parts.items():
        if not isinstance(one, Release):
            raise TypeError(f"{name!r} did not pass the gate")
    return {name: one.value for name, one in parts.items()}


def told_spent(ledger: Ledger, run: str, account: str, held: str | None = None) -> dict[str, Any]:
    """What a site says in the end, by public counts: what its accounts have spent, and what this run released.

    A record is in one of the two parts, so its ε is the larger of theirs. Held-out records are asked with all of the
    site's own noise: what is said of whom the promise holds against follows from training.
    """
    accounts = [account, *([] if held is None else [held])]
    released = [
        {"what": e.what + said, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
        for one, said in zip(accounts, ("", OF_HELD))
        for e in ledger.run_events(one, run)
    ]
    spent, here, own = ledger.epsilon(accounts), ledger.epsilon(accounts, run), ledger.own_epsilon(accounts)
    return {
        "releases": released,
        "spent_epsilon": max(spent.values()),
        "run_epsilon": max(here.values()),
        "replace_one_epsilon": max(ledger.replace_one_epsilon(one) for one in accounts),
        "own_epsilon": max(own.values()),
        **({} if held is None else {"training_epsilon": spent[account], "held_epsilon": spent[held]}),
        "against": asdict(ledger.against(account)),
        "composition": ledger.composition(account),
        "attack": attack_on_either(ledger, [account])[account],
        "not_private": list(dict.fromkeys(mark for one in accounts for mark in ledger.account(one).not_private)),
    }
