"""The plan as a page: what it says, and its explorer in headless Chromium against the accountant itself."""

from __future__ import annotations

import math
import re
from functools import cache
from html import unescape

import numpy as np
import pytest
import report_browser as browsing

import sordino as sd
from sordino.study.choice import describe_choice
from sordino.study.explore import explore
from sordino.study.report.plan import render_plan, write_plan

EVIL = "<img src=x onerror=alert(1)></script><b>"
EPSILONS = [0.4, 1.0, 2.0, 4.0, 8.0, 1.5]


def federation(epsilons=EPSILONS):
    source = sd.data.load("digits").partition("dirichlet", clients=len(epsilons), beta=1.0, seed=0, minimum=40)
    return source.with_budgets(epsilons, delta=1e-5)


def plan(method="dp-fedavg", epsilons=EPSILONS, **settings):
    return made(method, tuple(epsilons), tuple({"rounds": 20, "rate": 0.2, "lr": 0.3, **settings}.items()))


@cache
def made(method, epsilons, settings):
    return sd.plan(federation(list(epsilons)), "logistic", method, **dict(settings))


def words(page: str) -> str:
    body = page[page.index("<main") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).replace("\u00a0", " ").split())


# ---- what it says, without a browser ----


def test_it_says_what_would_be_promised():
    told = words(render_plan(plan(), "hospitals"))
    assert "Private, if run as planned dp-fedavg Noise is set so that no client would spend more" in told
    assert "ε = 0.4 to 8" in told
    assert "zero-out adjacency, poisson sampling" in told


def test_what_is_not_private_says_so_and_has_no_explorer():
    page = render_plan(plan("fedavg"))
    assert words(page).startswith("What would it promise? NOT PRIVATE fedavg")
    assert 'id="explorer"' not in page
    assert "NOT PRIVATE" in words(render_plan(plan(epsilons=[math.inf, math.inf])))


def test_noise_that_pays_for_a_part_of_the_rounds_is_named():
    method = sd.methods.get("dp-fedavg", {"calibrate": "closed-form-selection"})
    told = words(render_plan(plan(method, [2.0, 400.0, 800.0], rounds=8, rate=0.4)))
    assert "For 2 of 3 the noise of 'closed-form-selection' pays for a part of the rounds only" in told


def test_every_client_has_a_row_with_its_last_round():
    view = plan("unbiased", select=2)
    page = render_plan(view)
    rows = re.search(r'id="t-clients".*?</table>', page, re.S)[0].split("<tr>")[2:]
    assert len(rows) == 6
    for row, client in zip(rows, view.clients):
        assert client["client"] in row
        assert f'data-v="{client["last_round"]!r}"' in row
        assert f'data-v="{client["noise"]!r}"' in row


def test_warnings_stand_on_the_page():
    assert "times more noise than signal" in words(render_plan(plan(epsilons=[0.01, 1.0])))


def test_names_cannot_break_out_of_the_page():
    clients = federation()
    clients = type(clients)(**{**vars(clients), "names": (EVIL, *clients.names[1:])})
    page = render_plan(sd.plan(clients, "logistic", rounds=2, rate=0.2), EVIL)
    assert "<img" not in page.replace(page[page.rindex("<script>") :], "")
    assert "alert(1)</script>" not in page


def test_nothing_on_the_page_points_outside():
    page = render_plan(plan("privacy-aware", select=2))
    own = page[: page.index("<script>", page.index("report-data"))]
    assert not re.findall(r"""(?:src|href|url|import)\s*[=(]\s*["']?(?:https?:)?//""", own)


# ---- the numbers behind the sliders ----


@pytest.mark.parametrize("method", ["dp-fedavg", "fedfdp", "minimum-epsilon"])
def test_noise_between_the_grid_points_is_what_a_plan_with_that_budget_would_have(method):
    view = plan(method)
    found = explore(view.plan, view.dimension)["clients"][0]
    assert found["noises"][found["grid"].index(0.4)] == view.plan.clients[0].noise
    for epsilon in (0.15, 0.7, 3.3):
        between = math.exp(np.interp(math.log(epsilon), np.log(found["grid"]), np.log(found["noises"])))
        others = [max(e, epsilon) for e in EPSILONS[1:]] if method == "minimum-epsilon" else EPSILONS[1:]
        exact = plan(method, [epsilon, *others]).plan.clients[0].noise
        assert between == pytest.approx(exact, rel=5e-3)


def test_a_drawn_clients_chance_and_bound_are_those_of_a_plan_with_that_budget():
    view = plan("privacy-aware", select=2)
    found = explore(view.plan, view.dimension)
    place, grid = 3, found["clients"][3]["grid"]
    chance, bound, noise = found["drawn"]["figures"][str(place)]
    at = grid.index(4.0)
    told = describe_choice(view.plan, view.dimension)
    own = next(one for one in told["ranking"] if one["rule"] == "privacy-aware")
    assert (chance[at], bound[at]) == pytest.approx((told["probabilities"][place], own["bound"]), rel=1e-6)
    assert noise[at] ** 2 == pytest.approx(told["noise"], rel=1e-6)
    looser = [*EPSILONS[:3], grid[-4], *EPSILONS[4:]]
    other = describe_choice(plan("privacy-aware", looser, select=2).plan, view.dimension)
    assert chance[-4] == pytest.approx(other["probabilities"][place], rel=0.02)


def test_public_clients_have_no_slider_and_many_clients_are_thinned():
    view = plan(epsilons=[1.0, math.inf, 2.0])
    assert [one["noises"] is None for one in explore(view.plan, view.dimension)["clients"]] == [False, True, False]
    source = sd.data.load("digits").partition("iid", clients=150, seed=0)
    many = sd.plan(source.with_budgets("dist2", delta=1e-5), "logistic", rounds=5, rate=0.5)
    able = [one for one in explore(many.plan, many.dimension)["clients"] if one["noises"]]
    assert len(able) == 60
    assert min(one["epsilon"] for one in able) == min(c["epsilon"] for c in many.clients)


# ---- in the browser ----


@pytest.fixture(scope="module")
def browser():
    with browsing.chromium() as found:
        if found is None:
            pytest.skip(browsing.REMEDY)
        yield found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_plan(plan(), tmp_path_factory.mktemp("plan") / "plan.html", "hospitals")


@pytest.fixture(scope="module")
def desk(browser, path):
    page, seen = browsing.opened(browser, path)
    page.seen = seen
    return page


def figure(page, name: str) -> float:
    shown = page.locator(f'#figures .tile:has(dt:text-is("{name}")) .figure').inner_text()
    return float(shown.split()[0].replace(",", "").replace("−", "-"))


def test_it_opens_from_disk_without_a_word_and_without_a_network(desk, path):
    assert desk.seen.requests == [path.resolve().as_uri()]
    assert desk.seen.complaints == []
    drawn = "Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map((p) => [p.id, p.data.length]))"
    assert desk.evaluate(drawn) == {"chart-noise": 3, "chart-aggregate": 6, "chart-bound": 6, "chart-shares": 1}


def test_as_planned_the_page_agrees_with_the_plan(desk):
    view = plan()
    assert figure(desk, "Noise multiplier z") == pytest.approx(view.clients[0]["noise"], rel=5e-3)
    assert figure(desk, "Noise over largest signal") == pytest.approx(view.clients[0]["noise_to_signal"], rel=5e-3)
    assert figure(desk, "Noise on the aggregate") == pytest.approx(view.noise_on_aggregate, rel=5e-3)


def test_the_keyboard_moves_a_budget_and_everything_follows(desk):
    desk.locator("#slider").focus()
    for _ in range(4):
        desk.keyboard.press("PageUp")
    epsilon = float(desk.input_value("#epsilon"))
    assert epsilon > 0.5
    other = plan(epsilons=[epsilon, *EPSILONS[1:]])
    assert figure(desk, "Noise multiplier z") == pytest.approx(other.clients[0]["noise"], rel=0.01)
    assert figure(desk, "Noise on the aggregate") == pytest.approx(other.noise_on_aggregate, rel=0.01)
    assert "times less noise than planned" in desk.locator("#told").inner_text()
    assert f"ε = {epsilon:g}" in desk.locator("#slider").get_attribute("aria-valuetext")
    markers = "document.getElementById('chart-noise').data[2]"
    assert desk.evaluate(f"{markers}.x[0]") == pytest.approx(epsilon, rel=5e-3)
    desk.get_by_role("button", name="As planned").click()
    assert float(desk.input_value("#epsilon")) == 0.4


def test_another_client_is_chosen_from_the_table(desk):
    desk.locator("#t-clients .pick").nth(4).click()
    assert desk.locator("#who").input_value() == "4"
    assert float(desk.input_value("#epsilon")) == 8.0
    desk.fill("#epsilon", "0.5")
    desk.keyboard.press("Enter")
    desk.keyboard.press("Tab")
    other = plan(epsilons=[*EPSILONS[:4], 0.5, EPSILONS[5]])
    assert figure(desk, "Noise multiplier z") == pytest.approx(other.clients[4]["noise"], rel=0.01)
    assert "times the planned noise" in desk.locator("#told").inner_text()
    shares = desk.evaluate("document.getElementById('chart-shares').data[0].y")
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    desk.select_option("#who", "0")


def test_the_bound_is_that_of_the_ranking(desk):
    """By size there is no bias: ½√(2√T D Σ u²V) with V = (z/b)²/T."""
    view = plan()
    sizes = view.plan.population.sizes / view.plan.population.sizes.sum()
    factors = np.array([(c["noise"] / c["batch"]) ** 2 / c["turns"] for c in view.clients])
    expected = 0.5 * math.sqrt(2 * math.sqrt(20) * view.dimension * (sizes**2 * factors).sum())
    assert figure(desk, "Bound") == pytest.approx(expected, rel=5e-3)


def test_under_the_strictest_budget_everyone_follows_it(browser, tmp_path):
    page, seen = browsing.opened(browser, write_plan(plan("minimum-epsilon"), tmp_path / "plan.html"))
    before = figure(page, "Noise on the aggregate")
    page.select_option("#who", "4")
    assert figure(page, "Noise on the aggregate") == before
    page.fill("#epsilon", "2")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert figure(page, "Noise on the aggregate") == before
    page.fill("#epsilon", "0.2")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    other = plan("minimum-epsilon", [*EPSILONS[:4], 0.2, EPSILONS[5]])
    assert figure(page, "Noise on the aggregate") == pytest.approx(other.noise_on_aggregate, rel=0.01)
    assert seen.complaints == []
    page.close()


def test_where_clients_are_drawn_the_chance_is_explored_too(browser, tmp_path):
    view = plan("privacy-aware", select=2)
    page, seen = browsing.opened(browser, write_plan(view, tmp_path / "plan.html"))
    assert seen.complaints == []
    chance = view.plan.schedule.probabilities[0]
    assert figure(page, "Drawn per round") == pytest.approx(2 * chance, rel=5e-3)
    assert page.locator("#chart-chance .main-svg").count() > 0
    assert "this plan" in page.locator("#t-rules").inner_text()
    page.close()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_themes_fit_a_phone(browser, path, theme):
    page, seen = browsing.opened(browser, path, width=390, height=844, theme=theme)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate(browsing.TEXT_CONTRAST) == []
    assert seen.complaints == []
    page.close()


def test_it_fits_a_desk(desk):
    assert desk.evaluate("document.documentElement.scrollWidth") == 1280


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_sticks_out_of_the_window(browser, path, width):
    page, _ = browsing.opened(browser, path, width=width)
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    assert browsing.overflowing(page) == []
    page.close()


def test_a_page_without_privacy_opens_in_silence_too(browser, tmp_path):
    page, seen = browsing.opened(browser, write_plan(plan("fedavg"), tmp_path / "plan.html"))
    assert seen.complaints == []
    alarm = page.locator(".verdict.bad .headline")
    assert alarm.inner_text() == "NOT PRIVATE"
    assert alarm.bounding_box()["y"] < 400
    page.close()


def test_structure_and_labels(desk):
    controls = "[...document.querySelectorAll('button,select,input')]"
    assert desk.evaluate(f"{controls}.filter((n) => !n.textContent.trim() && !n.labels?.length).length") == 0
    levels = desk.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => Number(h.tagName[1]))")
    assert levels.count(1) == 1
    assert desk.locator(".chart").count() == 4
    assert all(chart.get_attribute("aria-label") for chart in desk.locator(".chart").all())
