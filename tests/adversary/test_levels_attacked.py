"""Levels of consent under attack: canaries of every level, sites that lie about their levels, a whole deployed run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_rig import Rig, table

import sordino as sd
from sordino.engine.federation.declaration import check_declaration, check_spent
from sordino.engine.federation.limits import Policy
from sordino.errors import BadInput
from sordino.methods import Population, Training, get, make_plan
from sordino.privacy.auditing import audit
from sordino.privacy.ledger import Ledger
from sordino.privacy.levels import Consent
from sordino.privacy.types import Budget
from sordino.study.audit import Lookup, _audited, _canaries
from sordino.study.conduct import conduct, set_up
from sordino.study.deploy import prepare
from sordino.study.file import make_study

LEVELS = {"strict": 0.5, "generous": 4.0}
COUNT = 20_000
HONEST = {"name": "client-00", "records": 300, "epsilon": 2.0, "delta": 1e-5, "adjacency": "zero-out"}
TWO = [["strict", 2.0, 100], ["generous", 8.0, 200]]


def test_canaries_of_each_level_are_as_safe_as_it_says(tmp_path: Path) -> None:
    """An attack on the real step: no level is beaten, and generous canaries are seen better than strict ones may be."""
    budget = Budget(0.5, 1e-5)
    consent = Consent.of_words(["strict", "generous"] * (COUNT // 2), LEVELS, "levels")
    levels = consent.levels(budget)
    training = Training(rounds=2, rate=0.3, steps=2, lr=1.0, clip=1.0, evaluate=2)
    people = Population(("canaries",), np.array([COUNT]), (budget,), levels=(levels,))
    plan = make_plan(get("dp-fedavg"), training, people, COUNT, 0)
    found = {}
    for level in levels:
        own = consent.members[level.name]
        file = tmp_path / f"{level.name}.db"

        def mechanism(included: np.ndarray[Any, Any], own: Any = own, file: Path = file) -> np.ndarray[Any, Any]:
            there, model = np.zeros(COUNT, bool), Lookup(COUNT)
            there[own] = included
            ready = _canaries(plan, model, np.arange(COUNT), there, 0, [np.arange(COUNT)])
            ready = replace(ready, clients=replace(ready.clients, budgets=(budget,), consent=consent))
            with Ledger(file) as book:
                session = _audited(ready, book, most=COUNT)
                spent = book.epsilon()
            assert all(spent[f"canaries ({one.name})"] <= one.budget.epsilon for one in levels)
            moved = (ready.engine.flatten(model) - session.state.weights).double().numpy()
            return np.asarray(moved[own])

        found[level.name] = audit(mechanism, level.budget.epsilon, 1e-5, len(own))
    assert all(verdict.passed for verdict in found.values()), found
    assert max(found["generous"].one_run, found["generous"].gaussian) > 0.5
    assert max(found["strict"].one_run, found["strict"].gaussian) < 0.5


@pytest.mark.parametrize(
    "levels",
    [
        [],
        [["strict", 2.0, 299]],
        [["strict", 2.0, 300], ["strict", 3.0, 0]],
        [["strict", 1.0, 300]],
        [["strict", 2.0, 400], ["generous", 8.0, -100]],
        [["strict", 2.0, 300.0]],
        [["strict", float("nan"), 300]],
        [["strict", 2.0, 100], ["public", float("inf"), 200]],
        [["held out", 2.0, 300]],
        [["", 2.0, 300]],
        [["a (b)", 2.0, 300]],
        [[7, 2.0, 300]],
        [["strict", 2.0]],
        [[f"level {k}", 2.0, 15] for k in range(20)] + [["one more", 2.0, 0]],
        {"strict": 2.0},
        "strict",
    ],
)
def test_levels_that_no_site_can_mean_are_refused(levels: Any) -> None:
    with pytest.raises(BadInput):
        check_declaration({**HONEST, "levels": levels}, "client-00", "zero-out")


def test_levels_are_taken_as_they_are_declared() -> None:
    found = check_declaration({**HONEST, "levels": TWO[::-1]}, "client-00", "zero-out")
    assert found["levels"] == TWO
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("said", [[], {}, {"strict": 1.0}, {"strict": [1.0]}, {"strict": [-1.0, 0.5]}, {"s": ["1", 1]}])
def test_odd_last_words_about_levels_are_refused(said: Any) -> None:
    facts = {"spent_epsilon": 1.0, "run_epsilon": 1.0, "replace_one_epsilon": 1.0, "own_epsilon": 1.0, "releases": []}
    facts |= {"not_private": [], "against": {"colluders": None, "others": None}}
    assert check_spent(facts)
    with pytest.raises(BadInput):
        check_spent({**facts, "levels": said})


def digits() -> sd.data.Federation:
    dealt = sd.data.load("digits").partition("iid", clients=2, seed=1)
    return dealt.with_levels({"strict": 1.0, "generous": 6.0}, ["strict", "generous", ""] * (len(dealt.x) // 3))


@pytest.mark.parametrize("far", [[1e-6, 1e4], [1e-3, 10.0], [1e4, 1e4]])
def test_levels_that_are_worlds_apart_are_planned_or_left_out(far: list[float]) -> None:
    ready = prepare(make_study(table("dp-fedavg", digits(), rounds=2, rate=0.1)), "run")
    odd = [["strict", far[0], 150], ["generous", far[1], 150]]
    said = check_declaration({**HONEST, "epsilon": far[0], "levels": odd}, "client-00", "zero-out")
    kept, left = ready.sound({"client-00": said, "client-01": HONEST})
    assert set(kept) | set(left) == {"client-00", "client-01"}
    assert "client-01" in kept
    for one in ready.plan(kept).clients:
        assert one.fits


def test_a_deployed_run_with_levels_from_enrolment_to_its_result(tmp_path: Path) -> None:
    clients = digits()
    study = table("dp-fedavg", clients, rounds=2, rate=0.1, lr=0.5)
    study["deployment"] |= {"enrol": 0.1, "timeout": 20.0}
    with Rig(tmp_path / "sites", clients, study, everywhere=Policy()) as rig:
        set_up(tmp_path / "run", make_study(study), resume=False)
        conduct(tmp_path / "run", rig.wires)
        result = json.loads((tmp_path / "run" / "result.json").read_text())
        for one in result["privacy"]:
            site = rig.wires.sites[one["client"]]
            assert one["told_by"] == "site"
            assert one["epsilon"] == 6.0
            for level in one["levels"]:
                account = f"{site.account} ({level['level']})"
                assert level["spent_epsilon"] == pytest.approx(site.ledger.epsilon([account])[account])
                assert 0.99 * level["epsilon"] < level["spent_epsilon"] <= level["epsilon"]
    assert torch.isfinite(sd.load(tmp_path / "run").weights).all()
