"""Convolutions whose filters are standardised before use."""

from __future__ import annotations

from torch import Tensor, nn

from sordino.models.isolation import isolated

EPSILON = 1e-4


@isolated
class StandardisedConv2d(nn.Conv2d):
    """A convolution with the filters ŵ = v/√(‖v‖² + ε), v = w − mean(w), in place of its own w, ε = 1e-4.

    Every output filter is centred and divided by its deviation (Qiao and others, 2019) and by √(number of its weights),
    so that it has length one and keeps the scale of what it sees (De and others, 2022). Filters are standardised and
    records are not, so a record's output depends on that record alone.
    """

    def forward(self, input: Tensor) -> Tensor:
        """The convolution of a batch of images with the standardised filters."""
        out: Tensor = self._conv_forward(input, standardised(self.weight), self.bias)
        return out


def standardised(weight: Tensor) -> Tensor:
    """ŵ of every filter of ``weight[…, outputs, channels, kh, kw]``."""
    centred, scale = centred_and_scale(weight.flatten(-3))
    return (centred * scale).view(weight.shape)


def centred_and_scale(filters: Tensor) -> tuple[Tensor, Tensor]:
    """v = w − mean(w) and s = 1/√(‖v‖² + ε) of filters ``[…, entries]``: ``[…, entries]`` and ``[…, 1]``."""
    centred = filters - filters.mean(-1, keepdim=True)
    return centred, (centred.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
