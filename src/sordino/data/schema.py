"""A schema: the public constants by which every record is turned into numbers, one at a time (rule R8).

Nothing is learnt from records. A number v in a column declared [low, high] is clipped to that range and becomes
u = (v − low)/(high − low), or with "log" u = ln(1 + v − low)/ln(1 + high − low); scale "unit" keeps u in [0, 1], scale
"signed" gives 2u − 1 in [−1, 1]. A categorical column becomes one 0/1 column per declared value and one more, "other",
for anything else. A text column becomes the ids of its tokens (``data.tokens``). A class label becomes its place in the
declared list, or the answer to a declared question (``data.target``); a regression target is scaled like a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.target import Rule, grouped, split_target
from sordino.data.tokens import MOST_IDS, Layout, Tokenizer, parse_tokenizer
from sordino.data.units import UNIT_NAME, UNIT_RECORDS, check_unit_name, check_unit_records
from sordino.errors import BadInput

MISSING = ("", "NA", "N/A", "NaN", "nan", "null", "None")
WHOLE = r"^([+-]?[0-9]+)\.0+$"
"""A whole number that is written with a point."""

MOST_COLUMNS = 100_000
"""The most columns that a file without a header is said to have."""

_KEYS = {
    "target", "task", "classes", "range", "numeric", "categorical", "fill", "missing", "scale", "delimiter", "values",
    "unit", "unit_records", "unit_name", "header", "columns", "positive", "text", "tokens",
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A declared range [low, high], and whether values in it are scaled logarithmically."""

    low: float
    high: float
    log: bool = False

    def scaled(self, values: npt.NDArray[np.floating], scale: str) -> npt.NDArray[np.float64]:
        """Clip to [low, high], then u as in the module's docstring (unit), or 2u − 1 (signed)."""
        over = np.clip(values.astype(np.float64), self.low, self.high) - self.low
        width = self.high - self.low
        unit = np.log1p(over) / math.log1p(width) if self.log else over / width
        return unit if scale == "unit" else 2.0 * unit - 1.0

    def unscaled(self, scaled: npt.NDArray[np.floating], scale: str, clip: bool = True) -> npt.NDArray[np.float64]:
        """The values that ``scaled`` makes these of; what lies outside becomes the nearer end of [low, high].

        Without ``clip`` it goes on beyond the range as it is inside.
        """
        unit = scaled.astype(np.float64) if scale == "unit" else (scaled.astype(np.float64) + 1.0) / 2.0
        unit, width = np.clip(unit, 0.0, 1.0) if clip else unit, self.high - self.low
        return self.low + (np.expm1(unit * math.log1p(width)) if self.log else unit * width)


@dataclass(frozen=True)
class Schema:
    """What the columns mean, declared in advance.

    Attributes
    ----------
    target, task, classes, interval
        The target column; the labels in order (classification), or the target's range (regression).
    rule
        The question that makes two classes of the target, where classes are not its values themselves.
    numeric, categorical
        Declared ranges and declared values by column.
    fill
        The constant that stands in for a missing cell, by column.
    delimiter
        What stands between the cells of a line; by default what the file's header has most of, or a comma.
    names
        What the columns are called in files without a header, in order; empty: c1, c2, … as far as they are named.
        None: a file's first line says it.
    missing
        Words and numbers that mean "no value"; an empty cell and NaN always do.
    values
        For NPZ files, the range of the entries of ``x``; None leaves them as they are.
    text
        Declared tokenizers by column. A record is then a row of whole numbers, the ids of ``data.tokens``.
    ids
        For NPZ files whose ``x`` has token ids already: how many different ones there are. None: numbers.
    unit, unit_records, unit_name
        The column (of NPZ files, the array) that says whose a record is, which makes that unit what is protected; how
        many records of a unit count at most; the word for a unit. None: every record is a unit.
    """

    target: str
    task: str
    classes: tuple[str, ...] | None
    interval: Interval | None = None
    numeric: dict[str, Interval] = field(default_factory=dict)
    categorical: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fill: dict[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = MISSING
    scale: str = "unit"
    delimiter: str | None = None
    values: Interval | None = None
    text: dict[str, Tokenizer] = field(default_factory=dict)
    ids: int | None = None
    rule: Rule | None = None
    names: tuple[str, ...] | None = None
    unit: str | None = None
    unit_records: int = UNIT_RECORDS
    unit_name: str = UNIT_NAME

    @property
    def features(self) -> tuple[str, ...]:
        """The names of the columns of x, in order."""
        if self.layout is not None:
            return self.layout.features
        hot = [f"{column}={value}" for column, values in self.categorical.items() for value in (*values, "other")]
        return (*self.numeric, *hot)

    @property
    def ranged(self) -> tuple[int, float, float] | None:
        """How many of the first columns of x are numbers in a declared range, and the range they are scaled to."""
        low = 0.0 if self.scale == "unit" else -1.0
        return (len(self.numeric), low, 1.0) if self.features and not self.text else None

    @property
    def layout(self) -> Layout | None:
        """Where columns lie in a record of token ids; None where records are numbers."""
        return Layout(self.text, tuple(self.numeric), self.categorical) if self.text else None

    @property
    def tokens(self) -> int | None:
        """How many different ids records are made of, padding and unknown included; None where they are numbers."""
        return self.ids if self.layout is None else self.layout.tokens

    @property
    def encoded(self) -> tuple[str, ...]:
        """The columns that records are encoded from."""
        return (*self.numeric, *self.categorical, *self.text)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of a file that are read at all."""
        whose = () if self.unit is None or self.unit in self.encoded else (self.unit,)
        return (*self.encoded, self.target, *whose)


def parse_schema(raw: Mapping[str, Any]) -> Schema:
    """The schema in a plain table (as in a study file), or an error that names the key and the remedy."""
    if not isinstance(raw, Mapping):
        raise BadInput(f"data.schema is {raw!r}: it is a table with target, task, classes, numeric, categorical, text")
    for key in sorted(set(raw) - _KEYS):
        raise BadInput(f"data.schema.{key} is unknown: the keys are {', '.join(sorted(_KEYS))}")
    task, scale = raw.get("task", "classification"), raw.get("scale", "unit")
    if task not in ("classification", "regression"):
        raise BadInput(f"data.schema.task is {task!r}: use classification or regression")
    if scale not in ("unit", "signed"):
        raise BadInput(f"data.schema.scale is {scale!r}: use unit (0 to 1) or signed (−1 to 1)")
    target, rule = _target(raw)
    schema = Schema(
        target=target,
        task=task,
        classes=_classes(raw, task, rule),
        interval=_interval(raw.get("range"), "range") if task == "regression" else None,
        numeric={str(c): _interval(v, f"numeric.{c}") for c, v in _table(raw, "numeric").items()},
        categorical={str(c): _values(v, f"categorical.{c}") for c, v in _table(raw, "categorical").items()},
        fill=_table(raw, "fill"),
        missing=missing_words(raw.get("missing", MISSING), "data.schema.missing"),
        scale=scale,
        values=_interval(raw["values"], "values") if "values" in raw else None,
        text={str(c): parse_tokenizer(v, str(c)) for c, v in _table(raw, "text").items()},
        ids=_ids(raw),
        rule=rule,
        **_layout(raw),
        **_unit(raw, target),
    )
    _check_roles(schema)
    return schema


def _target(raw: Mapping[str, Any]) -> tuple[str, Rule | None]:
    """The target's column, and the question that makes two classes of it."""
    target, rule = split_target(raw)
    if "positive" not in raw:
        return target, None if rule is None else replace(rule, words=tuple(map(word, rule.words)))
    if "classes" in raw:
        raise BadInput("data.schema has classes and positive: keep positive (two classes), or list all classes")
    if raw.get("task", "classification") != "classification":
        raise BadInput("data.schema.positive makes two classes: use task = 'classification', or leave it out")
    return target, grouped(_values(raw["positive"], "positive"))


def _classes(raw: Mapping[str, Any], task: str, rule: Rule | None) -> tuple[str, ...] | None:
    if task != "classification":
        return None
    return _values(raw.get("classes"), "classes") if rule is None else rule.names


def _layout(raw: Mapping[str, Any]) -> dict[str, Any]:
    """How cells lie in a file: what stands between them, and what columns are called where no header says it.

    The first line of a file without a header is a record, which must not decide how others are read.
    """
    header, delimiter, columns = raw.get("header", True), raw.get("delimiter"), raw.get("columns")
    if not isinstance(header, bool):
        raise BadInput(f"data.schema.header is {header!r}: it is true (the first line has the names) or false")
    if header:
        if columns is not None:
            raise BadInput("data.schema.columns names the columns of files without a header: add header = false")
        return {"delimiter": None if delimiter is None else str(delimiter)}
    if isinstance(columns, int) and not isinstance(columns, bool) and 1 <= columns <= MOST_COLUMNS:
        columns = [f"c{k + 1}" for k in range(columns)]
    names = () if columns is None else tuple(str(name).strip() for name in _listed(columns, "columns"))
    return {"delimiter": "," if delimiter is None else str(delimiter), "names": names}


def missing_words(listed: Any, key: str) -> tuple[str, ...]:
    """The declared words and numbers for "no value", as text to compare cells with; an empty cell is always one."""
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise BadInput(f"{key} is {listed!r}: list the words that mean 'no value', such as ['?', '-9']")
    return tuple(dict.fromkeys(("", *map(word, listed))))


def _ids(raw: Mapping[str, Any]) -> int | None:
    """How many token ids the arrays of NPZ files are made of."""
    if "tokens" not in raw:
        return None
    for key in ("values", "numeric", "categorical", "text"):
        if key in raw:
            raise BadInput(f"data.schema has tokens (NPZ files of token ids) and {key}: keep one of the two")
    return check_ids(raw["tokens"], "data.schema.tokens")


def check_ids(value: Any, key: str) -> int:
    """How many token ids there are, or an error."""
    if type(value) is not int or not 2 <= value <= MOST_IDS:
        raise BadInput(f"{key} is {value!r}: it is how many token ids there are, from 2 to {MOST_IDS}")
    return value


def _unit(raw: Mapping[str, Any], target: str) -> dict[str, Any]:
    """Which column says whose a record is, how many of a unit's records count, and what a unit is called."""
    column = raw.get("unit")
    if column is None:
        for key in ("unit_records", "unit_name"):
            if key in raw:
                raise BadInput(f"data.schema.{key} is given without data.schema.unit: name the column of units")
        return {}
    if not isinstance(column, str) or not column:
        raise BadInput(f"data.schema.unit is {column!r}: it is the column that says whose a record is")
    if column == target:
        raise BadInput(f"data.schema.unit is {column!r}, which is the target: what is predicted is no unit's name")
    return {
        "unit": column,
        "unit_records": check_unit_records(raw.get("unit_records", UNIT_RECORDS), "data.schema.unit_records"),
        "unit_name": check_unit_name(raw.get("unit_name", UNIT_NAME), "data.schema.unit_name"),
    }


def array_schema(task: str, classes: int | Sequence[Any] | None, tokens: int | None = None) -> Schema:
    """The schema of arrays that are numbers already: declared labels for classification, and nothing is scaled.

    ``tokens``: of arrays of token ids, how many there are.
    """
    if task not in ("classification", "regression"):
        raise BadInput(f"task is {task!r}: use classification or regression")
    if task == "classification" and classes is None:
        raise BadInput("classes is missing: declare how many classes there are, or list the labels")
    ids = None if tokens is None else check_ids(tokens, "tokens")
    return Schema("y", task, _values(classes, "classes") if task == "classification" else None, ids=ids)


def plain_schema(schema: Schema) -> dict[str, Any]:
    """The table of a schema of arrays that are numbers already; ``known_schema`` reads it."""
    classes = {} if schema.classes is None else {"classes": list(schema.classes)}
    return {"task": schema.task, **classes, **({} if schema.ids is None else {"tokens": schema.ids})}


def known_schema(raw: Mapping[str, Any]) -> Schema:
    """The schema in the table of a finished run: of a study file, or of arrays that are numbers already."""
    if set(raw) <= {"task", "classes", "tokens"}:
        return array_schema(str(raw.get("task", "classification")), raw.get("classes"), raw.get("tokens"))
    return parse_schema(raw)


def word(value: object) -> str:
    """One declared value as text to compare cells with: trimmed, 1.0 written as 1, a bool in small letters."""
    return str(value).lower() if isinstance(value, bool) else re.sub(WHOLE, r"\1", str(value).strip())


def _check_roles(schema: Schema) -> None:
    """A column has one role, and a fill constant suits its column."""
    for column in schema.columns:
        if schema.columns.count(column) > 1:
            raise BadInput(
                f"data.schema gives column {column!r} two roles: use one of numeric, categorical, text, target"
            )
    for column in schema.columns if schema.names else ():
        if column not in (schema.names or ()):
            known = ", ".join(schema.names or ())
            raise BadInput(f"data.schema.columns has no {column!r}, which the schema reads: it has {known}")
    for column, value in schema.fill.items():
        told = f"data.schema.fill.{column} is {value!r}"
        if column in schema.numeric:
            low, high = schema.numeric[column].low, schema.numeric[column].high
            if not is_finite(value):
                raise BadInput(f"{told}: a numeric column needs a number")
            if not low <= value <= high:
                raise BadInput(
                    f"{told}, outside the column's range {low:g} … {high:g}: it would be cut to its edge; use a "
                    "constant inside"
                )
        elif column in schema.text:
            if not isinstance(value, str):
                raise BadInput(f"{told}: a text column needs a text, such as '' for one without words")
        elif column not in schema.categorical:
            raise BadInput(f"data.schema.fill.{column}: there is no such numeric, categorical or text column")
        elif word(value) not in schema.categorical[column]:
            raise BadInput(f"{told}: use one of the declared values")
    if schema.delimiter is not None and len(schema.delimiter) != 1:
        raise BadInput(f"data.schema.delimiter is {schema.delimiter!r}: it must be one character")


def is_finite(value: Any) -> bool:
    """Whether a declared value is a finite number, and no truth value."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def _table(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key, {})
    if not isinstance(value, Mapping):
        raise BadInput(f"data.schema.{key} is {value!r}: it is a table of columns")
    return dict(value)


def _interval(value: Any, key: str) -> Interval:
    """[low, high] or [low, high, "log"]."""
    listed = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    bounds, rest = listed[:2], listed[2:]
    numbers = len(bounds) == 2 and all(map(is_finite, bounds))
    if not numbers or not 0 < float(bounds[1]) - float(bounds[0]) < math.inf or rest not in ([], ["log"]):
        raise BadInput(
            f"data.schema.{key} is {value!r}: declare a range [low, high] with low < high, or [low, high, 'log']"
        )
    return Interval(float(bounds[0]), float(bounds[1]), bool(rest))


def _values(value: Any, key: str) -> tuple[str, ...]:
    """A list of distinct declared values; of classes, at least two, and a number k stands for 0, 1, …, k − 1."""
    if key == "classes" and isinstance(value, int) and not isinstance(value, bool):
        value = list(range(value))
    declared = _listed([word(item) for item in _listed(value, key)], key)
    if key == "classes" and len(declared) < 2:
        raise BadInput(f"data.schema.classes is {value!r}: declare at least two labels")
    return declared


def _listed(value: Any, key: str) -> tuple[Any, ...]:
    """A list that is not empty, of distinct entries."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise BadInput(f"data.schema.{key} is {value!r}: declare the list of values it can have")
    if len(set(map(str, value))) != len(value):
        raise BadInput(f"data.schema.{key} declares a value twice: {value!r}")
    return tuple(value)
