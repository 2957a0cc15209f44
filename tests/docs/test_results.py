"""What docs say about results is what the JSON files say, and a digit that is not would be found."""

import json
import re
from pathlib import Path

import pytest

from papers import changes, check, claims, glance, verdicts
from papers.pages import RESULTS, page_of, pages
from papers.verdicts import Gap

TEXTS = check.judged_texts()
FIRST_DECIMAL = re.compile(r"\d\.\d")


def other(text, place):
    """The text with another digit there."""
    return text[:place] + str((int(text[place]) + 3) % 10) + text[place + 1 :]


def test_every_page_and_block_is_what_its_file_says():
    assert [str(one) for one in check.stale()] == []


def test_every_quoted_number_is_in_a_file_and_no_number_comes_from_nowhere():
    assert [str(one) for one in check.misquoted(TEXTS)] == []
    total, loose = check.uncovered(TEXTS)
    assert [str(one) for one in loose] == []
    assert total > 10_000


def test_sentences_that_are_excused_are_on_their_pages_and_say_why():
    for one in check.sentences("plain"):
        assert one["why"]
        assert len(check._pattern(one["text"]).findall(check._flat(TEXTS[one["page"]]))) == 1, one["text"]


@pytest.mark.parametrize("path", ["docs/results/fedfdp-table4.md", "docs/results/index.md", "README.md"])
def test_a_wrong_digit_in_what_is_made_is_found(path, monkeypatch):
    text = TEXTS[path]
    begin = text.index("<!-- results -->") if path == "README.md" else 0
    wrong = other(text, FIRST_DECIMAL.search(text, begin).start())
    real = Path.read_text
    changed = check.ROOT / path
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: wrong if self == changed else real(self, *a, **k))
    assert changed.name in [one.page for one in check.stale()]


def test_a_wrong_word_in_a_verdict_is_found(monkeypatch):
    changed, real = RESULTS / "index.md", Path.read_text
    wrong = TEXTS["docs/results/index.md"].replace("| one seed: no verdict |", "| **yes** |", 1)
    assert wrong != TEXTS["docs/results/index.md"]
    monkeypatch.setattr(Path, "read_text", lambda self, *a, **k: wrong if self == changed else real(self, *a, **k))
    assert "index.md" in [one.page for one in check.stale()]


@pytest.mark.parametrize("quote", check.sentences("quote"), ids=lambda one: one["page"])
def test_a_wrong_digit_in_a_quotation_is_found_whichever_it_is(quote):
    flat = check._flat(TEXTS[quote["page"]])
    found = check._pattern(quote["text"]).search(flat)
    for k in range(1, len(quote["values"]) + 1):
        wrong = other(flat, found.end(k) - 1)
        findings = [str(one) for one in check.misquoted({**TEXTS, quote["page"]: wrong})]
        assert len(findings) == 1, findings
        assert quote["page"] in findings[0]


@pytest.mark.parametrize(
    ("page", "after"),
    [("docs/results/index.md", "\n## FedFDP\n"), ("README.md", "<!-- end of results -->\n")],
)
def test_a_number_that_somebody_adds_has_to_come_from_somewhere(page, after):
    text = TEXTS[page]
    assert text.count(after) == 1
    wrong = text.replace(after, f"{after}\nIt has 91.7 per cent here.\n")
    assert ["91.7" in str(one) for one in check.uncovered({**TEXTS, page: wrong})[1]] == [True]


def test_another_number_in_a_file_makes_another_page():
    path, (experiment, results) = next((p, r) for p, r in pages().items() if p.name == "selection-table3.md")
    moved = json.loads(json.dumps(results))
    moved["runs"][0]["final"]["central_accuracy"] += 0.3
    assert page_of(experiment, moved) != path.read_text(), "its intervals are made of the runs"
    moved = json.loads(json.dumps(results))
    moved["table"][0]["measured"] += 1.0
    assert page_of(experiment, moved) != path.read_text()


def test_a_table_s_means_are_the_means_of_its_runs():
    for path, (experiment, results) in pages().items():
        runs = {}
        for run in results["runs"]:
            for measure in experiment.measures:
                if (value := run["final"].get(measure.key)) is not None:
                    place = (run["block"], run["row"], run["column"], measure.key)
                    runs.setdefault(place, []).append(measure.scale * value)
        for row in results["table"]:
            seen = runs.get((row["block"], row[experiment.axes[0]], row[experiment.axes[1]], row["measure"]))
            if seen:
                assert row["measured"] == pytest.approx(sum(seen) / len(seen), rel=1e-9), (path.name, row)


def test_one_seed_has_no_verdict_and_several_have_the_interval_s():
    assert Gap({0: 5.0}).word == verdicts.NONE
    assert (Gap({0: 1.0, 1: 1.1, 2: 0.9}).word, Gap({0: 1.0, 1: -1.0}).word) == (verdicts.ABOVE, verdicts.EVEN)
    for paper in claims.CLAIMS.values():
        for words, judge, where in paper:
            verdict, grounds = judge()
            one = [name for name in where if _results(name)["_meta"].get("seeds") == [0]]
            if len(one) == len(where) and "computed" not in grounds:
                assert verdict == verdicts.NO_VERDICT, words


def _results(name):
    return json.loads((RESULTS / f"{name.replace('/', '-')}.json").read_text())


def test_notes_are_of_pages_that_there_are():
    named = {experiment.name for experiment, _ in pages().values()}
    assert set(changes.NOTES) <= named
    assert all(changes.of(name, _results(name)) for name in changes.NOTES)
    assert all(path.exists() for path in glance.BLOCKS)
