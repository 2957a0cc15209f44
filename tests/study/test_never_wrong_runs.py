"""A command never gives a figure of another study, of another ledger, or of a run that did not take place."""

import json
import shutil

import pytest

import sordino as sd
from sordino.errors import BadInput
from sordino.study.run import prepare
from sordino.study.session import train_together

STUDY = """
[study]
name = "small"
rounds = 2
[data]
name = "digits"
records = 300
partition = "iid"
clients = 3
[budgets]
epsilon = [1.0, 2.0, 4.0]
delta = 1e-4
[model]
name = "logistic"
[training]
rate = 0.3
lr = 0.3
"""
QUICK = {"rounds": 2, "rate": 0.3, "lr": 0.3}


@pytest.fixture
def call(in_folder, tmp_path):
    """Run a command in a folder with study.toml; returns (exit code, stdout, stderr)."""
    (tmp_path / "study.toml").write_text(STUDY)
    return in_folder


@pytest.fixture(scope="module")
def clients():
    source = sd.data.load("digits").subset(300, 0).partition("iid", clients=3, seed=0)
    return source.with_budgets([1.0, 2.0, 4.0], delta=1e-4)


class Interrupted(Exception):
    """What stops a run after its first round."""


def stop(record):
    raise Interrupted


# compare in a folder that was used before


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("training.lr=0.1", "training.lr (0.3, not 0.1)"),
        ("study.rounds=3", "training.rounds (2, not 3)"),
        ("budgets.epsilon=[1.0,2.0,8.0]", "budgets"),
        ("budgets.delta=1e-5", "delta (0.0001, not 1e-05)"),
        ("data.clients=2", "another"),
        ("model.name=mlp", 'model.name ("logistic", not "mlp")'),
    ],
)
def test_compare_does_not_show_results_of_another_study(call, setting, named, tmp_path):
    words = ["compare", "study.toml", "--out", "here", "--set", "budgets.epsilon=[1.0,2.0,4.0]"]
    assert call(*words)[0] == 0
    before = (tmp_path / "here" / "report.html").read_bytes()
    more = ["--set", "budgets.epsilon=1.0"] if setting.startswith("data.") else []
    code, out, err = call(*words, *more, "--set", setting)
    assert code == 2, out
    assert named in err or "noise for 3 clients" in err
    assert (tmp_path / "here" / "report.html").read_bytes() == before
    assert call(*words)[0] == 0, "the same study finds its runs"


def test_a_smaller_comparison_does_not_take_the_place_of_a_larger_one(call, tmp_path):
    both = ["compare", "study.toml", "--out", "here", "--set", 'compare.methods=["dp-fedavg", "fedavg"]']
    assert call(*both)[0] == 0
    before = (tmp_path / "here" / "report.html").read_bytes()
    code, _, err = call("compare", "study.toml", "--out", "here")
    assert code == 2
    assert "fedavg/seed-0" in err
    assert "--out" in err
    assert (tmp_path / "here" / "report.html").read_bytes() == before
    assert call(*both, "--set", "compare.seeds=[0, 1]")[0] == 0, "it may grow"


def test_a_comparison_counts_no_run_twice_and_no_damaged_one(call, tmp_path):
    code, _, err = call("compare", "study.toml", "--set", "compare.seeds=[1, 1]")
    assert (code, "compare.seeds" in err, "twice" in err) == (2, True, True)
    assert call("compare", "study.toml", "--out", "here")[0] == 0
    file = tmp_path / "here" / "auto" / "seed-0" / "result.json"
    file.write_text(file.read_text()[:100])
    code, _, err = call("compare", "study.toml", "--out", "here")
    assert (code, "result.json is not a result of sordino" in err) == (2, True)


# a run remembers its ledger


def interrupted(clients, folder, **settings):
    with pytest.raises(Interrupted):
        sd.train(clients, "logistic", out=folder, callbacks=[stop], **QUICK, **settings)


def spent(run):
    return [one["spent_epsilon"] for one in run.privacy]


def test_a_resumed_run_pays_from_the_ledger_it_was_begun_with(clients, tmp_path):
    whole = sd.train(clients, "logistic", out=tmp_path / "whole", ledger=tmp_path / "whole.db", **QUICK)
    interrupted(clients, tmp_path / "cut", ledger=tmp_path / "shared.db")
    with pytest.raises(BadInput, match=r"pays from .*shared\.db, not from .*other\.db"):
        sd.train(clients, "logistic", out=tmp_path / "cut", ledger=tmp_path / "other.db", resume=True, **QUICK)
    assert not (tmp_path / "other.db").exists()
    resumed = sd.train(clients, "logistic", out=tmp_path / "cut", resume=True, **QUICK)
    assert spent(resumed) == spent(whole)
    assert not (tmp_path / "cut" / "ledger.db").exists()


def test_a_run_with_a_ledger_of_its_own_does_not_change_to_another(clients, tmp_path):
    interrupted(clients, tmp_path / "cut")
    with pytest.raises(BadInput, match=r"leave out --ledger"):
        sd.train(clients, "logistic", out=tmp_path / "cut", ledger=tmp_path / "other.db", resume=True, **QUICK)
    assert sd.train(clients, "logistic", out=tmp_path / "cut", resume=True, **QUICK).result


def test_a_ledger_that_is_gone_or_exchanged_is_not_begun_anew(clients, tmp_path):
    interrupted(clients, tmp_path / "cut", ledger=tmp_path / "shared.db")
    for part in tmp_path.glob("shared.db*"):
        shutil.move(part, tmp_path / part.name.replace("shared", "moved"))
    with pytest.raises(BadInput, match=r"shared\.db of the run .* is gone"):
        sd.train(clients, "logistic", out=tmp_path / "cut", resume=True, **QUICK)
    sd.train(clients, "logistic", ledger=tmp_path / "shared.db", **QUICK)
    with pytest.raises(BadInput, match=r"knows nothing of the run"):
        sd.train(clients, "logistic", out=tmp_path / "cut", resume=True, **QUICK)
    for part in tmp_path.glob("shared.db*"):
        part.unlink()
    sd.train(clients, "logistic", out=tmp_path / "cut", ledger=tmp_path / "moved.db", resume=True, **QUICK)


def test_a_folder_of_an_older_version_asks_for_the_ledger_it_did_not_note(clients, tmp_path):
    interrupted(clients, tmp_path / "cut", ledger=tmp_path / "shared.db")
    about = tmp_path / "cut" / "study.json"
    about.write_text(json.dumps({k: v for k, v in json.loads(about.read_text()).items() if k != "ledger"}))
    with pytest.raises(BadInput, match=r"name it with --ledger"):
        sd.train(clients, "logistic", out=tmp_path / "cut", resume=True, **QUICK)
    sd.train(clients, "logistic", out=tmp_path / "cut", ledger=tmp_path / "shared.db", resume=True, **QUICK)


def test_resume_goes_on_with_a_run_or_refuses(call, clients):
    code, _, err = call("run", "study.toml", "--resume", "--out", "nowhere")
    assert (code, "nowhere holds no run" in err) == (2, True)
    with pytest.raises(BadInput, match="needs out="):
        sd.train(clients, "logistic", resume=True, **QUICK)


def test_another_study_is_refused_by_the_key_that_differs(call, tmp_path):
    assert call("run", "study.toml", "--out", "here")[0] == 0
    for setting, named in [
        ("training.clip=0.5", "training.clip (1.0, not 0.5)"),
        ("study.seed=4", "study.seed (0, not 4)"),
    ]:
        code, _, err = call("run", "study.toml", "--out", "here", "--resume", "--set", setting)
        assert (code, named in err) == (2, True), err
    code, _, err = call(
        "run", "study.toml", "--out", "here", "--resume", "--set", "data.clients=2", "--set", "budgets.epsilon=1.0"
    )
    assert (code, "noise for 3 clients" in err) == (2, True), err
    (tmp_path / "here" / "study.json").write_text("{")
    code, _, err = call("run", "study.toml", "--out", "here", "--resume")
    assert (code, "study.json cannot be read" in err) == (2, True), err


# what a plan, a report and a ledger are asked for


def test_a_plan_refuses_a_device_that_no_machine_has(call):
    code, _, err = call("plan", "study.toml", "--set", "study.device=gpu")
    assert (code, "study.device = 'gpu': it is unknown: use cpu, cuda, cuda:1 or auto" in err) == (2, True), err
    assert call("plan", "study.toml", "--set", "study.device=cuda:1")[0] == 0, "it may be planned elsewhere"


def test_a_plan_refuses_a_fill_outside_its_range(call, tmp_path):
    (tmp_path / "sites").mkdir()
    for site in ("north", "south"):
        rows = "".join(f"{age},{'yes' if age > 50 else 'no'}\n" for age in range(20, 80))
        (tmp_path / "sites" / f"{site}.csv").write_text("age,ill\n" + rows)
    study = """
[data]
name = "sites"
[data.schema]
target = "ill"
classes = ["no", "yes"]
numeric = {age = [0, 100]}
fill = {age = FILL}
[budgets]
epsilon = 2.0
[model]
name = "logistic"
"""
    (tmp_path / "own.toml").write_text(study.replace("FILL", "-1"))
    code, _, err = call("plan", "own.toml")
    assert (code, "data.schema.fill.age is -1, outside the column's range 0 … 100" in err) == (2, True), err
    (tmp_path / "own.toml").write_text(study.replace("FILL", "40"))
    assert call("plan", "own.toml")[0] == 0


def test_a_ledger_shows_nothing_of_nobody(call):
    assert call("run", "study.toml", "--out", "here")[0] == 0
    code, out, err = call("ledger", "show", "here/ledger.db", "--client", "nobody")
    assert (code, out) == (2, "")
    assert "--client 'nobody' has no account" in err
    assert "client-00" in err
    assert "client-01" in call("ledger", "show", "here/ledger.db", "--client", "client-01")[1]


def test_a_report_counts_no_run_twice_and_reads_results_only(call, tmp_path):
    assert call("run", "study.toml", "--out", "here")[0] == 0
    code, _, err = call("report", "here", "here/result.json")
    assert (code, "is named twice" in err) == (2, True), err
    (tmp_path / "other.json").write_text('{"a": 1}')
    code, _, err = call("report", "other.json")
    assert (code, "other.json is not a result of sordino" in err) == (2, True), err


# a budget that is used up


def test_a_run_that_nobody_can_pay_for_is_refused_before_it_begins(call, tmp_path):
    assert call("run", "study.toml", "--out", "first", "--ledger", "all.db")[0] == 0
    before = sd.privacy.Ledger(tmp_path / "all.db", readonly=True).epsilon()
    code, out, err = call("run", "study.toml", "--out", "second", "--ledger", "all.db")
    assert (code, out) == (3, "")
    assert "nobody's budget pays for a single turn of this plan (client-00, client-01, client-02)" in err
    assert not (tmp_path / "second" / "result.json").exists()
    with sd.privacy.Ledger(tmp_path / "all.db", readonly=True) as book:
        assert book.epsilon() == before
        assert not any(standing.open for name in before for standing in book.standings(name))


def test_a_run_stops_when_everybody_has_run_out_and_says_who_never_began(call, caplog, tmp_path):
    words = ["run", "study.toml", "--ledger", "all.db", "--out"]
    assert call(*words, "first", "--set", "method.name=minimum-epsilon")[0] == 0
    code, out, err = call(*words, "second", "--set", "study.rounds=12", "--set", "study.seed=0")
    result = json.loads((tmp_path / "second" / "result.json").read_text())
    played = result["rounds"]
    assert 0 < len(played) < 12
    assert all(one["participants"] for one in played), "no empty rounds"
    assert result["stopped"]["round"] == len(played)
    assert "1 of 3 clients sit out, for their budgets pay for no turn: client-00" in caplog.text
    assert code == 3
    assert f"stopped after round {len(played)} of 12: no client's budget pays for another turn" in err
    assert "accuracy" in out, "what was trained is shown all the same"
    assert all(one["spent_epsilon"] <= one["epsilon"] for one in result["privacy"])
    with sd.privacy.Ledger(tmp_path / "all.db", readonly=True) as book:
        assert not any(standing.open for one in result["privacy"] for standing in book.standings(one["client"]))


def test_in_a_stack_a_run_stops_as_it_would_alone(clients):
    short = clients.with_budgets([300.0, 400.0, 800.0], delta=1e-4)
    method = sd.methods.get("dp-fedavg", {"calibrate": "closed-form-selection"})
    settings = {"rounds": 8, "batch": 60, "lr": 0.01}
    ready = [prepare(short, "logistic", method, seed, None, settings) for seed in (0, 1)]
    alone = [sd.train(short, "logistic", method, seed=seed, **settings) for seed in (0, 1)]
    for one, other in zip(train_together(ready, "cpu"), alone):
        assert 0 < len(one.metrics) == len(other.metrics) < 8
        assert one.result["stopped"] == other.result["stopped"]
        assert one.result["stopped"]["refused"]


# folders and settings that are not what they seem


def test_a_folder_holds_one_kind_of_thing(call, tmp_path):
    (tmp_path / "sweep.toml").write_text(STUDY + '[sweep]\n"training.lr" = [0.1, 0.2]\n')
    made = {"run": ["run", "study.toml"], "comparison": ["compare", "study.toml"], "sweep": ["run", "sweep.toml"]}
    for kind, words in made.items():
        assert call(*words, "--out", kind)[0] == 0
    for kind in made:
        for other, words in made.items():
            if other != kind:
                code, _, err = call(*words, "--out", kind)
                assert (code, f"holds a {kind}, and this is a {other}" in err) == (2, True), err


WRONG = {
    "a clip that is zero in single precision": ("training.clip=1e-300", "training.clip is 1e-300"),
    "a step that is infinite in single precision": ("training.lr=1e300", "training.lr is 1e+300"),
    "a name that leaves the folder of runs": ("study.name=../evil", "study.name = '../evil'"),
    "no name": ('study.name=""', "study.name = ''"),
    "an unknown method to compare with": ('compare.methods=["nope"]', "method 'nope' is unknown"),
    "a sweep of nothing": ("sweep.nothing=[1]", "[sweep] 'nothing' is not a key"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_plan_refuses_what_a_run_could_not_do(call, case):
    setting, named = WRONG[case]
    code, out, err = call("plan", "study.toml", "--json", "--set", setting)
    assert (code, out) == (2, "")
    assert named in err


def test_a_comparison_checks_every_method_before_it_trains_one(call, tmp_path):
    code, _, err = call("compare", "study.toml", "--out", "here", "--set", 'compare.methods=["dp-fedavg", "nope"]')
    assert (code, "method 'nope' is unknown" in err) == (2, True)
    assert not (tmp_path / "here").exists()


def test_figures_of_training_records_are_said_to_be_that(call, caplog):
    assert call("run", "study.toml", "--out", "here", "--set", "data.test=0.0")[0] == 0
    assert "3 of 3 clients have no test records" in caplog.text


def test_a_ledger_that_cannot_be_opened_leaves_no_run_behind(call, tmp_path):
    code, _, _ = call("run", "study.toml", "--out", "here", "--ledger", "nowhere/ledger.db")
    assert code == 2
    assert call("run", "study.toml", "--out", "here", "--ledger", "ledger.db")[0] == 0


def test_a_demo_that_cannot_be_written_is_bad_input(call):
    code, _, err = call("demo", "--out", "study.toml")
    assert (code, "cannot make the folder study.toml" in err) == (2, True), err
