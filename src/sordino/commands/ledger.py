"""``sordino ledger``: what a client has spent, and whether its ledger is sound."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sordino.commands.output import AsCsv, AsJson, for_programs
from sordino.errors import BadInput

app = typer.Typer(help="A client's ledger: what it has spent, whether it is sound.", no_args_is_help=True)

File = Annotated[Path, typer.Argument(help="The ledger.", show_default=False)]


@app.command("show")
def show(
    path: File,
    client: Annotated[str | None, typer.Option(help="One client only.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print each client's statement in plain words."""
    from sordino.privacy.statement import export as told
    from sordino.privacy.statement import statement, statement_text
    from sordino.study.show import to_csv

    apart = for_programs(as_json, as_csv)
    with _ledger(path) as book:
        names = [account.client for account in book.accounts()]
        own = [one.client for one in book.accounts() if client in (None, one.client, one.owner)]
        if client is not None and not own:
            known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
            raise BadInput(f"--client {client!r} has no account in {path}: it has {known or 'none at all'}")
        if apart:
            found = told(book, own)["statements"]
            typer.echo(to_csv(found) if as_csv else json.dumps(found, indent=1, ensure_ascii=False), nl=as_json)
            return
        for name in own:
            typer.echo(statement_text(statement(book, name)) + "\n")


@app.command("verify")
def verify(path: File) -> None:
    """Check every byte of the ledger, also while a site has it open."""
    with _ledger(path) as book:
        sealed = book.verify()
    typer.echo(f"{path} is sound")
    if not sealed:
        typer.echo(
            "It has no seal: a process is writing to it, or was killed while it did. Entries and stored releases were "
            "checked; bytes that none of them uses are covered again once it was opened and closed."
        )


@app.command("export")
def export(path: File) -> None:
    """Print everything the ledger holds as JSON."""
    from sordino.privacy.statement import export as told

    with _ledger(path) as book:
        typer.echo(json.dumps(told(book), indent=1, ensure_ascii=False))


@app.command("rebind")
def rebind(
    site: Annotated[Path, typer.Argument(help="The site's SITE.toml.", show_default=False)],
    officer: Annotated[str, typer.Option(help="Who decided it.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why; it is recorded for ever.", show_default=False)],
) -> None:
    """Let a site's ledger go on under another site name, or with other records. What was spent stays spent."""
    from sordino.study.site_file import read_site

    account = read_site(site).rebind(reason, officer)
    typer.echo(f"recorded: {site} goes on with the account {account!r}")


def _ledger(path: Path) -> Any:
    from sordino.privacy.ledger import Ledger

    if not path.exists():
        raise BadInput(f"ledger {path} does not exist")
    return Ledger(path, readonly=True)
