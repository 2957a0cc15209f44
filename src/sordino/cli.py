"""The command line: thin. It gathers the commands; every error is one line and an exit code."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.markup import escape
from rich.text import Text

from sordino._version import __version__
from sordino.commands import card, data, federation, ledger, measure, predict, reproduce, study, survey, tune
from sordino.commands.output import AsCsv, AsJson, for_programs, shown, tell
from sordino.errors import SordinoError
from sordino.study.show import Sheet

app = typer.Typer(
    help="Federated learning in which every participant sets its own privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"sordino {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it and stop.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show results only.")] = False,
) -> None:
    shown.verbose, shown.quiet = verbose, quiet


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the runs and the report go.")] = Path("runs/demo"),
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Train digits over 12 clients with very different budgets, five methods side by side, and write a report."""
    from sordino.study.compare import summary
    from sordino.study.demo import demonstrate

    apart = for_programs(as_json, as_csv)
    results = demonstrate(out, shown.err if apart else shown.out, shown.quiet)
    if apart:
        rows = summary(results)
        tell(as_csv, {"summary": rows, "report": str(out / "report.html")}, rows)


@app.command()
def methods(as_json: AsJson = False, as_csv: AsCsv = False) -> None:
    """List the methods and the parts they are made of."""
    from sordino.methods import get, names

    found = [get(name) for name in names()]
    rows = [{"name": one.name, "private": one.private, "summary": one.summary, **one.describe()} for one in found]
    if for_programs(as_json, as_csv):
        return tell(as_csv, rows, rows)
    table = Sheet(("method", "private", "what it does"), left=("private",), prose=("what it does",))
    for one in found:
        table.add_row(one.name, "yes" if one.private else Text("NOT PRIVATE", style="red"), one.summary)
    shown.out.print(table)


COMMANDS: tuple[Callable[..., None], ...] = (
    study.plan,
    study.run,
    study.compare,
    tune.tune,
    study.report,
    measure.audit,
    measure.bench,
    card.card,
    reproduce.reproduce,
    survey.survey,
    predict.predict,
    predict.export,
)
for one in COMMANDS:
    app.command()(one)
app.add_typer(data.app, name="data")
app.add_typer(ledger.app, name="ledger")
federation.register(app)


def _end_in_order() -> None:
    """SIGTERM, which service managers send, ends a command like Ctrl-C: ledgers are sealed, and what it started ends.

    A second one changes nothing: the first is being obeyed.
    """

    def stop(number: int, frame: Any) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Run a command; turn errors into one line and an exit code: 1 internal, 2 bad input, 3 budget, 130 interrupted."""
    try:
        _end_in_order()
        if "" not in sys.path:  # the folder one is in: names such as module:attribute are found there first
            sys.path.insert(0, "")
        code = app(standalone_mode=False) or 0
        if code == 130:  # typer turns Ctrl-C into this code without a word
            raise KeyboardInterrupt
        sys.exit(code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SordinoError as error:
        if shown.verbose:
            raise
        shown.err.print(f"[bold red]error[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        hint = "give the same command again (a single run: with --resume)"
        shown.err.print(f"interrupted; nothing is lost: {hint}", highlight=False)
        sys.exit(130)
    except Exception as error:
        if shown.verbose:
            raise
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own, for a GPU
            what = (
                "out of memory; what is finished is kept: fewer --processes, a smaller batch or --device cpu need less"
            )
            shown.err.print(f"[bold red]error[/bold red] {what} (-v shows where)", highlight=False, soft_wrap=True)
        else:
            shown.err.print(f"[bold red]internal error[/bold red] {type(error).__name__}: {error} (-v shows where)")
        sys.exit(1)
