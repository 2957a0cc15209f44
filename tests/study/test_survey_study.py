"""From four CSV files that nobody may look at to a trained model: survey, drafted study, training."""

from __future__ import annotations

import json
import math
import sys
import tomllib
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats
from survey_files import NUMBERS, SITES, study, write_files, write_sites
from typer.testing import CliRunner

from sordino import cli
from sordino.commands.output import shown
from sordino.data.schema import parse_schema
from sordino.engine.federation import wire
from sordino.errors import BadInput, BudgetRefused
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import Budget
from sordino.server.counts import Estimate
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study
from sordino.study.folder import SURVEYED
from sordino.study.run import train
from sordino.study.site_file import read_site
from sordino.study.status import look
from sordino.study.survey.conduct import ask_survey
from sordino.study.survey.draft import outwards
from sordino.study.survey.plan import plan_survey
from sordino.study.survey.rehearse import rehearse

sys.path.insert(0, str(Path(__file__).parent.parent / "engine"))
from federation_rig import Wires

RIGHT = 0.85  # what the drafted study's model gets right at least; guessing gets 0.63


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the four files."""
    folder = tmp_path_factory.mktemp("wards")
    return folder, write_files(folder)


@pytest.fixture(scope="module")
def surveyed(place):
    """A survey of four sites whose SITE.toml say nothing but where the file is: folder, result, what was said."""
    folder, _ = place
    with ExitStack() as stack:
        sites = {name: stack.enter_context(read_site(path).open()) for name, path in write_sites(folder).items()}
        wires = Wires(sites)
        set_up(folder / "run", make_study(study(folder)), False, kind=SURVEYED)
        result = conduct(folder / "run", wires, ask_survey)
    return folder, result, wires.heard


def test_every_interval_contains_what_the_files_say_nearly_always(place, surveyed):
    rows = [row for name in surveyed[1]["sites"] for row in place[1][name]]
    held, told = 0, 0
    for k, column in enumerate(surveyed[1]["columns"]):
        cells = [row[k] for row in rows]
        missing = np.mean([cell in ("", "NA") for cell in cells])
        checks = [(column["missing"], missing)]
        if column["kind"] == "number":
            values = [float(cell) for cell in cells if cell not in ("", "NA")]
            checks += [(one, np.quantile(values, one["level"])) for one in column["quantiles"]]
        else:
            checks += [
                (one["share"], np.mean([cell == one["value"] for cell in cells])) for one in column["shares"][:-1]
            ]
        for one, truth in checks:
            low, high = (
                (-math.inf if one["low"] is None else one["low"]),
                math.inf if one["high"] is None else one["high"],
            )
            held, told = held + (low <= truth <= high), told + 1
    # The noise is secret. At 95 % each, 5 of 40 miss one time in twenty, 9 of 40 one time in ten thousand.
    assert held >= told - 8, f"{held} of {told}"


def test_training_budgets_stay_untouched_and_held_out_ones_pay_what_was_planned(surveyed):
    folder, result, _ = surveyed
    for name, epsilon in SITES.items():
        with Ledger(folder / name / "ledger.db", readonly=True) as ledger:
            assert ledger.epsilon([name])[name] == 0.0
            spent = ledger.epsilon([name + HELD])[name + HELD]
            assert spent <= 0.4 * epsilon
            assert spent == pytest.approx(0.4 * epsilon, rel=2e-3)
            assert result["spent"][name]["survey_epsilon"] == pytest.approx(spent)
            assert not ledger.account(name).not_private


def test_the_draft_is_a_study_with_a_schema_that_fits(surveyed):
    folder, result, _ = surveyed
    drafted = tomllib.loads((folder / "run" / "drafted.toml").read_text())
    schema = parse_schema(drafted["data"]["schema"])
    assert schema.target == "diagnosis"
    assert schema.classes == ("benign", "malignant")
    assert set(schema.numeric) == set(schema.fill) == set(NUMBERS)
    assert schema.categorical["ward"] == ("a", "b", "c")  # nowhere cannot be told from 0
    low, high = schema.numeric["radius"].low, schema.numeric["radius"].high
    assert 0 <= low < 13 < high <= 50
    assert drafted["budgets"]["epsilon"] == SITES
    assert drafted["deployment"]["sites"] == list(SITES)
    assert "survey" not in drafted
    assert result["draft"] == (folder / "run" / "drafted.toml").read_text()
    assert look(folder / "run")["state"] == "finished"


def test_the_drafted_study_trains_in_simulation(surveyed):
    read = make_study(tomllib.loads(surveyed[1]["draft"]), ["study.rounds=12"])
    done = train(read.federation(), method=read.chosen_method(), **read.arguments())
    assert done.result["final"]["accuracy"] > RIGHT


def test_the_same_sites_train_with_the_drafted_schema_and_the_same_ledgers(surveyed):
    """The ledger is tied to the file, so that a schema may come later; what was held out stays held out."""
    folder, result, heard = surveyed
    drafted = tomllib.loads(result["draft"])
    drafted["study"]["rounds"] = 3
    drafted["data"].pop("folder")
    schema = result["draft"][result["draft"].index("\n[data.schema]") : result["draft"].index("[budgets]")]
    with ExitStack() as stack:
        sites = {n: stack.enter_context(read_site(p).open()) for n, p in write_sites(folder, schema).items()}
        for name, data, reply in heard:  # a survey that is asked for again is sent again, and costs nothing
            if wire.unpack(data).kind == wire.SURVEY:
                assert sites[name].handle(data) == reply
        set_up(folder / "trained", make_study(drafted), False)
        trained = conduct(folder / "trained", Wires(sites))
        assert {name: site.declared.held for name, site in sites.items()} == {
            one["site"]: one["held"] for one in result["plan"]["sites"]
        }
    assert len(trained["rounds"]) == 3
    for name, epsilon in SITES.items():
        with Ledger(folder / name / "ledger.db", readonly=True) as ledger:
            assert 0 < ledger.epsilon([name])[name] <= epsilon
            assert ledger.epsilon([name + HELD])[name + HELD] <= 0.4 * epsilon


def test_a_site_without_a_schema_trains_nobody(tmp_path):
    write_files(tmp_path, 1)
    brief = {"method": {"name": "auto"}, "model": {"name": "logistic", "options": {}}, "parameters": 2, "rounds": 1}
    brief |= {"name": "x", "run": "r", "seed": 0, "shape": [3], "classes": 2, "schema": None, "adjacency": "zero-out"}
    with read_site(write_sites(tmp_path)["north"]).open() as site:
        reply = wire.unpack(site.handle(wire.pack(wire.Packet(wire.HELLO, {"brief": brief}))))
    assert reply.kind == wire.REFUSED
    assert "answers surveys only" in reply.facts["reason"]


def test_the_file_of_a_surveyed_site_must_stay_what_it_was(tmp_path):
    write_files(tmp_path, 1)
    paths = write_sites(tmp_path)
    with read_site(paths["north"]).open():
        pass
    with open(tmp_path / "files" / "north.csv", "a") as opened:
        opened.write("1,2,3,4,a,benign\n")
    with pytest.raises(BadInput, match="the file is another one now"), read_site(paths["north"]).open():
        pass


@pytest.mark.parametrize(
    ("limits", "ask", "told", "budget"),
    [
        ("[limits]\nsurvey = false", {}, "surveys are not allowed here", False),
        ("[limits]\nleast_noise = 50", {}, "this site adds at least 50", False),
        ("[limits]\nrun_epsilon = 0.1", {"noise": 1.0}, "does not pay for this survey", True),
        ("", {"noise": 0.2}, "does not pay for this survey", True),
        ("", {"noise": 0.0}, "this site adds at least 0.1", False),
        ("", {"parts": [["gradient", 9.0]]}, "one release of its tables", False),
        ("", {"sampling": ["poisson", 0.5]}, "one release of its tables", False),
        ("", {"count": 2}, "one release of its tables", False),
        ("", {"divisor": 2.0}, "noise of the site's own", False),
        ("", {"adjacency": "replace-one"}, "this site's budget is under zero-out", False),
        ("", {"survey": {"columns": {}}}, "survey.columns is missing", False),
        ("", {"survey": [1]}, "makes no sense", False),
        (
            "",
            {"survey": {"columns": {"a": {"low": 10**400, "high": 1}}, "target": "a"}},
            "survey.columns.a.low is 1000",
            False,
        ),
    ],
)
def test_what_a_site_does_not_allow_is_refused_and_costs_nothing(tmp_path, limits, ask, told, budget):
    write_files(tmp_path, 1)
    path = write_sites(tmp_path)["north"]
    path.write_text(path.read_text() + limits)
    plan = plan_survey(
        make_study(study(tmp_path)).survey.asked(), 0.4, {"north": 100}, {"north": read_site(path).budget.promised()}
    )
    terms = wire.terms_to_plain(plan.sites[0].terms)
    terms["parts"] = [["survey", ask["noise"]]] if "noise" in ask else terms["parts"]
    terms |= {key: value for key, value in ask.items() if key in terms}
    brief = {"run": "r", "survey": ask.get("survey", plan.survey.plain()), "adjacency": "zero-out"}
    with read_site(path).open() as site:
        reply = wire.unpack(site.handle(wire.pack(wire.Packet(wire.SURVEY, {"brief": brief, "terms": terms}))))
        assert reply.kind == wire.REFUSED
        assert told in reply.facts["reason"]
        assert reply.facts["budget"] is budget
        assert site.ledger.epsilon([site.account + HELD])[site.account + HELD] == 0.0


def test_surveys_are_refused_when_the_account_cannot_pay_any_more(tmp_path):
    write_files(tmp_path, 1)
    asked = make_study(study(tmp_path, spend=0.6))
    with ExitStack() as stack:
        sites = {n: stack.enter_context(read_site(p).open()) for n, p in write_sites(tmp_path).items()}
        for number in range(4):
            set_up(tmp_path / f"run{number}", asked, False, kind=SURVEYED)
            try:
                conduct(tmp_path / f"run{number}", Wires(sites), ask_survey)
            except BudgetRefused as error:
                refused = str(error)
                break
        assert "does not pay for this survey" in refused  # before the fourth survey of 0.6 ε each
        assert number >= 1
        for name, site in sites.items():
            assert site.ledger.epsilon([name + HELD])[name + HELD] <= SITES[name]


def test_one_odd_reply_does_not_stop_the_others(tmp_path):
    write_files(tmp_path, 4)  # enough that nobody is left out for noise, whoever is held out

    def fault(name, request, reply):
        packet = wire.unpack(reply)
        if name == "east" and packet.kind == wire.ANSWER:
            return wire.pack(wire.Packet(wire.ANSWER, {}, {"survey": packet.tensors["survey"] * math.nan}))
        if name == "west" and packet.kind == wire.ANSWER:
            return wire.pack(wire.Packet(wire.ANSWER, {}, {"survey": packet.tensors["survey"][:3]}))
        return reply

    with ExitStack() as stack:
        sites = {n: stack.enter_context(read_site(p).open()) for n, p in write_sites(tmp_path).items()}
        set_up(tmp_path / "run", make_study(study(tmp_path)), False, kind=SURVEYED)
        result = conduct(tmp_path / "run", Wires(sites, fault=fault), ask_survey)
    assert set(result["refused"]) == {"east", "west"}
    assert set(result["sites"]) <= {"north", "south"}


def test_a_rehearsal_is_repeated_exactly_and_says_what_it_is(place):
    once, twice = rehearse(make_study(study(place[0]))), rehearse(make_study(study(place[0])))
    assert once == twice
    assert once["simulated"]
    other = study(place[0])
    other["study"]["seed"] = 2
    assert rehearse(make_study(other))["columns"] != once["columns"]


def test_a_site_whose_noise_would_drown_the_others_is_not_asked_and_pays_nothing(place):
    strict = study(place[0])
    strict["budgets"]["epsilon"] = {**SITES, "north": 0.05}
    found = rehearse(make_study(strict))
    assert [one["site"] for one in found["plan"]["sites"] if not one["asked"]] == ["north"]
    assert set(found["spent"]) == set(found["sites"]) == set(SITES) - {"north"}
    assert found["records"] == sum(one["held"] for one in found["plan"]["sites"] if one["asked"])


def test_a_survey_is_taken_up_again_from_what_was_heard(surveyed):
    folder, result, _ = surveyed
    (folder / "run" / "survey.json").unlink()
    nobody = Wires({})
    assert conduct(folder / "run", nobody, ask_survey) == result
    assert not nobody.heard


def test_records_with_ids_may_stand_elsewhere_in_the_file(tmp_path):
    """Whose record it is decides, not where it stands."""
    rows = write_files(tmp_path, 1)["north"]
    path = write_sites(tmp_path, 'held_out = 0.5\nid = "radius"')["north"]
    survey = make_study(study(tmp_path)).survey.asked()
    with read_site(path).open() as site:
        before, _ = site.raw(survey)
    held = read_site(path)
    with Ledger(tmp_path / "north" / "ledger.db") as ledger:
        (tmp_path / "files" / "north.csv").write_text(
            "\n".join([",".join([*NUMBERS, "ward", "diagnosis"]), *(",".join(row) for row in rows[::-1])]) + "\n"
        )
        after, _ = held._raw(ledger)(survey)
    assert sorted(before.tolist()) == sorted(after.tolist())
    assert 0.3 < len(before) / len(rows) < 0.7


def test_small_counts_are_told_as_fewer_than(place):
    result = rehearse(make_study(study(place[0], least=100_000)))
    assert result["records"] == {"fewer_than": 100_000}
    assert all(one["held"] == {"fewer_than": 100_000} for one in result["plan"]["sites"])
    assert all(one["known"] == {"fewer_than": 100_000} for one in result["columns"])


def test_too_little_for_a_draft_is_said(place):
    tiny = study(place[0])
    tiny["budgets"] = {"epsilon": 1e-3}
    tiny["survey"]["columns"] = {key: tiny["survey"]["columns"][key] for key in ("ward", "diagnosis")}
    tiny["survey"]["least"] = 100_000
    found = rehearse(make_study(tiny))
    assert found["draft"] is None
    assert "raise survey.spend" in found["undrafted"]
    assert len(found["columns"]) == 2  # the figures were paid for, and are there


def test_a_draft_of_a_regression_has_the_targets_range(place):
    other = study(place[0])
    other["survey"]["target"] = "radius"
    schema = parse_schema(tomllib.loads(rehearse(make_study(other))["draft"])["data"]["schema"])
    assert schema.task == "regression"
    assert 0 <= schema.interval.low < 13 < schema.interval.high <= 50
    assert set(schema.categorical) == {"ward", "diagnosis"}


@pytest.mark.parametrize(
    ("ends", "found"),
    [((17.3, 81.9), (17, 82)), ((-0.0042, 0.0017), (-0.0042, 0.0017)), ((0.013, 0.97), (0.01, 0.97)), ((3, 3), (3, 3))],
)
def test_ranges_are_rounded_outwards(ends, found):
    assert outwards(*ends) == pytest.approx(found)


def test_noise_is_calibrated_to_the_share_and_the_deviations_are_those_that_come(place):
    asked = make_study(study(place[0]))
    results = []
    for seed in range(20):
        asked.study.seed = seed
        results.append(rehearse(asked))
    for column, expected in zip(range(6), results[0]["expected"]):
        found = np.std([one["columns"][column]["missing"]["value"] for one in results])
        assert found < expected["missing"]  # half an interval is about two deviations
        if column < 4:  # the others have nothing missing, and shares are not below 0
            assert found > expected["missing"] / 4


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_what_a_survey_costs_agrees_with_the_gaussian_mechanism(place, adjacency):
    """z against δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) with μ = 1/z, and σ against the sensitivity of all columns."""
    survey = make_study(study(place[0])).survey.asked()
    for epsilon in (0.1, 1.0, 7.0):
        plan = plan_survey(survey, 0.4, {"a": 100}, {"a": Budget(epsilon, 1e-6, adjacency)})
        mu, spent = 1 / plan.sites[0].noise, 0.4 * epsilon
        delta = stats.norm.cdf(mu / 2 - spent / mu) - math.exp(spent) * stats.norm.cdf(-mu / 2 - spent / mu)
        assert delta == pytest.approx(1e-6, rel=0.01)
        factor = 2.0 if adjacency == "replace-one" else 1.0
        assert plan.deviation(plan.sites[0]) == pytest.approx(factor * math.sqrt(6) / mu)


def test_the_command_fits_eighty_columns(place, monkeypatch):
    folder = place[0]
    file = folder / "study.toml"
    file.write_text(
        f"""
[study]
name = "wards"
[data]
folder = "{folder / "files"}"
[budgets]
epsilon = {{north = 4, east = 6, south = 3, west = 8}}
[survey]
target = "diagnosis"
[survey.columns]
radius = {{low = 0, high = 50}}
ward = {{categories = ["a", "b", "c", "nowhere"]}}
diagnosis = {{categories = ["benign", "malignant"]}}
[deployment]
sites = ["north", "east", "south", "west"]
"""
    )
    monkeypatch.chdir(folder)
    monkeypatch.setattr(shown, "out", Console(width=80))
    for options in ([], ["--plan"], ["--plan", "--serve", "--held", "300"]):
        done = CliRunner().invoke(cli.app, ["survey", str(file), *options])
        assert done.exit_code == 0, done.output
        assert max(map(len, done.output.splitlines())) <= 80
        assert "told from 0" in done.output
    assert (folder / "runs" / "wards-survey" / "drafted.toml").exists()
    done = CliRunner().invoke(cli.app, ["survey", str(file), "--plan", "--json"])
    assert {one["site"] for one in json.loads(done.output)["sites"]} == set(SITES)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"survey": {}}, "survey.columns is missing"),
        ({"survey": {"spend": 0.0}}, "survey.spend = 0.0"),
        ({"survey": {"least": -1}}, "survey.least = -1"),
        ({"survey": {"tagret": "x"}}, "did you mean 'target'"),
        ({"budgets": {}}, "give budgets.epsilon"),
        ({"data": {}}, "data.folder is missing"),
        ({"data": {"folder": "nowhere"}}, "neither a folder"),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(place, change, told):
    with pytest.raises(BadInput, match=told):
        rehearse(make_study({**study(place[0]), **change}))


def test_estimates_are_plain():
    assert Estimate(0.1, None, 0.2).plain() == {"value": 0.1, "low": None, "high": 0.2}
