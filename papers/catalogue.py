"""The experiments of the four papers and our own accuracy benchmark, by name."""

from __future__ import annotations

from papers import (
    accuracy,
    accuracy_ingredients,
    accuracy_limits,
    accuracy_persons,
    accuracy_published,
    accuracy_selection,
    adaptdp,
    fedfdp,
    robust_hdp,
    robust_hdp_cifar,
    robust_hdp_noise,
    robust_hdp_weights,
    selection,
)
from papers.experiment import Experiment

PAPERS = (
    selection,
    robust_hdp,
    robust_hdp_noise,
    robust_hdp_cifar,
    robust_hdp_weights,
    fedfdp,
    adaptdp,
    accuracy,
    accuracy_published,
    accuracy_selection,
    accuracy_ingredients,
    accuracy_persons,
    accuracy_limits,
)
EXPERIMENTS: dict[str, Experiment] = {one.name: one for paper in PAPERS for one in paper.EXPERIMENTS}
