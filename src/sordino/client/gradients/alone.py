"""One record at a time: how a site computes losses and gradients.

A batch's kernels round a record's numbers differently when its neighbours, its place or the size of the batch change,
and with weights that a server chose such differences grow to thousands. Here every record goes through the model by
itself, in tensors of the same shapes, on one thread: what it contributes is a function of the weights and of that
record alone, bit for bit. Records cannot see each other either, whatever the model does with its batch.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sordino.client.gradients.layout import layout_of, load
from sordino.client.gradients.losses import Loss

Parameters = list[nn.Parameter]


class Graded(NamedTuple):
    """One record: its loss, and its gradient over all trainable parameters, ``[d]``."""

    loss: float
    gradient: Tensor


class _Copy:
    """A thread's own copy of the model, and which weights it has now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model)
        self.parameters = [one for one in self.model.parameters() if one.requires_grad]
        self.buffers = [(one, one.clone()) for one in self.model.buffers()]
        self.ticket: object = None


class Alone:
    """Gradients and losses of single records.

    Guarantees
    ----------
    A record's loss and gradient depend on the weights and on that record alone, bit for bit: not on the batch it was
    drawn in, its place there, its neighbours or the number of threads. What a model writes into its buffers is undone
    before the next record.
    """

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        self._model, self._loss = copy.deepcopy(model), loss
        self._slots = layout_of(model)
        self._own = threading.local()

    def under(self, weights: Tensor) -> tuple[Callable[[Tensor, Tensor], Graded], Callable[[Tensor, Tensor], float]]:
        """Two functions of a record (x, y) under these weights, ``[d]``: its loss and gradient, and its loss only."""
        flat, ticket = weights.detach().clone(), object()

        def ready() -> _Copy:
            own: _Copy | None = getattr(self._own, "copy", None)
            if own is None:
                own = self._own.copy = _Copy(self._model)
            if own.ticket is not ticket:
                load(own.model, self._slots, flat)
                own.ticket = ticket
            for buffer, before in own.buffers:
                buffer.copy_(before)
            return own

        def grade(x: Tensor, y: Tensor) -> Graded:
            own = ready()
            with torch.enable_grad():
                loss = self._value(own.model, x, y)
            found = torch.autograd.grad(loss, own.parameters, allow_unused=True, materialize_grads=True)
            return Graded(float(loss.detach()), torch.cat([one.reshape(-1) for one in found]))

        def only_loss(x: Tensor, y: Tensor) -> float:
            own = ready()
            with torch.no_grad():
                return float(self._value(own.model, x, y))

        return grade, only_loss

    def _value(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """The loss of one record, in a batch of its own. Copies lie where every other record's lay: aligned alike."""
        return self._loss.values(model(x.clone().unsqueeze(0)), y.clone().unsqueeze(0)).squeeze(0)
