"""What people say of a deployed product for the public registry: no ledger knows it, and nobody else may make it up."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path
from typing import Any

from sordino.errors import BadInput

CURATORS = ("Government", "Industry", "Nonprofit")
SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
PRODUCTS = (
    "Summary statistics",
    "Machine learning model",
    "Dataset",
    "Synthetic data",
    "Interactive API",
    "SQL queries",
)
RELEASES = ("One release", "Many releases")
SOURCES = ("Static", "Dynamic")

NEEDED = {
    "name": "what the product is called",
    "description": "what it is, in a sentence or two",
    "intended_use": "what it is for",
    "region": "which region the records are from, or whose laws apply",
    "publication_date": "when it was published, YYYY-MM-DD",
    "authors": 'who wrote this entry: authors = ["A. Name"]',
    "curators": 'who published it: [[curators]] with name and type = "' + '" | "'.join(CURATORS) + '"',
}
"""What a ledger cannot know and the registry requires."""
OFFERED = {
    "sector": SECTORS,
    "product": PRODUCTS,
    "release_type": RELEASES,
    "data_source": SOURCES,
    "units": None,
    "preprocessing": None,
    "justification": None,
    "utility": None,
    "actors": None,
    "more": None,
}
"""What may be said besides, and of what it must be one."""
TEXTS = (*list(NEEDED)[:4], *list(OFFERED)[5:])
"""Those that are free text."""


def read_answers(path: Path | None) -> dict[str, Any]:
    """What people say of the product; everything that is missing or makes no sense is listed at once."""
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise BadInput(f"--about {path} does not exist: {_wanted(list(NEEDED))}") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise BadInput(f"--about {path} is not valid TOML: {error}") from None
    wrong = [f"{key} is unknown" for key in table if key not in NEEDED and key not in OFFERED]
    wrong += [
        f"{key} is none of {', '.join(allowed)}"
        for key, allowed in OFFERED.items()
        if allowed is not None and key in table and table[key] not in allowed
    ]
    if "units" in table and not (type(table["units"]) is int and table["units"] > 0):
        wrong.append("units is no number of protected units")
    wrong += [f"{key} is no text" for key in TEXTS if key in table and not isinstance(table[key], str)]
    if "publication_date" in table and date_of(table["publication_date"]) is None:
        wrong.append("publication_date is no date such as 2026-03-01")
    if "authors" in table and not _texts(table["authors"]):
        wrong.append("authors is no list of names")
    curators = table.get("curators", [])
    if not isinstance(curators, list) or not all(_curator(one) for one in curators):
        wrong.append(f"curators have a name and a type, one of {', '.join(CURATORS)}")
    if wrong:
        raise BadInput(f"--about {path}: {'; '.join(wrong)}")
    missing = [key for key in NEEDED if not table.get(key)]
    if missing:
        raise BadInput(_wanted(missing))
    return table


def _wanted(missing: list[str]) -> str:
    listed = "".join(f"\n  {key}: {NEEDED[key]}" for key in missing)
    return f"an entry of the registry needs what no ledger knows; say it in a TOML file, --about FILE:{listed}"


def date_of(value: Any) -> str | None:
    """A date as YYYY-MM-DD; None where it is none."""
    try:
        return str(datetime.date.fromisoformat(str(value)))
    except ValueError:
        return None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one.strip() for one in value)


def _curator(one: Any) -> bool:
    return isinstance(one, dict) and _texts([one.get("name")]) and one.get("type") in CURATORS
