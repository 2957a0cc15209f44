"""Data sets by name: shapes, scaling by public constants, original file layouts, and messages about missing files."""

import gzip
import os
import struct

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_digits

from sordino.data import SOURCES, available, load
from sordino.errors import BadInput


def write_idx(path, array):
    header = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder, random, packed=True):
    arrays = {}
    for part, count in (("train", 30), ("t10k", 10)):
        images, labels = random.integers(0, 256, (count, 28, 28)), random.integers(0, 10, count)
        end = ".gz" if packed else ""
        write_idx(folder / f"{part}-images-idx3-ubyte{end}", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte{end}", labels)
        arrays[part] = images, labels
    return arrays


def test_digits_are_scaled_by_a_public_constant():
    data, raw = load("digits"), load_digits()
    assert data.x.shape == (1797, 1, 8, 8)
    assert data.x.dtype == np.float32
    assert data.y.dtype == np.int64
    assert data.classes == 10
    assert np.array_equal(data.x[:, 0] * 16, raw.images)
    assert np.array_equal(data.y, raw.target)
    assert data.valid.all()


def test_breast_cancer_is_scaled_by_declared_ranges_record_by_record():
    data, raw = load("breast-cancer"), load_breast_cancer()
    assert data.x.shape == (569, 30)
    for k, name in enumerate(raw.feature_names):
        low, high = SOURCES["breast-cancer"].schema["numeric"][name]
        # The ranges are wide enough that nothing is clipped.
        assert low <= raw.data[:, k].min() <= raw.data[:, k].max() <= high
        assert data.x[:, k] == pytest.approx((raw.data[:, k] - low) / (high - low), abs=1e-6)
    assert np.array_equal(data.y, raw.target)


def test_least_squares_is_the_quadratic_of_the_paper():
    """Σ_j ½(z_jᵀw − y_j)²/n = (1/2n)(w − b)ᵀ Z Zᵀ (w − b), with b where all residuals vanish."""
    data = load("least-squares", records=300, dimension=7, tests=50, seed=5)
    z, y = data.x.astype(np.float64), data.y.astype(np.float64)
    b, *_ = np.linalg.lstsq(z, y, rcond=None)
    w = np.random.default_rng(0).standard_normal(7)
    quadratic = (w - b) @ (z.T @ z) @ (w - b) / (2 * 300)
    assert sum(0.5 * (z[j] @ w - y[j]) ** 2 for j in range(300)) / 300 == pytest.approx(quadratic, rel=1e-5)
    assert np.abs(z @ b - y).max() < 1e-5
    assert np.abs(data.test_x @ b - data.test_y).max() < 1e-5
    assert data.task == "regression"
    assert data.classes is None
    default = load("least-squares")
    assert default.x.shape == (4000, 100)
    assert default.x.std() == pytest.approx(1.0, abs=0.01)
    assert not np.array_equal(default.x, load("least-squares", seed=1).x)
    assert np.array_equal(default.x, load("least-squares").x)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_read_in_their_original_layout(tmp_path, name, packed):
    arrays = write_mnist(tmp_path / name, np.random.default_rng(0), packed)
    data = load(name, tmp_path)
    for (x, y), part in (((data.x, data.y), "train"), ((data.test_x, data.test_y), "t10k")):
        images, labels = arrays[part]
        assert x.shape == (len(images), 1, 28, 28)
        assert x.dtype == np.float32
        assert np.array_equal(x[:, 0], (images / 255).astype(np.float32))
        assert np.array_equal(y, labels)


def test_cifar_batches_are_read_in_their_original_layout(tmp_path):
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    expected = []
    for name in [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]:
        records = [(random.integers(0, 10), random.integers(0, 256, (3, 32, 32))) for _ in range(4)]
        (folder / name).write_bytes(b"".join(bytes([y]) + x.astype(np.uint8).tobytes() for y, x in records))
        expected += records
    data = load("cifar10", tmp_path)
    assert data.x.shape == (20, 3, 32, 32)
    assert data.test_x.shape == (4, 3, 32, 32)
    for j, (label, image) in enumerate(expected):
        x, y = (data.x[j], data.y[j]) if j < 20 else (data.test_x[j - 20], data.test_y[j - 20])
        assert y == label
        assert np.array_equal(x, (image / 255).astype(np.float32))


BANK = """\
"age";"job";"marital";"education";"default";"balance";"housing";"loan";"contact";"day";"month";"duration";"campaign";"pdays";"previous";"poutcome";"y"
58;"management";"married";"tertiary";"no";2143;"yes";"no";"unknown";5;"may";261;1;-1;0;"unknown";"no"
18;"astronaut";"single";"secondary";"no";200000;"yes";"yes";"cellular";31;"dec";0;2;10;0;"success";"yes"
"""


def test_bank_marketing_is_one_hot_by_declared_lists(tmp_path):
    (tmp_path / "bank-marketing").mkdir()
    (tmp_path / "bank-marketing" / "bank-full.csv").write_text(BANK, encoding="utf-8")
    data = load("bank-marketing", tmp_path)
    assert data.x.shape == (2, *SOURCES["bank-marketing"].shape)
    assert data.y.tolist() == [0, 1]
    assert data.x[0, 0] == pytest.approx((58 - 18) / (100 - 18))
    assert data.x[1, 1] == 1.0  # a balance beyond the declared range is clipped to it
    assert data.x[1, 3] == 0.0  # duration 0, on a logarithmic scale
    # 7 numbers, then 12 jobs and "other": an unknown job is "other".
    assert data.x[0, 7:20].tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    assert data.x[1, 7:20].tolist() == [0] * 12 + [1]
    assert data.x[:, 7:].sum(axis=1).tolist() == [9.0, 9.0]


def test_adult_reads_both_files_with_their_quirks(tmp_path):
    folder = tmp_path / "adult"
    folder.mkdir()
    row = "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    (folder / "adult.data").write_text(f"{row}United-States, <=50K\n{row}?, >50K\n\n", encoding="utf-8")
    (folder / "adult.test").write_text(f"|1x3 Cross validator\n{row}Cuba, >50K.\n", encoding="utf-8")
    data = load("adult", tmp_path)
    assert data.x.shape == (2, *SOURCES["adult"].shape)
    assert data.y.tolist() == [0, 1]
    assert data.test_y.tolist() == [1]
    assert data.x[1, -1] == 1.0  # "?" is no declared country
    assert data.x[0, -1] == 0.0
    assert data.x[0, 6:].sum() == 8.0


def test_a_subset_and_a_merge(tmp_path):
    write_mnist(tmp_path / "mnist", np.random.default_rng(1))
    whole = load("mnist", tmp_path)
    small = load("mnist", tmp_path, records=12, records_seed=3)
    assert len(small) == 12
    assert len(small.test_x) == 10
    assert all((whole.x == record).all(axis=(1, 2, 3)).any() for record in small.x)
    merged = load("mnist", tmp_path, merge=True)
    assert len(merged) == 40
    assert merged.test_x is None
    with pytest.raises(BadInput, match="30 records to choose from"):
        load("mnist", tmp_path, records=31)
    with pytest.raises(BadInput, match="no test set of its own"):
        load("digits", merge=True)


def test_missing_files_are_explained_with_both_routes(tmp_path):
    with pytest.raises(BadInput) as caught:
        load("mnist", tmp_path)
    message = str(caught.value)
    assert "sordino data get mnist" in message
    assert "train-images-idx3-ubyte.gz" in message
    assert "https://" in message
    assert str(tmp_path) in message


def test_the_folder_comes_from_the_environment_or_is_data_here(tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist", np.random.default_rng(0))
    monkeypatch.setenv("SORDINO_DATA", str(tmp_path))
    assert len(load("mnist")) == 30
    monkeypatch.delenv("SORDINO_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match="mnist is not in data"):
        load("mnist")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-20], "cannot be read"),
        (lambda data: b"nothing of the kind", "cannot be read"),
        (lambda data: gzip.compress(gzip.decompress(data)[:-1]), "should hold 30 × 28 × 28 bytes but has 23519"),
        (lambda data: gzip.compress(b"\x00\x00\x0d\x01"), "no idx file"),
    ],
)
def test_damaged_files_are_named(tmp_path, damage, words):
    write_mnist(tmp_path / "mnist", np.random.default_rng(0))
    file = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(BadInput, match=words) as caught:
        load("mnist", tmp_path)
    assert file.name in str(caught.value)


def test_a_label_beyond_the_classes_is_refused(tmp_path):
    write_mnist(tmp_path / "mnist", np.random.default_rng(0))
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte.gz", np.full(30, 12))
    with pytest.raises(BadInput, match="label 12"):
        load("mnist", tmp_path)


def test_unknown_names_and_options_are_refused():
    with pytest.raises(BadInput, match="'mnits' is unknown: use one of digits"):
        load("mnits")
    with pytest.raises(BadInput, match="digits has no option 'dimension'"):
        load("digits", dimension=3)
    with pytest.raises(BadInput, match="dimension is 0"):
        load("least-squares", dimension=0)


def test_the_list_says_what_is_there(tmp_path):
    write_mnist(tmp_path / "mnist", np.random.default_rng(0))
    write_mnist(tmp_path / "fashion-mnist", np.random.default_rng(0))
    (tmp_path / "fashion-mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    rows = {row["name"]: row for row in available(tmp_path)}
    assert rows["digits"]["status"] == "bundled"
    assert rows["mnist"]["status"] == "present"
    assert rows["mnist"]["get"] is None
    assert rows["fashion-mnist"]["status"] == "incomplete"
    assert rows["fashion-mnist"]["missing"] == ["t10k-labels-idx1-ubyte.gz"]
    assert rows["cifar10"]["status"] == "absent"
    assert rows["cifar10"]["get"] == "sordino data get cifar10"
    assert rows["school"]["get"].startswith("by hand: https://")


@pytest.mark.slow
@pytest.mark.skipif("SORDINO_DATA" not in os.environ, reason="set SORDINO_DATA to a folder with the full data sets")
@pytest.mark.parametrize("name", [name for name, source in SOURCES.items() if source.files])
def test_full_size_data_sets_have_the_declared_size_and_use_every_declared_range(name):
    data = load(name, **({"units": False} if "unit" in SOURCES[name].schema else {}))
    assert len(data) == SOURCES[name].records
    assert data.x.shape[1:] == SOURCES[name].shape
    assert data.valid.all()
    assert data.x.min() == 0.0
    assert data.x.max() == 1.0
    if data.classes is not None:
        assert np.bincount(data.y, minlength=data.classes).min() > 0
