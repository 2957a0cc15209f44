"""SITE.toml of a site whose patients have several records: declared, held out, surveyed and committed to by patient."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import sordino as sd
from sordino.engine.federation.state import commitment
from sordino.errors import BadInput
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study.file import make_study
from sordino.study.site_file import read_site
from sordino.study.survey.rehearse import rehearse

SITE = """\
[site]
name = "north"
server = "127.0.0.1:9092"
[data]
path = "files/north.csv"
{more}
[budget]
epsilon = 2.0
delta = 1e-5
"""

SCHEMA = """
[data.schema]
target = "sick"
classes = ["no", "yes"]
unit = "patient"
unit_records = 3
unit_name = "patient"
[data.schema.numeric]
age = [0, 100]
"""

SURVEY = {
    "target": "sick",
    "columns": {"sick": {"categories": ["no", "yes"]}, "age": {"low": 0, "high": 100, "bins": 4}},
}


def visits(people: int = 40) -> list[tuple[str, int, str]]:
    random = np.random.default_rng(1)
    rows = []
    for person in range(people):
        for _ in range(1 if person else 50):  # one of them is always there
            rows.append((f"p{person}", int(random.integers(0, 100)), "yes" if random.random() < 0.5 else "no"))
        if person % 3 == 0:
            rows.append((f"p{person}", 50, "no"))
    return [rows[k] for k in random.permutation(len(rows))]


@pytest.fixture
def write(tmp_path: Path):
    (tmp_path / "files").mkdir()

    def made(more: str = SCHEMA, rows: list[tuple[str, int, str]] | None = None) -> Path:
        rows = visits() if rows is None else rows
        text = "patient,age,sick\n" + "".join(f"{p},{a},{s}\n" for p, a, s in rows)
        (tmp_path / "files" / "north.csv").write_text(text)
        (tmp_path / "SITE.toml").write_text(SITE.format(more=more))
        return tmp_path / "SITE.toml"

    return made


def test_a_site_declares_its_patients_and_keeps_as_many_records_of_each_as_count(write):
    with read_site(write()).open() as site:
        assert site.declared.records == 40
        assert site.declared.unit_records == 3
        assert site.records.members.shape == (40, 3)
        assert len(site.records.y) == 39 + 13 + 3
        assert site.ledger.account("north").budget.unit == "patient"
        assert site.budget.unit == "patient"


def test_records_that_change_hands_are_other_records(write):
    path = write()
    with read_site(path).open() as site:
        before = site.records
    rows = visits()
    rows = [(f"p{(int(p[1:]) + 1) % 40}", a, s) for p, a, s in rows]
    other = read_site(write(rows=rows))
    with pytest.raises(BadInput, match=r"not those that .* was kept for"), other.open():
        pass
    swapped = torch.flip(before.members, [0])
    moved = type(before)(before.x, before.y, members=swapped)
    assert commitment(before, b"salt") != commitment(moved, b"salt")


def test_whoever_is_held_out_is_held_out_with_all_records_wherever_they_stand(write):
    path = write("held_out = 0.4\n" + SCHEMA)
    with read_site(path).open() as site:
        train, held = site.declared.records, site.declared.held
        assert train + held == 40
        assert held > 5
        assert len(site.records.members) == train
        assert site.held.whose.max() == held - 1
        file = read_site(path)
        column = [row[0] for row in visits()]
        out = dict(zip(dict.fromkeys(column), file.held(site.ledger, 40).tolist()))
    write("held_out = 0.4\n" + SCHEMA, visits()[::-1])
    with Ledger(path.parent / "ledger.db") as ledger:
        turned = dict(zip(dict.fromkeys(column[::-1]), file.held(ledger, 40).tolist()))
    assert turned == out, "whose a record is decides, not where it stands"
    with pytest.raises(BadInput, match=r"not those that .* was kept for"), read_site(path).open():
        pass  # a survey reads the file as it is, so the ledger is tied to its bytes


def test_a_survey_counts_every_patient_once(write, tmp_path: Path):
    """Also before there is a schema: the site's own [data] says who is one."""
    survey = make_study({"survey": SURVEY}).survey.asked()
    with read_site(write('held_out = 0.5\nunit = "patient"\n')).open() as site:
        cells, whose = site.raw(survey)
        assert len(np.unique(whose)) == site.declared.held
        assert len(cells) == len(whose) > site.declared.held
        assert site.ledger.account("north" + HELD).budget.unit == "person"
        held = site.declared.held
    with read_site(write("held_out = 0.5\n" + SCHEMA)).open() as site:
        assert site.declared.held == held, "the schema that follows parts them alike, under the same promise"
        assert site.raw(survey)[0].shape[0] <= len(cells), "of those with many records, as many as count"
    loose = SCHEMA.replace('unit = "patient"\nunit_records = 3\nunit_name = "patient"\n', "")
    insists = read_site(write('unit = "patient"\n' + loose))
    with pytest.raises(BadInput, match="the schema protects single records: agree on one"):
        insists.records()


def test_what_parts_a_patient_is_refused(write):
    with pytest.raises(BadInput, match=r"leave data\.id out"):
        read_site(write('held_out = 0.4\nid = "age"\n' + SCHEMA)).records()


def test_a_rehearsed_survey_counts_patients_and_drafts_the_unit(write, tmp_path: Path):
    write()
    study = make_study(
        {
            "data": {"folder": str(tmp_path / "files")},
            "budgets": {"epsilon": 50.0, "delta": 1e-5},
            "survey": {**SURVEY, "unit": "patient", "share": 0.5, "spend": 1.0, "least": 0},
        }
    )
    told = rehearse(study)
    assert told["records"] <= 30, "patients, not records"
    assert 'unit = "patient"' in told["draft"]


PRIVATE = [name for name in sd.methods.names() if sd.methods.get(name).private]


@pytest.fixture(scope="module")
def wards():
    random = np.random.default_rng(0)
    clients = [(random.random((120, 4), dtype=np.float32), random.integers(0, 3, 120)) for _ in range(12)]
    whose = [random.integers(0, 50, 120) for _ in clients]
    dealt = sd.data.from_arrays(clients, classes=3, units=whose, unit_records=4, unit_name="patient")
    return dealt.with_budgets([0.5 + k for k in range(12)], delta=1e-4)


@pytest.mark.parametrize("method", PRIVATE)
def test_every_method_trains_on_patients_within_their_budgets(method, wards):
    done = sd.train(wards, "logistic", method, rounds=2, rate=0.2, lr=0.1)
    assert all(one["spent_epsilon"] <= one["epsilon"] and one["unit"] == "patient" for one in done.privacy)
    assert torch.isfinite(done.weights).all()
