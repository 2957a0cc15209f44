"""A deployed run at the server: its folder, what it tells a person, and that it can be taken up again."""

from __future__ import annotations

import json
import math
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from federation_rig import Rig, five_clients, table

import sordino as sd
from sordino.cli import app
from sordino.engine.federation.certificates import Keys, certify
from sordino.engine.federation.limits import Policy
from sordino.engine.federation.wire import unpack
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.methods import auto
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study
from sordino.study.page import Page, page
from sordino.study.report import render
from sordino.study.serve import coordinate
from sordino.study.status import line_of, look
from sordino.study.status import table as shown

STEPS = {"steps": 2, "rate": 0.2, "lr": 0.5}


@pytest.fixture(scope="module")
def clients():
    return five_clients((2.0, 8.0, math.inf))


@pytest.fixture
def rig(tmp_path: Path, clients):
    study = table("dp-fedavg", clients, rounds=3, **STEPS)
    study["deployment"] |= {"enrol": 0.1, "timeout": 5.0}
    with Rig(tmp_path / "sites", clients, study, everywhere=Policy()) as made:
        made.run = tmp_path / "run"
        yield made


def text_of(seen: dict) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(shown(seen))
    return console.export_text()


def test_a_finished_run_is_a_result_like_any_other(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)
    conduct(rig.run, rig.wires)
    result = json.loads((rig.run / "result.json").read_text())
    assert result["simulated"] is False
    assert [one["client"] for one in result["privacy"]] == rig.clients.names
    assert [one["epsilon"] for one in result["privacy"]] == [2.0, 8.0, None]
    assert result["privacy"][0]["spent_epsilon"] == pytest.approx(2.0, rel=0.02)
    assert result["final"]["accuracy"] is None, "nobody released a metric"
    assert sd.load(rig.run).model(torch.from_numpy(rig.clients.x[:2])).shape == (2, 10)
    assert "Deployment" in render([result])
    said = text_of(look(rig.run))
    assert "finished, round 3 of 3" in said
    assert "∞" in said


def test_a_study_that_says_nothing_sets_itself_once_it_is_known_who_came(tmp_path: Path, clients, monkeypatch):
    monkeypatch.setattr(auto, "FEWEST", 2)
    monkeypatch.setattr(auto, "MOST", 3)
    study = {key: value for key, value in table("auto", clients).items() if key not in ("model", "method", "training")}
    del study["study"]["rounds"]
    study["deployment"] |= {"enrol": 0.1, "timeout": 20.0}
    with Rig(tmp_path / "sites", clients, study, everywhere=Policy()) as rig:
        set_up(tmp_path / "run", make_study(study), resume=False)
        result = conduct(tmp_path / "run", rig.wires)
    told = result["study"]
    assert (told["method"]["name"], told["model"]["name"]) == ("auto", "scatter-linear")
    assert len(result["rounds"]) == told["training"]["rounds"] <= 3
    assert told["training"]["lr"] > 0
    assert any(line.startswith("rounds ") for line in told["auto"])
    for one in result["privacy"][:2]:
        assert one["run_epsilon"] <= one["epsilon"]


def test_the_server_judges_the_model_by_its_own_records(rig: Rig, tmp_path: Path):
    np.savez(tmp_path / "own.npz", x=rig.clients.x[:200], y=rig.clients.y[:200])
    set_up(rig.run, make_study(rig.study, [f"deployment.test='{tmp_path / 'own.npz'}'"]), resume=False)
    result = conduct(rig.run, rig.wires)
    with torch.no_grad():
        guesses = sd.load(rig.run).model(torch.from_numpy(rig.clients.x[:200])).argmax(-1).numpy()
    right = float((guesses == rig.clients.y[:200]).mean())
    assert result["final"]["central_accuracy"] == result["rounds"][-1]["central_accuracy"] == pytest.approx(right)
    assert f"accuracy {100 * right:.1f} %" in line_of(result["rounds"][-1], 3)


def test_a_second_run_finds_nothing_left_and_the_public_site_goes_on(rig: Rig, tmp_path: Path):
    set_up(rig.run, make_study(rig.study), resume=False)
    conduct(rig.run, rig.wires)
    again = tmp_path / "again"
    set_up(again, make_study(rig.study), resume=False)
    result = conduct(again, rig.wires)
    assert [record["participants"] for record in result["rounds"]] == [["client-02"]] * 3
    said = text_of(look(again))
    assert "client-00 refused – its budget for this run was used up before round 1" in said
    del rig.wires.sites["client-02"]
    study = make_study(rig.study, ["deployment.absent='go on'"])
    set_up(tmp_path / "third", study, resume=False)
    with pytest.raises(BudgetRefused, match="no site's budget pays for one turn"):
        conduct(tmp_path / "third", rig.wires)


def test_a_run_ends_in_order_when_no_site_can_pay_any_more(rig: Rig, tmp_path: Path, monkeypatch):
    del rig.wires.sites["client-02"]
    study = rig.study | {"method": {"name": "minimum-epsilon"}}
    study["deployment"] = rig.study["deployment"] | {"absent": "go on"}
    set_up(rig.run, make_study(study), resume=False)
    conduct(rig.run, rig.wires)
    study |= {"method": {"name": "dp-fedavg"}, "study": rig.study["study"] | {"rounds": 12}}
    again = tmp_path / "again"
    set_up(again, make_study(study), resume=False)
    result = conduct(again, rig.wires)
    assert 0 < len(result["rounds"]) < 12
    assert all(record["participants"] for record in result["rounds"]), "no empty rounds"
    assert result["stopped"]["reason"].endswith("no client's budget pays for another turn")
    assert json.loads((again / "result.json").read_text())["stopped"] == result["stopped"]
    assert result["privacy"][1]["told_by"] == "site", "goodbye was said"
    for site in rig.wires.sites.values():
        assert not any(one.open for one in site.ledger.standings(site.account)), "what is left is free for other runs"
    (tmp_path / "study.toml").write_text("")
    monkeypatch.setattr("sordino.study.serve.serve", lambda *given: result)
    ended = CliRunner().invoke(app, ["serve", str(tmp_path / "study.toml"), "--insecure", "--out", str(again)])
    assert ended.exit_code == 3
    third = tmp_path / "third"
    set_up(third, make_study(study), resume=False)
    with pytest.raises(BudgetRefused, match=r"no site's budget pays .*client-00, client-01"):
        conduct(third, rig.wires)
    for site in rig.wires.sites.values():
        assert not any(one.open for one in site.ledger.standings(site.account))


def test_a_run_that_was_interrupted_is_taken_up_where_it_was(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)

    def stop(name: str, request: bytes, reply: bytes) -> bytes:
        if unpack(request).facts.get("round") == 2 and name == "client-01":
            raise KeyboardInterrupt
        return reply

    rig.wires.fault = stop
    with pytest.raises(KeyboardInterrupt):
        conduct(rig.run, rig.wires)
    seen = look(rig.run)
    assert (seen["state"], seen["round"]) == ("interrupted", 1)
    running = page(rig.run)
    assert 'id="live"' in running
    assert "interrupted, round 1 of 3" in running
    assert 'http-equiv="refresh"' in running
    rig.wires.fault = lambda name, request, reply: reply
    set_up(rig.run, make_study(rig.study), resume=True)
    result = conduct(rig.run, rig.wires)
    assert [one["round"] for one in result["rounds"]] == [1, 2, 3]
    assert result["privacy"][0]["releases"][0]["count"] == 3 * STEPS["steps"]


def test_another_study_does_not_go_on_in_the_same_folder(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)
    with pytest.raises(BadInput, match="already holds a run"):
        set_up(rig.run, make_study(rig.study), resume=False)
    with pytest.raises(BadInput, match="another study"):
        set_up(rig.run, make_study(rig.study, ["training.lr=0.1"]), resume=True)


def test_a_forbidden_method_is_refused_with_the_sites_reason(rig: Rig):
    site = rig.wires.sites["client-01"]
    site.policy = Policy(methods=("robust-hdp",))
    set_up(rig.run, make_study(rig.study), resume=False)
    with pytest.raises(SordinoError, match="client-01: method 'dp-fedavg' is not allowed here"):
        conduct(rig.run, rig.wires)
    seen = look(rig.run)
    assert seen["state"] == "failed"
    assert "this site allows robust-hdp" in text_of(seen)


def test_a_federation_can_go_on_without_those_who_did_not_come(rig: Rig):
    del rig.wires.sites["client-01"]
    study = make_study(rig.study, ["deployment.absent='go on'"])
    set_up(rig.run, study, resume=False)
    result = conduct(rig.run, rig.wires)
    assert result["refused"] == {"client-01": "it did not come within 0.1 s"}
    assert [one["client"] for one in result["privacy"]] == ["client-00", "client-02"]


def test_a_site_that_speaks_under_another_name_is_refused(rig: Rig):
    rig.wires.sites["client-01"].name = "client-00"
    set_up(rig.run, make_study(rig.study), resume=False)
    with pytest.raises(SordinoError, match="client-01: it calls itself 'client-00'"):
        conduct(rig.run, rig.wires)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("method.name='optimum'", "optimum is an oracle"),
        ("method.aggregate='optimum'", "optimum is an oracle"),
        ("deployment.sites=[]", "deployment.sites lists the sites"),
        ("model.name='cnn-smal'", "unknown model 'cnn-smal'"),
    ],
)
def test_serve_refuses_what_cannot_work_before_anybody_is_asked(tmp_path: Path, clients, change: str, word: str):
    study = make_study(table("dp-fedavg", clients, **STEPS), [change])
    with pytest.raises(SordinoError, match=word):
        set_up(tmp_path / "run", study, resume=False)
    assert not (tmp_path / "run").exists()


def test_a_study_without_a_shape_is_told_what_to_declare(tmp_path: Path, clients):
    study = table("dp-fedavg", clients, **STEPS)
    del study["deployment"]["shape"]
    with pytest.raises(BadInput, match=r"declare deployment.shape, such as \[1, 28, 28\]"):
        set_up(tmp_path / "run", make_study(study), resume=False)


def test_the_live_page_says_what_the_terminal_says(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)
    assert "round 0 of 3" in page(rig.run)
    conduct(rig.run, rig.wires)
    with Page(rig.run, 0, Console(file=open("/dev/null", "w"))) as served:
        host, port = served.server.server_address[:2]
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
            text = answer.read().decode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=10) as answer:
            facts = json.load(answer)
    assert all(name in text for name in rig.clients.names)
    assert "finished, round 3 of 3" in text
    assert facts["sites"][0]["answered"] == 3
    assert threading.active_count() < 20


def test_what_a_site_says_is_text_on_the_live_page(rig: Rig):
    set_up(rig.run, make_study(rig.study), resume=False)
    said = {"sites": {}, "refused": {"client-00": "<script>alert(1)</script>"}}
    (rig.run / "enrolled.json").write_text(json.dumps(said))
    text = page(rig.run)
    assert "client-00 refused – &lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script>alert" not in text


def test_own_modules_are_found_where_serve_and_join_were_started(rig: Rig, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for command in (["serve", "none.toml"], ["join", "none.toml"]):
        sys.path[0] = "elsewhere"
        assert "does not exist" in str(CliRunner().invoke(app, command).exception)
        assert sys.path[0] == str(tmp_path)
    found: list[str] = []
    set_up(rig.run, make_study(rig.study), resume=False)
    monkeypatch.chdir("/")
    monkeypatch.setattr("sordino.study.serve.conduct", lambda folder, transport, do: found.append(sys.path[0]))
    coordinate(None, SimpleNamespace(run_config={"run": str(rig.run)}))
    assert found == [str(tmp_path)], "the coordinator is another process, with another working directory"


def test_a_round_in_one_line():
    record = {"round": 4, "participants": ["a"], "refused": {"b": "no"}, "absent": ["c"], "cannot_pay": ["d"]}
    assert line_of(record, 5) == "round 4/5: 1 answers; b refused: no; no answer from c; budget used up: d"


def test_certify_makes_keys_that_others_cannot_read(tmp_path: Path):
    run = CliRunner().invoke(app, ["certify", str(tmp_path / "keys"), "--sites", "north, south"])
    assert run.exit_code == 0, run.output
    keys = Keys(tmp_path / "keys")
    assert keys.sites() == ["north", "south"]
    for secret in (keys.private("north"), keys.server[1], tmp_path / "keys" / "ca.key"):
        assert secret.stat().st_mode & 0o077 == 0
    before = keys.private("north").read_bytes()
    CliRunner().invoke(app, ["certify", str(tmp_path / "keys"), "--sites", "north,west"])
    assert keys.private("north").read_bytes() == before, "keys that exist are kept"
    assert keys.sites() == ["north", "south", "west"]
    assert isinstance(CliRunner().invoke(app, ["certify", str(tmp_path / "k"), "--sites", "../up"]).exception, BadInput)


def test_status_of_a_folder_without_a_run(tmp_path: Path):
    assert "holds no deployed run" in str(CliRunner().invoke(app, ["status", str(tmp_path)]).exception)


def serve_file(tmp_path: Path, clients) -> Path:
    lines = []
    for section, keys in table("dp-fedavg", clients, **STEPS).items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    path = tmp_path / "study.toml"
    path.write_text("\n".join(lines))
    return path


def test_serve_says_where_keys_come_from(tmp_path: Path, clients):
    arguments = ["serve", str(serve_file(tmp_path, clients)), "--keys", str(tmp_path / "none"), "--out"]
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "run")])
    assert isinstance(run.exception, BadInput)
    assert "make keys with `sordino certify" in str(run.exception)


def test_serve_does_not_start_with_a_certificate_that_is_over(tmp_path: Path, clients):
    certify(tmp_path / "old", ["client-00"], days=-1)
    arguments = ["serve", str(serve_file(tmp_path, clients)), "--keys", str(tmp_path / "old"), "--out"]
    run = CliRunner().invoke(app, [*arguments, str(tmp_path / "run")])
    assert "and not now: make new keys" in str(run.exception)


def test_joining_without_tls_needs_a_word_and_warns(tmp_path: Path):
    site = tmp_path / "SITE.toml"
    site.write_text(
        '[site]\nname = "a"\nserver = "127.0.0.1:1"\n[data]\npath = "a.npz"\n[data.schema]\nclasses = [0, 1]\n'
        "[budget]\nepsilon = 1.0\ndelta = 1e-5\n"
    )
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 2), dtype=np.float32), y=np.array([0, 1, 0, 1]))
    assert "[keys] is missing" in str(CliRunner().invoke(app, ["join", str(site)]).exception)
    run = CliRunner().invoke(app, ["join", str(site), "--insecure", "--wait", "1"])
    assert "WARNING" in run.output
    assert "nobody answers at 127.0.0.1:1 after 1 s" in str(run.exception)
