"""Which modules are known to treat the records of a batch one by one.

A comparison on some records cannot show this: a module may mix records in training only, above a certain batch, or for
certain values. So a batch goes through a model only where every module of it is in this list; any other model sees a
single record at a time (``torch.func.vmap``, or a batch of one).
"""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Module = TypeVar("Module", bound=type[nn.Module])

_KNOWN: set[type[nn.Module]] = {
    nn.Sequential,
    nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d,
    nn.GroupNorm, nn.LayerNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.Identity, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus,
    nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Tanhshrink, nn.LogSigmoid,
    nn.Dropout, nn.AlphaDropout,
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d,
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d,
    nn.ConstantPad1d, nn.ConstantPad2d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d,
    nn.ReplicationPad1d, nn.ReplicationPad2d,
}  # fmt: skip


def isolated(kind: Module) -> Module:
    """Declare a module class of sordino's own: its output for a record depends on that record alone, in every mode."""
    _KNOWN.add(kind)
    return kind


def why_not_isolated(model: nn.Module) -> str | None:
    """The first module that is not known to treat records one by one, in words; None where all are."""
    for name, module in model.named_modules():
        kind, where = type(module), f"layer '{name}'" if name else "the model"
        if kind is nn.Flatten:
            if module.start_dim < 1:
                return f"{where} flattens the records of a batch into one"
        elif kind is nn.Unflatten:
            if not (isinstance(module.dim, int) and module.dim >= 1):
                return f"{where} may take the records of a batch apart"
        elif kind not in _KNOWN:
            return f"{where} ({kind.__name__}) is not known to treat records one by one"
        if "forward" in vars(module) or _has_hooks(module):
            return f"{where} ({kind.__name__}) has code of its own put on it"
    return None


def _has_hooks(module: nn.Module) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)
