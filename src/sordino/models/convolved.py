"""What follows a convolution, and what its filters are: the options that the small convolutional networks share.

All three make gradients kinder to noise: bounded activations keep them near the clip and logits small while noise adds
up (Papernot and others, 2021); normalised activations and standardised filters keep the signal's scale whatever noise
did to the weights (De and others, 2022).
"""

from __future__ import annotations

from torch import nn

from sordino.errors import BadInput
from sordino.models.standardised import StandardisedConv2d

_UNITS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}
_NORMS = ("none", "group")


class Convolved:
    """Makes the layers of one network.

    ``unit``: its activations, ``relu`` or ``tanh``. ``norm``: ``group`` puts GroupNorm after each convolution, over
    eight channels at a time, for every record by itself; ``none`` does not. ``standardise_weights``: convolutions
    standardise their filters before use (:class:`~sordino.models.standardised.StandardisedConv2d`).
    """

    def __init__(self, model: str, unit: str, norm: str, standardise_weights: bool) -> None:
        for key, value, known in (("unit", unit, tuple(_UNITS)), ("norm", norm, _NORMS)):
            if value not in known:
                raise BadInput(f"model '{model}': unknown {key} {value!r}; choose {' or '.join(known)}")
        if not isinstance(standardise_weights, bool):
            raise BadInput(f"model '{model}': standardise_weights is {standardise_weights!r}; it is true or false")
        self.unit = _UNITS[unit]
        self._norm, self._kind = norm, StandardisedConv2d if standardise_weights else nn.Conv2d

    def convolution(self, channels: int, wide: int, kernel: int, stride: int = 1, padding: int = 0) -> list[nn.Module]:
        """A convolution, its normalisation where there is one, and the activation."""
        norm = [norm_of_eights(wide)] if self._norm == "group" else []
        return [self._kind(channels, wide, kernel, stride=stride, padding=padding), *norm, self.unit()]

    def pooled(self, channels: int, widths: tuple[int, ...], kernel: int, padding: int) -> list[nn.Module]:
        """Convolutions with an activation and halved by max-pooling, and then flat."""
        layers: list[nn.Module] = []
        for wide in widths:
            layers += [*self.convolution(channels, wide, kernel, padding=padding), nn.MaxPool2d(2)]
            channels = wide
        return [*layers, nn.Flatten()]


def norm_of_eights(channels: int) -> nn.GroupNorm:
    """GroupNorm over groups of eight channels, so that a 1×1 image still has something to compare with."""
    return nn.GroupNorm(channels // 8, channels)
