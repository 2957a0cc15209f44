"""A simulated run judged as a deployment would be: from held-out records, with noise, paid by their own account.

Beside what an observer sees for free, so that a rehearsal shows how precise the paid figures will be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sordino.client.gradients import Engine
from sordino.client.rows import Records
from sordino.client.score import score
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.scored import edge, told
from sordino.engine.sharded import ALONE, Shard
from sordino.methods import Plan
from sordino.methods.evaluation import Judging
from sordino.privacy.gate import Gate, fingerprint
from sordino.privacy.generators import Turn
from sordino.privacy.held import HELD
from sordino.privacy.types import Release

BATCH = 1024


@dataclass(frozen=True)
class Scoring:
    """Who is judged on which held-out records; ``payable``: how many evaluations each account pays for.

    Where several processes simulate a run, each judges the clients of its ``shard``.
    """

    plan: Plan
    judging: Judging
    held: tuple[NDArray[np.int64], ...]
    engine: Engine
    gate: Gate
    payable: Mapping[str, int]
    shard: Shard = ALONE

    def look(
        self, state: Checkpoint, records: Records, key: str, own: Callable[[int], Tensor] | None = None
    ) -> dict[str, Any]:
        """Charge, count with noise, estimate: what a round's record says of the shown model."""
        done = sum("evaluation" in record for record in state.history)
        names = [client.name for client in self.plan.clients]
        asked = [i for i in self.judging.who if self.payable.get(names[i] + HELD, self.judging.times) > done]
        turns = [Turn(names[i] + HELD, state.round, 0, key) for i in asked]
        # Under what its round opened with, which a repeated round has to the last bit; else by the model itself.
        request = (state.request or fingerprint(state.shown, state.round)) if self.gate.private else ""
        permit = self.gate.grant(turns, [self.judging.terms[i] for i in asked], request)

        def released() -> dict[int, dict[str, Release]]:
            found = {}
            for row in self.shard.rows(np.array(asked, dtype=np.int64)).tolist():
                held = records.only(torch.from_numpy(self.held[asked[row]]).to(records.y.device))
                weights = state.shown if own is None else own(asked[row])
                with torch.no_grad():
                    outputs = torch.cat([self.engine.predict(weights, piece) for piece in held.x.split(BATCH)])
                part = permit.split([row])
                found[asked[row]] = score(outputs, held, held.valid, self.judging.cells, part, self.gate)
            return found

        here = self.shard.together(released)
        mine = {i: {part: one.value for part, one in parts.items()} for i, parts in here.items()}
        every = {i: parts for some in self.shard.gathered(mine) for i, parts in some.items()}
        values = {i: every[i] for i in asked}
        rows = told(self.plan, self.judging, values, state.round, done + 1)
        chosen = edge(self.plan, self.judging, values, state.round)
        return {"evaluation": rows, **({} if chosen is None else {"threshold": chosen})}
