"""Second moments in place of gradients: a release that does not depend on any weights, so that one is enough."""

from __future__ import annotations

import math
from functools import partial

from torch import nn

from sordino.client.local import Local, _descend, _difference
from sordino.errors import BadInput
from sordino.made import part
from sordino.models.moments import Moments


@part
def moments(weight: float = 8.0) -> Local:
    """A "gradient" step whose gradient is −φ(x, y), a record's moments (``models.moments``): uploads η·K·mean φ.

    ``weight`` is s, how much the moments with the target count beside those of the features. The norm of φ is bounded
    like any gradient's; a record that is scaled down counts less in the regression, and nothing is biased by it but
    for that. The other half at the server is ``least-squares``.
    """
    if not (math.isfinite(weight) and weight > 0):
        raise BadInput(f"local.weight is {weight!r}: the weight of the moments with the target is a positive number")
    return Local(
        f"moments(weight={weight:g})",
        _descend,
        _difference,
        partner=f"moments of weight {weight:g}",
        trains=partial(_stand_in, weight=float(weight)),
    )


def _stand_in(model: nn.Module, weight: float) -> tuple[nn.Module, str]:
    return Moments(model, weight), "moments"
