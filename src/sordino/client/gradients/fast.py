"""The fast engine: the model runs unchanged, its trainable layers record per-record gradients on a tape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.layout import dimension_of, flatten, layout_of, load
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.shadow import shadow_of
from sordino.client.gradients.tape import Layer, Recorded, Sums, Tape, Workspace
from sordino.client.gradients.types import Graded, LayerPlan, Slot

BLOCK_BYTES = 8 * 2**20
Window = tuple[Tensor, int, int]


class Fast:
    """One forward pass, one backward pass for activations, and per layer the cheapest way to norms and sums.

    On a CPU a batch passes in blocks of records whose activations fit the cache, and rows with weights of their own
    pass one after the other where the model has convolutions; else rows are stacked.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._slots = layout_of(model)
        self._loss = loss
        self._shadow, self._layers = shadow_of(model, self._slots, self._run_layer)
        self._convolves = any(isinstance(layer, ConvLayer) for layer in self._layers)
        self._tape: Tape | None = None
        self._workspace = Workspace()
        self._calls = 0
        self._volume = 0
        self._anchor = torch.zeros((), requires_grad=True)

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
        segments = Segments.regular(y.shape[0], y.shape[1])
        graded = self._grade(self._windows(params, segments), x.flatten(0, 1), y.flatten(0, 1), segments, mask)
        return graded

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        segments = Segments.ragged(rows_of, rows)
        graded = self._grade(self._blocks(params, 0, segments.records), x, y, segments, None)
        graded.losses, graded.norms = graded.losses.flatten(), graded.norms.flatten()
        return graded

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        segments = Segments.regular(y.shape[0], y.shape[1])
        out = params.new_zeros(segments.records)
        flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
        with torch.no_grad():
            for weights, start, stop in self._windows(params, segments):
                tape = Tape(weights, out, self._workspace, window=(start, stop))
                out[start:stop] = self._loss(self._run(tape, flat_x[start:stop]), flat_y[start:stop])
        out = out.view(y.shape)
        return out if mask is None else torch.where(mask, out, torch.zeros_like(out))

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation."""
        self._shadow.eval()
        try:
            with torch.no_grad():
                parts = [
                    self._run(Tape(weights, x, self._workspace, window=(a, b)), x[a:b])
                    for weights, a, b in self._blocks(flat, 0, max(1, x.shape[0]))
                ]
        finally:
            self._shadow.train()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _windows(self, params: Tensor, segments: Segments) -> list[Window]:
        """Passes over rows with weights of their own."""
        if segments.rows > 1 and not (self._convolves and params.device.type == "cpu"):
            return [(params, 0, segments.records)] if segments.records else []
        return [each for row, a, b in segments.pieces() for each in self._blocks(params[row], a, b)]

    def _blocks(self, weights: Tensor, start: int, stop: int) -> list[Window]:
        """Passes over records that share weights: equal blocks whose activations stay in the cache."""
        if weights.device.type != "cpu" or not self._convolves or not self._volume:
            return [(weights, start, stop)] if stop > start else []
        most = max(16, BLOCK_BYTES // (weights.element_size() * self._volume))
        passes = -(-(stop - start) // most)
        size = -(-(stop - start) // max(1, passes))
        return [(weights, a, min(stop, a + size)) for a in range(start, stop, max(1, size))]

    def _run_layer(self, layer: Layer, x: Tensor) -> Tensor:
        if self._tape is None:
            raise RuntimeError("a recorded layer ran outside its engine")
        if not torch.is_grad_enabled():
            return layer.forward(x, self._tape)[0]
        out: Tensor = Recorded.apply(x, self._anchor, layer, self._tape)  # type: ignore[no-untyped-call]
        return out

    def _run(self, tape: Tape, x: Tensor) -> Tensor:
        if x.dim() == 4 and x.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        self._tape = tape
        try:
            out: Tensor = self._shadow(x)
        finally:
            self._tape = None
        return out

    def _grade(
        self, windows: list[Window], x: Tensor, y: Tensor, segments: Segments, mask: Tensor | None
    ) -> Graded:
        self._calls += 1
        ticket = self._calls
        params = windows[0][0] if windows else x
        losses = torch.zeros(segments.records, dtype=params.dtype, device=x.device)
        squares = torch.zeros_like(losses)
        held: dict[str, dict[str, Tensor]] = {}
        for weights, start, stop in windows:
            tape = Tape(weights, squares, self._workspace, held, (start, stop))
            with torch.enable_grad():
                each = self._loss(self._run(tape, x[start:stop]), y[start:stop])
                torch.autograd.grad(each.sum(), self._anchor, allow_unused=True)
            losses[start:stop] = each.detach()
            self._volume = self._volume or tape.volume // (stop - start)
        finite = torch.isfinite(losses) & torch.isfinite(squares)
        norms = torch.where(finite, squares.sqrt_(), torch.full_like(squares, torch.inf))
        shape = (segments.rows, segments.width) if mask is not None or segments.width else (segments.records,)
        losses, norms = losses.view(shape), norms.view(shape)
        if mask is not None:
            losses = torch.where(mask, losses, torch.zeros_like(losses))
            norms = torch.where(mask, norms, torch.zeros_like(norms))
        puller = self._puller(held, finite, segments)
        return Graded(losses, norms, puller, (segments.rows, self.dimension), lambda: ticket == self._calls)

    def _puller(
        self, held: dict[str, dict[str, Tensor]], finite: Tensor, segments: Segments
    ) -> Callable[[Tensor, Tensor], None]:
        # On a CPU the question is free; on a GPU asking would wait for the device, so everything is scrubbed.
        scrub = finite.device.type != "cpu" or not bool(finite.all())

        def pull(factors: Tensor, out: Tensor) -> None:
            if len(held) < len(self._layers):
                out.zero_()
            sums = Sums(out)
            for layer in self._layers:
                if layer.name in held:
                    own = held[layer.name]
                    if scrub:
                        own = {key: _scrubbed(each, finite) for key, each in own.items()}
                    layer.pull(factors, own, segments, sums)

        return pull


def _scrubbed(values: Tensor, finite: Tensor) -> Tensor:
    return values.masked_fill(~finite.view(-1, *[1] * (values.dim() - 1)), 0)
