"""Records without targets: encoded as labelled ones are, each by itself, and never another number of them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.data.encode import encode_table
from sordino.data.read import read_table
from sordino.data.schema import Interval, known_schema, parse_schema
from sordino.data.unlabelled import read_unlabelled
from sordino.errors import BadInput

SCHEMA = parse_schema(
    {
        "target": "y",
        "classes": ["no", "yes"],
        "numeric": {"age": [0, 100], "dose": [1, 1000, "log"]},
        "categorical": {"sex": ["f", "m"]},
        "fill": {"dose": 10},
        "missing": ["?"],
    }
)
SHAPE = (len(SCHEMA.features),)
CELLS = st.sampled_from(["30", "1e3", "-5", "", "?", "nan", "inf", "old", " 7 ", "f", "m", "x"])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS, CELLS), min_size=1, max_size=6))
def test_a_row_depends_on_its_record_alone(rows):
    names = ("age", "dose", "sex")
    together = read_unlabelled({name: [row[k] for row in rows] for k, name in enumerate(names)}, SCHEMA, SHAPE)
    assert len(together.x) == len(together.reasons) == len(rows)
    for k, row in enumerate(rows):
        alone = read_unlabelled({name: [cell] for name, cell in zip(names, row)}, SCHEMA, SHAPE)
        np.testing.assert_array_equal(alone.x[0], together.x[k])
        assert alone.reasons[0] == together.reasons[k]
        assert (together.reasons[k] is None) or not together.x[k].any()


def test_features_are_those_of_labelled_records(tmp_path):
    lines = ["y;sex;age;dose", "yes;f;30;5", "no;m;200;?", "no;other;7;1e6"]
    (tmp_path / "all.csv").write_text("\n".join(lines))
    (tmp_path / "bare.csv").write_text("\n".join(line.split(";", 1)[1] for line in lines))
    expected, _, _ = encode_table(read_table(tmp_path / "all.csv", SCHEMA.columns, ";"), SCHEMA)
    for name in ("all.csv", "bare.csv"):
        found = read_unlabelled(tmp_path / name, SCHEMA, SHAPE)
        np.testing.assert_array_equal(found.x, expected)
        assert found.reasons == (None, None, None)


def test_structured_arrays_and_arrow_columns_have_names():
    cells = np.array([(30, 5.0, "f")], dtype=[("age", "i4"), ("dose", "f8"), ("sex", "U1")])
    table = pa.table({"sex": pa.array(["f"]).dictionary_encode(), "dose": [5.0], "age": [30]})
    first, second = (read_unlabelled(one, SCHEMA, SHAPE) for one in (cells, table))
    np.testing.assert_array_equal(first.x, second.x)
    assert first.x[0, 0] == np.float32(0.3)


def test_a_column_to_tell_rows_by_is_carried_along():
    found = read_unlabelled({"age": [1], "dose": [2], "sex": ["f"], "who": [17]}, SCHEMA, SHAPE, "who")
    assert found.ids == ("17",)
    with pytest.raises(BadInput, match="no column 'whom' to tell rows by"):
        read_unlabelled({"age": [1], "dose": [2], "sex": ["f"]}, SCHEMA, SHAPE, "whom")
    with pytest.raises(BadInput, match="an array has none"):
        read_unlabelled(np.zeros((1, 3)), SCHEMA, SHAPE, "who")


def test_entries_of_arrays_are_scaled_by_declared_values(tmp_path):
    schema = known_schema({"classes": 3, "values": [0, 255]})
    np.savez(tmp_path / "images.npz", x=np.full((2, 1, 4, 4), 51))
    assert (read_unlabelled(tmp_path / "images.npz", schema, (1, 4, 4)).x == np.float32(0.2)).all()
    np.savez(tmp_path / "odd.npz", images=np.zeros((2, 1, 4, 4)))
    with pytest.raises(BadInput, match="needs an array x"):
        read_unlabelled(tmp_path / "odd.npz", schema, (1, 4, 4))


@settings(max_examples=60, deadline=None)
@given(st.floats(-50, 500), st.booleans(), st.sampled_from(["unit", "signed"]))
def test_the_scaling_of_a_target_is_undone(value, log, scale):
    interval = Interval(-20.0, 400.0, log)
    scaled = interval.scaled(np.array([value]), scale)
    assert interval.unscaled(scaled, scale)[0] == pytest.approx(np.clip(value, -20, 400), abs=1e-9)
    outside = interval.unscaled(np.array([-9.0, 9.0]), scale)
    assert outside == pytest.approx([-20.0, 400.0])
