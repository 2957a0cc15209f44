"""Replay on neighbours: a private run twice, on data that differ in a record, with everything released frozen.

The first run is recorded. The second, on neighbouring data, gets the first run's releases back, so whatever the server,
the other clients and the method itself have seen is the same; then everything else must be the same too: the sequence
of events, declared plans, charges, requests, batches, bounds, uploads, states, messages. Only a sum before its noise
may differ, and by its declared sensitivity at most. What differs is told in words, under one of the names in ``NAMES``.
"""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from torch import Tensor

import sordino as sd
from sordino.data import Federation
from sordino.engine import simulate
from sordino.engine.federation import site, taking_part, wire
from sordino.engine.federation.exchange import farewell
from sordino.engine.federation.masks import load_key, signed_key
from sordino.privacy.gate import Gate, Permit
from sordino.privacy.generators import Keyed
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Release

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from federation_rig import Rig

NAMES = {
    "events": "another sequence of releases, charges, uploads",
    "charge": "something was charged otherwise, or released without a charge",
    "declared": "another plan or fact was declared",
    "coins": "another batch under the same coins",
    "bound": "a bound that is not made of public facts and releases",
    "sum": "a sum that one record moves by more than the noise was made for",
    "release": "a release that is not a function of its sum, public facts and noise",
    "upload": "an upload that holds something which the gate never released",
    "state": "a client's state that holds something which the gate never released",
    "message": "a message that depends on records",
    "result": "the server ended with something else",
    "exception": "a record stopped the run",
}

ROUNDING = 1e-3
"""How far floating-point sums may exceed the sensitivity, relative to it; on the lattice see ``most``."""

OBSERVED = {
    *("accuracy", "loss", "psi", "worst_accuracy", "client_accuracy", "client_loss", "accuracy_variance"),
    *("worst_decile", "best_decile", "observer"),
}
"""What an observer sees of a simulation: computed from records, released to nobody."""


def most(permit: Permit, row: int, part: str, bound: Tensor, width: int, lattice: float | None) -> float:
    """How far the sum of a row may move when one record of its client changes."""
    sensitivity, radius = permit.terms[row].adjacency.sensitivity, float(bound[row])
    if lattice is None:
        return sensitivity * radius * (1 + ROUNDING)
    return sensitivity * (radius * (1 + 1e-6) + lattice * width**0.5 / 2)


@dataclass(frozen=True)
class Finding:
    """Something that differed: its name, and what it was."""

    name: str
    words: str

    def __str__(self) -> str:
        return f"{self.name} ({NAMES[self.name]}): {self.words}"


@dataclass
class Tape:
    """What the first run did; then what the second does otherwise. ``changed``: whose data differ in a record."""

    changed: frozenset[str]
    findings: list[Finding] = field(default_factory=list)
    entries: list[tuple[str, str, Any]] = field(default_factory=list)
    place: int | None = None
    lost: bool = False
    moved: float = 0.0
    """The largest move of a sum that was seen, over what is allowed."""
    granted: Counter[tuple[Any, ...]] = field(default_factory=Counter)
    made: Counter[tuple[Any, ...]] = field(default_factory=Counter)

    def say(self, name: str, words: str) -> None:
        """Note a difference."""
        self.findings.append(Finding(name, words))

    def next(self, name: str, where: str, value: Any) -> Any:
        """Record a step of the first run; in the second, what the first had there (None: it went another way)."""
        if self.place is None:
            self.entries.append((name, where, value))
            return None
        if self.lost:
            return None
        known = self.entries[self.place] if self.place < len(self.entries) else ("events", "the end", None)
        if known[:2] != (name, where):
            self.say("events", f"{where}, where the first run had {known[1]}")
            self.lost = True
            return None
        self.place += 1
        return known[2]

    def same(self, name: str, where: str, value: Any) -> None:
        """Record plain facts or tensors; in the second run they must be the same, bit by bit."""
        known = self.next(name, where, kept(value))
        if known is not None:
            for words in differences(known, kept(value)):
                self.say(name, f"{where}: {words}")

    def rewind(self) -> None:
        """From recording to comparing."""
        self.settle()
        self.place = 0
        self.granted, self.made = Counter(), Counter()

    def settle(self) -> None:
        """The end of a run: everything granted was released, an empty batch as well."""
        for key, count in self.granted.items():
            if self.made[key] != count:
                turn, what, part = key
                self.say("events", f"{part!r} of {what!r}, {told(turn)}: {count} were granted, {self.made[key]} made")
        if self.place is not None and not self.lost and self.place < len(self.entries):
            self.say("events", f"the run ended before {self.entries[self.place][1]}")

    # The one place that knows how the gate is built. ``more`` is the lattice of an exact release.

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record, or compare and replay, all that passes gate, ledger, generator and turn."""
        grant, seal, whole, count = Gate.grant, Gate._seal, Gate.release_whole, Gate.count
        charge, declare, batches = Ledger.charge, Ledger.declare, Keyed.batches

        def granted(gate: Gate, turns: Any, terms: Any, request: str, masks: str = "") -> Permit:
            names = [f"{one.what!r} of {told(turn)}" for turn, one in zip(turns, terms)]
            self.same("charge", f"a grant of {', '.join(names)}", [terms_of(terms), request])
            for turn, one in zip(turns, terms):
                self.granted.update({(turn, one.what, part): one.count for part, _ in one.parts})
            return grant(gate, turns, terms, request, masks)

        def sealed(gate: Gate, permit: Permit, part: str, step: int, total: Tensor, bound: Tensor, *more: Any) -> Any:
            where = f"the release of {part!r}, step {step}, {', '.join(told(turn) for turn in permit.turns)}"
            for turn, terms in zip(permit.turns, permit.terms):
                self.made[turn, terms.what, part] += 1
                if self.made[turn, terms.what, part] > self.granted[turn, terms.what, part]:
                    self.say("charge", f"{where} was never granted")
            before = total.clone()
            known = self.next("release", where, None if self.place is not None else [before, bound.clone(), None])
            if known is None:
                done = seal(gate, permit, part, step, total, bound, *more)
                if self.place is None:
                    self.entries[-1][2][2] = done.value.clone()
                return done
            for words in differences(known[1], bound):
                self.say("bound", f"{where}: {words}")
            self._moves(
                permit,
                part,
                where,
                known[0],
                before,
                known[1],
                next((one.step for one in more if one is not None), None),
            )
            again = seal(gate, permit, part, step, known[0].clone(), known[1], *more)
            if not alike(again.value, known[2]):
                self.say("release", f"{where}: from the same sum came another release (divisor, or noise)")
            again.value = known[2].clone()
            return again

        def counted(gate: Gate, permit: Permit, step: int, tables: Any, whose: Tensor | None = None) -> Any:
            found, (turn,), (terms,) = count(gate, permit, step, tables, whose), permit.turns, permit.terms
            for part, (cells, width) in tables.items():
                where = f"the counts of {part!r}, step {step}, {told(turn)}"
                self.made[turn, terms.what, part] += 1
                if self.made[turn, terms.what, part] > self.granted[turn, terms.what, part]:
                    self.say("charge", f"{where} were never granted")
                own = torch.ones(len(cells)) if whose is None else 1 / torch.bincount(whose)[whose]
                there = (cells >= 0) & (cells < width)
                added = own.double()[:, None].expand_as(cells)[there]
                total = torch.bincount(cells[there], added, minlength=width).double()
                known = self.next("release", where, [total, found[part].value.clone()])
                if known is None:
                    continue
                move, allowed = float((known[0] - total).norm()), terms.adjacency.sensitivity * cells.shape[1] ** 0.5
                allowed = allowed if turn.client.removesuffix(HELD) in self.changed else 0.0
                if move > allowed * (1 + 1e-12):
                    self.say("sum", f"{where} moved by {move:.6g}, at most {allowed:.6g} was declared")
                self.moved = max(self.moved, move / allowed if allowed else 0.0)
                if not torch.allclose(found[part].value - total, known[1] - known[0], rtol=0, atol=1e-9):
                    self.say("release", f"{where}: the noise was another")
                found[part].value = known[1].clone()
            return found

        def shared(gate: Gate, permit: Permit, step: int, batch: Any, bounds: Any, width: int) -> Any:
            """Integers with the same noise in both runs: they differ by what one record moved, and by nothing else."""
            (turn,), (terms,) = permit.turns, permit.terms
            found = whole(gate, permit, step, batch, bounds, width)
            for part, one in found.items():
                self.made[turn, terms.what, part] += 1
                where = f"the integers of {part!r}, {told(turn)}"
                known = self.next("release", where, [one.value.clone(), bounds[part].clone()])
                if known is not None:
                    lattice = terms.lattice(part, float(bounds[part]), one.value.shape[1])
                    for words in differences(known[1], bounds[part]):
                        self.say("bound", f"{where}: {words}")
                    steps = [value.double() * lattice.step for value in (known[0], one.value)]
                    self._moves(permit, part, where, *steps, bounds[part], lattice.step * (1 + 1e-9))
                    one.value = known[0].clone()
            return found

        def charged(ledger: Ledger, charges: Any, replay: bool = False, once: bool = False) -> Any:
            self.same("charge", "a charge", [replay, once, *(replace(one, run="", request="") for one in charges)])
            return charge(ledger, charges, replay, once)

        def declared(ledger: Ledger, plans: Any, *more: Any) -> Any:
            found = declare(ledger, plans, *more)
            self.same("declared", "a plan", [found, *(replace(one, run="") for one in plans)])
            return found

        def drawn(source: Keyed, turn: Any, what: str, sampling: Any, records: int, count: int) -> Any:
            found = batches(source, turn, what, sampling, records, count)
            self.same("coins", f"the batches of {what!r}, {told(turn)}", [sampling, records, count, list(found)])
            return found

        def turned(take: Callable[..., Any]) -> Callable[..., Any]:
            def turn(work: Any, rows: Any, *more: Any) -> Any:
                upload, after = take(work, rows, *more)
                who = ", ".join(told(one) for one in rows.turns)
                for part, one in sorted(upload.parts.items()):
                    self.same("upload", f"upload {part!r} of {who}", one.value)
                for name, value in sorted(after.value.items()):
                    self.same("state", f"state {name!r} of {who}", value)
                return upload, after

            return turn

        def answered(give: Callable[..., Any]) -> Callable[..., Any]:
            def answer(work: Any, question: Any, rows: Any, *more: Any) -> Release:
                found: Release = give(work, question, rows, *more)
                who = ", ".join(told(one) for one in rows.turns)
                self.same("upload", f"answer {question.what!r} of {who}", found.value)
                return found

            return answer

        def added(give: Callable[..., Any]) -> Callable[..., Any]:
            def share(work: Any, rows: Any, *more: Any) -> Release:
                found: Release = give(work, rows, *more)
                self.same("upload", f"message of {', '.join(told(one) for one in rows.turns)}", found.value)
                return found

            return share

        with pytest.MonkeyPatch.context() as patch:
            for owner, name, by in (
                *((Gate, "release_whole", shared), (taking_part, "share", added(taking_part.share))),
                (Gate, "count", counted),
                *((Gate, "grant", granted), (Gate, "_seal", sealed), (Ledger, "charge", charged)),
                *((Ledger, "declare", declared), (Keyed, "batches", drawn)),
                *((room, "take_turn", turned(room.take_turn)) for room in (simulate, site)),
                *((room, "answer", answered(room.answer)) for room in (simulate, site)),
            ):
                patch.setattr(owner, name, by)
            yield
        self.settle() if self.place is not None else self.rewind()

    def _moves(
        self, permit: Permit, part: str, where: str, one: Tensor, two: Tensor, bound: Tensor, lattice: float | None
    ) -> None:
        if one.shape != two.shape:
            self.say("sum", f"{where}: shape {tuple(two.shape)}, was {tuple(one.shape)}")
            return
        moves = (one.double() - two.double()).norm(dim=1).tolist()
        for row, (turn, move) in enumerate(zip(permit.turns, moves)):
            allowed = most(permit, row, part, bound, one.shape[1], lattice)
            # nobody's record moves somebody else's sum, but for rounding
            if turn.client.removesuffix(HELD) not in self.changed:
                allowed = allowed * ROUNDING if lattice is None else 0.0
            else:
                self.moved = max(self.moved, move / allowed)
            if not move <= allowed:
                self.say("sum", f"{where}: moved by {move:.6g}, at most {allowed:.6g} was declared for {turn.client}")


def told(turn: Any) -> str:
    """A participation in words."""
    return f"{turn.client} in round {turn.round}" + (f" (copy {turn.copy})" if turn.copy else "")


def terms_of(terms: Any) -> list[Any]:
    return [wire.terms_to_plain(one) for one in terms]


def kept(value: Any) -> Any:
    """A value that later changes do not reach."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return {key: kept(one) for key, one in value.items()}
    return [kept(one) for one in value] if isinstance(value, (list, tuple)) else value


def alike(one: Tensor, two: Tensor) -> bool:
    """Bit by bit, so that NaN is like NaN."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), two.contiguous().view(-1).view(torch.uint8))


def differences(one: Any, two: Any, path: str = "") -> Iterator[str]:
    """What the second run has otherwise, in words."""
    here = f"{path} " if path else ""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        if one.shape == two.shape and not alike(one, two):
            yield f"{here}differs by {float((one.double() - two.double()).norm()):.6g}"
        elif one.shape != two.shape:
            yield f"{here}has shape {tuple(two.shape)}, had {tuple(one.shape)}"
    elif isinstance(one, dict) and isinstance(two, dict):
        for key in [*one, *(key for key in two if key not in one)]:
            if key not in two or key not in one:
                yield f"{here}{key!r} is {'missing' if key in one else f'new: {two[key]!r}'}"
            else:
                yield from differences(one[key], two[key], f"{path}{'.' if path else ''}{key}")
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        for k, (a, b) in enumerate(zip(one, two)):
            yield from differences(a, b, f"{path}[{k}]")
    elif isinstance(one, np.ndarray) or isinstance(two, np.ndarray):
        if not np.array_equal(one, two):
            yield f"{here}is {two}, was {one}"
    elif not (one == two or (one != one and two != two)):
        yield f"{here}is {two!r}, was {one!r}"


def neighbours(
    clients: Federation, kind: str, adjacency: str, place: int = 3, held: Any = None
) -> tuple[Federation, Federation, Tape]:
    """Two data sets that differ in one record of every client but the last, and a tape for them.

    zero-out: that record is odd in the first and null in the second; replace-one: it is another odd one there.
    ``held``: every client's held-out records, where one of these is to differ.
    """
    changed = clients.names[:-1]
    odd = [int((clients.train if held is None else held)[k][place]) for k in range(len(changed))]
    other = "null" if adjacency == "zero-out" else ("label" if kind == "huge" else "huge")
    first, second = (_with(clients, odd, one) for one in (kind, other))
    return first, second, Tape(frozenset(changed))


def _with(clients: Federation, places: list[int], kind: str) -> Federation:
    x, y, valid = np.array(clients.x), np.array(clients.y), np.array(clients.valid)
    for place in places:
        if kind == "huge":
            x[place] = np.where(np.arange(x[place].size).reshape(x[place].shape) % 2, 1e18, -1e18)
        elif kind == "nan":
            x[place].flat[0] = np.nan
        elif kind == "label":
            x[place], y[place] = 50.0, (y[place] + 5) % (clients.classes or 1)
        elif kind == "raises":
            y[place] = 1000
        elif kind == "null":
            x[place], y[place], valid[place] = 0, 0, False
        else:
            assert kind == "plain"
    return replace(clients, x=x, y=y, valid=valid)


def replay_simulation(first: Federation, second: Federation, tape: Tape, **arguments: Any) -> list[Finding]:
    """Both runs as simulations; what differed."""
    for clients in (first, second):
        with tape.listening():
            try:
                done = sd.train(clients, **arguments)
            except Exception as error:  # whatever it is, a record must not be able to cause it
                tape.say("exception", f"the {'first' if clients is first else 'second'} run: {error}")
                return tape.findings
            for one in done.metrics:
                shown = {key: value for key, value in one.items() if key not in OBSERVED}
                tape.same("result", f"round {one['round']}", shown)
            tape.same("result", "the final weights", done.weights)
            spent = [{k: v for k, v in one.items() if k != "client"} for one in done.privacy]
            tape.same("declared", "what the ledger says", spent)
    return tape.findings


@contextmanager
def foreseen_keys() -> Iterator[None]:
    """Keys of runs, and signatures of them, that are the same in both runs: so are the masks."""

    def kept_key(file: Path) -> X25519PrivateKey:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(hashlib.sha256(file.parents[2].name.encode()).digest())
        return load_key(file)

    def once(enrolled: Any, name: str, run: str, key: X25519PrivateKey) -> dict[str, str]:
        if (name, run) not in SIGNED:
            SIGNED[name, run] = signed_key(enrolled, name, run, key)
        return SIGNED[name, run]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "keep_key", kept_key)
        patch.setattr(site, "signed_key", once)
        yield


SIGNED: dict[tuple[str, str], dict[str, str]] = {}
"""What every site signed, once for all runs: signatures are made with chance."""


def replay_sites(
    folder: Path, first: Federation, second: Federation, tape: Tape, study: dict[str, Any]
) -> list[Finding]:
    """Both runs as federations of sites; what differed, messages above all."""
    heard: list[list[tuple[str, bytes, bytes]]] = []
    for name, clients in (("first", first), ("second", second)):
        with tape.listening(), foreseen_keys(), Rig(folder / name, clients, study, key="a key for tests") as rig:
            try:
                rig.train()
                farewell(rig.wires, rig.ready.brief["run"], list(clients.names), 5.0)
            except Exception as error:
                tape.say("exception", f"at the server, in the {name} run: {error}")
            heard.append(rig.wires.heard)
    compare_messages(tape, *heard)
    return tape.findings


def compare_messages(tape: Tape, one: list[tuple[str, bytes, bytes]], two: list[tuple[str, bytes, bytes]]) -> None:
    """Every packet of both runs, in order: kinds, facts and tensors must be the same."""
    if len(one) != len(two):
        tape.say("message", f"{len(two)} exchanges, were {len(one)}")
    for (name, asked, got), (_, asked2, got2) in zip(one, two):
        request, reply = wire.unpack(asked), wire.unpack(got)
        where = f"{name} on {request.kind!r} of round {request.facts.get('round', '-')}"
        for kind, old, new in (("request", request, wire.unpack(asked2)), ("reply", reply, wire.unpack(got2))):
            if old.kind != new.kind:
                said = [f"{one.kind!r} {dict(one.facts)}" for one in (new, old)]
                tape.say("message", f"{where}: the {kind} is {said[0]}, was {said[1]}")
                continue
            for words in differences(dict(old.facts), dict(new.facts)):
                tape.say("message", f"{where}: in the {kind}, {words}")
            for words in differences(dict(old.tensors), dict(new.tensors)):
                tape.say("message", f"{where}: in the {kind}, tensor {words}")
