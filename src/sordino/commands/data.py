"""``sordino data list``, ``get`` and ``schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.commands.output import AsCsv, AsJson, for_programs, say, shown, tell
from sordino.study.show import Sheet

app = typer.Typer(help="Data sets: what is there, how to get one, a schema for your own.", no_args_is_help=True)


@app.command("list")
def data_list(
    folder: Annotated[Path | None, typer.Option(help="Where standard data sets lie.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Say which data sets are there and how to get the others."""
    from sordino.data import available

    columns, rows = ("name", "what", "records", "status", "get"), available(folder)
    if for_programs(as_json, as_csv):
        return tell(as_csv, rows, rows)
    table = Sheet(columns, prose=("what", "status", "get"))
    for row in rows:
        table.add_row(*(str(row.get(column) or "") for column in columns))
    shown.out.print(table)


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="The data set.", show_default=False)],
    folder: Annotated[Path | None, typer.Option(help="Where to put it. Default: SORDINO_DATA, or ./data.")] = None,
) -> None:
    """Obtain a standard data set with this machine's own package clients, checked against its checksums."""
    from rich.progress import Progress

    from sordino.data import get

    with Progress(console=shown.err, disable=shown.quiet) as progress:
        task = progress.add_task(f"getting {name}", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        where = get(name, folder, progress=show)
    say(f"{name} is in {where}")


@app.command("schema")
def data_schema(folder: Annotated[Path, typer.Argument(help="A folder of client files, or one file.")]) -> None:
    """Draft a schema from one example file, for a person to check."""
    from sordino.data import draft_schema

    typer.echo(draft_schema(folder))
