"""Schemas: what is refused, and the draft that a person is to check."""

import tomllib

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from sordino.data import draft_schema, from_folder
from sordino.data.schema import Interval, parse_schema
from sordino.errors import BadInput

GOOD = {"target": "y", "classes": [0, 1], "numeric": {"age": [0, 100]}, "categorical": {"sex": ["f", "m"]}}


def test_features_are_named_in_order():
    assert parse_schema(GOOD).features == ("age", "sex=f", "sex=m", "sex=other")
    assert parse_schema(GOOD).columns == ("age", "sex", "y")
    assert parse_schema({**GOOD, "classes": 3}).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": "y"}, r"data\.schema\.targets is unknown"),
        ({"task": "ranking"}, "use classification or regression"),
        ({"classes": None}, r"data\.schema\.classes"),
        ({"classes": ["a"]}, "at least two"),
        ({"classes": ["a", "a"]}, "twice"),
        ({"numeric": {"age": [100, 0]}}, r"data\.schema\.numeric\.age is \[100, 0\]"),
        ({"numeric": {"age": [0, float("nan")]}}, "low < high"),
        ({"numeric": {"age": [0, 100, "cube"]}}, "log"),
        ({"numeric": {"age": "0-100"}}, "low < high"),
        ({"numeric": ["age"]}, "table of columns"),
        ({"categorical": {"sex": []}}, "list of values"),
        ({"categorical": {"sex": "fm"}}, "list of values"),
        ({"categorical": {"age": ["a"]}}, "two roles"),
        ({"numeric": {"y": [0, 1]}}, "two roles"),
        ({"fill": {"age": "old"}}, "needs a number"),
        ({"fill": {"sex": "x"}}, "one of the declared values"),
        ({"fill": {"height": 1}}, "no such numeric, categorical or text column"),
        ({"scale": "standard"}, "unit"),
        ({"delimiter": "::"}, "one character"),
        ({"task": "regression"}, r"data\.schema\.range"),
        ({"values": [1]}, r"data\.schema\.values"),
    ],
)
def test_impossible_schemas_are_refused_with_key_and_remedy(change, words):
    with pytest.raises(BadInput, match=words):
        parse_schema({**GOOD, **change})


def test_schema_must_be_a_table():
    with pytest.raises(BadInput, match="it is a table"):
        parse_schema(["age"])


def test_logarithmic_ranges_reach_both_ends():
    scaled = Interval(-5.0, 1000.0, log=True).scaled(np.array([-10.0, -5.0, 0.0, 1000.0, 2000.0]), "unit")
    assert scaled[[0, 1, 3, 4]].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert scaled[2] == pytest.approx(np.log(6) / np.log(1006))


TABLE = """\
name,age,weight,sex,"odd ""name"" [x]",label
p1,50,70.5,f,1,ill
p2,25,,m,2,well
p3,31,80,f,3,well
"""


def test_a_draft_fits_its_file_and_tells_a_person_what_to_do(tmp_path):
    (tmp_path / "b.csv").write_text(TABLE.replace("50", "99"), encoding="utf-8")
    (tmp_path / "a.csv").write_text(TABLE, encoding="utf-8")
    text = draft_schema(tmp_path)
    assert "a.csv" in text
    assert "READ OFF THE RECORDS" in text
    assert "Replace" in text
    schema = tomllib.loads(text)["data"]["schema"]
    assert schema["target"] == "label"
    assert schema["classes"] == ["ill", "well"]
    assert schema["numeric"] == {"age": [25, 50], "weight": [70.5, 80], 'odd "name" [x]': [1, 3]}
    assert schema["categorical"]["sex"] == ["f", "m"]
    assert set(schema["fill"]) == {"weight"}
    federation = from_folder(tmp_path, schema, test=0.0)
    assert federation.sizes.tolist() == [3, 3]
    assert federation.valid.all()


def test_a_draft_leaves_out_what_looks_like_an_identifier(tmp_path):
    rows = "".join(f"person {k},{k % 2},{k / 7}\n" for k in range(60))
    (tmp_path / "a.csv").write_text("who,group,price\n" + rows, encoding="utf-8")
    text = draft_schema(tmp_path / "a.csv")
    schema = tomllib.loads(text)["data"]["schema"]
    assert '# "who" is left out: 60 distinct values' in text
    assert schema["task"] == "regression"
    assert schema["target"] == "price"
    assert schema["numeric"] == {"group": [0, 1]}
    assert len(from_folder(tmp_path, schema).x) == 60


def test_drafts_of_other_formats(tmp_path):
    table = pa.table({"size": [1, 2, 3], "kind": ["a", "b", "a"], "y": [0, 1, 1]})
    (tmp_path / "p").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "p" / "a.parquet")
    schema = tomllib.loads(draft_schema(tmp_path / "p"))["data"]["schema"]
    assert schema["classes"] == ["0", "1"]
    assert from_folder(tmp_path / "p", schema, test=0.0).y.tolist() == [0, 1, 1]

    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "a.csv").write_text("size;y\n1;0\n2;1\n", encoding="utf-8")
    schema = tomllib.loads(draft_schema(tmp_path / "s"))["data"]["schema"]
    assert schema["delimiter"] == ";"
    assert from_folder(tmp_path / "s", schema, test=0.0).x.tolist() == [[0.0], [1.0]]

    (tmp_path / "n").mkdir()
    np.savez(tmp_path / "n" / "a.npz", x=np.array([[0.0, 10.0], [5.0, 2.0]]), y=np.array([1, 4]))
    schema = tomllib.loads(draft_schema(tmp_path / "n"))["data"]["schema"]
    assert schema["classes"] == [1, 4]
    assert from_folder(tmp_path / "n", schema, test=0.0).x.tolist() == [[0.0, 1.0], [0.5, pytest.approx(0.2)]]


def test_a_draft_of_nothing_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no CSV"):
        draft_schema(tmp_path)
    np.savez(tmp_path / "a.npz", features=np.ones(3))
    with pytest.raises(BadInput, match="cannot be read as npz"):
        draft_schema(tmp_path)
