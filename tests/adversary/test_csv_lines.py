"""A CSV file has as many records as lines, whatever one of them holds, and no record touches another (R8)."""

from pathlib import Path

import numpy as np
import pytest

from sordino.data.own import load_folder
from sordino.data.read import read_csv
from sordino.errors import BadInput

SCHEMA = {"target": "ill", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}, "categorical": {"ward": ["a", "b"]}}
LINES = [f"{20 + k},{'ab'[k % 2]},{('no', 'yes')[k % 2]}" for k in range(12)]


def loaded(path: Path, lines: list[str], end: str = "\n", last: str = "\n"):
    path.write_bytes((end.join(["age,ward,ill", *lines]) + last).encode())
    return load_folder(path, SCHEMA, "null")


def test_one_stray_quote_costs_one_record(tmp_path):
    lines = [f"{k % 80},a,yes" for k in range(1000)]
    clean = loaded(tmp_path / "a.csv", lines)
    lines[10] = f'"{lines[10]}'
    found = loaded(tmp_path / "a.csv", lines)
    assert len(found.y) == 1000
    assert np.flatnonzero(~found.valid).tolist() == [10]
    others = np.arange(1000) != 10
    assert np.array_equal(found.x[others], clean.x[others])
    with pytest.raises(BadInput, match="row 11: a quote is not closed"):
        load_folder(tmp_path / "a.csv", SCHEMA, "refuse")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("odd", ['"', '""', '"""', ",", "\r", "\x00", "\ufeff", '",', ',"', '"\r'])
def test_whatever_stands_anywhere_in_a_line_the_other_records_stay_as_they_are(tmp_path, odd, end):
    clean = loaded(tmp_path / "a.csv", LINES, end)
    assert len(clean.y) == len(LINES)
    for row in (0, 5, len(LINES) - 1):
        for place in range(len(LINES[row]) + 1):
            changed = list(LINES)
            changed[row] = changed[row][:place] + odd + changed[row][place:]
            found = loaded(tmp_path / "a.csv", changed, end)
            assert len(found.y) == len(LINES)
            others = np.arange(len(LINES)) != row
            assert found.valid[others].all()
            assert np.array_equal(found.x[others], clean.x[others])
            assert np.array_equal(found.y[others], clean.y[others])


def test_random_bytes_in_one_line_leave_the_others_alone(tmp_path):
    clean = loaded(tmp_path / "a.csv", LINES)
    random = np.random.default_rng(0)
    others = np.arange(len(LINES)) != 3
    head = ("age,ward,ill\n" + "".join(f"{one}\n" for one in LINES[:3])).encode()
    tail = "".join(f"{one}\n" for one in LINES[4:]).encode()
    for _ in range(200):
        noise = random.choice(list(b'",;\r\\ \x00\xff\xc30aby'), random.integers(0, 30)).astype(np.uint8).tobytes()
        (tmp_path / "a.csv").write_bytes(head + noise + b"\n" + tail)
        found = load_folder(tmp_path / "a.csv", SCHEMA, "null")
        assert len(found.y) == len(LINES)
        assert np.array_equal(found.x[others], clean.x[others])
        assert found.valid[others].all()


def test_the_end_of_a_file_and_empty_lines(tmp_path):
    path = tmp_path / "a.csv"
    for last in ("", "\n", "\r\n"):
        assert len(loaded(path, LINES, last=last).y) == len(LINES)
    assert loaded(path, [*LINES[:3], "", *LINES[4:]]).valid.tolist() == [k != 3 for k in range(12)]
    assert loaded(path, [*LINES[:-1], ""]).valid.tolist() == [k != 11 for k in range(12)]  # a record blanked at the end
    assert len(load_folder(path, SCHEMA, "refuse").y) == 11  # what editors leave at the end is no error in simulation
    loaded(path, [*LINES[:3], "", *LINES[4:]])
    with pytest.raises(BadInput, match="row 4: it is an empty line"):
        load_folder(path, SCHEMA, "refuse")


def test_a_quote_in_the_header_swallows_no_record(tmp_path):
    (tmp_path / "a.csv").write_text('age,ward,"ill\n50,a,no\n')
    with pytest.raises(BadInput, match="first line has no column names"):
        load_folder(tmp_path / "a.csv", SCHEMA, "null")
    (tmp_path / "a.csv").write_text("age,ward,ill\r50,a,no\r")
    with pytest.raises(BadInput, match="carriage returns alone"):
        load_folder(tmp_path / "a.csv", SCHEMA, "null")


def test_cells_in_quotes_are_read_as_ever(tmp_path):
    (tmp_path / "a.csv").write_text('age,ward,ill\n"50","a, ""b""",no\n')
    table = read_csv(tmp_path / "a.csv", ["ward", "age"], ",")
    assert {name: column.to_pylist() for name, column in table.columns.items()} == {"ward": ['a, "b"'], "age": ["50"]}
