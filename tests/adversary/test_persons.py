"""A person with any number of records, chosen by whoever wants to break the promise, is one unit and no more."""

from __future__ import annotations

import math
import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzz import MODELS, OF_WORDS, case
from torch import Tensor

import sordino as sd
from sordino.client import gradients
from sordino.client.gradients import Alone, loops
from sordino.client.gradients.fast import Fast
from sordino.client.gradients.losses import loss_by_name
from sordino.client.rows import Records
from sordino.data import units
from sordino.privacy import gate as gates
from sordino.privacy.auditing import audit
from sordino.privacy.gate import Block, Gate, OneByOne, Terms, bounded, exact_sums
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.held import held_out
from sordino.privacy.lattice import Lattice
from sordino.privacy.ledger import Ledger, LedgerPlan
from sordino.privacy.types import Budget, Event, Sampling
from sordino.study import audit as auditing
from sordino.study.audit import Lookup, Trial, audit_method, audit_releases

LOSS = loss_by_name("cross-entropy")
PERSONS = (1, 5, 8, 50, 3)
"""How many records everybody has."""
MOST = 8
OWN = 1 + 1e-6


def persons(name: str, seed: int) -> tuple[Records, Tensor, float, torch.nn.Module]:
    """Hostile records of five persons, those beyond the cap left out; factors, clip and a model of hostile weights."""
    drawn = [case(name, 1000 * seed + k) for k in range(14)]
    x, y = torch.cat([one.x for one in drawn])[: sum(PERSONS)], torch.cat([one.y for one in drawn])[: sum(PERSONS)]
    whose = np.repeat(np.arange(len(PERSONS)), PERSONS)
    keep = torch.from_numpy(units.kept(whose, [str(one) for one in whose], MOST))
    table = torch.from_numpy(units.members(whose[keep.numpy()], MOST))
    return Records(x[keep], y[keep], members=table), drawn[0].factors, drawn[0].clip, drawn[0].model


def own_terms(name: str, seed: int, layout: str) -> Tensor:
    """‖what each person adds‖/C through an engine and the gate; at a site, over the sensitivity that is charged."""
    records, factors, clip, model = persons(name, seed)
    x, y, mask = records.at(torch.arange(len(PERSONS)))
    if layout == "site":
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        lattice = Lattice(clip, len(weights))
        graded = Alone(model, LOSS, copies=MOST).under(weights)(x, y, mask)
        found = []
        for k, factor in enumerate(factors.tolist()):
            total = torch.zeros(len(weights), dtype=torch.float64)
            one = graded.gradients[k : k + 1]
            if math.isfinite(graded.losses[k]):
                lattice.add(total, one, loops.norms(one), [factor])
            found.append(total.norm() * lattice.step / lattice.sensitivity)
        return torch.stack(found)
    if layout == "vmap":
        engine = gradients.build(model, "cross-entropy", "exact", copies=MOST)
    else:
        engine = Fast(model, LOSS, stack=layout == "stack", copies=MOST)
    weights, count = engine.flatten(model), len(PERSONS)
    if layout == "stack":
        graded = engine(weights.expand(count, -1), x[:, None], y[:, None], mask[:, None])
        return graded.pull(bounded(factors[:, None], graded.limits, clip)).double().norm(dim=1) / clip
    graded = engine.shared(weights, x, y, torch.zeros(count, dtype=torch.long), 1, mask)
    limited = bounded(factors, graded.limits, clip)
    alone = [graded.pull(torch.where(torch.arange(count) == k, limited, 0.0)) for k in range(count)]
    return torch.stack([one.double().norm() / clip for one in alone])


@pytest.mark.parametrize("layout", ["site", "shared", "stack", "vmap"])
def test_nobody_adds_more_than_the_clip_however_many_records(layout: str):
    longest = 0.0
    for seed in range(2):
        for name in MODELS:
            if layout == "vmap" and name in OF_WORDS:
                continue  # slow, and covered by single records
            found = own_terms(name, seed, layout)
            assert float(found.max()) <= OWN, f"{name}, seed {seed}: {found.tolist()}"
            longest = max(longest, float(found.max()))
    assert longest > 0.99, "somebody must reach the clip, or this shows nothing"


def test_exact_sums_lose_one_persons_term_and_nothing_else():
    """Zeroed out with all of their records, a person takes their own term along, to the last bit."""
    records, _, _, _ = persons("robust-hdp-cnn", 7)
    model = sd.models.build("robust-hdp-cnn", tuple(records.x.shape[1:]), 3)
    x = torch.randn(records.x.shape, generator=torch.Generator().manual_seed(1))
    weights = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    lattice, engine = Lattice(0.1, len(weights)), Alone(model, LOSS, copies=MOST)

    def total(there: list[int]) -> Tensor:
        table = records.members.clone()
        table[[k for k in range(len(PERSONS)) if k not in there]] = -1
        own, grade = Records(x, records.y, members=table), engine.under(weights)

        def terms(some):
            found = grade(*own.at(torch.tensor(list(some))))
            usable = [1.0 if math.isfinite(loss) else 0.0 for loss in found.losses]
            return {"gradient": Block(found.gradients, loops.norms(found.gradients), usable)}

        return exact_sums(OneByOne(len(PERSONS), terms, engine.block), {"gradient": lattice})["gradient"][0]

    everyone = total([0, 1, 2, 3, 4])
    for person in range(len(PERSONS)):
        rest = total([k for k in range(len(PERSONS)) if k != person])
        assert torch.equal(everyone - rest, total([person]))
        assert 0 < float((everyone - rest).norm()) <= lattice.sensitivity


class Free(Gate):
    """A gate whose charges are paid elsewhere, and that adds no noise."""

    private = False

    def __init__(self):
        super().__init__(None, Keyed("key"), "attack")


def counted(cells: Tensor, width: int, whose: Tensor | None) -> Tensor:
    permit = gates.Permit([Turn("north", 1)], [Terms(Sampling.full(), (("scores", 1.0),), 1, 1.0)])
    return Free().count(permit, 0, {"scores": (cells, width)}, whose)["scores"].value


def test_a_person_counts_once_in_all_in_every_table():
    """All records in one cell, spread out, in cells that do not exist, f questions at once, 1 to 50 records."""
    random = torch.Generator().manual_seed(0)
    whose = torch.repeat_interleave(torch.arange(len(PERSONS)), torch.tensor(PERSONS))
    whose = whose[torch.randperm(len(whose), generator=random)]
    for questions in (1, 3):
        for cells in (
            torch.zeros(len(whose), questions, dtype=torch.long),
            torch.randint(-2, 9, (len(whose), questions), generator=random),
            torch.arange(len(whose) * questions).view(-1, questions) % 7,
        ):
            everyone = counted(cells, 7, whose)
            for person in range(len(PERSONS)):
                gone = torch.where((whose == person)[:, None], -1, cells)
                move = everyone - counted(gone, 7, whose)
                assert float(move.norm()) <= math.sqrt(questions) + 1e-12
                assert float(move.sum()) <= questions
    whole = counted(torch.zeros(len(whose), 1, dtype=torch.long), 2, whose)
    assert whole.tolist() == [5.0, 0.0], "five persons, to the last bit: nothing is lost to rounding"


@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_an_audit_with_persons_of_five_canaries_stays_below_the_claim_and_comes_near_it(rate):
    found = audit_method("dp-fedavg", Trial(epsilon=2.0, rate=rate, canaries=50_000, unit_records=5))
    assert found.passed
    assert found.claimed <= 2.0
    assert found.gaussian > (0.8 * found.claimed if rate == 1.0 else 0)


@pytest.mark.parametrize("method", ["fedfdp", "adaptdp", "q-ffl"])
def test_questions_are_answered_by_persons_too(method):
    name = method if sd.methods.get(method).private else f"dp-{method}"
    assert audit_releases(name, Trial(epsilon=2.0, canaries=4000, unit_records=5)).passed


def by_record(trial: Trial, seed: int = 0):
    """An audit of persons by a mechanism that takes each of their records for a unit, and claims the same."""
    count, each = trial.canaries, trial.unit_records
    plan = auditing._planned("dp-fedavg", trial, ("canaries",), np.array([count * each]), 1.0, seed)

    def mechanism(included):
        model = Lookup(count)
        x, there = np.repeat(np.arange(count), each), np.repeat(included, each)
        ready = auditing._canaries(plan, model, x, there, seed, [np.arange(count * each)])
        with _ledger() as book:
            session = auditing._audited(ready, book, most=count * each)
        return (ready.engine.flatten(model) - session.state.weights).double().numpy()

    return audit(mechanism, plan.clients[0].epsilon, trial.delta, count, seed)


@contextmanager
def _ledger():
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "l.db", durable=False) as book:
        yield book


def test_clipping_by_record_is_caught():
    assert not by_record(Trial(epsilon=2.0, canaries=4000, unit_records=5)).passed


def test_a_missing_cap_is_caught(monkeypatch):
    """Records clipped to C/8 and noise for C: right for persons of at most eight records, and for nobody else."""
    honest = Terms.own_noise
    monkeypatch.setattr(Terms, "own_noise", lambda self, part: MOST * honest(self, part))
    assert by_record(Trial(epsilon=2.0, canaries=4000, unit_records=MOST)).passed
    assert not by_record(Trial(epsilon=2.0, canaries=4000, unit_records=50)).passed


def test_a_split_that_parts_a_person_is_caught():
    """Held out by record, a person is in both parts and pays twice, where the larger account alone is claimed."""
    count, delta = 20_000, 1e-5
    (noise,) = sd.privacy.accounting.calibrate_events([[Event("scores", Sampling.full(), 1.0)]], [Budget(2.0, delta)])
    terms = Terms(Sampling.full(), (("scores", float(noise)),), 1, 1.0)

    def released(account: str, persons: np.ndarray, included: np.ndarray) -> np.ndarray:
        """How far every person shows in one account's release, all their records in a cell of their own."""
        with _ledger() as book:
            book.open_account(account, Budget(2.0, delta), simulated=True)
            book.declare([LedgerPlan(account, "run", (terms.event,), 1)])
            gate = Gate(book, Keyed(account), "run")
            permit = gate.grant([Turn(account, 1)], [terms], "request")
            cells = torch.from_numpy(np.where(included[persons], persons, -1))[:, None]
            value = gate.count(permit, 0, {"scores": (cells, count)}, torch.from_numpy(units.numbered(persons)))
            assert book.epsilon()[account] <= 2.0
        return value["scores"].value.numpy()

    whose = np.repeat(np.arange(count), 2)

    def mechanism(by_person: bool):
        out = held_out(b"key", (f"id {p}" for p in whose), 0.5) if by_person else np.arange(len(whose)) % 2 == 1

        def run(included):
            both = [released(name, whose[part], included) for name, part in (("training", ~out), ("held", out))]
            return both[0] + both[1] if not by_person else np.where(np.isin(np.arange(count), whose[out]), *both[::-1])

        return run

    assert audit(mechanism(True), 2.0, delta, count, 0).passed
    assert not audit(mechanism(False), 2.0, delta, count, 0).passed
