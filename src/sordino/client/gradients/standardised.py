"""The fast engine's rule for convolutions whose filters are standardised before use."""

from __future__ import annotations

from torch import Tensor

from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.tape import Saved, Tape
from sordino.client.gradients.ways import Patches, Way
from sordino.models.standardised import centred_and_scale, standardised


class StandardisedConvLayer(ConvLayer):
    """A convolution with ŵ = s·v, v = w − mean(w), s = 1/√(‖v‖² + ε), for each of its filters w.

    A record's gradient is G = dyᵀP with respect to ŵ, and s·(G − mean(G)) − s³(v·G)·v with respect to w: the same
    linear map for all records, applied to every record's own G before its norm is taken.
    """

    def weight(self, tape: Tape) -> Tensor:
        """The filters as records meet them: centred, of length one."""
        return standardised(super().weight(tape))

    def find_way(self, x: Tensor, copies: int) -> Way:
        """Per-record gradients, held: their norms do not follow from those with respect to ŵ."""
        return _Through(self)

    def raw(self, tape: Tape) -> Tensor:
        """The filters as they are trained, in the order of the held gradients: ``[(rows,) outputs, taps·channels]``."""
        return super().weight(tape).movedim(-3, -1).flatten(-3)


class _Through(Patches):
    """Per-record gradients of the standardised filters, taken on to the filters themselves."""

    reason = "patches times output gradient, then through the standardisation; held for the sum"

    def __init__(self, layer: StandardisedConvLayer) -> None:
        super().__init__(layer.geometry, layer.groups)
        self._layer = layer

    def gradients(self, layer: str, saved: Saved, dy: Tensor, tape: Tape) -> Tensor:
        """Every record's gradient with respect to w, held."""
        held = super().gradients(layer, saved, dy, tape)
        grads = held.flatten(1, 2)
        centred, scale = centred_and_scale(self._layer.raw(tape))
        if tape.stacked:
            rows = len(centred)
            grads = grads.unflatten(0, (rows, -1))
            centred, scale = centred.unsqueeze(1), scale.unsqueeze(1)
        along = (grads * centred).sum(-1, keepdim=True)
        grads.sub_(grads.mean(-1, keepdim=True)).mul_(scale).sub_(along * scale.pow(3) * centred)
        return held
