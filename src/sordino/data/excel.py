"""The first sheet of an Excel file as rows of text. Needs openpyxl: ``pip install 'sordino[excel]'``."""

from __future__ import annotations

import warnings
from datetime import date, datetime, time
from pathlib import Path
from typing import Any

from sordino.errors import BadInput

Rows = list[list[str | None]]


def sheet_rows(path: Path) -> Rows:
    """The rows of the first sheet, each up to its last cell that holds something.

    Numbers are written as Python does, truth values in small letters, dates and times as ISO 8601 has them; a formula
    is what it came to when the file was last saved. Of merged cells the first has the value and the others have none.
    Empty rows after the last that holds something are not there: a sheet cannot tell an empty last record from none.
    """
    rows = [_trimmed([_text(cell) for cell in row]) for row in _cells(path)]
    while rows and not rows[-1]:
        rows.pop()
    return rows


def below_blank(rows: Rows) -> Rows:
    """The rows from the first that holds something: the one with the names of the columns."""
    return rows[next((k for k, row in enumerate(rows) if row), len(rows)) :]


def _cells(path: Path) -> list[tuple[Any, ...]]:
    try:
        from openpyxl import load_workbook
    except ImportError:
        raise BadInput(
            f"{path} is an Excel file, and openpyxl, which reads it, is not installed: `pip install 'sordino[excel]'`, "
            "or save it as CSV"
        ) from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about styles and the like, which are not read
            book = load_workbook(path, read_only=True, data_only=True)
            try:
                sheet = book.worksheets[0]
                sheet.reset_dimensions()  # what a file says about its size may be wrong, and rows would be lost
                return list(sheet.iter_rows(values_only=True))
            finally:
                book.close()
    except Exception as error:  # openpyxl tells damage by whatever its parsers stumble over
        told = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadInput(
            f"{path} cannot be read as xlsx: {told}; it is damaged, protected by a password or of another kind: save "
            "it again, or as CSV"
        ) from None


def _trimmed(row: list[str | None]) -> list[str | None]:
    while row and row[-1] is None:
        row.pop()
    return row


def _text(cell: Any) -> str | None:
    """One cell as text; None where nothing is in it but blanks."""
    if cell is None:
        return None
    if isinstance(cell, bool):
        return "true" if cell else "false"
    if isinstance(cell, datetime | date | time):
        return cell.isoformat()
    return str(cell) if str(cell).strip() else None
