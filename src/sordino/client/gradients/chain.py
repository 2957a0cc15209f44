"""A sequential model without autograd: each stage knows its own way back.

The tape needs no graph where the model is a chain of modules, and a step of a small network costs a good part of its
time in building one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sordino.client.gradients import fused
from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.patches import Geometry
from sordino.client.gradients.shadow import in_order, padding_before
from sordino.client.gradients.tape import Layer, Tape, Workspace

Backward = Callable[[Tensor, bool], Tensor]
"""From the gradient of a stage's output to that of its input; to any tensor where nothing further back needs it, which
the second argument says."""

Stage = Callable[[Tensor, Tape], tuple[Tensor, Backward]]
"""One module of a chain: its output, and the way back."""


@dataclass(frozen=True)
class _Trained:
    """A layer with a rule: on the way back it is recorded on the tape, and its input differentiated where asked."""

    layer: Layer

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        layer = self.layer
        out, saved = layer.forward(x, tape)
        tape.volume += out.numel()

        def backward(dy: Tensor, further: bool) -> Tensor:
            dx = layer.input_gradient(dy, saved, tape) if further else dy
            layer.record(dy, saved, tape)
            return dx

        return out, backward


@dataclass(frozen=True)
class _Relu:
    """max(x, 0), written over its input where no other stage needs that."""

    over: bool

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        out = torch.relu_(x) if self.over else torch.relu(x)
        return out, lambda dy, further: torch.ops.aten.threshold_backward(dy, out, 0)


@dataclass(frozen=True)
class _MaxPool:
    """Largest value of every window, in buffers that outlive the pass."""

    name: str
    geometry: Geometry

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        name, places = self.name, (*self.geometry, False)
        shape = (*x.shape[:2], *self.geometry.output(*x.shape[2:]))
        out = _image(tape.scratch, f"{name}/out", shape, x)
        index = _image(tape.scratch, f"{name}/index", shape, x, torch.long)
        torch.ops.aten.max_pool2d_with_indices.out(x, *places, out=out, indices=index)

        def backward(dy: Tensor, further: bool) -> Tensor:
            dx = _image(tape.scratch, f"{name}/dx", tuple(x.shape), x)
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
    """A convolution and the rectified pool after it; one kernel where there is one."""

    convolution: _Trained
    layer: ConvLayer
    pool: _RectifiedPool

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        layer, geometry = self.layer, self.pool.pool.geometry
        if layer.pools(x, tape, geometry):
            out, saved = layer.forward_pooled(x, tape, geometry.kernel[0])
            tape.volume += out.numel() * geometry.taps
            return out, lambda dy, further: layer.backward_pooled(dy, saved, tape, geometry, further)
        between, back = self.convolution(x, tape)
        out, through = self.pool(between, tape)
        return out, lambda dy, further: back(through(dy, True), further)


def _flat(x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
    """All axes but the records' as one; on the way back in the input's order in memory, as earlier stages like it."""
    shape, last = x.shape, x.dim() == 4 and not x.is_contiguous()

    def backward(dy: Tensor, further: bool) -> Tensor:
        dx = dy.view(shape)
        return dx.contiguous(memory_format=torch.channels_last) if last else dx

    return x.flatten(1), backward


@dataclass(frozen=True)
class _Other:
    """Any module without trained parameters, by autograd over itself alone."""

    module: nn.Module

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        given = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            out: Tensor = self.module(given)
        return out.detach(), lambda dy, further: torch.autograd.grad(out, given, dy)[0]


@dataclass(frozen=True)
class _Before:
    """Any module before the first trained layer: nothing asks for its gradient."""

    module: nn.Module

    def __call__(self, x: Tensor, tape: Tape) -> tuple[Tensor, Backward]:
        return self.module(x), lambda dy, further: dy


@dataclass(frozen=True)
class Chain:
    """Stages of a model; those before ``first`` have nothing to train and are not gone back to."""

    stages: tuple[Stage, ...]
    first: int

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, list[Backward]]:
        """Outputs of the model, and every stage's way back."""
        ways: list[Backward] = []
        for stage in self.stages:
            x, way = stage(x, tape)
            ways.append(way)
        return x, ways

    def backward(self, dy: Tensor, ways: list[Backward]) -> None:
        """Go back to the first trained layer, recording each; what a stage saved goes as the pass goes."""
        for index in range(len(self.stages) - 1, self.first - 1, -1):
            dy = ways.pop()(dy, index > self.first)


def chain_of(model: nn.Module, layers: list[Layer]) -> Chain | None:
    """The model as a chain, or None where its own forward code decides."""
    by_name = {layer.name: layer for layer in layers}
    stages: list[Stage] = []
    trained: list[int] = []
    for name, module in in_order("", model):
        if name not in by_name:
            if any(inner.startswith(f"{name}.") for inner in by_name):
                return None
            stages.append(_stage(name, module, stages[-1]) if trained else _Before(module))
            continue
        padding = padding_before(module)
        if padding is not None:
            stages.append(_Other(padding) if trained else _Before(padding))
        trained.append(len(stages))
        stages.append(_Trained(by_name[name]))
    return Chain(_joined(stages), trained[0]) if len(trained) == len(layers) else None


def _stage(name: str, module: nn.Module, before: Stage) -> Stage:
    if type(module) is nn.ReLU:
        return _Relu(over=isinstance(before, _Trained | _MaxPool))
    if type(module) is nn.MaxPool2d and not (module.return_indices or module.ceil_mode):
        return _MaxPool(name, Geometry.of(module))
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return _flat
    return _Other(module)


def _joined(stages: list[Stage]) -> tuple[Stage, ...]:
    """The same stages; a pool and the rectifier after it as one, and with a convolution before them."""
    kept: list[Stage] = []
    for stage in stages:
        last = kept[-1] if kept else None
        if not (isinstance(stage, _Relu) and isinstance(last, _MaxPool) and last.geometry.taps <= fused.POOL_TAPS):
            kept.append(stage)
            continue
        kept[-1] = joint = _RectifiedPool(last, stage)
        before = kept[-2] if len(kept) > 1 else None
        if isinstance(before, _Trained) and isinstance(before.layer, ConvLayer):
            kept[-2:] = [_ConvolvedPool(before, before.layer, joint)]
    return tuple(kept)
