"""``sordino tune``: settings tried under one budget, simulated or with real sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sordino.commands.federation import Insecure, tune_with_sites
from sordino.commands.output import AsCsv, AsJson, Settings, StudyFile, for_programs, say, shown, tell, write_report
from sordino.errors import BadInput
from sordino.study.show import Sheet


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
    insecure: Insecure = False,
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
        result = tune_with_sites(read, folder, keys, host, port, resume, insecure)
    else:
        if ledger is not None:
            check_path(ledger.resolve(), readonly=False)
        with Live(shown.err, shown.quiet or apart) as live:
            result = run_all(read, folder, ledger, live.watch).result
    tuned, privacy = result["tuned"], result["privacy"]
    if apart:
        tried = [{**one, "winner": place == tuned["winner"]} for place, one in enumerate(tuned["tried"])]
        return tell(as_csv, {**tuned, "privacy": privacy}, tried)
    shown.out.print(search_table(result))
    say(in_words(tuned))
    if not told_apart(result):
        say("the winner's interval overlaps others': chance may have chosen it; fewer settings are told apart better")
    table = Sheet(("client", "ε of everything", "of", "training", "held-out"))
    for one in privacy:
        figures = [one.get(key) for key in ("spent_epsilon", "epsilon", "training_epsilon", "held_epsilon")]
        table.add_row(one["client"], *("–" if value is None else epsilon_in_words(value) for value in figures))
    shown.out.print(table)
    say(f"result: {folder / 'result.json'}")
    write_report([result], folder / "report.html")
