"""``sordino predict`` and ``sordino export``: what a finished model is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sordino.commands.output import shown
from sordino.errors import BadInput

if TYPE_CHECKING:
    from sordino.study.prepared import Run

RunPath = Annotated[Path, typer.Argument(help="A finished run's folder, or a saved run.", show_default=False)]
Client = Annotated[str | None, typer.Option(help="Whose own model to use, where every client has one.")]


def predict(
    run: RunPath,
    file: Annotated[Path, typer.Argument(help="Records: CSV, Parquet or NPZ; no target needed.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where they go; - is the terminal.")] = Path("-"),
    client: Client = None,
    threshold: Annotated[
        str | None, typer.Option(help="Of two classes: the P from which on the second is answered, or 'chosen'.")
    ] = None,
    id_column: Annotated[str | None, typer.Option("--id", help="A column to tell rows by, such as a number.")] = None,
    as_json: Annotated[bool, typer.Option("--json/--csv", help="JSON, or a CSV table.")] = False,
) -> None:
    """Predict for the records in a file: a class by its name with probabilities, or a number in the target's unit.

    One row for every record, in order. A record that cannot be encoded has no prediction, and the reason beside it.
    """
    from sordino.engine.checkpoint import write_atomic
    from sordino.study.result import to_json

    found = _loaded(run, client).predict(file, client, threshold, id_column)
    text = to_json(list(found.rows()), indent=1) + "\n" if as_json else found.csv()
    if str(out) == "-":
        typer.echo(text, nl=False)
    else:
        write_atomic(out, text.encode())
        shown.err.print(f"predictions: {out}", highlight=False, soft_wrap=True)
    if found.missing:
        shown.err.print(
            f"{found.missing} of {len(found)} records have no prediction: the last column says why", highlight=False
        )


def export(
    run: RunPath,
    file: Annotated[Path, typer.Argument(help="Where it goes: NAME.pt2 or NAME.onnx.", show_default=False)],
    client: Client = None,
) -> None:
    """Write a finished model for programs without sordino: by the file's ending torch.export's (.pt2) or ONNX (.onnx).

    It takes encoded records, and gives what `predict` gives: probabilities, or numbers in the target's unit.
    """
    formats = {".pt2": "torch", ".onnx": "onnx"}
    if file.suffix not in formats:
        raise BadInput(f"{file} has another ending than {' or '.join(formats)}: the ending says which format is wanted")
    _loaded(run, client).export(file, formats[file.suffix], client)
    typer.echo(f"exported: {file}")


def _loaded(path: Path, client: str | None) -> Run:
    """The run; says on stderr that nobody was protected, or that there are better models for clients, where so."""
    from sordino.study.run import load

    run = load(path)
    if not run.result["private"]:
        shown.err.print(
            "[bold red]NOT PRIVATE[/bold red]: this model was trained without noise, and may give away single records "
            "of its training data."
        )
    if run.result.get("personal") and client is None:
        there = "sites keep them" if run.personal is None else "--client NAME uses a client's"
        shown.err.print(f"every client has a model of its own, and this is the common one: {there}", highlight=False)
    return run
