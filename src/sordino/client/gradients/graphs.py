"""A stacked pass as a CUDA graph: where a step is short, launching its kernels one by one takes longer than running it.

What a graph reads and writes stays where it was when it was recorded, so every graph owns its buffers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sordino.client.gradients.types import Graded

MOST_RECORDS = 1 << 13
"""A larger stack keeps the device busy by itself."""

MOST_GRAPHS, MOST_BYTES = 8, 1 << 33
"""Every graph owns its buffers, so there are few: so many, and of so many bytes in all."""

SEEN = 4
"""How often a shape comes before it is recorded: recording costs as much as several passes."""

Grade = Callable[[Tensor, Tensor, Tensor, Tensor], Graded]
Shapes = tuple[torch.Size, torch.Size]


@dataclass
class Recorded:
    """The recorded passes over stacks of one shape: a graph that grades the inputs, and a graph that pulls."""

    inputs: tuple[Tensor, ...]
    factors: Tensor
    sums: Tensor
    graded: Graded
    grading: torch.cuda.CUDAGraph
    pulling: torch.cuda.CUDAGraph

    @staticmethod
    def of(grade: Grade, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Recorded:
        """Record both passes. They run a few times before, so that every kernel is compiled and chosen."""
        held = tuple(each.clone() for each in inputs)
        rows, width = inputs[2].shape[:2]
        factors = torch.ones(rows * width, device=held[0].device)
        sums = torch.empty_like(held[0])
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                grade(*held).pull_into(factors, sums)
        torch.cuda.current_stream().wait_stream(aside)
        grading, pulling = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(grading):
            graded = grade(*held)
        with torch.cuda.graph(pulling, pool=grading.pool()):
            graded.pull_into(factors, sums)
        return Recorded(held, factors, sums, graded, grading, pulling)

    def grade(self, inputs: tuple[Tensor, ...], is_current: Callable[[], bool]) -> Graded:
        """Grade other records of the same shape by replaying the graph."""
        for own, given in zip(self.inputs, inputs):
            own.copy_(given)
        self.grading.replay()
        return self.graded.copied(self._pull, is_current)

    def _pull(self, factors: Tensor, out: Tensor) -> None:
        self.factors.copy_(factors)
        self.pulling.replay()
        out.copy_(self.sums)


@dataclass
class Graphs:
    """Recorded passes by shape, of the first few shapes that come again and again; others are never recorded."""

    recorded: dict[Shapes, Recorded] = field(default_factory=dict)
    seen: Counter[Shapes] = field(default_factory=Counter)
    held: int = 0
    """Bytes that the recorded passes hold, by what a record is known to take."""

    @staticmethod
    def pays(x: Tensor, y: Tensor) -> bool:
        """Whether a stack is small enough that launches would dominate, and where graphs exist."""
        return y.is_cuda and 0 < y.numel() <= MOST_RECORDS and y.shape[0] > 1 and x.dtype == torch.float32

    def of(self, grade: Grade, inputs: tuple[Tensor, Tensor, Tensor, Tensor], per_record: int) -> Recorded | None:
        """The recorded passes over stacks of this shape, once it has been seen often enough and while there is room."""
        key = (inputs[0].shape, inputs[1].shape)
        if key not in self.recorded:
            self.seen[key] += 1
            size = math.prod(inputs[2].shape[:2]) * per_record
            if self.seen[key] < SEEN or len(self.recorded) >= MOST_GRAPHS or self.held + size > MOST_BYTES:
                return None
            self.held += size
            self.recorded[key] = Recorded.of(grade, inputs)
        return self.recorded[key]
