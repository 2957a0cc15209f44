"""Raw tables: no header, codes for missing values, whole numbers as categories, classes by group or threshold."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from sordino.data import from_folder
from sordino.data.own import load_folder
from sordino.data.schema import parse_schema
from sordino.data.survey import parse_survey, places, read_raw
from sordino.errors import BadInput
from sordino.study.deploy import schema_hash

RAW = "63.0,1.0,?,-9,0\n67,4,2.5,1,3\n41,2.0,1.5,0,1\n"
SCHEMA = {
    "header": False,
    "columns": ["age", "pain", "st", "slope", "stage"],
    "missing": ["?", -9],
    "target": "stage",
    "positive": ["1", "2", "3", "4"],
    "numeric": {"age": [0, 100], "st": [0, 5], "slope": [0, 2]},
    "categorical": {"pain": [1, 2, 3, 4]},
    "fill": {"st": 1.0, "slope": 2},
}


@pytest.fixture
def raw(tmp_path):
    (tmp_path / "cleveland.csv").write_text(RAW)
    return tmp_path / "cleveland.csv"


def test_a_file_without_a_header_is_read_line_by_line(raw):
    found = from_folder(raw, SCHEMA, test=0.0)
    assert found.sizes.tolist() == [3]
    assert found.valid.all()
    expected = [
        [0.63, 0.2, 1.0, 1, 0, 0, 0, 0],
        [0.67, 0.5, 0.5, 0, 0, 0, 1, 0],
        [0.41, 0.3, 0.0, 0, 1, 0, 0, 0],
    ]
    assert found.x == pytest.approx(np.array(expected))
    assert found.y.tolist() == [0, 1, 1]


@pytest.mark.parametrize("columns", [5, None])
def test_columns_without_names_are_numbered(raw, columns):
    schema = {"header": False, "target": "c5 > 0", "numeric": {"c1": [0, 100]}}
    found = from_folder(raw, schema if columns is None else {**schema, "columns": columns}, test=0.0)
    assert found.x[:, 0] == pytest.approx([0.63, 0.67, 0.41])
    assert found.y.tolist() == [0, 1, 1]
    if columns is None:
        return
    with pytest.raises(BadInput, match=r"row 1: it has more or fewer cells \(5\) than there are columns \(4\)"):
        from_folder(raw, {**schema, "columns": 4, "target": "c4"} | {"classes": 2})


@pytest.mark.parametrize("schema", [SCHEMA, {"header": False, "target": "c5 > 0", "numeric": {"c1": [0, 100]}}])
@pytest.mark.parametrize(
    "first", ["", "1;2;3;4;5", "1,2", "1,2,3,4,5,6,7", '"', "\ufeff\ufeff", "age,pain,st,slope,ill"]
)
def test_the_first_line_is_a_record_and_decides_nothing_for_the_others(tmp_path, first, schema):
    """R8: neither how many cells lines have nor what stands between them is learnt from it."""
    path = tmp_path / "a.csv"
    path.write_text(RAW)
    clean = load_folder(path, schema, "null")
    path.write_text("\n".join([first, *RAW.splitlines()[1:]]) + "\n")
    found = load_folder(path, schema, "null")
    assert len(found.x) == 3
    assert np.array_equal(found.x[1:], clean.x[1:])
    assert np.array_equal(found.y[1:], clean.y[1:])
    assert found.valid[1:].all()


def test_a_record_is_encoded_the_same_whoever_its_neighbours_are(tmp_path):
    lines = [*RAW.splitlines(), "?,?,?,?,?", "x,1,1,1,4", "50,9,1e400,1,-9", "50,1,1,1,"]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    together = load_folder(tmp_path / "all.csv", SCHEMA, "null")
    assert together.valid.tolist() == [True, True, True, False, False, False, False]
    for j, line in enumerate(lines):
        (tmp_path / "one.csv").write_text(line)
        alone = load_folder(tmp_path / "one.csv", SCHEMA, "null")
        assert np.array_equal(alone.x[0], together.x[j])
        assert (alone.y[0], alone.valid[0]) == (together.y[j], together.valid[j])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"header": "no"}, r"data\.schema\.header is 'no'"),
        ({"header": True}, "add header = false"),
        ({"columns": ["age", "age"]}, "twice"),
        ({"columns": []}, r"data\.schema\.columns"),
        ({"columns": ["age", "pain", "st", "slope"]}, "columns has no 'stage'"),
        ({"columns": 0}, r"data\.schema\.columns is 0"),
        ({"missing": "?"}, r"data\.schema\.missing is '\?': list the words"),
        ({"classes": [0, 1]}, "classes and positive: keep positive"),
        ({"positive": []}, r"data\.schema\.positive"),
        ({"task": "regression", "range": [0, 4]}, "positive makes two classes"),
        ({"target": "stage > 0"}, "makes two classes itself: leave out positive"),
    ],
)
def test_what_does_not_go_together_is_refused_with_key_and_remedy(change, words):
    with pytest.raises(BadInput, match=words):
        parse_schema({**SCHEMA, **change})


def test_codes_for_missing_are_numbers_too(tmp_path):
    """−9 is missing however it is written: as text, with a point, as a number of a Parquet file."""
    cells = ["-9", "-9.0", " -9.00", "-9e0", "3"]
    (tmp_path / "a.csv").write_text("v,k,y\n" + "".join(f"{one},{one},0\n" for one in cells))
    schema = {"target": "y", "classes": 2, "missing": ["-9"], "numeric": {"v": [0, 4]}, "fill": {"v": 1}}
    assert from_folder(tmp_path / "a.csv", schema, test=0.0).x[:, 0].tolist() == [0.25] * 4 + [0.75]
    for kind in (pa.int8(), pa.float32()):
        pyarrow.parquet.write_table(pa.table({"v": pa.array([-9, 3], kind), "y": [0, 1]}), tmp_path / "b.parquet")
        assert from_folder(tmp_path / "b.parquet", schema, test=0.0).x[:, 0].tolist() == [0.25, 0.75]
    survey = parse_survey(
        {
            "target": "y",
            "missing": [-9],
            "columns": {"v": {"low": 0, "high": 4, "bins": 2}, "y": {"categories": [0, 1]}},
        }
    )
    assert places(read_raw(tmp_path / "b.parquet", survey), survey)[:, 0].tolist() == [4, 2]


def test_whole_numbers_as_categories_are_told_however_they_are_written(tmp_path):
    schema = {"target": "y", "classes": 2, "categorical": {"k": [1, "2", 3.0]}}
    (tmp_path / "a.csv").write_text("k,y\n1,0\n1.0,0\n2,1\n3.00,1\n4,0\n")
    pyarrow.parquet.write_table(
        pa.table({"k": [1.0, 1.0, 2.0, 3.0, 4.0], "y": [0, 0, 1, 1, 0]}), tmp_path / "b.parquet"
    )
    one, two = (from_folder(tmp_path / name, schema, test=0.0) for name in ("a.csv", "b.parquet"))
    assert one.x.argmax(1).tolist() == [0, 0, 1, 2, 3]
    assert np.array_equal(one.x, two.x)


@pytest.mark.parametrize(
    ("target", "classes", "labels"),
    [
        ("stage > 0", ("stage ≤ 0", "stage > 0"), [0, 1, 1, None, None, None]),
        ("stage >= 2", ("stage < 2", "stage ≥ 2"), [0, 0, 1, None, None, None]),
        ("stage<2", ("stage ≥ 2", "stage < 2"), [1, 1, 0, None, None, None]),
        ("stage <= .5", ("stage > .5", "stage ≤ .5"), [1, 0, 0, None, None, None]),
        ("stage == 1", ("stage ≠ 1", "stage = 1"), [0, 1, 0, None, None, None]),
        ("stage != 1.0", ("stage = 1.0", "stage ≠ 1.0"), [1, 0, 1, None, None, None]),
        ('stage == "high"', ("stage ≠ high", "stage = high"), [0, 0, 0, 1, None, None]),
        ("stage != '1.0'", ("stage = 1.0", "stage ≠ 1.0"), [1, 0, 1, 1, None, None]),
    ],
)
def test_a_threshold_makes_two_classes(tmp_path, target, classes, labels):
    (tmp_path / "a.csv").write_text("age,stage\n" + "".join(f"5,{one}\n" for one in ("0", "1.0", "2", "high", "?", "")))
    schema = {"target": target, "missing": ["?"], "numeric": {"age": [0, 9]}}
    parsed = parse_schema(schema)
    assert (parsed.target, parsed.classes) == ("stage", classes)
    found = load_folder(tmp_path / "a.csv", schema, "null")
    assert found.classes == 2
    assert found.valid.tolist() == [one is not None for one in labels]
    assert found.y.tolist() == [one or 0 for one in labels]
    with pytest.raises(BadInput, match=r"column 'stage': .* is missing"):
        load_folder(tmp_path / "a.csv", schema, "refuse")


@pytest.mark.parametrize("name", ["income >50K", "a > b", "> 3", "x >", "p<0.05?", "stage"])
def test_a_column_that_only_looks_like_a_threshold_is_a_column(name):
    assert parse_schema({"target": name, "classes": 2}).target == name


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"target": 'stage > "high"'}, "words have no order"),
        ({"target": "stage > 0", "classes": [0, 1]}, "leave out classes"),
        ({"target": "stage > 0", "task": "regression", "range": [0, 4]}, "use task = 'classification'"),
        ({"target": "stage > 0", "unit": "stage"}, "which is the target"),
    ],
)
def test_impossible_thresholds_are_refused(schema, words):
    with pytest.raises(BadInput, match=words):
        parse_schema(schema)


def test_a_group_is_called_by_its_value_where_it_has_one():
    named = {"positive": ["malignant"]}, {"positive": [1, 2]}, {"positive": ["other"]}
    assert [parse_schema(one).classes for one in named] == [
        ("other", "malignant"),
        ("other", "positive"),
        ("other", "positive"),
    ]


def test_groups_and_thresholds_of_arrays(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 1)), y=np.array([0.0, 1.0, 3.0, np.nan]))
    for rule in ({"positive": [1, 3]}, {"target": "y >= 1"}):
        found = load_folder(tmp_path / "a.npz", rule, "null")
        assert found.y.tolist() == [0, 1, 1, 0]
        assert found.valid.tolist() == [True, True, True, False]


def test_how_a_file_is_laid_out_is_its_owners_affair_and_what_is_asked_is_not():
    """Sites with and without headers train one model; another threshold is another schema."""
    same = {key: value for key, value in SCHEMA.items() if key not in ("header", "columns")}
    assert schema_hash(parse_schema(SCHEMA)) == schema_hash(parse_schema({**same, "delimiter": ";"}))
    assert schema_hash(parse_schema(SCHEMA)) != schema_hash(parse_schema({**SCHEMA, "positive": ["2", "3", "4"]}))


def test_two_columns_of_one_name_are_refused_rather_than_one_of_them_taken(tmp_path):
    (tmp_path / "a.csv").write_text("v,v,y\n1,2,0\n")
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([0])], ["v", "v", "y"])
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    for name in ("a.csv", "b.parquet"):
        with pytest.raises(BadInput, match="2 columns 'v': give each a name of its own"):
            from_folder(tmp_path / name, {"target": "y", "classes": 2, "numeric": {"v": [0, 4]}})


def test_a_parquet_entry_that_nothing_can_be_made_of_touches_no_other(tmp_path):
    schema = {"target": "y", "classes": 2, "categorical": {"k": ["a", "2020-01-01"]}}
    for column in (pa.array([b"a", b"\xff"]), pa.array([b"a", b"\xff"]).view(pa.string()), pa.array([["a"], None])):
        pyarrow.parquet.write_table(pa.table({"k": column, "y": [0, 1]}), tmp_path / "a.parquet")
        found = from_folder(tmp_path / "a.parquet", schema, test=0.0)
        assert found.x[1].tolist() == [0, 0, 1]
        assert found.x[0].tolist() == ([0, 0, 1] if pa.types.is_nested(column.type) else [1, 0, 0])


def test_a_file_of_one_line_that_ends_with_carriage_returns_is_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"1,2\r3,4\r5,6\r")
    schema = {"header": False, "columns": 2, "target": "c2", "classes": 9, "numeric": {"c1": [0, 9]}}
    with pytest.raises(BadInput, match="carriage returns alone"):
        load_folder(tmp_path / "a.csv", schema, "null")


def test_columns_in_another_order_are_another_schema():
    """Two sites that agreed would otherwise train one input with each other's columns."""
    tables = {"age": [0, 100], "weight": [30, 200]}
    same = {"target": "ill", "classes": ["no", "yes"], "numeric": tables}
    turned = {**same, "numeric": dict(reversed(tables.items()))}
    assert schema_hash(parse_schema(same)) == schema_hash(parse_schema({**same, "numeric": dict(tables)}))
    assert schema_hash(parse_schema(same)) != schema_hash(parse_schema(turned))
