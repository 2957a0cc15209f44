"""The networks that studies use by name, and how a name becomes a network with reproducible first weights.

Every factory takes the shape of one record and the number of classes (None: one real output), and gives a plain
``nn.Sequential`` that can be read in one glance. The options ``unit``, ``norm`` and ``standardise_weights`` of the
convolutional ones are in :mod:`sordino.models.convolved`.
"""

from __future__ import annotations

import difflib
import importlib
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import BadInput
from sordino.models.convolved import Convolved, norm_of_eights
from sordino.models.features import Spec, check_features, make_features
from sordino.models.fixed import FixedFeatures, Standardise
from sordino.models.isolation import isolated
from sordino.models.lora import Adapters, adapted
from sordino.models.options import check_kind, check_options, in_single_precision, with_vocabulary
from sordino.models.scatter import scatter_cnn, scatter_linear
from sordino.models.text import text_bag, text_encoder

Shape = tuple[int, ...]
Factory = Callable[..., nn.Module]


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
    first = nn.Linear(math.prod(shape), hidden)
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Linear(hidden, outputs(classes)))


def random_features(shape: Shape, classes: int | None, hidden: int = 128) -> nn.Module:
    """Two-layer perceptron whose first layer is fixed, so that the loss is convex (AdaptDP: 128 or 512 units)."""
    return nn.Sequential(nn.Flatten(), FixedFeatures(math.prod(shape), hidden), nn.Linear(hidden, outputs(classes)))


def cnn_small(
    shape: Shape, classes: int | None, unit: str = "relu", norm: str = "none", standardise_weights: bool = False
) -> nn.Module:
    """Two 3×3 convolutions of 16 and 32 channels, each halved by max-pooling; for 8×8 digits and 28×28 images."""
    channels, height, width = image_size(shape, 4, "cnn-small")
    build = Convolved("cnn-small", unit, norm, standardise_weights)
    layers = build.pooled(channels, (16, 32), 3, 1)
    return nn.Sequential(*layers, nn.Linear(32 * (height // 4) * (width // 4), outputs(classes)))


def robust_hdp_cnn(
    shape: Shape,
    classes: int | None,
    standardise: bool = False,
    unit: str = "relu",
    norm: str = "none",
    standardise_weights: bool = False,
) -> nn.Module:
    """Table 3 of the Robust-HDP appendix, without its ReLU on the logits; 28,938 parameters on 1×28×28.

    ``standardise`` takes 0.1307 from every pixel and divides by 0.3081 first, as the authors' code does for MNIST and
    Fashion-MNIST. Gradients then point further for the same clip, so a step carries more signal at the same noise.
    """
    channels, height, width = image_size(shape, 4, "robust-hdp-cnn")
    build = Convolved("robust-hdp-cnn", unit, norm, standardise_weights)
    before = [Standardise(0.1307, 0.3081)] if standardise else []
    layers = build.pooled(channels, (16, 32), 5, 2)
    return nn.Sequential(*before, *layers, nn.Linear(32 * (height // 4) * (width // 4), outputs(classes)))


def fedavg_cnn(
    shape: Shape,
    classes: int | None,
    centred: bool = False,
    tanh: bool = False,
    unit: str = "relu",
    norm: str = "none",
    standardise_weights: bool = False,
) -> nn.Module:
    """The FedAvg network as FedFDP uses it; 582,026 parameters on 1×28×28 and 878,538 on 3×32×32.

    ``centred`` maps pixels from [0, 1] to [−1, 1] first, as the federated benchmark does that FedFDP's setting is from.
    ``tanh`` is another way to write ``unit="tanh"``.
    """
    channels, *sides = image_size(shape, 16, "fedavg-cnn")
    build = Convolved("fedavg-cnn", "tanh" if tanh else unit, norm, standardise_weights)
    before = [Standardise(0.5, 0.5)] if centred else []
    layers = build.pooled(channels, (32, 64), 5, 0)
    layers += [nn.Linear(64 * math.prod(((side - 4) // 2 - 4) // 2 for side in sides), 512), build.unit()]
    return nn.Sequential(*before, *layers, nn.Linear(512, outputs(classes)))


def tramer_mnist(
    shape: Shape, classes: int | None, unit: str = "relu", norm: str = "none", standardise_weights: bool = False
) -> nn.Module:
    """The MNIST network of Tramèr and Boneh (2021); 26,010 parameters on 1×28×28."""
    channels, *sides = image_size(shape, 20, "tramer-mnist")
    build = Convolved("tramer-mnist", unit, norm, standardise_weights)
    features = 32 * math.prod(((side - 4) // 2 - 4) // 2 for side in sides)
    return nn.Sequential(
        *build.convolution(channels, 16, 8, stride=2, padding=2), nn.MaxPool2d(2, stride=1),
        *build.convolution(16, 32, 4, stride=2), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(features, 32), build.unit(), nn.Linear(32, outputs(classes)),
    )  # fmt: skip


def tramer_cifar(
    shape: Shape, classes: int | None, unit: str = "tanh", norm: str = "none", standardise_weights: bool = False
) -> nn.Module:
    """The CIFAR-10 network of Tramèr and Boneh (2021) with tanh; 550,570 parameters on 3×32×32."""
    channels, height, width = image_size(shape, 8, "tramer-cifar")
    build = Convolved("tramer-cifar", unit, norm, standardise_weights)
    layers: list[nn.Module] = []
    for wide in (32, 64, 128):
        layers += build.convolution(channels, wide, 3, padding=1)
        layers += [*build.convolution(wide, wide, 3, padding=1), nn.MaxPool2d(2)]
        channels = wide
    layers += [nn.Flatten(), nn.Linear(128 * (height // 8) * (width // 8), 128), build.unit()]
    return nn.Sequential(*layers, nn.Linear(128, outputs(classes)))


def image_size(shape: Shape, smallest: int, name: str) -> tuple[int, int, int]:
    """Channels, height and width, or a refusal that says what the network needs."""
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise BadInput(
            f"model '{name}' needs images of shape (channels, height, width) of at least {smallest}×{smallest}, "
            f"not {shape}; use 'logistic', 'mlp' or 'random-features' for other records"
        )
    return shape[0], shape[1], shape[2]


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

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of images."""
        inner = self.relu1(self.norm1(self.conv1(x)))
        out: Tensor = self.relu2(self.norm2(self.conv2(inner)) + self.shortcut(x))
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

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of images."""
        inner: Tensor = self.inner(x)
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


_FACTORIES: tuple[Factory, ...] = (
    linear, logistic, mlp, cnn_small, random_features, robust_hdp_cnn, tramer_mnist, tramer_cifar, fedavg_cnn,
    resnet18_gn, mobilenetv2_gn, scatter_linear, scatter_cnn, text_bag, text_encoder,
)  # fmt: skip
_ZOO = {factory.__name__.replace("_", "-"): factory for factory in _FACTORIES}


def names() -> list[str]:
    """Names that ``build`` knows, in the order of the documentation."""
    return list(_ZOO)


def build(
    spec: str | nn.Module,
    shape: tuple[int, ...],
    classes: int | None,
    seed: int = 0,
    features: Spec | None = None,
    tokens: int | None = None,
    lora: Adapters | None = None,
    **options: Any,
) -> nn.Module:
    """Build a network for records of one shape.

    Parameters
    ----------
    spec
        A name of :func:`names`, ``"module:factory"`` (called as ``factory(shape, classes, **options)``), or an
        ``nn.Module``, which is returned as it is, or where its weights are not float32 as a copy in float32.
    shape
        Shape of one record without the batch axis: ``(features,)`` or ``(channels, height, width)``.
    classes
        Number of labels, or None for regression, which gets one output.
    seed
        Seed of the first weights. They are the same whatever the state of the global generator, which is left
        as it was found.
    features
        A fixed map to put before the network (:mod:`features`), which is then built for records of the shape that the
        map gives.
    tokens
        Where records are token ids (text), how many there are: the ``vocabulary`` of a network that reads them. None:
        records are numbers.
    lora
        A rank, or a table of the arguments of :func:`sordino.models.lora`: the network is frozen, with trainable
        adapters beside its linear layers.
    **options
        Passed to the factory, such as ``hidden=512`` for ``random-features``.
    """
    check_kind(spec)
    if isinstance(spec, nn.Module) and options:
        raise BadInput(f"model options {sorted(options)} were given together with a ready module; drop them")
    sizes = tuple(int(size) for size in shape)
    if not sizes or min(sizes) < 1:
        raise BadInput(f"record shape {shape} has an empty axis; give (features,) or (channels, height, width)")
    if classes is not None and classes < 2:
        raise BadInput(f"classes = {classes}: a classifier needs at least 2 labels; use classes=None for regression")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        before = None if features is None else make_features(features, sizes, tokens)
        inner = sizes if before is None else before.shape
        if isinstance(spec, nn.Module):
            model = spec
        else:
            factory = check_spec(spec, options)
            options = with_vocabulary(spec, factory, options, tokens if before is None else None)
            model = factory(inner, classes, **options)
        if not isinstance(model, nn.Module):
            raise BadInput(f"model '{spec}' returned a {type(model).__name__}; a factory must return a torch.nn.Module")
        model = model if lora is None else adapted(model, lora)
    model = in_single_precision(model)
    return model if before is None else nn.Sequential(OrderedDict(features=before, model=model))


def check_spec(spec: str, options: dict[str, Any]) -> Factory:
    """The factory of that name; refuses a name that is not known and options that the model does not have."""
    factory = _factory(spec)
    if "features" in options:
        check_features(options["features"])
    check_options(spec, factory, options)
    return factory


def _factory(spec: str) -> Factory:
    if spec in _ZOO:
        return _ZOO[spec]
    if ":" not in spec:
        near = difflib.get_close_matches(spec, _ZOO, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise BadInput(
            f"unknown model '{spec}' (model.name): {hint}known: {', '.join(_ZOO)}, or your own as 'module:factory'"
        )
    module_name, _, attribute = spec.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise BadInput(
            f"model '{spec}': cannot import '{module_name}' ({error}); is its folder on PYTHONPATH?"
        ) from error
    factory: Factory | None = getattr(module, attribute, None)
    if not callable(factory):
        raise BadInput(f"model '{spec}': '{module_name}' has no function '{attribute}'")
    return factory
