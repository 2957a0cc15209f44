"""Shared noise before a run: what every site's multiplier really is, against all that colluders could subtract.

Nothing here uses the formulas under test: the covariance of what an adversary sees is written down and inverted, and ε
is dp-accounting's.
"""

import itertools
import math

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

import sordino as sd
from sordino.errors import BadInput
from sordino.methods import Population, Training, get, make_plan
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.trust import EVERYBODY, Shared, Trust
from sordino.privacy.types import Adjacency, Budget, Event, Sampling
from sordino.server.rules import SHARED_SPREAD
from sordino.study.file import read_study

INF = math.inf
CASES = {
    "equal": ("dp-fedavg", [1.0] * 4, [100] * 4, 1, 0),
    "unequal": ("dp-fedavg", [0.3, 1.0, 4.0, 12.0, 0.7], [40, 900, 120, 60, 300], 2, 0),
    "nobody colludes": ("auto", [0.3, 1.0, 4.0, 12.0, 0.7, 2.0], [40, 900, 120, 60, 300, 77], 0, 0),
    "lost sites": ("declared-variance", [0.3, 1.0, 4.0, 12.0, 0.7, 2.0], [40, 900, 120, 60, 300, 77], 2, 1),
    "two lost": ("weiavg", [0.3, 1.0, 4.0, 12.0, 0.7, 2.0], [40, 900, 120, 60, 300, 77], 1, 2),
    "all others collude": ("dp-fedavg", [0.3, 1.0, 4.0], [40, 900, 120], 2, 0),
    "more than there are": ("dp-fedavg", [0.3, 1.0, 4.0], [40, 900, 120], 7, 0),
    "lost and colluding are everybody": ("dp-fedavg", [0.3, 1.0, 4.0, 2.0], [40, 900, 120, 70], 2, 2),
    "one alone": ("dp-fedavg", [0.8], [90], 0, 0),
    "two": ("dp-fedavg", [0.8, 3.0], [90, 50], 0, 0),
    "one of two colludes": ("dp-fedavg", [0.8, 3.0], [90, 50], 1, 0),
    "a public site": ("dp-fedavg", [0.8, INF, 3.0, 1.5], [90, 500, 50, 60], 1, 0),
    "public sites and the budget's weights": ("weiavg", [0.8, INF, 3.0, INF, 1.5], [90, 500, 50, 70, 60], 1, 0),
    "everybody at the strictest": ("minimum-epsilon", [0.8, 6.0, 3.0, 1.5], [90, 500, 50, 60], 1, 0),
    "a question beside": ("quantile-clipping", [0.3, 1.0, 4.0, 12.0], [40, 900, 120, 60], 1, 0),
    "a question of its own": ("fedfdp", [0.3, 1.0, 4.0, 12.0], [40, 900, 120, 60], 1, 1),
    "another question of its own": ("adaptdp", [0.3, 1.0, 4.0, 12.0], [40, 900, 120, 60], 2, 0),
    "some are drawn": ("uniform", [0.3, 1.0, 4.0, 12.0, 0.7, 2.0], [40, 900, 120, 60, 300, 77], 1, 0),
    "some are drawn by their budgets": ("privacy-aware", [0.3, 1.0, 4.0, 2.0, 0.7], [40, 900, 120, 60, 300], 0, 0),
}


def planned(method, epsilons, sizes, colluders, dropouts, adjacency="zero-out", rounds=6, dimension=50, **more):
    budgets = tuple(Budget(e, 1e-5, Adjacency.parse(adjacency)) for e in epsilons)
    people = Population(tuple(f"site-{i}" for i in range(len(sizes))), np.array(sizes), budgets)
    drawn = {"select": 5} if get(method).select.draws else {}
    sampling = {"sampling": "full"} if adjacency == "replace-one" else {"rate": 0.3}
    training = Training(rounds=rounds, lr=0.1, clip=0.7, **sampling, **drawn, **more)
    return make_plan(get(method), training, people, dimension, 0, trust=Trust("shared", colluders, dropouts))


def seen_by(sites, target, known, deviations, shifts):
    """z of what a server sees that knows the payloads of ``known``: the sum of ``sites``, and each known payload.

    The observations are A·(noise of every payload), A with a row of ones and a unit row for each known payload. Moving
    a record of the target moves them by A·shift. For a Gaussian of covariance Σ, 1/z² = mᵀ Σ⁻¹ m; by part of the
    release (gradient, question), which have noises of their own, they add up.
    """
    total = 0.0
    for part in range(len(deviations)):
        rows = [[1.0] * len(sites)] + [[float(i == k) for i in sites] for k in known]
        see = np.array(rows)
        covariance = see @ np.diag([deviations[part][i] ** 2 for i in sites]) @ see.T
        moved = see @ np.array([shifts[part] if i == target else 0.0 for i in sites])
        total += float(moved @ np.linalg.pinv(covariance, rcond=1e-13, hermitian=True) @ moved)
    return 1 / math.sqrt(total)


def worst(asked, noisy, target, colluders, dropouts, deviations, shifts):
    """The smallest z over every set of lost sites and every set of colluders; public sites always collude."""
    found = INF
    public = [i for i in asked if not noisy[i]]
    others = [i for i in asked if noisy[i] and i != target]
    for gone in range(min(dropouts, len(others)) + 1):
        for lost in itertools.combinations(others, gone):
            there = [i for i in others if i not in lost]
            for known in itertools.combinations(there, min(colluders, len(there))):
                sites = sorted([target, *there, *public])
                found = min(found, seen_by(sites, target, [*known, *public], deviations, shifts))
    return found


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("case", CASES)
def test_every_sites_multiplier_is_the_worst_that_any_colluders_can_make_of_it(case, adjacency):
    method, epsilons, sizes, colluders, dropouts = CASES[case]
    plan = planned(*CASES[case], adjacency=adjacency)
    noisy = [not math.isinf(e) for e in epsilons]
    sensitivity = 2.0 if adjacency == "replace-one" else 1.0
    kinds = [[c.terms for c in plan.clients]] + [[c.asks[k] for c in plan.clients] for k in range(len(get(method).ask))
                                                 if get(method).ask[k].batch == "own"]  # fmt: skip
    assert len(kinds) == len(plan.sharing.releases)
    rounds = {tuple(sorted(set(row[row >= 0].tolist()))) for row in plan.schedule.asked}
    for terms, release in zip(kinds, plan.sharing.releases):
        weights = np.array(release.weights)
        assert weights.sum() == pytest.approx(1.0)
        assert (weights > 0).all()
        names = [name for name, _ in terms[0].parts]
        # What a site adds to its weighted mean, in units of the bound: what the gate draws over b, times w.
        added = [
            [w * t.own_noise(n) * sensitivity / t.divisor if loud else 0.0 for w, t, loud in zip(weights, terms, noisy)]
            for n in names
        ]
        for part, own in zip(release.parts, added):
            loud = np.array(own)[noisy]
            np.testing.assert_allclose(loud, loud[0], rtol=1e-9)  # everybody's own noise on the sum is the same
            # … and what a deployed site would add on the common lattice is that, up to rounding's allowance.
            assert part.deviation * part.grain == pytest.approx(loud[0], rel=1e-5)
            assert part.deviation * part.grain >= loud[0] * (1 - 1e-12)
        least = dict.fromkeys(range(len(sizes)), INF)
        for asked in rounds:
            for i in (i for i in asked if noisy[i]):
                shifts = [sensitivity * weights[i] / terms[i].divisor] * len(names)
                least[i] = min(least[i], worst(asked, noisy, i, colluders, dropouts, added, shifts))
        for i in (i for i in least if noisy[i] and math.isfinite(least[i])):
            promised = 1 / math.sqrt(sum(terms[i].noise(name) ** -2 for name in names))
            assert terms[i].event.noise == pytest.approx(promised)
            assert least[i] >= promised * (1 - 1e-9), f"{case}: site {i} is less protected than its ledger says"
            full = all(len(r) == len(sizes) for r in rounds)
            if full:  # and not better either, so nothing is wasted
                assert least[i] == pytest.approx(promised, rel=1e-9)
            alone = math.sqrt(sum(n[i] ** 2 for n in added) / len(names))
            assert alone > 0


def judged(events, delta, neighbours=dp.NeighboringRelation.REPLACE_SPECIAL):
    """dp-accounting's ε of (rate, z, count)s."""
    book = PLDAccountant(neighbours, value_discretization_interval=1e-3)
    for rate, noise, count in events:
        one = dp.GaussianDpEvent(noise)
        book.compose(one if rate == 1 else dp.PoissonSampledDpEvent(rate, one), count)
    return book.get_epsilon(delta)


@pytest.mark.parametrize("case", ["unequal", "lost sites", "a question of its own", "a public site", "some are drawn"])
def test_no_plan_costs_more_than_its_budget_by_another_accountant(case):
    plan = planned(*CASES[case])
    dropouts = CASES[case][4]
    for c, times in zip(plan.clients, plan.schedule.counts):
        assert c.turns == (times + dropouts if times else 0), "a lost site repeats a round, which is paid for"
        if c.budget.is_public:
            assert c.epsilon == INF
            continue
        every = [(c.terms.sampling.rate, c.terms.event.noise, c.turns * c.terms.count)]
        every += [(a.sampling.rate, a.event.noise, q) for a, q in zip(c.asks, c.queries)]
        if c.turns:
            found = judged(every, c.budget.delta)
            assert found <= c.budget.epsilon * (1 + 2e-3)
            assert found == pytest.approx(c.epsilon, rel=5e-3)


def test_a_budget_that_limits_is_used_up_and_no_budget_is_wasted_for_nothing():
    plan = planned(*CASES["unequal"])
    spent = [c.epsilon / c.budget.epsilon for c in plan.clients]
    assert max(spent) == pytest.approx(1.0, abs=1e-3)


def test_dropouts_reserve_that_many_turns_and_shares():
    most = planned(*CASES["nobody colludes"][:3], 0, 0)
    for lost in (1, 2):
        plan = planned(*CASES["nobody colludes"][:3], 0, lost)
        assert all(a.turns == b.turns + lost for a, b in zip(plan.clients, most.clients))
        assert plan.clients[0].terms.shared.honest == 6 - lost
        assert plan.sharing.needed == 6 - lost


def test_where_all_others_collude_the_noise_is_each_sites_own():
    for colluders in (5, 6, 50):
        plan = planned("dp-fedavg", [0.3, 1.0, 4.0, 12.0, 0.7, 2.0], [40, 900, 120, 60, 300, 77], colluders, 0)
        plain = make_plan(plan.method, plan.training, plan.population, 50, 0)
        for c, alone in zip(plan.clients, plain.clients):
            assert c.terms.own_noise("gradient") == c.noise >= alone.noise * (1 - 1e-12)
            assert c.terms.event.alone().noise == c.noise
            assert c.terms.shared.words() == EVERYBODY
        assert plan.sharing.needed == 1


def test_public_sites_do_not_count():
    noisy = planned("dp-fedavg", [0.8, 3.0, 1.5], [90, 50, 60], 1, 0)
    public = planned("dp-fedavg", [0.8, 3.0, 1.5, INF, INF], [90, 50, 60, 70, 80], 1, 0)
    assert noisy.sharing.sites == public.sharing.sites == 3
    assert public.sharing.honest == 2
    assert [c.noise for c in public.clients[3:]] == [0.0, 0.0]
    with pytest.raises(BadInput, match="nobody has a finite budget"):
        planned("dp-fedavg", [INF, INF], [9, 9], 0, 0)


def test_more_colluders_cost_more_noise_and_fewer_sites_too():
    each = [planned(*CASES["nobody colludes"][:3], c, 0).sharing.noise for c in range(6)]
    assert (np.diff(each) > 0).all()
    spread = [planned("dp-fedavg", [1.0] * n, [100] * n, 0, 0).sharing.noise * n for n in (1, 4, 16)]
    np.testing.assert_allclose(spread, spread[0], rtol=1e-6)  # the noise of one, not of all


def test_the_strictest_site_does_not_drown_all():
    """ε = 0.01 beside nineteen of ε = 4: at shares by size it would set everybody's noise."""
    fair = planned("dp-fedavg", [4.0] * 20, [100] * 20, 10, 0, rounds=200)
    strict = planned("dp-fedavg", [0.01] + [4.0] * 19, [100] * 20, 10, 0, rounds=200)
    assert strict.sharing.noise < 1.1 * fair.sharing.noise
    weights = strict.sharing.releases[0].weights
    assert 0 < weights[0] < 0.2 * weights[1]
    assert strict.clients[0].epsilon <= 0.01


def test_the_plan_shows_the_noise_that_the_sum_has(digits):
    keys = {"rounds": 3, "rate": 0.2, "lr": 0.3, "clip": 0.7}
    view = sd.plan(digits, "logistic", "weiavg", trust={"noise": "shared", "colluders": 2}, **keys)
    weights = view.plan.sharing.releases[0].weights
    each = [w * c.noise / math.sqrt(6 - 2) / c.terms.divisor for w, c in zip(weights, view.plan.clients)]
    assert view.noise_on_aggregate == pytest.approx(0.3 * 0.7 * math.sqrt(sum(e**2 for e in each)))
    assert view.noise_on_aggregate == pytest.approx(0.3 * 0.7 * view.plan.sharing.noise)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
@pytest.mark.parametrize("case", ["unequal", "lost sites", "two lost", "a public site"])
def test_weights_and_noise_balance_bias_and_noise(case, adjacency):
    """Over a grid of v: τ²‖w − p‖² + n v²/(h T), with the noise that budgets need; few numbers, so that bias counts."""
    method, epsilons, sizes, colluders, dropouts = CASES[case]
    rounds, dimension = 40, 3
    plan = planned(*CASES[case], adjacency=adjacency, rounds=rounds, dimension=dimension)
    longer = Training(**{**vars(plan.training), "rounds": rounds + dropouts})
    needed = [c.noise for c in make_plan(plan.method, longer, plan.population, dimension, 0).clients]
    noisy = np.array([not math.isinf(e) for e in epsilons])
    counts = np.array(epsilons if method == "weiavg" else sizes)
    shares = counts / counts.sum()
    rest = shares[noisy].sum()
    wanted = shares[noisy] / rest
    most = np.array([c.terms.divisor / (z * c.terms.adjacency.sensitivity) for c, z in zip(plan.clients, needed) if z])
    spread = 0.0 if method == "declared-variance" else SHARED_SPREAD**2 / dimension
    ratio = noisy.sum() / max(1, noisy.sum() - colluders - dropouts) / rounds

    def at(level):
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if np.minimum(wanted + middle, most * level).sum() < 1 else (low, middle)
        weights = np.minimum(wanted + high, most * level)
        return spread * ((weights - wanted) ** 2).sum() + ratio * level**2, weights

    grid = np.geomspace(1 / most.sum(), max(1 / most.sum(), (wanted / most).max()), 400)
    _, weights = min((at(level) for level in grid), key=lambda one: one[0])
    if case in ("unequal", "two lost"):
        assert not np.allclose(weights, most / most.sum(), rtol=0.02), "bias counts here"
    found = np.array(plan.sharing.releases[0].weights)
    np.testing.assert_allclose(found[noisy], rest * weights, rtol=0.02)
    np.testing.assert_allclose(found[~noisy], shares[~noisy])
    for c, z in zip(plan.clients, needed):
        assert c.noise >= z * (1 - 1e-4), "nobody gets less noise than its budget asks for"


@pytest.mark.parametrize("case", CASES)
def test_every_sum_fits_its_integers(case):
    """All records of all sites at their bound, and forty deviations of everybody's noise, stay below 2⁶³ steps."""
    plan = planned(*CASES[case], dimension=1_000_000)
    rates = np.array([c.terms.sampling.rate for c in plan.clients])
    release = plan.sharing.releases[0]
    for part in release.parts:
        signal = (np.array(release.weights) / rates).sum() / part.grain
        assert signal + 40 * part.deviation * math.sqrt(len(rates)) < 2.0**63
        least = min(w / c.terms.divisor for w, c in zip(release.weights, plan.clients) if not c.budget.is_public)
        assert part.grain * math.sqrt(part.width) <= least * 2.0**-20 * (1 + 1e-12)
        assert part.deviation >= 5, "sums of discrete Gaussians are near one from here on"


def test_weights_too_unequal_for_one_sum_of_integers_are_refused():
    """Where sites with public data count for all but a millionth, a lattice fine enough for the others is too fine."""
    with pytest.raises(BadInput, match=r"does not fit 64 bits.*use aggregate = 'balanced'"):
        planned("weiavg", [1.0, INF, 5.0], [30_000] * 3, 0, 0, dimension=10_000_000)
    planned("dp-fedavg", [1.0, INF, 5.0], [30_000] * 3, 0, 0, dimension=10_000_000)


def test_virtual_copies_are_one_site():
    plan = planned("uniform", [1.0] * 4, [100] * 4, 0, 0, rounds=40)
    for row in plan.schedule.asked:
        here = row[row >= 0].tolist()
        assert len(here) == len(set(here))
    assert plan.sharing.sites == min(len(set(r[r >= 0].tolist())) for r in plan.schedule.asked)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"noise": "secret"}, "unknown"),
        ({"noise": None}, "unknown"),
        ({"noise": ["shared"]}, "unknown"),
        ({"noise": "shared", "colluders": -1}, "from 0 upwards"),
        ({"noise": "shared", "colluders": True}, "from 0 upwards"),
        ({"noise": "shared", "colluders": 2.0}, "from 0 upwards"),
        ({"noise": "shared", "colluders": "2"}, "from 0 upwards"),
        ({"noise": "shared", "dropouts": -1}, "from 0 upwards"),
        ({"noise": "shared", "dropouts": False}, "from 0 upwards"),
        ({"noise": "shared", "dropouts": None}, "from 0 upwards"),
        ({"colluders": 1}, "goes with trust.noise = 'shared'"),
        ({"noise": "per-site", "dropouts": 1}, "goes with trust.noise = 'shared'"),
        ({"noise": "shared", "sites": 3}, "no key 'sites'"),
        ("shared", "it is a table"),
        (True, "it is a table"),
        (["shared"], "it is a table"),
    ],
)
def test_wrong_choices_of_trust_are_refused_before_anything_is_read(digits, given, told):
    with pytest.raises(BadInput, match=told):
        sd.plan(digits, "logistic", "dp-fedavg", rounds=2, trust=given)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('noise = "secret"', "noise"),
        ('noise = "shared"\ncolluders = -1', "colluders"),
        ('noise = "shared"\ncolluders = true', "colluders"),
        ('noise = "shared"\ncolluders = 2.0', "colluders"),
        ('noise = "shared"\ncolluders = "2"', "colluders"),
        ('noise = "shared"\ndropouts = 1.5', "dropouts"),
        ('noise = "shared"\nsites = 3', "sites"),
        ("colluders = 1", "goes with trust.noise"),
        ("dropouts = 1", "goes with trust.noise"),
    ],
)
def test_wrong_choices_of_trust_in_a_study_file_are_refused(tmp_path, lines, told):
    path = tmp_path / "study.toml"
    path.write_text(f"[study]\nrounds = 2\n\n[data]\nclients = 4\n\n[budgets]\nepsilon = 2.0\n\n[trust]\n{lines}\n")
    with pytest.raises(BadInput, match=told):
        read_study(path).check()


def test_a_study_files_choice_of_trust_reaches_the_plan(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('[budgets]\nepsilon = 2.0\n\n[trust]\nnoise = "shared"\ncolluders = 2\ndropouts = 1\n')
    assert read_study(path).arguments()["trust"] == Trust("shared", 2, 1)


@pytest.mark.parametrize("composition", ["declared", "filter"])
def test_what_a_sites_own_share_promises_is_what_a_ledger_says_of_that_much_noise(tmp_path, composition):
    """Two plans, the second declared after the first released: where the first leaves room, a filter admits it."""
    shared = Shared(sites=6, colluders=1, dropouts=1, deviation=1e6, width=10)
    found = {}
    for name, event in {
        "shared": Event("gradient", Sampling.poisson(0.1), 8.0, shared=shared),
        "alone": Event("gradient", Sampling.poisson(0.1), 8.0 / math.sqrt(6 - 1 - 1)),
    }.items():
        with Ledger(tmp_path / f"{name}.db") as book:
            book.open_account("site", Budget(9.0, 1e-5), composition=composition)
            for run in ("first", "second"):
                book.declare([LedgerPlan("site", run, (event,), 20)])
                keys = [Charge("site", run, f"{run} {k}", "gradient", 1, "ab" * 32) for k in range(20)]
                for one in keys:
                    book.charge([one])
            found[name] = book.own_epsilon()["site"], book.epsilon()["site"]
    assert found["shared"][0] == pytest.approx(found["alone"][1], rel=1e-6)
    assert found["shared"][1] < found["shared"][0]
