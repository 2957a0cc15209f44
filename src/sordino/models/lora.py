"""Adapters of low rank beside the linear layers of a frozen network (LoRA, Hu et al. 2022).

    y = W x + b + (α/r) B A x,  A of r × inputs drawn at random, B of outputs × r zero at first

Only A and B are trained, noised and sent. The frozen part is a public fact of the model, like a feature extractor: it
must not have been learnt from the clients' records.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import BadInput
from sordino.models.attention import LINEAR, Attention, take_apart
from sordino.models.isolation import isolated

Adapters = int | Mapping[str, Any]
"""What a study says: a rank, or a table of the arguments of :func:`lora`."""


@isolated
class Adapted(nn.Module):
    """A frozen linear layer, and a trained product of two thin ones beside it."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        where: dict[str, Any] = {"bias": False, "device": base.weight.device, "dtype": base.weight.dtype}
        self.base, self.scale = base, alpha / rank
        self.down = nn.Linear(base.in_features, rank, **where)
        self.up = nn.Linear(rank, base.out_features, **where)
        nn.init.zeros_(self.up.weight)

    def extra_repr(self) -> str:
        """What the adapters' product is multiplied by."""
        return f"scale={self.scale:g}"

    def forward(self, x: Tensor) -> Tensor:
        """``base(x) + (α/r) B A x``."""
        return torch.add(self.base(x), self.up(self.down(x)), alpha=self.scale)

    def merged(self) -> nn.Linear:
        """One linear layer that does the same: W + (α/r) B A."""
        with torch.no_grad():
            self.base.weight += self.scale * (self.up.weight @ self.down.weight)
        return self.base


def lora(
    model: nn.Module,
    rank: int = 8,
    alpha: float | None = None,
    targets: Sequence[str] | None = None,
    train: Sequence[str] = (),
) -> nn.Module:
    """A frozen copy of a model with trainable adapters beside its linear layers and attention's projections.

    Parameters
    ----------
    model
        Any network; weights that were learnt have to be public.
    rank
        r, the inner size of every adapter: it has r·(inputs + outputs) numbers.
    alpha
        What the adapters' product is multiplied by, times r; by default r, so that it counts as it is.
    targets
        Which layers get one: names, or parts of names between dots, such as ``["query", "value"]``. By default all.
        Attention has ``query``, ``key``, ``value`` and ``out_proj``.
    train
        Modules that are trained whole beside the adapters, such as a new head: ``["head"]``.
    """
    if type(rank) is not int or rank < 1:
        raise BadInput(f"lora: rank = {rank!r}: it is one whole number ≥ 1, such as 8")
    scale = float(rank) if alpha is None else alpha
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise BadInput(f"lora: alpha = {alpha!r}: it is a number above 0, such as {2 * rank}")
    made = copy.deepcopy(model).requires_grad_(False)
    list(take_apart(made))
    linear = [name for name, module in made.named_modules() if type(module) in LINEAR and name]
    whole = _meant("train", train, [name for name, _ in made.named_modules() if name])
    chosen = linear if targets is None else _meant("targets", targets, linear)
    chosen = [name for name in chosen if not any(name == one or name.startswith(f"{one}.") for one in whole)]
    if not chosen:
        raise BadInput("lora: the model has no linear layer to put an adapter beside; train it as it is")
    for name in chosen:
        base = made.get_submodule(name)
        assert isinstance(base, nn.Linear)
        parent, _, own = name.rpartition(".")
        setattr(made.get_submodule(parent), own, Adapted(base, rank, scale))
    for name in whole:
        made.get_submodule(name).requires_grad_(True)
    return made


def _meant(argument: str, asked: Sequence[str], names: list[str]) -> list[str]:
    """The names that are asked for, each by itself or by one of its parts; refuses what none has."""
    if isinstance(asked, str) or not all(isinstance(one, str) for one in asked):
        raise BadInput(f"lora: {argument} = {asked!r}: it is a list of names, such as ['query', 'value']")
    for one in asked:
        if not any(one == name or one in name.split(".") for name in names):
            raise BadInput(f"lora: {argument}: no layer is called {one!r}; there are: {', '.join(names) or 'none'}")
    return [name for name in names if any(one == name or one in name.split(".") for one in asked)]


def adapted(model: nn.Module, spec: Adapters) -> nn.Module:
    """:func:`lora` as a study asks for it: ``lora = 8``, or ``lora = {rank = 8, targets = ["query", "value"]}``."""
    if isinstance(spec, Mapping):
        unknown = sorted(set(spec) - {"rank", "alpha", "targets", "train"})
        if unknown:
            raise BadInput(f"lora has no option {', '.join(unknown)}; its options: rank, alpha, targets, train")
        return lora(model, **spec)
    return lora(model, rank=spec)


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has frozen layers with adapters beside them."""
    return any(type(module) is Adapted for module in model.modules())


def merged(model: nn.Module) -> nn.Module:
    """A copy of an adapted model with the adapters folded into the weights: the same function, no adapters.

    Attention that was torch's is torch's again, so that weights have the names that they had before :func:`lora`.
    """
    if type(model) is Adapted:
        return copy.deepcopy(model).merged()
    made = copy.deepcopy(model)
    for name, module in list(made.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module) is Adapted:
            setattr(made.get_submodule(parent), own, module.merged())
    for name, module in list(made.named_modules()):
        parent, _, own = name.rpartition(".")
        if type(module) is Attention and module.packed:
            setattr(made.get_submodule(parent), own, module.whole())
    return made
