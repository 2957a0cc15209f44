"""A finished model judged by sites that need not have trained it, and by clients of a study in rehearsal."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from federation_rig import Rig, table

import sordino as sd
from sordino.cli import app
from sordino.engine.federation import wire
from sordino.engine.federation.wire import unpack
from sordino.errors import BadInput, SordinoError
from sordino.privacy.held import HELD
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study
from sordino.study.finished import ask_sites, asked, set_up_evaluation
from sordino.study.status import line_of, look
from sordino.study.status import table as shown

STUDY = """
[study]
name = "elsewhere"
seed = 7
[data]
name = "digits"
options = { records = 600 }
clients = 4
[budgets]
epsilon = 4.0
[model]
name = "logistic"
[method]
name = "dp-fedavg"
[evaluation]
share = 0.4
"""


@pytest.fixture(scope="module")
def clients():
    digits = sd.data.load("digits", records=900).partition("iid", clients=3, seed=1)
    return digits.with_budgets([2.0, 4.0, 8.0], 1e-5)


@pytest.fixture(scope="module")
def finished(clients: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of others, saved."""
    done = sd.train(sd.data.load("digits").partition("iid", clients=2), "logistic", "fedavg", rounds=15, lr=0.5, seed=3)
    path = tmp_path_factory.mktemp("finished") / "run.safetensors"
    done.save(path)
    return path


def there(clients: Any) -> dict[str, Any]:
    found = table("dp-fedavg", clients, rounds=40) | {"evaluation": {"share": 0.5}}
    found["deployment"] = {"sites": list(clients.names), "enrol": 0.1, "timeout": 5.0}
    return found


def set_out(folder: Path, clients: Any, finished: Path) -> dict[str, Any]:
    """The folder of an evaluation, as the command sets it up; the study that it asks about."""
    run = sd.load(finished)
    study = set_up_evaluation(asked(make_study(there(clients)), run), run)
    set_up(folder, study, resume=False, judged=run)
    return json.loads((folder / "serve.json").read_text())["study"]


def test_sites_that_did_not_train_judge_a_model_and_pay_once(clients: Any, finished: Path, tmp_path: Path):
    study = set_out(tmp_path / "run", clients, finished)
    with Rig(tmp_path / "sites", clients, study) as rig:
        found = conduct(tmp_path / "run", rig.wires, ask_sites)
        kinds = {unpack(data).kind for _, data, _ in rig.wires.heard}
        asks = [data for _, data, _ in rig.wires.heard if unpack(data).kind == wire.SCORES]
        model, right, count = sd.load(finished).model, 0, 0
        for place, name in enumerate(clients.names):
            site = rig.wires.sites[name]
            assert site.ledger.spent(name) == [], "training records have nothing to do with it"
            assert site.ledger.epsilon([name + HELD])[name + HELD] == pytest.approx(
                0.8 * clients.budgets[place].epsilon, rel=1e-3
            )
            with torch.no_grad():
                right += int((model(site.held.x).argmax(-1) == site.held.y).sum())
            count += len(site.held.y)
    assert kinds == {wire.HELLO, wire.SCORES, wire.BYE}
    assert len(asks) == 3
    rows = {one["metric"]: one for one in found["evaluation"]}
    assert rows["accuracy"]["low"] <= right / count <= rows["accuracy"]["high"]
    assert [one["held_epsilon"] for one in found["privacy"]] == pytest.approx([1.6, 3.2, 6.4], rel=1e-3)
    assert json.loads((tmp_path / "run" / "evaluation.json").read_text())["evaluation"] == found["evaluation"]
    seen = look(tmp_path / "run")
    assert seen["state"] == "finished"
    assert "95 % interval" in str(shown(seen).renderables[2])


def test_who_holds_nothing_out_is_not_asked_and_nobody_at_all_is_an_error(
    clients: Any, finished: Path, tmp_path: Path, monkeypatch: Any
):
    study, held = set_out(tmp_path / "run", clients, finished), Rig.held
    monkeypatch.setattr(Rig, "held", lambda rig, place: held(rig, place) if place else None)
    with Rig(tmp_path / "sites", clients, study) as rig:
        found = conduct(tmp_path / "run", rig.wires, ask_sites)
    assert [one["client"] for one in found["privacy"]] == list(clients.names[1:])
    set_out(tmp_path / "again", clients, finished)
    with Rig(tmp_path / "silent", clients, study) as rig:
        rig.wires.fault = lambda name, data, reply: None if unpack(data).kind == wire.SCORES else reply
        with pytest.raises(SordinoError, match=r"no site judged the model: .*did not answer"):
            conduct(tmp_path / "again", rig.wires, ask_sites)
    assert (tmp_path / "again" / "failed.json").exists()


def test_a_model_for_other_records_is_refused(clients: Any, finished: Path):
    run = sd.load(finished)
    wrong = there(clients)
    wrong["deployment"] |= {"shape": [5], "classes": 2}
    with pytest.raises(BadInput, match="they do not fit"):
        set_up_evaluation(asked(make_study(wrong), run), run)
    with pytest.raises(BadInput, match="a model of its own"):
        asked(make_study(there(clients) | {"method": {"name": "mr-mtl"}}), run)


def test_the_command_rehearses_it(finished: Path, tmp_path: Path):
    file, out = tmp_path / "study.toml", tmp_path / "out"
    file.write_text(STUDY)
    told = CliRunner().invoke(app, ["evaluate", str(finished), str(file), "--out", str(out)], terminal_width=80)
    assert told.exit_code == 0, told.output
    assert max(map(len, told.output.splitlines())) <= max(80, len(str(out)) + 30)
    assert "accuracy" in told.output
    found = json.loads((out / "evaluation.json").read_text())
    rows = {one["metric"]: one for one in found["evaluation"]}
    assert rows["accuracy"]["low"] < rows["accuracy"]["value"] < rows["accuracy"]["high"]
    assert [one["held_epsilon"] for one in found["privacy"]] == pytest.approx([3.2] * 4, rel=1e-3)
    assert found["simulated"]
    again = CliRunner().invoke(app, ["evaluate", str(finished), str(file), "--out", str(out), "--json"])
    assert json.loads(again.output)["evaluation"] == found["evaluation"], "the same seed draws the same"


def test_a_line_about_a_round_never_has_a_bare_number():
    row = {"round": 3, "metric": "accuracy", "value": 0.912, "low": 0.881, "high": 0.94, "epsilon": 1.0}
    line = line_of({"round": 3, "participants": ["a"], "evaluation": [row]}, 5)
    assert line == ("round 3/5: 1 answers; accuracy 91.2 % (95 % interval 88.1 to 94.0 %) on held-out records")
    row |= {"metric": "mean_absolute_error", "value": 0.05, "low": 0.04, "high": 0.0612}
    assert "0.05 (95 % interval 0.04 to 0.0612)" in line_of({"round": 3, "participants": [], "evaluation": [row]}, 5)


def test_a_deployed_run_ends_and_keeps_its_model_by_what_was_paid_for(clients: Any, tmp_path: Path):
    study = table("dp-fedavg", clients, rounds=8, steps=1, rate=0.2, lr=1e-6)
    study |= {"evaluation": {"every": 1, "share": 0.3, "stop": 2, "keep": "best"}}
    study["deployment"] |= {"enrol": 0.1, "timeout": 5.0}
    with Rig(tmp_path / "sites", clients, study) as rig:
        set_up(tmp_path / "run", make_study(study), resume=False)
        result = conduct(tmp_path / "run", rig.wires)
    accuracies = [one["value"] for one in result["evaluation"] if one["metric"] == "accuracy"]
    assert result["kept"]["round"] == 1 + max(range(len(accuracies)), key=lambda k: (accuracies[k], -k))
    assert len(accuracies) == len(result["rounds"])
    assert len(accuracies) == 8 or "evaluation.stop" in result["stopped"]["reason"]
