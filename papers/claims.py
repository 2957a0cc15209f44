"""What the papers claim, and what the JSON files in docs/results say to it: a verdict and its grounds.

A verdict is computed: from an interval over paired seeds where there are several, "one seed: no verdict" where there is
one, and from the numbers themselves where nothing is trained ("computed").
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from papers import adaptdp, fedfdp_cells, robust_hdp, robust_hdp_noise, selection, verdicts
from papers.experiment import ACCURACY, CENTRAL, PSI, RECORDS, TRAIN_LOSS, Measure, Place
from papers.known import aware, mean_gap, measured, results, seeds_of, value
from papers.verdicts import Gap

COMPUTED = "computed"


def _selects() -> tuple[str, str]:
    gaps, tight = ([aware(n, block) for n in (3, 4)] for block in (selection.AS_PUBLISHED, selection.TIGHT))
    verdict = "**yes**" if all(one.word == verdicts.ABOVE for one in gaps) else "**not shown**"
    told = [f"{gap.show()} on {data}" for gap, data in zip(tight, ("MNIST", "Fashion-MNIST"))]
    return verdict, (
        f"published noise: {gaps[0].show()} on MNIST ({seeds_of(gaps[0])}), {gaps[1].show()} on Fashion-MNIST "
        f"({seeds_of(gaps[1])}). Tight noise: {', '.join(told)}"
    )


def _cifar() -> tuple[str, str]:
    gaps = {
        block: verdicts.rows(measured("selection/figure6"), CENTRAL, block, "Privacy-aware", "Unbiased")
        for block in (selection.AS_PUBLISHED, selection.TIGHT)
    }
    told = {block: " and ".join(f"{gap.interval[0]:+.1f}" for gap in found.values()) for block, found in gaps.items()}
    words = {gap.word for found in gaps.values() for gap in found.values()}
    return _one_seed(
        words
    ), f"{told[selection.AS_PUBLISHED]} with the published noise, {told[selection.TIGHT]} with tight"


def _one_seed(words: set[str]) -> str:
    return verdicts.NO_VERDICT if words == {verdicts.NONE} else ", ".join(sorted(words))


def _closed_form() -> tuple[str, str]:
    most = max(
        run["privacy"]["largest_share"]
        for n in (3, 4)
        for run in results(f"selection/table{n}")["runs"]
        if run["block"] == selection.AS_PUBLISHED
    )
    return ("**no**" if most < 1 else "**yes**"), f"by the ledger it spends at most {100 * most:.0f} % of any budget"


def _weights() -> tuple[str, str]:
    table = measured("selection/figure3")
    rows = list(dict.fromkeys(place[1] for place in table))
    columns = {
        name: np.array([table["", row, name].values["value"] for row in rows], dtype=np.float64)
        for name in ("ε", "unbiased", *selection.WEIGHTS)
    }
    ranks = [np.argsort(np.argsort(columns[name] / columns["unbiased"])) for name in selection.WEIGHTS]
    follow = [float(np.corrcoef(one, np.argsort(np.argsort(columns["ε"])))[0, 1]) for one in ranks]
    least = min(float(columns[name].min()) for name in selection.WEIGHTS)
    verdict = "**yes**" if least > 0 and 0 < follow[0] < follow[1] else "**no**"
    told = " and ".join(f"{value:.2f} at {name}" for value, name in zip(follow, selection.WEIGHTS))
    return verdict, f"rank correlation of p/u with ε: {told}; least p = {least:.2g}; {COMPUTED}"


def _batches() -> tuple[str, str]:
    least, most = (f"b = {selection.BATCHES[at]}" for at in (0, -1))
    told, gaps = [], []
    for block, noise in ((selection.AS_PUBLISHED, "the published noise"), (selection.TIGHT, "tight")):
        few, many = (measured("selection/figure5")[block, "Privacy-aware", at] for at in (least, most))
        gap = verdicts.between(many, few, CENTRAL)
        if gap is None:
            raise LookupError("figure 5 has no seeds")
        gaps.append(gap)
        told.append(f"{few.values[CENTRAL.key]:.1f} to {many.values[CENTRAL.key]:.1f} with {noise}, {gap.show()}")
    grows = sum(gap.word == verdicts.ABOVE for gap in gaps)
    verdict = "**yes**" if grows == len(gaps) else "**in part**" if grows else "**not shown**"
    return verdict, f"{least} to {selection.BATCHES[-1]}: {'; '.join(told)}; {seeds_of(gaps[0])}"


def _least_noise() -> tuple[str, str]:
    table = measured("robust-hdp/table10")
    over = max(
        (table["", "Robust-HDP", dist].values["noise_power"] or 0.0)
        / (table["", "Optimum", dist].values["noise_power"] or 1.0)
        for dist in robust_hdp.DISTS
    )
    return (
        "**yes**" if over < 1.02 else "**no**"
    ), f"within {100 * (over - 1):.2f} % of the optimum where noise dominates; {COMPUTED}"


def _most_accurate() -> tuple[str, str]:
    parts = []
    for number, block in ((8, robust_hdp.AS_PUBLISHED), (8, robust_hdp.ALIKE), (9, robust_hdp.AS_PUBLISHED)):
        gap = mean_gap(f"robust-hdp/table{number}", ACCURACY, block, "Robust-HDP", "WeiAvg")
        parts.append((gap, f"table {number}, {block}: {gap.interval[0]:+.1f}"))
    return _one_seed({gap.word for gap, _ in parts}), "points above WeiAvg on average over nine: " + "; ".join(
        t for _, t in parts
    )


def _sublinear() -> tuple[str, str]:
    slopes = []
    for block, row in dict.fromkeys(place[:2] for place in measured("robust-hdp/figure6")):
        z = [
            measured("robust-hdp/figure6")[block, row, f"q = {q:g}"].values["noise"] or np.nan
            for q in robust_hdp_noise.RATIOS
        ]
        slopes += list(np.diff(np.log(z)) / np.diff(np.log(robust_hdp_noise.RATIOS)))
    return (
        "**yes**" if max(slopes) < 1 else "**no**"
    ), f"as q to the power {min(slopes):.2f} to {max(slopes):.2f}; {COMPUTED}"


def _estimated() -> tuple[str, str]:
    spectra = {
        row: [e.values["value"] or 0.0 for p, e in measured("robust-hdp/figure8").items() if p[1] == row]
        for row in "ML"
    }
    kept = {row: sum(1 for value in values if value > 0.01) for row, values in spectra.items()}
    far = []
    for number in (9, 10):
        table = measured(f"robust-hdp/figure{number}")
        rows = dict.fromkeys(place[1] for place in table)
        pairs = [[table["", row, name].values["value"] or 0.0 for name in ("Robust-HDP", "optimum")] for row in rows]
        far.append(sum(abs(one - two) for one, two in pairs))
    verdict = "**yes**" if kept["L"] < kept["M"] and max(far) < 0.05 else "**no**"
    return verdict, (
        f"in drawn updates {kept['L']} of {len(spectra['L'])} singular values of L are above a hundredth of M's "
        f"largest, {kept['M']} of M's; ‖w − optimum‖₁ = {far[0]:.3f} and {far[1]:.3f}; {COMPUTED}"
    )


def _leads(name: str, block: str, ours: str, measure: Measure) -> tuple[str, str]:
    """Ours against the best other row of every column, by the first seed's numbers."""
    table, parts, words = measured(name), [], set()
    for column in dict.fromkeys(place[2] for place in table if place[0] == block):
        rows = {
            p[1]: e
            for p, e in table.items()
            if p[0] == block and p[2] == column and e.values.get(measure.key) is not None
        }
        others = {row: entry for row, entry in rows.items() if row != ours}
        if ours not in rows or not others:
            continue
        pick: Callable[..., str] = max if measure.more_is_better else min
        best = pick(others, key=lambda row: others[row].values[measure.key])
        gap = verdicts.between(rows[ours], others[best], measure, column)
        if gap is not None:
            words.add(gap.word)
            parts.append(f"{column} {gap.interval[0]:+{measure.form}} ({best})")
    return _one_seed(words), "against the best other: " + ", ".join(parts)


def _fair_open() -> tuple[str, str]:
    return _leads("fedfdp/table2", fedfdp_cells.OPEN_ONE, "FedFair", RECORDS)


def _fair_private() -> tuple[str, str]:
    return _leads("fedfdp/table4", fedfdp_cells.ONE, "FedFDP", RECORDS)


def _fairest() -> tuple[str, str]:
    verdict, told = _leads("fedfdp/table4", fedfdp_cells.ONE, "FedFDP", PSI)
    return verdict, f"Ψ {told}"


def _clients() -> tuple[str, str]:
    few, many = (value("fedfdp/table5", fedfdp_cells.ONE, "FedFDP", f"CIFAR10, {n} clients", RECORDS) for n in (10, 50))
    return (
        verdicts.NO_VERDICT,
        f"{few:.1f} with 10 clients, {many:.1f} with 50 on CIFAR10, with the values found for 10",
    )


def _lambdas() -> tuple[str, str]:
    def spread(data: str) -> str:
        values = [value("fedfdp/figure3", "", f"λ = {w:g}", data, RECORDS) for w in fedfdp_cells.LAMBDAS]
        return f"{max(values) - min(values):.1f} on {data}"

    return verdicts.NO_VERDICT, f"accuracy over all λ differs by {' and '.join(map(spread, fedfdp_cells.TWO))} points"


def _rounds() -> tuple[str, str]:
    wrong = []
    for row in results("fedfdp/figure5")["table"]:
        if row["measure"] == "rounds" and row["published"] is not None and row["published"] > row["measured"]:
            wrong.append(f"{row['published']:.0f} (it pays {row['measured']:.0f})")
    return (
        "**no**" if wrong else "**yes**"
    ), f"too many: {', '.join(wrong)}, and the released loss is not counted; {COMPUTED}"


def _levels() -> tuple[str, str]:
    known = {place: value for place, e in measured("adaptdp/table1").items() if (value := e.values["adapt"])}
    small = [f"{place[1]} {place[2]}" for place, value in known.items() if value <= 10]
    verdict = "**no**" if len(small) * 2 < len(known) else "**yes**"
    told = f"ε = {min(known.values()):.3g} to {max(known.values()):.2g} by its own formula"
    return verdict, f"{told}; at most 10 on {len(small)} of {len(known)} ({', '.join(small)}); {COMPUTED}"


def _loss_gaps(name: str, row: str, fixed: str, keep: Callable[[Place], bool]) -> list[Gap]:
    table = measured(name)
    return [
        gap
        for place, entry in table.items()
        if place[1] == row and keep(place)
        if (
            gap := verdicts.between(entry, table.get((place[0], fixed, place[2])), TRAIN_LOSS, f"{place[2]} {place[0]}")
        )
    ]


def _adaptive() -> tuple[str, str]:
    gaps = _loss_gaps("adaptdp/table2", adaptdp.ADAPT, adaptdp.FIXED, lambda place: True)
    words = {word: sum(one.word == word for one in gaps) for word in (verdicts.ABOVE, verdicts.EVEN, verdicts.BELOW)}
    verdict = "**mostly not**" if words[verdicts.ABOVE] * 2 < len(gaps) else "**yes**"
    return verdict, f"training loss: {verdicts.count(gaps)}; {seeds_of(gaps[0])}"


def _more_clients() -> tuple[str, str]:
    parts, won = [], []
    for task in ("T1", "T3", "T4"):
        row, fixed = f"{task}, {adaptdp.ADAPT}", f"{task}, {adaptdp.FIXED}"
        gaps = _loss_gaps("adaptdp/table4", row, fixed, lambda place: True)
        better = sum(one.word == verdicts.ABOVE for one in gaps)
        parts.append(f"{task} better on {better} of {len(gaps)}")
        won += [task] if better * 2 > len(gaps) else []
    return f"**on {', '.join(won)} only**" if won else "**no**", f"{'; '.join(parts)}; 5 seeds"


def _radius() -> tuple[str, str]:
    table, parts, falls = measured("adaptdp/figure2"), [], []
    for task in ("T1", "T3"):
        entry = table["ε = 8", adaptdp.ADAPT, task]
        first, last = (entry.seeds[key] for key in ("first_radius", "last_radius"))
        gap = Gap({seed: last[seed] - first[seed] for seed in last})
        parts.append(f"{task} {np.mean(list(first.values())):.2f} to {np.mean(list(last.values())):.2f} ({gap.word})")
        falls += [task] if gap.word == verdicts.BELOW else []
    return f"**on {' and '.join(falls)}**" if falls else "**no**", f"{', '.join(parts)}; ε = 8, 5 seeds"


def _deep() -> tuple[str, str]:
    table = measured("adaptdp/table5")
    columns = [f"ε = {e:g}" for e in adaptdp.EPSILONS]
    gaps = [
        verdicts.between(table["MobileNet", adaptdp.ADAPT, one], table["MobileNet", adaptdp.FIXED, one], TRAIN_LOSS)
        for one in columns
    ]
    told = ", ".join(f"{gap.interval[0]:+.2f} at ε = {e:g}" for gap, e in zip(gaps, adaptdp.EPSILONS) if gap)
    return _one_seed({gap.word for gap in gaps if gap}), f"training loss {told}"


def _phase_cost() -> tuple[str, str]:
    blocks = ("random features, 512", "MobileNetV2")
    costs = [value("adaptdp/table6", block, "AdaptDP-FedAvg", "b^C = b", RATIO) - 1 for block in blocks]
    told = ", ".join(f"{100 * cost:.1f} % ({block})" for cost, block in zip(costs, blocks))
    return ("**no**" if min(costs) > 0.01 else "**yes**"), f"{told}; one timing each"


RATIO = Measure("ratio", "times DP-FedAvg's")
Claim = tuple[str, Callable[[], tuple[str, str]], tuple[str, ...]]
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Privacy-aware selection": (
        ("beats unbiased by tens of points at ε ~ U(0, 1)", _selects, ("selection/table3", "selection/table4")),
        (
            "on CIFAR-10 it gains about 10 and 4 points with two kinds of budgets",
            _cifar,
            ("selection/figure6", "selection/figure4"),
        ),
        ("its closed-form noise is needed for the budget", _closed_form, ("selection/table3",)),
        ("larger η: towards generous clients, and all keep a chance", _weights, ("selection/figure3",)),
        ("accuracy grows with the batch size", _batches, ("selection/figure5",)),
    ),
    "Robust-HDP": (
        ("its weights leave the least possible noise", _least_noise, ("robust-hdp/table10",)),
        (
            "updates are noise on a matrix of low rank, and weights come near the optimum",
            _estimated,
            ("robust-hdp/figure8", "robust-hdp/figure9", "robust-hdp/figure10"),
        ),
        ("it is the most accurate rule", _most_accurate, ("robust-hdp/table8", "robust-hdp/table9")),
        ("z grows sub-linearly with q", _sublinear, ("robust-hdp/figure6",)),
    ),
    "FedFDP": (
        ("FedFair is the most accurate without privacy", _fair_open, ("fedfdp/table2", "fedfdp/table3")),
        ("FedFDP is the most accurate of seven private methods", _fair_private, ("fedfdp/table4", "fedfdp/table6")),
        ("it is the fairest", _fairest, ("fedfdp/table4", "fedfdp/table5", "fedfdp/table6")),
        ("it is as accurate with 50 clients as with 10", _clients, ("fedfdp/table5",)),
        ("some λ between is the fairest", _lambdas, ("fedfdp/figure3", "fedfdp/figure4")),
        ("ε = 2 pays for 6, 115, 268, 463, 708 rounds", _rounds, ("fedfdp/figure5",)),
    ),
    "AdaptDP-FedAvg": (
        ('its "privacy levels 1 to 3" are private', _levels, ("adaptdp/table1",)),
        (
            "adaptive clipping reaches a lower loss than a fixed radius",
            _adaptive,
            ("adaptdp/table2", "adaptdp/table3", "adaptdp/figure1"),
        ),
        ("it keeps its lead with 2, 4 and 6 clients", _more_clients, ("adaptdp/table4",)),
        ("the radius falls as training converges", _radius, ("adaptdp/figure2",)),
        ("it also wins with a deep network", _deep, ("adaptdp/table5",)),
        ("phase 1 costs 0.2 % of a round", _phase_cost, ("adaptdp/table6",)),
    ),
}
