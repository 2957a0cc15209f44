"""Which engine serves a model, and the proof that the fast one serves it rightly."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sordino.client.gradients import fused
from sordino.client.gradients.exact import Exact
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.layout import layout_of, view_of
from sordino.client.gradients.losses import Loss, loss_by_name
from sordino.client.gradients.rules import Unsupported
from sordino.client.gradients.types import Engine, Graded, LayerPlan, Slot, evaluating, precise
from sordino.errors import BadInput
from sordino.models import refuse_batch_statistics, refuse_tied_weights, why_not_isolated

# Float32 rounding stays below, a wrong rule far above; an activation that changes sides turns a sum without changing
# its length.
AGREEMENT = {"losses": 1e-4, "norms": 1e-4, "sums": 1e-2}


def build(
    model: nn.Module, loss: str, kind: str = "auto", shape: tuple[int, ...] | None = None, mixed: bool = False
) -> Engine:
    """An engine for a model and a loss.

    Parameters
    ----------
    model
        Copied; the engine never touches its parameters except in ``load``.
    loss
        ``"cross-entropy"`` or ``"half-squared-error"``.
    kind
        ``"auto"`` takes *fast* where every module is known to treat records one by one, every trainable layer has a
        rule and plain autograd agrees with it on a first pair of records, else *exact*, which gives the model one
        record at a time; or one of them by name.
    shape
        Shape of one record, to compare now rather than at the first call; ``describe`` is then final.
    mixed
        Let a GPU compute activations in TF32 (a tenth of a percent), never gradients of parameters and norms: what is
        summed is still clipped by its own exact norm.

    Guarantees
    ----------
    A record's loss and gradient depend on that record alone: a batch goes through known modules only. A fast engine
    whose losses, norms or sums differ from plain autograd's, record by record, is never used.
    """
    per_record = loss_by_name(loss)
    refuse_batch_statistics(model)
    refuse_tied_weights(model)
    if kind not in {"auto", "fast", "exact"}:
        raise BadInput(f"unknown gradient engine '{kind}'; choose auto, fast or exact")
    if kind == "exact":
        return Exact(model, per_record, "asked for")
    mixing = why_not_isolated(model)
    if mixing is not None and kind == "auto":
        return Exact(model, per_record, mixing)
    try:
        if mixing is not None:
            raise Unsupported(mixing)
        engine = Checked(Fast(model, per_record, mixed=mixed), model, per_record, fallback=kind == "auto")
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
    """The fast engine, compared with plain autograd before it is used; the exact one where they differ."""

    engine: Fast | Exact
    model: nn.Module
    loss: Loss
    fallback: bool
    settled: frozenset[str] = frozenset()
    """On which kinds of device the comparison was made: kernels differ from one to the other."""

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

    @property
    def bytes_per_record(self) -> int:
        """Memory a record takes until its batch is pulled."""
        return self.engine.bytes_per_record

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
        if y.device.type not in self.settled and y.numel():
            self.settle(params[0], x[0], y[0])
        return self.engine(params, x, y, mask)

    def shared(self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        if y.device.type not in self.settled and y.numel():
            self.settle(params, x, y)
        return self.engine.shared(params, x, y, rows_of, rows)

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        if y.device.type not in self.settled and y.numel():
            self.settle(params[0], x[0], y[0])
        return self.engine.losses(params, x, y, mask)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation: those of a settled engine, else of the model as it was written."""
        if self.settled:
            return self.engine.predict(flat, x)
        return Exact(self.model, self.loss, "before the first batch").predict(flat, x)

    def settle(self, params: Tensor, x: Tensor, y: Tensor) -> None:
        """Compare with plain autograd on two records like ``x``; take the exact engine, or refuse, on a difference."""
        # Under weights that are not finite nothing can be compared, and no record contributes anyway.
        kind = y.device.type
        if kind in self.settled or not bool(params.isfinite().all()):
            return
        records, labels = _two_like(x, y, 0)
        model = self.model if kind == "cpu" else copy.deepcopy(self.model).to(y.device)
        allowed, self.engine.mixed = self.engine.mixed, False
        reason = disagreement(self.engine, model, self.loss, params, records, labels)
        if reason and kind != "cpu":
            # Float64 has no kernels of its own to compare; other records have other edges.
            records, labels = _two_like(x, y, 1)
            reason = disagreement(self.engine, model, self.loss, params, records, labels)
        if reason and isinstance(self.engine, Fast) and fused.serves(records):
            without = Fast(self.model, self.loss)
            with fused.set_aside():
                still = disagreement(without, model, self.loss, params, records, labels)
            if still is None:  # it is the kernels and not the model
                fused.refuse(reason)
                self.engine, reason = without, None
        if reason and kind == "cpu":
            # An activation on the edge may change sides by rounding; in float64 none does.
            wide = copy.deepcopy(self.model).double()
            floats = [each.double() if each.is_floating_point() else each for each in (params, records, labels)]
            reason = disagreement(Fast(wide, self.loss), wide, self.loss, *floats)
        if reason and not self.fallback:
            raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'")
        if reason:
            self.engine = Exact(self.model, self.loss, reason)
        self.settled |= {kind}
        self.engine.mixed = allowed


def disagreement(engine: Engine, model: nn.Module, loss: Loss, params: Tensor, x: Tensor, y: Tensor) -> str | None:
    """Why an engine must not serve a model on records like these, or None.

    Both sides run in evaluation mode, so that dropout does not blur the comparison.
    """
    try:
        with evaluating(engine.module), evaluating(model), precise():
            if x.device.type == "cpu":
                graded = engine.shared(params, x, y, torch.zeros(len(y), dtype=torch.long), 1)
            else:  # where rows are stacked
                graded = engine(params.expand(len(y), -1), x.unsqueeze(1), y.unsqueeze(1))
            total = graded.pull(torch.ones_like(graded.norms)).sum(0)
            losses, norms, sums = plain_sums(model, loss, params, x, y)
    except Unsupported as reason:
        return str(reason)
    except Exception as error:  # whatever a model or a compiler of kernels raises
        why = str(error) or type(error).__name__
        return f"it could not be compared with plain autograd: {why.splitlines()[0]}"
    gaps = {"losses": _gap(graded.losses.flatten(), losses), "norms": _gap(graded.norms.flatten(), norms)}
    apart = torch.stack(
        [(total[slot.offset : slot.offset + slot.size] - sums[slot.name]).norm() for slot in engine.layout]
    )
    size = torch.stack([each.norm() for each in sums.values()]).norm()
    gaps["sums"] = float(apart.norm() / size.clamp_min(torch.finfo(size.dtype).tiny))
    for name, gap in gaps.items():
        if not gap <= AGREEMENT[name]:
            return f"its {name} differ from plain autograd's by {gap:.1e}"
    return None


def _gap(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny))


def plain_sums(
    model: nn.Module, loss: Loss, params: Tensor, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses ``[n]``, gradient norms ``[n]`` and the sum of gradients of every slot, flat, one record at a time."""
    slots = layout_of(model)
    named = {slot.name: view_of(params, slot).detach().requires_grad_(True) for slot in slots}
    losses, norms, sums = [], [], {slot.name: params.new_zeros(slot.size) for slot in slots}
    for record, label in zip(x, y):
        with torch.enable_grad():
            value = loss.values(functional_call(model, named, (record.unsqueeze(0),)), label.unsqueeze(0)).squeeze(0)
        grads = torch.autograd.grad(value, list(named.values()), allow_unused=True, materialize_grads=True)
        losses.append(value.detach())
        parts = [torch.linalg.vector_norm(grad, dtype=torch.float64) for grad in grads]
        norms.append(torch.stack(parts).norm().to(value.dtype))
        for name, grad in zip(named, grads):
            sums[name] += grad.reshape(-1)
    return torch.stack(losses), torch.stack(norms), sums


def _two_like(x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two records at random where they are numbers, else of zeros: no client's values decide which engine is taken."""
    labels = torch.zeros_like(y[:1]).expand(2, *y.shape[1:])
    if not x.is_floating_point():
        return torch.zeros_like(x[:1]).expand(2, *x.shape[1:]), labels
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((2, *x.shape[1:]), generator=generator, dtype=x.dtype).to(x.device), labels
