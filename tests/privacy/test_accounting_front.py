"""What a user of ``epsilon`` and ``calibrate`` relies on: shapes, edges, refusals, the safe side, and what z means."""

import math

import numpy as np
import pytest

from sordino.errors import BadInput
from sordino.privacy.accounting import ACCOUNTANTS, calibrate, epsilon, label

DELTA, RATE, STEPS = 1e-5, 0.05, 268


def test_scalars_give_a_float_and_arrays_give_arrays_of_the_broadcast_shape():
    assert type(epsilon(2.0, DELTA, RATE, STEPS)) is float
    assert type(calibrate(2.0, DELTA, RATE, STEPS)) is float
    grid = epsilon(np.array([[1.5], [3.0]]), DELTA, np.array([0.01, 0.02, 0.05]), 100)
    assert grid.shape == (2, 3)
    assert grid[1, 2] == epsilon(3.0, DELTA, 0.05, 100)
    assert calibrate([1.0, 2.0], DELTA, RATE, [10, 20]).shape == (2,)


def test_a_batch_of_clients_gets_exactly_what_each_client_gets_alone():
    eps, rates, steps = [0.3, 2.0, 8.0], [0.004, 0.05, 0.3], [25, 268, 4000]
    together = calibrate(eps, DELTA, rates, steps)
    alone = [calibrate(e, DELTA, q, t) for e, q, t in zip(eps, rates, steps)]
    assert together == pytest.approx(alone, rel=1e-12)


def test_edges_public_data_needs_no_noise_no_noise_costs_everything_no_steps_cost_nothing():
    assert calibrate(math.inf, DELTA, RATE, STEPS) == 0.0
    assert calibrate(1.0, DELTA, RATE, 0) == 0.0
    assert epsilon(0.0, DELTA, RATE, STEPS) == math.inf
    assert epsilon(0.0, DELTA, RATE, 0) == 0.0
    assert epsilon(math.inf, DELTA, RATE, STEPS) == 0.0
    assert calibrate([1.0, math.inf], DELTA, RATE, STEPS)[1] == 0.0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ((0.0, DELTA, RATE, STEPS), "epsilon"),
        ((-1.0, DELTA, RATE, STEPS), "epsilon"),
        ((math.nan, DELTA, RATE, STEPS), "epsilon"),
        ((1.0, 0.0, RATE, STEPS), "delta"),
        ((1.0, 1.0, RATE, STEPS), "delta"),
        ((1.0, math.nan, RATE, STEPS), "delta"),
        ((1.0, DELTA, 0.0, STEPS), "rate"),
        ((1.0, DELTA, 1.5, STEPS), "rate"),
        ((1.0, DELTA, RATE, -1), "steps"),
        ((1.0, DELTA, RATE, 2.5), "steps"),
        ((1.0, DELTA, RATE, math.inf), "steps"),
        (("a lot", DELTA, RATE, STEPS), "epsilon"),
        (([1.0, 2.0], DELTA, [0.1, 0.2, 0.3], STEPS), "broadcast"),
    ],
)
def test_nonsense_is_refused_by_name(arguments, word):
    with pytest.raises(BadInput, match=word):
        calibrate(*arguments)


def test_a_delta_above_the_chance_of_ever_being_sampled_is_refused_because_no_noise_would_meet_it():
    with pytest.raises(BadInput, match="without noise"):
        calibrate(1.0, 1e-3, 1e-5, 20)


def test_negative_or_undefined_noise_is_refused():
    for noise in (-1.0, math.nan):
        with pytest.raises(BadInput, match="noise"):
            epsilon(noise, DELTA, RATE, STEPS)


def test_unknown_names_are_refused_with_the_list_of_known_ones():
    with pytest.raises(BadInput, match="rdp-robust-hdp"):
        epsilon(1.0, DELTA, RATE, STEPS, accountant="moments")
    with pytest.raises(BadInput, match="poisson"):
        epsilon(1.0, DELTA, RATE, STEPS, sampling="shuffle")
    with pytest.raises(BadInput, match="replace-one"):
        epsilon(1.0, DELTA, RATE, STEPS, adjacency="user")


def test_pairs_without_a_bound_are_refused_with_the_reason():
    with pytest.raises(BadInput, match="replace-one"):
        epsilon(1.0, DELTA, RATE, STEPS, sampling="fixed", adjacency="zero-out")
    with pytest.raises(BadInput, match="rate 1"):
        epsilon(1.0, DELTA, RATE, STEPS, sampling="full")


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("target", [0.05, 1.0, 20.0])
def test_calibrated_noise_stays_on_the_safe_side_with_a_tiny_gap(accountant, target):
    for rate, steps, delta in [(0.003, 20, 1e-7), (0.05, 268, 1e-5), (0.3, 20000, 1e-3)]:
        noise = calibrate(target, delta, rate, steps, accountant=accountant)
        spent = epsilon(noise, delta, rate, steps, accountant=accountant)
        assert target * (1 - 5e-4) <= spent <= target


@pytest.mark.parametrize(("sampling", "adjacency"), [("poisson", "replace-one"), ("fixed", "replace-one")])
def test_calibration_is_safe_under_replace_one_too(sampling, adjacency):
    noise = calibrate(2.0, DELTA, RATE, STEPS, sampling=sampling, adjacency=adjacency)
    spent = epsilon(noise, DELTA, RATE, STEPS, sampling=sampling, adjacency=adjacency)
    assert 2.0 * (1 - 5e-4) <= spent <= 2.0


def test_full_batches_are_calibrated_exactly():
    noise = calibrate(1.0, DELTA, 1.0, 50, sampling="full")
    assert epsilon(noise, DELTA, 1.0, 50, sampling="full") == pytest.approx(1.0, rel=2e-6)
    assert epsilon(noise, DELTA, 1.0, 50, sampling="full") <= 1.0
    assert calibrate(1.0, DELTA, 1.0, 50) == noise, "Poisson at rate 1 is the full batch"


def test_less_budget_more_steps_larger_rate_smaller_delta_all_need_more_noise():
    base = calibrate(1.0, DELTA, RATE, 1000)
    assert calibrate(0.5, DELTA, RATE, 1000) > 1.5 * base
    assert calibrate(1.0, DELTA, RATE, 4000) > 1.8 * base
    assert calibrate(1.0, DELTA, 2 * RATE, 1000) > 1.8 * base
    assert calibrate(1.0, DELTA / 100, RATE, 1000) > 1.1 * base


def test_noise_is_a_multiplier_of_the_sensitivity_under_the_adjacency():
    """The same absolute noise, 2C, is z=2 of C under zero-out and z=1 of 2C under replace-one."""
    assert epsilon(2.0, 1e-5, 0.05, 268) == pytest.approx(1.82, abs=0.005)
    assert epsilon(1.0, 1e-5, 0.05, 268, adjacency="replace-one") == pytest.approx(3.48, abs=0.005)
    # Without sampling a multiplier is a multiplier: both are the Gaussian mechanism with μ = 1/z.
    assert epsilon(2.0, 1e-5, 1.0, 9, adjacency="replace-one") == epsilon(2.0, 1e-5, 1.0, 9)


def test_zero_out_and_add_remove_cost_the_same():
    assert epsilon(2.0, 1e-5, 0.05, 268, adjacency="add-remove") == epsilon(2.0, 1e-5, 0.05, 268)


def test_labels_say_in_words_what_was_used():
    assert "tight" in label("pld")
    assert "without replacement" in label("pld", "fixed")
    assert "exact" in label("pld", "full")
    assert "NOT a valid" in label("closed-form-selection")
    assert len({label(name) for name in ACCOUNTANTS}) == len(ACCOUNTANTS)
    with pytest.raises(BadInput, match="unknown"):
        label("moments")
