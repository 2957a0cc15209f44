"""The page of the accuracy benchmark: 24 rows, paired differences with intervals, and what they say together."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from papers.accuracy_rule import Found, fit, regret_of
from papers.accuracy_triples import CLIENTS, SCHOOL, Triple, triples
from papers.experiment import Cell
from papers.store import Store
from papers.verdicts import interval

AUTO, WINNER = "auto", "winner of the search"
BEHIND, MEAN = -5.0, -1.5
"""What was asked: no triple whose interval ends below −5 points, and a mean of at least −1.5."""

Scores = dict[str, dict[int, float]]
"""By method and seed, in points."""


def scores_in(results: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[int, float]]:
    """By place and seed the accuracy in points of every run that results.json lists; a run that diverged scores 0."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for one in results["runs"]:
        value = 0.0 if "diverged" in one else 100 * one["final"]["accuracy"]
        found.setdefault((one["block"], one["row"], one["column"]), {})[one["seed"]] = value
    return found


def _held(folder: Path, kind: str, key: str) -> dict[str, Any] | None:
    path = folder / kind / f"{key}.json"
    return json.loads(path.read_text())["found"] if path.exists() else None


def scores_of(folder: Path, triple: Triple, cells: Sequence[Cell], store: Store) -> Scores:
    """Every finished run's score; a run that diverged scores 0."""
    chosen = _held(folder, "settled", triple.key) or {}
    found: Scores = {}
    for cell in cells:
        known = store.read(cell) if cell.row == triple.row else None
        if known is not None:
            scale = chosen[str(cell.seed)]["variance"]
            final = known["final"]
            value = 0.0
            if "diverged" not in known:
                value = 100 * final["accuracy"] if scale is None else 100 * (1 - 2 * final["loss"] / scale)
            found.setdefault(cell.column, {})[cell.seed] = value
    return found


def paired(scores: Scores, one: str, other: str) -> list[float]:
    """Differences on the seeds that both have."""
    mine, theirs = scores.get(one, {}), scores.get(other, {})
    return [mine[seed] - theirs[seed] for seed in sorted(set(mine) & set(theirs))]


def row_of(folder: Path, triple: Triple, cells: Sequence[Cell], store: Store) -> dict[str, Any] | None:
    """One line of the table, once ``auto`` and the winner are there."""
    scores = scores_of(folder, triple, cells, store)
    gap = paired(scores, AUTO, WINNER)
    if not gap:
        return None
    rivals = {name: float(np.mean(list(one.values()))) for name, one in scores.items() if name not in (AUTO, WINNER)}
    best = max(rivals, key=lambda name: rivals[name]) if rivals else None
    chosen = next(iter((_held(folder, "settled", triple.key) or {}).values()))["training"]
    return {
        "triple": triple.row,
        "key": triple.key,
        "set": triple.name,
        "scores": {name: [one[seed] for seed in sorted(one)] for name, one in scores.items()},
        "seeds": sorted(scores[AUTO]),
        "auto_minus_winner": interval(gap),
        "best_rival": best,
        "auto_minus_best_rival": interval(paired(scores, AUTO, best)) if best else None,
        "auto": chosen,
    }


def fits(folder: Path) -> list[dict[str, Any]]:
    """The rule fitted with everything, and without each set: its numbers, and what it costs on that set's triples."""
    found = [{"key": one.key, **held} for one in triples() if (held := _held(folder, "search", one.key))]
    stand_in = [json.loads(path.read_text())["found"] for path in sorted((folder / "search").glob("least-squares-*"))]
    made = []
    for name in (None, *(name for name in CLIENTS if any(one["set"] == name for one in found))):
        rest = [one for one in found if one["set"] != name]
        rule, regret = fit([*rest, *stand_in] if name == SCHOOL else rest)
        judged: list[Found] = [one for one in found if name in (None, one["set"])]
        told = {"noise": rule.noise, "power": rule.power, "regression": rule.regression}
        costs = float(np.mean(regret_of(rule, judged))) if judged else None
        made.append({"without": name, **told, "regret": regret, "regret_on_left_out": costs})
    return made


def _ends_below(gap: Sequence[float | None], value: float) -> bool:
    """Whether a difference's interval lies wholly below a value; one pair has none, which JSON calls null."""
    return gap[2] is not None and gap[2] < value


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the table says, in sentences."""
    gaps = [row["auto_minus_winner"] for row in rows]
    mean = float(np.mean([gap[0] for gap in gaps]))
    beyond = [row["triple"] for row in rows if _ends_below(row["auto_minus_winner"], BEHIND)]
    ahead = [row for row in rows if row["auto_minus_best_rival"] and row["auto_minus_best_rival"][0] < 0]
    clearly = [row for row in ahead if _ends_below(row["auto_minus_best_rival"], 0.0)]
    named = "; ".join(
        f"{row['best_rival']} on {row['triple']} by {-row['auto_minus_best_rival'][0]:.1f}" for row in ahead
    )
    against = [row["auto_minus_best_rival"][0] for row in rows if row["auto_minus_best_rival"]]
    least = min(rows, key=lambda row: float(row["auto_minus_winner"][0]))
    said = [
        f"auto − winner: {mean:+.2f} points on average over {len(rows)} triples (asked: at least {MEAN}); least "
        f"{least['auto_minus_winner'][0]:+.1f}, on {least['triple']}; ahead on "
        f"{sum(1 for gap in gaps if gap[0] > 0)} triples.",
        f"Triples whose 95 % interval lies wholly below {BEHIND:g} points: {', '.join(beyond) or 'none'}. With "
        "three seeds it is a t-interval of 2 degrees of freedom, 2.5 deviations wide on either side: few can fail it.",
    ]
    if against:
        said += [
            f"auto − best rival: {np.mean(against):+.1f} points on average, the rival chosen for every triple after "
            f"the fact. A rival is ahead on {len(ahead)} of {len(rows)} triples{': ' + named if named else ''}.",
            f"Of these, {len(clearly)} with an interval wholly below 0.",
        ]
        for name in dict.fromkeys(name for row in rows for name in row["scores"] if name not in (AUTO, WINNER)):
            each = [
                np.mean(row["scores"][AUTO]) - np.mean(row["scores"][name]) for row in rows if name in row["scores"]
            ]
            said.append(
                f"auto − {name}: {np.mean(each):+.1f} points on average, from {min(each):+.1f} to {max(each):+.1f}."
            )
    return said


def gather(folder: Path, cells: Sequence[Cell], store: Store, about: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds beside: rows, fits, every searched point."""
    rows = [row for triple in triples() if (row := row_of(folder, triple, cells, store))]
    searches = {one.key: held["points"] for one in triples() if (held := _held(folder, "search", one.key))}
    return {"rows": rows, "fits": fits(folder), "searched": searches}


def lines_of(results: Mapping[str, Any]) -> list[str]:
    """Lines of Markdown for the page."""
    rows, fitted = results["rows"], results["fits"]
    lines: list[str] = []
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row["scores"]))
        lines += ["## What this says", "", *(f"- {sentence}" for sentence in summary(rows)), ""]
        lines += ["## Accuracy in points, mean over seeds ± deviation", ""]
        lines += [f"| triple | {' | '.join(columns)} | auto − winner | auto − best rival |"]
        lines += ["|" + "---|" * (len(columns) + 3)]
        lines += [_line(row, columns) for row in rows] + [""]
        lines += ["## What auto chose (seed 0)", "", "| triple | rounds | rate | lr |", "|---|---|---|---|"]
        lines += [
            f"| {r['triple']} | {r['auto']['rounds']} | {r['auto']['rate']:g} | {r['auto']['lr']:g} |" for r in rows
        ]
        lines += [""]
    lines += ["## The rule, fitted to the searched points", ""]
    lines += [
        "| without | noise | power | regression | regret fitted | regret on what was left out |",
        "|" + "---|" * 6,
    ]
    for one in fitted:
        cost = "–" if one["without"] is None else f"{one['regret_on_left_out']:.2f}"
        numbers = f"{one['noise']:g} | {one['power']:g} | {one['regression']:g} | {one['regret']:.2f}"
        lines.append(f"| {one['without'] or 'nothing'} | {numbers} | {cost} |")
    lines += ["", "Regret: points of the kernel regression below its own best, on average over triples.", ""]
    return lines


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    shown = []
    for name in columns:
        values = row["scores"].get(name)
        spread = f" ± {np.std(values, ddof=1):.1f}" if values and len(values) > 1 else ""
        shown.append(f"{np.mean(values):.1f}{spread}" if values else "–")
    gaps = [_gap(row["auto_minus_winner"]), _gap(row["auto_minus_best_rival"])]
    return f"| {' | '.join([row['triple'], *shown, *gaps])} |"


def _gap(gap: Sequence[float] | None) -> str:
    if gap is None:
        return "–"
    limits = "" if gap[1] is None else f" [{gap[1]:+.1f}, {gap[2]:+.1f}]"  # one pair has none, which JSON calls null
    return f"{gap[0]:+.1f}{limits}"
