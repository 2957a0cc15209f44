"""What a network does to a record before its first trained layer: the same at every step, so it need be done once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from sordino.models.isolation import OneByOne, isolated
from sordino.models.scatter import Bands, Colours, Intercept, Scatter, UnitLength

BATCH, BYTES = 8192, 1 << 26
"""Records that go through the fixed modules at a time, and the most memory that their output may take."""


@isolated
class FixedFeatures(nn.Module):
    """``relu(x·W + c)`` with W and c drawn once and held as buffers, never trained and never released."""

    weight: Tensor
    bias: Tensor

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        drawn = nn.Linear(features, hidden)
        self.register_buffer("weight", drawn.weight.detach().clone())
        self.register_buffer("bias", drawn.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Features of a batch of flat records."""
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


@isolated
class Standardise(nn.Module):
    """``(x − mean)/deviation`` with public constants: a fixed map of every record by itself."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: Tensor) -> Tensor:
        """The records, shifted and scaled by the two constants."""
        return (x - self.mean) / self.deviation


@isolated
class Features(nn.Sequential):
    """The fixed map that ``features`` names, before any model: ``[n, *records]`` to ``[n, *shape]``.

    Attributes
    ----------
    name, options: what it was asked for by.
    shape: of one record's features.
    """

    def __init__(self, name: str, options: dict[str, Any], shape: tuple[int, ...], *maps: nn.Module) -> None:
        super().__init__(*maps)
        self.name, self.options, self.shape = name, options, shape

    def describe(self) -> dict[str, Any]:
        """What a result says about the map: its name and options, the features' shape, a hash of all it holds."""
        return {"name": self.name, "options": self.options, "shape": list(self.shape), "sha256": digest(self)}


WORTH = (FixedFeatures, Standardise, Scatter, Colours, Bands, UnitLength, Intercept, OneByOne, Features)
PURE = (nn.Flatten, *WORTH)
"""Modules that give the same for a record whenever they are asked, one record at a time, and train nothing."""


def split_fixed(model: nn.Module) -> tuple[nn.Module | None, nn.Module]:
    """The fixed modules at the model's beginning (None where they are not worth it), and the rest under its old names.

    Both parts share their modules with the model.
    """
    if type(model) is not nn.Sequential:
        return None, model
    parts = [(name, module) for name, module in model._modules.items() if module is not None]
    count = next((k for k, (_, module) in enumerate(parts) if type(module) not in PURE), len(parts))
    if count == len(parts) or not any(type(module) in WORTH for _, module in parts[:count]):
        return None, model
    return nn.Sequential(OrderedDict(parts[:count])), nn.Sequential(OrderedDict(parts[count:]))


def digest(model: nn.Module) -> str:
    """A SHA-256 hash of what a model holds and does not train: its buffers, and parameters without gradients."""
    held = hashlib.sha256()
    frozen = [(name, one) for name, one in model.named_parameters() if not one.requires_grad]
    for name, one in [*model.named_buffers(), *frozen]:
        held.update(f"{name} {one.dtype} {tuple(one.shape)};".encode())
        held.update(one.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return held.hexdigest()


def frozen(model: nn.Module) -> str | None:
    """The :func:`digest` of a model that has parameters which are not trained; None where it has none.

    Such a model is more than what a run sends and saves: whoever puts trained weights into it has to have the same.
    """
    return None if all(one.requires_grad for one in model.parameters()) else digest(model)


def one_by_one(fixed: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The fixed modules' output for records that go through them one at a time, and for which of them it is one.

    A record's features are a function of that record alone, bit for bit, where the caller computes on one thread. A
    record that raises an error has features 0 and is none of those.
    """
    with torch.no_grad():
        one: Tensor = fixed(torch.zeros_like(x[:1]))
        found, valid = one.new_zeros(len(x), *one.shape[1:]), torch.ones(len(x), dtype=torch.bool)
        for k, record in enumerate(x):
            try:
                found[k] = fixed(record.clone()[None])[0]
            except Exception:  # it contributes nothing, and nobody can tell
                valid[k] = False
    return found, valid


def apply_fixed(fixed: nn.Module, x: Tensor) -> Tensor:
    """The fixed modules' output for all records, some at a time, on the device of x.

    On a CPU every thread takes pieces of its own: threads that share each small operation mostly wait for each other.
    """
    fixed = fixed.to(x.device)
    with torch.no_grad():
        one: Tensor = fixed(x[:1])
    found = one.new_empty(len(x), *one.shape[1:])
    size = max(1, min(BATCH, BYTES // max(1, one.nbytes)))
    pieces = list(zip(x.split(size), found.split(size)))

    def work(piece: tuple[Tensor, Tensor]) -> None:
        with torch.no_grad():
            piece[1].copy_(fixed(piece[0]))

    threads = min(torch.get_num_threads(), len(pieces)) if x.device.type == "cpu" else 1
    if threads < 2:
        for piece in pieces:
            work(piece)
        return found
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            list(pool.map(work, pieces))
    finally:
        torch.set_num_threads(before)
    return found
