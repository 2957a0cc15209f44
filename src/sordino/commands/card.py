"""``sordino card``: what is handed over with a model."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated

import typer

from sordino.errors import BadInput


def card(
    run: Annotated[Path, typer.Argument(help="A finished run's folder, or its result.json.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Write it here in place of printing it.")] = None,
) -> None:
    """Write a model card (Markdown): data, method, promises in plain words, what is not covered, metrics, checksums.

    Where the weights lie beside the result, they are held against its checksum first.
    """
    from sordino.study.report.card import card_text
    from sordino.study.report.page import write_page
    from sordino.study.result import load_run, read_result, to_json

    file = run / "result.json" if run.is_dir() else run
    result = read_result(file)
    beside = file.parent / "model.safetensors"
    if beside.exists() and load_run(beside)[0]["checksum"] != result["checksum"]:
        raise BadInput(f"{beside} holds another model than {file} is of: their checksums differ")
    files = [one for one in (file, file.parent / "study.json") if one.exists()]
    sums = {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in files}
    text = card_text(json.loads(to_json(result)), sums)
    if out is None:
        typer.echo(text, nl=False)
    else:
        typer.echo(f"card: {write_page(text, out)}")
