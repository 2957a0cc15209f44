"""Budgets: the published distributions, drawn reproducibly, and the budgets people write down themselves."""

import json
import math
import re

import numpy as np
import pytest

from sordino.data import load
from sordino.data.budgets import MIXTURES, UNIFORMS, epsilons, published
from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Budget

MANY = [f"c{k}" for k in range(20_000)]


@pytest.fixture(scope="module")
def twenty():
    return load("digits").partition("iid", clients=20)


TABLE_4 = {
    "dist1": "1 N(2.0, 1.0)",
    "dist2": "0.2 N(0.2, 0.01) 0.6 N(1.0, 0.1) 0.2 N(5.0, 1.0)",
    "dist3": "U[0.2, 5]",
    "dist4": "0.2 N(0.2, 0.01) 0.6 N(0.5, 0.1) 0.2 N(2.0, 1.0)",
    "dist5": "U[0.2, 2]",
    "dist6": "0.3 N(0.2, 0.01) 0.5 N(0.5, 0.1) 0.2 N(1.0, 0.1)",
    "dist7": "U[0.2, 1]",
    "dist8": "0.6 N(0.2, 0.01) 0.4 N(0.5, 0.1)",
    "dist9": "U[0.2, 0.5]",
}


@pytest.mark.parametrize("name", sorted(TABLE_4))
def test_the_distributions_are_those_of_table_4(name):
    numbers = [float(number) for number in re.findall(r"[\d.]+", TABLE_4[name])]
    if TABLE_4[name].startswith("U"):
        assert UNIFORMS[name] == tuple(numbers)
    else:
        parts = [value for w, mean, var in MIXTURES[name] for value in (w, mean, math.sqrt(var))]
        assert parts == pytest.approx(numbers)


def plain_draws(parts, count, random):
    """One value after another; a value ≤ 0 is thrown away, component and all."""
    kept = []
    while len(kept) < count:
        weights = [weight for weight, _, _ in parts]
        _, mean, variance = parts[random.choice(len(parts), p=weights)]
        value = random.normal(mean, math.sqrt(variance))
        if value > 0:
            kept.append(value)
    return np.array(kept)


@pytest.mark.parametrize("name", sorted(MIXTURES))
def test_mixtures_are_distributed_like_the_plain_loop(name):
    values, batches = epsilons(name, MANY, seed=1)
    expected = plain_draws(MIXTURES[name], 20_000, np.random.default_rng(0))
    assert batches is None
    assert min(values) > 0
    levels = np.linspace(0.02, 0.98, 25)
    at = np.quantile(expected, levels)
    assert np.abs([np.mean(np.array(values) <= point) for point in at] - levels).max() < 0.02


@pytest.mark.parametrize("name", sorted(UNIFORMS))
def test_uniform_distributions_fill_their_interval(name):
    low, high = UNIFORMS[name]
    values, _ = epsilons(name, MANY)
    assert low <= min(values) < low + 0.01 * (high - low)
    assert high - 0.01 * (high - low) < max(values) <= high
    assert np.mean(values) == pytest.approx((low + high) / 2, rel=0.02)


def test_the_table_of_robust_hdp_prints_standard_deviations():
    """The authors' own draws are far likelier with N(m, s) read as deviation s than as variance s."""

    def log_likelihood(values, parts):
        density = [
            sum(w * math.exp(-((v - m) ** 2) / (2 * var)) / math.sqrt(2 * math.pi * var) for w, m, var in parts)
            for v in values
        ]
        return sum(map(math.log, density))

    for name in ("dist2", "dist4", "dist6", "dist8"):
        values = published()["epsilons"][name.capitalize()]
        as_variances = [(w, m, math.sqrt(var)) for w, m, var in MIXTURES[name]]
        assert log_likelihood(values, MIXTURES[name]) > log_likelihood(values, as_variances) + 5


def test_published_budgets_bring_their_batch_sizes(twenty):
    federation = twenty.with_budgets("dist1-published", delta=1e-4)
    assert [budget.epsilon for budget in federation.budgets][:4] == [2.81, 1.69, 1.74, 1.46]
    assert federation.batch_sizes[:4] == (32, 64, 16, 32)
    assert {budget.delta for budget in federation.budgets} == {1e-4}
    with pytest.raises(BadInput, match="for 20 clients, "):
        load("digits").partition("iid", clients=12).with_budgets("dist1-published")


def test_all_nine_distributions_are_there_both_ways(twenty):
    for k in range(1, 10):
        assert len(twenty.with_budgets(f"dist{k}").budgets) == 20
        assert len(twenty.with_budgets(f"dist{k}-published").batch_sizes) == 20


def test_budget_draws_depend_on_their_seed_alone(twenty):
    draw = [twenty.with_budgets("dist2", seed=seed).budgets for seed in (0, 0, 1)]
    assert draw[0] == draw[1] != draw[2]
    other = load("digits").partition("dirichlet", clients=20, beta=0.5, seed=9).with_budgets("dist2", seed=0)
    assert other.budgets == draw[0]


def test_the_selection_paper_mixture_discards_negatives():
    """0.3·N(0.5, 0.04) + 0.7·N(10, 1), second arguments variances: about 0.6 % of the first part is below zero."""
    values = np.array(epsilons({"mixture": [[0.3, 0.5, 0.04], [0.7, 10, 1]]}, MANY)[0])
    small = values[values < 4]
    assert values.min() > 0
    assert len(small) / len(values) == pytest.approx(0.3, abs=0.02)
    assert small.std() == pytest.approx(0.2, rel=0.05)
    negative = np.array(epsilons({"mixture": [[1.0, -1.0, 1.0]]}, MANY)[0])
    assert negative.min() > 0
    # The mean of N(−1, 1) given that it is positive: −1 + φ(1)/(1 − Φ(1)).
    assert negative.mean() == pytest.approx(0.5251, abs=0.02)


def test_uniform_number_list_and_infinity(twenty):
    low = twenty.with_budgets("uniform", low=0.0, high=1.0, seed=4)
    assert all(0 < budget.epsilon < 1 for budget in low.budgets)
    assert low.budgets == twenty.with_budgets({"uniform": [0, 1]}, seed=4).budgets
    assert twenty.with_budgets(3.0).budgets == (Budget(3.0, 1e-5),) * 20
    listed = twenty.with_budgets([1.0] * 19 + [math.inf], adjacency="replace-one")
    assert listed.budgets[19].is_public
    assert not listed.budgets[0].is_public
    assert listed.budgets[0].adjacency is Adjacency.REPLACE_ONE
    assert all(budget.is_public for budget in twenty.with_budgets("inf").budgets)


def test_public_clients_and_deltas_of_their_own(twenty):
    federation = twenty.with_budgets("dist2", public=["client-03"], delta=[1e-5] * 19 + [1e-6])
    assert [budget.is_public for budget in federation.budgets].index(True) == 3
    assert federation.budgets[19].delta == 1e-6
    with pytest.raises(BadInput, match="'nobody', which is no client"):
        twenty.with_budgets("dist2", public="nobody")


def test_a_csv_column_is_matched_by_order_or_by_name(tmp_path):
    three = load("digits").partition("iid", clients=3)
    file = tmp_path / "budgets.csv"
    file.write_text("site,epsilon\nclient-02,inf\nclient-00,0.5\nclient-01,2\n", encoding="utf-8")
    by_name = three.with_budgets({"csv": str(file), "column": "epsilon", "client": "site"})
    found = three.with_budgets({"csv": str(file), "column": "epsilon"})  # a column that holds names is read by name
    assert [budget.epsilon for budget in by_name.budgets] == [0.5, 2.0, math.inf]
    assert found.budgets == by_name.budgets
    file.write_text("site,epsilon\nA,inf\nB,0.5\nC,2\n", encoding="utf-8")  # a dealt data set's clients have no names
    by_order = three.with_budgets({"csv": str(file), "column": "epsilon"})
    assert [budget.epsilon for budget in by_order.budgets] == [math.inf, 0.5, 2.0]
    with pytest.raises(BadInput, match="no column 'eps': it has site, epsilon"):
        three.with_budgets({"csv": str(file), "column": "eps"})
    file.write_text("site,epsilon\nclient-02,1\nclient-00,many\nclient-01,2\n", encoding="utf-8")
    with pytest.raises(BadInput, match="row 2, column epsilon is 'many'"):
        three.with_budgets({"csv": str(file), "column": "epsilon"})
    with pytest.raises(BadInput, match="a row for 'client-02', which is no client"):
        load("digits").partition("iid", clients=2).with_budgets({"csv": str(file), "column": "epsilon"})
    with pytest.raises(BadInput, match="no row for client 'client-03'"):
        load("digits").partition("iid", clients=4).with_budgets(
            {"csv": str(file), "column": "epsilon", "client": "site"}
        )
    with pytest.raises(BadInput, match="cannot be read"):
        three.with_budgets({"csv": str(tmp_path / "none.csv"), "column": "epsilon"})


def test_the_description_is_json_with_infinity_as_null(twenty):
    described = twenty.with_budgets([1.0] * 19 + [math.inf], seed=3).description["budgets"]
    assert json.loads(json.dumps(described, allow_nan=False))["spec"][19] is None
    assert described["seed"] == 3


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        (0.0, {}, "client 'client-00': epsilon is 0.0"),
        (-1.0, {}, "epsilon > 0"),
        (math.nan, {}, "NaN"),
        ([1.0, 2.0], {}, "2 values for 20 clients"),
        (["one"] * 20, {}, r"budgets\[0\] is 'one'"),
        ("dist10", {}, "'dist10' are unknown"),
        ("dist0-published", {}, "unknown"),
        ("uniform", {}, "need low and high"),
        ("uniform", {"low": 2.0, "high": 1.0}, "low < high"),
        ("dist2", {"low": 2.0}, "take no low"),
        ({"mixture": [[0.5, 1.0, 0.1]]}, {}, "sum to 0.5"),
        ({"mixture": [[1.0, 1.0]]}, {}, "weight, mean, variance"),
        ({"mixture": [[1.0, 1.0, -0.1]]}, {}, "≥ 0"),
        ({"mixture": [[1.0, -100.0, 0.1]]}, {}, "hardly ever"),
        ({"gauss": 1}, {}, "names 'gauss', which is no client"),
        ({"csv": "b.csv"}, {}, "keys"),
        (1.0, {"delta": 0.0}, "delta is 0.0"),
        (1.0, {"delta": [1e-5]}, "1 values for 20 clients"),
        (1.0, {"adjacency": "neighbour"}, "adjacency 'neighbour' is unknown"),
    ],
)
def test_impossible_budgets_are_refused_with_a_remedy(twenty, spec, options, words):
    with pytest.raises(BadInput, match=words):
        twenty.with_budgets(spec, **options)
