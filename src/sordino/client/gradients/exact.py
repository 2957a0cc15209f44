"""The exact engine: ``torch.func`` over any model, one gradient per record."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sordino.client.gradients.layout import dimension_of, flatten, layout_of, load, view_of
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.types import Graded, LayerPlan, Slot

Named = dict[str, Tensor]
KEPT_BYTES = 256 * 2**20


class Exact:
    """Per-record gradients by ``vmap(grad)``; the reference for the fast engine and the fallback for any model.

    Per-record gradients are kept while they fit ``kept_bytes``; beyond that they are graded in chunks for their norms
    and the weighted sum is a second, ordinary backward pass of Σ_j a_j ℓ_j, which is the same number.
    """

    def __init__(self, model: nn.Module, loss: Loss, reason: str, kept_bytes: int = KEPT_BYTES) -> None:
        self._model = copy.deepcopy(model)
        self._loss = loss
        self._reason = reason
        self._kept_bytes = kept_bytes
        self._slots = layout_of(model)
        self._per_record = vmap(grad_and_value(self._one), in_dims=(None, 0, 0), randomness="different")

    @property
    def dimension(self) -> int:
        """Number of trainable parameters, d."""
        return dimension_of(self._slots)

    @property
    def layout(self) -> list[Slot]:
        """Name, shape and offset of every trainable tensor."""
        return list(self._slots)

    def describe(self) -> list[LayerPlan]:
        """One line: the whole model, record by record."""
        return [LayerPlan("(whole model)", type(self._model).__name__, "exact", self._reason)]

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector."""
        return flatten(model, self._slots)

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a vector into a model's trainable parameters."""
        load(model, self._slots, flat)

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        rows, width = y.shape[:2]
        segments = Segments.regular(rows, width)
        return self._grade(params, x.flatten(0, 1), y.flatten(0, 1), mask, segments, (rows, width))

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        segments = Segments.ragged(rows_of, rows)
        return self._grade(params.expand(rows, -1), x, y, None, segments, (segments.records,))

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        with torch.no_grad():
            out = torch.stack([self._batch(*item) for item in zip(params, x, y)])
        return out if mask is None else torch.where(mask, out, torch.zeros_like(out))

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation."""
        self._model.eval()
        try:
            with torch.no_grad():
                out: Tensor = functional_call(self._model, self._named(flat), (x,))
        finally:
            self._model.train()
        return out

    def _named(self, flat: Tensor) -> Named:
        return {slot.name: view_of(flat, slot) for slot in self._slots}

    def _batch(self, flat: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(functional_call(self._model, self._named(flat), (x,)), y)

    def _one(self, named: Named, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(functional_call(self._model, named, (x.unsqueeze(0),)), y.unsqueeze(0)).squeeze(0)

    def _grade(
        self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None, segments: Segments, shape: tuple[int, ...]
    ) -> Graded:
        size = params.element_size() * self.dimension
        keep = segments.records * size <= self._kept_bytes
        chunk = max(1, self._kept_bytes // size)
        losses = params.new_zeros(segments.records)
        squares = params.new_zeros(segments.records)
        kept: dict[int, list[Tensor]] = {}
        for row, start, stop in segments.pieces():
            for a in range(start, stop, chunk):
                part = slice(a, min(stop, a + chunk))
                grads, losses[part] = self._per_record(self._named(params[row].detach()), x[part], y[part])
                flat = [grads[slot.name].flatten(1) for slot in self._slots]
                squares[part] = torch.stack([each.square().sum(1) for each in flat]).sum(0)
                if keep:
                    kept[row] = flat
        finite = torch.isfinite(losses) & torch.isfinite(squares)
        norms = torch.where(finite, squares.sqrt(), torch.full_like(squares, torch.inf)).view(shape)
        losses = losses.view(shape)
        if mask is not None:
            losses = torch.where(mask, losses, torch.zeros_like(losses))
            norms = torch.where(mask, norms, torch.zeros_like(norms))
        puller = self._pull_kept(kept, segments) if keep else self._pull_again(params, x, y, segments)
        return Graded(losses, norms, puller, (segments.rows, self.dimension), lambda: True)

    def _pull_kept(self, kept: dict[int, list[Tensor]], segments: Segments) -> Callable[[Tensor, Tensor], None]:
        def pull(factors: Tensor, out: Tensor) -> None:
            out.zero_()
            for row, start, stop in segments.pieces():
                weights = factors[start:stop]
                dead = (weights == 0).unsqueeze(1)
                for slot, each in zip(self._slots, kept[row]):
                    target = out[row, slot.offset : slot.offset + slot.size]
                    torch.mv(each.masked_fill(dead, 0).t(), weights, out=target)

        return pull

    def _pull_again(
        self, params: Tensor, x: Tensor, y: Tensor, segments: Segments
    ) -> Callable[[Tensor, Tensor], None]:
        def pull(factors: Tensor, out: Tensor) -> None:
            out.zero_()
            for row, start, stop in segments.pieces():
                alive = factors[start:stop].nonzero().squeeze(1) + start
                if len(alive):
                    flat = params[row].detach().requires_grad_(True)
                    total = (factors[alive] * self._batch(flat, x[alive], y[alive])).sum()
                    out[row] = torch.autograd.grad(total, flat)[0]

        return pull
