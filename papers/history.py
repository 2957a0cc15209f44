"""Which commit made which row of the pages in docs/results: ``python -m papers.history > docs/results/commits.md``.

A row belongs to the oldest commit since which its measured numbers stand unchanged in the page's JSON file. Runs made
from now on also carry the commit of the code that made them (``papers.store``).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "docs" / "results"


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(RESULTS), *words], capture_output=True, text=True, check=True).stdout


def _rows(text: str) -> dict[str, list[Any]]:
    """The measured numbers of every row: its block and its name, then one number a column and measure."""
    found: dict[str, list[Any]] = {}
    for one in json.loads(text).get("table", ()):
        labels = [str(value) for key, value in list(one.items())[:2] if value]
        found.setdefault(": ".join(labels), []).append(one.get("measured"))
    return found


def made_by(page: Path) -> dict[str, str]:
    """By row of a page, the commit since which its numbers are what they are."""
    now = _rows(page.read_text())
    since = dict.fromkeys(now, "not committed")
    for commit in _git("log", "--format=%h", "--abbrev=12", "--", page.name).split():
        then = _rows(_git("show", f"{commit}:./{page.name}"))
        for row in since:
            if then.get(row) == now[row]:
                since[row] = commit
            else:
                now[row] = [object()]  # changed here: older commits do not count
    return since


def main() -> None:
    """Print docs/results/commits.md: for every page a table of its rows and the commits that made them."""
    print("# Which commit made which row\n")
    print("Written by `python -m papers.history`: a row belongs to the commit since which its numbers stand.\n")
    for page in sorted(RESULTS.glob("*.json")):
        rows = made_by(page)
        if not rows:
            continue
        print(f"## [{page.stem}]({page.stem}.md)\n\n| row | commit |\n|---|---|")
        for row, commit in rows.items():
            print(f"| {row} | `{commit}` |")
        print()


if __name__ == "__main__":
    main()
