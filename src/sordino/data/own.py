"""Your own data: a folder with a file per client, arrays, or torch data sets. The natural split of a consortium."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.dataset import Dataset, client_names
from sordino.data.encode import Arrays, check_invalid, encode_arrays, encode_table, unit_ids, words
from sordino.data.federation import Federation
from sordino.data.read import read_by
from sordino.data.schema import Schema, array_schema, parse_schema, plain_schema, word
from sordino.data.tokens import with_word_lists
from sordino.errors import BadInput

TABLES = ("csv", "csv.gz", "parquet", "xlsx")
"""The kinds of files with named columns."""

SUFFIXES = (*(f".{kind}" for kind in TABLES), ".npz")
"""How the names of clients' files end, in small or capital letters."""

_OTHERS = (
    ".arrow", ".bz2", ".dat", ".data", ".dta", ".feather", ".gz", ".json", ".jsonl", ".npy", ".ods", ".orc", ".parq",
    ".pq", ".sas7bdat", ".sav", ".tsv", ".xls", ".xlsb", ".xlsm", ".xz", ".zip", ".zst",
)  # fmt: skip
"""Endings of files that may hold a client's records, and that sordino does not read."""

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
    """The clients in a folder: one CSV, Excel, Parquet or NPZ file each, named by the file's stem, sorted.

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
    client an array that says whose each record is, with ``unit_records`` and ``unit_name`` (``Dataset.by_unit``);
    ``tokens``: entries of x are ids of a tokenizer of your own, 0 … tokens − 1, where 0 is padding.
    """
    check_invalid(invalid)
    whose, about = options.pop("units", None), [options.pop(key, None) for key in ("unit_records", "unit_name")]
    schema = array_schema(task, classes, options.pop("tokens", None))
    called = list(names) if names is not None else client_names(len(clients))
    if len(called) != len(clients):
        raise BadInput(f"{len(called)} names for {len(clients)} clients: give one each")
    encoded = [encode_arrays(who, x, y, schema, invalid) for who, (x, y) in zip(called, clients)]
    dataset = _together(options.pop("name", "arrays"), called, encoded, schema, {"clients": "arrays"})
    dataset = replace(dataset, schema=plain_schema(schema))
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
    raw = with_word_lists(schema, Path()) if schema is not None else schema_beside(path)
    parsed = parse_schema(raw)
    read = [_read_client(file, parsed, invalid) for file in files]
    name = path.resolve().name if path.is_dir() else path.stem
    made = {"schema": dict(raw), "invalid": invalid}
    names, encoded = [stem_of(file) for file in files], [arrays for arrays, _ in read]
    noted = {
        column: tuple(w for file, (own, _) in zip(files, read) for w in _words_of(file, column, parsed, len(own[0])))
        for column in also
    }
    dataset = _together(name, names, encoded, parsed, made)
    dataset = replace(dataset, sorted_files=True, words=noted, schema=dict(raw))
    if parsed.unit is None:
        return dataset
    ids = [one for _, own in read for one in own or ()]
    return dataset.by_unit(ids, parsed.unit_records, parsed.unit_name)


def _words_of(file: Path, column: str, schema: Schema, count: int) -> list[str | None]:
    """The words of the ``count`` records that were read from a file: records of nobody were left out."""
    found = read_words(file, column, schema)
    if schema.unit is not None:
        if kind_of(file) == "npz":
            whose = [word(one) for one in read_npz(file)[schema.unit].tolist()]
        else:
            whose = unit_ids(read_by(file, [schema.unit], schema), schema)
        found = [one for one, own in zip(found, whose) if own not in schema.missing]
    if len(found) < count:
        raise BadInput(f"{file}: {column!r} has {len(found)} entries for {count} records: give one each")
    return found[:count]  # empty lines at the end are no records


def read_words(file: Path, column: str, schema: Schema) -> list[str | None]:
    """A word for every record of a client's file: the cell of a column, trimmed; None where there is none."""
    if kind_of(file) != "npz":
        found: list[str | None] = words(read_by(file, [column], schema).columns[column]).to_pylist()
        return found
    stored = read_npz(file)
    if column not in stored:
        raise BadInput(f"{file} has no array {column!r}: it has {', '.join(stored)}")
    return [str(one).strip() for one in stored[column].tolist()]


def kind_of(file: Path) -> str | None:
    """How a client's file is read: csv, csv.gz, parquet, xlsx or npz; None for any other file."""
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
        raise BadInput(f"{path} is neither a folder nor a CSV, Excel, Parquet or NPZ file: check data.folder")
    seen = sorted(file for file in path.iterdir() if not file.name.startswith("."))
    files = [file for file in seen if kind_of(file)]
    if not files:
        raise BadInput(f"{path} has no CSV, Excel, Parquet or NPZ file: put one per client there")
    stems = [stem_of(file) for file in files]
    for stem in stems:
        if stems.count(stem) > 1:
            raise BadInput(f"{path} has two files for client {stem!r}: keep one")
    known = ", ".join(SUFFIXES)
    others = [file for file in seen if file not in files and file.name != "schema.toml"]
    for file in others:
        if file.suffix.lower() in _OTHERS:
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
    return with_word_lists(content.get("data", {}).get("schema", content), file.parent)


def _read_client(file: Path, schema: Schema, invalid: str) -> tuple[Arrays, list[str] | None]:
    """A client's records, and whose each is where the schema says how to know."""
    if kind_of(file) != "npz":
        table = read_by(file, schema.columns, schema)
        arrays = encode_table(table, schema, invalid)
        return _with_units(file, arrays, unit_ids(table, schema)[: len(arrays[0])], schema, invalid)
    stored = read_npz(file)
    if not {"x", "y"} <= set(stored):
        raise BadInput(f"{file} holds {', '.join(stored) or 'nothing'}: an NPZ file needs arrays x and y")
    arrays = encode_arrays(file.name, stored["x"], stored["y"], schema, invalid)
    if schema.unit is None:
        return arrays, None
    if schema.unit not in stored or stored[schema.unit].shape != (len(arrays[0]),):
        raise BadInput(f"{file} has no array {schema.unit!r} with an entry per record: data.schema.unit names it")
    return _with_units(file, arrays, [word(one) for one in stored[schema.unit].tolist()], schema, invalid)


def read_npz(file: Path) -> dict[str, Any]:
    """The arrays of an NPZ file, by name."""
    try:
        with np.load(file, allow_pickle=False) as content:
            return {key: content[key] for key in content.files}
    except Exception as error:  # NumPy and zipfile tell damage by whatever they stumble over
        raise BadInput(f"{file} cannot be read as npz: {error}") from None


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
        name, x, y, schema.task, classes, valid, owners=owners, names=tuple(names), source=source,
        ranged=schema.ranged, tokens=schema.tokens,
    )  # fmt: skip
