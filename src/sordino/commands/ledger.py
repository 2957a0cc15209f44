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
    html: Annotated[Path | None, typer.Option(help="Write a page with a log of releases instead.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Print each client's statement in plain words, or write a page for whoever answers for it."""
    from sordino.privacy.groups import is_account_of
    from sordino.privacy.statement import export as told
    from sordino.privacy.statement import statement, statement_text
    from sordino.study.show import to_csv

    apart = for_programs(as_json, as_csv)
    with _ledger(path) as book:
        names = [account.client for account in book.accounts()]
        own = [one.client for one in book.accounts() if client in (None, one.client, one.owner)]
        if client is not None and not own:
            raise _unknown(client, path, names)
        if html is not None:
            from sordino.study.report.officer import write_officer

            chosen = [name for name in names if client is None or is_account_of(name, client)]
            typer.echo(f"page: {write_officer(book, html, chosen)}")
            return
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
def export(
    path: File,
    registry: Annotated[
        bool, typer.Option("--registry", help="Instead: an entry for OpenDP's public registry of deployments (YAML).")
    ] = False,
    about: Annotated[Path | None, typer.Option(help="For --registry: what no ledger knows (TOML).")] = None,
    client: Annotated[str | None, typer.Option(help="For --registry: whose account.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write it here in place of printing it.")] = None,
) -> None:
    """Print everything the ledger holds as JSON, or with --registry an entry for the public registry."""
    from sordino.privacy.statement import export as told

    if not registry and (about or client):
        raise BadInput("--about and --client go with --registry: everything is exported without it")
    with _ledger(path) as book:
        if registry:
            from sordino.study.registry import check_file_name, entry_text
            from sordino.study.registry_answers import read_answers

            if out is not None:
                check_file_name(out)
            text = entry_text(book, read_answers(about), client)
        else:
            text = json.dumps(told(book), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    _write(out, text)


@app.command("top-up")
def top_up(
    path: File,
    client: Annotated[str, typer.Option(help="Whose budget.", show_default=False)],
    epsilon: Annotated[float, typer.Option(help="How much ε to add.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why; it is recorded for ever.", show_default=False)],
    officer: Annotated[str, typer.Option(help="Who approved it.", show_default=False)],
) -> None:
    """Raise a budget: an officer's decision, recorded for ever; of a client's account its held-out records' as well."""
    from sordino.privacy.ledger import Ledger
    from sordino.privacy.living import is_held, twin

    _exists(path)
    with Ledger(path) as book:
        known = [account.client for account in book.accounts()]
        if client not in known:
            raise _unknown(client, path, known)
        for one in (client, *([] if is_held(client) or twin(client) not in known else [twin(client)])):
            book.top_up(one, epsilon, reason, officer)
        raised = book.account(client).budget
    typer.echo(f"recorded: the budget of {client} is epsilon {raised.epsilon:g} at delta {raised.delta:g} now")
    typer.echo("A raise that was decided by looking at what earlier releases showed is covered by no statement.")


@app.command("rebind")
def rebind(
    site: Annotated[Path, typer.Argument(help="The site's SITE.toml.", show_default=False)],
    officer: Annotated[str, typer.Option(help="Who decided it.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Why; it is recorded for ever.", show_default=False)],
) -> None:
    """Let a site's ledger go on under another site name, or with other records. What was spent stays spent."""
    from sordino.study.site_file import read_site

    account = read_site(site).rebind(reason, officer)
    typer.echo(f"recorded: {site} goes on with the account {account}")


def _ledger(path: Path) -> Any:
    from sordino.privacy.ledger import Ledger

    _exists(path)
    return Ledger(path, readonly=True)


def _exists(path: Path) -> None:
    if not path.exists():
        raise BadInput(f"ledger {path} does not exist")


def _unknown(client: str, path: Path, names: list[str]) -> BadInput:
    known = ", ".join(names[:10]) + (", …" if len(names) > 10 else "")
    return BadInput(f"--client {client!r} has no account in {path}: it has {known or 'none at all'}")


def _write(out: Path, text: str) -> None:
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {error.strerror}; name another file") from None
    typer.echo(f"written: {out}")
