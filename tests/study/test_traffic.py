"""What a plan says of a deployed run's bytes is what a federation sends; its hours say what they are made of."""

from __future__ import annotations

import json
import sys
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from federation_rig import Rig, five_clients, table

from sordino.cli import app
from sordino.errors import BadInput
from sordino.study import traffic
from sordino.study.deploy import prepare
from sordino.study.file import make_study
from sordino.study.traffic import REPLY, describe_traffic
from sordino.study.traffic_told import PACE, render_traffic, size

STEPS = {"steps": 1, "rate": 0.2, "lr": 0.5}
EXAMPLE = Path(__file__).parents[2] / "examples" / "deploy" / "study.toml"


@pytest.fixture(scope="module")
def clients():
    return five_clients((4.0, 8.0, 8.0))


@pytest.fixture
def quick(monkeypatch):
    """Paces that are known: a millisecond a gradient, a microsecond a number of noise."""
    monkeypatch.setattr(traffic, "_paces", lambda ready, shared: (1e-3, 1e-6))


@pytest.mark.parametrize("method", ["dp-fedavg", "dp-scaffold", "pfa-plus", "adaptdp", "shared"])
def test_bytes_are_those_that_a_federation_sends(tmp_path: Path, clients, method: str, quick):
    study = table("dp-fedavg" if method == "shared" else method, clients, rounds=4, **STEPS)
    if method == "shared":
        study["trust"] = {"noise": "shared", "colluders": 0}
    with Rig(tmp_path, clients, study) as rig:
        rig.train()
        plan, heard = rig.ready.plan(rig.facts), rig.wires.heard
    told = describe_traffic(make_study(study), plan)
    down, up, count = Counter(), Counter(), Counter()
    for name, request, reply in heard:
        down[name] += len(request)
        up[name] += len(reply)
        count[name] += 1
    for row in told["sites"]:
        name = row["client"]
        # Vectors are broadcast from the second round on; private sites of PFA+ then send a few numbers only.
        assert row["down"] * 0.74 <= down[name] <= row["down"] * 1.001, (method, row, down[name])
        assert up[name] <= row["up"]
        if method != "pfa-plus":
            assert row["up"] - up[name] <= (count[name] + 1) * REPLY
    if method in ("dp-fedavg", "adaptdp", "shared"):
        assert sum(down.values()) == pytest.approx(told["down"], rel=0.1)
    assert told["down"] == sum(row["down"] for row in told["sites"])


def test_hours_are_made_of_polling_computing_and_sending(clients, quick):
    study = make_study(table("dp-fedavg", clients, rounds=100, **STEPS))
    plan = planned(study, clients)
    told = describe_traffic(study, plan, bandwidth=1.0)
    assert told["exchanges"] == 103
    assert told["seconds"]["polling"] == PACE * 103
    assert told["seconds"]["computing"] == pytest.approx(100 * (100 * 1e-3 + 650 * 1e-6))
    row = told["sites"][0]
    assert told["seconds"]["sending"] == pytest.approx((row["down"] + row["up"]) * 8 / 1e6, rel=1e-6)
    assert told["hours"] == pytest.approx(sum(told["seconds"].values()) / 3600)
    faster = describe_traffic(study, plan, bandwidth=100.0)
    assert faster["seconds"]["sending"] == pytest.approx(told["seconds"]["sending"] / 100)
    with pytest.raises(BadInput, match="a positive number"):
        describe_traffic(study, plan, bandwidth=0.0)


def test_a_larger_model_is_more_to_send(clients, quick):
    turns, parameters = [], []
    for model in ("logistic", "mlp"):
        study = make_study({**table("dp-fedavg", clients, **STEPS), "model": {"name": model}})
        turns.append(describe_traffic(study, planned(study, clients))["sites"][0]["turn_up"])
        parameters.append(len(prepare(study, "").start))
    assert turns[1] - turns[0] == 4 * (parameters[1] - parameters[0]) > 0


def planned(study, clients):
    facts = {"records": 500, "epsilon": 4.0, "delta": 1e-5, "adjacency": "zero-out"}
    return prepare(study, "").plan(dict.fromkeys(clients.names, facts))


def test_the_command_says_it_and_that_it_is_an_estimate():
    run = CliRunner().invoke(app, ["plan", str(EXAMPLE), "--bandwidth", "2"], env={"COLUMNS": "300"})
    assert run.exit_code == 0, run.output
    said = " ".join(run.output.split())
    assert "deployed: " in said
    assert "an estimate: polling 32 s" in said
    assert "2 Mbit/s" in said
    run = CliRunner().invoke(app, ["plan", str(EXAMPLE), "--json"])
    found = json.loads(run.output)["deployment"]
    assert found["exchanges"] == 8
    assert found["gradient_seconds"] > 0
    assert [row["turns"] for row in found["sites"]] == [5, 5, 5]
    run = CliRunner().invoke(app, ["plan", str(EXAMPLE), "--json", "--set", "deployment.sites=[]"])
    assert json.loads(run.output)["deployment"] is None


def test_a_study_that_cannot_be_deployed_says_why(clients, quick):
    study = table("dp-fedavg", clients, **STEPS)
    plan = planned(make_study(study), clients)
    del study["deployment"]["shape"]
    told = describe_traffic(make_study(study), plan)
    assert "declare deployment.shape" in told["refused"]
    console = Console(width=200, record=True, file=StringIO())
    for line in render_traffic(told, 3):
        console.print(line)
    assert "cannot be deployed" in console.export_text()


def test_sizes_in_words():
    assert [size(n) for n in (980, 1200, 12_000, 3.44e6, 5e9, 2e12)] == [
        "980 B",
        "1.2 kB",
        "12 kB",
        "3.4 MB",
        "5.0 GB",
        "2.0 TB",
    ]
