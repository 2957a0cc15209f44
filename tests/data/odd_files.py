"""Odd files as hospitals have them, and odder ones: each with the number of records in it, counted as it is made."""

from __future__ import annotations

import datetime
import decimal
import gzip
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Random = np.random.Generator


@dataclass(frozen=True)
class Odd:
    """A file and how many records it has; None where nobody can say (it is damaged, or holds no table).

    ``header``: whether it names its columns; ``blank``: how many empty rows are before the names.
    """

    path: Path
    records: int | None
    header: bool = True
    blank: int = 0


def make(folder: Path, seed: int) -> Odd:
    """The odd file of that number."""
    random = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    folder.mkdir(parents=True)
    return kind(folder, random)


# -- tables of text, from which CSV and Excel files are made --

VALUES: tuple[Callable[[Random], str], ...] = (
    lambda r: f"{r.normal(50, 20):.3f}",
    lambda r: str(r.integers(0, 100)),
    lambda r: str(r.integers(0, 2)),
    lambda r: str(r.choice(["f", "m"])),
    lambda r: str(r.choice(["a", "b", "c", "Ä", "日本"])),
    lambda r: str(r.choice(["1.0", "2.0", "3"])),
    lambda r: "?" if r.random() < 0.3 else str(r.integers(1, 90)),
    lambda r: "-9" if r.random() < 0.2 else str(r.integers(0, 50)),
    lambda r: "999" if r.random() < 0.2 else str(r.integers(80, 200)),
    lambda r: str(r.choice(["", "NA", "nan", "1.5", "2.5"])),
    lambda r: "" if r.random() < 0.95 else "7",
    lambda r: str(r.choice(["1e300", "-1e308", "1e308", "5e-324"])),
    lambda r: str(r.choice(["12", "x", "1e400", "inf", "-inf"])),
    lambda r: str(r.choice(["٣", "７", "1_000", "+5", "0x10", "1,5"])),
    lambda r: f"patient {r.integers(0, 9)}",
    lambda r: f"{r.integers(10**17, 10**18)}",
    lambda r: f"20{r.integers(10, 25)}-0{r.integers(1, 9)}-1{r.integers(0, 9)}",
    lambda r: str(r.choice(["true", "false", "TRUE"])),
    lambda r: str(r.choice(["+", "-"])),
    lambda r: "z" * int(r.integers(0, 300)),
    lambda r: "same",
    lambda r: "",
    lambda r: str(r.choice(["\x1c1", " 2 ", "\u20033", "4\u00a0", "\x00", "nul\x00l"])),
    lambda r: str(r.choice(["=1+1", "#N/A", "#DIV/0!", "'", "\\", "\u2028", "\u202e", "😀"])),
)
NAMES = (
    *("age", "sex", "y", "label", "Outcome", "patient_id", "PatientID", "weight kg", "a.b", "x > 0", "ÄÖ", "日本"),
    *("target", "c1", "1", "2019", "nan", "NA", "", " ", 'q"t', "a,b", "a;b", "#", "[t]", "=", "\u200b", "age", "y"),
)


def table(random: Random, rows: int | None = None) -> tuple[list[str], list[list[str]]]:
    """Names and cells; a person's id may repeat over rows, and the last column is often something to predict."""
    width = int(random.integers(1, 9))
    names = [str(one) for one in random.choice(NAMES, width)]
    if random.random() < 0.7:
        names = [f"{name}{k}" if names.index(name) < k else name for k, name in enumerate(names)]
    kinds = [VALUES[k] for k in random.integers(0, len(VALUES), width)]
    if random.random() < 0.8:
        kinds[-1] = VALUES[int(random.choice([1, 2, 3, 4, 6]))]
        kinds[0] = VALUES[int(random.choice([0, 1, 3, 7]))]
    count = int(random.choice([0, 1, 2, 5, 30, 80])) if rows is None else rows
    return names, [[kind(random) for kind in kinds] for _ in range(count)]


def quoted(cell: str, delimiter: str, always: bool) -> str:
    special = any(one in cell for one in (delimiter, '"'))
    return '"' + cell.replace('"', '""') + '"' if special or always else cell


def lines_of(names: list[str] | None, rows: list[list[str]], delimiter: str, always: bool = False) -> list[str]:
    listed = rows if names is None else [names, *rows]
    return [delimiter.join(quoted(cell, delimiter, always) for cell in row) for row in listed]


def csv_file(folder: Path, random: Random) -> Odd:
    """An ordinary file: delimiters, quotes, line ends, a byte order mark, gzip, capital endings."""
    names, rows = table(random)
    delimiter = str(random.choice([",", ";", "\t", "|"]))
    content = str(random.choice(["\n", "\r\n"])).join(lines_of(names, rows, delimiter, random.random() < 0.2))
    content += str(random.choice(["", "\n"]))
    packed = ("\ufeff" if random.random() < 0.3 else "").encode() + content.encode()
    ending = str(random.choice([".csv", ".CSV", ".csv.gz", ".Csv.GZ"]))
    path = folder / f"site{ending}"
    path.write_bytes(gzip.compress(packed) if ending.lower().endswith("gz") else packed)
    return Odd(path, None if any("\n" in one for one in names) else _lines(packed) - 1)


def _lines(content: bytes) -> int:
    """How many lines a text has: a newline ends one, and the last need not have it."""
    return content.count(b"\n") + (not content.endswith(b"\n") and bool(content))


def headless_file(folder: Path, random: Random) -> Odd:
    """The raw file of a hospital: numbers, ? and −9, a stage, no header."""
    rows = int(random.integers(3, 120))
    kinds = [VALUES[k] for k in (0, 1, 2, 6, 7, 8, 5)]
    kinds = [kinds[0], *(kinds[k] for k in random.integers(0, len(kinds), 5))]
    cells = [[*(kind(random) for kind in kinds), str(random.integers(0, 5))] for _ in range(rows)]
    content = "\n".join(",".join(row) for row in cells) + "\n"
    (folder / "raw.csv").write_text(content, encoding="utf-8")
    return Odd(folder / "raw.csv", rows, header=False)


def ragged_file(folder: Path, random: Random) -> Odd:
    """Lines that are too short, too long, empty, or have a quote somewhere."""
    names, rows = table(random, 20)
    lines = lines_of(names, rows, ",")
    for k in random.integers(1, len(lines), 4):
        line = lines[int(k)]
        odd = [line + ",1", line[: len(line) // 2], "", '"' + line, line + '"', line.replace(",", ""), line + "\x0b"]
        lines[int(k)] = str(random.choice(odd))
    content = ("\n".join(lines) + "\n").encode()
    (folder / "ragged.csv").write_bytes(content)
    return Odd(folder / "ragged.csv", _lines(content) - 1)


def encoded_file(folder: Path, random: Random) -> Odd:
    """Text in other encodings, carriage returns, bytes that are no text."""
    names, rows = table(random, 12)
    text = "\n".join(lines_of(names, rows, ",")) + "\n"
    which = int(random.integers(0, 6))
    coded = [
        text.encode("utf-16"),
        text.encode("latin-1", "replace"),
        text.replace("\n", "\r").encode(),
        text.encode() + bytes(random.integers(0, 256, 200, dtype=np.uint8)),
        bytes(random.integers(0, 256, 500, dtype=np.uint8)),
        text.encode("utf-8").replace(b"\n", b"\n\n"),
    ][which]
    (folder / "coded.csv").write_bytes(coded)
    return Odd(folder / "coded.csv", None if which in (0, 2, 4) else _lines(coded) - 1)


def tiny_file(folder: Path, random: Random) -> Odd:
    """Nothing, a header alone, one column, one row, blank lines, huge cells, very many columns."""
    texts: list[tuple[str, int | None]] = [
        ("", None),
        ("\n", None),
        ("age,y\n", 0),
        ("age,y", 0),
        ("age\n1\n2\n", 2),
        ("age,y\n1,0\n", 1),
        ("age,y\n1,0\n\n\n\n", 4),
        ("\n\nage,y\n1,0\n", None),
        ("age,y\n" + "9" * 200_000 + ",1\n2,0\n", 2),
        ('age,y\n"' + "x" * 200_000 + '",1\n2,0\n', 2),
        (",".join(f"v{k}" for k in range(3000)) + "\n" + ",".join("1" for _ in range(3000)) + "\n", 1),
        (",,\n1,2,3\n4,5,6\n", None),
        ("a,a,a\n1,2,0\n4,5,1\n", 2),
        ("0,1,2\n5,1,0\n7,3,1\n", 2),
        ("x > 0\n1\n2\n", 2),
        ("only,words\nsome,thing\nmore,prose\n", 2),
        ("\ufeffage,y\n1,0\n2,1\n", 2),
        ("age,y\n-0,0\n-0.0,1\n0,1\n", 3),
    ]
    text, records = texts[int(random.integers(0, len(texts)))]
    (folder / "tiny.csv").write_text(text, encoding="utf-8", newline="")
    return Odd(folder / "tiny.csv", records)


def truncated_file(folder: Path, random: Random) -> Odd:
    """Files that end too early, or are something else than their name says."""
    names, rows = table(random, 50)
    text = ("\n".join(lines_of(names, rows, ",")) + "\n").encode()
    arrays = folder / "x.npz"
    np.savez(arrays, x=np.ones((9, 2)), y=np.zeros(9))
    pq.write_table(pa.table({"a": list(range(50)), "y": [0, 1] * 25}), folder / "x.parquet")
    whole = {"csv.gz": gzip.compress(text), "npz": arrays.read_bytes(), "parquet": (folder / "x.parquet").read_bytes()}
    whole["xlsx"] = whole["npz"]
    arrays.unlink()
    (folder / "x.parquet").unlink()
    ending = str(random.choice(list(whole)))
    content = bytearray(whole[ending])
    if random.random() < 0.5:
        del content[int(random.integers(0, len(content))) :]
    else:
        for k in random.integers(0, len(content), 5):
            content[int(k)] ^= 0x55
    if random.random() < 0.2:
        content = bytearray(text)
    path = folder / f"cut.{ending}"
    path.write_bytes(bytes(content))
    return Odd(path, None)


# -- Parquet --


def _column(random: Random, rows: int) -> Any:
    """An Arrow column of some type, with nulls."""
    gone = random.random(rows) < random.choice([0.0, 0.2, 1.0], p=[0.6, 0.3, 0.1])
    whole = [None if one else int(k) for one, k in zip(gone, random.integers(0, 5, rows))]
    day = datetime.date(2020, 1, 1)
    made: list[Callable[[], Any]] = [
        lambda: pa.array(whole, pa.int8()),
        lambda: pa.array(whole, pa.uint64()),
        lambda: pa.array([None if one else k * 1.5 for one, k in zip(gone, range(rows))], pa.float32()),
        lambda: pa.array([None if k is None else np.float16(k) for k in whole], pa.float16()),
        lambda: pa.array([[np.nan, np.inf, 1.0, 2.0][k % 4] for k in range(rows)]),
        lambda: pa.array([None if k is None else decimal.Decimal(k) / 4 for k in whole], pa.decimal128(10, 3)),
        lambda: pa.array([None if k is None else decimal.Decimal(k) for k in whole], pa.decimal256(50, 2)),
        lambda: pa.array([None if k is None else bool(k % 2) for k in whole]),
        lambda: pa.array([None if k is None else day + datetime.timedelta(k) for k in whole]),
        lambda: pa.array([-(2**62) + k for k in range(rows)], pa.timestamp("us")),
        lambda: pa.array(list(range(rows)), pa.timestamp("ns", "Europe/Berlin")),
        lambda: pa.array(whole, pa.duration("s")),
        lambda: pa.array(whole, pa.time64("us")),
        lambda: pa.array([None if k is None else "abcde"[k] for k in whole], pa.string()).dictionary_encode(),
        lambda: pa.array([None if k is None else "abcde"[k] for k in whole], pa.large_string()),
        lambda: pa.array([None if k is None else bytes([k, 255]) for k in whole], pa.binary()),
        lambda: pa.array([None if k is None else f"{k}".encode() for k in whole], pa.large_binary()),
        lambda: pa.array([None if k is None else [k, k] for k in whole]),
        lambda: pa.array([None if k is None else {"a": k, "b": str(k)} for k in whole]),
        lambda: pa.array([None if k is None else [(str(k), k)] for k in whole], pa.map_(pa.string(), pa.int64())),
        lambda: pa.nulls(rows),
        lambda: pa.array([b"\xff\xfe", b"ok"] * (rows // 2) + [b"ok"] * (rows % 2), pa.binary()).view(pa.string()),
        lambda: pa.array([2**63 - 1 - k for k in range(rows)], pa.int64()),
        lambda: pa.array([["?", "-9", "3", "4.0"][k % 4] for k in range(rows)]),
    ]
    return made[int(random.integers(0, len(made)))]()


def parquet_file(folder: Path, random: Random) -> Odd:
    """Columns of all types; names that are empty, twice, or have points in them."""
    rows = int(random.choice([0, 1, 2, 7, 40]))
    columns = [_column(random, rows) for _ in range(int(random.integers(1, 7)))]
    names = [str(one) for one in random.choice(NAMES, len(columns))]
    if random.random() < 0.7:
        names = [f"{name}{k}" for k, name in enumerate(names)]
        columns.append(pa.array([k % 2 for k in range(rows)], pa.int64()))
        names.append("outcome")
    path = folder / str(random.choice(["a.parquet", "B.PARQUET", "year=2020.parquet"]))
    pq.write_table(pa.Table.from_arrays(columns, names), path)
    return Odd(path, rows)


# -- Excel --


def excel_file(folder: Path, random: Random) -> Odd:
    """A sheet with text, numbers, dates, truth values, errors, merged cells, empty rows and a wrong dimension."""
    from openpyxl import Workbook

    names, rows = table(random)
    book = Workbook()
    sheet = book.active
    shift = int(random.choice([0, 0, 0, 2]))
    for k, name in enumerate(names):
        sheet.cell(1 + shift, k + 1, _allowed(name) or None)
    for j, row in enumerate(rows):
        for k, cell in enumerate(row):
            sheet.cell(2 + shift + j, k + 1, _typed(cell, random))
    if len(rows) > 6 and random.random() < 0.4:
        sheet.merge_cells(start_row=4 + shift, end_row=5 + shift, start_column=1, end_column=1)
    if random.random() < 0.3:
        book.create_sheet("second").append([1, 2, 3])
    last = max((cell.row for line in sheet.iter_rows() for cell in line if _holds(cell.value)), default=0)
    path = folder / str(random.choice(["a.xlsx", "B.XLSX"]))
    book.save(path)
    if random.random() < 0.3:
        _wrong_dimension(path)
    header = any(_holds(sheet.cell(1 + shift, k + 1).value) for k in range(len(names)))
    return Odd(path, max(last - 1 - shift, 0) if header else None, blank=shift)


def _holds(value: Any) -> bool:
    return value is not None and bool(str(value).strip())


def _allowed(text: str) -> str:
    """Text without the characters that XML cannot hold."""
    return "".join(one for one in text if one >= " ")


def _typed(cell: str, random: Random) -> Any:
    """The cell as Excel may hold it: a number, a truth value, a date, an error, or text; nothing where it is empty."""
    try:
        return int(cell) if abs(int(cell)) < 10**15 else float(cell)
    except ValueError:
        pass
    if cell in ("true", "false"):
        return cell == "true"
    if cell.startswith("20") and cell.count("-") == 2:
        return datetime.datetime.fromisoformat(cell) if random.random() < 0.5 else datetime.date.fromisoformat(cell)
    return _allowed(cell) or None


def _wrong_dimension(path: Path) -> None:
    """Say that the sheet is one cell large, as some programs do."""
    import re

    with zipfile.ZipFile(path) as old:
        parts = {name: old.read(name) for name in old.namelist()}
    sheet = "xl/worksheets/sheet1.xml"
    parts[sheet] = re.sub(rb'<dimension ref="[^"]*"', b'<dimension ref="A1"', parts[sheet])
    with zipfile.ZipFile(path, "w") as new:
        for name, content in parts.items():
            new.writestr(name, content)


# -- NPZ --


def arrays_file(folder: Path, random: Random) -> Odd:
    """Arrays of the wrong kind or shape, without numbers, with NaN; a single array under the name of many."""
    rows = int(random.choice([0, 1, 9]))
    x = np.ones((rows, 3)) * np.arange(3)
    y = np.arange(rows) % 2
    pairs = [
        {"x": x, "y": y},
        {"x": x, "y": y.astype(float) + 0.5},
        {"x": x, "y": np.array(["a", "b"] * rows)[:rows]},
        {"x": x, "y": np.array([b"a", b"b"] * rows)[:rows]},
        {"x": x * np.nan, "y": y},
        {"x": x * 5e307, "y": y},
        {"x": x.astype(complex), "y": y},
        {"x": x, "y": y.astype(complex)},
        {"x": x[:, 0], "y": y},
        {"x": x, "y": np.stack([y, y], 1)},
        {"x": x, "y": y * np.nan},
        {"x": x.astype("datetime64[s]"), "y": y},
        {"x": x.astype(bool), "y": y.astype(bool)},
        {"x": x, "z": y},
        {"x": np.array(["a"] * rows), "y": y},
    ]
    chosen = pairs[int(random.integers(0, len(pairs)))]
    path = folder / "a.npz"
    if random.random() < 0.1:
        with open(path, "wb") as opened:
            np.save(opened, x)
        return Odd(path, None)
    np.savez(path, **chosen)
    return Odd(path, rows)


KINDS: tuple[Callable[[Path, Random], Odd], ...] = (
    csv_file,
    headless_file,
    ragged_file,
    parquet_file,
    excel_file,
    encoded_file,
    tiny_file,
    csv_file,
    parquet_file,
    truncated_file,
    arrays_file,
    excel_file,
)
