"""An officer reads names and dates: studies in place of hashes, days with what they released and what it had cost."""

from __future__ import annotations

import json

import pytest

from sordino.privacy import accounting
from sordino.privacy.book import label
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.statement import statement, statement_text
from sordino.privacy.types import Budget, Event, Sampling

GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 10)


@pytest.fixture
def ledger(tmp_path, monkeypatch):
    """Two runs of one study on two days, and one that nobody named."""
    days = iter([*["2026-03-01T09:00:00+00:00"] * 5, *["2026-03-04T09:00:00+00:00"] * 9])
    with Ledger(tmp_path / "north.db") as book:
        drafted = book._file.transaction

        def dated():
            class Draft:
                def __enter__(self):
                    self.own = drafted()
                    draft = self.own.__enter__()
                    draft._time = next(days)
                    return draft

                def __exit__(self, *error):
                    return self.own.__exit__(*error)

            return Draft()

        monkeypatch.setattr(book._file, "transaction", dated)
        book.open_account("north", Budget(3.0, 1e-5))
        for run, study in (("9f2c", "heart"), ("77aa", "heart"), ("c0de", "")):
            book.declare([LedgerPlan("north", run, (GRADIENT,), 5, study)])
        book.charge([Charge("north", "9f2c", "1", "gradient", 10, "r")])
        book.charge([Charge("north", "9f2c", "2", "gradient", 20, "r")])
        book.charge([Charge("north", "77aa", "1", "gradient", 10, "r")])
        book.charge([Charge("north", "c0de", "1", "gradient", 10, "r")])
        yield book


def test_runs_are_called_by_their_studies_and_days(ledger):
    words = statement_text(statement(ledger, "north"))
    assert "study heart, run 1 (2026-03-01 to 2026-03-04): gradient, 30 times" in words
    assert "study heart, run 2 (2026-03-04): gradient, 10 times" in words
    assert "run c0de: gradient, 10 times" in words
    assert "9f2c" not in words
    assert "77aa" not in words


def test_the_name_is_remembered_by_the_file_and_survives_a_second_declaration(ledger):
    path = ledger.path
    ledger.close_plan("north", "9f2c")
    ledger.declare([LedgerPlan("north", "9f2c", (GRADIENT,), 5)])
    ledger.close()
    with Ledger(path, readonly=True) as again:
        assert [one["study"] for one in statement(again, "north")["studies"]] == ["heart", "heart", None]
        assert again.verify()


def test_every_day_has_what_it_released_and_what_all_until_then_cost(ledger):
    first, second = ledger.days("north")
    assert (first.date, first.releases) == ("2026-03-01", [("9f2c", "gradient", 10)])
    assert second.releases == [("9f2c", "gradient", 20), ("77aa", "gradient", 10), ("c0de", "gradient", 10)]
    direct = accounting.composed_epsilon([[GRADIENT.times(10)], [GRADIENT.times(50)]], 1e-5)
    assert [first.epsilon, second.epsilon] == pytest.approx(direct.tolist())
    assert second.epsilon == ledger.epsilon(["north"])["north"]


def test_a_statement_is_json(ledger):
    assert json.loads(json.dumps(statement(ledger, "north")))["studies"][0] == {
        "run": "9f2c",
        "study": "heart",
        "first": "2026-03-01",
        "last": "2026-03-04",
    }


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("heart", "heart"),
        (" a\n2026-01-01 forged\tline\x1b[31m ", "a 2026-01-01 forged line [31m"),
        ("x" * 99, "x" * 80),
    ],
)
def test_a_name_that_somebody_else_chose_is_one_line_that_can_be_shown(given, kept):
    assert label(given) == kept
