"""The fast engine's own copy of a model: its trainable leaves run by their rules, the rest as written.

Where the model is a chain of modules, each stage knows its own way back and no autograd is needed: a step of a small
network costs a good part of its time in building a graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from sordino.client.gradients import fused, pooled
from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.layers import EmbeddingLayer, GroupNormLayer, LayerNormLayer, LinearLayer
from sordino.client.gradients.parts import parted
from sordino.client.gradients.patches import Geometry, pads_with_zeros
from sordino.client.gradients.standardised import StandardisedConvLayer
from sordino.client.gradients.tape import Layer, Tape, Unsupported, Workspace
from sordino.client.gradients.tied import TiedLayer
from sordino.client.gradients.types import Slot
from sordino.models.attention import why_whole
from sordino.models.recurrent import why_kept
from sordino.models.standardised import StandardisedConv2d

_RULES: dict[type[nn.Module], Callable[[str, Any, dict[str, Slot]], Layer]] = {
    nn.Linear: LinearLayer,
    NonDynamicallyQuantizableLinear: LinearLayer,
    nn.Embedding: EmbeddingLayer,
    nn.Conv1d: ConvLayer,
    nn.Conv2d: ConvLayer,
    StandardisedConv2d: StandardisedConvLayer,
    nn.GroupNorm: GroupNormLayer,
    nn.InstanceNorm1d: GroupNormLayer,
    nn.InstanceNorm2d: GroupNormLayer,
    nn.InstanceNorm3d: GroupNormLayer,
    nn.LayerNorm: LayerNormLayer,
}


def shadow_of(
    model: nn.Module, slots: list[Slot], run: Callable[[Layer, Tensor], Tensor]
) -> tuple[nn.Module, list[Layer]]:
    """Copy a model so that every leaf with trainable parameters calls ``run(layer, x)``, or raise Unsupported.

    The copy's own trainable weights become NaN views of a single number. They cost no memory, and code that reads them
    past the leaf's ``forward`` cannot go unnoticed.
    """
    hollow: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.new_full((), torch.nan).expand(parameter.shape), requires_grad=False)
        for parameter in model.parameters()
        if parameter.requires_grad
    }
    shadow = copy.deepcopy(model, hollow)
    owned = slots_by_layer(slots)
    for name, key, first in aliases(model):
        owned.setdefault(name, {})[key] = next(slot for slot in slots if slot.name == first)
    parted(shadow, owned)
    layers = [_layer(name, shadow.get_submodule(name), own) for name, own in owned.items()]
    for layer in layers:
        _route(shadow.get_submodule(layer.name), layer, run)
    layers += _ties(layers)
    for module in shadow.modules():
        if getattr(module, "inplace", False):
            setattr(module, "inplace", False)  # noqa: B010  (what it would write over, a layer may have recorded)
        if type(module) is nn.Sequential:
            pool_before_relu(module)
    return shadow, layers


def slots_by_layer(slots: list[Slot]) -> dict[str, dict[str, Slot]]:
    """The slots of every module that owns trainable parameters, by the module's name and the parameter's own."""
    owned: dict[str, dict[str, Slot]] = {}
    for slot in slots:
        owner, _, own = slot.name.rpartition(".")
        owned.setdefault(owner, {})[own] = slot
    return owned


def aliases(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """The further names of trained parameters that several modules have: module, own name there, first name."""
    first: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if id(parameter) in first:
                yield name, key, first[id(parameter)]
            else:
                first[id(parameter)] = f"{name}.{key}" if name else key


def _ties(layers: list[Layer]) -> list[Layer]:
    """A layer for every weight that several layers share."""
    uses: dict[int, list[Layer]] = {}
    for layer in layers:
        for slot in layer.slots.values():
            uses.setdefault(slot.offset, []).append(layer)
    shared = {offset: members for offset, members in uses.items() if len(members) > 1}
    return [TiedLayer(_slot_at(members[0], offset), members) for offset, members in shared.items()]


def _slot_at(layer: Layer, offset: int) -> Slot:
    return next(slot for slot in layer.slots.values() if slot.offset == offset)


def _layer(name: str, module: nn.Module, own: dict[str, Slot]) -> Layer:
    kind = type(module)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        why = why_whole(module) if isinstance(module, nn.MultiheadAttention) else why_kept(module)
        raise Unsupported(f"layer '{name}' ({kind.__name__}) {why or 'is of a kind that is not known'}")
    if kind not in _RULES:
        raise Unsupported(f"layer '{name}' ({kind.__name__}) has no fast rule")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise Unsupported(f"layer '{name}' renormalises its table or scales gradients by frequency")
    return _RULES[kind](name, module, own)


def _route(module: nn.Module, layer: Layer, run: Callable[[Layer, Tensor], Tensor]) -> None:
    padding = padding_before(module)
    module.forward = lambda x: run(layer, x if padding is None else padding(x))


def padding_before(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Padding that the layer's rule does not know (reflected, circular, "same"), to be done before it."""
    if not isinstance(module, nn.Conv1d | nn.Conv2d) or pads_with_zeros(module):
        return None
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return partial(functional.pad, pad=list(module._reversed_padding_repeated_twice), mode=mode)


def pool_before_relu(sequence: nn.Sequential | list[nn.Module]) -> None:
    """Swap every ReLU and the max-pooling after it: the same function and gradient on a quarter of the numbers."""
    for index in range(len(sequence) - 1):
        first, second = sequence[index], sequence[index + 1]
        if type(first) is nn.ReLU and type(second) is nn.MaxPool2d and not second.return_indices:
            sequence[index], sequence[index + 1] = second, first


def in_order(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of nested sequences, with their names, in the order in which they run."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from in_order(f"{name}.{key}" if name else key, child)


Backward = Callable[[Tensor, bool], Tensor]
"""From the gradient of a stage's output to that of its input; to any tensor where nothing further back needs it, which
the second argument says."""


class Place(Protocol):
    """Where a chain runs: a pass's tape, or the buffers of a site's thread."""

    scratch: Workspace


Where = TypeVar("Where", bound=Place)
Stage = Callable[[Tensor, Where], tuple[Tensor, Backward]]
"""One module of a chain: its output, and the way back."""


@dataclass(frozen=True)
class _Trained:
    """A layer with a rule: on the way back it is recorded on the tape, and its input differentiated where asked."""

    layer: Layer

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        layer = self.layer
        out, saved = layer.forward(x, tape)
        tape.volume += out.numel()
        return out, lambda dy, further: layer.backward(dy, saved, tape, further)


@dataclass(frozen=True)
class _Relu:
    """max(x, 0), written over its input where no other stage needs that."""

    over: bool

    def __call__(self, x: Tensor, place: Place) -> tuple[Tensor, Backward]:
        out = torch.relu_(x) if self.over else torch.relu(x)
        return out, lambda dy, further: torch.ops.aten.threshold_backward(dy, out, 0)


@dataclass(frozen=True)
class _MaxPool:
    """Largest value of every window, in buffers that outlive the pass."""

    name: str
    geometry: Geometry

    def __call__(self, x: Tensor, place: Place) -> tuple[Tensor, Backward]:
        name, places = self.name, (*self.geometry, False)
        shape = (*x.shape[:2], *self.geometry.output(*x.shape[2:]))
        out = _image(place.scratch, f"{name}/out", shape, x)
        index = _image(place.scratch, f"{name}/index", shape, x, torch.long)
        torch.ops.aten.max_pool2d_with_indices.out(x, *places, out=out, indices=index)

        def backward(dy: Tensor, further: bool) -> Tensor:
            dx = _image(place.scratch, f"{name}/dx", tuple(x.shape), x)
            torch.ops.aten.max_pool2d_with_indices_backward.grad_input(dy, x, *places, index, grad_input=dx)
            return dx

        return out, backward


def _image(
    scratch: Workspace, key: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """A buffer for images in the memory order of another one."""
    n, channels, height, width = shape
    if like.is_contiguous():
        return scratch.take(key, shape, like, dtype)
    return scratch.take(key, (n, height, width, channels), like, dtype).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class _RectifiedPool:
    """The largest of every window, then max(·, 0); one kernel where there is one."""

    pool: _MaxPool
    relu: _Relu

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        geometry = self.pool.geometry
        if fused.serves(x):
            out, taken = fused.pooled(x, geometry)
            size = (x.shape[2], x.shape[3])
            return out, lambda dy, further: fused.pooled_back(dy, taken, size, geometry)
        largest, back = self.pool(x, tape)
        out, through = self.relu(largest, tape)
        return out, lambda dy, further: back(through(dy, further), further)


@dataclass(frozen=True)
class _ConvolvedPool:
    """A convolution and the rectified pool after it; one kernel on a GPU, compiled loops on a CPU where there are.

    ``flat``: what it puts out is flattened next.
    """

    convolution: _Trained
    layer: ConvLayer
    pool: _RectifiedPool
    flat: bool = False

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        layer, geometry = self.layer, self.pool.pool.geometry
        if layer.pools(x, tape, geometry):
            out, saved = layer.forward_pooled(x, tape, geometry.kernel[0], self.flat)
            tape.volume += out.numel() * geometry.taps
            return out, lambda dy, further: layer.backward_pooled(dy, saved, tape, geometry, further)
        if pooled.serves(layer, x, tape, geometry):
            out, saved = pooled.forward(layer, x, tape, geometry.kernel[0])
            tape.volume += out.numel() * geometry.taps
            return out, lambda dy, further: pooled.backward(layer, dy, saved, tape, geometry.kernel[0], further)
        between, back = self.convolution(x, tape)
        out, through = self.pool(between, tape)
        return out, lambda dy, further: back(through(dy, True), further)


def _flat(x: Tensor, place: Place) -> tuple[Tensor, Backward]:
    """All axes but the records' as one; on the way back in the input's order in memory, as earlier stages like it."""
    shape, last = x.shape, x.dim() == 4 and not x.is_contiguous()

    def backward(dy: Tensor, further: bool) -> Tensor:
        dx = dy.view(shape)
        return dx.contiguous(memory_format=torch.channels_last) if last else dx

    return x.flatten(1), backward


@dataclass(frozen=True)
class _Other:
    """Any function without trained parameters, by autograd over itself alone; without where nothing goes back."""

    function: Callable[[Tensor], Tensor]
    back: bool

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        if not self.back:
            return self.function(x), lambda dy, further: dy
        given = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            out = self.function(given)
        return out.detach(), lambda dy, further: torch.autograd.grad(out, given, dy)[0]


@dataclass(frozen=True)
class Chain(Generic[Where]):
    """Stages of a model; those before ``first`` have nothing to train and are not gone back to."""

    stages: tuple[Stage[Where], ...]
    first: int

    def forward(self, x: Tensor, place: Where) -> tuple[Tensor, list[Backward]]:
        """Outputs of the model, and every stage's way back."""
        ways: list[Backward] = []
        for stage in self.stages:
            x, way = stage(x, place)
            ways.append(way)
        return x, ways

    def backward(self, dy: Tensor, ways: list[Backward]) -> None:
        """Go back to the first trained layer, recording each; what a stage saved goes as the pass goes."""
        for index in range(len(self.stages) - 1, self.first - 1, -1):
            dy = ways.pop()(dy, index > self.first)


def chain_of(model: nn.Module, layers: list[Layer]) -> Chain[Tape] | None:
    """The model as a chain, or None where its own forward code decides."""
    if any(layer.recorder is not layer for layer in layers):
        return None
    by_name = {layer.name: layer for layer in layers}
    stages: list[Stage[Tape]] = []
    trained: list[int] = []
    for name, module in in_order("", model):
        if name not in by_name:
            if any("forward" in vars(inner) for inner in module.modules()):
                return None  # a trained layer is inside, or is this module under another name
            plain = plain_stage(name, module, isinstance(stages[-1], _Trained | _MaxPool)) if trained else None
            stages.append(plain or _Other(module, back=bool(trained)))
            continue
        padding = padding_before(module)
        if padding is not None:
            stages.append(_Other(padding, back=bool(trained)))
        trained.append(len(stages))
        stages.append(_Trained(by_name[name]))
    return Chain(_joined(stages), trained[0]) if len(trained) == len(layers) else None


def plain_stage(name: str, module: nn.Module, over: bool = False) -> Stage[Place] | None:
    """The stage of a module without parameters that has one of its own; ``over``: a ReLU may write over its input."""
    if type(module) is nn.ReLU:
        return _Relu(over)
    if type(module) is nn.MaxPool2d and not (module.return_indices or module.ceil_mode):
        return _MaxPool(name, Geometry.of(module))
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return _flat
    return None


def _joined(stages: list[Stage[Tape]]) -> tuple[Stage[Tape], ...]:
    """The same stages; a pool and the rectifier after it as one, and with a convolution before them."""
    kept: list[Stage[Tape]] = []
    for stage in stages:
        last = kept[-1] if kept else None
        if stage is _flat and isinstance(last, _ConvolvedPool):
            kept[-1] = replace(last, flat=True)
        if not (isinstance(stage, _Relu) and isinstance(last, _MaxPool) and last.geometry.taps <= fused.POOL_TAPS):
            kept.append(stage)
            continue
        kept[-1] = joint = _RectifiedPool(last, stage)
        before = kept[-2] if len(kept) > 1 else None
        if isinstance(before, _Trained) and isinstance(before.layer, ConvLayer):
            kept[-2:] = [_ConvolvedPool(before, before.layer, joint)]
    return tuple(kept)
