"""Robust-HDP's study on CIFAR-10, with ResNet-18 and one of its distributions of budgets."""

from __future__ import annotations

from dataclasses import replace

from papers.experiment import ACCURACY, Cell, Experiment, Quick
from papers.robust_hdp import (
    AS_PUBLISHED,
    DISTS,
    LIKE_OURS,
    METHODS,
    OURS,
    SECOND,
    TIGHT,
    published_cell,
    stepped_cell,
    utility_says,
)
from papers.robust_hdp_published import CIFAR_RATES

DIST = "Dist2"
"""The distribution that the paper's Figure 9 shows for CIFAR-10."""

SHARDS = {"options": {"merge": True}, "kind": "shards", "clients": 20, "shards": 5, "test": 1 / 6}
"""All 60,000 records in 100 shards, five a client: 2,500 to train with and 500 to test with."""


def cells() -> tuple[Cell, ...]:
    """The five rules at the paper's rates with its noise; ours, and two of them with our steps, with tight noise."""
    place = DISTS.index(DIST)
    found = []
    for row, method in METHODS.items():
        calibrate = {"name": "rdp-robust-hdp", "strictest": method == "minimum-epsilon"}
        at, rate = (AS_PUBLISHED, row, DIST), CIFAR_RATES[row][place]
        found.append(published_cell("cifar10", at, method, place, rate, {"calibrate": calibrate}, dealt=SHARDS))
    for row, weighing in (OURS | LIKE_OURS).items():
        rate = CIFAR_RATES["Robust-HDP"][place]
        found.append(stepped_cell("cifar10", (TIGHT, row, DIST), place, rate, weighing, SHARDS))
    return tuple(replace(cell, model="resnet18-gn", model_options={}) for cell in found)


EXPERIMENTS = (
    Experiment(
        name="robust-hdp/cifar10",
        title="accuracy of five aggregation rules on CIFAR-10 with ResNet-18, Dist2; ours with tight noise beside",
        cost="30 runs of 20 clients × 200 rounds, 11,181,642 parameters, and 70 or more to choose values, 40 of them "
        "short; never run at full size: a day on one H200 at a guess",
        measures=(ACCURACY,),
        published={},
        differs=(
            "The text describes this study and gives its learning rates (Table 7); of its accuracies the appendix has "
            "none. One of nine distributions, the one that its Figure 9 shows.",
            SECOND,
            "All 60,000 records in 100 shards by class, five a client, a sixth of each client's for tests: the paper "
            "deals both published sets, and does not say how. Budgets and batch sizes are those of its MNIST tables.",
            "ResNet-18 with GroupNorm: batch statistics would mix records. Its parameters are as many as the paper's.",
        ),
        cells=cells,
        seeds=3,
        claim=("Robust-HDP", "WeiAvg"),
        quick=Quick(
            blocks=(AS_PUBLISHED,),
            rows=("WeiAvg", "Robust-HDP"),
            data={"options": {"records": 400, "merge": True}},
            training={"rounds": 1, "evaluate": 1, "batch": 8},
            parts={"robust-hdp": {"aggregate": {"name": "robust-hdp", "rows": 1000}}},
        ),
        conclude=utility_says,
        axes=("rule", "distribution"),
    ),
)
