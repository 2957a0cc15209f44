"""Your own data: a file per client, arrays, torch data sets; refusals that name the place; null rows that keep n_i."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from sordino.data import from_arrays, from_datasets, from_folder, load
from sordino.errors import BadInput

SCHEMA = {
    "target": "outcome",
    "task": "classification",
    "classes": ["no", "yes"],
    "numeric": {"age": [0, 100], "income": [0, 1000, "log"]},
    "categorical": {"sex": ["f", "m"]},
    "fill": {"income": 10},
}
NORTH = "age,income,sex,outcome,remark\n50,9,f,yes,a\n25,,m,no,b\n130,999,x,no,c\n"
SOUTH = "outcome,sex,age,income\nno,f,0,0\nyes,m,100,1000\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "north.csv").write_text(NORTH, encoding="utf-8")
    (tmp_path / "south.csv").write_text(SOUTH, encoding="utf-8")
    (tmp_path / "README.txt").write_text("no client", encoding="utf-8")
    return tmp_path


def by_hand(age, income, sex):
    """One record's features, cell by cell, in plain Python."""
    income = 10.0 if income is None else income
    age = min(max(age, 0.0), 100.0) / 100.0
    income = math.log(1 + min(max(income, 0.0), 1000.0)) / math.log(1001)
    return [age, income, float(sex == "f"), float(sex == "m"), float(sex not in ("f", "m"))]


def test_a_folder_is_a_natural_federation(folder):
    federation = from_folder(folder, SCHEMA, test=0.0)
    assert federation.names == ["north", "south"]
    assert federation.sizes.tolist() == [3, 2]
    assert federation.classes == 2
    expected = [
        by_hand(50, 9, "f"),
        by_hand(25, None, "m"),
        by_hand(130, 999, "x"),
        by_hand(0, 0, "f"),
        by_hand(100, 1000, "m"),
    ]
    assert federation.x == pytest.approx(np.array(expected), abs=1e-6)
    assert federation.y.tolist() == [1, 0, 0, 0, 1]
    assert federation.valid.all()
    assert {int(j) for j in federation.train[0]} == {0, 1, 2}
    json.dumps(federation.description)


def test_signed_scale_maps_to_minus_one_and_one(folder):
    unit = from_folder(folder, SCHEMA, test=0.0)
    signed = from_folder(folder, {**SCHEMA, "scale": "signed"}, test=0.0)
    assert signed.x[:, :2] == pytest.approx(2 * unit.x[:, :2] - 1, abs=1e-6)
    assert np.array_equal(signed.x[:, 2:], unit.x[:, 2:])


def test_a_record_is_encoded_the_same_whoever_its_neighbours_are(tmp_path):
    """Rule R8: nothing is learnt from records."""
    random = np.random.default_rng(0)
    lines = [
        f"{random.integers(-20, 120)},{random.uniform(0, 2000):.3f},{random.choice(['f', 'm', 'd'])},"
        f"{random.choice(['no', 'yes'])}"
        for _ in range(20)
    ]
    header = "age,income,sex,outcome\n"
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "a.csv").write_text(header + "\n".join(lines), encoding="utf-8")
    together = from_folder(tmp_path / "all", SCHEMA, test=0.0)
    for j, line in enumerate(lines):
        (tmp_path / "one.csv").write_text(header + line, encoding="utf-8")
        alone = from_folder(tmp_path / "one.csv", SCHEMA, test=0.0)
        assert np.array_equal(alone.x[0], together.x[j])
        assert alone.y[0] == together.y[j]


def test_load_of_a_path_can_be_dealt_naturally_or_otherwise(folder):
    data = load(folder, schema=SCHEMA)
    assert data.partition("natural").names == ["north", "south"]
    assert len(data.partition("iid", clients=5, test=0.0)) == 5
    with pytest.raises(BadInput, match="comes with 2 clients, not 3"):
        data.partition("natural", clients=3)
    with pytest.raises(BadInput, match="data schema"):
        load(str(folder) + "/")
    (folder / "schema.toml").write_text(
        '[data.schema]\ntarget = "outcome"\nclasses = ["no", "yes"]\n[data.schema.numeric]\nage = [0, 100]\n',
        encoding="utf-8",
    )
    assert load(str(folder) + "/").x.shape == (5, 1)


def test_parquet_and_csv_say_the_same(tmp_path):
    (tmp_path / "csv").mkdir()
    (tmp_path / "parquet").mkdir()
    (tmp_path / "csv" / "a.csv").write_text("age,income,sex,outcome\n50,9.5,f,1\n25,,m,0\n", encoding="utf-8")
    table = pa.table(
        {"age": [50, 25], "income": [9.5, None], "sex": pa.array(["f", "m"]).dictionary_encode(), "outcome": [1.0, 0.0]}
    )
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "a.parquet")
    schema = {**SCHEMA, "classes": [0, 1]}
    one, two = (from_folder(tmp_path / kind, schema, test=0.0) for kind in ("csv", "parquet"))
    assert np.array_equal(one.x, two.x)
    assert one.y.tolist() == two.y.tolist() == [1, 0]


def test_npz_files_hold_x_and_y(tmp_path):
    for name in ("b", "a"):
        x = np.full((4, 2, 2), 255.0 if name == "a" else 51.0)
        np.savez(tmp_path / f"{name}.npz", x=x, y=np.array([3, 7, 3, 7]))
    federation = from_folder(tmp_path, {"classes": [3, 7], "values": [0, 255]}, test=0.0)
    assert federation.names == ["a", "b"]
    assert federation.shape == (2, 2)
    assert federation.x[0, 0, 0] == 1.0
    assert federation.x[4, 0, 0] == pytest.approx(0.2)
    assert federation.y[:4].tolist() == [0, 1, 0, 1]
    raw = from_folder(tmp_path, {"classes": [3, 7]}, test=0.0)
    assert raw.x.max() == 255.0
    np.savez(tmp_path / "c.npz", x=np.ones((4, 3)), y=np.array([3, 7, 3, 7]))
    with pytest.raises(BadInput, match=r"client 'c' has records of shape \(3,\)"):
        from_folder(tmp_path, {"classes": [3, 7]})
    np.savez(tmp_path / "c.npz", features=np.ones((4, 3)))
    with pytest.raises(BadInput, match="needs arrays x and y"):
        from_folder(tmp_path, {"classes": [3, 7]})


def test_regression_targets_are_scaled_by_their_declared_range(tmp_path):
    (tmp_path / "a.csv").write_text("age,price\n50,10\n25,30\n10,500\n", encoding="utf-8")
    schema = {"target": "price", "task": "regression", "range": [10, 50], "numeric": {"age": [0, 100]}}
    federation = from_folder(tmp_path, schema, test=0.0)
    assert federation.y.tolist() == [0.0, 0.5, 1.0]
    assert federation.y.dtype == np.float32
    assert federation.classes is None
    del schema["range"]
    with pytest.raises(BadInput, match=r"data\.schema\.range"):
        from_folder(tmp_path, schema)


BAD = [
    ("50,9,f,yes\nabc,9,f,no\n", "bad.csv, row 2, column 'age': abc is not a number"),
    ("50,9,f,yes\n,9,f,no\n", "row 2, column 'age': is missing and the schema has no fill"),
    ("50,9,f,yes\nNaN,9,f,no\n", "row 2, column 'age': is missing"),
    ("50,9,f,yes\ninf,9,f,no\n", "row 2, column 'age': inf is not a number"),
    ("50,9,f,yes\n50,9,f,perhaps\n", "row 2, column 'outcome': perhaps is none of the declared classes"),
    ("50,9,f,yes\n50,9,f,\n", "row 2, column 'outcome'"),
    ("50,9,f,yes\n50,9,f\n", "bad.csv, row 2: it has more or fewer cells"),
    ("50,9,f,yes\n50,9,f,no,extra\n", "row 2: it has more or fewer cells"),
]


@pytest.mark.parametrize(("rows", "words"), BAD)
def test_records_that_cannot_be_encoded_are_named_or_kept_as_null_rows(tmp_path, rows, words):
    (tmp_path / "bad.csv").write_text("age,income,sex,outcome\n" + rows, encoding="utf-8")
    with pytest.raises(BadInput, match=words) as caught:
        from_folder(tmp_path, SCHEMA)
    assert 'data.invalid = "null"' in str(caught.value).replace("'null'", '"null"')
    federation = from_folder(tmp_path, SCHEMA, test=0.0, invalid="null")
    assert federation.sizes.tolist() == [2]
    assert federation.valid.tolist() == [True, False]
    assert federation.x[1].tolist() == [0.0] * 5
    assert federation.y[1] == 0
    assert federation.x[0] == pytest.approx(by_hand(50, 9, "f"), abs=1e-6)


def test_files_as_spreadsheets_write_them(tmp_path):
    """A byte order mark, blanks around cells, semicolons, quotes in cells, empty last lines, unnamed columns."""
    text = '\ufeffoutcome; age ;remark;income;sex\r\nyes; 50;"a ""b""; c";9;f\r\n"no";25; x"y ;NA; m\r\n\r\n'
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    federation = from_folder(tmp_path, {**SCHEMA, "delimiter": ";"}, test=0.0)
    assert federation.x == pytest.approx(np.array([by_hand(50, 9, "f"), by_hand(25, None, "m")]), abs=1e-6)
    assert federation.y.tolist() == [1, 0]


def test_a_line_break_in_a_cell_is_refused_in_words(tmp_path):
    (tmp_path / "a.csv").write_text('outcome,age,remark\nyes,1,x\nno,2,"a\nb"\n', encoding="utf-8")
    schema = {"target": "outcome", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}
    with pytest.raises(BadInput, match=r"row 2: a quote is not closed .* cannot hold a line break"):
        from_folder(tmp_path, schema)
    assert from_folder(tmp_path, schema, test=0.0, invalid="null").valid.tolist() == [True, False, False]


def test_a_large_file_is_read_in_pieces_in_its_order(tmp_path):
    rows = "".join(f'yes,{k % 100},"a, {"x" * 20}"\n' for k in range(140_000))
    (tmp_path / "a.csv").write_text("outcome,age,remark\n" + rows, encoding="utf-8")
    schema = {"target": "outcome", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}
    federation = from_folder(tmp_path, schema, test=0.0)
    assert federation.sizes.tolist() == [140_000]
    assert federation.x[:, 0] == pytest.approx(np.arange(140_000) % 100 / 100)


def test_the_seed_governs_which_records_a_natural_client_tests_on():
    pair = (np.ones((100, 1)), np.zeros(100, dtype=int))
    tests = [set(from_arrays([pair], classes=2, seed=seed).test[0].tolist()) for seed in (0, 0, 1)]
    assert tests[0] == tests[1] != tests[2]
    assert len(tests[0]) == 20


def test_numbers_written_in_other_ways_are_read_in_a_mixed_column(tmp_path):
    (tmp_path / "a.csv").write_text("age,outcome\n+5,yes\n1e1,no\n 15.0 ,no\n.5e2,no\nx,no\n", encoding="utf-8")
    schema = {"target": "outcome", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}
    federation = from_folder(tmp_path, schema, test=0.0, invalid="null")
    assert federation.x[:, 0] == pytest.approx([0.05, 0.1, 0.15, 0.5, 0.0])
    assert federation.valid.tolist() == [True] * 4 + [False]


def test_a_missing_category_is_other_unless_a_fill_is_declared(tmp_path):
    (tmp_path / "a.csv").write_text("age,income,sex,outcome\n50,9,,yes\n", encoding="utf-8")
    assert from_folder(tmp_path, SCHEMA, test=0.0).x[0, 2:].tolist() == [0, 0, 1]
    filled = {**SCHEMA, "fill": {"income": 10, "sex": "m"}}
    assert from_folder(tmp_path, filled, test=0.0).x[0, 2:].tolist() == [0, 1, 0]


def test_words_for_missing_can_be_declared_and_nan_is_always_one(tmp_path):
    (tmp_path / "a.csv").write_text("age,income,sex,outcome\n50,-,f,yes\n50,NaN,f,yes\n50,,f,yes\n", encoding="utf-8")
    federation = from_folder(tmp_path, {**SCHEMA, "missing": ["-"]}, test=0.0)
    assert federation.x == pytest.approx(np.array([by_hand(50, None, "f")] * 3), abs=1e-6)
    with pytest.raises(BadInput, match="row 1, column 'income': - is not a number"):
        from_folder(tmp_path, SCHEMA)


def test_folders_without_usable_clients_are_refused(tmp_path):
    with pytest.raises(BadInput, match="neither a folder nor"):
        from_folder(tmp_path / "none", SCHEMA)
    with pytest.raises(BadInput, match="no CSV, Excel, Parquet or NPZ file"):
        from_folder(tmp_path, SCHEMA)
    (tmp_path / "a.csv").write_text("age,income,sex,outcome\n", encoding="utf-8")
    with pytest.raises(BadInput, match="client 'a' has no records"):
        from_folder(tmp_path, SCHEMA)
    (tmp_path / "a.csv").write_text("", encoding="utf-8")
    with pytest.raises(BadInput, match="empty"):
        from_folder(tmp_path, SCHEMA)
    (tmp_path / "a.csv").write_text("age,sex,outcome\n1,f,yes\n", encoding="utf-8")
    with pytest.raises(BadInput, match="no column 'income': it has age, sex, outcome"):
        from_folder(tmp_path, SCHEMA)
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(BadInput, match="two files for client 'a'"):
        from_folder(tmp_path, SCHEMA)
    (tmp_path / "a.csv").unlink()
    with pytest.raises(BadInput, match="cannot be read as parquet"):
        from_folder(tmp_path, SCHEMA)
    with pytest.raises(BadInput, match="'drop'"):
        from_folder(tmp_path, SCHEMA, invalid="drop")


def test_arrays_per_client():
    random = np.random.default_rng(0)
    pairs = [(random.standard_normal((n, 3)), random.integers(0, 4, n)) for n in (10, 20)]
    federation = from_arrays(pairs, names=["a", "b"], classes=4, test=0.0)
    assert federation.names == ["a", "b"]
    assert federation.sizes.tolist() == [10, 20]
    for (x, y), part in zip(pairs, federation.train):
        order = np.sort(part)
        assert np.array_equal(federation.x[order], x.astype(np.float32))
        assert np.array_equal(federation.y[order], y)
    assert federation.with_budgets([1.0, 2.0]).budgets[1].epsilon == 2.0
    lettered = from_arrays([(np.ones((2, 1)), np.array(["u", "v"]))], classes=["v", "u"], test=0.0)
    assert lettered.y.tolist() == [1, 0]
    real = from_arrays([(np.ones((2, 1)), [0.5, 7.5])], task="regression", test=0.0)
    assert real.y.tolist() == [0.5, 7.5]


@pytest.mark.parametrize(
    ("clients", "options", "words"),
    [
        ([], {"classes": 2}, "no clients"),
        ([(np.ones((2, 1)), [0, 1])], {}, "classes is missing"),
        ([(np.ones((2, 1)), [0, 2])], {"classes": 2}, "client-00, row 2, array y: 2 is none of the declared classes"),
        ([(np.ones((2, 1)), [0, 1, 1])], {"classes": 2}, "x needs one row per record"),
        ([([["a"], ["b"]], [0, 1])], {"classes": 2}, "not numbers"),
        ([(np.array([[1.0], [np.nan]]), [0, 1])], {"classes": 2}, "row 2, array x"),
        ([(np.ones((0, 1)), np.ones(0, dtype=int))], {"classes": 2}, "has no records"),
        ([(np.ones((2, 1)), [0, 1])], {"classes": 2, "names": ["a", "b"]}, "2 names for 1 clients"),
        ([(np.ones((2, 1)), [0, 1])] * 2, {"classes": 2, "names": ["a", "a"]}, "names repeat"),
        ([(np.ones((2, 1)), [0, 1])], {"classes": 1}, "at least two labels"),
        ([(np.ones((2, 1)), [0, 1])], {"classes": 2, "task": "ranking"}, "task is 'ranking'"),
    ],
)
def test_impossible_arrays_are_refused(clients, options, words):
    with pytest.raises(BadInput, match=words):
        from_arrays(clients, **options)


def test_invalid_entries_of_arrays_become_null_rows_without_touching_the_callers_array():
    x = np.array([[1.0, 2.0], [np.inf, 3.0], [4.0, 5.0]], dtype=np.float32)
    federation = from_arrays([(x, [0, 1, 5])], classes=2, test=0.0, invalid="null")
    assert federation.valid.tolist() == [True, False, False]
    assert federation.x.tolist() == [[1, 2], [0, 0], [0, 0]]
    assert np.isinf(x[1, 0])


class Squares(TorchDataset):
    def __len__(self):
        return 6

    def __getitem__(self, k):
        return torch.full((1, 2, 2), float(k)), k % 3


def test_torch_data_sets_per_client():
    tensors = TensorDataset(torch.arange(12.0).reshape(3, 1, 2, 2), torch.tensor([0, 1, 2]))
    federation = from_datasets([Squares(), tensors], classes=3, test=0.0)
    assert federation.sizes.tolist() == [6, 3]
    assert federation.shape == (1, 2, 2)
    assert federation.x[4, 0, 1, 1] == 4.0
    assert federation.x[8].ravel().tolist() == [8.0, 9.0, 10.0, 11.0]
    assert federation.y.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_torch_data_sets_without_length_or_tensors_are_refused():
    class Endless(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(BadInput, match="no length"):
        from_datasets([Endless()], classes=2)
    with pytest.raises(BadInput, match="pairs"):
        from_datasets([[("text", "label")]], classes=2)
