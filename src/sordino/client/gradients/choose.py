"""Which engine serves a model."""

from __future__ import annotations

from torch import nn

from sordino.client.gradients.exact import Exact
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.client.gradients.rules import Unsupported
from sordino.client.gradients.types import Engine
from sordino.errors import BadInput
from sordino.models import refuse_batch_statistics, refuse_tied_weights


def build(model: nn.Module, loss: str, kind: str = "auto") -> Engine:
    """An engine for a model and a loss.

    Parameters
    ----------
    model
        Copied; the engine never touches its parameters except in ``load``.
    loss
        ``"cross-entropy"`` or ``"half-squared-error"``.
    kind
        ``"auto"`` takes *fast* where every trainable layer has a rule, else *exact*; or one of them by name.
    """
    per_record = loss_by_name(loss)
    refuse_batch_statistics(model)
    refuse_tied_weights(model)
    if kind not in {"auto", "fast", "exact"}:
        raise BadInput(f"unknown gradient engine '{kind}'; choose auto, fast or exact")
    if kind == "exact":
        return Exact(model, per_record, "asked for")
    try:
        return Fast(model, per_record)
    except Unsupported as reason:
        if kind == "fast":
            raise BadInput(f"the fast gradient engine cannot serve this model: {reason}; use kind='auto'") from reason
        return Exact(model, per_record, str(reason))
