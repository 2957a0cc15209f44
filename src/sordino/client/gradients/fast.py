"""The fast engine: the model runs unchanged, its trainable layers record per-record gradients on a tape."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.client.gradients.layout import dimension_of, flatten, layout_of, load
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.rules import Recordable, layers_of
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.tape import Recorded, Tape
from sordino.client.gradients.types import Graded, LayerPlan, Slot


class Fast:
    """One forward pass, one backward pass for activations, and per layer the cheapest way to norms and sums.

    The model is copied; every trainable leaf of the copy runs through :class:`~.tape.Recorded` with weights taken
    from the flat parameters. The copy's own trainable weights become NaN views of one number: code that reads them
    past the leaf's ``forward`` cannot go unnoticed.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._slots = layout_of(model)
        self._loss = loss
        self._shadow = copy.deepcopy(model)
        self._layers: list[Recordable] = layers_of(self._shadow, self._slots)
        self._tape: Tape | None = None
        self._calls = 0
        self._anchor = torch.zeros((), requires_grad=True)
        for layer in self._layers:
            self._hook(layer)

    def _hook(self, layer: Recordable) -> None:
        module = self._shadow.get_submodule(layer.name)
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                hollow = torch.full((), torch.nan, dtype=parameter.dtype).expand(parameter.shape)
                setattr(module, name, nn.Parameter(hollow, requires_grad=False))

        def forward(x: Tensor) -> Tensor:
            if self._tape is None:
                raise RuntimeError("a recorded layer ran outside its engine")
            if not torch.is_grad_enabled():
                return layer.forward(x, self._tape)[0]
            out: Tensor = Recorded.apply(x, self._anchor, layer, self._tape)
            return out

        module.forward = forward  # type: ignore[method-assign]

    @property
    def dimension(self) -> int:
        """Number of trainable parameters, d."""
        return dimension_of(self._slots)

    @property
    def layout(self) -> list[Slot]:
        """Name, shape and offset of every trainable tensor."""
        return list(self._slots)

    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""
        return [layer.plan() for layer in self._layers]

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector."""
        return flatten(model, self._slots)

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a vector into a model's trainable parameters."""
        load(model, self._slots, flat)

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        rows, width = y.shape[:2]
        tape = Tape(params[0] if rows == 1 else params, Segments.regular(rows, width))
        return self._grade(tape, x.flatten(0, 1), y.flatten(0, 1), mask, (rows, width))

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        tape = Tape(params, Segments.ragged(rows_of, rows))
        return self._grade(tape, x, y, None, (tape.segments.records,))

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        rows, width = y.shape[:2]
        tape = Tape(params[0] if rows == 1 else params, Segments.regular(rows, width))
        with torch.no_grad():
            out = self._run(tape, x.flatten(0, 1), lambda outputs: self._loss(outputs, y.flatten(0, 1)))
        out = out.view(rows, width)
        return out if mask is None else torch.where(mask, out, torch.zeros_like(out))

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation."""
        self._shadow.eval()
        try:
            with torch.no_grad():
                return self._run(Tape(flat, Segments.regular(1, x.shape[0])), x, lambda outputs: outputs)
        finally:
            self._shadow.train()

    def _run(self, tape: Tape, x: Tensor, then: Callable[[Tensor], Tensor]) -> Tensor:
        if x.dim() == 4 and x.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        self._tape = tape
        try:
            return then(self._shadow(x))
        finally:
            self._tape = None

    def _grade(self, tape: Tape, x: Tensor, y: Tensor, mask: Tensor | None, shape: tuple[int, ...]) -> Graded:
        self._calls += 1
        if tape.segments.records == 0:
            empty = tape.params.new_zeros(shape)
            return self._graded(empty, empty.clone(), lambda _, out: out.zero_().sum(), tape)
        with torch.enable_grad():
            losses = self._run(tape, x, lambda outputs: self._loss(outputs, y))
            torch.autograd.grad(losses.sum(), self._anchor, allow_unused=True)
        losses = losses.detach()
        squares = torch.stack([entry.squares for entries in tape.entries.values() for entry in entries]).sum(0)
        finite = torch.isfinite(losses) & torch.isfinite(squares)
        norms = torch.where(finite, squares.sqrt(), torch.full_like(squares, torch.inf)).view(shape)
        losses = losses.view(shape)
        if mask is not None:
            losses = torch.where(mask, losses, torch.zeros_like(losses))
            norms = torch.where(mask, norms, torch.zeros_like(norms))
        return self._graded(losses, norms, self._puller(tape, finite), tape)

    def _graded(self, losses: Tensor, norms: Tensor, pull: Callable[[Tensor, Tensor], Any], tape: Tape) -> Graded:
        ticket = self._calls
        return Graded(losses, norms, pull, (tape.segments.rows, self.dimension), lambda: ticket == self._calls)

    def _puller(self, tape: Tape, finite: Tensor) -> Callable[[Tensor, Tensor], None]:
        # On a CPU the question is free; on a GPU asking would wait for the device, so everything is scrubbed.
        scrub = finite.device.type != "cpu" or not bool(finite.all())

        def pull(factors: Tensor, out: Tensor) -> None:
            if len(tape.entries) < len(self._layers):
                out.zero_()
            for entries in tape.entries.values():
                for index, entry in enumerate(entries):
                    held = [_scrubbed(each, finite) for each in entry.held] if scrub else entry.held
                    for slot, total in entry.pull(factors, held, tape.segments):
                        target = out[:, slot.offset : slot.offset + slot.size].view(total.shape)
                        if index:
                            target.add_(total)
                        else:
                            target.copy_(total)

        return pull


def _scrubbed(values: Tensor, finite: Tensor) -> Tensor:
    return values.masked_fill(~finite.view(-1, *[1] * (values.dim() - 1)), 0)
