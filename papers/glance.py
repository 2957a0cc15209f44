"""What the results say at a glance: the blocks between marks in docs/results/index.md and README.md.

Whatever stands between ``<!-- glance -->`` and ``<!-- end of glance -->`` is written here from the JSON files, numbers
and verdicts alike.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from papers import (
    accuracy_ingredients,
    accuracy_page,
    changes,
    fedfdp_cells,
    leaderboard,
    selection_page,
    tables,
    verdicts,
)
from papers import accuracy_published as default
from papers.claims import CLAIMS
from papers.known import aware, measured, results, says, seeds_of
from papers.pages import RESULTS, pages
from papers.selection import AS_PUBLISHED
from papers.verdicts import Gap

ROOT = RESULTS.parents[1]


def _against_print(block: str, row: str, columns: Sequence[str] | None = None) -> tuple[float, Gap]:
    """The mean of ``auto`` over the columns of a block, and its mean lead over the best that the paper prints."""
    measure = default.measure_of(block)
    printed, gaps, values = default.printed(), [], []
    for place, entry in measured("accuracy/published").items():
        if place[:2] == (block, row) and (columns is None or place[2] in columns):
            best = next(value for value in printed[place] if value is not None)
            gap = verdicts.against(entry, best, measure, place[2])
            if gap is not None:
                gaps.append(gap)
                values.append(entry.values[measure.key] or 0.0)
    mean = verdicts.average(gaps)
    if mean is None:
        raise LookupError(f"accuracy/published has nothing of {row} in {block}")
    return float(np.mean(values)), mean


def _winner_gap() -> Gap:
    """``auto`` against the search's winner, seed by seed, on average over all triples."""
    rows = results("accuracy/auto")["rows"]
    by_seed = {
        seed: float(np.mean([row["scores"]["auto"][k] - row["scores"]["winner of the search"][k] for row in rows]))
        for k, seed in enumerate(rows[0]["seeds"])
    }
    return Gap(by_seed)


def default_lines(link: str, shared: bool) -> list[str]:
    """How ``auto`` does, with nothing searched; ``link`` leads to docs/results, ``shared``: also with shared noise."""
    said, best = [], "the best printed"
    for row, trust in (
        (default.AUTO, "it has"),
        (default.SHARED, "with noise shared and half of all sites conspiring"),
    )[: 2 if shared else 1]:
        parts = []
        for name, block in zip(("MNIST", "Fashion-MNIST"), default.HDP.values()):
            mean, gap = _against_print(block, row)
            parts.append(f"{mean:.1f} on {name} ({says(gap, best)})")
        mean, gap = _against_print(default.FAIR, row, ("CIFAR10",))
        parts.append(f"{mean:.1f} on CIFAR-10 at FedFDP's ε = {fedfdp_cells.EPSILON:g} ({says(gap, best)})")
        said.append(f"{trust} {', '.join(parts)}")
    winner, rows = _winner_gap(), results("accuracy/auto")["rows"]
    return [
        "By default `auto` sets itself from public facts; nothing is searched. Mean accuracy in per cent, on MNIST and "
        f"Fashion-MNIST over Robust-HDP's nine distributions of budgets: {'; '.join(said)}. These are {seeds_of(gap)}, "
        "with 95 % intervals of our means; the network is ours, a linear head on fixed features, theirs are the "
        f"papers' ([page]({link}accuracy-published.md)). On {len(rows)} federations of our own it is "
        f"{says(winner, 'the best of 40 searched settings')}, which saw test records ({seeds_of(winner)}; "
        f"[page]({link}accuracy-auto.md))."
    ]


def selection_lines(link: str) -> list[str]:
    """Privacy-aware selection and ``auto`` on its federations, for README."""
    mnist, fashion = (aware(n, AS_PUBLISHED) for n in (3, 4))
    parts = []
    for data, board in zip(("MNIST", "Fashion-MNIST"), leaderboard.BOARDS):
        row = leaderboard.default(leaderboard.rows(board))
        if row is None:
            raise LookupError(f"auto has no row on {board.title}")
        parts.append(f"{row.mean:.1f} on {data} ({says(row.lead, 'the best printed')}, {seeds_of(row.lead)})")
    return [
        f"With the published noise privacy-aware selection is {says(mnist, 'unbiased')} on "
        f"MNIST and {says(fashion, 'unbiased')} on Fashion-MNIST ({seeds_of(mnist)}; [III]({link}selection-table3.md), "
        f"[IV]({link}selection-table4.md)). On the same federations `auto` has {' and '.join(parts)}: "
        f"[leaderboard]({link}index.md#leaderboard)."
    ]


def glance_lines() -> list[str]:
    """The table: what a paper claims, whether it holds, on what grounds, where."""
    lines = ["| published claim | holds? | on what grounds | where |", "|---|---|---|---|"]
    for paper, claims in CLAIMS.items():
        lines.append(f"| **{paper}** | | | |")
        for words, judge, where in claims:
            verdict, told = judge()
            links = ", ".join(f"[{one.partition('/')[2]}]({one.replace('/', '-')}.md)" for one in where)
            lines.append(f"| {words} | {verdict} | {told} | {links} |")
    return lines


def awaiting_lines() -> list[str]:
    """Pages whose numbers await a rerun, and those that are not finished, or rest on one seed."""
    lines = []
    for path, (experiment, content) in pages().items():
        about, reasons = content["_meta"], []
        if about["date"] < changes.DATE and any(waits for _, waits in changes.NOTES.get(experiment.name, ())):
            reasons.append("a fault was repaired after its runs (what changed is on the page)")
        if about.get("searched") and not tables.searched_as_now(experiment, about):
            reasons.append("its values were screened otherwise than they are now (see the page)")
        if about["left"]:
            reasons.append(f"{about['left']} of {about['runs']} runs are still to be made")
        if about["trained"] and about["seeds"] == [0]:
            reasons.append("one seed")
        if reasons:
            lines.append(f"- [{experiment.name}]({path.name}): {'; '.join(reasons)}.")
    return lines


def wrapped(lines: Sequence[str]) -> list[str]:
    """Paragraphs of at most 120 characters a line."""
    return [textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False) for line in lines]


BLOCKS: dict[Path, dict[str, Callable[[], list[str]]]] = {
    RESULTS / "index.md": {
        "default": lambda: wrapped(default_lines("", shared=True)),
        "leaderboard": lambda: list(leaderboard.lines()),
        "glance": glance_lines,
        "awaiting": awaiting_lines,
    },
    RESULTS / "selection.md": {
        "mnist": lambda: selection_page.table_lines("mnist"),
        "fashion": lambda: selection_page.table_lines("fashion-mnist"),
        "says": selection_page.says_lines,
    },
    ROOT / "docs" / "tuning.md": {
        "auto": lambda: [f"- {line}" for line in accuracy_page.summary(results("accuracy/auto")["rows"])],
        "ingredients": lambda: accuracy_ingredients.lines(results("accuracy/ingredients"))[2:-1],
    },
    ROOT / "README.md": {
        "results": lambda: wrapped(
            [*default_lines("docs/results/", shared=False), "", *selection_lines("docs/results/")]
        ),
    },
}
"""By file and mark: what stands between the marks."""


def with_blocks(path: Path, text: str) -> str:
    """The text of a page with its blocks written anew."""
    for mark, make in BLOCKS.get(path, {}).items():
        before, begin, rest = text.partition(f"<!-- {mark} -->\n")
        _, end, after = rest.partition(f"<!-- end of {mark} -->")
        if not begin or not end:
            raise LookupError(f"{path.name} has no block between <!-- {mark} --> and <!-- end of {mark} -->")
        text = before + begin + "\n".join(make()) + "\n" + end + after
    return text
