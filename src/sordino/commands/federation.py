"""The commands of a deployment: certify, serve, join, status, evaluate."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sordino.commands.output import AsCsv, AsJson, for_programs, shown, tell, words
from sordino.errors import BadInput, BudgetRefused

if TYPE_CHECKING:
    from sordino.study.file import Study

Insecure = Annotated[
    bool, typer.Option("--insecure", help="No TLS and no authentication: for a trial on one machine only.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for one in (certify, serve, join, status, evaluate):
        app.command()(one)


def certify(
    folder: Annotated[Path, typer.Argument(help="Where the keys go.", show_default=False)],
    sites: Annotated[str, typer.Option(help="The sites' names, separated by commas.")] = "",
    host: Annotated[str, typer.Option(help="More names or addresses of the server, separated by commas.")] = "",
    days: Annotated[float, typer.Option(min=1, help="How long the certificates hold.")] = 365.0,
    rotate: Annotated[str, typer.Option(help="Give this site a new key; a run under way goes on with it.")] = "",
    public: Annotated[
        Path | None, typer.Option(help="With --rotate: the public key that the site made itself.")
    ] = None,
    revoke: Annotated[str, typer.Option(help="Take this site's key away for good, at once.")] = "",
) -> None:
    """Make an authority, a server certificate and a key pair for every site; replace or revoke a site's key."""
    from sordino.engine.federation import keyring
    from sordino.engine.federation.certificates import Keys
    from sordino.engine.federation.certificates import certify as make

    names, hosts = words(sites), words(host)
    if not (names or rotate or revoke):
        raise BadInput("--sites names nobody: --sites north,south")
    if len(set(names)) != len(names):
        raise BadInput(f"--sites names a site twice: {', '.join(names)}; every site has one key")
    if public is not None and not (rotate and public.is_file()):
        raise BadInput("--public goes with --rotate NAME and names the file of the new public key")
    if revoke:
        gone = keyring.revoke(Keys(folder), revoke)
        typer.echo(f"revoked: {revoke}, key {gone[:16]}…; a server that uses this folder turns it away from now on")
    if rotate:
        made = keyring.rotate(Keys(folder), rotate, None if public is None else public.read_bytes())
        typer.echo(f"rotated: {rotate} has key {made[:16]}… now, and its old key opens nothing any more")
        if public is None:
            typer.echo(f"to {rotate} only: {Keys(folder).private(rotate)}")
    if not names:
        return
    keys = make(folder, names, hosts, days)
    typer.echo(f"to everyone: {keys.authority}")
    typer.echo(f"to the server: {keys.server[0]}, {keys.server[1]}, {folder / 'sites'}/*.pub")
    for name in names:
        typer.echo(f"to {name} only: {keys.private(name)}")
    typer.echo(f"Whoever has {folder / 'ca.key'} can make certificates: keep it offline, or delete it.")


def serve(
    study: Annotated[Path, typer.Argument(help="A study file (TOML) with a \\[deployment] table.", show_default=False)],
    keys: Annotated[Path, typer.Option(help="Folder of the keys that `sordino certify` made.")] = Path("keys"),
    set_: Annotated[list[str], typer.Option("--set", help="Put section.key=value over the study.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    page: Annotated[int | None, typer.Option(help="Show a live page on this port of 127.0.0.1.")] = None,
    insecure: Insecure = False,
) -> None:
    """Train a study with real sites: starts a Flower SuperLink and coordinates the run; writes result.json."""
    from sordino.engine.federation.certificates import Keys
    from sordino.study.file import read_study
    from sordino.study.page import Page
    from sordino.study.serve import serve as run
    from sordino.study.status import line_of

    begin(shown.err, insecure)
    read = read_study(study, set_)
    if read.tune:
        raise BadInput("this study has a [tune]: 'sordino tune --sites' tries its settings under the sites' budgets")
    folder = out or Path("runs") / read.study.name

    def watch(record: dict[str, Any]) -> None:
        shown.err.print(line_of(record, read.planned_rounds), highlight=False, markup=False)

    with Page(folder, page, shown.err):
        shown.err.print(f"serving {read.study.name} at {host}:{port}; sites: {', '.join(read.deployment.sites)}")
        result = run(read, folder, None if insecure else Keys(keys), host, port, resume, watch)
    if not result["private"]:
        shown.out.print("[bold red]NOT PRIVATE[/bold red]: no noise was added and no budget protects anybody.")
    shown.out.print(f"result: {folder / 'result.json'}", highlight=False, markup=False, soft_wrap=True)
    if result.get("stopped", {}).get("refused"):
        shown.err.print(f"budget: {result['stopped']['reason']}", highlight=False, markup=False)
        raise typer.Exit(BudgetRefused.exit_code)


def join(
    site: Annotated[Path, typer.Argument(help="The site's file (SITE.toml).", show_default=False)],
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait for the server's first answer.")] = 3600.0,
    insecure: Insecure = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only look whether it could: nothing is written, charged or asked.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --check: print JSON.")] = False,
) -> None:
    """Take part as a site: the budget, the ledger and the records stay here, and this site's limits decide."""
    from sordino.study.join import join as take_part

    if as_json and not check:
        raise BadInput("--json goes with --check: a site that takes part prints no table")
    begin(shown.err, insecure)
    if check:
        _check(site, insecure, as_json)
        return
    try:
        take_part(site, insecure=insecure, wait=wait)
    except KeyboardInterrupt:
        shown.err.print("left the federation; what was charged stays charged, and the same command joins again")
        sys.exit(130)


def _check(site: Path, insecure: bool, as_json: bool) -> None:
    """Print what a look at everything that a site needs found; exit code 2 where something would keep it away."""
    from rich.table import Table
    from rich.text import Text

    from sordino.study.result import to_json
    from sordino.study.site_check import FAILED, check_site, passed, plain

    found = check_site(site, insecure)
    if as_json:
        typer.echo(to_json(plain(found), indent=1))
    else:
        table = Table(box=None, show_header=False, pad_edge=False)
        for one in found:
            colour = {"ok": "green", FAILED: "bold red"}.get(one.state, "dim")
            table.add_row(f"[{colour}]{one.state}[/{colour}]", one.check, Text(one.found))
            if one.remedy is not None:
                table.add_row("", "", Text(f"what to do: {one.remedy}", style="yellow"))
        shown.out.print(table)
    if not passed(found):
        raise typer.Exit(BadInput.exit_code)


def status(
    folder: Annotated[Path, typer.Argument(help="The server's run folder.", show_default=False)],
    page: Annotated[int | None, typer.Option(help="Show a live page on this port of 127.0.0.1.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Say where a deployed run stands: rounds, sites seen, refusals, budgets."""
    from sordino.study.page import Page
    from sordino.study.status import look, table

    apart, seen = for_programs(as_json, as_csv), look(folder)
    if apart:
        tell(as_csv, seen, seen["sites"])
    else:
        shown.out.print(table(seen))
    if page is not None:
        with Page(folder, page, shown.err):
            while True:
                time.sleep(3600)


def evaluate(
    model: Annotated[Path, typer.Argument(help="A finished run's folder, or a saved run.", show_default=False)],
    study: Annotated[Path, typer.Argument(help="A study file (TOML): whose records judge it.", show_default=False)],
    sites: Annotated[bool, typer.Option("--sites", help="Ask the real sites of \\[deployment], which join.")] = False,
    keys: Annotated[Path, typer.Option(help="Folder of the keys that `sordino certify` made.")] = Path("keys"),
    set_: Annotated[list[str], typer.Option("--set", help="Put section.key=value over the study.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="The folder. Default: runs/NAME-evaluation.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted evaluation.")] = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    insecure: Insecure = False,
) -> None:
    """Judge a finished model on held-out records, one paid release a site; writes evaluation.json.

    The clients of the study rehearse it here; with --sites the real ones are asked, who need not have trained it.
    """
    from sordino.engine.checkpoint import write_atomic
    from sordino.engine.federation.certificates import Keys
    from sordino.study.file import read_study
    from sordino.study.finished import asked, rehearse, set_up_evaluation
    from sordino.study.judged import judged_table
    from sordino.study.result import to_json
    from sordino.study.run import load
    from sordino.study.serve import serve as run

    apart = for_programs(as_json, as_csv)
    finished = load(model)
    read = asked(read_study(study, set_), finished)
    folder = out or Path("runs") / f"{read.study.name}-evaluation"
    if sites:
        begin(shown.err, insecure)
        read = set_up_evaluation(read, finished)
        shown.err.print(f"asking at {host}:{port}; sites: {', '.join(read.deployment.sites)}", highlight=False)
        found = run(read, folder, None if insecure else Keys(keys), host, port, resume, judged=finished)
    else:
        found = rehearse(read, finished)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "evaluation.json", to_json(found, indent=1).encode())
    if apart:
        return tell(as_csv, found, found["evaluation"])
    if not found["private"]:
        shown.out.print("[bold red]NOT PRIVATE[/bold red]: no noise was added and no budget protects anybody.")
    shown.out.print(judged_table(found["evaluation"]))
    if (spent := found["evaluation"][0]["epsilon"]) is not None:
        shown.out.print(f"paid by held-out records: ε at most {spent:.4g}; low and high: 95 % intervals")
    for name, why in found["refused"].items():
        shown.out.print(f"{name} is not counted: {why}", highlight=False, markup=False)
    shown.out.print(f"evaluation: {folder / 'evaluation.json'}", highlight=False, markup=False, soft_wrap=True)


def tune_with_sites(
    read: Study, folder: Path, keys: Path, host: str, port: int, resume: bool, insecure: bool
) -> dict[str, Any]:
    """Serve a search (`sordino tune --sites`) and say how it goes; returns its result."""
    from sordino.engine.federation.certificates import Keys
    from sordino.study.serve import serve_tune
    from sordino.study.status import line_of

    begun = 0

    def watch(record: dict[str, Any]) -> None:
        nonlocal begun
        begun += record["round"] == 1
        shown.err.print(f"setting {begun}, {line_of(record, None)}", highlight=False, markup=False)

    begin(shown.err, insecure)
    shown.err.print(f"tuning {read.study.name} at {host}:{port}; sites: {', '.join(read.deployment.sites)}")
    return serve_tune(read, folder, None if insecure else Keys(keys), host, port, resume, watch)


def begin(console: Any, insecure: bool) -> None:
    """Modules of one's own are found in the working directory; the log goes to the terminal; no TLS is warned of."""
    from rich.logging import RichHandler

    sys.path.insert(0, str(Path.cwd()))
    handler = RichHandler(console=console, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", datefmt="%X", handlers=[handler])
    logging.getLogger("sordino").setLevel(logging.INFO)
    if insecure:
        console.print(
            "[bold red]WARNING[/bold red] --insecure: no TLS, no authentication, no signatures. Anybody on the way can "
            "read and change everything, and anybody can pose as the server or as a site. For a trial on one machine "
            "only."
        )
