"""Figures of two classes and of numbers, against scikit-learn and by hand."""

import numpy as np
import pytest
from sklearn import metrics as theirs

from sordino.data.schema import Interval
from sordino.engine.metrics import numbers, two_classes


def test_figures_of_two_classes_are_scikit_learns_also_with_ties():
    draw = np.random.default_rng(0)
    labels = (draw.random(400) < 0.3).astype(np.int64)
    scores = np.round(draw.normal(size=400) + labels, 1)
    found = two_classes(scores, labels)
    answered = (scores > 0).astype(int)
    assert found["auc"] == pytest.approx(theirs.roc_auc_score(labels, scores))
    assert found["confusion"] == theirs.confusion_matrix(labels, answered).tolist()
    assert found["sensitivity"] == pytest.approx(theirs.recall_score(labels, answered))
    assert found["specificity"] == pytest.approx(theirs.recall_score(labels, answered, pos_label=0))


def test_a_class_that_nobody_has_makes_no_figure_up():
    found = two_classes(np.array([1.0, -1.0]), np.array([0, 0]))
    assert (found["auc"], found["sensitivity"], found["specificity"]) == (None, None, 0.5)
    assert found["confusion"] == [[1, 1], [0, 0]]
    assert two_classes(np.array([np.nan, 1.0]), np.array([0, 1]))["auc"] is None


def test_figures_of_numbers_are_scikit_learns():
    draw = np.random.default_rng(1)
    targets = draw.normal(size=200)
    predicted = targets + draw.normal(0, 0.5, 200)
    found = numbers(predicted, targets)
    assert found["rmse"] == pytest.approx(theirs.root_mean_squared_error(targets, predicted))
    assert found["r2"] == pytest.approx(theirs.r2_score(targets, predicted))
    assert numbers(np.zeros(3), np.ones(3)) == {"rmse": 1.0, "r2": None}


@pytest.mark.parametrize("scale", ["unit", "signed"])
@pytest.mark.parametrize("log", [False, True])
def test_a_scaled_number_goes_back_to_what_the_file_said(scale, log):
    values = np.linspace(-3.0, 250.0, 40)
    interval = Interval(-3.0, 250.0, log)
    assert interval.unscaled(interval.scaled(values, scale), scale) == pytest.approx(values)
