"""Which files of a folder are clients: none is left out without a word. Ranges that leave nothing to learn are told."""

import gzip
import logging
from pathlib import Path

import numpy as np
import pytest

from sordino.data import draft_schema, from_folder
from sordino.errors import BadInput

SCHEMA = {"target": "y", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}, "categorical": {"sex": ["f", "m"]}}
ROWS = "age,sex,y\n" + "30,f,no\n40,m,yes\n" * 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "east.csv").write_text(ROWS)
    return tmp_path


def test_capital_endings_and_gzipped_files_are_clients(folder):
    (folder / "north.CSV").write_text(ROWS)
    (folder / "south.csv.gz").write_bytes(gzip.compress(ROWS.encode()))
    (folder / "St. West.Csv.GZ").write_bytes(gzip.compress(ROWS.encode()))
    found = from_folder(folder, SCHEMA, test=0.0)
    assert found.names == ["St. West", "east", "north", "south"]
    assert found.sizes.tolist() == [10, 10, 10, 10]
    assert np.array_equal(found.x[:10], found.x[30:])
    assert 'classes = ["no", "yes"]' in draft_schema(folder / "south.csv.gz")


def test_a_damaged_gzip_file_is_refused(folder):
    for content in (b"not gzip", gzip.compress(ROWS.encode())[:-12]):
        (folder / "south.csv.gz").write_bytes(content)
        with pytest.raises(BadInput, match=r"south.csv.gz cannot be read"):
            from_folder(folder, SCHEMA)


def test_the_same_client_in_two_files_is_refused(folder):
    (folder / "east.CSV").write_text(ROWS)
    with pytest.raises(BadInput, match="two files for client 'east'"):
        from_folder(folder, SCHEMA)


@pytest.mark.parametrize("name", ["north.tsv", "north.xls", "north.csv.zip", "north.json", "north.pq", "north.csv.bz2"])
def test_files_that_may_hold_records_are_not_ignored(folder, name):
    (folder / name).write_bytes(b"")
    with pytest.raises(BadInput, match=rf"{name} is none of .csv.*move it out"):
        from_folder(folder, SCHEMA)


def test_what_is_ignored_is_listed(folder, caplog):
    (folder / "schema.toml").write_text("")
    (folder / ".hidden").write_text("")
    with caplog.at_level(logging.WARNING, "sordino.data"):
        from_folder(folder, SCHEMA)
    assert not caplog.records
    (folder / "notes.txt").write_text("")
    (folder / "old").mkdir()
    with caplog.at_level(logging.WARNING, "sordino.data"):
        from_folder(folder, SCHEMA)
    assert "ignored notes.txt, old/" in caplog.text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"numeric": {"age": [0, 1]}}, "'age': data.schema.numeric.age = [0, 1] clips 100 % of the values"),
        ({"categorical": {"sex": ["F", "M"]}}, "100 % of the values are none of data.schema.categorical.sex"),
        ({"target": "age", "task": "regression", "range": [0, 35], "numeric": {}}, ""),
        ({"target": "age", "task": "regression", "range": [0, 5], "numeric": {}}, "data.schema.range = [0, 5] clips"),
        ({}, ""),
    ],
)
def test_a_range_that_clips_most_records_is_told(folder, caplog, change, words):
    with caplog.at_level(logging.WARNING, "sordino.data"):
        from_folder(folder, {**SCHEMA, **change})
    assert words in caplog.text
    assert bool(words) == bool(caplog.records)


def test_arrays_that_a_range_clips_are_told(tmp_path, caplog):
    np.savez(tmp_path / "a.npz", x=np.full((9, 2), 200.0), y=np.zeros(9, int))
    with caplog.at_level(logging.WARNING, "sordino.data"):
        from_folder(tmp_path, {"classes": 2, "values": [0, 1]})
    assert "data.schema.values = [0, 1] clips 100 %" in caplog.text
