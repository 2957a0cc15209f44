"""What goes into and comes out of a gradient engine, and a model's trainable parameters as one flat vector."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sordino.client.gradients.lengths import Length, limits
from sordino.errors import BadInput, SordinoError


class Slot(NamedTuple):
    """Where one trainable tensor lies in a flat vector of parameters."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        """Number of entries of the tensor."""
        return math.prod(self.shape)

    def part(self, flat: Tensor) -> Tensor:
        """The tensor's entries in flat parameters ``[…, d]``, a view ``[…, size]``."""
        return flat[..., self.offset : self.offset + self.size]

    def view(self, flat: Tensor) -> Tensor:
        """The tensor in flat parameters ``[…, d]``, a view ``[…, *shape]``."""
        return self.part(flat).view(*flat.shape[:-1], *self.shape)


class Trainable:
    """The trainable parameters of a model as one flat vector of length ``dimension``, d.

    ``layout`` has the slot of every trainable tensor, in the model's own order.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout: list[Slot] = []
        self.dimension = 0
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self.layout.append(Slot(name, tuple(parameter.shape), self.dimension))
                self.dimension += parameter.numel()
        if not self.layout:
            raise BadInput("the model has no trainable parameter; set requires_grad on what should be trained")

    def flatten(self, model: nn.Module) -> Tensor:
        """Trainable parameters of a model as one vector ``[d]``, copied."""
        named = dict(model.named_parameters())
        return torch.cat([named[slot.name].detach().reshape(-1) for slot in self.layout])

    def load(self, model: nn.Module, flat: Tensor) -> None:
        """Copy a vector ``[d]`` into a model's trainable parameters."""
        if flat.shape != (self.dimension,):
            raise BadInput(f"expected {self.dimension} parameters in one vector, got shape {tuple(flat.shape)}")
        named = dict(model.named_parameters())
        with torch.no_grad():
            for slot in self.layout:
                named[slot.name].copy_(slot.view(flat))


Pull = Callable[[Tensor, Tensor], None]
"""What writes Σ_j factors_j · g_j of finite records: factors ``[n]``, and where the sums go, ``[rows, d]``."""


class LayerPlan(NamedTuple):
    """How one layer's gradients are computed, and why."""

    layer: str
    kind: str
    method: str
    reason: str


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
    limits
        Upper bounds of what each record adds to a pull per unit of its factor, rounding included; float64.

    Guarantees
    ----------
    ``pull(a)`` is Σ_j a_j g_j over the records of each row with finite loss and gradient, unmasked; any other record
    contributes exactly zero whatever its factor, so that it can neither poison nor steer a row.
    """

    def __init__(
        self,
        losses: Tensor,
        length: Length,
        finite: Tensor,
        pull: Pull,
        shape: tuple[int, int],
        is_current: Callable[[], bool] = lambda: True,
    ) -> None:
        self.losses = losses
        self.norms = only(finite, length.square.sqrt().to(losses.dtype), torch.inf)
        self.limits = only(finite, limits(length, shape[1]), torch.inf)
        self._usable, self._pull, self._shape, self._is_current = finite, pull, shape, is_current

    @staticmethod
    def of(
        found: tuple[Tensor, Tensor, Tensor, Tensor],
        pull: Pull,
        shape: tuple[int, int],
        is_current: Callable[[], bool],
    ) -> Graded:
        """From losses, norms, limits and who is finite and unmasked, as they are to be."""
        graded = object.__new__(Graded)
        graded.losses, graded.norms, graded.limits, graded._usable = found
        graded._pull, graded._shape, graded._is_current = pull, shape, is_current
        return graded

    def in_rows(self, shape: torch.Size, mask: Tensor | None) -> Graded:
        """Shape losses, norms and limits as ``[rows, b]``, with 0 where the mask says padding."""
        found = [self.losses, self.norms, self.limits]
        if mask is not None:
            real = mask.reshape(-1)
            found = [only(real, each) for each in found]
            self._usable = self._usable & real
        self.losses, self.norms, self.limits = (each.view(shape) for each in found)
        return self

    def pull(self, factors: Tensor, out: Tensor | None = None) -> Tensor:
        """Σ_j factors_j · g_j for every row, ``[rows, d]``; written into ``out`` when given.

        A graded batch is valid until its engine's next call, because large buffers are reused.
        """
        if not self._is_current():
            raise SordinoError("this graded batch is stale: pull before calling its engine again")
        if out is None:
            out = self.norms.new_empty(self._shape)
        self.pull_into(factors, out)
        return out

    def pull_into(self, factors: Tensor, out: Tensor) -> None:
        """Write what :meth:`pull` gives, without asking whether the batch is still the engine's last."""
        with torch.no_grad():
            # Not a product with the mask: zero times a factor that is not finite would not be zero.
            self._pull(only(self._usable, factors.reshape(-1)), out)


class Engine(Trainable, ABC):
    """Per-record gradients of one model under one loss. Parameters are rows of a flat ``[rows, d]`` matrix.

    ``module`` is the engine's own copy of the model; its weights mean nothing. ``mixed``: whether a GPU may compute
    activations in TF32. ``copies``: above 1, a record is a unit of up to so many inputs (a person's rows, versions of
    an image): batches have them as an axis after the records', ``x[rows, b, m, …]`` or ``x[n, m, …]``, with a label
    each, ``y[rows, b, m]``, or one for all of them, ``y[rows, b]``; a mask may have that axis too, for units of fewer
    inputs. A unit's loss is the mean over its real inputs, its gradient therefore the mean of theirs, and its norm the
    norm of that mean. Predictions are of single inputs.
    """

    module: nn.Module
    mixed = False
    copies = 1
    lasts = False
    """Whether ``lasting`` may be recorded and replayed on a GPU: it reads nothing back from the device."""

    @property
    @abstractmethod
    def bytes_per_record(self) -> int:
        """Memory a record takes until its batch is pulled, to size chunks by; a guess before the first batch."""

    def settle(self, params: Tensor, x: Tensor, y: Tensor) -> None:
        """Decide, for records of this shape, whatever the first batch would decide; nothing where that is settled."""

    @abstractmethod
    def describe(self) -> list[LayerPlan]:
        """Which implementation serves each layer, and why."""

    @abstractmethod
    def __call__(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Graded:
        """Grade ``x[rows, b, …]``, ``y[rows, b]`` under ``params[rows, d]``; False in ``mask`` is padding.

        Leave the tensors as they are until the batch is pulled: layers may hold them.
        """

    def lasting(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor) -> Graded:
        """Grade in buffers of its own, which nobody else will use and which live as long as what is graded."""
        raise SordinoError("this engine's batches do not last")

    @abstractmethod
    def shared(
        self, params: Tensor, x: Tensor, y: Tensor, rows_of: Tensor, rows: int, mask: Tensor | None = None
    ) -> Graded:
        """Grade a ragged batch ``x[n, …]`` under one ``params[d]``; ``rows_of[n]``, sorted, is each record's row.

        ``mask[n, m]``: which inputs of each unit are real, where records are units.
        """

    @abstractmethod
    def losses(self, params: Tensor, x: Tensor, y: Tensor, mask: Tensor | None = None) -> Tensor:
        """Per-record losses ``[rows, b]`` only; 0 for masked records."""

    @abstractmethod
    def predict(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs of the model with parameters ``flat[d]`` for ``x[n, …]``, in evaluation mode."""


class Flat(NamedTuple):
    """A batch of rows with its records end to end, as layers run on it.

    Attributes
    ----------
    x, y
        ``[n, …]`` and ``[n]``; with an axis of inputs after the first where records are units.
    records
        Which records are real, in the shape they came in; None where all are.
    inputs
        Which inputs of each unit are real, ``[n, m]``; None where all are, and where records are no units.
    """

    x: Tensor
    y: Tensor
    records: Tensor | None
    inputs: Tensor | None

    @staticmethod
    def of(x: Tensor, y: Tensor, mask: Tensor | None, copies: int, lead: int = 2) -> Flat:
        """From tensors with ``lead`` axes before a record's own (rows and records, or records alone)."""
        inputs = None
        if copies > 1:
            y = y if y.dim() > lead else y.unsqueeze(lead).expand(*y.shape, x.shape[lead])
            if mask is not None and mask.dim() > lead:
                inputs, mask = mask.reshape(-1, mask.shape[lead]), mask.any(lead)
        return Flat(x.flatten(0, lead - 1), y.flatten(0, lead - 1), mask, inputs)

    def part(self, start: int, stop: int, copies: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs and labels of some records, an entry each, and which of them are real."""
        x, y = self.x[start:stop], self.y[start:stop]
        if copies > 1:
            x, y = x.flatten(0, 1), y.flatten(0, 1)
        return x, y, None if self.inputs is None else self.inputs[start:stop]


def shares_of(inputs: Tensor, dtype: torch.dtype) -> Tensor:
    """What each input of a unit counts, ``[n, m]``: 1 over the number of real ones, 0 where there is none."""
    return inputs.to(dtype) / inputs.sum(1, keepdim=True).clamp_min(1)


def mean_of_inputs(losses: Tensor, copies: int, inputs: Tensor | None) -> Tensor:
    """The losses of inputs, ``[n·m]``, to those of records, ``[n]``: the mean over the real ones of each."""
    if inputs is None:
        return losses if copies == 1 else losses.unflatten(0, (-1, copies)).mean(1)
    return (only(inputs, losses.view(inputs.shape)) * shares_of(inputs, losses.dtype)).sum(1)


@cache
def constant(value: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A number on a device, made once."""
    return torch.tensor(value, dtype=dtype, device=device)


def only(where: Tensor, values: Tensor, other: float = 0.0) -> Tensor:
    """The values where a mask is true, ``other`` elsewhere; a number passed anew costs a GPU a kernel each time."""
    return torch.where(where, values, constant(other, values.device, values.dtype))


@contextmanager
def precise(mixed: bool = False) -> Iterator[None]:
    """Compute native convolutions in full float32: a GPU would otherwise take TF32 for them without being asked."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = mixed
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@contextmanager
def any_algorithm() -> Iterator[None]:
    """Take any algorithm, repeatable or not, to compare with: what is only compared leaves no trace in a run."""
    if not torch.are_deterministic_algorithms_enabled():
        yield  # torch's switch imports a compiler: seconds and 145 MB, for nothing
        return
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


@contextmanager
def in_full() -> Iterator[None]:
    """Sum native gradients of convolutions in full float32 on a CPU too, whatever a program allows elsewhere.

    What a record adds is bounded for float32's rounding (``lengths``).
    """
    settings = getattr(torch.backends.mkldnn, "conv", None)
    if settings is None:  # an older torch, which knows nothing else
        yield
        return
    before = settings.fp32_precision
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = before


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Hold a module in evaluation mode, and put it back afterwards."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)
