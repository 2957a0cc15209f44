"""The exact engine: ``torch.func`` over any model, one gradient per record."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from sordino.client.gradients.layout import dimension_of, flatten, layout_of, load, view_of
from sordino.client.gradients.lengths import squared_norms
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.types import Graded, LayerPlan, Slot, evaluating, precise

Named = dict[str, Tensor]
KEPT_BYTES = 256 * 2**20


class Exact:
    """Per-record gradients by ``vmap(grad)``: the reference for the fast engine and the fallback for any model.

    Per-record gradients are kept while they fit ``kept_bytes``. Beyond that they are computed twice in chunks, for
    their norms and for their sum, from the same state of the random generator, so that dropout drops the same.
    """

    def __init__(self, model: nn.Module, loss: Loss, reason: str, kept_bytes: int = KEPT_BYTES) -> None:
        self.module = copy.deepcopy(model)
        self.mixed = False
        self._loss = loss
        self._reason = reason
        self._kept_bytes = kept_bytes
        self._slots = layout_of(model)
        self._per_record = vmap(grad_and_value(self._one), in_dims=(None, 0, 0), randomness="different")
        self._losses = vmap(self._one, in_dims=(None, 0, 0), randomness="different")

    @property
    def dimension(self) -> int:
        """Number of trainable parameters, d."""
        return dimension_of(self._slots)

    @property
    def layout(self) -> list[Slot]:
        """Name, shape and offset of every trainable tensor."""
        return list(self._slots)

    @property
    def bytes_per_record(self) -> int:
        """One gradient, as long as it may be kept."""
        return min(self._kept_bytes, self.dimension * next(self.module.parameters()).element_size())

    def describe(self) -> list[LayerPlan]:
        """One line: the whole model, record by record."""
        return [LayerPlan("(whole model)", type(self.module).__name__, "exact", self._reason)]

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector."""
        return flatten(model, self._slots)

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a vector into a model's trainable parameters."""
        load(model, self._slots, flat)

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
            rows = [self._losses(self._named(flat), each, label) for flat, each, label in zip(params, x, y)]
        out = torch.stack(rows) if rows else params.new_zeros(y.shape[:2])
        return out if mask is None else torch.where(mask, out, torch.zeros_like(out))

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation."""
        with torch.no_grad(), evaluating(self.module):
            return self._outputs(self._named(flat), x)

    def _named(self, flat: Tensor) -> Named:
        return {slot.name: view_of(flat, slot) for slot in self._slots}

    def _outputs(self, named: Named, x: Tensor) -> Tensor:
        out: Tensor = functional_call(self.module, named, (x,))
        return out

    def _one(self, named: Named, x: Tensor, y: Tensor) -> Tensor:
        return self._loss.values(self._outputs(named, x.unsqueeze(0)), y.unsqueeze(0)).squeeze(0)

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
                    grads, losses = self._per_record(named, x[part], y[part])
                yield row, part, [grads[slot.name].detach().flatten(1) for slot in self._slots], losses.detach()

    def _grade(self, params: Tensor, x: Tensor, y: Tensor, segments: Segments) -> Graded:
        needed = segments.records * params.element_size() * self.dimension
        losses = params.new_zeros(segments.records)
        squares = torch.zeros(segments.records, dtype=torch.float64, device=params.device)
        kept: list[tuple[int, slice, list[Tensor]]] | None = [] if needed <= self._kept_bytes else None
        state = _generator_state(x.device)
        for row, part, grads, some in self._chunks(params, x, y, segments):
            losses[part] = some
            squares[part] = torch.stack([squared_norms(each) for each in grads]).sum(0)
            if kept is not None:
                kept.append((row, part, grads))

        def again() -> Iterator[tuple[int, slice, list[Tensor]]]:
            with torch.random.fork_rng(devices=[x.device] if x.device.type == "cuda" else []):
                _restore(state, x.device)
                for row, part, grads, _ in self._chunks(params, x, y, segments):
                    yield row, part, grads

        def pull(factors: Tensor, out: Tensor) -> None:
            out.zero_()
            for row, part, grads in again() if kept is None else kept:
                weights = factors[part]
                # A zero factor does not stop a NaN, so what must not contribute is cleared.
                cleared = (weights == 0).unsqueeze(1)
                for slot, each in zip(self._slots, grads):
                    target = out[row, slot.offset : slot.offset + slot.size]
                    target += each.masked_fill(cleared, 0).t().mv(weights)

        finite = torch.isfinite(losses + squares)
        return Graded.of(losses, squares, None, finite, pull, (segments.rows, self.dimension))


def _generator_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _restore(state: Tensor, device: torch.device) -> None:
    setter: Callable[..., None] = torch.cuda.set_rng_state if device.type == "cuda" else torch.set_rng_state
    setter(state, device) if device.type == "cuda" else setter(state)
