"""What a drafted schema guesses about a raw file, and that it says why; four hospitals' raw files, commands only."""

from __future__ import annotations

import gzip
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from sordino.data import draft_schema, from_folder
from sordino.data.guess import has_header
from sordino.study.site_file import read_site


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
        ("v,w,y\n1,2,1\n1\n3,2,0\n", "# 1 lines cannot be taken apart (row 2: it has more or fewer cells"),
    ],
)
def test_odd_columns_are_told(tmp_path, text, words):
    draft, schema = drafted(tmp_path / "a.csv", text)
    assert words in draft
    assert "-" not in schema.get("missing", [])
    assert "-9" not in schema.get("missing", [])


HOSPITALS = ("cleveland.csv", "hungary.CSV", "long-beach.csv.gz", "zurich.xlsx")


def write_hospitals(folder: Path) -> dict[str, int]:
    """Raw files without headers: numbers, codes, ? and −9 for missing, a stage from 0 to 4; returns their records."""
    openpyxl = pytest.importorskip("openpyxl", reason="pip install 'sordino[excel]'")
    bunch, random = load_breast_cancer(), np.random.default_rng(0)
    folder.mkdir()
    counts = {}
    for k, name in enumerate(HOSPITALS):
        own = np.arange(k, len(bunch.data), 4)
        rows = []
        for j in own:
            radius, texture = (f"{v:.4g}" if random.random() > 0.1 else "?" for v in bunch.data[j, :2])
            smooth = f"{bunch.data[j, 4]:.3f}"
            code = "-9" if random.random() < 0.1 else str(random.integers(1, 4))
            stage = 0 if bunch.target[j] else random.integers(1, 5)
            rows.append([radius, texture, smooth, f"{random.integers(0, 2)}.0", code, str(stage)])
        counts[name] = len(rows)
        content = "\n".join(",".join(row) for row in rows) + "\n"
        if name.endswith("xlsx"):
            book = openpyxl.Workbook()
            for row in rows:
                book.active.append([one if one == "?" else float(one) for one in row])
            book.save(folder / name)
        else:
            packed = content.encode()
            (folder / name).write_bytes(gzip.compress(packed) if name.endswith("gz") else packed)
    return counts


STUDY = """\
[study]
name = "hearts"
rounds = 3
[data]
name = "files"
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
    counts = write_hospitals(tmp_path / "files")
    code, draft, err = in_folder("data", "schema", "files")
    assert code == 0, err
    assert "header = false" in draft
    text = draft.replace('classes = ["0", "1", "2", "3", "4"]', 'positive = ["1", "2", "3", "4"]')
    assert text != draft
    (tmp_path / "hearts.toml").write_text(STUDY.format(schema=text), encoding="utf-8")
    code, _, err = in_folder("run", "hearts.toml", "--out", "run")
    assert code == 0, err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert [one["client"] for one in result["privacy"]] == ["cleveland", "hungary", "long-beach", "zurich"]
    found = from_folder(tmp_path / "files", tomllib.loads(text)["data"]["schema"], test=0.0)
    assert found.sizes.tolist() == list(counts.values())
    assert found.valid.all()
    site = '[site]\nname = "zurich"\nserver = "127.0.0.1:1"\n[data]\npath = "files/zurich.xlsx"\n{schema}\n[budget]\n'
    (tmp_path / "SITE.toml").write_text(site.format(schema=text) + "epsilon = 1.0\ndelta = 1e-3\n", encoding="utf-8")
    _, declared = read_site(tmp_path / "SITE.toml").records()
    assert (declared.records, declared.classes) == (counts["zurich.xlsx"], 2)


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
