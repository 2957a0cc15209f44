"""Which engine serves a model, and the proof that the fast one serves it rightly."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sordino.client.gradients import fused
from sordino.client.gradients.alone import Alone
from sordino.client.gradients.exact import Exact
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.lengths import squared_norms
from sordino.client.gradients.losses import Loss, loss_by_name
from sordino.client.gradients.tape import Unsupported
from sordino.client.gradients.types import Engine, Graded, LayerPlan, any_algorithm, evaluating, precise
from sordino.errors import BadInput, SordinoError
from sordino.models import refuse_batch_statistics, why_not_isolated

# Float32 rounding stays below, a wrong rule far above; an activation that changes sides turns a sum without changing
# its length.
AGREEMENT = {"losses": 1e-4, "norms": 1e-4, "sums": 1e-2}


def build(
    model: nn.Module,
    loss: str,
    kind: str = "auto",
    shape: tuple[int, ...] | None = None,
    mixed: bool = False,
    copies: int = 1,
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
    copies
        How many inputs a record has at most, whose losses are averaged (``Engine.copies``).

    Guarantees
    ----------
    A record's loss and gradient depend on that record alone: a batch goes through known modules only. A fast engine
    whose losses, norms or sums differ from plain autograd's, record by record, is never used.
    """
    per_record = loss_by_name(loss)
    refuse_batch_statistics(model)
    if kind not in {"auto", "fast", "exact"}:
        raise BadInput(f"unknown gradient engine '{kind}'; choose auto, fast or exact")
    if kind == "exact":
        return Exact(model, per_record, "asked for", copies=copies)
    try:
        mixing = why_not_isolated(model)
        if mixing is not None:
            raise Unsupported(mixing)
        fast = Fast(model, per_record, mixed=mixed, copies=copies)
        engine = Checked(fast, model, per_record, fallback=kind == "auto")
    except Unsupported as reason:
        if kind == "fast":
            raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'") from reason
        return Exact(model, per_record, str(reason), copies=copies)
    if shape is not None:
        example = next(model.parameters())
        labels = torch.zeros(2, dtype=torch.long if loss == "cross-entropy" else example.dtype)
        whole = shape if copies == 1 else (copies, *shape)
        engine.settle(engine.flatten(model), torch.zeros(2, *whole, dtype=example.dtype), labels)
    return engine


class Checked(Engine):
    """The fast engine, compared with plain autograd before it is used; the exact one where they differ.

    ``settled``: on which kinds of device the comparison was made; kernels differ from one to the other.
    """

    def __init__(self, engine: Fast, model: nn.Module, loss: Loss, fallback: bool) -> None:
        super().__init__(model)
        self.engine: Fast | Exact = engine
        self.module = engine.module
        self._model, self._loss, self._fallback = model, loss, fallback
        self.copies = engine.copies
        self.settled: frozenset[str] = frozenset()

    @property
    def bytes_per_record(self) -> int:
        """Memory a record takes until its batch is pulled."""
        return self.engine.bytes_per_record

    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""
        return self.engine.describe()

    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade rows of records, each row under its own parameters."""
        return self._ready(params, x, y)(params, x, y, mask)

    @property
    def lasts(self) -> bool:  # type: ignore[override]
        """Whether the engine that was chosen says so; none does before it is."""
        return bool(self.settled) and self.engine.lasts

    def lasting(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Graded:
        """Grade in buffers of its own."""
        return self._ready(params, x, y).lasting(params, x, y, mask)

    def shared(
        self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int, mask: Tensor | None = None
    ) -> Graded:
        """Grade a ragged batch under one vector of parameters."""
        return self._ready(params, x, y).shared(params, x, y, rows_of, rows, mask)

    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses, forward only."""
        return self._ready(params, x, y).losses(params, x, y, mask)

    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs for evaluation: those of a settled engine, else of the model as it was written."""
        if self.settled:
            return self.engine.predict(flat, x)
        return Exact(self._model, self._loss, "before the first batch").predict(flat, x)

    def _ready(self, params: Tensor, x: Tensor, y: Tensor) -> Fast | Exact:
        """The engine, settled by the first records that come on this kind of device."""
        if y.device.type not in self.settled and y.numel():
            if params.dim() == 2:
                params, x, y = params[0], x[0], y[0]
            self.settle(params, x, y)
        return self.engine

    def settle(self, params: Tensor, x: Tensor, y: Tensor) -> None:
        """Compare with plain autograd on two records like ``x``; take the exact engine, or refuse, on a difference."""
        # Under weights that are not finite nothing can be compared, and no record contributes anyway.
        kind = y.device.type
        if kind in self.settled or not bool(params.isfinite().all()):
            return
        given = params, *_two_like(self._model, x, y, 0)
        model = self._model if kind == "cpu" else copy.deepcopy(self._model).to(y.device)
        allowed, self.engine.mixed = self.engine.mixed, False
        reason = disagreement(self.engine, model, self._loss, *given)
        if reason and kind != "cpu":
            # Float64 has no kernels of its own to compare; other records have other edges.
            given = params, *_two_like(self._model, x, y, 1)
            reason = disagreement(self.engine, model, self._loss, *given)
        if reason and isinstance(self.engine, Fast) and fused.serves(given[1]):
            without = Fast(self._model, self._loss, copies=self.copies)
            with fused.set_aside():
                still = disagreement(without, model, self._loss, *given)
            if still is None:  # it is the kernels and not the model
                fused.refuse(reason)
                self.engine, reason = without, None
        if reason and kind == "cpu":
            # An activation on the edge may change sides by rounding; in float64 none does.
            wide = copy.deepcopy(self._model).double()
            floats = [each.double() if each.is_floating_point() else each for each in given]
            reason = disagreement(Fast(wide, self._loss, copies=self.copies), wide, self._loss, *floats)
        if reason and not self._fallback:
            raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'")
        if reason:
            self.engine = Exact(self._model, self._loss, reason, copies=self.copies)
        self.module = self.engine.module
        self.settled |= {kind}
        self.engine.mixed = allowed


def disagreement(engine: Engine, model: nn.Module, loss: Loss, params: Tensor, x: Tensor, y: Tensor) -> str | None:
    """Why an engine must not serve a model on records like these, or None.

    Both sides run in evaluation mode, so that dropout does not blur the comparison.
    """
    try:
        with evaluating(engine.module), evaluating(model), precise(), any_algorithm():
            if x.device.type == "cpu":
                graded = engine.shared(params, x, y, torch.zeros(len(y), dtype=torch.long), 1)
            else:  # where rows are stacked
                graded = engine(params.expand(len(y), -1), x.unsqueeze(1), y.unsqueeze(1))
            pulled = graded.pull(torch.ones_like(graded.norms))
            total = pulled[0] if len(pulled) == 1 else pulled.sum(0)
            plain = Alone(model, loss, apart=False, copies=engine.copies).under(params)(x, y)
        if plain.troubles:
            raise SordinoError(plain.troubles[0])
    except Unsupported as reason:
        return str(reason)
    except Exception as error:  # whatever a model or a compiler of kernels raises
        why = str(error) or type(error).__name__
        return f"it could not be compared with plain autograd: {why.splitlines()[0]}"
    norms = squared_norms(plain.gradients).sqrt_().to(params.dtype)
    whole = plain.gradients[0]
    for other in plain.gradients[1:]:  # in place: a model may be large
        whole += other
    gaps = {
        "losses": _gap(graded.losses.flatten(), params.new_tensor(plain.losses)),
        "norms": _gap(graded.norms.flatten(), norms),
        "sums": _gap(total, whole),
    }
    for name, gap in gaps.items():
        if not gap <= AGREEMENT[name]:
            return f"its {name} differ from plain autograd's by {gap:.1e}"
    return None


def _gap(got: Tensor, wanted: Tensor) -> float:
    return float(got.sub_(wanted).norm() / wanted.norm().clamp_min(torch.finfo(wanted.dtype).tiny))


def _two_like(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Two records at random, whole ones below the size of the model's smallest table, 0 where it has none.

    No client's values decide which engine is taken.
    """
    labels, shape = torch.zeros_like(y[:1]).expand(2, *y.shape[1:]), (2, *x.shape[1:])
    generator = torch.Generator().manual_seed(seed)
    if x.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=x.dtype).to(x.device), labels
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    drawn = torch.randint(0, min(tables, default=1), shape, generator=generator)
    return drawn.to(x.device, x.dtype), labels
