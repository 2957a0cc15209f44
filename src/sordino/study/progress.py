"""What a person sees while a run trains: round, accuracy, loss, spent ε, time left."""

from __future__ import annotations

from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sordino.server.choosing import DECIDING
from sordino.study.evaluated import in_words

SHOWN = 8


"""Finished runs whose lines stay on the screen."""


class Live:
    """A live progress line per run; plain lines every few rounds when the output is not a terminal."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.console = console
        self.quiet = quiet
        self.bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[seen]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bars.stop()

    def watch(self, name: str, seed: int, rounds: int | None) -> Any:
        """A callback that shows one run's rounds; None where their number is not known yet."""
        for done in [one for one in self.bars.tasks if one.finished][:-SHOWN]:
            self.bars.update(done.id, visible=False)
        task = self.bars.add_task(f"{name} (seed {seed})", total=rounds, seen="")
        every, of = (50, "") if rounds is None else (max(1, rounds // 5), f"/{rounds}")

        def show(record: dict[str, Any]) -> None:
            seen = _line(record)
            self.bars.update(task, completed=record["round"], seen=seen)
            if not self.quiet and not self.console.is_terminal and record["round"] % every == 0:
                self.console.print(f"{name} (seed {seed}) round {record['round']}{of}  {seen}", highlight=False)

        return show


def _line(record: dict[str, Any]) -> str:
    parts = []
    if record.get("accuracy") is not None:
        parts.append(f"accuracy {100 * record['accuracy']:.1f} %")
    if record.get("loss") is not None:
        parts.append(f"loss {record['loss']:.3f}" if record["loss"] < 1e4 else f"loss {record['loss']:.2e}")
    paid = next((one for one in record.get("evaluation") or () if one["metric"] in DECIDING), None)
    if paid is not None:
        parts.append(f"evaluated {in_words(paid)}")
    spent = record.get("spent_epsilon")
    if spent:
        parts.append(f"ε {spent['min']:.2f}/{spent['median']:.2f}/{spent['max']:.2f}")
    return "  ".join(parts)
