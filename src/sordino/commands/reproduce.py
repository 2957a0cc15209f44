"""``sordino reproduce``: lists what can be reproduced, or reproduces it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from sordino.commands.output import AsCsv, AsJson, for_programs, tell
from sordino.study.show import console as made_console

NAME_WIDTH = 22
OPTIONS = ("device", "quick", "seeds", "only", "data", "stack", "processes", "precision")
"""What ``papers.run`` is called with as it was given."""

Stack = Annotated[
    bool | None, typer.Option("--stack/--no-stack", help="Train runs that share a model together. Default: on a GPU.")
]
Processes = Annotated[int, typer.Option(min=1, help="How many processes share the runs.")]


class Bar:
    """Shows rounds done and time left, over all runs."""

    def __init__(self, quiet: bool) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:.0f} %"))
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self.console = made_console(stderr=True)
        self.quiet = quiet
        self.bars = Progress(*columns, *times, console=self.console, disable=quiet or not self.console.is_terminal)
        self.task = self.bars.add_task("preparing", total=None)

    def begin(self, rounds: int, runs: int, what: str) -> None:
        """Begin a phase of so many rounds of so many runs."""
        self.bars.update(self.task, description=f"{what}: {runs} runs", total=rounds, completed=0)
        self.bars.reset(self.task, total=rounds)
        if not self.quiet and not self.console.is_terminal:
            self.console.print(f"{what}: {runs} runs, {rounds} rounds in all", highlight=False)

    def advance(self, rounds: int) -> None:
        """Count rounds that are done."""
        self.bars.advance(self.task, rounds)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        if not self.quiet:
            self.bars.console.print(line, highlight=False)


def _list(experiments: Sequence[Any]) -> None:
    """What each shows, and what it costs as published: a line each for programs, wrapped for people."""
    console = made_console()
    if not console.is_terminal:
        for one in experiments:
            typer.echo(f"{one.name:<{NAME_WIDTH}}  {one.title} [estimate: {one.cost}; seeds: {one.seeds}]")
        return
    for one in experiments:
        seeds = "one seed" if one.seeds == 1 else f"{one.seeds} seeds"
        about = Text(f"{one.title}\n").append(f"{one.cost}; {seeds}", style="dim")
        console.print(Group(Text(one.name, style="bold"), Padding(about, (0, 0, 0, 4))), highlight=False)
    console.print(
        "\nTimes are estimates. With --quick: scaled down to under two minutes on two cores.", highlight=False
    )


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="What to reproduce. Without it: list everything.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Scaled down to under two minutes on two cores.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "cpu",
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds. Default: what the list says.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where it goes. Default: runs/reproduce/NAME.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the data sets. Default: SORDINO_DATA, or ./data.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only runs with these words in their labels: 'tight, Dist1|Dist2'.")
    ] = None,
    reuse: Annotated[
        list[Path] | None,
        typer.Option(help="Folder or results.json of another reproduction whose finished runs count too."),
    ] = None,
    stack: Stack = None,
    processes: Processes = 1,
    precision: Annotated[
        str, typer.Option(help="float32, or mixed: a GPU may compute activations in TF32.")
    ] = "float32",
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Reproduce a published table or figure, published beside measured. Interrupted: call it again, it goes on."""
    from sordino.beside import beside

    apart = for_programs(as_json, as_csv)
    study = beside("papers")
    if name is None:
        experiments = [study.get(one) for one in study.names()]
        rows = [{"name": one.name, "title": one.title, "cost": one.cost, "seeds": one.seeds} for one in experiments]
        return tell(as_csv, rows, rows) if apart else _list(experiments)
    bar = Bar(bool(context.find_root().params.get("quiet")))
    options = {key: context.params[key] for key in OPTIONS}
    with bar.bars:
        done = study.run(name, out, bar, reuse=reuse or (), **options)
    if apart:
        typer.echo((done.folder / ("table.csv" if as_csv else "results.json")).read_text(), nl=False)
    console = made_console(stderr=apart)
    if not apart:
        console.print(done.terminal(console.width))
    if done.about["left"]:
        console.print(f"{done.about['left']} of {done.about['runs']} runs are not made yet: call it again to go on")
    console.print(f"written: {done.folder}/table.md, table.csv, results.json", highlight=False, soft_wrap=True)
