"""Your own data: a folder with a file per client, arrays, or torch data sets. The natural split of a consortium.

``draft_schema`` writes a first draft of a folder's schema, for a person to check: ``sordino data schema FOLDER``.
"""

from __future__ import annotations

import logging
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from sordino.data.dataset import Dataset, Federation, client_names
from sordino.data.encode import (
    Arrays,
    check_invalid,
    delimiter_of,
    encode_arrays,
    encode_table,
    numbers,
    read_table,
    unit_ids,
    words,
)
from sordino.data.schema import MISSING, Schema, array_schema, parse_schema, word
from sordino.data.toml import toml_value
from sordino.errors import BadInput

SUFFIXES = (".csv", ".csv.gz", ".parquet", ".npz")
"""How the names of clients' files end, in small or capital letters."""

_TABLES = (
    ".arrow", ".bz2", ".dat", ".dta", ".feather", ".gz", ".json", ".jsonl", ".npy", ".orc", ".parq", ".pq", ".sas7bdat",
    ".sav", ".tsv", ".xls", ".xlsx", ".xz", ".zip", ".zst",
)  # fmt: skip
"""Endings of files that may hold a client's records, and that sordino does not read."""

TARGETS = ("target", "label", "class", "outcome", "y")
"""Column names that are taken for the target, in this order of preference; otherwise the last column is."""

MOST_VALUES = 50
"""A text column with more distinct values than this is left out: it may be a name or an identifier."""

MOST_CLASSES = 20
"""A numeric target with more distinct values than this is drafted as regression."""

_HEADER = """\
# Drafted from {file} alone. CHECK EVERY LINE BEFORE USE.
# All ranges and value lists below were READ OFF THE RECORDS OF THIS ONE FILE: they are no public knowledge, they
# may give away single records, and other clients' data may lie outside them. Replace them by what is known without
# looking at any record (physical limits, code books, agreed categories) before this schema is shared.

[data.schema]"""

log = logging.getLogger("sordino.data")


def from_folder(
    path: str | Path,
    schema: Mapping[str, Any] | None = None,
    test: float = 0.2,
    seed: int = 0,
    invalid: str = "refuse",
    central: float = 0.0,
    also: Sequence[str] = (),
) -> Federation:
    """The clients in a folder: one CSV, Parquet or NPZ file each, named by the file's stem, sorted.

    Parameters
    ----------
    path
        The folder, or a single file (one client: a site on its own).
    schema
        The public constants of ``sordino.data.schema``, as a table; by default the folder's ``schema.toml``.
    test, seed, central
        As in ``Dataset.partition``.
    invalid
        ``"refuse"``: a record that cannot be encoded is an error that names file, row and column. ``"null"``: it
        becomes a null row, so that the number of records stays what was declared (rule R8).
    also
        Columns (of NPZ files: arrays) to keep as words beside the records, such as that of ``with_levels``.
    """
    dataset = load_folder(Path(path), schema, invalid, also)
    return dataset.partition("natural", seed=seed, test=test, central=central)


def from_arrays(
    clients: Sequence[tuple[Any, Any]],
    names: Sequence[str] | None = None,
    classes: int | Sequence[Any] | None = None,
    task: str = "classification",
    test: float = 0.2,
    seed: int = 0,
    invalid: str = "refuse",
    **options: Any,
) -> Federation:
    """One client per pair (x, y). ``classes`` declares the labels (or how many: 0, 1, …); values stay as they are.

    Further options: ``central``, as in ``Dataset.partition``; ``name``, what the whole is called; ``units``, for each
    client an array that says whose each record is, with ``unit_records`` and ``unit_name`` (``Dataset.by_unit``).
    """
    check_invalid(invalid)
    whose, about = options.pop("units", None), [options.pop(key, None) for key in ("unit_records", "unit_name")]
    schema = array_schema(task, classes)
    called = list(names) if names is not None else client_names(len(clients))
    if len(called) != len(clients):
        raise BadInput(f"{len(called)} names for {len(clients)} clients: give one each")
    encoded = [encode_arrays(who, x, y, schema, invalid) for who, (x, y) in zip(called, clients)]
    dataset = _together(options.pop("name", "arrays"), called, encoded, schema, {"clients": "arrays"})
    if whose is not None:
        for who, own, (x, _, _) in zip(called, whose, encoded):
            if len(own) != len(x):
                raise BadInput(f"client {who!r} has {len(x)} records and {len(own)} entries in units: give one each")
        dataset = dataset.by_unit([one for own in whose for one in np.asarray(own).tolist()], *about)
    return dataset.partition("natural", seed=seed, test=test, **options)


def from_datasets(clients: Sequence[Any], names: Sequence[str] | None = None, **options: Any) -> Federation:
    """One client per map-style torch Dataset of pairs (tensor, label); options as in ``from_arrays``."""
    import torch
    from torch.utils.data import IterableDataset, TensorDataset

    pairs = []
    for position, dataset in enumerate(clients):
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise BadInput(f"data set {position} has no length: give map-style data sets, n_i must be known")
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
            pairs.append((dataset.tensors[0].numpy(), dataset.tensors[1].numpy()))
            continue
        try:
            records = [dataset[k] for k in range(len(dataset))]
            x, y = (torch.stack([torch.as_tensor(record[k]) for record in records]).numpy() for k in (0, 1))
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            raise BadInput(
                f"data set {position} does not give pairs (tensor, label) of one shape: {error}; "
                "images need a transform such as ToTensor"
            ) from None
        pairs.append((x, y))
    return from_arrays(pairs, names, **options)


def load_folder(
    path: Path, schema: Mapping[str, Any] | None = None, invalid: str = "refuse", also: Sequence[str] = ()
) -> Dataset:
    """All records of a folder with a file per client, and who owns which; ``also``: columns to keep as words."""
    check_invalid(invalid)
    files = client_files(path, tell=True)
    raw = schema if schema is not None else schema_beside(path)
    parsed = parse_schema(raw)
    read = [_read_client(file, parsed, invalid) for file in files]
    name = path.resolve().name if path.is_dir() else path.stem
    made = {"schema": dict(raw), "invalid": invalid}
    names, encoded = [stem_of(file) for file in files], [arrays for arrays, _ in read]
    noted = {
        column: tuple(w for file, (own, _) in zip(files, read) for w in _words_of(file, column, parsed, len(own[0])))
        for column in also
    }
    dataset = replace(_together(name, names, encoded, parsed, made), sorted_files=True, words=noted)
    if parsed.unit is None:
        return dataset
    ids = [one for _, own in read for one in own or ()]
    return dataset.by_unit(ids, parsed.unit_records, parsed.unit_name)


def _words_of(file: Path, column: str, schema: Schema, count: int) -> list[str | None]:
    """The words of the ``count`` records that were read from a file: records of nobody were left out."""
    found = read_words(file, column, schema.delimiter)
    if schema.unit is not None:
        if kind_of(file) == "npz":
            whose = [word(one) for one in np.load(file, allow_pickle=False)[schema.unit].tolist()]
        else:
            whose = unit_ids(read_table(file, [schema.unit], schema.delimiter or delimiter_of(file)), schema)
        found = [one for one, own in zip(found, whose) if own not in schema.missing]
    if len(found) < count:
        raise BadInput(f"{file}: {column!r} has {len(found)} entries for {count} records: give one each")
    return found[:count]  # empty lines at the end are no records


def read_words(file: Path, column: str, delimiter: str | None = None) -> list[str | None]:
    """A word for every record of a client's file: the cell of a column, trimmed; None where there is none."""
    if kind_of(file) != "npz":
        found: list[str | None] = words(
            read_table(file, [column], delimiter or delimiter_of(file)).columns[column]
        ).to_pylist()
        return found
    try:
        with np.load(file, allow_pickle=False) as content:
            if column not in content.files:
                raise BadInput(f"{file} has no array {column!r}: it has {', '.join(content.files)}")
            return [str(one).strip() for one in content[column].tolist()]
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} cannot be read as npz: {error}") from None


def kind_of(file: Path) -> str | None:
    """How a client's file is read: csv, csv.gz, parquet or npz; None for any other file."""
    name = file.name.lower()
    return next((suffix[1:] for suffix in SUFFIXES if name.endswith(suffix) and name != suffix), None)


def stem_of(file: Path) -> str:
    """The client's name: the file's, without its ending."""
    return file.name[: -len(kind_of(file) or "") - 1]


def client_files(path: Path, tell: bool = False) -> list[Path]:
    """The clients' files in a folder, sorted by name; a single file is one client. ``tell``: list what is ignored.

    A file that may hold a client's records in a form that is not read is refused: a hospital would be left out.
    """
    if path.is_file() and kind_of(path):
        return [path]
    if not path.is_dir():
        raise BadInput(f"{path} is neither a folder nor a CSV, Parquet or NPZ file: check data.folder")
    seen = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    files = [file for file in seen if kind_of(file)]
    if not files:
        raise BadInput(f"{path} has no CSV, Parquet or NPZ file: put one per client there")
    stems = [stem_of(file) for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise BadInput(f"{path} has two files for client {stem!r}: keep one")
    known = ", ".join(SUFFIXES)
    others = [file for file in seen if file not in files and file.name != "schema.toml"]
    for file in others:
        if file.suffix.lower() in _TABLES:
            raise BadInput(
                f"{file} is none of {known} and would be ignored: save it as one of them, or move it out of {path}"
            )
    if others and tell:
        listed = ", ".join(file.name + "/" * file.is_dir() for file in others[:10])
        more = f" and {len(others) - 10} more" if len(others) > 10 else ""
        log.warning("%s: ignored %s (clients are %s files)", path, listed + more, known)
    return files


def schema_beside(path: Path) -> Mapping[str, Any]:
    """The folder's schema.toml; the schema may also stand in it as [data.schema]."""
    file = (path if path.is_dir() else path.parent) / "schema.toml"
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise BadInput(
            f"{path} needs a schema: give one in the study, or draft it with `sordino data schema {path}`"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{file} is no valid TOML: {error}") from None
    return dict(content.get("data", {}).get("schema", content))


def _read_client(file: Path, schema: Schema, invalid: str) -> tuple[Arrays, list[str] | None]:
    """A client's records, and whose each is where the schema says how to know."""
    if kind_of(file) != "npz":
        table = read_table(file, schema.columns, schema.delimiter or delimiter_of(file))
        arrays = encode_table(table, schema, invalid)
        return _with_units(file, arrays, unit_ids(table, schema)[: len(arrays[0])], schema, invalid)
    try:
        with np.load(file, allow_pickle=False) as content:
            stored = {key: content[key] for key in content.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise BadInput(f"{file} cannot be read as npz: {error}") from None
    if not {"x", "y"} <= set(stored):
        raise BadInput(f"{file} holds {', '.join(stored) or 'nothing'}: an NPZ file needs arrays x and y")
    arrays = encode_arrays(file.name, stored["x"], stored["y"], schema, invalid)
    if schema.unit is None:
        return arrays, None
    if schema.unit not in stored or stored[schema.unit].shape != (len(arrays[0]),):
        raise BadInput(f"{file} has no array {schema.unit!r} with an entry per record: data.schema.unit names it")
    return _with_units(file, arrays, [word(one) for one in stored[schema.unit].tolist()], schema, invalid)


def _with_units(
    file: Path, arrays: Arrays, ids: list[str], schema: Schema, invalid: str
) -> tuple[Arrays, list[str] | None]:
    """The records that belong to a unit, and its id each. One that belongs to none cannot be protected with the rest.

    It is refused, or, where invalid records are kept as null rows, left out: a unit's number of records is no promise.
    """
    if schema.unit is None:
        return arrays, None
    nobody = np.array([one in schema.missing for one in ids], dtype=bool)
    if not nobody.any():
        return arrays, ids
    told = f"{nobody.sum()} of {len(ids)} records in {file.name} have no {schema.unit!r}"
    if invalid == "refuse":
        raise BadInput(
            f"{told} (row {int(nobody.argmax()) + 1} is the first), so nobody knows whose they are: correct the data, "
            "or leave such records out with data.invalid = 'null'"
        )
    log.warning("%s and are left out: nobody knows whose they are", told)
    x, y, valid = arrays
    return (x[~nobody], y[~nobody], valid[~nobody]), [one for one, none in zip(ids, nobody) if not none]


def _together(
    name: str, names: Sequence[str], encoded: Sequence[Arrays], schema: Schema, source: dict[str, Any]
) -> Dataset:
    """One data set of all clients' records, with their owners."""
    if not encoded:
        raise BadInput("there are no clients: give at least one")
    if len(set(names)) != len(names):
        raise BadInput(f"client names repeat: {', '.join(names)}; give every client its own")
    first = encoded[0][0].shape[1:]
    for who, (x, _, _) in zip(names, encoded):
        if x.shape[1:] != first:
            raise BadInput(
                f"client {who!r} has records of shape {x.shape[1:]}, client {names[0]!r} of {first}: make them equal"
            )
        if not len(x):
            raise BadInput(f"client {who!r} has no records: give it some, or leave it out")
    xs, ys, valids = zip(*encoded)
    x, y, valid = np.concatenate(xs), np.concatenate(ys), np.concatenate(valids)
    classes = None if schema.classes is None else len(schema.classes)
    owners = np.repeat(np.arange(len(xs)), [len(x) for x in xs])
    return Dataset(
        name, x, y, schema.task, classes, valid, owners=owners, names=tuple(names), source=source, ranged=schema.ranged
    )


def draft_schema(path: str | Path) -> str:
    """TOML text for a study's ``[data.schema]``, from the first file of a folder (by name) or from one file.

    It is accepted as a schema as it stands, and fits the file it was drafted from; its comments say what a person must
    do.
    """
    file = client_files(Path(path))[0]
    drafted = _of_arrays(file) if kind_of(file) == "npz" else _of_table(file)
    return "\n".join([_HEADER.format(file=file.name), *drafted]) + "\n"


def _of_arrays(file: Path) -> list[str]:
    """The schema of an NPZ file: labels and the range of the entries."""
    try:
        with np.load(file, allow_pickle=False) as content:
            x, y = np.asarray(content["x"], dtype=np.float64), content["y"]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(f"{file} cannot be read as npz with numeric x and y: {error}") from None
    labels = np.unique(y).tolist()
    return [
        f"# x: {len(x)} records of shape {list(x.shape[1:])}",
        *_task(labels, y if np.issubdtype(y.dtype, np.floating) else None),
        f"values = {_range(x[np.isfinite(x)])}  # the range of the entries of x, scaled to 0 … 1",
    ]


def _of_table(file: Path) -> list[str]:
    """The schema of a CSV or Parquet file: every column numeric where all its cells are numbers, else categorical."""
    delimiter = delimiter_of(file)
    columns = read_table(file, None, delimiter).columns
    target = next((name for wanted in TARGETS for name in columns if name.lower() == wanted), [*columns][-1])
    task, numeric, categorical, fill = [], [], [], []
    for name, column in columns.items():
        values, absent, wrong = numbers(column, MISSING)
        there = values[~absent]
        if name == target:
            task = _task(_distinct(column), None if wrong.any() else there)
        elif there.size and not wrong.any():
            numeric.append(f"{toml_value(name)} = {_range(there)}")
            if absent.any():
                middle = float(np.mean([there.min(), there.max()]))
                fill.append(f"{toml_value(name)} = {middle!r}  # stands in for missing cells: choose a public constant")
        else:
            found = _distinct(column)
            told = f"{len(found)} distinct values, perhaps a name or an identifier" if found else "it has no values"
            out = f"# {toml_value(name)} is left out: {told}"
            categorical.append(f"{toml_value(name)} = {toml_value(found)}" if 0 < len(found) <= MOST_VALUES else out)
    lines = [f"target = {toml_value(target)}  # a guess: is this what the model should predict?", *task]
    if delimiter != ",":
        lines.append(f"delimiter = {toml_value(delimiter)}")
    lines.append('scale = "unit"  # numbers become 0 … 1; "signed" for −1 … 1')
    lines += ["", "[data.schema.numeric]", *numeric, "", "[data.schema.categorical]", *categorical]
    return [*lines, "", "[data.schema.fill]", *fill] if fill else lines


def _task(labels: list[Any], values: Any) -> list[str]:
    """Classification where the target has few values or is no number (``values`` is None), else regression."""
    if values is None or len(labels) <= MOST_CLASSES:
        return ['task = "classification"', f"classes = {toml_value(labels)}"]
    return ['task = "regression"', f"range = {_range(values)}"]


def _distinct(column: Any) -> list[str]:
    """The distinct values of a column as text, missing ones left out, sorted."""
    found = pc.unique(words(column)).to_pylist()
    kept = [value for value in found if value is not None and value not in MISSING]
    return sorted(kept, key=lambda value: (not value.lstrip("+-").isdigit(), len(value) * value.isdigit(), value))


def _range(values: Any) -> str:
    """[low, high] of the values, widened when they are all alike."""
    low, high = float(np.min(values)), float(np.max(values))
    return toml_value([low, high if low < high else low + 1.0])
