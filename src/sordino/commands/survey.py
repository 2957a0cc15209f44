"""``sordino survey``: from files that nobody may look at to a drafted study."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.commands.federation import Insecure, begin
from sordino.commands.output import AsCsv, AsJson, for_programs, shown, tell
from sordino.errors import BadInput


def survey(
    study: Annotated[Path, typer.Argument(help="A study file (TOML) with a \\[survey] table.", show_default=False)],
    set_: Annotated[list[str], typer.Option("--set", help="Put section.key=value over the study.")] = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option(help="Where the results go. Default: runs/NAME-survey.")] = None,
    plan: Annotated[bool, typer.Option("--plan", help="Only say what it costs and how precise it will be.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Ask real sites, which `sordino join`.")] = False,
    held: Annotated[int, typer.Option(min=1, help="Held-out records a site that a plan of --serve assumes.")] = 500,
    keys: Annotated[Path, typer.Option(help="Folder of the keys that `sordino certify` made.")] = Path("keys"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 9092,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted survey of --serve.")] = False,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    insecure: Insecure = False,
) -> None:
    """Ask sites what their columns hold, with noise, and draft a study: ranges, categories, missing cells, classes.

    Paid by held-out records; training budgets stay untouched. Without --serve it is rehearsed on data.folder.
    """
    from sordino.study.file import read_study
    from sordino.study.serve import serve_survey
    from sordino.study.survey.rehearse import assumed, prepare, rehearse
    from sordino.study.survey.result import DRAFTED, SURVEY, write
    from sordino.study.survey.show import figure_rows, show_plan, show_result

    apart = for_programs(as_json, as_csv)
    read = read_study(study, set_)
    folder = out or Path("runs") / f"{read.study.name}-survey"
    if resume and not serve:
        raise BadInput("--resume goes with --serve: a rehearsal is done in seconds, start it again")
    planned = None
    if not serve or plan or read.budgets.terms(0) is not None:
        planned = assumed(read, held) if serve else prepare(read)[0]
    if planned is not None:
        if plan and apart:
            about = planned.plain(read.survey.least)
            tell(as_csv, {**about, "expected": planned.expected()}, about["sites"])
        else:
            for one in show_plan(planned, read.survey.least, assumed=serve):
                (shown.err if apart else shown.out).print(one)
    if plan:
        return
    if serve:
        begin(shown.err, insecure)
        from sordino.engine.federation.certificates import Keys

        shown.err.print(f"asking {', '.join(read.deployment.sites)} at {host}:{port}", highlight=False)
        result = serve_survey(read, folder, None if insecure else Keys(keys), host, port, resume)
    else:
        result = rehearse(read)
        write(result, folder)
    if apart:
        return tell(as_csv, result, figure_rows(result))
    for one in show_result(result):
        shown.out.print(one)
    shown.out.print(f"figures: {folder / SURVEY}", highlight=False, soft_wrap=True)
    if result["draft"] is None:
        shown.err.print(f"[yellow]no study was drafted[/yellow]: {result['undrafted']}", highlight=False)
        raise typer.Exit(1)
    shown.out.print(f"study:   {folder / DRAFTED}", highlight=False, soft_wrap=True)
