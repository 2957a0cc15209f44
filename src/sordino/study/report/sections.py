"""The five questions of the report, each as a block of HTML, and the client sheets as compact data for the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from html import escape
from typing import Any

from sordino.study.report.charts import MAX_DIAGNOSTICS
from sordino.study.report.gather import Client, Group, diagnostics, flat
from sordino.study.report.numbers import (
    MISSING,
    Spread,
    as_epsilon,
    duration,
    finites,
    listed,
    percent,
    plain,
    plus_minus,
    short,
    span,
    upward,
)
from sordino.study.report.pieces import Cell, method_cell, number, table, text, tile, verdict_panel
from sordino.study.report.promises import (
    PHRASES,
    Sheet,
    Standing,
    loosest,
    releases,
    share,
    standing,
    statement,
    terms,
    verdicts,
)


def verdict(groups: Sequence[Group]) -> str:
    """The first screen: what holds for whom, bad news first."""
    named = terms(groups)
    return "".join(verdict_panel(one, named if one.good else "") for one in verdicts(groups))


def simulation(groups: Sequence[Group]) -> str:
    """What a simulation's figures mean: nobody was protected by it, and what a deployment would promise."""
    told = "One machine held every client's records, and all chance came from a seeded generator."
    if any(group.private for group in groups):
        told += (
            " The figures say what a deployment that makes the same releases with secret noise and sampling "
            "would guarantee."
        )
    return f'<p class="simulation"><strong>This was a simulation.</strong> {told}</p>'


def key_figures(groups: Sequence[Group]) -> str:
    """Clients, budgets, what was spent, and the replace-one figure."""
    clients = [(client, run) for group in groups for run in group.runs for client in run.clients]
    guarded = [client for client, run in clients if standing(client, run.private) in (Standing.KEPT, Standing.EXCEEDED)]
    tiles = [tile("Clients", str(len({client.name for client, _ in clients})), _seeds(groups))]
    budgets = finites(client.epsilon for client in guarded)
    if budgets:
        middle = statistics.median(budgets)
        tiles.append(tile("Budgets set", f"ε {span(budgets, as_epsilon)}", f"median {as_epsilon(middle)}"))
        most = max(guarded, key=lambda client: client.spent or 0.0)
        tiles.append(
            tile("Most spent", f"ε {as_epsilon(most.spent)}", f"{most.name}, of {as_epsilon(most.epsilon)} allowed")
        )
        tightest = max((share(client) or 0.0) for client in guarded)
        tiles.append(tile("Largest share used", percent(tightest, 1), "of any client's budget"))
        ended = [client.ends for client in guarded if client.ends is not None]
        if ended:
            count = sum(math.isfinite(one) for one in ended)
            tiles.append(tile("Budgets used up", f"{count} of {len(ended)}", "client records: no further turn is paid"))
        replaced = finites(client.replace_one for client in guarded)
        if replaced:
            tiles.append(
                tile("Under replace-one", f"ε {as_epsilon(max(replaced))}", "the largest, one record exchanged")
            )
    return "".join(tiles)


def privacy_table(groups: Sequence[Group]) -> str:
    """Method by method: private or not, and what the clients spent."""
    rows = []
    for group in groups:
        clients = [(client, run) for run in group.runs for client in run.clients]
        standings = [standing(client, run.private) for client, run in clients]
        kept = sum(one is Standing.KEPT for one in standings)
        asked = sum(one is not Standing.PUBLIC for one in standings)
        spent = finites(client.spent for client, run in clients if run.private)
        replaced = finites(client.replace_one for client, run in clients if run.private)
        counts = [sum(one.get("count") or 0 for one in client.releases) for client, run in clients if run.private]
        good = group.private and kept == asked > 0
        flag = '<span class="yes">private</span>' if good else '<span class="no">NOT PRIVATE</span>'
        if group.private and not good:
            flag = '<span class="no">not shown</span>'
        middle = " · ".join(map(as_epsilon, (min(spent), statistics.median(spent), max(spent)))) if spent else MISSING
        rows.append(
            [
                method_cell(group),
                Cell(flag),
                number(f"{kept} of {asked}" if group.private else "none", kept if group.private else -1.0),
                number(middle, max(spent) if spent else None),
                number(as_epsilon(max(replaced)) if replaced else MISSING, max(replaced) if replaced else None),
                number(plain(float(max(counts))) if counts else MISSING, max(counts) if counts else None),
            ]
        )
    heads = ("Method", "Private", "Within budget", "Spent ε: min · median · max", "Replace-one ε, max", "Most releases")
    return table("t-private", "Privacy by method, over all clients and seeds", heads, rows)


def quality_table(groups: Sequence[Group]) -> str:
    """Method by method: the final model's accuracy and loss, mean ± deviation over seeds."""
    columns = [("Accuracy", "accuracy", "%"), ("Central accuracy", "central_accuracy", "%"), ("Loss", "loss", "")]
    return _divergence(groups) + _metric_table(
        "t-good", "The final round's model: mean ± standard deviation over seeds. Not the best round.", groups, columns
    )


def _divergence(groups: Sequence[Group]) -> str:
    """Whose final model is none: a simulation always has a loss, if it is a number."""
    told = []
    for group in groups:
        lost = sum(run.simulated and "loss" in run.final and run.at_end("loss") is None for run in group.runs)
        if lost:
            told.append(f"{group.label} ({lost} of {len(group.runs)})")
    if not told:
        return ""
    why = "The loss at the end is not a finite number: a smaller step (training.lr) is needed. Runs"
    return f'<p class="simulation"><strong>Training diverged.</strong> {why}: {escape(listed(told))}.</p>'


def fairness_table(groups: Sequence[Group]) -> str:
    """Method by method: Ψ on test and training sets, the worst client, the tenths, the variance between clients."""
    columns = [
        ("Ψ, test sets", "psi", ""),
        ("Ψ, training sets", "train_psi", ""),
        ("Worst client", "worst_accuracy", "%"),
        ("Worst tenth", "worst_decile", "%"),
        ("Best tenth", "best_decile", "%"),
        ("Variance, points²", "accuracy_variance", "points²"),
    ]
    return _metric_table(
        "t-fair",
        "Fairness of the final model, accuracies by client: mean ± standard deviation over seeds. A lower Ψ is fairer.",
        groups,
        columns,
    )


def contribution_note(groups: Sequence[Group]) -> str:
    """What the charts leave out: everybody took part alike, diagnostics that were not drawn, nothing recorded."""
    turns = [finites(client.participation for run in group.runs for client in run.clients) for group in groups]
    notes = []
    if any(turns) and all(set(found) <= {1.0} for found in turns):
        notes.append("Every client took part once in every round.")
    left_out = diagnostics(groups)[MAX_DIAGNOSTICS:]
    if left_out:
        notes.append(f"Recorded but not drawn: {listed(left_out)}.")
    return " ".join(notes)


def run_table(groups: Sequence[Group]) -> str:
    """Every run: method, seed, rounds, clients, time."""
    rows = [
        [
            method_cell(group),
            number(str(run.seed), float(run.seed) if isinstance(run.seed, int | float) else None),
            number(str(len(run.rounds)), len(run.rounds)),
            number(str(len(run.clients)), len(run.clients)),
            number(duration(run.seconds), run.seconds),
            Cell('<span class="yes">private</span>' if run.private else '<span class="no">NOT PRIVATE</span>'),
        ]
        for group in groups
        for run in group.runs
    ]
    return table("t-runs", "The runs", ("Method", "Seed", "Rounds", "Clients", "Time", "Private"), rows)


def study_table(groups: Sequence[Group]) -> str:
    """The study's settings: what all runs share once, what differs with each of its values."""
    runs = [flat(run.study) for group in groups for run in group.runs]
    rows = []
    for key in dict.fromkeys(key for one in runs for key in one):
        values = list(dict.fromkeys(one.get(key, "unset") for one in runs))
        shown = values[0] if len(values) == 1 else " | ".join(values[:8]) + (" | …" if len(values) > 8 else "")
        rows.append([Cell(f"<code>{escape(key)}</code>"), Cell(f"<code>{escape(_cut(shown))}</code>")])
    return table("t-study", "The study", ("Setting", "Value"), rows) if rows else ""


def versions_table(groups: Sequence[Group]) -> str:
    """Versions of what made the results."""
    found: dict[str, dict[str, None]] = {}
    for group in groups:
        for run in group.runs:
            for name, version in run.versions.items():
                found.setdefault(str(name), {})[str(version)] = None
    rows = [[text(name), text(" | ".join(values))] for name, values in found.items()]
    return table("t-versions", "Versions", ("Package", "Version"), rows) if rows else ""


def sheet_data(sheets: Sequence[Sheet]) -> dict[str, Any]:
    """The client table's rows, a list per sheet, with repeated sentences stored once."""
    said: dict[str, int] = {}
    listed_sheets = []
    for sheet in sheets:
        rows = [_row(client, sheet.run.private, said) for client in sheet.run.clients]
        seeds = f"seed {sheet.seeds[0]}" if len(sheet.seeds) == 1 else f"seeds {', '.join(sheet.seeds)}"
        first = loosest(sheet)
        listed_sheets.append(
            {
                "label": sheet.group.label if sheet.seeds == ("None",) else f"{sheet.group.label}, {seeds}",
                "rows": rows,
                "first": first.name if first else None,
            }
        )
    return {"sheets": listed_sheets, **_packed(list(said))}


def _packed(texts: list[str]) -> dict[str, Any]:
    """Texts with the phrases that most statements share stored once: private-use characters stand for them."""
    marks = {chr(0xE000 + place): phrase for place, phrase in enumerate(PHRASES)}
    if any(sign in one for one in texts for sign in marks):  # a name that uses these characters itself
        return {"texts": texts, "phrases": {}}
    for sign, phrase in marks.items():
        texts = [one.replace(phrase, sign) for one in texts]
    return {"texts": texts, "phrases": marks}


def first_sheet(sheets: Sequence[Sheet]) -> int:
    """The sheet shown first: the first private one, which has something to tell client by client."""
    return next((place for place, sheet in enumerate(sheets) if sheet.run.private), 0)


def _row(client: Client, private: bool, said: dict[str, int]) -> list[Any]:
    """name, records, budget, δ, spent, share, replace-one, releases, standing, statement, end; texts are interned."""
    texts = (releases(client), standing(client, private).value, statement(client, private))
    return [
        client.name,
        short(client.size),
        _stored(client.epsilon, private),
        client.delta,
        _stored(client.spent, private),
        short(share(client), 4),
        short(upward(client.replace_one)),
        *(said.setdefault(one, len(said)) for one in texts),
        _end(client, private),
    ]


def _end(client: Client, private: bool) -> int | str | None:
    """The round after which a budget pays for no more; a word where there is none."""
    if not private or client.ends is None:
        return None
    if math.isinf(client.ends):
        return "never" if client.epsilon == math.inf else "outlasts the run"
    return int(client.ends)


def _stored(epsilon: float | None, private: bool) -> float | int | str | None:
    """An ε as the page keeps it: rounded up, ∞ as a sign; a run that is not private has no ε to show."""
    if epsilon is not None and math.isinf(epsilon):
        return "∞" if private else None
    return short(upward(epsilon))


def _metric_table(identity: str, caption: str, groups: Sequence[Group], columns: Sequence[tuple[str, str, str]]) -> str:
    """A row per method, a column per final metric that any run has; (name, key, unit) each."""
    shown = [column for column in columns if any(group.over_seeds(column[1]) for group in groups)]
    rows = []
    for group in groups:
        cells = [method_cell(group)]
        for _, key, unit in shown:
            value = group.over_seeds(key)
            if value is not None and unit == "points²":
                value = Spread(1e4 * value.mean, value.deviation and 1e4 * value.deviation, value.count)
            cells.append(number(plus_minus(value, unit == "%"), value.mean if value else None))
        cells += [
            number(str(len(group.runs)), len(group.runs)),
            Cell('<span class="yes">yes</span>' if group.private else '<span class="no">NOT PRIVATE</span>'),
        ]
        rows.append(cells)
    return table(identity, caption, ["Method", *(name for name, _, _ in shown), "Seeds", "Private"], rows)


def _seeds(groups: Sequence[Group]) -> str:
    runs = sum(len(group.runs) for group in groups)
    methods = f"{len(groups)} method{'s' if len(groups) > 1 else ''}"
    return f"{methods}, {runs} run{'s' if runs > 1 else ''}"


def _cut(value: str, limit: int = 240) -> str:
    return value if len(value) <= limit else f"{value[:limit]}…"
