"""Words only where intervals have them: paired differences, Student's t, Holm's correction."""

import math

import numpy as np
import pytest
from scipy import stats

from papers import verdicts
from papers.experiment import ACCURACY, PSI, Entry
from papers.fedfdp import fairness_says
from papers.selection import selection_says
from papers.verdicts import Gap


def entry(place, numbers, key="accuracy"):
    values = list(numbers)
    return Entry(place, {key: float(np.mean(values))}, runs=len(values), seeds={key: dict(enumerate(values))})


def test_the_interval_is_students():
    differences = [1.0, 2.5, 0.5, 3.0]
    mean, low, high = verdicts.interval(differences)
    expected = stats.t.interval(0.95, 3, loc=np.mean(differences), scale=stats.sem(differences))
    assert (low, high) == pytest.approx(expected)
    assert mean == 1.75
    assert Gap(dict(enumerate(differences))).p_value == pytest.approx(stats.ttest_1samp(differences, 0.0).pvalue)


def test_differences_are_paired_by_seed():
    here = Entry(("", "a", "x"), {}, seeds={"accuracy": {0: 50.0, 1: 70.0, 3: 60.0}})
    there = Entry(("", "b", "x"), {}, seeds={"accuracy": {1: 68.0, 0: 49.0, 2: 90.0}})
    gap = verdicts.between(here, there, ACCURACY)
    assert gap.pairs == {0: 1.0, 1: 2.0}
    assert verdicts.between(here, None, ACCURACY) is None


@pytest.mark.parametrize(
    ("differences", "more", "word", "spoken"),
    [
        ([5.0, 5.1, 4.9], True, "above", "above"),
        ([5.0, 5.1, 4.9], False, "below", "worse"),
        ([-5.0, -5.1, -4.9], True, "below", "below"),
        ([-5.0, -5.1, -4.9], False, "above", "better"),
        ([5.0, -4.0, 1.0], True, "level", "level"),
        ([40.0], True, "no verdict", "no verdict"),
    ],
)
def test_a_word_needs_an_interval_without_zero(differences, more, word, spoken):
    gap = Gap(dict(enumerate(differences)), more_is_better=more)
    assert (gap.word, gap.spoken) == (word, spoken)


def test_one_seed_is_said_to_say_nothing():
    gap = Gap({0: 3.0}, "s = 30")
    assert gap.show() == "+3.0, one seed: no verdict"
    assert verdicts.count([gap, gap]) == "one seed: no verdict"
    assert gap.interval[1:] == (-math.inf, math.inf)


def test_holm_is_as_by_hand():
    """Differences whose p-values are 0.004, 0.02 and 0.03: 0.05/3, then 0.05/2 pass, 0.05/1 passes; 0.04 does not."""

    def with_p(p):
        t = stats.t.isf(p / 2, 2)
        spread = np.array([-1.0, 0.0, 1.0])
        return Gap(dict(enumerate(spread + t / math.sqrt(3))))

    made = [with_p(p) for p in (0.03, 0.004, 0.02)]
    assert [gap.p_value for gap in made] == pytest.approx([0.03, 0.004, 0.02])
    assert verdicts.stand(made) == [True, True, True]
    assert verdicts.stand([with_p(p) for p in (0.03, 0.004, 0.04, 0.2)]) == [False, True, False, False]
    assert "with 4 comparisons at once 1 of 3 stand" in verdicts.count([with_p(p) for p in (0.03, 0.004, 0.04, 0.2)])


def test_an_average_is_one_comparison_over_seeds():
    gaps = {"a": Gap({0: 1.0, 1: 3.0, 2: 9.0}, "a"), "b": Gap({0: 3.0, 1: 5.0}, "b")}
    assert verdicts.average(gaps.values()).pairs == {0: 2.0, 1: 4.0}
    assert verdicts.sentence(gaps).startswith("level (+3.0 [-9.7, +15.7]) on average over 2 columns; by column")


def test_against_a_printed_number_the_interval_is_our_own():
    gap = verdicts.against(entry(("", "a", "x"), [90.0, 91.0, 92.0]), 95.0, ACCURACY, "x")
    assert gap.word == "below"
    assert verdicts.against(entry(("", "a", "x"), [90.0, 91.0, 99.0]), 95.0, ACCURACY, "x").word == "level"


def test_selection_says_no_more_than_its_seeds_do():
    block = "tight noise"

    def table(*seeds):
        return {
            (block, row, "s = 30"): entry((block, row, "s = 30"), numbers, "central_accuracy")
            for row, numbers in zip(("Privacy-aware", "Unbiased"), seeds)
        }

    (alone,) = selection_says(table([60.0], [20.0]), {})
    assert "one seed: no verdict" in alone
    (several,) = selection_says(table([60.0, 61.0, 62.0], [20.0, 22.0, 21.0]), {})
    assert "privacy-aware against unbiased: above (+40.0" in several


def fair(row, accuracy, psi, worst):
    keys = {"record_accuracy": accuracy, "psi": psi, "worst_accuracy": worst}
    seeds = {key: dict(enumerate(numbers)) for key, numbers in keys.items()}
    place = ("one local step", row, "MNIST")
    return Entry(place, {key: float(np.mean(numbers)) for key, numbers in keys.items()}, runs=3, seeds=seeds)


def test_a_method_that_learns_nothing_is_not_called_fairer_and_fedprox_is_the_noise_floor():
    rows = [
        fair("FedAvg", [90.0, 91.0, 92.0], [0.20, 0.21, 0.19], [50.0, 51.0, 49.0]),
        fair("FedProx", [90.5, 90.0, 92.0], [0.21, 0.20, 0.19], [50.0, 50.0, 49.0]),
        fair("FedDyn", [10.0, 10.0, 10.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]),
        fair("FedFDP", [91.0, 92.1, 92.9], [0.10, 0.11, 0.10], [51.0, 50.0, 50.0]),
    ]
    said, floor = fairness_says({one.place: one for one in rows}, {})
    assert "above 2 of 3 (FedAvg, FedDyn), level 1 (FedProx)" in said
    assert f"{PSI.label}: better 2 of 2" in said, "FedDyn, which learns nothing, is not compared by Ψ"
    assert "the noise floor, FedProx against FedAvg" in floor
    assert "0.5, at most 1.0" in floor
