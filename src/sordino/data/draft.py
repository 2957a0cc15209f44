"""A first draft of a schema from one file, for a person to check: ``sordino data schema FOLDER``.

The draft is a schema as it stands, and fits the file; every guess in it says what it rests on.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.encode import Floats
from sordino.data.guess import LONG_TEXT, MANY_TEXTS, Column, Missing, Opened, columns_of, open_file
from sordino.data.own import client_files, kind_of, read_npz
from sordino.data.read import EMPTY
from sordino.data.schema import word
from sordino.data.target import split_target
from sordino.data.toml import toml_value
from sordino.errors import BadInput

TARGETS = ("target", "label", "class", "outcome", "diagnosis", "y")
"""Column names that are taken for the target, in this order of preference; otherwise the last column that can be."""

MOST_VALUES = MANY_TEXTS
"""A column of words with more distinct ones than this is left out, unless it is prose: it may be a name."""

MOST_CLASSES = 20
"""A numeric target with more distinct values than this is drafted as regression."""

MOST_CATEGORIES = 10
"""A column with at most so many whole numbers may hold codes."""

STEP, MOST_WORDS = 16, 512
"""A text's length is drafted as a multiple of the one, and at most the other."""

ALL_DIFFERENT = 20
"""So many values, all of them different, look like identifiers."""

_HEADER = """\
# Drafted from {file} alone. CHECK EVERY LINE BEFORE USE.
# All ranges and value lists below were READ OFF THE RECORDS OF THIS ONE FILE: they are no public knowledge, they
# may give away single records, and other clients' data may lie outside them. Replace them by what is known without
# looking at any record (physical limits, code books, agreed categories) before this schema is shared.

[data.schema]"""


def draft_schema(path: str | Path) -> str:
    """TOML text for a study's ``[data.schema]``, from the first file of a folder (by name) or from one file.

    It is accepted as a schema as it stands, and fits the file it was drafted from; its comments say what a person must
    do.
    """
    file = client_files(Path(path))[0]
    drafted = _of_arrays(file) if kind_of(file) == "npz" else _of_table(file)
    return "\n".join([_HEADER.format(file=toml_value(file.name)[1:-1]), *drafted]) + "\n"


def _of_arrays(file: Path) -> list[str]:
    """The schema of an NPZ file: labels and the range of the entries."""
    stored = read_npz(file)
    if not {"x", "y"} <= set(stored):
        raise BadInput(f"{file} cannot be read as npz with x and y: it holds {', '.join(stored) or 'nothing'}")
    x, y = stored["x"], stored["y"]
    if x.dtype.kind not in "biuf" or y.dtype.kind not in "biufUS" or y.shape != x.shape[:1] or x.ndim < 2:
        raise BadInput(
            f"{file}: x is {x.dtype} of shape {x.shape} and y is {y.dtype} of shape {y.shape}: x needs a row of "
            "numbers per record, y one number or word"
        )
    finite = x[np.isfinite(x)].astype(np.float64)
    if not finite.size:
        raise BadInput(f"{file} has no records with numbers in x: there is nothing to draft from")
    values = y[np.isfinite(y)].astype(np.float64) if y.dtype.kind in "biuf" else None
    labels = np.unique(y if values is None or y.dtype.kind == "b" else values).tolist()
    if not labels or _range(finite) is None:
        raise BadInput(f"{file}: y has no values, or those of x are too far apart: there is nothing to draft from")
    return [
        f"# x: {len(x)} records of shape {list(x.shape[1:])}",
        *_task([word(one) if isinstance(one, bytes | bool) else one for one in labels], values),
        f"values = {_range(finite)}  # the range of the entries of x, scaled to 0 … 1",
    ]


def _of_table(file: Path) -> list[str]:
    """The schema of a table: every column numeric where all its cells are numbers, else categorical."""
    opened = open_file(file)
    columns, missing = columns_of(opened.table)
    if not any(column.cells for column in columns):
        raise BadInput(f"{file} has nothing to draft a schema from: {_nothing(opened)}")
    target = _target(file, columns)
    lines = [
        f"# {opened.table.rows} lines with records, {len(columns)} columns",
        *_layout(opened),
        *_missing(missing),
        *_about(target),
    ]
    tables: dict[str, list[str]] = {"numeric": [], "categorical": [], "text": [], "fill": []}
    for column in columns:
        if column is not target:
            lines += _sorted_in(column, tables)
    if not any(line[0] != "#" for name in ("numeric", "categorical", "text") for line in tables[name]):
        raise BadInput(
            f"{file} has no column to predict {target.name!r} from: a schema needs a target and at least one column "
            "with numbers, a few words or texts"
        )
    lines.append('scale = "unit"  # numbers become 0 … 1; "signed" for −1 … 1')
    tables["fill"].append("# where cells of other columns are missing in other files, these need a constant here too")
    for name, body in tables.items():
        if name == "text" and not body:
            continue
        lines += ["", f"[data.schema.{name}]", *body]
    return lines


def _nothing(opened: Opened) -> str:
    broken = [f"in row {row} {why}" for row, why in opened.table.broken.items() if why != EMPTY]
    if opened.twice:
        return "its columns have no names of their own"
    return broken[0] if broken else "it has no records"


def _layout(opened: Opened) -> list[str]:
    """Lines about the file itself: no header, another delimiter, lines that cannot be taken apart."""
    lines = []
    if opened.names is not None:
        lines.append(f"header = false  # {opened.why}; write true if it has the names of the columns")
        lines.append(f"columns = {toml_value(opened.names)}  # put their names here, and into the lines below")
    if opened.delimiter != ",":
        lines.append(f"delimiter = {toml_value(opened.delimiter)}")
    for name in opened.twice:
        lines.append(f"# {toml_value(name)} is left out: several columns have this name, give each its own")
    broken = opened.table.broken
    if broken:
        row, why = min(broken.items())
        lines.append(
            f"# {len(broken)} lines cannot be taken apart (row {row}: {why}): correct them, or keep them as null rows "
            "with data.invalid = 'null'"
        )
    return lines


def _missing(missing: Missing) -> list[str]:
    """The words for "no value", where there are others than the usual ones, and what may be further ones."""
    declared = [one for one in missing.words if one]
    lines = [f"missing = {toml_value(declared)}  # found {'; '.join(missing.told)}"] if missing.told else []
    return [*lines, *(f"# {remark}" for remark in missing.perhaps)]


def _target(file: Path, columns: list[Column]) -> Column:
    """The column that is taken for the target."""
    usable = [one for one in columns if _reason(one) is None and split_target({"target": one.name})[1] is None]
    named = [one for wanted in TARGETS for one in usable if one.name.lower() == wanted]
    varied = sorted((one for one in usable[::-1] if len(one.counts) > 1), key=lambda one: one.absent > 0)
    for one in (*named, *varied, *usable[::-1]):
        return one
    raise BadInput(
        f"{file} has no column that a model could predict: it needs one with numbers, or with at most "
        f"{MOST_VALUES} words"
    )


def _about(target: Column) -> list[str]:
    """The target, its task, and other ways to make classes of it."""
    found = target.sorted_words()
    lines = [f"target = {toml_value(target.name)}  # a guess: is this what the model should predict?"]
    lines += _task(found, target.values if target.numeric else None)
    if 2 < len(found) <= MOST_CLASSES and lines[1] == 'task = "classification"':
        rule = f" or target = {toml_value(f'{target.name} > {found[0]}')}" if target.whole else ""
        lines.append(f"# two classes instead of {len(found)}: positive = {toml_value(found[1:])} for classes,{rule}")
        lines[-1] = lines[-1].removesuffix(",")
    if target.absent:
        lines.append(
            f"# {target.absent} records have no {toml_value(target.name)}: they are refused, or null rows with "
            "data.invalid = 'null'"
        )
    return lines


def _task(labels: list[Any], values: Floats | None) -> list[str]:
    """Classification where the target has few whole values or is no number (``values`` is None), else regression."""
    whole = values is None or (bool((values == np.floor(values)).all()) and len(labels) <= MOST_CLASSES)
    bounds = None if whole or values is None else _range(values)
    if bounds is not None:
        return ['task = "regression"', f"range = {bounds}"]
    if len(labels) > 1:
        return ['task = "classification"', f"classes = {toml_value(labels)}"]
    other = "other" if labels != ["other"] else "another"
    told = f"# this file has {toml_value(labels[0])} alone: put the other labels here"
    return ['task = "classification"', f"classes = {toml_value([*labels, other])}  {told}"]


def _sorted_in(column: Column, tables: dict[str, list[str]]) -> list[str]:
    """Put a column into its table with what its role rests on; a unit of privacy that it may be is returned."""
    key, reason = toml_value(column.name), _reason(column)
    if column.name and column.prose:
        tables["text"].append(_text(column))
        if column.absent:
            tables["fill"].append(f'{key} = ""  # stands in for {column.absent} missing texts: one without words')
        return []
    if reason is not None:
        tables["numeric" if column.numeric else "categorical"].append(f"# {key} is left out: {reason}")
        return _unit(column) if column.cells > len(column.counts) and "repeat" in reason else []
    found = column.sorted_words()
    if not column.numeric:
        tables["categorical"].append(f"{key} = {toml_value(found)}")
        return []
    line = f"{key} = {_range(column.values)}"
    if column.whole and 2 < len(found) <= MOST_CATEGORIES and column.cells >= 2 * len(found):
        line += f"  # if these whole numbers are codes, move it to categorical: {key} = {toml_value(found)}"
    tables["numeric"].append(line)
    if column.absent:
        low, high = float(column.values.min()), float(column.values.max())
        tables["fill"].append(
            f"{key} = {toml_value(low / 2 + high / 2)}  # stands in for {column.absent} missing cells: choose a public "
            "constant"
        )
    return []


def _text(column: Column) -> str:
    """A text column with the length that most of its texts have; nothing else of it is read off the records."""
    most = int(np.percentile(column.lengths(), 95))
    length = min(MOST_WORDS, STEP * max(1, math.ceil(most / STEP)))
    how = f'{{tokens = "words", vocabulary = 4096, length = {length}}}'
    told = f"a guess: free text? 19 of 20 have at most {most} words; leave it out if it holds names"
    return f"{toml_value(column.name)} = {how}  # {told}"


def _unit(column: Column) -> list[str]:
    most = max(column.counts.values())
    return [
        f"# unit = {toml_value(column.name)}  # {len(column.counts)} values over {column.cells} records, up to {most} "
        "each: if it says whose a record is, this protects a person with all of their records"
    ]


def _reason(column: Column) -> str | None:
    """Why a column is left out; None where it can be used."""
    distinct, cells = len(column.counts), column.cells
    if not cells:
        return "it has no values"
    if not column.name:
        return "it has no name"
    if column.nested:
        return "its cells are lists or tables"
    if column.commas:
        return "its numbers have decimal commas: save the file with decimal points"
    if column.dates:
        return "it holds dates: make a number of them first, such as an age"
    if column.prose or max(map(len, column.counts)) > LONG_TEXT:
        return "it has long texts"
    if column.named_person and distinct > 1:
        if distinct == cells:
            return f"{distinct} distinct values, no two alike, as identifiers have"
        if distinct > MOST_CATEGORIES and (column.whole or not column.numeric):
            return f"{distinct} distinct values that repeat, as persons' identifiers do"
    if column.numeric:
        if cells >= ALL_DIFFERENT and column.counting:
            return f"{distinct} distinct values that count the lines"
        return "its numbers are too far apart" if _range(column.values) is None else None
    if distinct > MOST_VALUES or cells == distinct >= ALL_DIFFERENT:
        told = "repeat, perhaps of persons" if cells >= 1.5 * distinct else "perhaps a name or an identifier"
        return f"{distinct} distinct values, {told}"
    return None


def _range(values: Any) -> str | None:
    """[low, high] of the values, widened when they are all alike; None where no float holds the difference."""
    low, high = float(np.min(values)), float(np.max(values))
    if low == high:
        low, high = (low, low + 1.0) if abs(low) < 1e15 else (min(low, 0.0), max(low, 0.0))
    return toml_value([low, high]) if math.isfinite(high - low) else None
