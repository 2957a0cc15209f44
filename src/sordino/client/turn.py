"""A client's turn: the only loop that sees gradients. The same function runs for a thousand rows and for one site.

sample → per-record gradients → factors → gate (bound, noise, divide) → update → … → upload
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sordino.client.ask import Question, scalar_piece
from sordino.client.augment import Augment
from sordino.client.clip import Clip, Public, per_record, per_row
from sordino.client.gradients import Alone, Engine, Graded, loops
from sordino.client.local import Local, State, one_on_cpu
from sordino.client.recorded import Inputs, Recorder, Recording, inputs_of
from sordino.client.rows import Rows
from sordino.errors import SordinoError
from sordino.privacy.gate import Block, Gate, OneByOne, Permit, Piece
from sordino.privacy.types import NotReleased, Release, derive

Drawn = tuple[Tensor, Tensor, Tensor | None]
"""A batch: records, labels, and which are real (None: all)."""


@dataclass(frozen=True)
class Work:
    """What a method does at a client, and how gradients are computed there.

    ``also``: questions answered from every step's own batch, beside the gradient.
    ``stack``: many rows with different weights at once, from the first step on (GPU); otherwise first steps are shared.
    ``most``: inputs per piece, so that a large draw is cut up and never truncated.
    ``alone``: take one record at a time and release exact sums, as a site does; rows then come one at a time.
    ``augment``: look at several versions of every record. ``unit_records``: the most records that a unit of privacy
    has, 1 where every record is one; ``engine`` and ``alone`` are made for as many copies as both together make.
    ``recorder``: where the steps of a stack are recorded for a GPU, if they are; it serves this work alone.
    """

    engine: Engine
    clip: Clip
    local: Local
    also: tuple[Question, ...] = ()
    stack: bool = False
    most: int = 4096
    alone: Alone | None = None
    augment: Augment | None = None
    unit_records: int = 1
    recorder: Recorder | None = field(default=None, compare=False)

    @property
    def copies(self) -> int:
        """How many inputs of the model a unit is at most."""
        return self.unit_records * (1 if self.augment is None else self.augment.copies)

    @property
    def piece(self) -> int:
        """Units of a piece: ``most``, or fewer where each is several inputs."""
        return max(1, self.most // self.copies)

    def seen(self, batch: Drawn, number: int, step: int) -> Drawn:
        """Units as the engine takes them in a step of round ``number``: as they are, or every record's copies."""
        x, y, mask = batch
        if self.augment is None or self.augment.copies == 1:
            return batch
        x = self.augment.of(x, number, step)
        if self.unit_records == 1:
            return x, y, mask
        axis, copies = y.dim() - 1, self.augment.copies
        y = y.repeat_interleave(copies, axis)
        return x.flatten(axis, axis + 1), y, None if mask is None else mask.repeat_interleave(copies, axis)


@dataclass(frozen=True)
class Upload:
    """What leaves the clients of a chunk: named releases, a row each, and nothing else."""

    parts: Mapping[str, Release]

    def __post_init__(self) -> None:
        for name, part in self.parts.items():
            if not isinstance(part, Release):
                raise NotReleased(f"upload {name!r} is a {type(part).__name__} that did not pass the gate")


def take_turn(
    work: Work, rows: Rows, start: Release, state: Release, public: Public, permit: Permit, gate: Gate
) -> tuple[Upload, Release]:
    """K private steps from ``start`` (the weights the server sent), then the upload and the client's new state.

    ``start`` holds [d], or [rows, d] where rows of several runs share a stack.

    Guarantees: the weights after each step are a function of releases and public facts alone, checked by type;
    ``rows.steps`` releases are made for every row, which is what ``permit`` was charged for.
    """
    count, width = len(rows.turns), work.engine.dimension
    limits = {"gradient": work.clip.bound(public), **{one.what: one.bound(public) for one in work.also}}
    bounds = {part: per_row(limit, count, start.value) for part, limit in limits.items()}
    leaves = work.local.leaves and rows.steps > 0  # with no step, the upload's difference would be written over them
    begin = work.local.begin or (
        lambda w, s: (w if leaves and one_on_cpu(w) else w.clone(memory_format=torch.contiguous_format), s)
    )
    carried = derive("weights", lambda w, s: begin(w.expand(count, width), s), start, state)
    answers: dict[str, list[Release]] = {one.what: [] for one in work.also}
    for step in range(rows.steps):
        recording = _recording(work, rows, carried, public, permit, gate, bounds)
        if recording is not None:
            gate.book(permit, bounds, left := range(step, rows.steps))
            carried, rest = recording[0].run(recording[1], left)
            for what, heard in answers.items():
                heard += rest[what]
            break
        batch = _singles if work.alone is not None and gate.private else _pieces
        pieces = batch(work, rows, step, carried.value[0], public)
        released = gate.release(permit, step, pieces, bounds, width)
        beside = [released[what] for what in answers]
        carried = derive(
            "weights",
            lambda c, g, *b: work.local.update(c[0], c[1], g, {**public, **dict(zip(answers, b))}),
            carried,
            released["gradient"],
            *beside,
        )
        for what, heard in answers.items():
            heard.append(released[what])
    ended = derive("upload", lambda c, w: work.local.finish(c[0], w, c[1], public), carried, start)
    parts = {name: derive(name, lambda e, n=name: e[0][n], ended) for name in ended.value[0]}
    parts |= {what: derive(what, lambda *v: torch.stack(v).mean(0), *heard) for what, heard in answers.items()}
    return Upload(parts), derive("state", lambda e: e[1], ended)


def _recording(
    work: Work,
    rows: Rows,
    carried: Release,
    public: Public,
    permit: Permit,
    gate: Gate,
    bounds: Mapping[str, Tensor],
) -> tuple[Recording, Inputs] | None:
    """What these steps were recorded as, and what goes into it; None where they are taken one by one."""
    recorder, plain = work.recorder, work.copies == 1 and work.alone is None and work.stack
    if recorder is None or not (plain and work.engine.lasts and recorder.pays(rows)):
        return None
    width, count = work.engine.dimension, len(rows.turns)

    def body(given: Inputs) -> tuple[Release, dict[str, Release]]:
        here = given.where.index_select(0, given.step.view(1))[0], given.mask.index_select(0, given.step.view(1))[0]
        graded = work.engine.lasting(given.weights, *rows.stacked(*here))
        pieces = [_piece(work, graded, given.public, None, count)]
        released = gate.release_booked(given.booked, given.step, pieces, width)
        beside = {what: released[what] for what in given.booked if what != "gradient"}

        def updated(found: tuple[Tensor, State], gradient: Tensor, *heard: Tensor) -> tuple[Tensor, State]:
            return work.local.update(found[0], found[1], gradient, {**given.public, **dict(zip(beside, heard))})

        before = Release.public((given.weights, given.state), "weights and state of earlier releases")
        return derive("weights", updated, before, released["gradient"], *beside.values()), beside

    given = inputs_of(rows, carried, public, permit, gate, bounds)
    found = recorder.of(body, given, work.engine.bytes_per_record)
    return None if found is None else (found, given)


def answer(
    work: Work, question: Question, rows: Rows, start: Release, public: Public, permit: Permit, gate: Gate
) -> Release:
    """Answer a question from a batch of its own, at the weights the server sent: [rows, 1]."""
    bounds = {question.what: per_row(question.bound(public), len(rows.turns), start.value)}
    params = start.value.expand(len(rows.turns), work.engine.dimension)
    # Weights are equal, so rows need no stack of their own: one flat pass serves them all, on a GPU too.
    alone = replace(work, also=(question,), stack=False)
    if work.alone is not None and gate.private:
        batch = _singles(alone, rows, 0, params, public, question.of_losses)
        return gate.release(permit, 0, batch, bounds, 1)[question.what]
    pieces = _heard(alone, rows, params, public) if question.of_losses else _pieces(alone, rows, 0, params, public)
    return gate.release(permit, 0, pieces, bounds, 1)[question.what]


def share(
    work: Work,
    rows: Rows,
    start: Release,
    public: Public,
    permit: Permit,
    gate: Gate,
    question: Question | None = None,
) -> Release:
    """One batch's sums as integers on the common lattice, to be masked and added up with others': [1, all parts].

    The gradient and what is asked beside it, or a question with a batch of its own. The client takes no step: what it
    would step by protects its records only once others' noise is added.
    """
    asked = replace(work, also=(question,)) if question is not None else work
    limits = {} if question is not None else {"gradient": work.clip.bound(public)}
    limits |= {one.what: one.bound(public) for one in asked.also}
    bounds = {part: per_row(limit, 1, start.value) for part, limit in limits.items()}
    params = start.value.expand(1, work.engine.dimension)
    batch = _singles(asked, rows, 0, params, public, question is not None and question.of_losses)
    found = gate.release_whole(permit, 0, batch, bounds, work.engine.dimension)
    return derive("message", lambda *parts: torch.cat(parts, dim=1), *(found[part] for part in limits))


def _heard(work: Work, rows: Rows, params: Tensor, public: Public) -> Iterator[Mapping[str, Piece]]:
    """The answers of a batch to a question about losses alone: no gradients are needed."""
    (question,), count = work.also, len(rows.turns)
    if count == 1:
        for drawn in rows.one(0, work.piece):
            losses = work.engine.losses(params, *work.seen(drawn, rows.turns[0].round, 0))
            yield {question.what: _answers(question, losses, public, None, 1)}
        return
    x, y, owner, mask = rows.shared(0)
    if len(y):
        x, y, mask = work.seen((x, y, mask), rows.turns[0].round, 0)
        losses = work.engine.losses(params[:1], x[None], y[None], None if mask is None else mask[None])[0]
        yield {question.what: _answers(question, losses, per_record(public, owner, count), owner, count)}


def _answers(question: Question, losses: Tensor, public: Public, owner: Tensor | None, rows: int) -> Piece:
    values = torch.where(losses.isfinite(), question.values(losses, losses, public), 0.0)
    return scalar_piece(values, owner, rows, lambda v: v[:, None] if owner is None else v[owner])


def _singles(work: Work, rows: Rows, step: int, params: Tensor, public: Public, only: bool = False) -> OneByOne:
    """The step's batch one record at a time: gradients, and answers to what is asked of the same batch.

    ``only``: answers to a question about losses, for which no gradient is needed.
    """
    if work.alone is None or len(rows.turns) != 1:
        raise SordinoError("exact sums are made one row at a time, by work that takes records one by one")
    grade = work.alone.under(params[0], gradients=not only)
    where = torch.from_numpy(rows.batches[0][step])

    troubles: list[str] = []

    def terms(some: Sequence[int]) -> dict[str, Block]:
        x, y, valid = work.seen(rows.records.at(where[list(some)]), rows.turns[0].round, step)
        graded = grade(x, y, valid)
        usable = [one and math.isfinite(loss) for one, loss in zip(_flags(valid, len(y)), graded.losses)]
        if only:
            heard = _answers_alone(work.also, graded.losses, graded.losses, usable, params, public)
            troubles.extend(graded.troubles)
            return heard
        norms = loops.norms(graded.gradients)
        usable = [one and math.isfinite(norm) for one, norm in zip(usable, norms)]
        factors = [_factor(work.clip, *each, params, public) for each in zip(graded.losses, norms, usable)]
        taught = [one and norm > 0 for one, norm in zip(usable, norms)]  # others answer nothing, as in a simulation
        answers = _answers_alone(work.also, graded.losses, norms, taught, params, public) if work.also else {}
        troubles.extend(graded.troubles)  # last: what raises on the way is computed again, record by record
        return {"gradient": Block(graded.gradients, norms, factors), **answers}

    return OneByOne(len(where), terms, work.alone.block, troubles)


def _flags(valid: Tensor | None, count: int) -> list[bool]:
    return [True] * count if valid is None else valid.view(count, -1).any(1).tolist()


def _factor(clip: Clip, loss: float, norm: float, usable: bool, params: Tensor, public: Public) -> float:
    """How often a record counts, by a rule that sees this record only; 0 where its numbers are not finite."""
    if not usable:
        return 0.0
    return float(clip.factors(params.new_tensor([[loss]]), params.new_tensor([[norm]]), public))


def _answers_alone(
    questions: tuple[Question, ...],
    losses: Sequence[float],
    norms: Sequence[float],
    usable: Sequence[bool],
    params: Tensor,
    public: Public,
) -> dict[str, Block]:
    """What each record answers to each question, by itself."""
    found = {}
    for question in questions:
        values = [
            float(question.values(params.new_tensor([[loss]]), params.new_tensor([[norm]]), public)) if good else 0.0
            for loss, norm, good in zip(losses, norms, usable)
        ]
        column = torch.tensor(values, dtype=torch.float64)[:, None]
        found[question.what] = Block(column, [abs(one) for one in values], [1.0] * len(values))
    return found


def _pieces(work: Work, rows: Rows, step: int, params: Tensor, public: Public) -> Iterator[Mapping[str, Piece]]:
    """The step's batch, graded: many rows with equal weights flat, many with different ones stacked, or one row."""
    number = rows.turns[0].round
    if len(rows.turns) == 1:
        for drawn in rows.one(step, work.piece):
            yield _piece(work, work.engine(params, *work.seen(drawn, number, step)), public, None, 1)
    elif step == 0 and not work.stack and work.local.begin is None:
        x, y, owner, mask = rows.shared(step)
        if len(y):
            x, y, mask = work.seen((x, y, mask), number, step)
            graded = work.engine.shared(params[0], x, y, owner, len(rows.turns), mask)
            yield _piece(work, graded, public, owner, len(rows.turns))
    else:
        graded = work.engine(params, *work.seen(rows.stack(step), number, step))
        yield _piece(work, graded, public, None, len(rows.turns))


def _piece(work: Work, graded: Graded, public: Public, owner: Tensor | None, rows: int) -> Mapping[str, Piece]:
    def spread(v: Tensor) -> Tensor:
        return v[:, None] if owner is None else v[owner]

    public = public if owner is None else per_record(public, owner, rows)
    factors = work.clip.factors(graded.losses, graded.norms, public)
    found = {"gradient": Piece(graded.limits, factors, graded.pull, spread)}
    if work.also:
        usable = (graded.norms > 0) & (graded.norms < torch.inf)  # null and broken records answer nothing
        for one in work.also:
            values = torch.where(usable, one.values(graded.losses, graded.norms, public), 0.0)
            found[one.what] = scalar_piece(values, owner, rows, spread)
    return found
