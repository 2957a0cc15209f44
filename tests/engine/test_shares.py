"""Shares of a budget: what a question gets, by the Gaussian limit or by the accountant."""

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.methods import Population, Training, get, make_plan
from sordino.privacy import Budget, accounting
from sordino.privacy.accounting.cumulant import gaussian_epsilon, gaussian_mu

RECORDS, BATCH, ROUNDS, STEPS, DELTA = 20_345, 100, 100, 203, 1e-4
"""AdaptDP's T2: a norm is asked once a round, beside 203 gradients."""


def planned(epsilon, shares="limit", method="adaptdp", **parts):
    people = Population(("a",), np.array([RECORDS]), (Budget(epsilon, DELTA),))
    training = Training(rounds=ROUNDS, steps=STEPS, batch=BATCH)
    chosen = get(method, {"calibrate": {"name": "tight", "shares": shares}, **parts})
    return make_plan(chosen, training, people, 10, 0).clients[0]


@pytest.mark.parametrize(("epsilon", "limit"), [(1.0, 1.031), (4.0, 1.009), (8.0, 1.005)])
def test_a_tenth_by_the_accountant_leaves_the_gradients_what_they_need(epsilon, limit):
    alone = planned(epsilon, method="dp-fedavg").terms.noise("gradient")
    fair, naive = (planned(epsilon, shares) for shares in ("accountant", "limit"))
    assert fair.terms.noise("gradient") / alone < limit
    assert naive.terms.noise("gradient") / alone > 1.4, "which is why the limit is not enough here"
    assert fair.epsilon <= epsilon
    assert fair.epsilon > 0.999 * epsilon


def test_shares_by_the_accountant_are_the_shares_they_say():
    """Alone, every kind of release costs what a Gaussian with its share of μ² would, up to one common factor."""
    found = planned(4.0, "accountant")
    mu = gaussian_mu(np.array([4.0]), np.array([DELTA]))
    factors = []
    for share, z, count in (
        (0.9, found.terms.noise("gradient"), ROUNDS * STEPS),
        (0.1, found.asks[0].noise("squared-norm"), ROUNDS),
    ):
        aim = float(gaussian_epsilon(np.sqrt(share) * mu, np.array([DELTA]))[0])
        factors.append(z / float(accounting.calibrate(aim, DELTA, BATCH / RECORDS, count)))
    assert factors[0] == pytest.approx(factors[1], rel=2e-3)
    assert factors[0] < 1, "what both cost together is less than their sum"


def test_where_releases_are_many_and_noisy_both_ways_agree():
    people = Population(("a",), np.array([2000]), (Budget(1.0, 1e-4),))
    training = Training(rounds=150, steps=1, batch=100)
    noises = []
    for shares in ("limit", "accountant"):
        method = get("adaptdp", {"calibrate": {"name": "tight", "shares": shares}})
        one = make_plan(method, training, people, 10, 0).clients[0]
        noises.append((one.terms.noise("gradient"), one.asks[0].noise("squared-norm")))
    assert noises[0] == pytest.approx(noises[1], rel=0.08)


def test_shares_are_checked():
    with pytest.raises(BadInput, match=r"calibrate\.shares"):
        get("adaptdp", {"calibrate": {"name": "tight", "shares": "guess"}})
    with pytest.raises(BadInput, match="tight or rdp"):
        get("adaptdp", {"calibrate": {"name": "wor-paper", "shares": "accountant"}})
    assert "accountant" in get("adaptdp", {"calibrate": {"shares": "accountant"}}).describe()["calibrate"]
