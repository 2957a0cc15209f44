"""The officer's page: names of studies, days, decisions; what is wrong comes first; it fits a desk and a phone."""

from __future__ import annotations

import re
from html import unescape

import pytest
import report_browser as browsing
import report_fixture as fixture

from sordino.privacy.held import HELD
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.types import Budget, Event, Sampling
from sordino.study import report
from sordino.study.report.officer import render_officer, write_officer

GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 10)
SCORES = Event("scores", Sampling.full(), 8.0, 1)
RUN = "9f2c6a5e4b7d4f0c8e1a2b3c4d5e6f70"
EVIL = "<img src=x onerror=alert(1)></script><b> " + "w" * 60


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "north.db") as book:
        book.bind("north", lambda salt: "f" * 64)
        for name in ("north", "north" + HELD):
            book.open_account(name, Budget(3.0, 1e-5))
        book.declare([LedgerPlan("north", RUN, (GRADIENT,), 30, "heart failure")])
        book.declare([LedgerPlan("north" + HELD, RUN, (SCORES,), 5, "heart failure")])
        book.declare([LedgerPlan("north", "c0de", (GRADIENT,), 5, EVIL)])
        book.charge([Charge("north", RUN, "1", "gradient", 300, "r")])
        book.charge([Charge("north" + HELD, RUN, "1", "scores", 1, "r")])
        book.charge([Charge("north", "c0de", "1", "gradient", 10, "r")])
        book.top_up("north", 0.5, "second study", "Dr. Weiss")
        yield book


def words(page: str) -> str:
    body = page[page.index("<main") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_it_shows_studies_days_and_decisions_and_neither_hashes_nor_reprs(ledger):
    page = render_officer(ledger)
    told = words(page)
    (day,) = ledger.days("north")
    assert "study heart failure gradient 300" in told
    assert day.date in told
    assert "budget raised by ε = 0.5 Dr. Weiss second study" in told
    assert "tied to site north and its records" in told
    assert RUN not in page
    assert not re.search(r"Budget\(|Event\(|<class|datetime|None\b|'north'|\binf\b", told)


def test_every_figure_is_the_ledgers(ledger):
    told = words(render_officer(ledger, ["north"]))
    spent, view = ledger.epsilon(["north"])["north"], ledger.attack(["north"])["north"]
    shown = float(re.search(r"north 3\.5 1e−5 ([\d.]+) ", told)[1])
    assert spent <= shown <= spent * 1.001
    assert f"at most {100 * view.success:.0f}"[:10] in told
    assert "held out" not in told.split("Statements in plain words")[0]


def test_bad_news_comes_first(ledger, tmp_path):
    assert "Within budget" in words(render_officer(ledger))
    ledger.mark_not_private("north", "a generator was injected")
    told = words(render_officer(ledger))
    assert told.index("NOT PRIVATE") < told.index("Within budget")
    assert "Nothing is guaranteed: a generator was injected." in told
    assert "no promise" in told
    with Ledger(tmp_path / "simulated.db") as book:
        book.open_account("a", Budget(1.0, 1e-5), simulated=True)
        book.open_account("b", Budget(float("inf"), 1e-5), simulated=True)
        told = words(render_officer(book))
    assert "SIMULATION" in told
    assert "PUBLIC DATA" in told
    assert "Nothing was released yet." in told


def test_the_command_writes_it_for_both_accounts_of_a_client(in_folder, ledger, tmp_path):
    ledger.close()
    path = str(ledger.path)
    assert in_folder("ledger", "show", path, "--html", "page.html", "--client", "north")[:2] == (0, "page: page.html\n")
    assert "north (held out)" in words((tmp_path / "page.html").read_text())
    assert in_folder("ledger", "show", path, "--html", "page.html", "--client", "south")[0] == 2


@pytest.fixture(scope="module")
def browser():
    with browsing.chromium() as found:
        if found is None:
            pytest.skip(browsing.REMEDY)
        yield found


@pytest.mark.parametrize("width", [1280, 390])
def test_the_officers_page_fits_in_silence(browser, ledger, tmp_path, width):
    page, seen = browsing.opened(browser, write_officer(ledger, tmp_path / "page.html"), width=width)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert browsing.overflowing(page) == []
    assert seen.complaints == []
    assert len(seen.requests) == 1
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
        assert page.evaluate(browsing.TEXT_CONTRAST) == []
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_the_card_in_a_report_fits_and_can_be_saved(browser, tmp_path, width):
    result = fixture.result(clients=4, rounds=3)
    result["privacy"][0]["client"] = EVIL
    page, seen = browsing.opened(browser, report.write([result], tmp_path / "report.html"), width=width)
    page.locator("#card summary").click()
    assert page.locator("#card pre").inner_text().startswith("# Model card: digits")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert browsing.overflowing(page) == []
    with page.expect_download() as saved:
        page.click("#card a[download]")
    assert saved.value.suggested_filename == "model-card.md"
    assert saved.value.path().read_text().startswith("# Model card: ")
    assert seen.complaints == []
    page.close()
