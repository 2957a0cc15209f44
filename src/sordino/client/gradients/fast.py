"""The fast engine: the model runs unchanged, its trainable layers record per-record gradients on a tape."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sordino.client.gradients import fused
from sordino.client.gradients.chain import chain_of, shadow_of
from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.lengths import ROUNDING, VANISHES, Length
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.tape import Held, Layer, Segments, Tape, Taped, Workspace
from sordino.client.gradients.types import (
    Engine,
    Flat,
    Graded,
    LayerPlan,
    Pull,
    constant,
    evaluating,
    mean_of_inputs,
    only,
    precise,
    shares_of,
)

BLOCK_BYTES = 12 * 2**20
SMALLEST_BLOCK = 16
WEIGHT_READS = 2
ACTIVATIONS = 4  # a layer's output, its activation, their gradients
Window = tuple[Tensor, int, int]


class Fast(Engine):
    """One forward pass, one backward pass for activations, and per layer the cheapest way to norms and sums.

    A chain of modules goes back by its own stages, any other model by autograd.

    On a CPU a model with convolutions passes over a batch in blocks of records with common weights whose activations
    fit the cache; elsewhere rows are stacked (``stack`` overrides the choice). ``mixed`` lets a GPU compute the
    activations of stacked convolutions in TF32; gradients of parameters and norms never are. Buffers are reused from
    call to call, so an engine serves one thread.
    """

    def __init__(
        self, model: nn.Module, loss: Loss, stack: bool | None = None, mixed: bool = False, copies: int = 1
    ) -> None:
        super().__init__(model)
        self.copies = copies
        self.module, self._layers = shadow_of(model, self.layout, self._run_layer)
        self._loss, self._stack, self.mixed = loss, stack, mixed
        self._chain = chain_of(self.module, self._layers)
        self._convolves = any(isinstance(layer, ConvLayer) for layer in self._layers)
        self._held, self._scratch = Workspace(), Workspace()
        self._tape: Tape | None = None
        self._calls = 0
        self._volume = self._kept = 0
        self._anchor = torch.zeros((), requires_grad=True)

    @property
    def bytes_per_record(self) -> int:
        """What layers hold, and the activations with their gradients; before the first batch, a gradient's own size."""
        return self._kept or 4 * self.dimension

    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""
        return [layer.plan() for layer in self._layers]

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        return self._graded(params, x, y, mask)

    @property
    def lasts(self) -> bool:  # type: ignore[override]
        """Whether a batch reads nothing back: where the model is a chain, whose way back needs no autograd."""
        return self._chain is not None and self._stack is not False

    def lasting(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Graded:
        """Grade in buffers of its own."""
        before = self._held, self._scratch
        self._held, self._scratch = Workspace(), Workspace()
        try:
            return self._graded(params, x, y, mask)
        finally:
            self._held, self._scratch = before

    def _graded(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None) -> Graded:
        segments, flat = Segments.regular(y.shape[0], y.shape[1]), Flat.of(x, y, mask, self.copies)
        return self._grade(self._windows(params, segments, self._inner(flat)), flat, segments, y.shape[:2])

    def shared(
        self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int, mask: Tensor | None = None
    ) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        segments, flat = Segments.ragged(rows_of, rows), Flat.of(x, y, mask, self.copies, lead=1)
        blocks = self._blocks(params, 0, segments.records, self._inner(flat))
        return self._grade(blocks, flat, segments, y.shape[:1])

    def _inner(self, flat: Flat) -> int:
        """How many inputs a record has in this batch, padding included."""
        return 1 if self.copies == 1 else flat.y.shape[1]

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        segments, flat = Segments.regular(y.shape[0], y.shape[1]), Flat.of(x, y, mask, self.copies)
        inner = self._inner(flat)
        out = torch.zeros(segments.records, dtype=params.dtype, device=params.device)
        for window in self._windows(params, segments, inner):
            _, start, stop = window
            some_x, some_y, real = flat.part(start, stop, self.copies)
            tape = self._tape_of(window, segments.records, {}, flat.records, inner)
            each = self._loss.values(self._evaluated(tape, some_x), some_y)
            out[start:stop] = mean_of_inputs(each, inner, real)
        out = out.view(y.shape[:2])
        return out if flat.records is None else only(flat.records, out)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model in evaluation mode."""
        with evaluating(self.module):
            windows = self._blocks(flat, 0, len(x))
            return torch.cat([self._evaluated(self._tape_of(w, len(x), {}, None), x[w[1] : w[2]]) for w in windows])

    def _windows(self, params: Tensor, segments: Segments, inner: int) -> list[Window]:
        """Passes over rows with weights of their own."""
        stack = self._stack if self._stack is not None else not (self._convolves and params.device.type == "cpu")
        if segments.rows > 1 and stack:
            return [(params, 0, segments.records)]
        blocks = [each for row, a, b in segments.pieces for each in self._blocks(params[row], a, b, inner)]
        return blocks or [(params[0], 0, 0)]

    def _blocks(self, weights: Tensor, start: int, stop: int, inner: int = 1) -> list[Window]:
        """Passes over records with common weights: equal blocks whose activations stay in the cache.

        ``inner``: how many inputs a record has.
        """
        records = stop - start
        if records == 0 or weights.device.type != "cpu" or not self._convolves or not self._volume:
            return [(weights, start, stop)]
        # Every pass reads all weights, and puts them in the native kernels' order: a block should put out more.
        least = max(SMALLEST_BLOCK, WEIGHT_READS * self.dimension // self._volume)
        most = max(1, max(least, BLOCK_BYTES // (weights.element_size() * self._volume)) // inner)
        size = -(-records // -(-records // most))
        return [(weights, a, min(stop, a + size)) for a in range(start, stop, size)]

    def _run_layer(self, layer: Layer, x: Tensor) -> Tensor:
        tape = self._tape
        if tape is None:
            raise RuntimeError("a recorded layer ran outside its engine")
        if not torch.is_grad_enabled():
            return layer.forward(x, tape)[0]
        out: Tensor = Taped.apply(x, self._anchor, layer, tape)  # type: ignore[no-untyped-call]
        return out

    def _run(self, tape: Tape, x: Tensor) -> Tensor:
        self._tape = tape
        try:
            out: Tensor = self.module(_ordered(x))
        finally:
            self._tape = None
        return out

    def _tape_of(
        self, window: Window, records: int, held: dict[str, Held], mask: Tensor | None, copies: int = 1
    ) -> Tape:
        """A tape for one pass; of each row those records count that are before the last the mask lets through."""
        weights, start, stop = window
        if weights.dim() == 1 or mask is None:
            rows = 1 if weights.dim() == 1 else weights.shape[0]
            lengths = torch.full((rows,), (stop - start) // rows, dtype=torch.int32, device=weights.device)
        else:
            lengths = (mask * torch.arange(1, mask.shape[1] + 1, dtype=torch.int32, device=mask.device)).amax(1)
        inputs = lengths if copies == 1 else lengths * copies
        place = weights, (start, stop), records
        return Tape(*place, held, self._held, self._scratch, inputs, self.mixed, copies=copies)

    def _evaluated(self, tape: Tape, x: Tensor) -> Tensor:
        self._calls += 1  # what a graded batch holds may lie in the buffers that are written now
        with torch.no_grad(), precise(self.mixed):
            return self._run(tape, x)

    def _grade(self, windows: list[Window], flat: Flat, segments: Segments, shape: torch.Size) -> Graded:
        """Grade the batch, of which losses, norms and limits have that shape."""
        self._calls += 1
        ticket = self._calls
        inner = self._inner(flat)
        losses = [torch.zeros(0, dtype=windows[0][0].dtype, device=flat.x.device)]
        held: dict[str, Held] = {}
        tapes: list[Tape] = []
        for window in windows if segments.records else []:
            _, start, stop = window
            tapes.append(tape := self._tape_of(window, segments.records, held, flat.records, inner))
            losses.append(self._pass(tape, *flat.part(start, stop, self.copies)))
            self._volume = self._volume or tape.volume // ((stop - start) * inner)
        self._kept = self._kept or _bytes_per_record(held, segments.records, self._volume * inner)
        loss, sums, current = _joined(losses), (segments.rows, self.dimension), lambda: ticket == self._calls
        if len(tapes) == 1 and fused.serves(loss):
            *rows, usable = self._lengths_of(loss, tapes[0], flat.records)
            own = [each.view(shape) for each in rows]
            return Graded.of((own[0], own[1], own[2], usable), self._puller(held, usable, segments), sums, current)
        empty = losses[0].double()
        squares = [empty, *(_added(tape.squares) for tape in tapes)]
        excesses = [sum(tape.excesses, torch.zeros_like(each)) for tape, each in zip(tapes, squares[1:])]
        length = Length(_joined(squares), _joined([empty, *excesses]))
        finite = (loss + length.square).abs() < torch.inf  # squares are not negative: no infinity is cancelled
        graded = Graded(loss, length, finite, self._puller(held, finite, segments), sums, current)
        return graded.in_rows(shape, flat.records)

    def _lengths_of(self, loss: Tensor, tape: Tape, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same in one kernel: losses, norms, limits, and who is finite and unmasked."""
        squares = tape.squares
        if len(squares) > fused.GROUPS:
            squares = [*squares[: fused.GROUPS - 1], _added(squares[fused.GROUPS - 1 :])]
        excess = sum(tape.excesses[1:], tape.excesses[0]) if tape.excesses else None
        margins = (1 + ROUNDING, VANISHES * math.sqrt(self.dimension))
        more, floor = (constant(one, loss.device, torch.float64) for one in margins)
        return fused.lengths_of(loss, mask, squares, excess, more, floor)

    def _pass(self, tape: Tape, x: Tensor, y: Tensor, real: Tensor | None) -> Tensor:
        """Forward and back over one window's inputs: records' losses, everything else on the tape."""
        copies = tape.copies
        if self._chain is not None:
            with torch.no_grad(), precise(self.mixed):
                outputs, ways = self._chain.forward(_ordered(x), tape)
                losses, slopes = self._loss.graded(outputs, y)
                self._chain.backward(_shared_out(slopes, copies, real), ways)
                tape.join()
            return mean_of_inputs(losses, copies, real)
        with torch.enable_grad(), precise(self.mixed):
            losses = mean_of_inputs(self._loss.values(self._run(tape, x), y), copies, real)
            # Of the sum: where slopes are handed in, torch imports its symbolic shapes, which take 33 MB.
            torch.autograd.grad(losses.sum(), self._anchor, allow_unused=True)
        with torch.no_grad(), precise(self.mixed):
            tape.finish()
            tape.join()
        return losses.detach()

    def _puller(self, held: dict[str, Held], finite: Tensor, segments: Segments) -> Pull:
        # On a CPU the question is free; on a GPU asking would wait for the device, so everything is scrubbed.
        scrub = finite.device.type != "cpu" or not bool(finite.all())

        def scrubbed(values: Tensor) -> Tensor:
            return only(finite.view(-1, *[1] * (values.dim() - 1)), values)

        def pull(factors: Tensor, out: Tensor) -> None:
            if len(held) < len(self._layers):
                out.zero_()
            for layer in self._layers:
                own = held.get(layer.name)
                if own is not None:
                    if scrub:
                        spared = layer.skipped(own) if segments.skips(out) else set()
                        own = {key: each if key in spared else scrubbed(each) for key, each in own.items()}
                    layer.pull(factors, own, segments, out)

        return pull


def _shared_out(slopes: Tensor, copies: int, real: Tensor | None) -> Tensor:
    """The slopes of inputs' losses as those of their units' mean losses; exactly 0 for padding."""
    if real is None:
        return slopes if copies == 1 else slopes / copies
    tail = [1] * (slopes.dim() - 1)
    return only(real.reshape(-1, *tail), slopes * shares_of(real, slopes.dtype).reshape(-1, *tail))


def _bytes_per_record(held: dict[str, Held], records: int, volume: int) -> int:
    tensors = [each for own in held.values() for each in own.values()]
    if not tensors:
        return 0
    kept = sum(each.numel() * each.element_size() for each in tensors) // records
    return kept + ACTIVATIONS * volume * tensors[0].element_size()


def _added(parts: list[Tensor]) -> Tensor:
    """The sum of parts ``[n]`` or ``[n, …]``, over all but the records, in float64."""
    if all(part.dim() == 1 for part in parts):
        return torch.stack(parts).sum(0, dtype=torch.float64)
    return torch.cat([part.view(len(part), -1).double() for part in parts], 1).sum(1)


def _joined(windows: list[Tensor]) -> Tensor:
    return windows[1] if len(windows) == 2 else torch.cat(windows)


def _ordered(x: Tensor) -> Tensor:
    """Images with channels last on a CPU, where the native kernels are faster so."""
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 and x.device.type == "cpu" else x
