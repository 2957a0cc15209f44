"""A step of a turn as a CUDA graph: where steps are short, launching their kernels takes longer than running them.

Grading, the gate with its noise, and the update are recorded once, by running the step's own code, and replayed for
every step of every turn of that shape; between two steps the host does nothing but start the next. What differs from
turn to turn lies in tensors that stay where they were when the graph was recorded. Simulations only: the draws are
keyed by a number that the graph counts up itself, and are booked before it is started.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sordino.client.rows import Rows
from sordino.privacy.gate import Booked, Gate, Permit
from sordino.privacy.types import Release, derive

MOST_RECORDS = 1 << 13
"""A larger stack keeps the device busy by itself."""

MOST_GRAPHS, MOST_BYTES = 16, 1 << 33
"""Every graph owns its buffers, so there are few: so many, and of so many bytes in all."""

SEEN = 2
"""How often a shape comes before it is recorded: recording costs as much as a hundred steps."""

log = logging.getLogger("sordino.engine")

Answers = dict[str, list[Release]]
Body = Callable[["Inputs"], tuple[Release, dict[str, Release]]]
"""One step: from what goes into it to the weights and state after it, and what was released beside the gradient."""


@dataclass(frozen=True)
class Inputs:
    """What goes into a step, as tensors that may be written over for the next turn.

    Attributes
    ----------
    weights, state: as the step finds them, and as it leaves them for the next.
    where, mask: positions of all steps' units and which of them are real, [steps, rows, b].
    step: which of these steps it is, int32.
    public: the broadcast; its tensors are copied anew for every turn, all else is part of what was recorded.
    booked: by part, what the draws need.
    """

    weights: Tensor
    state: dict[str, Tensor]
    where: Tensor
    mask: Tensor
    step: Tensor
    public: dict[str, Any]
    booked: dict[str, Booked]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, in an order that is the same for two of one key."""
        yield from (self.weights, self.where, self.mask)
        yield from (self.state[name] for name in sorted(self.state))
        yield from (value for _, value in sorted(self.public.items()) if isinstance(value, Tensor))
        for _, one in sorted(self.booked.items()):
            yield from one.tensors()

    def copied(self) -> Inputs:
        """The same in places of their own."""
        return Inputs(
            self.weights.clone(),
            {name: value.clone() for name, value in self.state.items()},
            self.where.clone(),
            self.mask.clone(),
            self.step.clone(),
            {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.public.items()},
            {part: one.copied() for part, one in self.booked.items()},
        )

    @property
    def key(self) -> Hashable:
        """What a recording is for: shapes, and every value that is not a tensor."""
        plain = tuple((k, v) for k, v in sorted(self.public.items()) if not isinstance(v, Tensor))
        names = tuple(sorted(self.state)), tuple(sorted(self.public)), tuple(sorted(self.booked))
        return names, repr(plain), tuple((tuple(one.shape), one.dtype) for one in self.tensors())


@dataclass
class Recording:
    """A step that was recorded: where it reads and writes, what it leaves there, and how it is started again."""

    inputs: Inputs
    after: Release
    answers: dict[str, Release]
    again: Callable[[], None]

    def run(self, given: Inputs, steps: range) -> tuple[Release, Answers]:
        """Take these steps from other inputs of the same key."""
        for own, value in zip(self.inputs.tensors(), given.tensors(), strict=True):
            own.copy_(value)
        self.inputs.step.fill_(steps.start)
        heard: Answers = {what: [] for what in self.answers}
        for _ in steps:
            self.again()
            for what, answer in self.answers.items():
                heard[what].append(derive(what, torch.clone, answer))
        return derive("weights", _cloned, self.after), heard


def _cloned(carried: tuple[Tensor, dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    return carried[0].clone(), {name: value.clone() for name, value in carried[1].items()}


def one_step(body: Body, inputs: Inputs) -> tuple[Release, dict[str, Release]] | None:
    """Take a step and put what it leaves where the next one finds it; None where it leaves another kind of state."""
    after, answers = body(inputs)
    state = after.value[1]
    if {k: v.shape for k, v in state.items()} != {k: v.shape for k, v in inputs.state.items()}:
        return None
    kept = derive("weights", lambda found: (_put(inputs.weights, found[0]), _put_all(inputs.state, found[1])), after)
    inputs.step.add_(1)
    return kept, answers


def _put(place: Tensor, value: Tensor) -> Tensor:
    return place if value.data_ptr() == place.data_ptr() else place.copy_(value)


def _put_all(places: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: _put(place, values[name]) for name, place in places.items()}


def record(body: Body, given: Inputs) -> Recording | None:
    """Record a step as a CUDA graph. It runs twice before, so that every kernel is compiled and chosen.

    None where it cannot be recorded: it leaves another kind of state than it found, or reads a value on the host.
    """
    inputs, graph = given.copied(), torch.cuda.CUDAGraph()
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        found = [one_step(body, given.copied()) for _ in range(2)]
    torch.cuda.current_stream().wait_stream(aside)
    if found[-1] is None:
        return None
    try:
        with torch.cuda.graph(graph):
            left = one_step(body, inputs)
    except RuntimeError as error:
        torch.cuda.synchronize()
        log.debug("a step is not recorded: %s", error)
        return None
    return None if left is None else Recording(inputs, *left, graph.replay)


@dataclass
class _Kept:
    """What a run, or a stack of runs, has recorded, and how often each of what could be came."""

    recorded: dict[Hashable, Recording | None] = field(default_factory=dict)
    seen: Counter[Hashable] = field(default_factory=Counter)
    held: int = 0
    """Bytes that the recordings hold, by what a record is known to take."""


@dataclass(frozen=True)
class Recorder:
    """The recorded steps of one run or stack, by keys: the first few shapes that come again; others are never recorded.

    ``kind``: what the rows of a stack do, and how many of them do each; part of every key.
    """

    make: Callable[[Body, Inputs], Recording | None] = record
    kind: Hashable = None
    kept: _Kept = field(default_factory=_Kept)

    def of_kind(self, kind: Hashable) -> Recorder:
        """The same for rows that do this."""
        return replace(self, kind=kind)

    @staticmethod
    def pays(rows: Rows) -> bool:
        """Whether a turn's steps are short enough that launches would dominate."""
        like = rows.records.x
        records = math.prod(rows.padded[0].shape[1:])
        return len(rows.turns) > 1 and 0 < records <= MOST_RECORDS and like.dtype == torch.float32

    def of(self, body: Body, given: Inputs, per_record: int) -> Recording | None:
        """The recording for inputs of this key, once it has been seen often enough and while there is room."""
        key, kept = (self.kind, given.key), self.kept
        if key not in kept.recorded:
            kept.seen[key] += 1
            size = math.prod(given.where.shape[1:]) * per_record
            if kept.seen[key] < SEEN or len(kept.recorded) >= MOST_GRAPHS or kept.held + size > MOST_BYTES:
                return None
            kept.held += size
            kept.recorded[key] = self.make(body, given)
        return kept.recorded[key]


def inputs_of(
    rows: Rows, carried: Release, public: Mapping[str, Any], permit: Permit, gate: Gate, bounds: Mapping[str, Tensor]
) -> Inputs:
    """What goes into the steps of a turn; nothing is booked yet."""
    weights, state = carried.value
    where, mask = rows.padded
    booked = gate.terms_of(permit, bounds)
    step = torch.zeros((), dtype=torch.int32, device=weights.device)
    return Inputs(weights, dict(state), where, mask, step, dict(public), booked)
