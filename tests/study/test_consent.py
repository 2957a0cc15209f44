"""Levels of consent from files: in a study, in SITE.toml, in plans, results and statements."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import sordino as sd
from sordino.cli import app
from sordino.errors import BadInput
from sordino.privacy.ledger import Ledger
from sordino.privacy.statement import export, statement, statement_text
from sordino.study.file import make_study
from sordino.study.result import from_json, to_json
from sordino.study.site_file import read_site

SCHEMA = {"target": "sick", "classes": ["no", "yes"], "numeric": {"age": [0, 100], "weight": [0, 200]}}
LEVELS = {"strict": 0.5, "standard": 1.0, "generous": 4.0}
SAID = ("strict", "standard", " generous ", "", "whatever")


def write_clients(folder: Path, rows: int = 300) -> Path:
    random = np.random.default_rng(2)
    for name in ("north", "south"):
        age, weight = random.uniform(0, 100, rows), random.uniform(0, 200, rows)
        sick = np.where(age + random.normal(0, 10, rows) > 50, "yes", "no")
        lines = [f"{a:.1f},{w:.1f},{s},{SAID[k % len(SAID)]}" for k, (a, w, s) in enumerate(zip(age, weight, sick))]
        (folder / f"{name}.csv").write_text("\n".join(["age,weight,sick,consent", *lines]) + "\n")
    return folder


def study(folder: Path, **budgets: Any) -> dict[str, Any]:
    return {
        "study": {"name": "consent", "rounds": 3},
        "data": {"name": str(folder), "schema": SCHEMA},
        "model": {"name": "logistic"},
        "method": {"name": "dp-fedavg"},
        "training": {"rate": 0.1},
        "budgets": {"column": "consent", "levels": LEVELS, "delta": 1e-5} | budgets,
    }


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "clients"
    folder.mkdir()
    return write_clients(folder)


def test_a_study_reads_the_levels_of_its_clients_files(files: Path) -> None:
    clients = make_study(study(files)).federation()
    words = clients.words["consent"]
    for part, own, members in zip(clients.train, clients.levels, clients.members):
        assert [one.name for one in own] == ["strict", "standard", "generous"]
        assert sum(one.records for one in own) == len(part)
        for one in own:
            assert one.records == len(members[one.name])
        assert {words[k] for k in part[members["generous"]]} == {"generous"}
        assert {words[k] for k in part[members["strict"]]} == {"strict", "", "whatever"}
    again = sd.data.from_folder(files, SCHEMA, also=["consent"]).with_levels(LEVELS, "consent")
    assert again.levels == clients.levels
    assert again.with_budgets(1.0).consent is None


def test_the_plan_and_the_result_speak_by_level(files: Path) -> None:
    read = make_study(study(files))
    clients = read.federation()
    view = sd.plan(clients, method=read.chosen_method(), **read.arguments())
    for one in view.to_dict()["clients"]:
        assert [level["epsilon"] for level in one["levels"]] == [0.5, 1.0, 4.0]
        for level in one["levels"]:
            assert 0.99 * level["epsilon"] < level["planned_epsilon"] <= level["epsilon"]
        expected = sum(level["rate"] * level["records"] for level in one["levels"])
        assert expected == pytest.approx(one["batch"]) == pytest.approx(0.1 * one["records"])
    run = sd.train(clients, method=read.chosen_method(), **read.arguments())
    back = from_json(to_json(run.result))
    assert back["privacy"][0]["levels"] == run.privacy[0]["levels"]
    assert {one["what"] for one in run.privacy[0]["releases"]} == {f"gradient ({name})" for name in LEVELS}


def test_the_command_line_shows_levels(files: Path, tmp_path: Path) -> None:
    from sordino.data.toml import toml_value

    def section(name: str, body: dict[str, Any]) -> str:
        plain = {key: value for key, value in body.items() if key not in ("schema", "levels")}
        return "\n".join([f"[{name}]", *(f"{key} = {toml_value(value)}" for key, value in plain.items())])

    sections = [section(name, body) for name, body in study(files).items()]
    sections.append("[budgets.levels]\n" + "\n".join(f"{name} = {epsilon}" for name, epsilon in LEVELS.items()))
    sections.append('[data.schema]\ntarget = "sick"\nclasses = ["no", "yes"]')
    sections.append("[data.schema.numeric]\nage = [0, 100]\nweight = [0, 200]")
    file = tmp_path / "study.toml"
    file.write_text("\n".join(sections))
    done = CliRunner().invoke(app, ["plan", str(file)], env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.output
    assert "levels of consent" in done.output
    assert "generous" in done.output
    told = CliRunner().invoke(app, ["plan", str(file), "--json"])
    assert [one["level"] for one in json.loads(told.stdout)["clients"][0]["levels"]] == list(LEVELS)


@pytest.mark.parametrize(
    ("budgets", "word"),
    [
        ({"epsilon": 1.0}, "budgets.epsilon"),
        ({"column": None}, "budgets.column"),
        ({"levels": {"strict": 0.0}}, "budgets.levels.strict"),
        ({"levels": {}}, "budgets.levels"),
        ({"public": ["north"]}, "budgets.public"),
        ({"delta": [1e-5, 1e-5]}, "budgets.delta"),
        ({"levels": None}, "budgets.column"),
        ({"column": "permission"}, "permission"),
    ],
)
def test_what_is_wrong_with_levels_is_named(files: Path, budgets: dict[str, Any], word: str) -> None:
    given = {key: value for key, value in study(files, **budgets)["budgets"].items() if value is not None}
    with pytest.raises(BadInput, match=word):
        make_study({**study(files), "budgets": given}).federation()


def test_words_for_every_record_or_a_column_that_was_kept(files: Path) -> None:
    clients = sd.data.from_folder(files, SCHEMA)
    with pytest.raises(BadInput, match="also="):
        clients.with_levels(LEVELS, "consent")
    with pytest.raises(BadInput, match="one each"):
        clients.with_levels(LEVELS, ["strict"] * 7)
    found = clients.with_levels({"all": 2.0}, ["all"] * len(clients.x))
    assert {budget.epsilon for budget in found.budgets or ()} == {2.0}


def test_a_client_called_like_an_account_of_another_is_refused() -> None:
    random = np.random.default_rng(0)
    pair = random.normal(size=(80, 3)).astype(np.float32), random.integers(0, 2, 80)
    clients = sd.data.from_arrays([pair, pair], names=["a", "a (strict)"], classes=2)
    with pytest.raises(BadInput, match="rename"):
        sd.plan(clients.with_levels(LEVELS, ["strict"] * 160), "logistic", "dp-fedavg", 2, rate=0.1)


def test_a_ledger_has_levels_or_none(files: Path, tmp_path: Path) -> None:
    clients = make_study(study(files)).federation()
    arguments = {"model": "logistic", "method": "dp-fedavg", "rounds": 2, "rate": 0.1}
    sd.train(clients, ledger=tmp_path / "levels.db", **arguments)
    sd.train(clients.with_budgets(0.5), ledger=tmp_path / "plain.db", **arguments)
    with pytest.raises(BadInput, match="with levels"):
        sd.train(clients.with_budgets(0.5), ledger=tmp_path / "levels.db", **arguments)
    with pytest.raises(BadInput, match="without levels"):
        sd.train(clients, ledger=tmp_path / "plain.db", **arguments)


def test_statements_speak_by_level(files: Path, tmp_path: Path) -> None:
    clients = make_study(study(files)).federation()
    sd.train(clients, "logistic", "dp-fedavg", 2, rate=0.1, ledger=tmp_path / "l.db", evaluation={"every": 1})
    with Ledger(tmp_path / "l.db", readonly=True) as book:
        told = statement(book, "north (strict)")
        spent = book.epsilon()
        held = statement_text(statement(book, "north (held out)"))
        everything = export(book)["statements"]
    shown = CliRunner().invoke(app, ["ledger", "show", str(tmp_path / "l.db"), "--client", "north"])
    assert [line for line in shown.stdout.splitlines() if line.startswith("Privacy statement")] == [
        f"Privacy statement of client north, training records of level {name}" for name in LEVELS
    ]
    assert told["epsilon"] == 0.5
    assert told["spent_epsilon"] == spent["north (strict)"] <= 0.5
    assert [one["level"] for one in told["levels"]["levels"]] == list(LEVELS)
    assert [one["spent_epsilon"] for one in told["levels"]["levels"]] == [spent[f"north ({name})"] for name in LEVELS]
    text = statement_text(told)
    assert "Privacy statement of client north, training records of level strict" in text
    assert "generous:  epsilon 3.99" in text
    assert "for any record, not knowing its level, the largest holds: epsilon 3.99" in text
    assert "Privacy statement of client north, held-out records" in held
    assert {one["client"]: one["levels"] is None for one in everything}["north (held out)"]


SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "clients/north.csv"
[data.schema]
target = "sick"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 100]
weight = [0, 200]
[budget]
column = "consent"
delta = 1e-5
[budget.levels]
strict = 0.5
standard = 1.0
generous = 4.0
"""


def test_a_site_declares_how_many_records_have_which_level(files: Path, tmp_path: Path) -> None:
    path = tmp_path / "SITE.toml"
    path.write_text(SITE)
    with read_site(path).open() as site:
        assert [(one.name, one.budget.epsilon, one.records) for one in site.declared.levels] == [
            ("strict", 0.5, 180),
            ("standard", 1.0, 60),
            ("generous", 4.0, 60),
        ]
        assert site.offered.epsilon == 0.5
        assert site.members is not None
        assert site.members["generous"].tolist() == list(range(2, 300, 5))
        assert {account.client: account.owner for account in site.ledger.accounts()} == dict.fromkeys(
            ["north (strict)", "north (standard)", "north (generous)"], "north"
        )
    text = (files / "north.csv").read_text()
    (files / "north.csv").write_text(text.replace(",whatever", ",generous", 1))
    with pytest.raises(BadInput, match="not those"), read_site(path).open():
        pass
    with pytest.raises(BadInput, match="bound anew"):
        read_site(path).rebind("new consents", "officer")


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ('column = "consent"\n', "", "budget.column"),
        ("delta = 1e-5", "delta = 1e-5\nepsilon = 1.0", "one of the two"),
        ("strict = 0.5", "strict = 0.0", "budget.levels.strict"),
        ("strict = 0.5", '"held out" = 0.5', "held out"),
        ("[budget.levels]\nstrict = 0.5\nstandard = 1.0\ngenerous = 4.0\n", "", "go together"),
    ],
)
def test_what_is_wrong_in_a_site_file_is_named(files: Path, tmp_path: Path, old: str, new: str, word: str) -> None:
    path = tmp_path / "SITE.toml"
    assert old in SITE
    path.write_text(SITE.replace(old, new))
    with pytest.raises(BadInput, match=word):
        read_site(path)


def test_levels_of_an_npz_file(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=(40, 2)), random.integers(0, 2, 40)
    np.savez(tmp_path / "a.npz", x=x, y=y, consent=np.array(["generous", "strict"] * 20))
    schema = {"classes": [0, 1], "values": [-5, 5]}
    clients = sd.data.from_folder(tmp_path, schema, also=["consent"]).with_levels(LEVELS, "consent")
    assert sum(one.records for one in clients.levels[0]) == len(clients.train[0])
    with pytest.raises(BadInput, match="no array"):
        sd.data.from_folder(tmp_path, schema, also=["level"])


def write_visits(folder: Path) -> Path:
    """Forty patients, one to four visits: patient 7 changed their mind, patient 8 said it once, one row is nobody's."""
    random, lines = np.random.default_rng(3), ["patient,age,weight,sick,consent"]
    for visit in range(4):
        for patient in range(40):
            if patient % 4 >= visit:
                said = "generous"
                if patient % 3 == 0 or (patient == 7 and visit == 3) or (patient == 8 and visit == 0):
                    said = "strict"
                who = "" if (patient, visit) == (5, 0) else f"p{patient}"
                lines.append(f"{who},{random.integers(0, 100)},{random.integers(0, 200)},no,{said}")
    (folder / "north.csv").write_text("\n".join(lines) + "\n\n\n")
    return folder


PATIENTS = {**SCHEMA, "unit": "patient", "unit_records": 2, "unit_name": "patient"}


def test_a_person_whose_records_differ_is_of_the_strictest_of_their_levels(tmp_path: Path) -> None:
    """Also where the record that says so is beyond the cap of two: it is the person who agreed to less."""
    folder = write_visits(tmp_path)
    found = sd.data.from_folder(folder, PATIENTS, test=0.0, invalid="null", also=["consent"])
    clients = found.with_levels({"strict": 0.5, "generous": 4.0}, "consent")
    wanted = sum(patient % 3 == 0 or patient in (7, 8) for patient in range(40))
    assert [(one.name, one.records) for one in clients.levels[0]] == [("strict", wanted), ("generous", 40 - wanted)]
    assert sum(len(own) for own in clients.members[0].values()) == clients.sizes[0] == 40
    run = sd.train(clients, "logistic", "dp-fedavg", 2, rate=0.2, ledger=tmp_path / "l.db")
    for level in run.privacy[0]["levels"]:
        assert 0.99 * level["epsilon"] < level["spent_epsilon"] <= level["epsilon"]
    with Ledger(tmp_path / "l.db", readonly=True) as book:
        text = statement_text(statement(book, "north (strict)"))
    assert "Privacy statement of client north, patients of level strict" in text
    assert "A patient has one level for life" in text


def test_a_site_counts_persons_by_level(tmp_path: Path) -> None:
    write_visits(tmp_path)
    path = tmp_path / "SITE.toml"
    text = SITE.replace("clients/north.csv", "north.csv").replace("standard = 1.0\n", "")
    path.write_text(text.replace('target = "sick"', 'unit = "patient"\nunit_records = 2\ntarget = "sick"'))
    with read_site(path).open() as site:
        strict = {0, *range(3, 40, 3), 7, 8}
        assert [(one.name, one.records) for one in site.declared.levels] == [
            ("strict", len(strict)),
            ("generous", 40 - len(strict)),
        ]
        assert site.declared.records == 40
        assert site.members is not None
        # Units are counted in the order in which they first come; p5 comes later, for its first visit is nobody's.
        order = [k for k in range(40) if k != 5] + [5]
        assert {order[k] for k in site.members["strict"]} == strict
