"""Bugs that have happened to somebody, planted one by one: the replay on neighbours finds each and says which.

Those of a client's turn are found where every row is a pass of its own and where rows share passes (``layout``).
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from replay import Finding, Tape, neighbours, replay_simulation, replay_sites

import sordino as sd
from sordino.client import turn
from sordino.client.turn import Upload
from sordino.engine import simulate
from sordino.engine.federation import site, wire
from sordino.engine.federation.site import Site
from sordino.engine.federation.wire import Packet, pack, unpack
from sordino.privacy.gate import Gate
from sordino.privacy.types import Release
from sordino.study import session

Patch = pytest.MonkeyPatch


@pytest.fixture(params=["a row a pass", "rows together"])
def layout(request: pytest.FixtureRequest, monkeypatch: Patch) -> str:
    """How a simulation's rows go through passes; returns whose turns one pass of the first round has, in words."""
    if request.param == "rows together":
        return ", ".join(f"{name} in round 1" for name in three().names)
    monkeypatch.setattr(simulate, "CHUNK_HELD", 0)
    return "client-00 in round 1"


@pytest.fixture
def row_by_row(monkeypatch: Patch) -> None:
    """Every row is a pass of its own, as at a site."""
    monkeypatch.setattr(simulate, "CHUNK_HELD", 0)


def three():
    digits = sd.data.load("digits", records=90).partition("iid", clients=3, seed=0)
    return digits.with_budgets([2.0, 4.0, 9.0], 1e-3)


def found(kind: str = "huge", method: str = "dp-fedavg", place: int = 3, **training: Any) -> list[Finding]:
    """What the replay of a simulation says."""
    first, second, tape = neighbours(three(), kind, "zero-out", place)
    settings = {"sampling": "full", "rounds": 2, "steps": 2, "lr": 0.2, "seed": 1, **training}
    return replay_simulation(first, second, tape, model="logistic", method=method, **settings)


def found_at_sites(folder: Path, kind: str) -> list[Finding]:
    """What the replay of sites says."""
    clients = three()
    first, second, tape = neighbours(clients, kind, "zero-out")
    study = {
        "study": {"rounds": 2, "seed": 1},
        "model": {"name": "logistic"},
        "method": {"name": "dp-fedavg"},
        "training": {"steps": 2, "lr": 0.2, "rate": 0.5},
        "deployment": {"sites": list(clients.names), "shape": list(clients.shape), "classes": clients.classes},
    }
    return replay_sites(folder, first, second, tape, study)


def named(findings: list[Finding], name: str, words: str) -> None:
    """The first finding of that name says this."""
    said = [one.words for one in findings if one.name == name]
    assert said, f"nothing about {name}: {[str(one) for one in findings[:3]]}"
    assert words in said[0]


def raw_batch(work: Any, rows: Any, start: Any) -> Any:
    """What no method may look at: the first batch of a row, graded."""
    x, y, mask = next(rows.one(0, work.most))
    return work.engine(start.value.expand(1, work.engine.dimension), x, y, mask)


def around_turns(patch: Patch, change: Callable[..., Any]) -> None:
    """Put ``change(honest, work, rows, start, …)`` in place of the client's turn."""
    honest = turn.take_turn
    for room in (simulate, site):
        patch.setattr(room, "take_turn", lambda *given: change(honest, *given))


def test_nothing_is_found_where_nothing_is_planted(tmp_path: Path, layout: str):
    assert found() == []
    assert found("label", "dp-scaffold") == []
    assert found_at_sites(tmp_path, "huge") == []


def test_an_uncharged_loss(monkeypatch: Patch, layout: str):
    def change(honest: Any, work: Any, rows: Any, start: Any, *more: Any) -> Any:
        upload, after = honest(work, rows, start, *more)
        loss = raw_batch(work, rows, start).losses.nan_to_num().mean(1, keepdim=True)
        return Upload({**upload.parts, "loss": Release.public(loss, "loss")}), after

    around_turns(monkeypatch, change)
    named(found("label"), "upload", f"upload 'loss' of {layout}")


def test_a_release_without_a_charge(monkeypatch: Patch, layout: str):
    """The same through the gate: noised, but never granted."""

    def change(honest: Any, work: Any, rows: Any, start: Any, state: Any, public: Any, permit: Any, gate: Any) -> Any:
        done = honest(work, rows, start, state, public, permit, gate)
        rows = len(permit.turns)
        gate._seal(permit, "gradient", 7, torch.zeros(rows, work.engine.dimension), torch.ones(rows))
        return done

    around_turns(monkeypatch, change)
    named(found(), "charge", f"step 7, {layout} was never granted")


def usable(graded: Any, owner: Any, rows: int) -> torch.Tensor:
    """How many records of every row count, which nobody may look at."""
    real = (graded.norms > 0) & graded.norms.isfinite()
    return real.sum(1) if owner is None else torch.bincount(owner[real], minlength=rows)


def test_the_realised_batch_size_as_divisor(monkeypatch: Patch, layout: str):
    piece, seal, seen = turn._piece, Gate._seal, []

    def counting(work: Any, graded: Any, public: Any, owner: Any, rows: int) -> Any:
        seen.append(usable(graded, owner, rows))
        return piece(work, graded, public, owner, rows)

    def dividing(gate: Any, permit: Any, *more: Any) -> Any:
        done = seal(gate, permit, *more)
        done.value *= permit.terms[0].divisor / seen[-1][:, None]
        return done

    monkeypatch.setattr(turn, "_piece", counting)
    monkeypatch.setattr(Gate, "_seal", dividing)
    named(found("label"), "release", f"the release of 'gradient', step 0, {layout}: from the same sum")


def test_a_state_that_remembers_a_raw_gradient(monkeypatch: Patch, layout: str):
    def change(honest: Any, work: Any, rows: Any, start: Any, *more: Any) -> Any:
        upload, after = honest(work, rows, start, *more)
        graded = raw_batch(work, rows, start)
        raw = graded.pull(torch.where(graded.norms < 1e6, 1.0, 0.0))
        return upload, Release.public({name: value + raw for name, value in after.value.items()}, "state")

    around_turns(monkeypatch, change)
    named(found("label", "dp-scaffold"), "state", f"of {layout}: differs by")


def test_a_count_of_refused_records_in_a_message(tmp_path: Path, monkeypatch: Patch):
    honest = Site._turn

    def counting(self: Site, packet: Packet, request: str) -> bytes:
        reply = unpack(honest(self, packet, request))
        refused = 0 if self.records.valid is None else int((~self.records.valid).sum())
        return pack(Packet(reply.kind, {**reply.facts, "refused": refused}, reply.tensors))

    monkeypatch.setattr(Site, "_turn", counting)
    named(found_at_sites(tmp_path, "huge"), "message", "in the reply, refused is 1, was 0")


SMALL = {"sampling": "poisson", "rate": 0.05, "steps": 6}
"""Batches of one or two records, and empty ones."""


def alone_in_its_batch() -> int:
    """The place of a record of the first client that is once drawn by itself; another of its batches is empty."""
    tape = Tape(frozenset())
    with tape.listening():
        sd.train(three(), "logistic", "dp-fedavg", rounds=2, lr=0.2, seed=1, **SMALL)
    drawn = [value[-1] for name, where, value in tape.entries if name == "coins" and "client-00" in where]
    batches = [one for some in drawn for one in some]
    assert any(len(one) == 0 for one in batches)
    return next(int(one[0]) for one in batches if len(one) == 1)


def test_a_skipped_empty_batch(monkeypatch: Patch, row_by_row: None):
    """A batch whose only record is null is as empty as one without any: the noise is released all the same."""
    alone, honest = alone_in_its_batch(), Gate.release
    assert found("plain", place=alone, **SMALL) == []

    def skipping(gate: Any, permit: Any, step: int, pieces: Any, bounds: Any, width: int) -> Any:
        held = list(pieces)
        if held and not any((one["gradient"].norms > 0).any() for one in held):
            return {part: Release.public(bound.new_zeros(1, width), part) for part, bound in bounds.items()}
        return honest(gate, permit, step, held, bounds, width)

    monkeypatch.setattr(Gate, "release", skipping)
    named(found("plain", place=alone, **SMALL), "events", "where the first run had the release of 'gradient'")


def test_an_empty_batch_among_others_of_its_pass_that_goes_without_noise(monkeypatch: Patch):
    """A pass has as many releases as it has rows, whatever is in them: what is missing is one row's noise."""
    alone, honest, emptied = alone_in_its_batch(), Gate.release, []
    assert found("plain", place=alone, **SMALL) == []

    def skipping(gate: Any, permit: Any, step: int, pieces: Any, bounds: Any, width: int) -> Any:
        held, rows = list(pieces), len(permit.turns)
        full = torch.zeros(rows, dtype=torch.bool)
        for one in held:
            norms = one["gradient"].norms
            full[one["gradient"].spread(torch.arange(rows)).expand_as(norms)[norms > 0]] = True
        done = honest(gate, permit, step, held, bounds, width)
        done["gradient"].value[~full] = 0.0
        emptied.extend([rows] * bool(full.any() and not full.all()))
        return done

    monkeypatch.setattr(Gate, "release", skipping)
    said = found("plain", place=alone, **SMALL)
    assert set(emptied) == {3}, "empty batches were in one pass with others"
    named(said, "upload", "upload 'update' of client-00 in round ")


def test_a_batch_that_the_coins_left_empty_is_missed_too(monkeypatch: Patch, row_by_row: None):
    honest = Gate.release

    def skipping(gate: Any, permit: Any, step: int, pieces: Any, bounds: Any, width: int) -> Any:
        held = list(pieces)
        if not held:
            return {part: Release.public(bound.new_zeros(1, width), part) for part, bound in bounds.items()}
        return honest(gate, permit, step, held, bounds, width)

    monkeypatch.setattr(Gate, "release", skipping)
    said = found("plain", **SMALL)
    named(said, "events", "6 were granted, ")


def test_early_stopping_on_a_raw_metric(monkeypatch: Patch, layout: str):
    def change(honest: Any, work: Any, rows: Any, start: Any, *more: Any) -> Any:
        worst = raw_batch(work, rows, start).losses.nan_to_num(1e9).max()
        if worst > 20:
            rows = replace(rows, batches=[[one[0]] for one in rows.batches])
        return honest(work, rows, start, *more)

    around_turns(monkeypatch, change)
    said = found("label")
    named(said, "events", "'gradient' of 'gradient', client-00 in round 1: 2 were granted, 1 made")
    assert any("where the first run had" in one.words for one in said if one.name == "events")


def test_a_clip_radius_from_raw_norms(monkeypatch: Patch, layout: str):
    def change(honest: Any, work: Any, rows: Any, start: Any, *more: Any) -> Any:
        radius = raw_batch(work, rows, start).norms.nan_to_num(posinf=1e6).mean().item()
        return honest(replace(work, clip=replace(work.clip, bound=lambda public: radius)), rows, start, *more)

    around_turns(monkeypatch, change)
    named(found("label"), "bound", f"step 0, {layout}: differs by")


def test_a_mean_over_valid_records_only(monkeypatch: Patch, layout: str):
    honest = turn._piece

    def averaging(work: Any, graded: Any, *more: Any) -> Any:
        made, share = honest(work, graded, *more), graded.norms.numel() / int((graded.norms > 0).sum())
        one = made["gradient"]
        return {**made, "gradient": replace(one, pull=lambda factors: one.pull(factors) * share)}

    monkeypatch.setattr(turn, "_piece", averaging)
    named(found("label"), "sum", "was declared for client-00")


def test_a_seed_from_the_data(monkeypatch: Patch):
    def key(ready: Any) -> str:
        return hashlib.sha256(ready.clients.x.tobytes()).hexdigest()

    monkeypatch.setattr(session.Prepared, "key", property(key))
    named(found(sampling="poisson", rate=0.5), "coins", "the batches of 'gradient', client-00 in round 1")


def test_an_exception_that_reaches_the_server(tmp_path: Path, monkeypatch: Patch):
    def change(honest: Any, work: Any, rows: Any, *more: Any) -> Any:
        if int(rows.records.y.max()) > 100:
            raise ValueError(f"a record has label {int(rows.records.y.max())}")
        return honest(work, rows, *more)

    around_turns(monkeypatch, change)
    monkeypatch.setattr(wire, "unavailable", lambda: wire.refusal(str(sys.exc_info()[1])))
    named(found_at_sites(tmp_path, "raises"), "message", "a record has label 1000")
