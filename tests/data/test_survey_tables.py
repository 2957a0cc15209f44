"""The declared tables of a survey: every record is in one cell of each column, whatever it holds."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sordino.data.read import RawTable
from sordino.data.survey import flat_places, parse_survey, places, read_raw
from sordino.errors import BadInput

ASKED = {
    "target": "ill",
    "missing": ["NA", "?"],
    "columns": {
        "age": {"low": 0, "high": 100, "bins": 10},
        "dose": {"low": 0, "high": 1000, "bins": 5, "log": True},
        "ward": {"categories": ["a", "b", 1]},
        "ill": {"categories": ["no", "yes"]},
    },
}
SURVEY = parse_survey(ASKED)

ODD = ["", " ", "NA", "?", "nan", "NaN", "inf", "-inf", "1e308", "-1e308", "1e400", "12,5", "0x10", "1_000", "٣", "😀",
       'a"b', "'", "\x00", "\ufeff7", "+7", "7.0", "1.0", "b ", " b", "B", "true", "9" * 400, "1e-400", "-0", "nan(1)",
       "-nan", "infinity", "1d", "1e", ".5", "5.", "--1", "１２"]  # fmt: skip


def cell_of(text: str, column: str) -> int:
    """The cell of one entry, in plain Python."""
    about, text = ASKED["columns"][column], text.strip()
    if "categories" in about:
        known = [str(one) for one in about["categories"]]
        if text in ("", "NA", "?", "nan", "NaN"):
            return len(known) + 1
        text = text[:-2] if text.lstrip("+-").replace(".0", "", 1).isdecimal() and text.endswith(".0") else text
        return known.index(text) if text in known else len(known)
    bins, low, high = about["bins"], about["low"], about["high"]
    if text in ("", "NA", "?") or text.lower() == "nan":
        return bins + 2
    try:
        value = float(text)
    except ValueError:
        return bins + 3
    if not math.isfinite(value):
        return bins + 3
    if value < low:
        return 0
    if value > high:
        return bins + 1
    for k in range(1, bins):
        edge = low + (1 + high - low) ** (k / bins) - 1 if about.get("log") else low + (high - low) * k / bins
        if value < edge:
            return k
    return bins


def table(**columns: list[str | None]) -> RawTable:
    rows = len(next(iter(columns.values())))
    return RawTable("test", {name: pa.array(cells, pa.string()) for name, cells in columns.items()}, rows)


def test_every_entry_falls_into_the_cell_that_plain_python_says():
    texts = [*ODD, *(f"{v:g}" for v in np.linspace(-10, 1100, 60))]
    found = places(table(age=texts, dose=texts, ward=texts, ill=texts), SURVEY)
    for k, column in enumerate(SURVEY.columns):
        assert found[:, k].tolist() == [cell_of(one, column.name) for one in texts], column.name


def test_a_row_depends_on_itself_alone():
    """Arrow reads clean columns at once and others cell by cell: both must say the same of every cell."""
    clean = ["7", "12.5", "1e2", "-3", "0", "100", "nan", "inf", "", ".5", "5.", "1e-400"]
    usual = [places(table(age=[one], ward=[one]), SURVEY)[0].tolist() for one in clean]
    for odd in ODD:
        found = places(table(age=[*clean, odd], ward=[*clean, odd]), SURVEY)
        assert found[:-1].tolist() == usual, odd


def test_one_row_adds_one_cell_a_column():
    texts = [*ODD, *map(str, range(30))]
    cells = flat_places(table(age=texts, dose=texts, ward=texts, ill=texts), SURVEY)
    assert cells.shape == (len(texts), 4)
    for row in cells.tolist():
        hot = np.zeros(SURVEY.width)
        for cell in row:
            hot[cell] += 1
        assert [part.sum() for part in SURVEY.parts(hot)] == [1, 1, 1, 1]
        assert np.linalg.norm(hot) == SURVEY.norm == 2.0
    assert [len(part) for part in SURVEY.parts(hot)] == [14, 9, 5, 4]


def test_missing_columns_and_broken_lines_are_missing(tmp_path: Path):
    file = tmp_path / "north.csv"
    file.write_bytes('age;ward\n7;a\n"8;b\n\xff;a\n1;2;3\n\n9;zz\n'.encode("latin-1"))
    found = places(read_raw(file, SURVEY), SURVEY)
    age, ward = found[:, 0].tolist(), found[:, 2].tolist()
    assert age == [1, 12, 12, 12, 12, 1]
    assert ward == [0, 4, 4, 4, 4, 3]
    assert set(found[:, 1]) == {7}
    assert set(found[:, 3]) == {3}


def test_parquet_files_of_any_type(tmp_path: Path):
    columns = {
        "age": pa.array([[1], None, [2, 3]]),
        "dose": pa.array([b"\xff", b"7", None]),
        "ward": pa.array([1.0, 2.0, None]),
        "ill": pa.array([True, False, None]),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found = places(read_raw(tmp_path / "a.parquet", SURVEY), SURVEY)
    assert found[:, 0].tolist() == [13, 12, 13]
    assert found[:, 1].tolist() == [8, cell_of("7", "dose"), 7]
    assert found[:, 2].tolist() == [2, 3, 4]
    assert found[:, 3].tolist() == [2, 2, 3]


def test_edges_of_bins():
    assert SURVEY.columns[0].edges.tolist() == pytest.approx([10 * k for k in range(11)])
    for column in SURVEY.columns[:2]:
        inside = column.edges[:-1] * (1 + 1e-12) + 1e-12
        texts = [f"{v!r}" for v in inside.tolist()]
        found = column.places(pa.array(texts, pa.string()), ())
        assert found.tolist() == list(range(1, column.bins + 1))


def test_a_survey_survives_its_plain_form():
    sent = json.loads(json.dumps(SURVEY.plain(), sort_keys=True))  # as packets do
    assert parse_survey(sent) == SURVEY
    assert [one.name for one in parse_survey(sent).columns] == ["age", "dose", "ward", "ill"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": None}, "survey.target is missing"),
        ({"target": "sick"}, "does not declare"),
        ({"columns": {}}, "survey.columns is missing"),
        ({"columns": {"ill": {"categories": ["no", "yes"]}}}, "the target alone"),
        ({"columns": {"age": 3, "ill": {"categories": [1]}}}, "age is 3: it is a table"),
        ({"columns": {"age": {"low": 0}}}, "age.high is missing"),
        ({"columns": {"age": {"low": 0, "high": "x"}}}, "age.high is 'x': it is a number"),
        ({"columns": {"age": {"low": 0, "high": float("inf")}}}, "it is a number"),
        ({"columns": {"age": {"low": 2, "high": 1}}}, "low is below high"),
        ({"columns": {"age": {"low": -1.5e308, "high": 1.5e308}}}, "low is below high"),
        ({"columns": {"age": {"low": 1.0, "high": 1.0 + 1e-15}}}, "cannot be told apart"),
        ({"columns": {"age": {"low": 0, "high": 1, "bins": 1}}}, "from 2 to 1000"),
        ({"columns": {"age": {"low": 0, "high": 1, "bins": True}}}, "from 2 to 1000"),
        ({"columns": {"age": {"low": 0, "high": 1, "log": 1}}}, "true or false"),
        ({"columns": {"age": {"low": 0, "high": 1, "categories": ["a"]}}}, "keep one of the two"),
        ({"columns": {"age": {"lo": 0, "high": 1}}}, "age.lo is unknown"),
        ({"columns": {"age": {"categories": []}}}, "declare the list"),
        ({"columns": {"age": {"categories": ["a", "a"]}}}, "twice"),
        ({"columns": {"age": {"categories": ["a", "NA"]}}}, "means a missing value"),
        ({"columns": {"age": {"low": 0, "high": 1}, "ill": {"categories": ["a"]}}}, "at least two"),
        ({"missing": "NA"}, "list the words"),
        (
            {
                "columns": {"ill": {"categories": ["a", "b"]}}
                | {f"c{k}": {"low": 0, "high": 1, "bins": 1000} for k in range(101)}
            },
            "use fewer bins",
        ),
    ],
)
def test_mistakes_name_key_and_remedy(change, told):
    with pytest.raises(BadInput, match=told):
        parse_survey({**ASKED, **change})
