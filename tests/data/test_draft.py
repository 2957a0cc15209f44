"""What a drafted schema guesses about a raw file, and that it says why; four hospitals' raw files, commands only."""

from __future__ import annotations

import csv
import json
import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from sordino.data import draft_schema, from_folder
from sordino.data.guess import has_header
from sordino.data.schema import parse_schema
from sordino.data.survey import parse_survey, places, read_raw
from sordino.data.toml import toml_value
from sordino.study.site_file import read_site

EXAMPLE = Path(__file__).parents[2] / "examples" / "raw-files"


def drafted(path: Path, text: str) -> tuple[str, dict[str, Any]]:
    path.write_text(text, encoding="utf-8")
    draft = draft_schema(path)
    return draft, tomllib.loads(draft)["data"]["schema"]


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        (["age,sex", "50,f", "40,m"], True),
        (["63,1,?", "41,0,2", "50,1,3"], False),
        (["?,1,63", "41,0,2", "50,1,3"], False),
        (["0,1,2", "41,0,2", "50,1,3"], True),  # columns counted
        (["2019,2020,2021", "5,7,2", "6,6,6"], True),  # years
        (["f,a", "m,b", "f,b", "m,a"], False),
        (["sex,ward", "m,b", "f,b", "m,a"], True),
        (["born,1", "2020-01-02,1", "2021-02-03,2"], True),
        (["age,y"], True),
        (["63,1,145"], False),
        (["p17,63,1", "p18,41,0", "p19,50,1"], False),  # all different: no vote of an identifier
        ([], True),
    ],
)
def test_whether_the_first_line_has_names(lines, header):
    found, why = has_header([line.split(",") for line in lines])
    assert found is header
    assert bool(why) is not header


def test_every_guess_has_its_reason(tmp_path):
    random = np.random.default_rng(0)
    rows = [
        f"{900 + k},p{k // 3},{random.integers(30, 80)},{random.integers(1, 5)},"
        f"{'?' if k % 5 == 0 else random.integers(100, 200)},{'-9' if k % 7 == 0 else random.integers(0, 3)},"
        f"{'999' if k % 9 == 0 else random.integers(80, 140)},20{10 + k % 12}-03-01,{k % 7},{'x' * (100 + k)}"
        for k in range(90)
    ]
    names = "visit_id,patient,age,pain,chol,slope,bp,seen,stage,text"
    text, schema = drafted(tmp_path / "a.csv", "\n".join([names, *rows]))
    assert schema["missing"][-2:] == ["?", "-9"]
    assert re.search(r'missing = .*# found "\?" in "chol"; -9 in "slope", where no other number is negative', text)
    assert '# 999 in "bp" may mean a missing value (10 cells; all others lie in 80' in text
    assert "999" not in schema["missing"]
    assert '# unit = "patient"  # 30 values over 90 records, up to 3 each' in text
    assert '# "patient" is left out: 30 distinct values that repeat' in text
    assert '# "visit_id" is left out: 90 distinct values, no two alike' in text
    assert '# "seen" is left out: it holds dates' in text
    assert '# "text" is left out: it has long texts' in text
    assert 'move it to categorical: "pain" = ["1", "2", "3", "4"]' in text
    assert set(schema["fill"]) == {"chol", "slope"}
    assert "# stands in for 18 missing cells" in text
    assert from_folder(tmp_path / "a.csv", schema, test=0.0).valid.all()
    uncommented = text.replace("# unit =", "unit =")
    units = from_folder(tmp_path / "a.csv", tomllib.loads(uncommented)["data"]["schema"], test=0.0)
    assert units.sizes.tolist() == [30]


def test_other_classes_are_offered_and_work(tmp_path):
    rows = "".join(f"{40 + k * 7 % 30},{k % 5}\n" for k in range(30))
    text, schema = drafted(tmp_path / "a.csv", "age,num\n" + rows)
    assert schema["classes"] == ["0", "1", "2", "3", "4"]
    offered = re.search(r"# two classes instead of 5: (positive = .*) for classes, or (target = .*)", text)
    assert offered
    del schema["classes"]
    for line in offered.groups():
        found = from_folder(tmp_path / "a.csv", schema | tomllib.loads(line), test=0.0)
        assert found.y.tolist() == [int(k % 5 > 0) for k in range(30)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sign,dose,y\n" + "+,-,0\n-,1,1\n" * 9, '"sign" = ["+", "-"]'),  # a minus that is a value stays one
        ("v;w;y\n" + "1,5;2;0\n2,5;3;1\n" * 9 + "3;2;1\n", '"v" is left out: its numbers have decimal commas'),
        ("v,w,y\n" + "1,k.A.,0\n2,5,1\n3,4,1\n4,5,0\n5,6,1\n6,1,0\n" * 3, '# found "k.A." in "w"'),
        ("v,w,y\n1,2,1\n3,2,1\n", 'classes = ["1", "other"]  # this file has "1" alone'),
        ("v,w,y,y\n1,2,2,1\n3,4,2,1\n", '"y" is left out: several columns have this name'),
        ("v,,y\n1,2,1\n3,2,0\n", '"" is left out: it has no name'),
        ("v,t,y\n1,-9,1\n3,-9,0\n3,5,0\n2,-20,0\n9,-15,1\n", '"t" = [-20, 5]'),  # −9 among other negative numbers
        ("v,t,y\n" + "1,-99,1\n3,-999,0\n3,5,0\n2,20,0\n" * 2, '-99 in "t", where no other number is negative'),
        ("sign,dose,y\n" + "+,-,0\n-,1,1\n?,1,1\n" * 9, '"sign" = ["+", "-"]'),
        ("v,w,y\n1,2,1\n1\n3,2,0\n", "# 1 lines cannot be taken apart (row 2: it has more or fewer cells"),
    ],
)
def test_odd_columns_are_told(tmp_path, text, words):
    draft, schema = drafted(tmp_path / "a.csv", text)
    assert words in draft
    assert "-" not in schema.get("missing", [])
    assert "-9" not in schema.get("missing", [])


STUDY = """\
[study]
name = "hearts"
rounds = 3
[data]
name = "raw-files"
test = 0.0
{schema}
[budgets]
epsilon = 4.0
delta = 1e-3
[model]
name = "logistic"
[method]
name = "dp-fedavg"
[training]
rate = 0.5
lr = 0.5
"""


def test_four_hospitals_from_raw_files_to_a_model_with_commands_alone(in_folder, tmp_path):
    example = runpy.run_path(str(EXAMPLE / "make_files.py"))
    example["write"](tmp_path / "raw-files")
    counts = [len(example["rows"](k)) for k in range(4)]
    code, draft, err = in_folder("data", "schema", "raw-files")
    assert code == 0, err
    assert "header = false" in draft
    text = draft.replace('classes = ["0", "1", "2", "3", "4"]', 'positive = ["1", "2", "3", "4"]')
    assert text != draft
    (tmp_path / "drafted.toml").write_text(STUDY.format(schema=text), encoding="utf-8")
    for study in (tmp_path / "drafted.toml", EXAMPLE / "study.toml"):
        code, _, err = in_folder("run", str(study), "--out", f"run-{study.stem}", "--set", "study.rounds=2")
        assert code == 0, err
        result = json.loads((tmp_path / f"run-{study.stem}" / "result.json").read_text())
        assert [one["client"] for one in result["privacy"]] == ["cleveland", "hungary", "long-beach", "zurich"]
    for schema in (text, (EXAMPLE / "study.toml").read_text(encoding="utf-8")):
        found = from_folder(tmp_path / "raw-files", tomllib.loads(schema)["data"]["schema"], test=0.0)
        assert found.sizes.tolist() == counts
        assert found.valid.all()
    assert found.y.tolist() == [int(row[-1] != "0") for k in range(4) for row in example["rows"](k)]
    fresh = example["rows"](3)[:25]
    for name, lines in (("with", fresh), ("without", [row[:-1] for row in fresh])):  # the target is not read anyway
        (tmp_path / f"{name}.csv").write_text("\n".join(",".join(row) for row in lines) + "\n")
    answers = []
    for name in ("with", "without"):
        code, out, err = in_folder("predict", "run-drafted", f"{name}.csv", "--csv")
        assert code == 0, err
        answers.append([(one["row"], one["prediction"], one["reason"]) for one in csv.DictReader(out.splitlines())])
    assert answers[0] == answers[1]
    assert len(answers[0]) == 25
    assert {reason for _, _, reason in answers[0]} == {""}
    code, card, err = in_folder("card", "run-drafted")
    assert code == 0, err
    assert all(one in card for one in ("cleveland", "hungary", "long-beach", "zurich", "ε"))


def test_a_site_with_a_raw_excel_file_declares_all_of_its_rows_and_is_surveyed(tmp_path):
    openpyxl = pytest.importorskip("openpyxl", reason="pip install 'sordino[excel]'")
    rows = runpy.run_path(str(EXAMPLE / "make_files.py"))["rows"](3)
    rows[4][-1] = "?"
    book = openpyxl.Workbook()
    for row in rows:
        book.active.append([one if one == "?" else float(one) for one in row])
    book.save(tmp_path / "zurich.xlsx")
    raw = tomllib.loads((EXAMPLE / "study.toml").read_text(encoding="utf-8"))["data"]["schema"]
    said = "".join(f"{key} = {toml_value(value)}\n" for key, value in raw.items())
    site = f"""[site]\nname = "zurich"\nserver = "127.0.0.1:1"\n[budget]\nepsilon = 1.0\ndelta = 1e-3
[data]\npath = "zurich.xlsx"\nheld_out = 0.5\n[data.schema]\n{said}"""
    (tmp_path / "SITE.toml").write_text(site, encoding="utf-8")
    records, declared = read_site(tmp_path / "SITE.toml").records()
    assert (declared.records, declared.classes) == (len(rows), 2)
    assert records.valid is not None
    assert np.flatnonzero(~records.valid.numpy()).tolist() == [4]
    columns = {"radius": {"low": 0, "high": 50}, "stage": {"categories": [0, 1, 2, 3, 4]}}
    survey = parse_survey({"target": "stage", "missing": ["?"], "columns": columns})
    stages = places(read_raw(tmp_path / "zurich.xlsx", survey, parse_schema(raw)), survey)[:, 1]
    assert stages.tolist() == [6 if row[-1] == "?" else int(row[-1]) for row in rows]
    with read_site(tmp_path / "SITE.toml").open() as opened:
        assert opened.raw is not None
        assert len(opened.raw(survey)[0]) == opened.declared.held == len(rows) - opened.declared.records


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"age,y\n", "it has no records"),
        (b"age\n1\n2\n", "no column to predict 'age' from"),
        (b"\xff\xfea\x00", "UTF-16"),
        (b"age,y\r1,0\r", "carriage returns alone"),
    ],
)
def test_a_file_that_nothing_can_be_drafted_from_is_bad_input(in_folder, tmp_path, content, words):
    (tmp_path / "a.csv").write_bytes(content)
    code, out, err = in_folder("data", "schema", "a.csv")
    assert (code, out) == (2, "")
    assert words in err


def test_a_column_of_numbers_to_predict(tmp_path):
    bunch = load_diabetes()
    rows = [",".join(f"{v:.5g}" for v in (*row, aim)) for row, aim in zip(bunch.data, bunch.target)]
    _, schema = drafted(tmp_path / "a.csv", "\n".join(rows))
    assert (schema["header"], schema["task"], schema["target"]) == (False, "regression", "c11")
    assert schema["range"] == [bunch.target.min(), bunch.target.max()]
    assert len(from_folder(tmp_path / "a.csv", schema, test=0.0).x) == len(bunch.data)
