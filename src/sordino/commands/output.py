"""What commands print: for people on two consoles, for programs one JSON value or CSV table on stdout and nothing else.

Also the arguments that several of them take.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from sordino.errors import BadInput
from sordino.study.show import console

StudyFile = Annotated[Path, typer.Argument(help="A study file (TOML).", show_default=False)]
Settings = Annotated[list[str], typer.Option("--set", help="Put section.key=value (a TOML value) over the study.")]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print the rows of the table as CSV.")]


@dataclass
class Shown:
    """Where a person reads results and messages, and how much of them: tracebacks (``-v``), results only (``-q``)."""

    out: Console = field(default_factory=console)
    err: Console = field(default_factory=lambda: console(stderr=True))
    verbose: bool = False
    quiet: bool = False


shown = Shown()


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


def words(text: str) -> list[str]:
    """What stands between the commas of an option."""
    return [word.strip() for word in text.split(",") if word.strip()]


def say(line: str, apart: bool = False) -> None:
    """Print a line, wrapped between words only: a path stays whole; ``apart`` from what stdout holds for a program."""
    where = shown.err if apart else shown.out
    for part in textwrap.wrap(line, where.width, break_long_words=False, break_on_hyphens=False):
        where.print(part, highlight=False, markup=False, soft_wrap=True)


def write_report(results: list[dict[str, Any]], path: Path, apart: bool = False) -> None:
    """Write the report of these runs, and say where it is."""
    from sordino.study.compare import plain_results
    from sordino.study.report import write

    write(plain_results(results), path)
    say(f"report: {path}", apart)
