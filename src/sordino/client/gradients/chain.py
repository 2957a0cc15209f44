"""A sequential model without autograd: each stage knows its own way back.

The tape needs no graph where the model is a chain of modules, and a step of a small network costs a good part of its
time in building one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from sordino.client.gradients import fused
from sordino.client.gradients.convolution import ConvLayer
from sordino.client.gradients.patches import Geometry, Pair
from sordino.client.gradients.shadow import padding_before
from sordino.client.gradients.tape import Layer, Saved, Tape, Workspace


class Stage(Protocol):
    """One module of a chain."""

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Output, and what the way back needs."""

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Gradient of the input; any tensor where nothing ``further`` back needs it."""


@dataclass(frozen=True)
class Trained:
    """A layer with a rule."""

    layer: Layer

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """The layer's own."""
        out, saved = self.layer.forward(x, tape)
        tape.volume += out.numel()
        return out, saved

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Record the layer on the tape; differentiate its input where asked."""
        dx = self.layer.input_gradient(dy, saved, tape) if further else dy
        self.layer.record(dy, saved, tape)
        return dx


@dataclass(frozen=True)
class Relu:
    """max(x, 0), written over its input where no other stage needs that."""

    over: bool

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """The positive part."""
        out = torch.relu_(x) if self.over else torch.relu(x)
        return out, (out,)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """dy where the output is positive."""
        dx: Tensor = torch.ops.aten.threshold_backward(dy, saved[0], 0)
        return dx


@dataclass(frozen=True)
class MaxPool:
    """Largest value of every window, in buffers that outlive the pass."""

    name: str
    geometry: Geometry

    def _places(self) -> tuple[Pair, Pair, Pair, Pair, bool]:
        return self.geometry.kernel, self.geometry.stride, self.geometry.padding, self.geometry.dilation, False

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """Values, and where they were."""
        shape = (*x.shape[:2], *self.geometry.output(x.shape[2], x.shape[3]))
        out = image(tape.scratch, f"{self.name}/out", shape, x, x.dtype)
        index = image(tape.scratch, f"{self.name}/index", shape, x, torch.long)
        torch.ops.aten.max_pool2d_with_indices.out(x, *self._places(), out=out, indices=index)
        return out, (x, index)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """dy at those places."""
        x, index = saved
        dx = image(tape.scratch, f"{self.name}/dx", tuple(x.shape), x, x.dtype)
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(dy, x, *self._places(), index, grad_input=dx)
        return dx


@dataclass(frozen=True)
class RectifiedPool:
    """The largest of every window, then max(·, 0); one kernel where there is one."""

    pool: MaxPool
    relu: Relu

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """One after the other, or both at once."""
        if fused.serves(x):
            out, taken = fused.pooled(x, self.pool.geometry)
            return out, (x, taken)
        largest, (x, places) = self.pool.forward(x, tape)
        out, _ = self.relu.forward(largest, tape)
        return out, (x, places, out)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """dy where the largest value was, if that was positive."""
        x, places = saved[:2]
        if places.dtype == torch.uint8:
            return fused.pooled_back(dy, places, (x.shape[2], x.shape[3]), self.pool.geometry)
        return self.pool.backward(self.relu.backward(dy, saved[2:], tape, further), (x, places), tape, further)


@dataclass(frozen=True)
class ConvolvedPool:
    """A convolution and the rectified pool after it; one kernel where there is one."""

    convolution: Trained
    pool: RectifiedPool

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """One after the other, or both at once."""
        layer, geometry = self.convolution.layer, self.pool.pool.geometry
        if isinstance(layer, ConvLayer) and layer.pools(x, tape, geometry):
            out, saved = layer.forward_pooled(x, tape, geometry.kernel[0])
            tape.volume += out.numel() * geometry.taps
            return out, saved
        between, first = self.convolution.forward(x, tape)
        out, second = self.pool.forward(between, tape)
        return out, (*first, *second)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Back through the pool, then through the convolution."""
        layer, geometry = self.convolution.layer, self.pool.pool.geometry
        if isinstance(layer, ConvLayer) and layer.pools(saved[0], tape, geometry):
            return layer.backward_pooled(dy, saved, tape, geometry, further)
        own = 2 if saved[-1].dtype == torch.uint8 else 3
        between = self.pool.backward(dy, saved[-own:], tape, True)
        return self.convolution.backward(between, saved[:-own], tape, further)


def image(scratch: Workspace, key: str, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """A buffer for images in the memory order of another one."""
    n, channels, height, width = shape
    if like.is_contiguous():
        return scratch.take(key, shape, dtype, like.device)
    return scratch.take(key, (n, height, width, channels), dtype, like.device).permute(0, 3, 1, 2)


class Flat:
    """All axes but the records' as one."""

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """In the order of the axes, whatever the order in memory."""
        return x.flatten(1), (x,)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Back to the input's order in memory, in which the stages before it are fast."""
        dx = dy.view(saved[0].shape)
        if dx.dim() == 4 and not saved[0].is_contiguous():
            dx = dx.contiguous(memory_format=torch.channels_last)
        return dx


@dataclass(frozen=True)
class Other:
    """Any module without trained parameters, by autograd over itself alone."""

    module: nn.Module

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """The module's own, with a graph of one step."""
        x = x.detach().requires_grad_(x.is_floating_point())
        with torch.enable_grad():
            out: Tensor = self.module(x)
        return out.detach(), (x, out)

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Gradient through that step."""
        return torch.autograd.grad(saved[1], saved[0], dy)[0]


@dataclass(frozen=True)
class Fixed:
    """Any module before the first trained layer: nothing asks for its gradient."""

    module: nn.Module

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, Saved]:
        """The module's own."""
        out: Tensor = self.module(x)
        return out, ()

    def backward(self, dy: Tensor, saved: Saved, tape: Tape, further: bool) -> Tensor:
        """Never needed."""
        return dy


@dataclass(frozen=True)
class Chain:
    """Stages of a model; those before ``first`` have nothing to train and are not gone back to."""

    stages: tuple[Stage, ...]
    first: int

    def forward(self, x: Tensor, tape: Tape) -> tuple[Tensor, list[Saved]]:
        """Outputs of the model, and what every stage saved."""
        saved: list[Saved] = []
        for stage in self.stages:
            x, kept = stage.forward(x, tape)
            saved.append(kept)
        return x, saved

    def backward(self, dy: Tensor, saved: list[Saved], tape: Tape) -> None:
        """Go back to the first trained layer, recording each."""
        for index in range(len(self.stages) - 1, self.first - 1, -1):
            dy = self.stages[index].backward(dy, saved.pop(), tape, index > self.first)


def chain_of(model: nn.Module, layers: list[Layer]) -> Chain | None:
    """The model as a chain, or None where its own forward code decides."""
    by_name = {layer.name: layer for layer in layers}
    stages: list[Stage] = []
    trained: list[int] = []
    for name, module in in_order("", model):
        if name not in by_name:
            if any(inner.startswith(f"{name}.") for inner in by_name):
                return None
            stages.append(_stage(name, module, stages[-1]) if trained else Fixed(module))
            continue
        padding = padding_before(module)
        if padding is not None:
            stages.append(Other(padding) if trained else Fixed(padding))
        trained.append(len(stages))
        stages.append(Trained(by_name[name]))
    return Chain(_joined(stages), trained[0]) if len(trained) == len(layers) else None


def _joined(stages: list[Stage]) -> tuple[Stage, ...]:
    """The same stages; a pool and the rectifier after it as one, and with a convolution before them."""
    kept: list[Stage] = []
    for stage in stages:
        last = kept[-1] if kept else None
        if not (isinstance(stage, Relu) and isinstance(last, MaxPool) and last.geometry.taps <= fused.POOL_TAPS):
            kept.append(stage)
            continue
        kept[-1] = joint = RectifiedPool(last, stage)
        before = kept[-2] if len(kept) > 1 else None
        if isinstance(before, Trained) and isinstance(before.layer, ConvLayer):
            kept[-2:] = [ConvolvedPool(before, joint)]
    return tuple(kept)


def in_order(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules of nested sequences in the order in which they run."""
    if type(module) is not nn.Sequential:
        yield name, module
        return
    for key, child in module._modules.items():
        if child is not None:
            yield from in_order(f"{name}.{key}" if name else key, child)


def _stage(name: str, module: nn.Module, before: Stage) -> Stage:
    if type(module) is nn.ReLU:
        return Relu(over=isinstance(before, Trained | MaxPool))
    if type(module) is nn.MaxPool2d and not (module.return_indices or module.ceil_mode):
        places = (module.kernel_size, module.stride, module.padding, module.dilation)
        return MaxPool(name, Geometry(*(_pair(each) for each in places)))
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flat()
    return Other(module)


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value
