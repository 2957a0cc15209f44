"""What a federation's accuracy is to be compared with: each client's data alone, and training without noise.

Accuracy by itself misleads: 90 % is little where nine of ten records are of one class, and nothing gained where a
client reaches it by itself. Beside the majority class, which every result has (``Observer.constant``):

- *alone*: every client trains by itself, on its own records, under its own budget, by the same method with nobody to
  combine with. What is ``"auto"`` is chosen for its own noise, so it is not handicapped by steps that suit the whole.
- *ceiling*: everybody together by the same method and settings, what was automatic included, without noise and
  clipping.

All are an observer's, of a simulation: they cost no budget, and no guarantee covers them (R12).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sordino.data import Federation
from sordino.errors import BadInput, BudgetRefused, Diverged
from sordino.methods import Method
from sordino.methods.selection import everyone
from sordino.server.rules import data_weighted
from sordino.study.prepared import Prepared
from sordino.study.session import train_prepared

log = logging.getLogger("sordino")

FIGURES = ("accuracy", "client_accuracy", "loss", "client_loss")
"""What is kept of a baseline's run."""

EACH = ("batch", "rate")
"""Settings that may list a value for every client."""

Prepare = Callable[[Federation, Method, dict[str, Any]], Prepared]
"""Makes a run of clients, a method and settings, with everything else as in the run that is compared."""


@dataclass(frozen=True)
class Compared:
    """The run that is compared: its clients, its method, what was set, and how others like it are made."""

    ready: Prepared
    settings: Mapping[str, Any]
    prepare: Prepare
    device: str = "cpu"

    def find(self) -> dict[str, Any]:
        """Train the baselines; what ``result["baselines"]`` gets of them."""
        return {"alone": self.alone(), "ceiling": self.ceiling()}

    def ceiling(self) -> dict[str, Any]:
        """Everybody together, without noise and clipping; ``failed`` says why there is none."""
        method = replace(self.ready.plan.method, private=False)
        settled = {key: getattr(self.ready.plan.training, key) for key in ("rate", "lr", "clip")}
        try:
            final = self._trained(self.ready.clients, method, self._settings() | settled)
        except (BadInput, Diverged) as error:
            return {"failed": str(error)}
        return {key: final[key] for key in FIGURES}

    def alone(self) -> dict[str, Any]:
        """Every client by itself at its own ε; ``failed`` says of whom there is nothing, and why."""
        clients, method = self.ready.clients, by_itself(self.ready.plan.method)
        found: list[Mapping[str, Any]] = []
        failed = {}
        for place, name in enumerate(clients.names):
            settings = self._settings()
            settings |= {key: settings[key][place] for key in EACH if isinstance(settings.get(key), list | tuple)}
            try:
                final = self._trained(clients.only(place), method, settings)
            except (BadInput, BudgetRefused, Diverged) as error:
                failed[name], final = str(error), {}
            found.append(final)
        told: dict[str, Any] = {}
        for key in ("accuracy", "loss"):
            each = [one.get(key) for one in found]
            known = [value for value in each if value is not None]
            told |= {key: sum(known) / len(known) if known else None, f"client_{key}": each if known else None}
        return {**told, **({"failed": failed} if failed else {})}

    def _settings(self) -> dict[str, Any]:
        """As many rounds as the run has, evaluated at their end alone; all clients in every round."""
        rounds = self.ready.plan.training.rounds
        given = {key: value for key, value in self.settings.items() if key not in ("select", "exact_noise")}
        return {**given, "rounds": rounds, "evaluate": rounds}

    def _trained(self, clients: Federation, method: Method, settings: dict[str, Any]) -> Mapping[str, Any]:
        """The final figures of a run of its own, which warns nobody: what looks odd about it is not the user's."""
        level = log.level
        log.setLevel(logging.ERROR)
        try:
            final: Mapping[str, Any] = train_prepared(self.prepare(clients, method, settings), self.device).result[
                "final"
            ]
        finally:
            log.setLevel(level)
        return final


def by_itself(method: Method) -> Method:
    """The method for one client: it takes part in every round, and is combined with nobody.

    Two halves of one method stay together: with one client they are that client's own.
    """
    asked = tuple(one for one in method.ask if one.of != "candidates")
    combined = method.aggregate if method.local.partner else data_weighted()
    return replace(method, select=everyone(), ask=asked, aggregate=combined)
