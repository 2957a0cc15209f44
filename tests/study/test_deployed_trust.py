"""Deployed runs with shared noise: results, status and the server's own figures say whom promises hold against."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
from federation_rig import Rig, five_clients, table
from test_federation_shared import silent

from sordino.engine.federation.declaration import check_spent
from sordino.engine.federation.limits import Policy
from sordino.errors import BadInput
from sordino.privacy.trust import EVERYBODY, Against
from sordino.study.conduct import conduct, set_up
from sordino.study.deployed import privacy_of
from sordino.study.file import make_study
from sordino.study.report import render
from sordino.study.status import look
from sordino.study.status import table as shown

TRUST = "against the server and any one of the four other sites"


@pytest.fixture
def rig(tmp_path: Path):
    clients = five_clients()
    study = table("dp-fedavg", clients, 2, steps=1, rate=0.2, lr=0.5)
    study["trust"] = {"noise": "shared", "colluders": 1, "dropouts": 1}
    study["deployment"] |= {"enrol": 0.1, "timeout": 5.0}
    with Rig(tmp_path / "sites", clients, study, everywhere=Policy(colluders=1)) as made:
        made.run = tmp_path / "run"
        yield made


def test_a_deployed_result_says_against_whom(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)
    assert look(rig.run)["trust"] == ["noise is shared: promises hold against the server and any one other site"]
    conduct(rig.run, rig.wires)
    result = json.loads((rig.run / "result.json").read_text())
    for one in result["privacy"]:
        ledger = rig.wires.sites[one["client"]].ledger
        assert (one["told_by"], one["trust"]) == ("site", TRUST)
        assert one["own_epsilon"] == pytest.approx(ledger.own_epsilon()[one["client"]])
        assert one["own_epsilon"] > one["spent_epsilon"] > 0
    assert look(rig.run)["trust"] == [f"dp-fedavg: noise is shared, ε holds {TRUST}"]
    assert any(TRUST in str(line) for line in shown(look(rig.run)).renderables)
    assert TRUST in render([result])


def test_the_server_works_it_out_where_a_site_says_nothing(rig: Rig):
    """With a lost site and a repeated round: as often as each site's own ledger was charged."""
    rig.wires.fault = silent({(2, 0): {"client-00"}})
    coordinator, state = rig.coordinator(), rig.first()
    for _ in coordinator.run(state):
        pass
    for one in privacy_of(coordinator.course.plan, state, {})[1:]:
        ledger = rig.wires.sites[one["client"]].ledger
        assert (one["told_by"], one["trust"]) == ("server", TRUST)
        assert one["releases"][0]["count"] == 3
        assert one["spent_epsilon"] == pytest.approx(ledger.epsilon()[one["client"]], rel=1e-6)
        assert one["own_epsilon"] == pytest.approx(ledger.own_epsilon()[one["client"]], rel=1e-6)


SAID = {
    "spent_epsilon": 1.0,
    "run_epsilon": 1.0,
    "replace_one_epsilon": 2.0,
    "own_epsilon": 3.0,
    "against": {"colluders": 3, "others": 4},
    "releases": [],
    "not_private": [],
}


def test_no_site_is_believed_to_promise_more_than_the_plan(rig: Rig):
    plan, state = rig.coordinator().course.plan, rig.first()
    for against, told in (
        (Against(3, 4), TRUST),
        (Against(), TRUST),
        (Against(0, 9), "against the server, while no other site conspires with it"),
        (Against(1, 9), "against the server and any one other site"),
    ):
        said = {"client-00": {**check_spent(SAID), "against": against}}
        assert privacy_of(plan, state, said)[0]["trust"] == told


@pytest.mark.parametrize(
    "odd",
    [
        {"against": None},
        {"against": {"colluders": 1}},
        {"against": {"colluders": 1, "others": 4, "more": 1}},
        {"against": {"colluders": True, "others": 4}},
        {"against": {"colluders": -1, "others": 4}},
        {"against": {"colluders": 4, "others": 4}},
        {"against": {"colluders": "\x1b[2J", "others": 4}},
        {"against": {"colluders": None, "others": None}},  # its own noise alone would promise less: not everybody
        {"own_epsilon": 0.5},
        {"own_epsilon": None},
        {"own_epsilon": math.nan},
    ],
)
def test_what_a_site_says_is_checked(odd):
    with pytest.raises(BadInput):
        check_spent({**SAID, **odd})
    assert check_spent(SAID)["against"] == Against(3, 4)
    alone = {**SAID, "own_epsilon": 1.0, "against": {"colluders": None, "others": None}}
    assert check_spent(alone)["against"].words() == EVERYBODY
