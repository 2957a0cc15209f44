"""The fast engine: the model runs unchanged, its trainable layers record per-record gradients on a tape."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.layout import dimension_of, flatten, layout_of, load
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.rules import refuse_reuse
from sordino.client.gradients.segments import Segments
from sordino.client.gradients.shadow import shadow_of
from sordino.client.gradients.tape import Batch, Layer, Recorded, Sums, Tape, Workspace
from sordino.client.gradients.threads import spread, workers
from sordino.client.gradients.types import Graded, LayerPlan, Slot, evaluating

BLOCK_BYTES = 8 * 2**20
SMALLEST_BLOCK = 16
WEIGHT_READS = 2
Window = tuple[Tensor, int, int]
T = TypeVar("T")


class _Own(threading.local):
    """What every thread has for itself: buffers, the pass under way, and how many batches it has graded."""

    def __init__(self) -> None:
        self.held = Workspace()
        self.scratch = Workspace()
        self.tape: Tape | None = None
        self.calls = 0


class Fast:
    """One forward pass, one backward pass for activations, and per layer the cheapest way to norms and sums.

    On a CPU a model with convolutions passes over a batch in blocks of records with common weights whose activations
    fit the cache, as many blocks at once as torch has threads; elsewhere rows are stacked. An engine may be used from
    several threads: each has buffers of its own.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._slots = layout_of(model)
        self._loss = loss
        self.module, self._layers = shadow_of(model, self._slots, self._run_layer)
        self._convolves = any(isinstance(layer, ConvLayer) for layer in self._layers)
        self._draws = any(isinstance(module, _DropoutNd) for module in model.modules())
        self._own = _Own()
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
        graded = self._grade(self._windows(params, segments), x.flatten(0, 1), y.flatten(0, 1), segments)
        return graded.masked(mask).shaped(y.shape[:2])

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        segments = Segments.ragged(rows_of, rows)
        return self._grade(self._blocks(params, 0, segments.records), x, y, segments)

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        segments = Segments.regular(y.shape[0], y.shape[1])
        flat_x, flat_y = x.flatten(0, 1), y.flatten(0, 1)
        out = torch.zeros(segments.records, dtype=params.dtype, device=params.device)

        def one(window: Window) -> None:
            _, start, stop = window
            out[start:stop] = self._loss(self._evaluated(window, flat_x), flat_y[start:stop])

        self._each(one, self._windows(params, segments))
        out = out.view(y.shape)
        return out if mask is None else torch.where(mask, out, torch.zeros_like(out))

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation."""
        # Only dropout asks for the mode; a switch would disturb other threads that use this engine.
        with evaluating(self.module) if self._draws else nullcontext():
            return torch.cat(self._each(lambda window: self._evaluated(window, x), self._blocks(flat, 0, x.shape[0])))

    def _evaluated(self, window: Window, x: Tensor) -> Tensor:
        weights, start, stop = window
        with torch.no_grad():
            return self._run(Tape(weights, Batch(x, self._own.held), (start, stop), self._own.scratch), x[start:stop])

    def _each(self, work: Callable[[Window], T], windows: list[Window]) -> list[T]:
        """Work on every window; one after the other where the model draws random numbers or runs on a GPU."""
        if self._draws or not windows or windows[0][0].device.type != "cpu":
            return [work(window) for window in windows]
        return spread(work, windows)

    def _windows(self, params: Tensor, segments: Segments) -> list[Window]:
        """Passes over rows with weights of their own."""
        if segments.rows > 1 and not (self._convolves and params.device.type == "cpu"):
            return [(params, 0, segments.records)]
        blocks = [each for row, a, b in segments.pieces() for each in self._blocks(params[row], a, b)]
        return blocks or [(params[0], 0, 0)]

    def _blocks(self, weights: Tensor, start: int, stop: int) -> list[Window]:
        """Passes over records with common weights: equal blocks whose activations stay in the cache."""
        records = stop - start
        if records == 0 or weights.device.type != "cpu" or not self._convolves:
            return [(weights, start, stop)]
        cached = BLOCK_BYTES // weights.element_size()
        # Every pass reads all weights: a block should put out more than that.
        least = max(SMALLEST_BLOCK, WEIGHT_READS * self.dimension // max(1, self._volume))
        most = max(least, cached // max(1, self._volume))
        passes = max(1, -(-records // most), min(workers(), records // least))
        size = -(-records // passes)
        return [(weights, a, min(stop, a + size)) for a in range(start, stop, size)]

    def _run_layer(self, layer: Layer, x: Tensor) -> Tensor:
        tape = self._own.tape
        if tape is None:
            raise RuntimeError("a recorded layer ran outside its engine")
        if not torch.is_grad_enabled():
            return layer.forward(x, tape)[0]
        out: Tensor = Recorded.apply(x, self._anchor, layer, tape)  # type: ignore[no-untyped-call]
        return out

    def _run(self, tape: Tape, x: Tensor) -> Tensor:
        if x.dim() == 4 and x.device.type == "cpu":
            x = x.contiguous(memory_format=torch.channels_last)
        self._own.tape = tape
        try:
            out: Tensor = self.module(x)
        finally:
            self._own.tape = None
        return out

    def _grade(self, windows: list[Window], x: Tensor, y: Tensor, segments: Segments) -> Graded:
        own = self._own
        own.calls += 1
        ticket = own.calls
        losses = torch.zeros(segments.records, dtype=windows[0][0].dtype, device=x.device)
        batch = Batch(torch.zeros_like(losses), own.held)

        def one(window: Window) -> None:
            weights, start, stop = window
            tape = Tape(weights, batch, (start, stop), self._own.scratch)
            with torch.enable_grad():
                each = self._loss(self._run(tape, x[start:stop]), y[start:stop])
                torch.autograd.grad(each.sum(), self._anchor, allow_unused=True)
            losses[start:stop] = each.detach()
            self._volume = self._volume or tape.volume // (stop - start)
            refuse_reuse(tape.used)

        if segments.records:
            self._each(one, windows)
        return Graded.of(
            losses,
            batch.squares,
            self._puller(batch, torch.isfinite(losses) & torch.isfinite(batch.squares), segments),
            (segments.rows, self.dimension),
            lambda: ticket == own.calls,
        )

    def _puller(self, batch: Batch, finite: Tensor, segments: Segments) -> Callable[[Tensor, Tensor], None]:
        held = batch.held
        # On a CPU the question is free; on a GPU asking would wait for the device, so everything is scrubbed.
        scrub = finite.device.type != "cpu" or not bool(finite.all())

        def pull_rows(factors: Tensor, out: Tensor, some: Segments, records: slice) -> None:
            for layer in self._layers:
                if layer.name in held:
                    own = {key: each[records] for key, each in held[layer.name].items()}
                    if scrub:
                        own = {key: _scrubbed(each, finite[records]) for key, each in own.items()}
                    layer.pull(factors[records], own, some, Sums(out))

        def pull(factors: Tensor, out: Tensor) -> None:
            if len(held) < len(self._layers):
                out.zero_()
            parts = segments.split(workers() if out.device.type == "cpu" else 1)
            spread(lambda part: pull_rows(factors, out[part[0]], part[1], part[2]), parts)

        return pull


def _scrubbed(values: Tensor, finite: Tensor) -> Tensor:
    return values.masked_fill(~finite.view(-1, *[1] * (values.dim() - 1)), 0)
