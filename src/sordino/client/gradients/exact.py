"""The exact engine: ``torch.func`` over any model, one gradient per record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sordino.client.gradients.lengths import Length, squared_norms
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.tape import Segments
from sordino.client.gradients.types import (
    Engine,
    Graded,
    LayerPlan,
    evaluating,
    inputs_of,
    mean_of_copies,
    only,
    precise,
)

Named = dict[str, Tensor]
KEPT_BYTES = 256 * 2**20


class Exact(Engine):
    """Per-record gradients by ``vmap(grad)``: the reference for the fast engine and the fallback for any model.

    Some modules cannot be mapped (recurrent ones write into their states, forward code may branch on values): from the
    first batch on which ``vmap`` fails, records go through such a model one after the other. That is the same, slower.

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
        self._mapped = True

    @property
    def bytes_per_record(self) -> int:
        """The size of one gradient, as long as it may be kept."""
        return min(self._kept_bytes, self.dimension * next(self.module.parameters()).element_size())

    def describe(self) -> list[LayerPlan]:
        """One line: the whole model, record by record."""
        return [LayerPlan("(whole model)", type(self.module).__name__, "exact", self._reason)]

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        segments = Segments.regular(y.shape[0], y.shape[1])
        graded = self._grade(params, x.flatten(0, 1), y.flatten(0, 1), segments)
        return graded.in_rows(y.shape[:2], mask)

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        return self._grade(params.expand(rows, -1), x, y, Segments.ragged(rows_of, rows))

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        with torch.no_grad():
            rows = [self._each(self._one, self._named(flat), each, label) for flat, each, label in zip(params, x, y)]
        out = torch.stack(rows) if rows else params.new_zeros(y.shape[:2])
        return out if mask is None else only(mask, out)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model in evaluation mode."""
        with torch.no_grad(), evaluating(self.module):
            return self._outputs(self._named(flat), x)

    def _named(self, flat: Tensor) -> Named:
        return {slot.name: slot.view(flat) for slot in self.layout}

    def _outputs(self, named: Named, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.module, named, (x,))
        return out

    def _one(self, named: Named, x: Tensor, y: Tensor) -> Tensor:
        inputs, labels = inputs_of(x.unsqueeze(0), y.unsqueeze(0), self.copies)
        return mean_of_copies(self._loss.values(self._outputs(named, inputs), labels), self.copies).squeeze(0)

    def _each(self, function: Callable[..., Any], named: Named, x: Tensor, y: Tensor) -> Any:
        """``function`` of every record by itself, stacked: mapped, or where that cannot be one after the other."""
        if self._mapped:
            try:
                return vmap(function, in_dims=(None, 0, 0), randomness="different")(named, x, y)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                if not len(x):
                    raise
                reason = str(error).splitlines()[0]
        found = _stacked([function(named, *one) for one in zip(x, y)])
        if self._mapped:  # the model is not at fault: it works record by record
            self._mapped = False
            self._reason = f"{self._reason}; one record after the other, for vmap fails: {reason}"
        return found

    def _chunks(
        self, params: Tensor, x: Tensor, y: Tensor, segments: Segments
    ) -> Iterator[tuple[int, slice, list[Tensor], Tensor]]:
        """Row, records, gradients ``[records, size]`` of every slot, and losses, as many at a time as may be kept."""
        most = max(1, self._kept_bytes // (params.element_size() * self.dimension))
        for row, start, stop in segments.pieces:
            named = self._named(params[row].detach())
            for first in range(start, stop, most):
                part = slice(first, min(stop, first + most))
                with precise():
                    grads, losses = self._each(grad_and_value(self._one), named, x[part], y[part])
                yield row, part, [grads[slot.name].detach().flatten(1) for slot in self.layout], losses.detach()

    def _grade(self, params: Tensor, x: Tensor, y: Tensor, segments: Segments) -> Graded:
        keep = segments.records * params.element_size() * self.dimension <= self._kept_bytes
        losses = params.new_zeros(segments.records)
        squares = torch.zeros(segments.records, dtype=torch.float64, device=params.device)
        kept: list[tuple[int, slice, list[Tensor]]] = []
        generator = torch.cuda.default_generators[x.device.index] if x.is_cuda else torch.default_generator
        state = generator.get_state()
        for row, part, grads, some in self._chunks(params, x, y, segments):
            losses[part] = some
            squares[part] = torch.stack([squared_norms(each) for each in grads]).sum(0)
            if keep:
                kept.append((row, part, grads))

        def again() -> Iterator[tuple[int, slice, list[Tensor]]]:
            with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
                generator.set_state(state)
                for row, part, grads, _ in self._chunks(params, x, y, segments):
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


def _stacked(found: list[Any]) -> Any:
    """Tensors, tables of tensors or pairs of them, one a record, as one with an axis of records in front."""
    first = found[0]
    if isinstance(first, Tensor):
        return torch.stack(found)
    if isinstance(first, dict):
        return {key: torch.stack([one[key] for one in found]) for key in first}
    return tuple(_stacked([one[k] for one in found]) for k in range(len(first)))
