"""What keeps the records of a batch apart in a network: which modules do, what is refused, and how to mend it.

A comparison on some records cannot show that a module treats them one by one: it may mix records in training only,
above a certain batch, or for certain values. So a batch goes through a model only where every module of it is listed
here; any other model sees a single record at a time (``torch.func.vmap``, or a batch of one).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sordino.errors import BadInput

Module = TypeVar("Module", bound=type[nn.Module])

_KNOWN: set[type[nn.Module]] = {
    nn.Sequential, nn.ModuleList, nn.ModuleDict,
    nn.Linear, NonDynamicallyQuantizableLinear, nn.Embedding, nn.Conv1d, nn.Conv2d,
    nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Tanhshrink, nn.LogSigmoid,
    nn.Dropout, nn.AlphaDropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d,
}  # fmt: skip
_BATCH_FIRST = (nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN)
"""They treat records one by one along the axis that they are told, which has to be the first."""
_TRANSFORMER = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.TransformerEncoder, nn.TransformerDecoder}
_ACTIVATIONS = (functional.relu, functional.gelu, torch.relu, torch.tanh, torch.sigmoid)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def isolated(kind: Module) -> Module:
    """Declare a module class of sordino's own: its output for a record depends on that record alone, in every mode."""
    _KNOWN.add(kind)
    return kind


@isolated
class OneByOne(nn.Module):
    """Any module, given one record at a time, always in evaluation mode and never trained.

    Records cannot see each other whatever the module does with its batch, and what it writes into its buffers is gone
    before the next record. So it may hold modules that are not listed here, batch normalisation included: in evaluation
    mode that is a fixed map.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> OneByOne:
        """Leaves the module in evaluation mode."""
        return super().train(False)

    def forward(self, x: Tensor) -> Tensor:
        """The module's output for every record."""
        return torch.cat([self._alone(record.clone()[None]) for record in x])

    def _alone(self, record: Tensor) -> Tensor:
        held = {name: one.clone() for name, one in self.inner.named_buffers()}
        found: Tensor = torch.func.functional_call(self.inner, held, (record,))
        return found


def _open_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The modules with their names that may see a batch: not what is found inside a :class:`OneByOne` only."""
    yield name, module
    if type(module) is not OneByOne:
        for key, child in module.named_children():
            yield from _open_modules(child, f"{name}.{key}" if name else key)


def why_not_isolated(model: nn.Module) -> str | None:
    """The first module that is not known to treat records one by one, in words; None where all are."""
    for name, module in _open_modules(model):
        kind, where = type(module), f"layer '{name}'" if name else "the model"
        if isinstance(module, nn.Flatten) and kind is nn.Flatten:
            if module.start_dim < 1:
                return f"{where} flattens the records of a batch into one"
        elif kind is nn.Unflatten:
            if not (isinstance(module.dim, int) and module.dim >= 1):
                return f"{where} may take the records of a batch apart"
        elif isinstance(module, _BATCH_FIRST) and kind in _BATCH_FIRST:
            if not module.batch_first:
                return f"{where} ({kind.__name__}) has the records on its second axis; make it with batch_first=True"
        elif kind in _TRANSFORMER:
            activation = getattr(module, "activation", functional.relu)
            if not (isinstance(activation, nn.Module) or activation in _ACTIVATIONS):
                return f"{where} ({kind.__name__}) has an activation that is not known to treat records one by one"
        elif kind not in _KNOWN:
            return f"{where} ({kind.__name__}) is not known to treat records one by one"
        if _overridden(module) or any(getattr(module, hooks, None) for hooks in _HOOKS):
            return f"{where} ({kind.__name__}) has code of its own put on it"
    return None


def dtype_of(tokens: int | None) -> torch.dtype:
    """The type of records: whole numbers where they are ids of so many ``tokens``, else float32."""
    return torch.float32 if tokens is None else torch.int64


def _overridden(module: nn.Module) -> bool:
    """Whether a method of the class, such as ``forward``, is covered by something put on this one module."""
    return any(callable(getattr(type(module), name, None)) for name in vars(module))


def check(model: nn.Module, shape: tuple[int, ...], classes: int | None, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a model that cannot be trained privately on such records, saying why and what to do.

    Refused: layers with statistics over the batch, weights that are no finite numbers, nothing to train, and an output
    that is not ``[records, classes]`` (``[records]`` or ``[records, 1]`` for regression, ``classes=None``).
    """
    refuse_batch_statistics(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput("the model has no trainable parameter; set requires_grad on what should be trained")
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = model(torch.zeros((2, *shape), dtype=dtype))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"the model cannot process records of shape {tuple(shape)}: {reason}") from error
    finally:
        model.train(was_training)
    refuse_not_finite(model)
    got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
    if classes is None and got not in {(2,), (2, 1)}:
        raise BadInput(f"regression needs one output per record, the model gives {got} for 2 records")
    if classes is not None and got != (2, classes):
        raise BadInput(
            f"the labels have {classes} classes, so the model must give (2, {classes}) for 2 records; it gives {got}"
        )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise for the first layer whose output for one record depends on other records, past or present."""
    remedy = "replace it with sd.models.private_ready(model)"
    for name, module in _open_modules(model):
        if isinstance(module, _BatchNorm):
            raise BadInput(
                f"layer '{name}' is {type(module).__name__}: it mixes the records of a batch, so no record's influence "
                f"can be bounded; {remedy}, which puts GroupNorm there"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise BadInput(
                f"layer '{name}' is {type(module).__name__} with running statistics, an unnoised trace of the records; "
                f"{remedy}, which drops them"
            )


def refuse_not_finite(model: nn.Module) -> None:
    """Raise for the first tensor with NaN or infinity: no record contributes under such weights, and all pay."""
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise BadInput(
                f"the model's weights '{name}' hold NaN or infinity, under which no record contributes anything: "
                "mend what they were loaded or made from"
            )


def private_ready(model: nn.Module) -> nn.Module:
    """A copy of the model in which every layer treats each record on its own.

    BatchNorm becomes GroupNorm with as many groups as divide the channels, 32 at most, and at least two channels
    a group; its scale and shift are kept. InstanceNorm loses its running statistics. Other layers are copied as they
    are.
    """
    return _replaced(copy.deepcopy(model))


def _replaced(module: nn.Module) -> nn.Module:
    if isinstance(module, _BatchNorm):
        return _group_norm_for(module)
    if isinstance(module, _InstanceNorm):
        module.track_running_stats = False
        module.running_mean = module.running_var = module.num_batches_tracked = None
        return module
    for name, child in module.named_children():
        setattr(module, name, _replaced(child))
    return module


def _group_norm_for(norm: _BatchNorm) -> nn.GroupNorm:
    channels = norm.num_features
    if channels == 0:
        raise BadInput("a lazy BatchNorm has no channels yet; run the model once before private_ready")
    groups = math.gcd(32, channels)
    while groups > 1 and channels // groups < 2:
        groups //= 2
    out = nn.GroupNorm(groups, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        with torch.no_grad():
            out.weight.copy_(norm.weight)
            out.bias.copy_(norm.bias)
    return out.to(next(norm.buffers(), torch.empty(0)).device)
