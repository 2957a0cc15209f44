"""A plan with shared noise: what it says in the terminal, as JSON and as a page, against plain loops."""

from __future__ import annotations

import io
import json
import math
import re
from functools import cache
from html import unescape

import numpy as np
import pytest
import report_browser as browsing
from rich.console import Console

import sordino as sd
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.types import Event
from sordino.study.report.plan import render_plan, write_plan
from sordino.study.result import to_json

EPSILONS = (0.4, 1.0, 2.0, 4.0, 8.0, 1.5)
SHARED = {"noise": "shared", "colluders": 2}


@cache
def federation(epsilons=EPSILONS):
    source = sd.data.load("digits").partition("dirichlet", clients=len(epsilons), beta=1.0, seed=0, minimum=40)
    return source.with_budgets(list(epsilons), delta=1e-5)


@cache
def made(method, trust, epsilons, settings):
    settings = {"rounds": 20, "rate": 0.2, "lr": 0.3, **dict(settings)}
    return sd.plan(federation(epsilons), "logistic", method, trust=dict(trust) or None, **settings)


def plan(method="dp-fedavg", trust=SHARED, epsilons=EPSILONS, **settings):
    return made(method, tuple(trust.items()), tuple(epsilons), tuple(settings.items()))


def printed(view, width: int = 80) -> str:
    out = io.StringIO()
    Console(width=width, file=out).print(view)
    return out.getvalue()


def flowing(text: str) -> str:
    return " ".join(text.split())


def page_words(page: str) -> str:
    body = page[page.index("<main") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).replace("\u00a0", " ").split())


# ---- the figures, by plain loops ----


@pytest.mark.parametrize("method", ["dp-fedavg", "weiavg", "declared-variance", "fedfdp"])
def test_noise_on_the_sum_is_that_of_all_shares_added_up(method):
    view = plan(method)
    total, counts = 0.0, 6
    for client, told in zip(view.plan.clients, view.sharing["clients"]):
        own = client.noise / math.sqrt(counts - 2)  # h = n − c
        total += (told["weight"] * own / client.terms.divisor) ** 2
    assert view.sharing["noise"] == pytest.approx(math.sqrt(total), rel=1e-9)
    assert sum(one["weight"] for one in view.sharing["clients"]) == pytest.approx(1.0)
    assert view.noise_on_aggregate == pytest.approx(0.3 * math.sqrt(total), rel=1e-9)


@pytest.mark.parametrize("method", ["dp-fedavg", "weiavg", "declared-variance"])
def test_noise_per_site_is_that_of_the_plan_without_trust(method):
    view, alone = plan(method), plan(method, {})
    each = np.array([c.noise / c.terms.divisor for c in alone.plan.clients])
    weights = {
        "dp-fedavg": alone.plan.population.sizes,
        "weiavg": np.array(EPSILONS),
        "declared-variance": 1 / each**2,
    }[method]
    expected = math.sqrt(sum((w * z) ** 2 for w, z in zip(weights / weights.sum(), each)))
    assert view.sharing["noise_per_site"] == pytest.approx(expected, rel=1e-9)
    assert view.sharing["factor"] == pytest.approx(expected / view.sharing["noise"])
    assert [one["noise_per_site"] for one in view.sharing["clients"]] == [c.noise for c in alone.plan.clients]


def test_a_sites_own_share_alone():
    view = plan()
    for client, told in zip(view.plan.clients, view.sharing["clients"]):
        event = Event("gradient", client.terms.sampling, client.noise / 2.0, 20)  # √h = √(6 − 2)
        cost = float(composed_epsilon([[event]], [1e-5])[0])
        assert told["own_epsilon"] == pytest.approx(cost, rel=1e-6)
        assert told["planned_epsilon"] <= client.budget.epsilon < told["own_epsilon"] * 3


def test_each_further_site_costs_the_root_of_n_over_h():
    more = plan(trust={**SHARED, "dropouts": 1}).sharing["more"]
    now = math.sqrt(6 / (6 - 2 - 1))
    assert [(one["more"], one["honest"]) for one in more] == [(1, 2), (2, 1)]
    assert [one["factor"] for one in more] == pytest.approx([math.sqrt(6 / 2) / now, math.sqrt(6) / now])


def test_rounds_with_few_participants_are_averaged():
    view = plan("unbiased", {"noise": "shared", "colluders": 1}, select=5)
    weights = np.array([one["weight"] for one in view.sharing["clients"]])
    own = np.array([c.terms.own_noise("gradient") / c.terms.divisor for c in view.plan.clients])
    powers = []
    for number in range(1, 21):
        here = view.plan.schedule.round(number).clients
        powers.append(sum((weights[i] * own[i]) ** 2 for i in here) / weights[here].sum() ** 2)
    assert view.sharing["noise"] == pytest.approx(math.sqrt(np.mean(powers)), rel=1e-9)


def test_what_sharing_would_bring_is_what_it_brings():
    told = plan(trust={}).if_shared
    assert (told["sites"], told["colluders"]) == (6, 3)
    shared = plan(trust={"noise": "shared", "colluders": 3}).sharing
    assert told["noise"] == pytest.approx(shared["noise"], rel=1e-6)
    assert told["factor"] == pytest.approx(shared["factor"], rel=1e-6)
    assert told["against"] == shared["against"] == "against the server and any three of the five other sites"


@pytest.mark.parametrize(
    "view",
    [
        lambda: plan("fedavg", {}),
        lambda: plan("robust-hdp", {}),
        lambda: plan(trust={}, steps=3),
        lambda: plan(trust={}, epsilons=(1.0, 2.0)),
        lambda: plan(trust={}, epsilons=(1.0, 2.0, math.inf)),
    ],
)
def test_nothing_is_offered_where_it_cannot_be_had(view):
    assert view().if_shared is None
    assert "[trust]" not in printed(view())


def test_public_sites_add_no_noise_and_do_not_count():
    view = plan(trust=SHARED, epsilons=(1.0, 2.0, math.inf, 4.0, 1.0))
    assert (view.sharing["sites"], view.sharing["honest"]) == (4, 2)
    assert view.sharing["clients"][2]["noise"] == 0.0
    assert math.isinf(view.sharing["clients"][2]["own_epsilon"])
    assert "∞" in printed(view)


# ---- the terminal, JSON ----


def test_the_terminal_says_whom_promises_hold_against():
    text = flowing(printed(plan()))
    assert "planned ε holds against the server and any two of the five other sites: noise is shared" in text
    assert "times less" in text
    assert "own ε: what a site's own share of the noise promises if all others conspire with the server" in text
    assert "planned ε holds against the server and all other sites together" in flowing(printed(plan(trust={})))
    assert "holds" not in printed(plan("fedavg", {}))


def test_noise_per_site_says_quietly_what_sharing_would_bring():
    text = flowing(printed(plan(trust={})))
    assert re.search(r"[\d.]+ times less noise would do with half of all sites conspiring: \[trust\]", text)
    assert 'noise = "shared", colluders = 3' in text


def test_no_figure_is_cut_at_eighty_columns():
    view = plan()
    named = type(view)(view.plan, view.dimension, view.layers)
    long = [{**one, "client": "a-hospital-with-a-very-long-name-indeed"} for one in view.sharing["clients"]]
    object.__setattr__(named, "__dict__", {**named.__dict__, "sharing": {**view.sharing, "clients": long}})
    text = printed(named)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for one in view.sharing["clients"]:
        assert f"{one['noise']:.3f}" in text
        assert f"{one['own_epsilon']:.4g}" in text
    for one in view.sharing["more"]:
        assert f"× {one['factor']:.3f}" in text


def test_json_carries_it():
    told = json.loads(to_json(plan().to_dict()))
    assert told["trust"] == "against the server and any two of the five other sites"
    assert told["sharing"]["sites"] == 6
    assert len(told["sharing"]["clients"]) == 6
    assert told["if_shared"] is None
    alone = json.loads(to_json(plan(trust={}).to_dict()))
    assert alone["sharing"] is None
    assert alone["if_shared"]["colluders"] == 3
    assert plan("fedavg", {}).to_dict()["trust"] is None


def test_warned_of_trust_that_means_little():
    nobody = plan(trust={"noise": "shared"}).warnings
    assert any("any site that conspires with the server breaks the promise" in one for one in nobody)
    assert any("8.7 % less noise" in one for one in nobody)  # √(5/6) is 8.7 % below 1
    everybody = plan(trust={"noise": "shared", "colluders": 5}).warnings
    assert any("nothing is shared" in one for one in everybody)
    assert plan(trust={"noise": "shared", "colluders": 5}).trust == "against the server and all other sites together"
    assert plan().warnings == []


# ---- the page ----


def test_the_page_says_against_whom():
    told = page_words(render_plan(plan()))
    assert "That holds against the server and any two of the five other sites: noise is shared." in told
    assert "Whom does it protect against?" in told
    assert "4 of 6 shares are enough" in told
    alone = page_words(render_plan(plan(trust={})))
    assert "That holds against the server and all other sites together." in alone
    assert "It is a choice of trust" in alone
    assert "Whom does it protect" not in alone


@pytest.fixture(scope="module")
def browser():
    with browsing.chromium() as found:
        if found is None:
            pytest.skip(browsing.REMEDY)
        yield found


@pytest.fixture(scope="module")
def desk(browser, tmp_path_factory):
    page, seen = browsing.opened(browser, write_plan(plan(), tmp_path_factory.mktemp("plan") / "plan.html"))
    page.seen = seen
    return page


def figure(page, name: str) -> float:
    shown = page.locator(f'#figures .tile:has(dt:text-is("{name}")) .figure').inner_text()
    return float(re.search(r"[\d.,]+(?:e[−\d]+)?", shown)[0].replace(",", "").replace("−", "-"))


def slide(page, colluders: int, dropouts: int = 0) -> None:
    for name, value in (("colluders", 0), ("dropouts", 0), ("colluders", colluders), ("dropouts", dropouts)):
        page.locator(f"#{name}").fill(str(value))


def test_it_opens_in_silence_and_agrees_with_the_plan(desk):
    view = plan()
    assert desk.seen.complaints == []
    assert figure(desk, "Noise multiplier z") == pytest.approx(view.clients[0]["noise"], rel=5e-3)
    assert figure(desk, "Noise on the aggregate") == pytest.approx(view.noise_on_aggregate, rel=5e-3)
    assert figure(desk, "Against noise per site") == pytest.approx(view.sharing["factor"], rel=5e-3)
    assert figure(desk, "Its weight") == pytest.approx(100 * view.sharing["clients"][0]["weight"], rel=5e-3)
    own = view.sharing["clients"][0]["own_epsilon"]
    assert figure(desk, "If all others conspire") == pytest.approx(own, rel=0.02)
    drawn = "[...document.querySelectorAll('.js-plotly-plot')].map((p) => p.id).sort()"
    assert desk.evaluate(drawn) == [f"chart-{one}" for one in ("aggregate", "bound", "colluders", "noise", "shares")]


@pytest.mark.parametrize(("colluders", "dropouts"), [(0, 0), (1, 0), (4, 0), (5, 0), (1, 1), (0, 3)])
def test_the_sliders_do_what_another_plan_would(desk, colluders, dropouts):
    slide(desk, colluders, dropouts)
    other = plan(trust={"noise": "shared", "colluders": colluders, "dropouts": dropouts})
    close = 5e-3 if dropouts == 0 else 0.03
    assert figure(desk, "Noise on the aggregate") == pytest.approx(other.noise_on_aggregate, rel=close)
    assert figure(desk, "Noise multiplier z") == pytest.approx(other.clients[0]["noise"], rel=close)
    assert figure(desk, "Its weight") == pytest.approx(100 * other.sharing["clients"][0]["weight"], rel=close)
    said = desk.locator("#trusted").inner_text()
    assert other.sharing["against"] in said
    if dropouts and other.sharing["honest"] > 1:
        assert f"{dropouts} lost site" in said
    desk.get_by_role("button", name="As planned").click()
    assert "any two of the five" in desk.locator("#trusted").inner_text()


def test_another_budget_is_solved_for_with_shared_noise(desk):
    desk.select_option("#who", "4")
    desk.fill("#epsilon", "0.5")
    desk.keyboard.press("Enter")
    desk.keyboard.press("Tab")
    other = plan(epsilons=(*EPSILONS[:4], 0.5, EPSILONS[5]))
    assert figure(desk, "Noise on the aggregate") == pytest.approx(other.noise_on_aggregate, rel=0.01)
    assert figure(desk, "Its weight") == pytest.approx(100 * other.sharing["clients"][4]["weight"], rel=0.01)
    weights = desk.evaluate("document.getElementById('chart-shares').data[0].y")
    assert sum(weights) == pytest.approx(1.0, abs=1e-3)
    desk.select_option("#who", "0")


def test_together_they_leave_a_site_its_own_share(desk):
    slide(desk, 5, 5)
    assert desk.input_value("#colluders") == "5"
    assert desk.input_value("#dropouts") == "0"
    assert "Nothing is shared" in desk.locator("#trusted").inner_text()
    desk.get_by_role("button", name="As planned").click()


def test_sliders_have_names_and_values_for_those_who_hear_the_page(desk):
    assert desk.locator("#colluders").get_attribute("aria-valuetext") == "2 of 5 other sites"
    controls = "[...document.querySelectorAll('button,select,input')]"
    assert desk.evaluate(f"{controls}.filter((n) => !n.textContent.trim() && !n.labels?.length).length") == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda: plan("fedfdp", {"noise": "shared", "colluders": 9}, epsilons=(1.0, 2.0, math.inf, 4.0, 1.0)),
        pytest.param(lambda: plan("unbiased", {"noise": "shared"}, select=5), marks=pytest.mark.slow),
        pytest.param(lambda: plan("minimum-epsilon"), marks=pytest.mark.slow),
        pytest.param(
            lambda: plan("dp-fedavg", {"noise": "shared", "colluders": 1, "dropouts": 2}), marks=pytest.mark.slow
        ),
    ],
)
def test_other_methods_open_in_silence_and_agree_too(browser, tmp_path, view):
    page, seen = browsing.opened(browser, write_plan(view(), tmp_path / "plan.html"))
    assert seen.complaints == []
    assert figure(page, "Noise on the aggregate") == pytest.approx(view().noise_on_aggregate, rel=5e-3)
    page.close()


def test_a_phone_in_the_dark(browser, tmp_path):
    path = write_plan(plan(), tmp_path / "plan.html")
    page, seen = browsing.opened(browser, path, width=390, height=844, theme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert page.evaluate(browsing.TEXT_CONTRAST) == []
    assert seen.complaints == []
    page.close()
