"""Excel files: the first sheet, as text, with as many records as rows, whatever the file says about its size."""

from __future__ import annotations

import datetime
import re
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sordino.data import draft_schema, from_folder
from sordino.data.own import load_folder
from sordino.data.read import read_table
from sordino.data.survey import parse_survey, places, read_raw
from sordino.errors import BadInput

openpyxl = pytest.importorskip("openpyxl", reason="pip install 'sordino[excel]'")

SCHEMA = {"target": "ill", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}, "categorical": {"ward": ["a", "1"]}}
ROWS = [["age", "ward", "ill"], [50, "a", "yes"], [25.5, 1, "no"], ["75", 1.0, "no"]]


def written(path: Path, rows: list[list[Any]], merged: str = "", more: str = "") -> Path:
    book = openpyxl.Workbook()
    for j, row in enumerate(rows):
        for k, cell in enumerate(row):
            book.active.cell(j + 1, k + 1, cell)
    if merged:
        book.active.merge_cells(merged)
    if more:
        book.create_sheet(more).append(["other", "names"])
    book.save(path)
    return path


def test_excel_and_csv_say_the_same(tmp_path):
    (tmp_path / "b.csv").write_text("\n".join(",".join(map(str, row)) for row in ROWS))
    excel = from_folder(written(tmp_path / "a.XLSX", ROWS, more="notes"), SCHEMA, test=0.0)
    text = from_folder(tmp_path / "b.csv", SCHEMA, test=0.0)
    assert excel.names == ["a"]
    assert np.array_equal(excel.x, text.x)
    assert excel.y.tolist() == text.y.tolist() == [1, 0, 0]
    headless = {**SCHEMA, "header": False, "columns": ["age", "ward", "ill"]}
    assert np.array_equal(from_folder(written(tmp_path / "c.xlsx", ROWS[1:]), headless, test=0.0).x, text.x)
    assert 'classes = ["no", "yes"]' in draft_schema(tmp_path / "a.XLSX")


def test_cells_become_text(tmp_path):
    day, hour = datetime.datetime(2020, 5, 17), datetime.time(8, 30)
    rows = [["d", "t", "b", "e", "n"], [day, hour, True, "#N/A", 0.1], [None, " ", False, "=1+1", 1e20]]
    found = read_table(written(tmp_path / "a.xlsx", rows), None).columns
    assert {name: column.to_pylist() for name, column in found.items()} == {
        "d": ["2020-05-17T00:00:00", None],
        "t": ["08:30:00", None],
        "b": ["true", "false"],
        "e": ["#N/A", None],  # a formula that was never computed
        "n": ["0.1", "1e+20"],
    }


def test_empty_rows_merged_cells_and_cells_beside_the_table(tmp_path):
    rows = [[], [], *ROWS[:2], [], [30, "a", "no"], [None, "a", "no"], [40, "a", "no", None, "a remark"], [], []]
    path = written(tmp_path / "a.xlsx", rows, merged="A6:A7")
    found = load_folder(path, SCHEMA, "null")
    assert found.valid.tolist() == [True, False, True, False, False]
    with pytest.raises(BadInput, match="row 2: it is an empty line"):
        load_folder(path, SCHEMA, "refuse")
    headless = {**SCHEMA, "header": False, "columns": ["age", "ward", "ill"]}
    blank = load_folder(written(tmp_path / "b.xlsx", [[], *ROWS[1:]]), headless, "null")
    assert blank.valid.tolist() == [False, True, True, True]  # the first row is a record, whatever it holds


def test_a_file_that_is_wrong_about_its_size_loses_no_row(tmp_path):
    path = written(tmp_path / "a.xlsx", ROWS)
    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    parts[sheet] = re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1"', parts[sheet])
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)
    assert from_folder(path, SCHEMA, test=0.0).sizes.tolist() == [3]


def test_a_survey_reads_excel(tmp_path):
    survey = parse_survey(
        {"target": "ill", "columns": {"age": {"low": 0, "high": 100, "bins": 2}, "ill": {"categories": ["no", "yes"]}}}
    )
    found = places(read_raw(written(tmp_path / "a.xlsx", ROWS), survey), survey)
    assert found.tolist() == [[2, 1], [1, 0], [2, 0]]


def test_what_cannot_be_read_is_refused_in_words(tmp_path, monkeypatch):
    for content in (b"", b"PK not really", b"\xd0\xcf\x11\xe0 a protected file"):
        (tmp_path / "a.xlsx").write_bytes(content)
        with pytest.raises(BadInput, match=r"a.xlsx cannot be read as xlsx: .* protected by a password"):
            from_folder(tmp_path, SCHEMA)
    written(tmp_path / "a.xlsx", [])
    with pytest.raises(BadInput, match=r"a.xlsx is empty"):
        from_folder(tmp_path, SCHEMA)
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(BadInput, match=r"pip install 'sordino\[excel\]'"):
        from_folder(tmp_path, SCHEMA)
