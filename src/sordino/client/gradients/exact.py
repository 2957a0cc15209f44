"""The exact engine: ``torch.func`` over any model, one gradient per record."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sordino.client.gradients.lengths import Length, squared_norms
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.tape import Segments
from sordino.client.gradients.types import (
    Engine,
    Flat,
    Graded,
    LayerPlan,
    evaluating,
    mean_of_inputs,
    only,
    precise,
)

Named = dict[str, Tensor]
KEPT_BYTES = 256 * 2**20


class Exact(Engine):
    """Per-record gradients by ``vmap(grad)``: the reference for the fast engine and the fallback for any model.

    Per-record gradients are kept while they fit ``kept_bytes``. Beyond that they are computed twice in chunks, for
    their norms and for their sum, from the same state of the random generator, so that dropout drops the same.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, reason: str, kept_bytes: int = KEPT_BYTES, copies: int = 1
    ) -> None:
        super().__init__(model)
        self.copies = copies
        self.module = copy.deepcopy(model)
        self._loss, self._reason, self._kept_bytes = loss, reason, kept_bytes
        over = (None, 0, 0, 0)
        self._per_record = vmap(grad_and_value(self._one), in_dims=over, randomness="different")
        self._losses = vmap(self._one, in_dims=over, randomness="different")

    @property
    def bytes_per_record(self) -> int:
        """The size of one gradient, as long as it may be kept."""
        return min(self._kept_bytes, self.dimension * next(self.module.parameters()).element_size())

    def describe(self) -> list[LayerPlan]:
        """One line: the whole model, record by record."""
        return [LayerPlan("(whole model)", type(self.module).__name__, "exact", self._reason)]

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        flat = Flat.of(x, y, mask, self.copies)
        graded = self._grade(params, flat, Segments.regular(y.shape[0], y.shape[1]))
        return graded.in_rows(y.shape[:2], flat.records)

    def shared(
        self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int, mask: Tensor | None = None
    ) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        flat = Flat.of(x, y, mask, self.copies, lead=1)
        graded = self._grade(params.expand(rows, -1), flat, Segments.ragged(rows_of, rows))
        return graded.in_rows(y.shape[:1], flat.records)

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        batch, (rows, width) = Flat.of(x, y, mask, self.copies), y.shape[:2]
        real = self._real(batch)
        with torch.no_grad():
            found = [
                self._losses(self._named(params[row]), batch.x[part], batch.y[part], real[part])
                for row, part in ((row, slice(row * width, (row + 1) * width)) for row in range(rows if width else 0))
            ]
        out = torch.stack(found) if found else params.new_zeros(rows, width)
        return out if batch.records is None else only(batch.records, out)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model in evaluation mode."""
        with torch.no_grad(), evaluating(self.module):
            return self._outputs(self._named(flat), x)

    def _named(self, flat: Tensor) -> Named:
        return {slot.name: slot.view(flat) for slot in self.layout}

    def _outputs(self, named: Named, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.module, named, (x,))
        return out

    def _real(self, batch: Flat) -> Tensor:
        """Which inputs of each record are real, ``[n, m]``."""
        if batch.inputs is not None:
            return batch.inputs
        return torch.ones(batch.y.shape[:2] if self.copies > 1 else (len(batch.y), 1), device=batch.y.device).bool()

    def _one(self, named: Named, x: Tensor, y: Tensor, real: Tensor) -> Tensor:
        """The loss of one record: of its only input, or the mean over a unit's real ones."""
        if self.copies == 1:
            return self._loss.values(self._outputs(named, x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)
        losses = self._loss.values(self._outputs(named, x), y)
        return mean_of_inputs(losses, len(losses), real.unsqueeze(0)).squeeze(0)

    def _chunks(
        self, params: Tensor, batch: Flat, segments: Segments
    ) -> Iterator[tuple[int, slice, list[Tensor], Tensor]]:
        """Row, records, gradients ``[records, size]`` of every slot, and losses, as many at a time as may be kept."""
        most, real = max(1, self._kept_bytes // (params.element_size() * self.dimension)), self._real(batch)
        for row, start, stop in segments.pieces:
            named = self._named(params[row].detach())
            for first in range(start, stop, most):
                part = slice(first, min(stop, first + most))
                with precise():
                    grads, losses = self._per_record(named, batch.x[part], batch.y[part], real[part])
                yield row, part, [grads[slot.name].detach().flatten(1) for slot in self.layout], losses.detach()

    def _grade(self, params: Tensor, batch: Flat, segments: Segments) -> Graded:
        keep = segments.records * params.element_size() * self.dimension <= self._kept_bytes
        losses = params.new_zeros(segments.records)
        squares = torch.zeros(segments.records, dtype=torch.float64, device=params.device)
        kept: list[tuple[int, slice, list[Tensor]]] = []
        where = batch.x.device
        generator = torch.cuda.default_generators[where.index] if batch.x.is_cuda else torch.default_generator
        state = generator.get_state()
        for row, part, grads, some in self._chunks(params, batch, segments):
            losses[part] = some
            squares[part] = torch.stack([squared_norms(each) for each in grads]).sum(0)
            if keep:
                kept.append((row, part, grads))

        def again() -> Iterator[tuple[int, slice, list[Tensor]]]:
            with torch.random.fork_rng(devices=[where] if batch.x.is_cuda else []):
                generator.set_state(state)
                for row, part, grads, _ in self._chunks(params, batch, segments):
                    yield row, part, grads

        def pull(factors: Tensor, out: Tensor) -> None:
            out.zero_()
            for row, part, grads in kept if keep else again():
                weights = factors[part]
                # A zero factor does not stop a NaN, so what must not contribute is cleared.
                cleared = (weights == 0).unsqueeze(1)
                for slot, each in zip(self.layout, grads):
                    target = slot.part(out[row])
                    target += each.masked_fill(cleared, 0).t().mv(weights)

        finite = torch.isfinite(losses + squares)
        return Graded(losses, Length(squares), finite, pull, (segments.rows, self.dimension))
