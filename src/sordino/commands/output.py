"""What a command prints for programs: one JSON value or one CSV table on stdout, and nothing else there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from sordino.errors import BadInput

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print the rows of the table as CSV.")]


def for_programs(as_json: bool, as_csv: bool) -> bool:
    """Whether stdout is a program's, so that whatever is said goes to stderr; asked before a command does anything."""
    if as_json and as_csv:
        raise BadInput("--json and --csv print the same in two forms: keep one of them")
    return as_json or as_csv


def tell(as_csv: bool, value: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print ``value`` as JSON, or ``rows`` as CSV."""
    if as_csv:
        from sordino.study.show import to_csv

        typer.echo(to_csv(rows), nl=False)
    else:
        from sordino.study.result import to_json

        typer.echo(to_json(value, indent=1))
