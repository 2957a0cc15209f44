"""Second moments of what a linear head sees, as a module: its gradient for a record is that record's moments."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from sordino.errors import BadInput

MOST_FEATURES = 4096
"""D(D + 1)/2 numbers are released, and held for every record in turn."""


class Moments(nn.Module):
    """Stands in for a model that ends in one linear layer, its only trained part, with features x ∈ R^D.

    Outputs are a = ⟨θ, u(x)⟩ and b = s·Θx, with u(x) the upper triangle of xxᵀ, off-diagonal entries times √2. Under
    the loss −a − ⟨b, t⟩, t the target, the gradient is −φ with

        φ = (u(x), s·t xᵀ),   ‖φ‖² = ‖x‖⁴ + s²‖t‖²‖x‖²,

    whatever the parameters are. A head with a bias gets one more feature, 1; its part of t xᵀ is ``sums``.
    """

    upper: Tensor
    scale: Tensor

    def __init__(self, model: nn.Module, weight: float) -> None:
        super().__init__()
        before, head = split_head(model)
        self.before, self.weight = before, weight
        wide = head.in_features + (head.bias is not None)
        if wide > MOST_FEATURES:
            raise BadInput(f"{wide} features have {wide * (wide + 1) // 2} second moments: use at most {MOST_FEATURES}")
        upper = torch.triu_indices(wide, wide)
        self.register_buffer("upper", upper)
        self.register_buffer("scale", torch.where(upper[0] == upper[1], 1.0, math.sqrt(2.0)))
        self.second = nn.Parameter(torch.zeros(upper.shape[1]))
        self.cross = nn.Parameter(torch.zeros(head.out_features, head.in_features))
        self.sums = None if head.bias is None else nn.Parameter(torch.zeros(head.out_features))

    def forward(self, x: Tensor) -> Tensor:
        """The outputs [n, 1 + k]: a, then b."""
        x = self.before(x).flatten(1)
        outputs = x @ self.cross.T
        if self.sums is not None:
            x = torch.cat([x, x.new_ones(len(x), 1)], 1)
            outputs = outputs + self.sums
        pairs = x[:, self.upper[0]] * x[:, self.upper[1]] * self.scale.to(x.dtype)
        return torch.cat([(pairs @ self.second)[:, None], self.weight * outputs], 1)


def split_head(model: nn.Module) -> tuple[nn.Sequential, nn.Linear]:
    """What a model does before its last layer, and that layer; refused unless it is linear and all that is trained."""
    parts = list(model) if type(model) is nn.Sequential else []
    head = parts[-1] if parts else None
    trained = [one for part in parts[:-1] for one in part.parameters() if one.requires_grad]
    if not isinstance(head, nn.Linear) or trained:
        raise BadInput(
            "least-squares solves for one linear layer, the only trained part of a model: use logistic, linear or "
            "random-features, or a Sequential of your own whose other modules are frozen"
        )
    return nn.Sequential(*parts[:-1]), head
