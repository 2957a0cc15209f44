"""One client, one step, everything visible: the real turn, watched. For simulations only, never charged.

What is seen here is what privacy protects, so the watched gate takes keyed randomness only, and hands out nothing that
a run could use. An error says whose turn it was, in which round and step, and at which stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sordino.client.clip import Public
from sordino.client.rows import Records
from sordino.client.turn import Work, take_turn
from sordino.engine.checkpoint import Checkpoint
from sordino.engine.rounds import Broadcast, turns_taken
from sordino.engine.simulate import Index, Setup, draw_rows, open_round
from sordino.errors import BadInput, SordinoError
from sordino.privacy.gate import Batch, Block, Gate, OneByOne, Permit, Piece, bounded
from sordino.privacy.generators import Source, Turn
from sordino.privacy.lattice import Lattice
from sordino.privacy.threads import one_thread
from sordino.privacy.types import Release


@dataclass
class Trace:
    """What happened in one step of one client's turn, by name.

    ``tensors``: positions, x, y of the batch; losses, norms, factors a_j as the clipping rule gave them, bounded as the
    gate enforced them; gradients [b, d] of every record; sum Σ a_j g_j, noise z·S·C·N(0, I), released (sum + noise)/b;
    weights before, after; what was released beside the gradient; and upload, of the whole turn.
    """

    client: str
    round: int
    step: int
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __str__(self) -> str:
        lines = [f"client {self.client}, round {self.round}, step {self.step}"]
        for name, value in self.tensors.items():
            shown = value.double()
            size = f"norm {float(shown.norm()):.4g}, from {float(shown.min()):.4g} to {float(shown.max()):.4g}"
            shape = "×".join(map(str, value.shape)) or "1"
            lines.append(f"  {name:<12} {shape:<14} {size if value.numel() else 'empty'}")
        return "\n".join(lines)


def trace(setup: Setup, state: Checkpoint, client: str, step: int = 0) -> Trace:
    """Step ``step`` of a client's next turn, from ``state``, which stays as it is."""
    number = state.round + 1
    opened = open_round(
        _behind_glass(setup, _Watch(0)), copy.copy(state), number, turns_taken(setup.plan, state.history)
    )
    called = [setup.plan.clients[i].name for i in opened.called.clients]
    if client not in called:
        raise BadInput(f"client {client!r} takes no part in round {number}: {', '.join(called) or 'nobody'} does")
    row = called.index(client)
    if not 0 <= step < (count := opened.permit.terms[row].count):
        raise BadInput(f"step {step} of client {client!r}: its turn has steps 0 to {count - 1}")
    return _turn(setup, state, opened.called.clients[[row]], opened.permit.split([row]), opened.sent, _Watch(step))


def explain(setup: Setup, state: Checkpoint, clients: Index, permit: Permit, sent: Broadcast, error: Exception) -> str:
    """Why a chunk failed: its rows are taken again one by one, until one fails with its stage."""
    for row in range(len(clients)):
        try:
            _turn(setup, state, clients[[row]], permit.split([row]), sent, _Watch(0))
        except SordinoError as found:
            return str(found)
    names = ", ".join(sorted({turn.client for turn in permit.turns}))
    return f"round {permit.turns[0].round}, together but not one by one, {names}: {error}"


class _Watch:
    """The stage that a turn has reached, and what was seen in the step that is looked at."""

    def __init__(self, step: int) -> None:
        self.wanted, self.step, self.stage = step, 0, "drawing the batches"
        self.seen: dict[str, Tensor] = {}

    def see(self, name: str, value: Tensor) -> None:
        """Keep a copy; a batch that comes in pieces is put together."""
        if self.step == self.wanted:
            value = value.detach().clone()
            self.seen[name] = torch.cat([self.seen[name], value]) if name in self.seen else value

    def at(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which names its stage first."""

        def named(*given: Any) -> Any:
            self.stage = stage
            return function(*given)

        return named


class _Glass(Gate):
    """A gate that charges nothing and shows everything."""

    def __init__(self, source: Source, private: bool, watch: _Watch) -> None:
        if not source.simulated:
            raise SordinoError("a turn can be looked at in simulation only: at a site nothing passes but the gate")
        super().__init__(None, source, "debug")
        self._noisy, self._watch = private, watch

    @property
    def private(self) -> bool:
        """Whether noise is added, as in the run that is looked at."""
        return self._noisy

    def grant(self, turns: Any, terms: Any, request: str, masks: str = "") -> Permit:
        """A permit that was not paid for."""
        return Permit(list(turns), list(terms))

    def release(
        self, permit: Permit, step: int, pieces: Batch, bounds: Mapping[str, Tensor], width: int
    ) -> dict[str, Release]:
        """Release, and look at every piece on its way."""
        self._watch.step = step
        if "gradient" not in bounds:
            return super().release(permit, step, pieces, bounds, width)
        if isinstance(pieces, OneByOne):
            with one_thread():  # in their order
                pieces = replace(pieces, terms=self._looked_alone(pieces))
                return super().release(permit, step, pieces, bounds, width)
        return super().release(permit, step, self._looked(pieces, bounds["gradient"]), bounds, width)

    def _looked_alone(self, batch: OneByOne) -> Callable[[Sequence[int]], Mapping[str, Block]]:
        def terms(some: Sequence[int]) -> Mapping[str, Block]:
            found = batch.terms(some)
            if "gradient" in found:
                self._watch.see("factors", torch.tensor(found["gradient"].factors))
                self._watch.see("gradients", found["gradient"].vectors)
            return found

        return terms

    def _looked(self, pieces: Iterable[Mapping[str, Piece]], bound: Tensor) -> Iterator[Mapping[str, Piece]]:
        watch = self._watch
        for piece in pieces:
            one = piece["gradient"]
            kept = bounded(one.factors, one.norms, one.spread(bound))
            for name, value in (("factors", one.factors), ("bounded", kept)):
                watch.see(name, value.flatten())
            if watch.step == watch.wanted:
                watch.stage = "gradients of single records"
                for alone in torch.eye(one.norms.numel(), dtype=kept.dtype, device=kept.device):
                    watch.see("gradients", one.pull(alone.view_as(kept)))
            yield {**piece, "gradient": replace(one, pull=watch.at("adding up the batch", one.pull))}

    def _seal(
        self, permit: Permit, part: str, step: int, total: Tensor, bound: Tensor, lattice: Lattice | None = None
    ) -> Release:
        watch, before = self._watch, total.clone()
        watch.stage = f"noise of {part!r}"
        found = super()._seal(permit, part, step, total, bound, lattice)
        if part == "gradient":
            divisor = permit.terms[0].divisor
            watch.see("sum", before[0])
            watch.see("noise", found.value[0] * divisor - before[0])
            watch.see("released", found.value[0])
        else:
            watch.see(f"released {part}", found.value[0])
        return found


def _behind_glass(setup: Setup, watch: _Watch) -> Setup:
    return replace(setup, gate=_Glass(setup.gate.source, setup.plan.method.private, watch))


class _Watched(Records):
    """Records that say when they are read."""

    def __init__(self, records: Records, watch: _Watch) -> None:
        super().__init__(records.x, records.y, records.valid, records.touched, records.members)
        object.__setattr__(self, "_watch", watch)

    def at(self, where: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """The records at these positions."""
        watch: _Watch = self.__dict__["_watch"]
        watch.stage = "reading records"
        found = super().at(where)
        for name, value in (("positions", where), ("x", found[0]), ("y", found[1])):
            watch.see(name, value)
        watch.stage = "gradients of the batch"
        return found


def _turn(setup: Setup, state: Checkpoint, clients: Index, permit: Permit, sent: Broadcast, watch: _Watch) -> Trace:
    """One client's turn through ``take_turn``, with every part of it watched."""
    turn: Turn = permit.turns[0]
    glass = _behind_glass(setup, watch)
    try:
        rows = draw_rows(replace(glass, records=_Watched(setup.records, watch)), clients, permit)
        watch.stage = "reading the client's state"
        kept = {
            name: state.clients[name].read(clients) if name in state.clients else torch.zeros(1, len(state.weights))
            for name in setup.work.local.state
        }
        before = Release.public(
            {name: value.to(state.weights.device) for name, value in kept.items()}, "state from earlier releases"
        )
        start = Release.public(state.weights, "weights from the server")
        upload, _ = take_turn(_watched(setup.work, watch), rows, start, before, sent.told(clients), permit, glass.gate)
    except Exception as error:
        where = f"client {turn.client!r}, round {turn.round}, step {watch.step}, {watch.stage}"
        raise SordinoError(f"{where}: {type(error).__name__}: {error}") from error
    for name, part in upload.parts.items():
        watch.seen["upload" if name == "update" else f"upload {name}"] = part.value[0]
    return Trace(turn.client, turn.round, watch.wanted, watch.seen)


def _watched(work: Work, watch: _Watch) -> Work:
    """The same work, whose parts name their stage."""

    def factors(losses: Tensor, norms: Tensor, public: Public) -> Tensor:
        watch.see("losses", losses.flatten())
        watch.see("norms", norms.flatten())
        watch.stage = f"clipping rule {work.clip.name!r}"
        return work.clip.factors(losses, norms, public)

    def update(params: Tensor, state: Any, gradient: Tensor, public: Public) -> Any:
        watch.stage = f"local rule {work.local.name!r}"
        watch.see("weights", params[0])
        found = work.local.update(params, state, gradient, public)
        watch.see("after", found[0][0])
        return found

    local = replace(work.local, update=update, finish=watch.at("making the upload", work.local.finish))
    return replace(work, clip=replace(work.clip, factors=factors), local=local, recorder=None)
