"""Per-record losses by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from sordino.errors import BadInput

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """ℓ_j = −log softmax(outputs_j)[y_j], ``[n, classes]`` and ``[n]`` to ``[n]``."""
    return functional.cross_entropy(outputs, y, reduction="none")


def half_squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """ℓ_j = ½ Σ (outputs_j − y_j)², summed over outputs where there are several."""
    gap = outputs.reshape(outputs.shape[0], -1) - y.reshape(y.shape[0], -1)
    return 0.5 * gap.square().sum(1)


_LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "half-squared-error": half_squared_error}


def loss_by_name(name: str) -> Loss:
    """The per-record loss of that name."""
    if name not in _LOSSES:
        raise BadInput(f"unknown loss '{name}'; choose one of: {', '.join(_LOSSES)}")
    return _LOSSES[name]
