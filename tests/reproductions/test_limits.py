"""The least noise there could be, against loops; and what its page counts."""

import numpy as np
import pytest

from papers import accuracy_limits, theory_limits
from sordino import privacy

EPSILONS = np.array([0.5, 1.0, 4.0, 2.0])
RECORDS = np.array([300.0, 500.0, 200.0, 900.0])
BATCHES = 0.1 * RECORDS


@pytest.fixture(scope="module")
def left():
    return theory_limits.left_over(EPSILONS, 1e-5, RECORDS, BATCHES, 20, dimension=4000)


def test_every_rule_is_what_a_loop_says(left):
    own = [float(privacy.calibrate(e, 1e-5, 0.1, 20, accountant="pld")) / b for e, b in zip(EPSILONS.tolist(), BATCHES)]
    strict = [own[0] * BATCHES[0] / b for b in BATCHES]

    def after(weights, deviations):
        return sum((w * s) ** 2 for w, s in zip(weights, deviations)) ** 0.5

    shares = [n / RECORDS.sum() for n in RECORDS]
    assert left[theory_limits.BY_SIZE] == pytest.approx(after(shares, own), rel=1e-6)
    assert left[theory_limits.STRICTEST] == pytest.approx(after(shares, strict), rel=1e-3)
    assert left[theory_limits.BY_BUDGET] == pytest.approx(after(EPSILONS / EPSILONS.sum(), own), rel=1e-6)
    assert left[theory_limits.CURATOR] == pytest.approx(1 / sum(1 / s for s in own), rel=1e-6)
    assert left[theory_limits.SHARED] == pytest.approx(2**0.5 * left[theory_limits.CURATOR])
    assert left[theory_limits.ESTIMATED] == pytest.approx(left[theory_limits.OPTIMUM], rel=0.05)


def test_no_weights_leave_less_than_the_optimum_nor_than_a_curator(left):
    own = theory_limits.deviations(EPSILONS, 1e-5, BATCHES / RECORDS, BATCHES, 20)
    random = np.random.default_rng(0)
    for _ in range(300):
        weights = random.dirichlet(np.ones(4))
        assert np.sqrt(((weights * own) ** 2).sum()) >= left[theory_limits.OPTIMUM] * (1 - 1e-12)
        # a curator's one dose v has to be enough for everybody: w_i ≤ v/s_i
        assert (weights * own).max() >= left[theory_limits.CURATOR] * (1 - 1e-12)


def test_prices_are_paid_by_whom_the_page_says():
    """Two made-up seeds: the strict third loses ten points more than the generous one, small and large ones alike."""
    place = np.arange(18) % 3
    clients = []
    for seed in (0, 1):
        clients.append({"row": "fedavg", "column": "no noise", "seed": seed, "accuracy": [0.9] * 18})
        for row in accuracy_limits.ROWS:
            paid = np.where(place == 0, 0.2, np.where(place == 2, 0.1, 0.15)) + 0.01 * seed
            clients.append({"row": row, "column": "ε = 1", "seed": seed, "accuracy": (0.9 - paid).tolist()})
    sizes = {str(seed): (np.arange(18)[::-1] // 3 * 10).tolist() for seed in (0, 1)}
    lines = "\n".join(accuracy_limits.lines({"clients": clients, "records": sizes, "table": []}))
    budget, size = lines.split("## Who pays: by budget")[1].split("## Who pays: by size")
    assert "| DP-FedAvg | – | – | – | +10.0 [+10.0, +10.0] | – | – |" in budget
    assert "| DP-FedAvg | – | – | – | +0.0 [" in size.replace("-0.0", "+0.0")
