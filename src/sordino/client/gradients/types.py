"""What goes into and comes out of a gradient engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from sordino.errors import SordinoError


class Slot(NamedTuple):
    """Where one trainable tensor lies in a flat row of parameters."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return torch.Size(self.shape).numel()


class LayerPlan(NamedTuple):
    """How one layer's gradients are computed, and why."""

    layer: str
    kind: str
    method: str
    reason: str


@dataclass
class Graded:
    """Losses and gradient norms of every record, and the way to their weighted gradient sum.

    Attributes
    ----------
    losses
        ℓ_j of every record, ``[rows, b]`` (``[n]`` from :meth:`Engine.shared`); 0 for masked records, as computed
        (possibly NaN) for others.
    norms
        ‖g_j‖ over all trainable parameters, same shape; 0 for masked records, inf for a record whose loss or
        gradient is not finite.

    Guarantees
    ----------
    ``pull(a)`` is Σ_j a_j g_j over the records of each row with finite loss and gradient, unmasked; any other record
    contributes exactly zero whatever its factor, so that it can neither poison nor steer a row.
    """

    losses: Tensor
    norms: Tensor
    _pull: Callable[[Tensor, Tensor], None]
    _shape: tuple[int, int]
    _is_current: Callable[[], bool]

    @staticmethod
    def of(
        losses: Tensor,
        squares: Tensor,
        finite: Tensor,
        pull: Callable[[Tensor, Tensor], None],
        shape: tuple[int, int],
        is_current: Callable[[], bool] = lambda: True,
    ) -> Graded:
        """From losses, squared norms and finiteness ``[n]``, and what writes the weighted sum of finite records."""
        return Graded(losses, squares.sqrt().masked_fill_(~finite, torch.inf), pull, shape, is_current)

    def masked(self, mask: Tensor | None) -> Graded:
        """The same with padding's loss and norm at 0."""
        if mask is not None:
            padding = ~mask.reshape(self.losses.shape)
            self.losses = self.losses.masked_fill(padding, 0)
            self.norms = self.norms.masked_fill(padding, 0)
        return self

    def shaped(self, shape: tuple[int, ...]) -> Graded:
        """The same with losses and norms in that shape."""
        self.losses, self.norms = self.losses.view(shape), self.norms.view(shape)
        return self

    def pull(self, factors: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ_j factors_j · g_j for every row, ``[rows, d]``; written into ``out`` when given.

        A graded batch is valid until its engine's next call, because large buffers are reused.
        """
        if not self._is_current():
            raise SordinoError("this graded batch is stale: pull before calling its engine again")
        if out is None:
            out = torch.empty(self._shape, dtype=self.norms.dtype, device=self.norms.device)
        with torch.no_grad():
            usable = torch.isfinite(self.norms) & (self.norms > 0)
            self._pull(torch.where(usable, factors, torch.zeros_like(self.norms)).reshape(-1), out)
        return out


class Engine(Protocol):
    """Per-record gradients of one model under one loss. Parameters are rows of a flat ``[rows, d]`` matrix."""

    @property
    def module(self) -> nn.Module:
        """The engine's own copy of the model; its weights mean nothing."""

    @property
    def dimension(self) -> int:
        """Number of trainable parameters, d."""

    @property
    def layout(self) -> list[Slot]:
        """Name, shape and offset of every trainable tensor, in the model's order."""

    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector ``[d]``, copied."""

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a vector ``[d]`` into a model's trainable parameters."""

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade ``x[rows, b, …]``, ``y[rows, b]`` under ``params[rows, d]``; False in ``mask[rows, b]`` is padding."""

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch ``x[n, …]`` under one ``params[d]``; ``rows_of[n]``, sorted, is each record's row."""

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses ``[rows, b]`` only; 0 for masked records."""

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model with parameters ``flat[d]`` for ``x[n, …]``, in evaluation mode."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """The module in evaluation mode, and back."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
