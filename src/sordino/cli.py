"""The command line: thin. It parses, calls ``study`` and prints; every error is one line and an exit code."""

from __future__ import annotations

import signal
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from sordino._version import __version__
from sordino.commands import card, federation, ledger, predict, reproduce, survey
from sordino.commands.output import AsCsv, AsJson, for_programs, tell
from sordino.commands.reproduce import Processes, Stack
from sordino.errors import BadInput, BudgetRefused, SordinoError
from sordino.study.show import Sheet, console

app = typer.Typer(
    help="Federated learning in which every participant sets its own privacy.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Data sets: what is there, how to get one, a schema for your own.", no_args_is_help=True)
app.add_typer(data_app, name="data")
app.add_typer(ledger.app, name="ledger")
app.command()(card.card)
app.command()(reproduce.reproduce)
app.command()(survey.survey)
app.command()(predict.predict)
app.command()(predict.export)

out_console: Console = console()
err_console: Console = console(stderr=True)
_state = {"verbose": False, "quiet": False}

StudyFile = Annotated[Path, typer.Argument(help="A study file (TOML).", show_default=False)]
Settings = Annotated[list[str], typer.Option("--set", help="Put section.key=value (a TOML value) over the study.")]


def _say(line: str, apart: bool = False) -> None:
    """Print a line, wrapped between words only: a path stays whole; ``apart`` from what stdout holds for a program."""
    where = err_console if apart else out_console
    for part in textwrap.wrap(line, where.width, break_long_words=False, break_on_hyphens=False):
        where.print(part, highlight=False, markup=False, soft_wrap=True)


def _report(results: list[dict[str, Any]], path: Path, apart: bool = False) -> None:
    from sordino.study.compare import plain_results
    from sordino.study.report import write

    write(plain_results(results), path)
    _say(f"report: {path}", apart)


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
    _state.update(verbose=verbose, quiet=quiet)


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
    results = demonstrate(out, err_console if apart else out_console, _state["quiet"])
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
    out_console.print(table)


@app.command()
def plan(
    study: StudyFile,
    set_: Settings = [],  # noqa: B006
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with a trade-off explorer.")] = None,
    bandwidth: Annotated[
        float, typer.Option(help="Megabits a second between a site and the server, for the hours of a deployed run.")
    ] = 10.0,
) -> None:
    """Say what a study would do, without touching records: noise, cost and warnings per client."""
    from sordino.study.file import read_study
    from sordino.study.run import plan as make
    from sordino.study.sweep import points
    from sordino.study.traffic import describe_traffic
    from sordino.study.tune import in_words, search

    apart = for_programs(as_json, as_csv)
    read = read_study(study, set_)
    runs = len(points(read)) if read.sweep else 0
    cost = search(read, Path("runs") / read.study.name).describe() if read.tune else None
    for name in read.compare.methods:
        read.chosen_method(name)
    view = replace(make(read.federation(), method=read.chosen_method(), **read.arguments()), tuning=cost)
    view = replace(view, deployment=describe_traffic(read, view.plan, bandwidth))
    if apart:
        tell(as_csv, view.to_dict(), view.clients)
    elif not html:
        out_console.print(view)
    if html:
        from sordino.study.report.plan import write_plan

        _say(f"plan: {write_plan(view, html, read.study.name)}", apart)
    if runs:
        _say(f"this is the plan of the study without its [sweep], which makes {runs} runs", apart)
    if cost:
        _say(f"this is the plan of one setting alone; {in_words(cost)} ([tune])", apart)


@app.command()
def run(
    study: StudyFile,
    set_: Settings = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="The run folder. Default: runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    ledger: Annotated[Path | None, typer.Option(help="A ledger that is cumulative over runs.")] = None,
    track: Annotated[str | None, typer.Option(help="Log to tensorboard or mlflow, like study.track.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Run a \\[sweep] of any size.")] = False,
    baselines: Annotated[
        bool, typer.Option("--baselines", help="Also train every client alone, and all without noise, to compare with.")
    ] = False,
    stack: Stack = None,
    processes: Annotated[
        int, typer.Option(min=1, help="How many processes share the clients of a run, or the runs of a \\[sweep].")
    ] = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Train a study; writes result.json, the ledger, checkpoints and a log into the run folder.

    A study with a \\[sweep] is trained once for every combination; call it again to go on.
    """
    from sordino.privacy.ledger_format import check_path
    from sordino.study.file import read_study
    from sordino.study.processes import Task, train_shared
    from sordino.study.progress import Live
    from sordino.study.run import train
    from sordino.study.schedule import Scheduler
    from sordino.study.track import tracker

    for_programs(as_json, as_csv)
    read = read_study(study, [*set_, *([f"study.track={track}"] if track else [])])
    folder = out or Path("runs") / read.study.name
    if read.tune:
        raise BadInput("this study has a [tune]: use 'sordino tune', which tries its settings under one budget")
    if resume and not read.sweep and not (folder / "study.json").exists():
        raise BadInput(f"--resume: {folder} holds no run to go on with; leave it out, or name the folder by --out")
    if read.sweep:
        if baselines or read.study.baselines:
            raise BadInput("baselines do not go with a [sweep]: run one of its settings with --baselines")
        if ledger:
            raise BadInput("--ledger does not go with a [sweep]: each of its runs has a ledger of its own")
        return _sweep(read, folder, yes, Scheduler(read.study.device, stack, processes), as_json, as_csv)
    if stack:
        raise BadInput("--stack is for many runs, and this study is one: give it a [sweep]")
    if ledger is not None:
        check_path(ledger.resolve(), readonly=False)
    clients, method = read.federation() if processes == 1 else None, read.chosen_method()
    tracking = tracker(read.study.track, folder, read, folder.name)
    shown = f"{method.name}, noise shared" if read.trust.chosen().shared else method.name
    with Live(err_console, _state["quiet"]) as live, tracking as tracked:
        callbacks = [live.watch(shown, read.study.seed, read.planned_rounds), tracked]
        if clients is None:
            task = Task(read, folder, ledger, resume, baselines or read.study.baselines)
            result = train_shared(task, processes, callbacks)
        else:
            result = train(
                clients,
                method=method,
                out=folder,
                ledger=ledger,
                resume=resume,
                device=read.study.device,
                deterministic=read.study.deterministic,
                name=read.study.name,
                baselines=baselines or read.study.baselines,
                callbacks=callbacks,
                **read.arguments(),
            ).result
        tracked.finish(result)
    _conclude(result, folder, as_json, as_csv)


def _sweep(read: Any, folder: Path, yes: bool, how: Any, as_json: bool, as_csv: bool) -> None:
    from sordino.study.compare import comparison_table, summary
    from sordino.study.progress import Live
    from sordino.study.sweep import sweep
    from sordino.study.tidy import write_tables

    with Live(err_console, _state["quiet"]) as live:
        runs = sweep(read, folder, live.watch, yes, how)
    results, apart = [run.result for run in runs if run.result is not None], as_json or as_csv
    labels = [run.point.label for run in runs if run.result is not None]
    if not apart:
        out_console.print(comparison_table(results, labels))
    for run in runs:
        if run.failed:
            _say(f"failed {run.point.name}: {run.failed}", apart)
    for path in write_tables(runs, folder):
        _say(f"{path.name}: {path}", apart)
    _report(results, folder / "report.html", apart)
    if apart:
        rows = summary(results, labels)
        failed = {run.point.name: run.failed for run in runs if run.failed}
        tell(as_csv, {"summary": rows, "failed": failed, "report": str(folder / "report.html")}, rows)
    raise typer.Exit(1 if any(run.failed for run in runs) else 0)


def _conclude(result: dict[str, Any], folder: Path, as_json: bool, as_csv: bool) -> None:
    from sordino.study.compare import comparison_table, summary

    apart = as_json or as_csv
    if apart:
        rows = summary([result])
        tell(as_csv, {**result, "summary": rows[0]}, rows)
    else:
        out_console.print(comparison_table([result]))
    if not result["private"]:
        warned = err_console if apart else out_console
        warned.print("[bold red]NOT PRIVATE[/bold red]: no noise was added and no budget protects anybody.")
    _say(f"result: {folder / 'result.json'}", apart)
    if result.get("stopped", {}).get("refused"):
        err_console.print(f"[bold red]budget[/bold red] {escape(result['stopped']['reason'])}", highlight=False)
        raise typer.Exit(BudgetRefused.exit_code)


@app.command()
def compare(
    study: StudyFile,
    set_: Settings = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder of the runs. Default: runs/NAME-compare.")] = None,
    stack: Stack = None,
    processes: Processes = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Run several methods and seeds of one study; prints a table and writes a report. Interrupted: call it again."""
    from sordino.study.compare import compare as run_all
    from sordino.study.compare import comparison_table, summary
    from sordino.study.file import read_study
    from sordino.study.progress import Live
    from sordino.study.schedule import Scheduler

    apart = for_programs(as_json, as_csv)
    read = read_study(study, set_)
    folder = out or Path("runs") / f"{read.study.name}-compare"
    with Live(err_console, _state["quiet"]) as live:
        results = run_all(read, folder, live.watch, Scheduler(read.study.device, stack, processes))
    if not apart:
        out_console.print(comparison_table(results))
    _report(results, folder / "report.html", apart)
    if apart:
        rows = summary(results)
        tell(as_csv, {"summary": rows, "report": str(folder / "report.html")}, rows)


@app.command()
def tune(
    study: StudyFile,
    set_: Settings = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Folder of the search. Default: runs/NAME-tune.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="A ledger that is cumulative over runs.")] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    sites: Annotated[
        bool, typer.Option("--sites", help="Train with the real sites of \\[deployment], which join.")
    ] = False,
    keys: Annotated[Path, typer.Option(help="Folder of the keys that `sordino certify` made.")] = Path("keys"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted search with sites.")] = False,
    insecure: federation.Insecure = False,
) -> None:
    """Try the settings of a \\[tune] under one budget and keep the best by paid evaluation; all of it is charged.

    A simulation, or with --sites the real thing. Interrupted: give the same command again (with --sites and --resume),
    and nothing is paid twice.
    """
    from sordino.privacy.ledger_format import check_path
    from sordino.privacy.words import epsilon_in_words
    from sordino.study.evaluated import search_table, told_apart
    from sordino.study.file import read_study
    from sordino.study.progress import Live
    from sordino.study.tune import in_words
    from sordino.study.tune import tune as run_all

    apart = for_programs(as_json, as_csv)
    read = read_study(study, set_)
    folder = out or Path("runs") / f"{read.study.name}-tune"
    if not read.tune:
        raise BadInput("this study has no [tune]: add one, such as \"training.lr\" = [0.1, 0.3], or use 'sordino run'")
    if resume and not sites:
        raise BadInput("--resume goes with --sites: a simulation goes on when the same command is given again")
    if sites:
        if ledger is not None:
            raise BadInput("--ledger does not go with --sites: every site pays from a ledger of its own")
        result = federation.tune_with_sites(read, folder, keys, host, port, resume, insecure)
    else:
        if ledger is not None:
            check_path(ledger.resolve(), readonly=False)
        with Live(err_console, _state["quiet"] or apart) as live:
            result = run_all(read, folder, ledger, live.watch).result
    tuned, privacy = result["tuned"], result["privacy"]
    if apart:
        tried = [{**one, "winner": place == tuned["winner"]} for place, one in enumerate(tuned["tried"])]
        return tell(as_csv, {**tuned, "privacy": privacy}, tried)
    out_console.print(search_table(result))
    _say(in_words(tuned))
    if not told_apart(result):
        _say("the winner's interval overlaps others': chance may have chosen it; fewer settings are told apart better")
    table = Sheet(("client", "ε of everything", "of", "training", "held-out"))
    for one in privacy:
        figures = [one.get(key) for key in ("spent_epsilon", "epsilon", "training_epsilon", "held_epsilon")]
        table.add_row(one["client"], *("–" if value is None else epsilon_in_words(value) for value in figures))
    out_console.print(table)
    _say(f"result: {folder / 'result.json'}")
    _report([result], folder / "report.html")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders or result.json files.", show_default=False)],
    out: Annotated[Path, typer.Option(help="The HTML file.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML report of one run, or of several side by side."""
    from sordino.study.result import read_result

    files = [one / "result.json" if one.is_dir() else one for one in runs]
    twice = [file for place, file in enumerate(files) if file.resolve() in [one.resolve() for one in files[:place]]]
    if twice:
        raise BadInput(f"{twice[0]} is named twice: it would count as two runs; name it once")
    _report([read_result(file) for file in files], out)


@app.command()
def audit(
    names: Annotated[list[str] | None, typer.Argument(help="Methods. Default: every private one.")] = None,
    epsilon: Annotated[float, typer.Option(help="The budget to audit at.")] = 2.0,
    canaries: Annotated[int, typer.Option(help="How many canaries.")] = 100_000,
    unit_records: Annotated[int, typer.Option(help="Records of a canary: above 1 it is a person.")] = 1,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Attack every method's real client step with canaries; fails when a proven lower bound exceeds the claimed ε."""
    from sordino.methods import get
    from sordino.methods import names as all_names
    from sordino.privacy.trust import EVERYBODY
    from sordino.study.audit import Trial, audit_method

    apart, rows = for_programs(as_json, as_csv), []
    of = "" if unit_records == 1 else f" of {unit_records} records"
    title = f"{canaries:,} canaries{of}, bounds true with 99 % confidence each"
    columns = ("method", "sampling", "claimed ε", "one-run", "Gaussian", "verdict")
    table = Sheet(columns, left=("sampling",), title=title, notes=[f"noise per site: claims hold {EVERYBODY}"])
    with err_console.status("auditing") as status:
        for name in names or [n for n in all_names() if get(n).private]:
            for rate in (1.0, 0.1):
                status.update(f"auditing {name} at rate {rate:g}")
                trial = Trial(epsilon=epsilon, rate=rate, canaries=canaries, unit_records=unit_records)
                found = audit_method(name, trial)
                bounds = {"claimed": found.claimed, "one_run": found.one_run, "gaussian": found.gaussian}
                rows.append({"method": name, "sampling": "poisson", "rate": rate, **bounds, "passed": found.passed})
                verdict = Text("holds", "green") if found.passed else Text("BROKEN", "bold red")
                table.add_row(name, f"poisson {rate:g}", *(f"{value:.3f}" for value in bounds.values()), verdict)
    if apart:
        tell(as_csv, {"canaries": canaries, "epsilon": epsilon, "audits": rows}, rows)
    else:
        out_console.print(table)
    raise typer.Exit(0 if all(row["passed"] for row in rows) else 1)


@app.command()
def bench(
    work: Annotated[str, typer.Option(help="Workloads, by comma: W1 to W4, W3-large-stem.")] = "W1,W2,W3,W4",
    peers: Annotated[
        str, typer.Option(help="Beside plain: plain-channels-last, opacus, ghost, vmap, flower, sordino-running, ….")
    ] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    deterministic: Annotated[bool, typer.Option(help="On a GPU: repeat rounds bit for bit, as runs do.")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="Counted passes, interleaved.")] = 3,
    memory: Annotated[bool, typer.Option(help="Also measure peak memory, each in a process of its own.")] = True,
    growth: Annotated[bool, typer.Option("--growth", help="Instead: how time and memory grow.")] = False,
    many: Annotated[bool, typer.Option("--many", help="With --growth: also 100,000 clients (minutes).")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --growth: so many processes share the clients of a round.")
    ] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here; - prints them.")] = None,
    as_csv: AsCsv = False,
) -> None:
    """Time private rounds against plain PyTorch and other libraries, in the same minute, as ratios."""
    from sordino.beside import beside

    benchmark, printed = beside("bench"), str(json_file) == "-"
    apart = for_programs(printed, as_csv)
    if (many or processes > 1) and not growth:
        raise BadInput("--many and --processes go with --growth: add it, or leave them out")
    with err_console.status("benchmarking") as status:
        if growth and device != "cpu":
            raise BadInput("--growth measures a CPU: leave --device out")
        if growth:
            curves = benchmark.growth.growth(show=status.update, many=many, processes=processes)
            found, table = {"growth": curves, "_meta": benchmark.about(1)}, benchmark.growth.growth_table(curves)
            rows = benchmark.growth.growth_rows(curves)
        else:
            how = {"device": device, "deterministic": deterministic}
            found = benchmark.bench(_words(work), _words(peers), repeats, memory, status.update, **how)
            table, rows = benchmark.comparison(found), benchmark.rows(found)
    if apart:
        tell(as_csv, found, rows)
    else:
        out_console.print(table)
    if json_file and not printed:
        json_file.write_text(benchmark.to_text(found))


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


@data_app.command("list")
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
    out_console.print(table)


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="The data set.", show_default=False)],
    folder: Annotated[Path | None, typer.Option(help="Where to put it. Default: SORDINO_DATA, or ./data.")] = None,
) -> None:
    """Obtain a standard data set with this machine's own package clients, checked against its checksums."""
    from rich.progress import Progress

    from sordino.data import get

    with Progress(console=err_console, disable=_state["quiet"]) as progress:
        task = progress.add_task(f"getting {name}", total=None)

        def show(done: int, total: int, what: str) -> None:
            progress.update(task, completed=done, total=total, description=what)

        where = get(name, folder, progress=show)
    _say(f"{name} is in {where}")


@data_app.command("schema")
def data_schema(folder: Annotated[Path, typer.Argument(help="A folder of client files, or one file.")]) -> None:
    """Draft a schema from one example file, for a person to check."""
    from sordino.data import draft_schema

    typer.echo(draft_schema(folder))


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
        if _state["verbose"]:
            raise
        err_console.print(f"[bold red]error[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        hint = "give the same command again (a single run: with --resume)"
        err_console.print(f"interrupted; nothing is lost: {hint}", highlight=False)
        sys.exit(130)
    except Exception as error:
        if _state["verbose"]:
            raise
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's own, for a GPU
            what = (
                "out of memory; what is finished is kept: fewer --processes, a smaller batch or --device cpu need less"
            )
            err_console.print(f"[bold red]error[/bold red] {what} (-v shows where)", highlight=False, soft_wrap=True)
        else:
            err_console.print(f"[bold red]internal error[/bold red] {type(error).__name__}: {error} (-v shows where)")
        sys.exit(1)
