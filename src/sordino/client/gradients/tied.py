"""Weights that several layers share: one gradient, the sum of what each of their uses gives."""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor, nn

from sordino.client.gradients.layers import EmbeddingLayer, LinearLayer, cat_positions, gathered, summed_rows
from sordino.client.gradients.lengths import Length, squared_norms, squared_with_rows
from sordino.client.gradients.tape import Held, Layer, Run, Saved, Segments, Tape, Unsupported
from sordino.client.gradients.types import Slot


class TiedLayer(LinearLayer):
    """A matrix W ``[o, i]`` that linear layers multiply by and embeddings look up in.

    A record's gradient is Σ_t dy_t ⊗ x_t + Σ_s e_s ⊗ r_s, with e_s the unit vector of an index it looks up and r_s the
    row of the gradient there: lookups are positions too. Without any, it is one linear layer over all positions. With
    them, ‖g‖² = ‖Σ dy ⊗ x‖² + Σ_s ‖r_s‖² + 2 Σ_{s,t} dy_t[i_s] (r_s·x_t), in float64.
    """

    method, reason = "ghost", "a shared weight: the uses' gradients are added up before a norm is taken"

    def __init__(self, slot: Slot, members: list[Layer]) -> None:
        super().__init__(slot.name, nn.Identity(), {"weight": slot})
        self.kind = "tied"
        self.entries = slot.shape[0]
        for layer in members:
            if type(layer) not in (LinearLayer, EmbeddingLayer):
                names = " and ".join(f"'{one.name}'" for one in members)
                raise Unsupported(f"layers {names} share a weight, and {layer.kind} has no fast rule for that")
            layer.own = {key: own for key, own in layer.own.items() if own.offset != slot.offset}
            layer.recorder = self

    def record_runs(self, runs: list[Run], tape: Tape) -> None:
        """Every layer its own parameters; the shared weight for all of them together."""
        products: list[tuple[Tensor, Saved]] = []
        lookups: list[tuple[Tensor, Tensor]] = []
        for _, group in groupby(sorted(runs, key=lambda run: run.layer.name), key=lambda run: run.layer.name):
            some = list(group)
            layer, dy, saved = some[0]
            if len(some) > 1:
                dy, saved = layer.joined([(one.dy, one.saved) for one in some])
            if isinstance(layer, EmbeddingLayer):
                lookups.append(layer.unpadded(dy, saved, tape))
                continue
            products.append((dy, saved))
            if layer.own:
                layer.record(dy, saved, tape)
        if not lookups:
            self.record(*self.joined(products), tape)
            return
        index = torch.cat([one for _, one in lookups], 1)
        rows = gathered(cat_positions([one for one, _ in lookups]), index)
        tape.hold(self.name, "rows", rows)
        tape.hold(self.name, "index", index)
        if not products:
            tape.note(Length(squared_norms(rows)))
            return
        dy, (x,) = self.joined(products)
        dy, x = tape.folded(dy), tape.folded(x)
        tape.hold(self.name, "x", x)
        tape.hold(self.name, "dy", dy)
        tape.note(squared_with_rows(x, dy, rows, index))

    def pull(self, factors: Tensor, held: Held, segments: Segments, out: Tensor) -> None:
        """The products' sum as for any linear layer, and the looked up rows on top."""
        target = self.slots["weight"].part(out)
        if "rows" not in held or "x" in held:
            super().pull(factors, held, segments, out)
        else:
            target.zero_()
        if "rows" in held:
            target.add_(summed_rows(factors, held, segments, self.entries))
