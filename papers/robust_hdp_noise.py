"""Robust-HDP without training: Table 10, the noise that is left after aggregation, and Figure 6, z against q."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from papers.experiment import Entry, Experiment, Measure, Place
from papers.robust_hdp import AS_PUBLISHED, CLIP, DELTA, DISTS, ROUNDS, TIGHT
from papers.robust_hdp_published import TABLE_10
from papers.theory_robust import noise_power, update_variances
from sordino import privacy
from sordino.data.budgets import published as published_budgets
from sordino.server import aggregate
from sordino.server.columns import inverse_weights

RECORDS, PARAMETERS = 2400, 28_938


def variances_of(dist: str, strictest: bool = False, records: int = RECORDS) -> np.ndarray:
    """σ_i²/η² per coordinate with the paper's accountant, for clients with so many records each."""
    content = published_budgets()
    batches = np.array(content["batch_sizes"], dtype=np.float64)
    epsilons = np.array(content["epsilons"][dist], dtype=np.float64)
    if strictest:
        epsilons = np.full_like(epsilons, epsilons.min())
    steps = records / batches
    noises = privacy.calibrate(
        epsilons, DELTA, batches / records, np.round(ROUNDS * steps), accountant="rdp-robust-hdp"
    )
    return update_variances(np.asarray(noises), batches, steps, clip=CLIP)


def noise_powers(quick: bool) -> list[Entry]:
    """Table 10: Σ w_i²σ_i²/(p η²) of every rule. Estimated weights come from a drawn matrix of updates."""
    entries = []
    for dist in ("Dist1", "Dist3", "Dist9") if quick else DISTS:
        variances = variances_of(dist)
        epsilons = np.array(published_budgets()["epsilons"][dist])
        equal = np.full(len(epsilons), 1 / len(epsilons))
        updates = drawn(variances, PARAMETERS // 10 if quick else PARAMETERS)
        powers = {
            "WeiAvg": noise_power(epsilons / epsilons.sum(), variances),
            "DPFedAvg": noise_power(equal, variances),
            "minimum ε": noise_power(equal, variances_of(dist, strictest=True)),
            "Robust-HDP": noise_power(aggregate.robust_hdp(updates), variances),
            "factor-hdp": noise_power(aggregate.factor_hdp(updates), variances),
            "Optimum": noise_power(inverse_weights(variances), variances),
        }
        entries += [Entry(("", row, dist), {"noise_power": power}) for row, power in powers.items()]
    return entries


def drawn(variances: np.ndarray, dimension: int) -> np.ndarray:
    """Updates as columns: one common signal of 0.03 times the median noise, and each client's noise."""
    random = np.random.default_rng(0)
    signal = 0.03 * np.sqrt(np.median(variances)) * random.standard_normal((dimension, 1))
    noise = random.standard_normal((dimension, len(variances))) * np.sqrt(variances)
    return np.asarray(signal + noise, dtype=np.float32)


def powers_say(measured: Mapping[Place, Entry], published: Mapping[Place, tuple[float | None, ...]]) -> list[str]:
    """How far the computed powers are from the printed ones, rule by rule."""
    said = []
    for row in dict.fromkeys(place[1] for place in measured):
        gaps = {
            place[2]: value / there[0] - 1
            for place, entry in measured.items()
            if place[1] == row and (there := published.get(place)) and there[0]
            if (value := entry.values["noise_power"]) is not None
        }
        if gaps:
            worst = max(gaps, key=lambda dist: abs(gaps[dist]))
            close = sum(1 for gap in gaps.values() if abs(gap) <= 0.02)
            said.append(
                f"{row}: within 2 % of the published number on {close} of {len(gaps)} distributions; "
                f"farthest on {worst} ({gaps[worst]:+.1%})."
            )
    return said


RATIOS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)


def noise_against_rate(quick: bool) -> list[Entry]:
    """Figure 6: z against q for E = 200 epochs, so 200/q steps."""
    entries = []
    rates = np.array(RATIOS)
    for block, accountant in ((AS_PUBLISHED, "rdp-robust-hdp"), (TIGHT, "pld")):
        for epsilon in (0.5, 1.0, 2.0, 5.0):
            noises = privacy.calibrate(epsilon, DELTA, rates, np.round(ROUNDS / rates), accountant=accountant)
            entries += [
                Entry((block, f"ε = {epsilon:g}", f"q = {rate:g}"), {"noise": float(z)})
                for rate, z in zip(RATIOS, np.asarray(noises))
            ]
    return entries


def rates_say(measured: Mapping[Place, Entry], published: Mapping[Place, tuple[float | None, ...]]) -> list[str]:
    """The exponent of z against q."""
    said = []
    for block, row in dict.fromkeys(place[:2] for place in measured):
        z = [measured[(block, row, f"q = {rate:g}")].values["noise"] or np.nan for rate in RATIOS]
        slopes = np.diff(np.log(z)) / np.diff(np.log(RATIOS))
        said.append(
            f"{block}, {row}: z grows like q to the power {slopes.min():.2f} to {slopes.max():.2f}: "
            + ("sub-linearly, as the paper says." if slopes.max() < 1 else "not sub-linearly everywhere.")
        )
    return said


EXPERIMENTS = (
    Experiment(
        name="robust-hdp/table10",
        title="noise power after aggregation, from budgets and batch sizes alone",
        cost="no training; under a minute",
        measures=(Measure("noise_power", "Σ w²σ²/(p η²)", 1.0, ".4g"),),
        published={("", row, dist): (value,) for row, values in TABLE_10.items() for dist, value in zip(DISTS, values)},
        differs=(
            "Nothing is trained: Robust-HDP's and factor-hdp's weights come from a drawn 28,938 × 20 matrix with the "
            "clients' noise and a common signal of 0.03 times the median noise.",
            "Some budgets of Dist6 and Dist8 lie at the floor of the paper's accountant, ln(1/δ)/63 = 0.146, where z "
            "jumps with the last digit of ε: minimum ε is off there.",
            "factor-hdp is ours and not in the paper.",
        ),
        compute=noise_powers,
        conclude=powers_say,
        axes=("rule", "distribution"),
    ),
    Experiment(
        name="robust-hdp/figure6",
        title="noise multiplier z against sampling rate q at fixed ε, 200 epochs",
        cost="no training; seconds",
        measures=(Measure("noise", "z", 1.0, ".3f"),),
        published={},
        differs=(
            "The paper shows a plot without numbers and does not give its ε; here ε = 0.5, 1, 2, 5 at δ = 1e-4.",
            "The second block is the tight accountant.",
        ),
        compute=noise_against_rate,
        conclude=rates_say,
        axes=("budget", "rate"),
    ),
)
