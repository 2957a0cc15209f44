"""Which engine serves a model, and the proof that the fast one serves it rightly."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sordino.client.gradients.exact import Exact
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import Loss, loss_by_name
from sordino.client.gradients.rules import Unsupported
from sordino.client.gradients.types import Engine, Graded, LayerPlan, Slot, evaluating
from sordino.errors import BadInput
from sordino.models import refuse_batch_statistics, refuse_tied_weights

AGREEMENT = 1e-3  # float32 rounding of deep networks stays far below, a wrong gradient far above


def build(model: nn.Module, loss: str, kind: str = "auto", shape: tuple[int, ...] | None = None) -> Engine:
    """An engine for a model and a loss.

    Parameters
    ----------
    model
        Copied; the engine never touches its parameters except in ``load``.
    loss
        ``"cross-entropy"`` or ``"half-squared-error"``.
    kind
        ``"auto"`` takes *fast* where every trainable layer has a rule and both engines agree on a first pair of
        records, else *exact*; or one of them by name.
    shape
        Shape of one record, to compare the engines now rather than at the first call; ``describe`` is then final.

    Guarantees
    ----------
    A fast engine whose losses, norms or sums differ from the exact engine's is never used.
    """
    per_record = loss_by_name(loss)
    refuse_batch_statistics(model)
    refuse_tied_weights(model)
    if kind not in {"auto", "fast", "exact"}:
        raise BadInput(f"unknown gradient engine '{kind}'; choose auto, fast or exact")
    if kind == "exact":
        return Exact(model, per_record, "asked for")
    try:
        engine = Checked(Fast(model, per_record), model, per_record, fallback=kind == "auto")
    except Unsupported as reason:
        if kind == "fast":
            raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'") from reason
        return Exact(model, per_record, str(reason))
    if shape is not None:
        example = next(model.parameters())
        labels = torch.zeros(2, dtype=torch.long if loss == "cross-entropy" else example.dtype)
        engine.settle(engine.flatten(model), torch.zeros(2, *shape, dtype=example.dtype), labels)
    return engine


@dataclass
class Checked:
    """The fast engine, compared with the exact one before it is used; the exact one where they differ."""

    engine: Fast | Exact
    model: nn.Module
    loss: Loss
    fallback: bool
    settled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def module(self) -> nn.Module:
        """The engine's own copy of the model."""
        return self.engine.module

    @property
    def dimension(self) -> int:
        """Number of trainable parameters, d."""
        return self.engine.dimension

    @property
    def layout(self) -> list[Slot]:
        """Name, shape and offset of every trainable tensor."""
        return self.engine.layout

    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""
        return self.engine.describe()

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector."""
        return self.engine.flatten(model)

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Write a vector into a model's trainable parameters."""
        self.engine.load(model, flat)

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        if not self.settled and y.numel():
            self.settle(params[0], x[0], y[0])
        return self.engine(params, x, y, mask)

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        if not self.settled and y.numel():
            self.settle(params, x, y)
        return self.engine.shared(params, x, y, rows_of, rows)

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        if not self.settled and y.numel():
            self.settle(params[0], x[0], y[0])
        return self.engine.losses(params, x, y, mask)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation: those of a settled engine, else of the model as it was written."""
        if self.settled:
            return self.engine.predict(flat, x)
        return Exact(self.model, self.loss, "before the first batch").predict(flat, x)

    def settle(self, params: Tensor, x: Tensor, y: Tensor) -> None:
        """Compare both engines on two records like ``x``; take the exact one, or refuse, where they differ."""
        with self._lock:
            if self.settled:
                return
            exact = Exact(self.model, self.loss, "the fast engine's reference")
            reason = disagreement(self.engine, exact, params, x, y)
            if reason and not self.fallback:
                raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'")
            if reason:
                self.engine = Exact(self.model, self.loss, reason)
            self.settled = True


def disagreement(engine: Engine, exact: Engine, params: Tensor, x: Tensor, y: Tensor) -> str | None:
    """Why an engine must not be used for records like these, or None.

    Records are drawn at random where they are numbers, so that no value of a client's decides; both models are in
    evaluation mode, so that dropout does not blur the comparison.
    """
    records = _two(x)
    labels = y[:1].expand(2, *y.shape[1:])
    factors = torch.tensor([1.0, 0.5], dtype=params.dtype, device=params.device)
    rows_of = torch.zeros(2, dtype=torch.long)
    pairs: list[list[Tensor]] = []
    try:
        for each in (engine, exact):
            with evaluating(each.module):
                graded = each.shared(params, records, labels, rows_of, 1)
                pairs.append([graded.losses, graded.norms, graded.pull(factors)])
    except Unsupported as reason:
        return str(reason)
    for name, one, other in zip(("losses", "norms", "sums"), *pairs):
        gap = (one - other).norm()
        if not bool(gap <= AGREEMENT * other.norm() + torch.finfo(params.dtype).tiny):
            return f"its {name} differ from the exact engine's by {float(gap / other.norm()):.1e}"
    return None


def _two(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x[:1].expand(2, *x.shape[1:])
    generator = torch.Generator().manual_seed(0)
    return torch.randn((2, *x.shape[1:]), generator=generator, dtype=x.dtype).to(x.device)
