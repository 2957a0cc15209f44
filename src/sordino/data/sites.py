"""Tables by name whose records come with sites, and with people: InstEval's departments, Star's schools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sordino.data.dataset import Dataset
from sordino.data.encode import encode_table, positions, unit_ids
from sordino.data.read import read_csv
from sordino.data.schema import parse_schema, word
from sordino.errors import BadInput


def site_names(sites: Mapping[str, Any]) -> tuple[str, ...]:
    """The sites' names, ``department-02`` and so on: what a site is ``called`` and its declared number."""
    digits = max(len(str(value)) for value in sites["values"])
    return tuple(f"{sites['called']}-{value:0{digits}d}" for value in sites["values"])


def read_sited(path: Path, schema: Mapping[str, Any], sites: Mapping[str, Any], high: int | None = None) -> Dataset:
    """The records of one CSV file, each with its site and, where the schema names a column of units, whose it is.

    Parameters
    ----------
    path
        The file; the data set is called like the folder that it is in.
    schema
        The public constants by which a record becomes numbers.
    sites
        The ``column`` that says where a record belongs, and the ``values`` it can have, a site each.
    high
        Where it is given, the declared classes are marks in rising order, and what is predicted is whether a mark is
        at least this one: y = 1[mark ≥ high].
    """
    parsed = parse_schema(schema)
    wanted = dict.fromkeys((*parsed.columns, sites["column"]))
    table = read_csv(path, tuple(wanted), parsed.delimiter or ",")
    x, y, valid = encode_table(table, parsed)
    owners = positions(table.columns[sites["column"]], [word(value) for value in sites["values"]])
    if (owners < 0).any():
        row = int((owners < 0).argmax())
        found = table.columns[sites["column"]][row]
        raise BadInput(
            f"{path}, row {row + 1}, column {sites['column']!r}: {found} is none of the {len(sites['values'])} "
            f"{sites['called']}s: the file is damaged, get it again"
        )
    classes = None if parsed.classes is None else len(parsed.classes)
    if high is not None and parsed.classes is not None:
        y, classes = (y >= parsed.classes.index(word(high))).astype(np.int64), 2
        schema = {**schema, "classes": [f"below {high}", f"{high} or more"]}
    dataset = Dataset(path.parent.name, x, y, parsed.task, classes, valid, ranged=parsed.ranged, schema=dict(schema))
    dataset = replace(dataset, owners=owners, names=site_names(sites))
    if parsed.unit is None:
        return dataset
    return dataset.by_unit(unit_ids(table, parsed), parsed.unit_records, parsed.unit_name)
