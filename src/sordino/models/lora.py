"""Adapters of low rank beside the linear layers of a frozen network (LoRA, Hu et al. 2022).

    y = W x + b + (α/r) B A x,  A of r × inputs drawn at random, B of outputs × r zero at first

Only A and B are trained, noised and sent. The frozen part is a public fact of the model, like a feature extractor: it
must not have been learnt from the clients' records.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import BadInput
from sordino.models.attention import LINEAR, Attention, take_apart
from sordino.models.isolation import isolated

MOST = torch.finfo(torch.float32).max

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
        """One linear layer that does the same, W + (α/r) B A; what shares W with this one keeps W."""
        made, weight = copy.deepcopy(self.base), self.base.weight
        more = self.scale * (self.up.weight @ self.down.weight)
        made.weight = nn.Parameter((weight + more).detach(), requires_grad=weight.requires_grad)
        return made


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
        r, the inner size of every adapter: it has r·(inputs + outputs) numbers. At most the largest layer's size.
    alpha
        What the adapters' product is multiplied by, times r; by default r, so that it counts as it is.
    targets
        Which layers get one: names, or parts of names between dots, such as ``["query", "value"]``. By default all.
        Attention has ``query``, ``key``, ``value`` and ``out_proj``. A layer that is used in several places keeps one.
    train
        Modules that are trained whole beside the adapters, such as a new head: ``["head"]``.
    """
    if type(rank) is not int or rank < 1:
        raise BadInput(f"lora: rank = {rank!r}: it is one whole number ≥ 1, such as 8")
    scale = float(rank) if alpha is None else alpha
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale <= MOST:
        raise BadInput(f"lora: alpha = {alpha!r}: it is a number above 0, such as 16, and no larger than float32 holds")
    made = copy.deepcopy(model).requires_grad_(False)
    list(take_apart(made))
    inside = {child for one in made.modules() if isinstance(one, nn.MultiheadAttention) for child in one.children()}
    linear = [name for name, one in made.named_modules() if type(one) in LINEAR and name and one not in inside]
    whole = _meant("train", train, [name for name, _ in made.named_modules() if name])
    chosen = linear if targets is None else _meant("targets", targets, linear)
    chosen = [name for name in chosen if not any(name == one or name.startswith(f"{one}.") for one in whole)]
    if not linear:
        raise BadInput("lora: the model has no linear layer to put an adapter beside; train it as it is")
    if not chosen:
        raise BadInput("lora: no layer is left to put an adapter beside: name some in targets, or fewer in train")
    bases = [base for base in map(made.get_submodule, chosen) if isinstance(base, nn.Linear)]
    widest = max(max(base.weight.shape) for base in bases)
    if rank > widest:  # before memory is taken for it
        raise BadInput(
            f"lora: rank = {rank} is more than the inputs and outputs of any layer, at most {widest}: use a smaller one"
        )
    _exchange(made, {base: Adapted(base, rank, scale) for base in bases})
    for name in whole:
        made.get_submodule(name).requires_grad_(True)
    return made


def _meant(argument: str, asked: Sequence[str], names: list[str]) -> list[str]:
    """The names that are asked for, each by itself or by one of its parts; refuses what none has."""
    if isinstance(asked, str) or not isinstance(asked, Collection) or not all(isinstance(one, str) for one in asked):
        raise BadInput(f"lora: {argument} = {asked!r}: it is a list of names, such as ['query', 'value']")
    for one in asked:
        if not any(one == name or one in name.split(".") for name in names):
            raise BadInput(f"lora: {argument}: no layer is called {one!r}; there are: {', '.join(names) or 'none'}")
    return [name for name in names if any(one == name or one in name.split(".") for one in asked)]


def _exchange(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Put other modules in the place of some, wherever the model has them."""
    for parent in list(model.modules()):
        if isinstance(parent, nn.MultiheadAttention):
            continue  # torch's own reads the weights of its layer, and never calls it
        for name, child in parent._modules.items():
            if child is not None and child in others:
                setattr(parent, name, others[child])


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
    _exchange(made, {one: one.merged() for one in made.modules() if type(one) is Adapted})
    _exchange(made, {one: one.whole() for one in made.modules() if type(one) is Attention and one.packed})
    return made
