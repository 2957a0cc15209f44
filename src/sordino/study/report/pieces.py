"""Pieces of the page as HTML: verdict panels, tables, figure frames. Everything that comes from a result is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from sordino.study.report.figure import Chart
from sordino.study.report.gather import Group
from sordino.study.report.promises import Verdict
from sordino.study.report.traces import COLOURS, SYMBOLS


@dataclass(frozen=True)
class Cell:
    """A table cell: its HTML and, where the text alone does not sort right, the value it sorts by."""

    html: str
    value: float | None = None
    numeric: bool = False


def text(value: object) -> Cell:
    """A cell of plain text."""
    return Cell(escape(str(value)))


def number(shown: str, value: float | None) -> Cell:
    """A right-aligned cell that sorts by its value."""
    return Cell(escape(shown), value, numeric=True)


def method_cell(group: Group) -> Cell:
    """A method's name behind its mark."""
    return Cell(f'<span class="method">{mark(group.index)}<b>{escape(group.label)}</b></span>')


def mark(index: int) -> str:
    """The colour and shape of a method, as in the charts."""
    shape = SYMBOLS[index % len(SYMBOLS)]
    return (
        f'<svg class="mark c{index % COLOURS}" viewBox="-6 -6 12 12" aria-hidden="true"><use href="#s-{shape}"/></svg>'
    )


def table(identity: str, caption: str, heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A sortable table in a box of its own, so that a wide one scrolls without moving the page."""
    body = list(rows)
    numeric = [any(row[place].numeric for row in body) for place in range(len(heads))]
    head = "".join(
        f'<th scope="col"{" class=num" if right else ""}><button type="button">{escape(name)}</button></th>'
        for name, right in zip(heads, numeric, strict=True)
    )
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in body)
    label = f'aria-labelledby="{identity}-caption"'
    return (
        f'<div class="box"><p class="caption" id="{identity}-caption">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" {label}><table class="sortable" id="{identity}" {label}>'
        f"<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div></div>"
    )


def verdict_panel(verdict: Verdict, terms: str) -> str:
    """One panel of the first screen. Bad news is an alert in size, colour, sign and words."""
    kind, sign = ("good", "shield-ok") if verdict.good else ("bad", "shield-no")
    small = f'<p class="terms">Record-level (ε, δ)-differential privacy: {escape(terms)}.</p>' if terms else ""
    return (
        f'<div class="verdict {kind}">'
        f'<svg class="sign" viewBox="0 0 24 24" aria-hidden="true"><use href="#{sign}"/></svg>'
        f'<div><p class="headline">{escape(verdict.headline)}</p>'
        f'<p class="who">{escape(", ".join(verdict.methods))}</p><p>{escape(verdict.text)}</p>{small}</div></div>'
    )


def tile(name: str, value: str, detail: str) -> str:
    """A key figure."""
    return (
        f'<div class="tile"><dt>{escape(name)}</dt><dd><span class="figure">{escape(value)}</span>'
        f"<span>{escape(detail)}</span></dd></div>"
    )


def figure(chart: Chart) -> str:
    """The frame of a chart: heading, switches of the methods, the drawing with its summary, and the data as a table."""
    identity = escape(chart.id, quote=True)
    return (
        f'<figure class="card" aria-labelledby="h-{identity}"><figcaption>'
        f'<h3 id="h-{identity}">{escape(chart.title)}</h3>'
        f"<p>{escape(chart.note)}</p></figcaption>"
        f'<div class="legend" role="group" aria-label="Show or hide methods" data-chart="{identity}"></div>'
        f'<div class="chart" id="chart-{identity}" role="img" aria-label="{escape(chart.summary, quote=True)}"></div>'
        f'<div class="under"><details class="data" data-chart="{identity}"><summary>Data table</summary>'
        f"<p>{escape(chart.summary)}</p></details>"
        f'<button type="button" data-save="{identity}">Save picture</button></div></figure>'
    )


def figures(charts: Sequence[Chart], section: str) -> str:
    """The frames of one section's charts."""
    frames = "".join(figure(chart) for chart in charts if chart.section == section)
    return f'<div class="figures">{frames}</div>' if frames else ""


def _cell(cell: Cell) -> str:
    sort_by = "" if cell.value is None else f' data-v="{cell.value!r}"'
    return f"<td{' class=num' if cell.numeric else ''}{sort_by}>{cell.html}</td>"
