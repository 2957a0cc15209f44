"""The report in headless Chromium: opens from disk in silence, draws, sorts, switches, fits a phone and a page."""

from __future__ import annotations

import itertools
import json

import pytest
import report_browser as browsing
import report_fixture as fixture

from sordino.study import report
from sordino.study.page import page as live_page

EVIL = "<img src=x onerror=alert(1)></script><b>"
METHODS = ["fedavg", "dp-fedavg", "minimum-epsilon"]
TRACES = {  # three methods and two seeds; a band for each line, where the seeds differ
    "budgets": 1 + 2,
    "spent-epsilon-max": 2,
    "accuracy": 3 + 3,
    "loss": 3 + 3,
    "accuracy-by-client": 3,
    "accuracy-budget": 3,
    "accuracy-size": 3,
    "client-curves": 3,  # three groups of budgets, of one method
    "psi": 3 + 3,
    "worst-decile": 3 + 3,
    "aggregation-weight": 3,
    "weight-optimum": 1 + 2,
    "observer-noise-power": 2 + 2,
}
PLOTS = "[...document.querySelectorAll('.js-plotly-plot')]"
COUNT = f"Object.fromEntries({PLOTS}.map((p) => [p.id.slice(6), p.data.length]))"


@pytest.fixture(scope="module")
def browser():
    with browsing.chromium() as found:
        if found is None:
            pytest.skip(browsing.REMEDY)
        yield found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Three methods, two seeds, twelve clients, one of them with a name that would like to be a program."""
    results = json.loads(json.dumps(fixture.comparison()).replace("client-11", EVIL))
    return report.write(results, tmp_path_factory.mktemp("report") / "comparison.html")


@pytest.fixture(scope="module")
def desk(browser, comparison):
    """The comparison on a desk, opened once: each test leaves it as it found it."""
    page, seen = browsing.opened(browser, comparison)
    page.seen = seen
    return page


def column(page, table: str, place: int) -> list[str]:
    cells = page.locator(f"#{table} tbody tr:not([hidden]) td:nth-child({place})")
    return [text.strip() for text in cells.all_inner_texts()]


def shown(page, chart: str) -> list[str]:
    """Names of the visible lines and clouds of a chart; bands are left out."""
    lines = f"document.getElementById('chart-{chart}').data.filter((t) => t.legendgroup && t.meta !== 'band')"
    return page.evaluate(f"{lines}.filter((t) => t.visible).map((t) => t.name)")


def in_theme(page, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")


def widest(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth")


def test_it_opens_from_disk_without_a_word_and_without_a_network(desk, comparison):
    assert desk.seen.requests == [comparison.resolve().as_uri()]
    assert desk.seen.complaints == []


def test_a_hostile_name_does_nothing_but_show(desk):
    assert EVIL in column(desk, "clients", 1)
    assert desk.locator("main img, main script").count() == 0
    ticks = desk.locator("#chart-accuracy-by-client .xtick text").all_text_contents()
    assert "<img src=x …" in ticks


def test_every_chart_is_drawn_with_its_traces(desk):
    assert desk.evaluate(COUNT) == TRACES
    assert desk.evaluate("[...document.querySelectorAll('.chart')].every((c) => c.querySelector('svg.main-svg'))")


def test_the_first_screen_says_not_private_loudly(desk):
    alarm = desk.locator(".verdict.bad .headline")
    assert alarm.inner_text() == "NOT PRIVATE"
    box = alarm.bounding_box()
    assert box["y"] + box["height"] < 400
    assert float(alarm.evaluate("(node) => parseFloat(getComputedStyle(node).fontSize)")) >= 32
    assert desk.locator(".verdict.good").bounding_box()["y"] < 400
    assert desk.get_by_text("This was a simulation.").bounding_box()["y"] < 900


def test_tables_sort_by_click_and_by_keyboard(desk):
    head = desk.locator("#t-good th", has_text="Accuracy").first
    button = head.locator("button")
    button.click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(desk, "t-good", 1) == METHODS[::-1]
    button.focus()
    desk.keyboard.press("Enter")
    assert head.get_attribute("aria-sort") == "descending"
    assert column(desk, "t-good", 1) == METHODS

    spent = desk.locator("#clients th", has_text="Spent").locator("button")
    spent.focus()
    desk.keyboard.press("Space")
    values = [float(text) for text in column(desk, "clients", 5)]
    assert values == sorted(values)
    assert len(values) == 12
    assert len(set(values)) > 5


def test_what_is_missing_sorts_last_in_both_directions(desk):
    button = desk.locator("#t-private th", has_text="Replace-one").locator("button")
    for _ in range(2):
        button.click()
        assert column(desk, "t-private", 1)[-1] == "fedavg"


def test_a_method_is_switched_off_and_on_in_all_charts(desk):
    switch = desk.locator('.legend[data-chart="accuracy"] button', has_text="dp-fedavg")
    switch.click()
    assert shown(desk, "accuracy") == shown(desk, "loss") == ["fedavg", "minimum-epsilon"]
    assert shown(desk, "budgets") == ["minimum-epsilon"]
    other = desk.locator('.legend[data-chart="psi"] button', has_text="dp-fedavg")
    assert other.get_attribute("aria-pressed") == "false"
    other.focus()
    desk.keyboard.press("Space")
    assert shown(desk, "accuracy") == shown(desk, "psi") == METHODS
    assert switch.get_attribute("aria-pressed") == "true"


def test_every_clients_curve_is_shown_on_request_one_method_at_a_time(desk):
    box = desk.locator('.legend[data-chart="client-curves"]')
    drawn = "document.getElementById('chart-client-curves').data"
    assert box.locator('button[aria-pressed="true"]').all_inner_texts() == ["dp-fedavg"]
    every = box.get_by_role("button", name="Every client")
    every.focus()
    desk.keyboard.press("Enter")
    assert desk.evaluate(f"{drawn}.length") == 12 + 3
    before = desk.evaluate(f"{drawn}[0].y")
    box.get_by_role("button", name="fedavg", exact=True).click()
    assert desk.evaluate(f"{drawn}.length") == 12 + 3
    assert desk.evaluate(f"{drawn}[0].y") != before
    details = desk.locator('details.data[data-chart="client-curves"]')
    details.locator("summary").click()
    details.locator("tbody tr").first.wait_for()  # a browser tells of the opening a moment later
    assert details.locator("tbody tr").count() == (12 + 3) * 40
    every.click()
    assert details.locator("tbody tr").count() == 3 * 40
    details.locator("summary").click()
    box.get_by_role("button", name="dp-fedavg").click()


def test_the_end_of_every_budget_is_in_the_clients_table(desk):
    assert set(column(desk, "clients", 8)) == {"40"}
    desk.select_option("#sheet", label="minimum-epsilon, seeds 0, 1")
    assert set(column(desk, "clients", 8)) == {"outlasts the run"}
    desk.select_option("#sheet", label="dp-fedavg, seeds 0, 1")


def test_hovering_a_curve_tells_its_values(desk):
    desk.locator("#chart-accuracy").scroll_into_view_if_needed()
    box = desk.locator("#chart-accuracy .nsewdrag").bounding_box()
    desk.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    desk.wait_for_selector("#chart-accuracy .hoverlayer text", timeout=3000)
    assert "fedavg" in desk.locator("#chart-accuracy .hoverlayer").text_content()
    desk.mouse.move(2, 2)


def test_a_client_is_found_and_its_statement_read(desk):
    assert "The loosest promise of this run:" in desk.locator("#statement").inner_text()
    desk.fill("#find", "client-05")
    assert column(desk, "clients", 1) == ["client-05"]
    desk.get_by_role("button", name="client-05").focus()
    desk.keyboard.press("Enter")
    assert desk.locator("#statement").inner_text().startswith("client-05 allowed")
    desk.select_option("#sheet", label="fedavg, seeds 0, 1")
    assert column(desk, "clients", 10) == ["NOT PRIVATE"]
    assert "NO privacy guarantee" in desk.locator("#statement").inner_text()
    desk.fill("#find", "")
    desk.select_option("#sheet", label="dp-fedavg, seeds 0, 1")
    assert len(column(desk, "clients", 1)) == 12


def test_every_chart_has_words_and_a_table_beside_it(desk):
    for chart in TRACES:
        assert len(desk.locator(f"#chart-{chart}").get_attribute("aria-label")) > 40
    details = desk.locator('details.data[data-chart="accuracy-by-client"]')
    details.locator("summary").focus()
    desk.keyboard.press("Enter")
    details.locator("table").wait_for()
    assert details.locator("tbody tr").count() == 36
    assert details.locator("thead").inner_text().split() == ["Method", "Client", "accuracy"]
    details.locator("summary").click()


def test_a_chart_is_saved_as_a_picture_and_nothing_offers_to_upload_it(desk):
    with desk.expect_download() as saved:
        desk.click('button[data-save="accuracy"]')
    assert saved.value.suggested_filename == "sordino-accuracy.png"
    assert saved.value.path().read_bytes()[:4] == b"\x89PNG"
    assert desk.locator(".modebar-btn").count() == 0
    assert not [one for one in desk.seen.requests if not one.startswith(("file:", "blob:", "data:"))]


def test_structure_is_there_for_those_who_do_not_see_it(desk):
    for mark in ("header", "nav", "main", "footer"):
        assert desk.locator(f"body > {mark}, header > {mark}").count() == 1
    levels = desk.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert max(after - before for before, after in itertools.pairwise(levels)) <= 1
    controls = "[...document.querySelectorAll('button,select,input')]"
    assert desk.evaluate(f"{controls}.filter((n) => !n.textContent.trim() && !n.labels?.length).length") == 0
    assert desk.evaluate("document.documentElement.lang") == "en"
    assert desk.evaluate("[...document.querySelectorAll('th')].every((h) => h.scope === 'col')")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_are_legible_and_follow_the_system(desk, theme):
    in_theme(desk, theme)
    assert desk.evaluate(browsing.TEXT_CONTRAST) == []


def test_the_theme_is_switched_by_hand_and_the_charts_follow(desk):
    in_theme(desk, "light")
    line = "document.getElementById('chart-accuracy').data[1].line.color"
    before, ground = desk.evaluate(line), desk.evaluate("getComputedStyle(document.body).backgroundColor")
    desk.click("#theme")
    assert desk.evaluate(line) != before
    assert desk.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    desk.click("#theme")
    assert desk.evaluate(line) == before


def test_a_method_keeps_its_colour_in_every_chart(desk):
    script = f"{PLOTS}.flatMap((p) => p.data.filter((t) => t.meta !== 'band'))"
    pairs = desk.evaluate(
        f"{script}.filter((t) => /^m/.test(t.legendgroup)).map((t) => [t.name, (t.marker || t.line).color])"
    )
    colours = {name: {colour for other, colour in pairs if other == name} for name, _ in pairs}
    assert sorted(colours) == sorted(METHODS)
    assert all(len(found) == 1 for found in colours.values())
    assert len(set.union(*colours.values())) == 3


def test_on_paper_it_is_light_complete_and_no_wider_than_the_page(desk):
    in_theme(desk, "dark")
    assert desk.pdf(format="A4", print_background=True)[:5] == b"%PDF-"
    assert desk.evaluate("document.documentElement.dataset.theme") == "dark"
    desk.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert desk.evaluate("document.documentElement.dataset.theme") == "light"
    assert desk.locator("#statements li").first.is_visible()
    assert desk.evaluate("Math.max(...[...document.querySelectorAll('.main-svg')].map((s) => s.clientWidth))") <= 320
    desk.evaluate("dispatchEvent(new Event('afterprint'))")
    in_theme(desk, "light")
    assert desk.evaluate("document.querySelector('#chart-accuracy .main-svg').clientWidth") > 400


def test_it_fits_a_phone(browser, comparison):
    page, seen = browsing.opened(browser, comparison, width=390, height=844)
    assert widest(page) == 390
    assert seen.complaints == []
    alarm = page.locator(".verdict.bad .headline").bounding_box()
    assert alarm["y"] + alarm["height"] < 844
    charts = "Math.max(...[...document.querySelectorAll('.main-svg')].map((s) => s.getBoundingClientRect().right))"
    assert page.evaluate(charts) <= 390
    page.close()


def test_a_large_comparison_opens_in_under_two_seconds(browser, tmp_path):
    methods = ("fedavg", *fixture.PRIVATE[:4])
    path = report.write(fixture.comparison(methods, (0,), clients=100, rounds=500), tmp_path / "large.html")
    page, taken = None, []
    while len(taken) < 3 and (not taken or taken[-1] >= 2.0):  # neighbours slow a core down, now and then
        if page is not None:
            page.close()
        page = browser.new_page()
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable", {"timeDomain": "threadTicks"})  # the page's own time, whoever else is busy
        page.goto(path.resolve().as_uri(), wait_until="load")
        used = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        taken.append(used["TaskDuration"])
    assert min(taken) < 2.0, taken
    page.wait_for_function(browsing.READY)
    assert all(count >= (2 if name == "spectrum" else 3) for name, count in page.evaluate(COUNT).items())
    page.close()


@pytest.mark.parametrize("width", [1280, 390])
def test_baselines_and_figures_of_two_classes_fit_a_desk_and_a_phone(browser, tmp_path, width):
    results = [fixture.with_baselines(one) for one in fixture.comparison(seeds=(0, 1))]
    for one in results:
        one["final"] |= {"auc": 0.91, "sensitivity": 0.75, "specificity": 0.5, "confusion": [[500, 150], [200, 600]]}
    page, seen = browsing.opened(browser, report.write(results, tmp_path / "baselines.html"), width=width, height=844)
    assert widest(page) == width
    assert seen.complaints == []
    beyond = "(n) => n.getBoundingClientRect().right > innerWidth && !n.closest('.scroll')"
    assert page.evaluate(f"[...document.querySelectorAll('main *')].filter({beyond}).map((n) => n.className)") == []
    inside = "(id) => ((box) => box.scrollWidth - box.clientWidth)(document.getElementById(id).closest('.scroll'))"
    for table in ("t-good", "t-confusion", "t-compared", "t-compared-clients"):
        assert width < 1280 or page.evaluate(inside, table) <= 0, f"{table} is whole on a desk"
    lines = "[...document.querySelectorAll('#t-compared-clients td.name')].map((n) => n.getClientRects().length)"
    assert set(page.evaluate(lines)) == {1}
    assert page.locator("#t-compared tbody tr").count() == 2 * len(METHODS)
    page.close()


def deployed(folder, rounds: int):
    """A deployed run after so many rounds, one of its sites with a long name and a long reason to refuse."""
    folder.mkdir()
    sites = ["the-university-hospital-of-the-northern-region-and-its-islands", "south"]
    study = {"study": {"name": "ward", "rounds": 4}, "deployment": {"sites": sites}}
    facts = {"records": 123_456, "epsilon": 0.5, "delta": 1.25e-5}
    refused = {sites[0]: "its limits say no: " + "x" * 120}
    written = {
        "serve": {"run": "r", "study": study},
        "enrolled": {"sites": dict.fromkeys(sites, facts), "refused": refused},
        "agreed": {"payable": dict.fromkeys(sites, 1234)},
        "study": {"study": study, "seed": 0},
    }
    for name, value in written.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    shown = {"participants": sites, "accuracy": None, "loss": None, "psi": None, "central_accuracy": 0.75}
    lines = [json.dumps({"round": k, **shown}) for k in range(1, rounds + 1)]
    (folder / "log.jsonl").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("rounds", [0, 2])
def test_the_live_page_fits_a_desk_and_a_phone(browser, tmp_path, rounds, width):
    """Before the first round and after some: figures are whole; a long name makes the table scroll, not the page."""
    path = tmp_path / "live.html"
    path.write_text(live_page(deployed(tmp_path / "run", rounds)), encoding="utf-8")
    page = browser.new_page(viewport={"width": width, "height": 844})
    page.goto(path.as_uri(), wait_until="load")
    assert widest(page) == width
    cells = page.locator("#live td").all_inner_texts()
    assert {"0.5", "1.25e-05", "123456", "1234"} <= set(cells)
    lines = "[...document.querySelectorAll('#live td')].every((n) => n.scrollWidth <= n.clientWidth)"
    assert page.evaluate(lines)
    page.close()
