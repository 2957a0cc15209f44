"""Robust-HDP's Figures 8 to 10: what principal component pursuit sees in a matrix of updates, and the weights it gives.

Nothing is trained: the matrix is drawn, with every client's noise by the paper's accountant and one common signal.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from papers.experiment import Entry, Experiment, Measure, Place
from papers.robust_hdp_noise import PARAMETERS, drawn, variances_of
from sordino.data.budgets import published as published_budgets
from sordino.server import aggregate, pursuit
from sordino.server.columns import inverse_weights

CIFAR_RECORDS = 2500
FEW = PARAMETERS // 10
DRAWN = (
    "Nothing is trained: the matrix of updates is drawn, with every client's noise by the paper's accountant and one "
    "common signal of 0.03 times the median noise, as in robust-hdp/table10. The paper's figures are of trained "
    "models, and plots without numbers."
)


def spectra(quick: bool) -> list[Entry]:
    """Figure 8: singular values of M and of the L that the pursuit finds in it, as shares of M's largest (Dist2)."""
    matrix = drawn(variances_of("Dist2"), FEW if quick else PARAMETERS)
    found = pursuit.solve(matrix, parts=False)
    values = {"M": found.matrix_singular_values, "L": found.singular_values}
    return [
        Entry(("", row, f"{k + 1}"), {"value": float(value / values["M"][0])})
        for row, own in values.items()
        for k, value in enumerate(own)
    ]


def spectra_say(measured: Mapping[Place, Entry], published: Mapping[Place, tuple[float | None, ...]]) -> list[str]:
    """How many directions of M and of L matter."""
    said = []
    for row in ("M", "L"):
        own = [entry.values["value"] or 0.0 for place, entry in measured.items() if place[1] == row]
        kept = sum(1 for value in own if value > 0.01)
        said.append(f"{row}: {kept} of {len(own)} singular values above a hundredth of M's largest.")
    return said


def _weights(dist: str, variances: np.ndarray, dimension: int, all_rules: bool) -> list[Entry]:
    epsilons = np.array(published_budgets()["epsilons"][dist])
    updates = drawn(variances, dimension)
    columns = {
        "ε": epsilons,
        "optimum": inverse_weights(variances),
        "Robust-HDP": np.asarray(aggregate.robust_hdp(updates)),
    }
    if all_rules:
        columns |= {"WeiAvg": epsilons / epsilons.sum(), "DPFedAvg": np.full(len(epsilons), 1 / len(epsilons))}
    return [
        Entry(("", f"client {k:02d}", name), {"value": float(values[k])})
        for k in range(len(epsilons))
        for name, values in columns.items()
    ]


def cifar_weights(quick: bool) -> list[Entry]:
    """Figure 9: optimum weights and Robust-HDP's for CIFAR-10's clients, Dist2."""
    return _weights("Dist2", variances_of("Dist2", records=CIFAR_RECORDS), FEW if quick else PARAMETERS, False)


def mnist_weights(quick: bool) -> list[Entry]:
    """Figure 10: the weights of all rules for MNIST's clients, Dist8."""
    return _weights("Dist8", variances_of("Dist8"), FEW if quick else PARAMETERS, True)


def weights_say(measured: Mapping[Place, Entry], published: Mapping[Place, tuple[float | None, ...]]) -> list[str]:
    """How far every rule's weights are from the optimum."""
    rows = list(dict.fromkeys(place[1] for place in measured))

    def column(name: str) -> np.ndarray:
        return np.array([measured[("", row, name)].values["value"] for row in rows], dtype=np.float64)

    names = [name for name in dict.fromkeys(place[2] for place in measured) if name not in ("ε", "optimum")]
    return [
        f"{name}: ‖w − optimum‖₁ = {np.abs(column(name) - column('optimum')).sum():.3f}, the largest difference "
        f"{np.abs(column(name) - column('optimum')).max():.3f}."
        for name in names
    ]


EXPERIMENTS = (
    Experiment(
        name="robust-hdp/figure8",
        title="singular values of the updates M and of the low-rank L that Robust-HDP finds in them",
        cost="no training; under a minute",
        measures=(Measure("value", "singular value over M's largest", 1.0, ".3g"),),
        published={},
        differs=(DRAWN, "The paper does not say which budgets: here Dist2, MNIST's 20 clients and network."),
        compute=spectra,
        conclude=spectra_say,
        axes=("matrix", "number"),
    ),
    Experiment(
        name="robust-hdp/figure9",
        title="weights of the optimum and of Robust-HDP, CIFAR-10's clients, Dist2",
        cost="no training; seconds",
        measures=(Measure("value", "budgets and weights", 1.0, ".3g"),),
        published={},
        differs=(
            DRAWN,
            "2,500 records a client; batch sizes and E = 200 as for MNIST, which the paper does not say of CIFAR-10; "
            f"{PARAMETERS:,} coordinates in the place of ResNet-18's 11,181,642, which estimate the same variances.",
        ),
        compute=cifar_weights,
        conclude=weights_say,
        axes=("client", "column"),
    ),
    Experiment(
        name="robust-hdp/figure10",
        title="weights of four rules, MNIST's clients, Dist8",
        cost="no training; seconds",
        measures=(Measure("value", "budgets and weights", 1.0, ".3g"),),
        published={},
        differs=(DRAWN, "PFA projects and has no weights."),
        compute=mnist_weights,
        conclude=weights_say,
        axes=("client", "column"),
    ),
)
