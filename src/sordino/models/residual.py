"""Residual networks with GroupNorm in place of BatchNorm: ResNet-18 and MobileNetV2."""

from __future__ import annotations

import torch
from torch import nn

from sordino.errors import BadInput
from sordino.models.isolation import isolated
from sordino.models.zoo import Shape, image_size, outputs


def conv(inputs: int, wide: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """A convolution without bias (a normalisation follows) that keeps the size at stride 1."""
    padding = (kernel - 1) // 2
    return nn.Conv2d(inputs, wide, kernel, stride=stride, padding=padding, groups=groups, bias=False)


@isolated
class BasicBlock(nn.Module):
    """``relu(x' + norm(conv(relu(norm(conv(x))))))`` with x' = x, or its projection where the shape changes."""

    def __init__(self, inputs: int, wide: int, stride: int, groups: int) -> None:
        super().__init__()
        self.conv1 = conv(inputs, wide, 3, stride)
        self.norm1 = nn.GroupNorm(groups, wide)
        self.relu1 = nn.ReLU()
        self.conv2 = conv(wide, wide, 3)
        self.norm2 = nn.GroupNorm(groups, wide)
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != wide:
            self.shortcut = nn.Sequential(conv(inputs, wide, 1, stride), nn.GroupNorm(groups, wide))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch of images."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        out: torch.Tensor = self.relu2(self.norm2(self.conv2(inner)) + self.shortcut(x))
        return out


def resnet18_gn(shape: Shape, classes: int | None, groups: int = 32, stem: str = "large") -> nn.Module:
    """ResNet-18 of He et al. (2016) with GroupNorm; 11,181,642 parameters on 3×32×32 with 10 classes.

    The count fixes the stem: 7×7 with stride 2 and max-pooling, as for large images. ``stem="small"`` is the 3×3 stem
    without pooling that is usual for CIFAR: 7,680 parameters fewer and about fifteen times the work.
    """
    channels, _, _ = image_size(shape, 8, "resnet18-gn")
    stems: dict[str, list[nn.Module]] = {
        "large": [conv(channels, 64, 7, 2), nn.GroupNorm(groups, 64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)],
        "small": [conv(channels, 64, 3), nn.GroupNorm(groups, 64), nn.ReLU()],
    }
    if stem not in stems:
        raise BadInput(f"model 'resnet18-gn': unknown stem '{stem}'; choose large or small")
    layers = stems[stem]
    inputs = 64
    for stage, wide in enumerate((64, 128, 256, 512)):
        layers += [BasicBlock(inputs, wide, 1 if stage == 0 else 2, groups), BasicBlock(wide, wide, 1, groups)]
        inputs = wide
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, outputs(classes)))


def norm_of_eights(channels: int) -> nn.GroupNorm:
    """GroupNorm over groups of eight channels, so that a 1×1 image still has something to compare with."""
    return nn.GroupNorm(channels // 8, channels)


@isolated
class InvertedResidual(nn.Module):
    """Expand by 1×1, filter each channel by 3×3, project by 1×1; added to the input where the shape stays."""

    def __init__(self, inputs: int, wide: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += [conv(inputs, hidden, 1), norm_of_eights(hidden), nn.ReLU6()]
        layers += [conv(hidden, hidden, 3, stride, groups=hidden), norm_of_eights(hidden), nn.ReLU6()]
        layers += [conv(hidden, wide, 1), norm_of_eights(wide)]
        self.inner = nn.Sequential(*layers)
        self.adds = stride == 1 and inputs == wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output for a batch of images."""
        inner: torch.Tensor = self.inner(x)
        return x + inner if self.adds else inner


def mobilenetv2_gn(shape: Shape, classes: int | None) -> nn.Module:
    """MobileNetV2 of Sandler et al. (2018) with GroupNorm; 2,236,682 parameters on 3 channels with 10 classes."""
    channels, _, _ = image_size(shape, 8, "mobilenetv2-gn")
    layers: list[nn.Module] = [conv(channels, 32, 3, 2), norm_of_eights(32), nn.ReLU6()]
    inputs = 32
    plan = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expand, wide, repeats, first_stride in plan:
        for index in range(repeats):
            layers.append(InvertedResidual(inputs, wide, first_stride if index == 0 else 1, expand))
            inputs = wide
    layers += [conv(inputs, 1280, 1), norm_of_eights(1280), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, outputs(classes)))
