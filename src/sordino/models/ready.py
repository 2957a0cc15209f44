"""Is a network fit for record-level privacy? A record's gradient must depend on that record alone."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from sordino.errors import BadInput


def check(model: nn.Module, shape: tuple[int, ...], classes: int | None, dtype: torch.dtype = torch.float32) -> None:
    """Refuse a model that cannot be trained privately on such records, saying why and what to do.

    Refused: layers with statistics over the batch, tied weights, nothing to train, and an output that is not
    ``[records, classes]`` (``[records]`` or ``[records, 1]`` for regression, ``classes=None``).
    """
    refuse_batch_statistics(model)
    refuse_tied_weights(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise BadInput("the model has no trainable parameter; set requires_grad on what should be trained")
    records = torch.zeros((2, *shape), dtype=dtype)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            out = model(records)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).splitlines()[0]
        raise BadInput(f"the model cannot process records of shape {tuple(shape)}: {reason}") from error
    finally:
        model.train(was_training)
    _refuse_wrong_output(out, classes)


def _refuse_wrong_output(out: object, classes: int | None) -> None:
    got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
    if classes is None and got not in {(2,), (2, 1)}:
        raise BadInput(f"regression needs one output per record, the model gives {got} for 2 records")
    if classes is not None and got != (2, classes):
        raise BadInput(
            f"the labels have {classes} classes, so the model must give (2, {classes}) for 2 records; it gives {got}"
        )


def refuse_batch_statistics(model: nn.Module) -> None:
    """Raise for the first layer whose output for one record depends on other records, past or present."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        remedy = "replace it with sd.models.private_ready(model)"
        if isinstance(module, _BatchNorm):
            raise BadInput(
                f"layer '{name}' is {kind}: it mixes the records of a batch, so no record's influence can be "
                f"bounded; {remedy}, which puts GroupNorm there"
            )
        if isinstance(module, _InstanceNorm) and module.track_running_stats:
            raise BadInput(
                f"layer '{name}' is {kind} with running statistics, an unnoised trace of the records; {remedy}, "
                "which drops them"
            )


def refuse_tied_weights(model: nn.Module) -> None:
    """Raise when one parameter is used under two names: per-record norms would count it twice."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in first and parameter.requires_grad:
            raise BadInput(
                f"parameters '{first[id(parameter)]}' and '{name}' are one tensor (tied weights), which sordino does "
                "not train; give each layer its own"
            )
        first[id(parameter)] = name


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
