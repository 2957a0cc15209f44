"""One record at a time: how a site computes losses and gradients.

A batch's kernels round a record's numbers differently when its neighbours, its place or the size of the batch change,
and with weights that a server chose such differences grow to thousands. Here what a record contributes is a function
of the weights and of that record alone, bit for bit: either it goes through the model by itself, in tensors of the same
shapes, on one thread; or, in chains of simple layers, a few records go side by side through operations that keep them
apart (:mod:`apart`). Records cannot see each other either, whatever the model does with its batch.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sordino.client.gradients.apart import Maker, Space, Unserved, stages_of
from sordino.client.gradients.chain import Chain
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.types import Flat, Trainable
from sordino.errors import BadInput

BLOCK, BYTES = 32, 1 << 22
"""Records that go side by side: enough to share what a call costs, few enough that all stays in the cache."""


class Singles(NamedTuple):
    """Losses and gradients of some records, each computed by itself.

    A loss is NaN where a record raised an error; ``troubles`` says what was raised. Gradients ``[n, d]`` mean nothing
    where only losses were asked for, or where a loss is not finite.
    """

    losses: list[float]
    gradients: Tensor
    troubles: list[str]


class Grade(Protocol):
    """Computes the losses and gradients of records ``x[n, …]``, ``y[n]``; of units, whose real inputs a mask names."""

    def __call__(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Singles:
        """Of every record its loss and gradient, as if it were alone."""


class _Copy:
    """A thread's own copy of the model, and which weights it has now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.buffers = [(one, one.clone()) for one in self.model.buffers()]
        self.ticket: object = None


class Alone(Trainable):
    """Gradients and losses of single records.

    Guarantees
    ----------
    A record's loss and gradient depend on the weights and on that record alone, bit for bit: not on the batch it was
    drawn in, its place there, its neighbours or the number of threads. What a model writes into its buffers is undone
    before the next record. Each thread that calls computes by itself (``privacy.threads.one_thread``), and what it gets
    is valid until its next call. With ``copies`` above 1 a record is a unit of up to so many inputs, and its loss the
    mean over the real ones, as in ``Engine.copies``; padding is never computed, and no other unit's inputs are near.
    """

    def __init__(self, model: nn.Module, loss: Loss, apart: bool = True, copies: int = 1) -> None:
        super().__init__(model)
        self.copies = copies
        self._model, self._loss = copy.deepcopy(model), loss
        self._stages = stages_of(self._model, self.layout) if apart else None
        self._own = threading.local()

    @property
    def block(self) -> int:
        """How many records to hand over at a time."""
        return 1 if self._stages is None else max(1, min(BLOCK, BYTES // (4 * self.dimension)) // self.copies)

    def check(self, shape: tuple[int, ...], classes: int | None) -> None:
        """Refuse a model that fails on a record of zeros: on a site's records nobody would be told."""
        weights, inner = self.flatten(self._model), nn.Embedding in {type(one) for one in self._model.modules()}
        whole = shape if self.copies == 1 else (self.copies, *shape)
        x = torch.zeros(1, *whole, dtype=torch.long if inner else weights.dtype)
        y = torch.zeros(1, dtype=weights.dtype if classes is None else torch.long)
        found = self._singly(weights, True)(x, y).troubles
        if found:
            raise BadInput(f"the model fails on a record of zeros: {found[0]}")

    def under(self, weights: Tensor, gradients: bool = True) -> Grade:
        """A function that grades records under these weights, ``[d]``, or gives their losses only."""
        flat = weights.detach().clone()
        singly = self._singly(flat, gradients)
        if self._stages is None or flat.dtype is not torch.float32:
            return singly
        apart = self._apart(*self._stages, flat, gradients)

        def grade(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Singles:
            try:
                return apart(x, y, mask) if self._stages is not None else singly(x, y, mask)
            except Unserved:
                self._stages = None
                return singly(x, y, mask)

        return grade

    def _singly(self, flat: Tensor, gradients: bool) -> Grade:
        ticket = object()

        def ready() -> _Copy:
            own: _Copy | None = getattr(self._own, "copy", None)
            if own is None:
                own = self._own.copy = _Copy(self._model)
            if own.ticket is not ticket:
                self.load(own.model, flat)
                own.ticket = ticket
            for buffer, before in own.buffers:
                buffer.copy_(before)
            return own

        def one(x: Tensor, y: Tensor, out: Tensor) -> float:
            own = ready()
            with torch.set_grad_enabled(gradients):
                loss = self._loss.values(own.model(x), y).mean()
            if gradients:
                found = torch.autograd.grad(loss, own.parameters, allow_unused=True, materialize_grads=True)
                torch.cat([each.reshape(-1) for each in found], out=out)
            return float(loss.detach())

        def grade(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Singles:
            out = flat.new_zeros(len(y), len(flat) if gradients else 0)
            losses, troubles = [], []
            for k, (inputs, labels) in enumerate(self._each(x, y, mask)):
                try:
                    losses.append(one(inputs, labels, out[k]) if len(labels) else math.nan)
                except Exception as error:  # it contributes nothing, and nobody can tell (R10)
                    losses.append(math.nan)
                    troubles.append(f"{type(error).__name__}: {error}")
            return Singles(losses, out, troubles)

        return grade

    def _each(self, x: Tensor, y: Tensor, mask: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Every record's real inputs and labels, copied to where every other record's lay: aligned alike."""
        batch = Flat.of(x, y, mask, self.copies, lead=1)
        for k in range(len(batch.y)):
            if self.copies == 1:
                yield batch.x[k].clone()[None], batch.y[k].clone()[None]
            else:
                real = slice(None) if batch.inputs is None else batch.inputs[k]
                yield batch.x[k][real].clone(), batch.y[k][real].clone()

    def _apart(self, makers: list[Maker], first: int, flat: Tensor, gradients: bool) -> Grade:
        chain = Chain(tuple(make(flat) for make in makers), first)

        def grade(x: Tensor, y: Tensor, mask: Tensor | None = None) -> Singles:
            space: Space | None = getattr(self._own, "space", None)
            if space is None:
                space = self._own.space = Space()
            batch = Flat.of(x, y, mask, self.copies, lead=1)
            inputs, labels, real = batch.part(0, len(batch.y), self.copies)
            counts = [labels.shape[0] // max(1, len(batch.y))] * len(batch.y)
            if real is not None:
                inputs, labels, counts = inputs[real.flatten()], labels[real.flatten()], real.sum(1).tolist()
            if not len(labels):
                return Singles([math.nan] * len(counts), flat.new_zeros(len(counts), len(flat)), [])
            with torch.no_grad():
                x, ways = chain.forward(inputs, space)
                outputs = space.in_lanes("outputs", x)
                slopes = torch.zeros_like(outputs)
                losses = _means(self._loss.each(outputs, labels, slopes), counts)
                if not gradients:
                    return Singles(losses, flat[:0], [])
                space.grads = space.lanes("gradients", len(labels), (self.dimension,))
                chain.backward(slopes, ways)
                return Singles(losses, self._mean_gradients(space, counts), [])

        return grade

    def _mean_gradients(self, space: Space, counts: list[int]) -> Tensor:
        """The mean gradient of every unit's inputs, one input after the other: number by number, bit for bit."""
        if self.copies == 1:
            return space.grads
        total = space.lanes("means", len(counts), (self.dimension,)).zero_()
        ends = list(accumulate(counts))
        for place in range(max(counts)):
            units = [k for k, count in enumerate(counts) if count > place]
            inputs = [ends[k] - counts[k] + place for k in units]
            total[units] = space.grads[inputs] if place == 0 else total[units] + space.grads[inputs]
        return total.div_(total.new_tensor(counts).clamp_(min=1)[:, None])


def _means(losses: list[float], counts: list[int]) -> list[float]:
    """The mean loss of every unit's inputs; NaN for one without any."""
    ends = accumulate(counts)
    return [sum(losses[end - n : end]) / n if n else math.nan for end, n in zip(ends, counts)]
