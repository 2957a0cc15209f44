"""Small networks of the papers, each a plain ``nn.Sequential`` so that it can be read in one glance.

Every factory takes the shape of one record and the number of classes (None: one real output).
"""

from __future__ import annotations

import math

import torch
from torch import nn

from sordino.errors import BadInput
from sordino.models.isolation import isolated

Shape = tuple[int, ...]


def outputs(classes: int | None) -> int:
    """Width of the last layer: one score per label, or a single real number."""
    return 1 if classes is None else classes


def linear(shape: Shape, classes: int | None) -> nn.Module:
    """``x·w`` without an intercept: least squares, the T1 task of AdaptDP."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs(classes), bias=False))


def logistic(shape: Shape, classes: int | None) -> nn.Module:
    """Multinomial logistic regression (or linear regression with an intercept)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), outputs(classes)))


def mlp(shape: Shape, classes: int | None, hidden: int = 128) -> nn.Module:
    """One hidden layer of ReLU units."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), hidden), nn.ReLU(), nn.Linear(hidden, outputs(classes))
    )


@isolated
class FixedFeatures(nn.Module):
    """``relu(x·W + c)`` with W and c drawn once and held as buffers, never trained and never released."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        drawn = nn.Linear(features, hidden)
        self.register_buffer("weight", drawn.weight.detach().clone())
        self.register_buffer("bias", drawn.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features of a batch of flat records."""
        return torch.relu(nn.functional.linear(x, self.weight, self.bias))


@isolated
class Standardise(nn.Module):
    """``(x − mean)/deviation`` with public constants: a fixed map of every record by itself."""

    def __init__(self, mean: float, deviation: float) -> None:
        super().__init__()
        self.mean, self.deviation = mean, deviation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Standardised records."""
        return (x - self.mean) / self.deviation


def random_features(shape: Shape, classes: int | None, hidden: int = 128) -> nn.Module:
    """Two-layer perceptron whose first layer is fixed, so that the loss is convex (AdaptDP: 128 or 512 units)."""
    return nn.Sequential(nn.Flatten(), FixedFeatures(math.prod(shape), hidden), nn.Linear(hidden, outputs(classes)))


def cnn_small(shape: Shape, classes: int | None) -> nn.Module:
    """Two 3×3 convolutions of 16 and 32 channels, each halved by max-pooling; for 8×8 digits and 28×28 images."""
    channels, height, width = image_size(shape, 4, "cnn-small")
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), outputs(classes)),
    )


def robust_hdp_cnn(shape: Shape, classes: int | None, standardise: bool = False) -> nn.Module:
    """Table 3 of the Robust-HDP appendix, without its ReLU on the logits; 28,938 parameters on 1×28×28.

    ``standardise`` takes 0.1307 from every pixel and divides by 0.3081 first, as the authors' code does for MNIST and
    Fashion-MNIST. Gradients then point further for the same clip, so a step carries more signal at the same noise.
    """
    channels, height, width = image_size(shape, 4, "robust-hdp-cnn")
    return nn.Sequential(
        *([Standardise(0.1307, 0.3081)] if standardise else []),
        nn.Conv2d(channels, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), outputs(classes)),
    )


def tramer_mnist(shape: Shape, classes: int | None) -> nn.Module:
    """The MNIST network of Tramèr and Boneh (2021); 26,010 parameters on 1×28×28."""
    channels, height, width = image_size(shape, 20, "tramer-mnist")
    sides = [_after(_after(side, 8, 2, 2) - 1, 4, 2, 0) - 1 for side in (height, width)]
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * sides[0] * sides[1], 32),
        nn.ReLU(),
        nn.Linear(32, outputs(classes)),
    )


def tramer_cifar(shape: Shape, classes: int | None) -> nn.Module:
    """The CIFAR-10 network of Tramèr and Boneh (2021) with tanh; 550,570 parameters on 3×32×32."""
    channels, height, width = image_size(shape, 8, "tramer-cifar")
    layers: list[nn.Module] = []
    for wide in (32, 64, 128):
        layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        channels = wide
    layers += [nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), 128), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(128, outputs(classes)))


def fedavg_cnn(shape: Shape, classes: int | None, centred: bool = False, tanh: bool = False) -> nn.Module:
    """The FedAvg network as FedFDP uses it; 582,026 parameters on 1×28×28 and 878,538 on 3×32×32.

    ``centred`` maps pixels from [0, 1] to [−1, 1] first, as the federated benchmark does that FedFDP's setting is from.
    ``tanh`` takes the place of ReLU: bounded activations keep gradients near the clip and logits small while noise
    adds up (Papernot and others, 2021).
    """
    channels, height, width = image_size(shape, 16, "fedavg-cnn")
    unit = nn.Tanh if tanh else nn.ReLU
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    return nn.Sequential(
        *([Standardise(0.5, 0.5)] if centred else []),
        nn.Conv2d(channels, 32, 5),
        unit(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        unit(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * sides[0] * sides[1], 512),
        unit(),
        nn.Linear(512, outputs(classes)),
    )


def image_size(shape: Shape, smallest: int, name: str) -> tuple[int, int, int]:
    """Channels, height and width, or a refusal that says what the network needs."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise BadInput(
            f"model '{name}' needs images of shape (channels, height, width) of at least {smallest}×{smallest}, "
            f"not {shape}; use 'logistic', 'mlp' or 'random-features' for other records"
        )
    return shape[0], shape[1], shape[2]


def _after(side: int, kernel: int, stride: int, padding: int) -> int:
    """Side of a convolution's output."""
    return (side + 2 * padding - kernel) // stride + 1
