"""What a site does for every release, whatever it is asked: the stored bytes again, or charge → draw → store → send."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from sordino.engine.federation import wire
from sordino.engine.federation.limits import Refused
from sordino.engine.federation.release_log import note_release
from sordino.engine.federation.wire import Packet, pack
from sordino.privacy.attacker import worst_attack
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
    account: of the ledger; that of the records which are read, and of no others. Where they fall into groups or
        cohorts, all their accounts begin with it.
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
        accounts = [self.account + suffix for suffix in terms.events]
        first = accounts[0]  # of records in groups every account is charged, and one of them keeps the reply
        if self.private:
            stored = self.ledger.stored(first, self.run, key, request)
            if stored is not None:
                log.info("%s: sent again as it was", key)
                return stored
        for one in accounts:
            self._count(one, terms.what)
        gate = Gate(self.ledger if self.private else None, self.source, self.run)
        permit = gate.grant([turn], [terms], request, masks)
        try:  # from here on records are read, and what goes wrong is nobody's business
            reply = pack(make(permit, gate))
        except Exception:
            log.exception("%s failed after it was charged; the server is told 'unavailable'", key)
            return wire.unavailable()
        if self.private:
            self.ledger.store(first, self.run, key, request, reply)
            self.ledger.forget(first, self.run, keep=RESENDABLE)
        for one in accounts:
            note_release(self.ledger, one, self.run, terms.what)
        log.info("%s: released", key)
        return reply

    def _count(self, account: str, what: str) -> None:
        """Refuse a release beyond the most that the run may have; note it where nothing is charged."""
        so_far = (self.ledger.charges if self.private else self.ledger.unprotected)(account, self.run, what)
        if so_far >= self.most:
            raise Refused(f"{what!r} was released {so_far} times in this run: this site allows {self.most} turns of it")
        if not self.private:
            self.ledger.record_unprotected(account, self.run, what)


def sealed(parts: Mapping[str, Release]) -> dict[str, Tensor]:
    """The values of releases, the only thing that a reply is made of."""
    for name, one in parts.items():
        if not isinstance(one, Release):
            raise TypeError(f"{name!r} did not pass the gate")
    return {name: one.value for name, one in parts.items()}


def told_spent(ledger: Ledger, run: str, training: Mapping[str, str], held: Sequence[str] = ()) -> dict[str, Any]:
    """What a site says in the end, by public counts: what its accounts have spent, and what this run released.

    ``training``: the accounts of training records, and what is said of each after the name of a release: the level of
    consent, where there are several. A record is in one of all accounts, so the largest ε holds for any. Held-out
    records are asked with all of the site's own noise: what is said of whom the promise holds against follows from
    training.
    """
    said = {**training, **dict.fromkeys(held, OF_HELD)}
    accounts = list(said)
    events = dict.fromkeys((e, after) for one, after in said.items() for e in ledger.run_events(one, run))
    released = [  # cohorts pay for a release alike: it is told once
        {"what": e.what + after, "rate": e.sampling.rate, "noise": e.noise, "count": e.count} for e, after in events
    ]
    spent, here, own = ledger.epsilon(accounts), ledger.epsilon(accounts, run), ledger.own_epsilon(accounts)
    first = next((one for one in training if ledger.run_events(one, run)), accounts[0])
    parts: dict[str, Iterable[str]] = {"training_epsilon": training, "held_epsilon": held}
    return {
        "releases": released,
        "spent_epsilon": max(spent.values()),
        "run_epsilon": max(here.values()),
        "replace_one_epsilon": max(ledger.replace_one_epsilon(one) for one in accounts),
        "own_epsilon": max(own.values()),
        **({key: max(spent[one] for one in part) for key, part in parts.items()} if held else {}),
        **({"levels": {said[one]: [spent[one], here[one]] for one in training}} if any(training.values()) else {}),
        "against": asdict(ledger.against(first)),
        "composition": ledger.composition(first),
        "attack": worst_attack(ledger, accounts),
        "not_private": list(dict.fromkeys(mark for one in accounts for mark in ledger.account(one).not_private)),
    }
