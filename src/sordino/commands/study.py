"""``sordino plan``, ``run``, ``compare`` and ``report``: a study in simulation, from its file to its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from sordino.commands.output import AsCsv, AsJson, Settings, StudyFile, for_programs, say, shown, tell, write_report
from sordino.commands.reproduce import Processes, Stack
from sordino.errors import BadInput, BudgetRefused


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
        shown.out.print(view)
    if html:
        from sordino.study.report.plan import write_plan

        say(f"plan: {write_plan(view, html, read.study.name)}", apart)
    if runs:
        say(f"this is the plan of the study without its [sweep], which makes {runs} runs", apart)
    if cost:
        say(f"this is the plan of one setting alone; {in_words(cost)} ([tune])", apart)


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
    called = f"{method.name}, noise shared" if read.trust.chosen().shared else method.name
    with Live(shown.err, shown.quiet) as live, tracking as tracked:
        callbacks = [live.watch(called, read.study.seed, read.planned_rounds), tracked]
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

    with Live(shown.err, shown.quiet) as live:
        runs = sweep(read, folder, live.watch, yes, how)
    results, apart = [run.result for run in runs if run.result is not None], as_json or as_csv
    labels = [run.point.label for run in runs if run.result is not None]
    if not apart:
        shown.out.print(comparison_table(results, labels))
    for run in runs:
        if run.failed:
            say(f"failed {run.point.name}: {run.failed}", apart)
    for path in write_tables(runs, folder):
        say(f"{path.name}: {path}", apart)
    write_report(results, folder / "report.html", apart)
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
        shown.out.print(comparison_table([result]))
    if not result["private"]:
        warned = shown.err if apart else shown.out
        warned.print("[bold red]NOT PRIVATE[/bold red]: no noise was added and no budget protects anybody.")
    say(f"result: {folder / 'result.json'}", apart)
    if result.get("stopped", {}).get("refused"):
        shown.err.print(f"[bold red]budget[/bold red] {escape(result['stopped']['reason'])}", highlight=False)
        raise typer.Exit(BudgetRefused.exit_code)


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
    with Live(shown.err, shown.quiet) as live:
        results = run_all(read, folder, live.watch, Scheduler(read.study.device, stack, processes))
    if not apart:
        shown.out.print(comparison_table(results))
    write_report(results, folder / "report.html", apart)
    if apart:
        rows = summary(results)
        tell(as_csv, {"summary": rows, "report": str(folder / "report.html")}, rows)


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
    write_report([read_result(file) for file in files], out)
