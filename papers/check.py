"""Whether docs say about results what the JSON files say: ``python -m papers.check``, with ``--write`` to mend it.

1. Pages made of a JSON file, and blocks between marks (``papers.glance``), are made again and compared to the letter.
2. Sentences that people wrote and that quote results are listed in ``quoted.toml``: the sentence with a ``{}`` in the
   place of every number, and where the numbers come from. Each must be on its page with just these numbers. Beside them
   stand sentences whose numbers are settings, or were measured without a file, with the reason.
3. In the paragraphs that are judged (all of docs/results, README's "Does it work?", and wherever a page elsewhere
   quotes), a number that is neither made, nor quoted, nor of a kind that is no result (``PLAIN``: settings, names of
   tables, dates) is reported. There may be none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from papers import glance, known, verdicts
from papers.catalogue import EXPERIMENTS
from papers.experiment import ACCURACY, Measure, Place
from papers.pages import RESULTS, page_of, pages

ROOT = RESULTS.parents[1]
QUOTED = Path(__file__).with_name("quoted.toml")
DIGITS = r"[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+)?"
NUMBER = re.compile(rf"(?<![\w.]){DIGITS}(?!\w)")
PLAIN = (
    r"(?<!\w)(?:[^\W\d_][₀-₉]?|lr|most|steps|rounds|n_train) ?[=≤≥] ?[\d.e-]*\d(?:, [\d.]*\d)*",
    r"(?<!\w)(?:Tables?|Figures?|table|Dist|Dir\(|phase|seeds?|deal|CIFAR-|ResNet-|H) ?\d+(?:\.\d+)?\)?",
    r"U\([\d.]+, [\d.]+\)",
    r"ε from [\d.]+ to [\d.]*\d",
    r"\]\([^)\n]*\)",
    r"^(?:\d\.|#+) ",
    r"\d{4}-\d\d-\d\d",
    r"`[^`\n]*`",
    r"95 %",
)
"""Numbers that are no results: settings, names of tables, targets of links, dates, code, the level of intervals."""


@dataclass(frozen=True)
class Finding:
    """Something on a page that its files do not say."""

    page: str
    what: str

    def __str__(self) -> str:
        return f"{self.page}: {self.what}"


def stale(write: bool = False) -> list[Finding]:
    """Pages and blocks that are not what their JSON files make; with ``write`` they are written anew."""
    found = []
    made = {path: page_of(experiment, results) for path, (experiment, results) in pages().items()}
    made |= {path: glance.with_blocks(path, path.read_text()) for path in glance.BLOCKS}
    for path, text in made.items():
        if not path.exists() or path.read_text() != text:
            found.append(Finding(path.name, "is not what its JSON file says"))
            if write:
                path.write_text(text)
    return found


@cache
def sentences(kind: str) -> tuple[Mapping[str, Any], ...]:
    """Of ``quoted.toml``: every ``quote`` (page, text with holes, values) or ``plain`` (page, text, why)."""
    return tuple(tomllib.loads(QUOTED.read_text()).get(kind, ()))


def _flat(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(f"({DIGITS})".join(re.escape(piece) for piece in _flat(text).strip().split("{}")))


def _read(expression: str) -> float:
    """The value of an expression of ``quoted.toml``: it knows ``table``, ``gap``, ``published`` and arithmetic."""
    names = {"table": _table, "gap": _gap, "published": _published, "mean": _mean, "min": min, "max": max, "abs": abs}
    return float(eval(expression, {"__builtins__": {}, **names}))


def _place(place: str) -> Place:
    block, row, column = (word.strip() for word in place.split("|"))
    return block, row, column


def _table(name: str, place: str, measure: str = "accuracy") -> float:
    """The number at ``block | row | column``."""
    return known.value(name, *_place(place), Measure(measure, measure))


def _published(name: str, place: str) -> float:
    """What the paper prints at ``block | row | column``, for the first measure."""
    return EXPERIMENTS[name].published[_place(place)][0] or 0.0


def _mean(name: str, block: str, row: str) -> float:
    """The mean over the columns of a row."""
    own = [entry.values["accuracy"] for place, entry in known.measured(name).items() if place[:2] == (block, row)]
    return float(np.mean([value for value in own if value is not None]))


def _gap(name: str, one: str, other: str) -> tuple[float, float, float]:
    """Mean and limits of the paired difference between two places."""
    here, there = (known.measured(name)[_place(place)] for place in (one, other))
    found = verdicts.between(here, there, ACCURACY)
    if found is None:
        raise LookupError(f"{name} cannot compare {one} with {other}")
    return found.interval


def misquoted(texts: Mapping[str, str]) -> list[Finding]:
    """Sentences of ``quoted.toml`` that are not on their page once, or whose numbers are not what the files say."""
    found = []
    for quote in sentences("quote"):
        seen = list(_pattern(quote["text"]).finditer(_flat(texts[quote["page"]])))
        if len(seen) != 1:
            found.append(Finding(quote["page"], f"{len(seen)} times on the page, not once: {quote['text']}"))
            continue
        for printed, expression in zip(seen[0].groups(), quote["values"], strict=True):
            exact = _read(expression)
            if not _rounds_to(exact, printed):
                found.append(Finding(quote["page"], f"{printed} is {exact:.6g} by {expression}: {quote['text']}"))
    return found


def _rounds_to(exact: float, printed: str) -> bool:
    """Whether a printed number is the exact one, rounded to the digits it has."""
    plain = printed.replace(",", "").replace("−", "-")
    digits, _, power = plain.partition("e")
    unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return abs(float(plain) - exact) <= 0.5 * unit * (1 + 1e-6)


def _judged(page: str, text: str) -> Iterator[tuple[int, int]]:
    """The parts of a page in which every number has to come from somewhere."""
    if page.startswith("docs/results/"):
        yield 0, len(text)
    elif page == "README.md":
        yield text.index("## Does it work?"), text.index("## Where to read on")
    elif page != "docs/reproduce.md":  # which says how results are made, and quotes none
        for match in re.finditer(r"[^\n]+(?:\n[^\n]+)*", text):  # paragraphs that lead to a page of results
            if re.search(r"results/(?!index)[\w-]+\.md", match.group()):
                yield match.start(), match.end()


def uncovered(texts: Mapping[str, str]) -> tuple[int, list[Finding]]:
    """How many numbers are judged, and those that nothing accounts for, with what stands around them."""
    made = {path.relative_to(ROOT).as_posix() for path in pages()} | {"docs/results/commits.md"}
    found, total = [], 0
    for page, text in texts.items():
        if page in made:  # compared to the letter
            total += len(NUMBER.findall(text))
            continue
        covered = _blocks(text) + [m.span() for one in PLAIN for m in re.finditer(one, text, re.M)]
        covered += _quoted(page, text)
        for begin, end in _judged(page, text):
            for number in NUMBER.finditer(text, begin, end):
                total += 1
                if not any(a <= number.start() and number.end() <= b for a, b in covered):
                    around = _flat(text[max(0, number.start() - 40) : number.end() + 30])
                    found.append(Finding(page, f"{number.group()} comes from nowhere: …{around}…"))
    return total, found


def _blocks(text: str) -> list[tuple[int, int]]:
    return [m.span() for m in re.finditer(r"<!-- (\w+) -->\n.*?<!-- end of \1 -->", text, re.S)]


def _quoted(page: str, text: str) -> list[tuple[int, int]]:
    """Where this page's quotations have their holes, and its sentences of settings; however their lines are broken."""
    found = []
    for quote in sentences("quote") + sentences("plain"):
        if quote["page"] == page:
            loose = _pattern(quote["text"]).pattern.replace(r"\ ", r"\s+")
            for match in re.finditer(loose, text):
                holes = range(1, len(quote.get("values", ())) + 1)
                found += [match.span(k) for k in holes] if holes else [match.span()]
    return found


def judged_texts() -> dict[str, str]:
    """Every page that is judged, by its path."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def main(write: bool) -> int:
    """Say what is wrong; how many findings there are."""
    texts = judged_texts()
    total, loose = uncovered(texts)
    findings = [*stale(write), *misquoted(texts), *loose]
    print(*findings, sep="\n")
    quoted, plain = len(sentences("quote")), len(sentences("plain"))
    print(f"{total} numbers judged, {len(loose)} from nowhere; {quoted} sentences quoted, {plain} of settings alone")
    return len(findings)


if __name__ == "__main__":
    sys.exit(bool(main("--write" in sys.argv)))
