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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sordino.client.gradients.apart import Maker, Space, Unserved, stages_of
from sordino.client.gradients.chain import Chain
from sordino.client.gradients.losses import Loss
from sordino.client.gradients.types import Trainable, inputs_of, mean_of_copies
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


Grade = Callable[[Tensor, Tensor], Singles]
"""Computes the losses and gradients of records ``x[n, …]``, ``y[n]``."""


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
    is valid until its next call. With ``copies`` above 1 a record is ``x[copies, …]`` and its loss their mean, as in
    ``Engine.copies``; no other record's copies are near.
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

        def grade(x: Tensor, y: Tensor) -> Singles:
            try:
                return apart(x, y) if self._stages is not None else singly(x, y)
            except Unserved:
                self._stages = None
                return singly(x, y)

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
            with torch.set_grad_enabled(gradients):  # copies lie where every other record's lay: aligned alike
                inputs, labels = inputs_of(x.clone()[None], y.clone()[None], self.copies)
                loss = mean_of_copies(self._loss.values(own.model(inputs), labels), self.copies).squeeze(0)
            if gradients:
                found = torch.autograd.grad(loss, own.parameters, allow_unused=True, materialize_grads=True)
                torch.cat([each.reshape(-1) for each in found], out=out)
            return float(loss.detach())

        def grade(x: Tensor, y: Tensor) -> Singles:
            out = flat.new_zeros(len(y), len(flat) if gradients else 0)
            losses, troubles = [], []
            for k in range(len(y)):
                try:
                    losses.append(one(x[k], y[k], out[k]))
                except Exception as error:  # it contributes nothing, and nobody can tell (R10)
                    losses.append(math.nan)
                    troubles.append(f"{type(error).__name__}: {error}")
            return Singles(losses, out, troubles)

        return grade

    def _apart(self, makers: list[Maker], first: int, flat: Tensor, gradients: bool) -> Grade:
        chain = Chain(tuple(make(flat) for make in makers), first)

        def grade(x: Tensor, y: Tensor) -> Singles:
            space: Space | None = getattr(self._own, "space", None)
            if space is None:
                space = self._own.space = Space()
            inputs, labels = inputs_of(x, y, self.copies)
            with torch.no_grad():
                x, ways = chain.forward(inputs, space)
                outputs = space.in_lanes("outputs", x)
                slopes = torch.zeros_like(outputs)
                losses = self._means(self._loss.each(outputs, labels, slopes))
                if not gradients:
                    return Singles(losses, flat[:0], [])
                space.grads = space.lanes("gradients", len(labels), (self.dimension,))
                chain.backward(slopes, ways)
                return Singles(losses, self._mean_gradients(space), [])

        return grade

    def _means(self, losses: list[float]) -> list[float]:
        """The mean loss of every record's copies."""
        if self.copies == 1:
            return losses
        return [sum(losses[k : k + self.copies]) / self.copies for k in range(0, len(losses), self.copies)]

    def _mean_gradients(self, space: Space) -> Tensor:
        """The mean gradient of every record's copies, one copy after the other: number by number, bit for bit."""
        if self.copies == 1:
            return space.grads
        each = space.grads.unflatten(0, (-1, self.copies))
        total = space.lanes("means", len(each), (self.dimension,)).copy_(each[:, 0])
        for place in range(1, self.copies):
            total += each[:, place]
        return total.div_(self.copies)
