"""Theorem 2 of Robust-HDP written out in loops, and the noise powers of its Table 10."""

import numpy as np
import pytest

from papers import theory_robust
from sordino.errors import BadInput
from sordino.server.columns import inverse_weights

TABLE_10 = {  # WeiAvg, DP-FedAvg, optimum, as published
    "Dist1": (1.02, 1.27, 0.267),
    "Dist2": (1.89, 16.94, 0.473),
    "Dist3": (0.92, 16.28, 0.074),
    "Dist4": (3.22, 26.87, 0.641),
    "Dist5": (4.58, 25.64, 0.385),
    "Dist7": (9.85, 18.50, 2.251),
    "Dist9": (34.91, 43.20, 5.927),
}


def test_table_10_is_reproduced_without_training(noise):
    """Dist6 and Dist8 are left out: some of their budgets sit at the floor of the paper's accountant."""
    for dist, (weiavg, fedavg, optimum) in TABLE_10.items():
        variances = noise.variances(dist)
        epsilons = np.array(noise.epsilons[dist])
        measured = [
            theory_robust.noise_power(weights, variances)
            for weights in (epsilons / epsilons.sum(), np.full(20, 0.05), inverse_weights(variances))
        ]
        np.testing.assert_allclose(measured, (weiavg, fedavg, optimum), rtol=0.015, err_msg=dist)


def written_out(gap, lr, steps, variances, weights, aim, beta, lipschitz, sigma):
    n, psi = len(steps), 0.0
    total = sum(steps)
    for w in weights:
        first = 6 * beta**2 * lr**2 * (1 + total)
        first *= 2 * sum(e**4 for e in steps) * sigma**2 + sum(e**3 * v for e, v in zip(steps, variances)) / 3
        first += beta * lr * sum(e**2 * v for e, v in zip(steps, variances))
        mean = sum(w[i] * steps[i] for i in range(n))
        second = n * sum(steps[i] ** 2 * (w[i] - aim[i]) ** 2 for i in range(n))
        second += sum(a * a for a in aim) * sum((e - mean) ** 2 for e in steps)
        psi += first + 8 * lipschitz**2 / 3 * second
    rounds = len(weights)
    return 12 / (11 * min(steps) - 7) * (gap / (rounds * lr) + psi / rounds)


CASE = {
    "gap": 2.0,
    "lr": 1e-4,
    "steps": [3, 5, 10],
    "gradient_variances": [1.0, 4.0, 0.5],
    "weights": [[0.2, 0.3, 0.5], [0.0, 0.4, 0.6]],
    "objective_weights": [0.3, 0.3, 0.4],
    "smoothness": 1.5,
    "lipschitz": 0.7,
    "heterogeneity": 0.4,
}


def test_theorem_2_equals_its_formula_in_loops():
    bound = theory_robust.theorem2(**CASE)
    assert bound.total == pytest.approx(written_out(*CASE.values()), rel=1e-12)
    assert bound.total == pytest.approx(bound.start + bound.noise + bound.bias)


def test_theorem_2_says_whether_the_learning_rate_is_allowed():
    allowed = min(1 / (6 * 1.5 * 10), 1 / (12 * 1.5 * np.sqrt(19 * (3**4 + 5**4 + 10**4))))
    assert theory_robust.theorem2(**CASE).largest_lr == pytest.approx(allowed)
    assert theory_robust.theorem2(**CASE).holds
    assert not theory_robust.theorem2(**{**CASE, "lr": 2 * allowed}).holds


def test_the_bound_sees_better_weights_only_when_noise_is_weighted():
    """The proof replaces ‖w‖² by 1: published, weights change the bias term alone."""
    equal, better = [[1 / 3] * 3], [[0.2, 0.1, 0.7]]
    published = [theory_robust.theorem2(**{**CASE, "weights": w}).noise for w in (equal, better)]
    tightened = [theory_robust.theorem2(**{**CASE, "weights": w}, weighted_noise=True).noise for w in (equal, better)]
    assert published[0] == published[1]
    assert tightened[1] < tightened[0] < published[0]


def test_mismatched_inputs_are_refused():
    with pytest.raises(BadInput, match="one entry a client"):
        theory_robust.theorem2(**{**CASE, "steps": [3, 5]})
    with pytest.raises(BadInput, match="at least one local step"):
        theory_robust.theorem2(**{**CASE, "steps": [0, 5, 10]})
    with pytest.raises(BadInput, match="one of each per client"):
        theory_robust.noise_power([0.5, 0.5], [1.0])
