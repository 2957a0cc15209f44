"""What an observer says of a final model beyond accuracy: of two classes, and of numbers. Free, not covered (R12)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

Array = NDArray[np.float64]


def two_classes(scores: Array, labels: NDArray[np.int64]) -> dict[str, Any]:
    """AUC, sensitivity, specificity and the confusion of two classes; ``scores`` > 0 answer class 1.

    AUC = P(score of a 1 > score of a 0) + P(equal)/2, by ranks. Sensitivity is the share of class 1 that is answered 1,
    specificity the share of class 0 that is answered 0; ``confusion[true][answered]`` counts records. A figure that
    needs a class nobody has is None.
    """
    one, answered = labels == 1, scores > 0
    ones, zeros = int(one.sum()), int((~one).sum())
    hit, right = int((one & answered).sum()), int((~one & ~answered).sum())
    auc = None
    if ones and zeros and np.isfinite(scores).all():
        auc = float((rankdata(scores)[one].sum() - ones * (ones + 1) / 2) / (ones * zeros))
    return {
        "auc": auc,
        "sensitivity": hit / ones if ones else None,
        "specificity": right / zeros if zeros else None,
        "confusion": [[right, zeros - right], [ones - hit, hit]],
    }


def numbers(predicted: Array, targets: Array) -> dict[str, float | None]:
    """RMSE = √mean (p − y)² and R² = 1 − Σ (p − y)²/Σ (y − ȳ)²; R² is None where all targets are alike."""
    squares = float(((predicted - targets) ** 2).sum())
    around = float(((targets - targets.mean()) ** 2).sum())
    return {"rmse": math.sqrt(squares / len(targets)), "r2": 1.0 - squares / around if around > 0 else None}
