"""How much of privacy's price is the rule's: the least noise there could be, accuracy against ε, and who pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from papers import theory_limits as theory
from papers import verdicts
from papers.experiment import ACCURACY, Cell, Entry, Experiment, Measure, Quick
from papers.robust_hdp import DELTA as HDP_DELTA
from papers.robust_hdp import DISTS
from papers.store import Store
from papers.verdicts import Gap, interval
from sordino.data.budgets import published as published_budgets

NOISE, ACCURATE, OPEN = "noise", "accuracy against ε", "without privacy"
MEDIANS = (0.05, 0.2, 0.5, 1.0, 3.0, 10.0)
GROUPS = {"strict": 0.5, "middle": 1.0, "generous": 2.0}
CLIENTS, DELTA, ROUNDS, RATE = 18, 1e-5, 60, 0.1
DEALT = {
    "name": "mnist",
    "options": {"records": 12_000},
    "kind": "dirichlet",
    "clients": CLIENTS,
    "beta": 0.5,
    "minimum": 60,
    "test": 0.2,
}
RATES = tuple(0.5 * 2.0**k for k in range(11))
ROWS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    theory.STRICTEST: ("minimum-epsilon", {}, None),
    theory.BY_SIZE: ("dp-fedavg", {}, None),
    theory.BY_BUDGET: ("weiavg", {}, None),
    theory.ESTIMATED: ("robust-hdp", {"aggregate": {"name": "robust-hdp", "rows": 2000}}, None),
    "random effects (ours)": ("random-effects", {}, None),
    theory.OPTIMUM: ("optimum", {}, None),
    theory.SHARED: ("dp-fedavg", {}, {"noise": "shared", "colluders": CLIENTS // 2}),
    theory.CURATOR: ("dp-fedavg", {}, {"noise": "shared", "colluders": 0}),
}
"""Five methods with noise per site, then the limits: method, parts, trust. Shared noise against the server alone is
what a trusted curator would add."""
FIVE = tuple(ROWS)[:5]
LIMIT = theory.CURATOR

QUESTIONS = (
    "What would people choose? Each paper draws budgets from a distribution of its own making; none has asked anybody.",
    "What does a budget say about its owner's records? All four draw ε independently of the data. If those with rare "
    "records choose less, weights by budget are weights against them.",
    "What is the least error at unequal budgets? For means the rates are known (Chaudhuri, Miagkov and Courtade, "
    "2023); for training, none of the four says how far a rule is from the best possible. The curator above has the "
    "least *noise*, which need not be the least error.",
    "Who should pay? A strict client gets the model that generous ones paid for. Whether accuracy, or a say in what is "
    "learnt, should follow the budget is not asked with numbers on both sides.",
    "What does choosing cost? Learning rates, rounds and clips of the published tables were chosen by looking at "
    "records for free; with the search paid for, rules that need less of it would rise.",
    "Does the order of rules last? A federation trains again next year from what is left of its budgets; the tables "
    "spend all of them once.",
)
"""What the four papers leave open."""


def _cell(row: str, median: float) -> Cell:
    method, parts, trust = ROWS[row]
    budgets = {"spec": [median * GROUPS[group] for group in GROUPS] * (CLIENTS // len(GROUPS)), "delta": DELTA}
    return Cell(
        ACCURATE, row, f"ε = {median:g}", DEALT, "scatter-linear", method, _training(), budgets, parts, trust=trust,
        search={"lr": RATES},
    )  # fmt: skip


def _training() -> dict[str, Any]:
    return {"rounds": ROUNDS, "rate": RATE, "steps": 1, "clip": 1.0, "cooldown": 1.0, "evaluate": ROUNDS}


def cells() -> tuple[Cell, ...]:
    """Every row at every ε, and once without privacy; one learning rate each, searched over the same grid."""
    private = tuple(_cell(row, median) for median in MEDIANS for row in ROWS)
    ceiling = Cell(OPEN, "fedavg", "no noise", DEALT, "scatter-linear", "fedavg", _training(), search={"lr": RATES})
    return (*private, ceiling)


def noises(quick: bool) -> list[Entry]:
    """By budgets and rule: the noise on the combined gradient, as a multiple of a trusted curator's."""
    content = published_budgets()
    batches = np.array(content["batch_sizes"], dtype=np.float64)
    many = np.full_like(batches, 2400.0)
    cases = {dist: (np.array(content["epsilons"][dist]), HDP_DELTA, many, batches, 200) for dist in DISTS}
    records = np.full(CLIENTS, 12_000 * 0.8 / CLIENTS)
    for median in MEDIANS:
        epsilons = median * np.array([*GROUPS.values()] * (CLIENTS // len(GROUPS)))
        cases[f"ε = {median:g}"] = (epsilons, DELTA, records, RATE * records, ROUNDS)
    found = []
    for name, case in list(cases.items())[: 2 if quick else None]:
        left = theory.left_over(*case, dimension=2_000 if quick else 24_020)
        found += [Entry((NOISE, row, name), {"noise": value / left[LIMIT]}) for row, value in left.items()]
    return found


def gather(folder: Path, planned: Sequence[Cell], store: Store, about: Mapping[str, Any]) -> dict[str, Any]:
    """What results.json holds beside: every client's accuracy in every run, and by seed the clients' records."""
    clients, records = [], {}
    for cell in planned:
        known = store.read(cell)
        if known is not None and "diverged" not in known:
            told = {"block": cell.block, "row": cell.row, "column": cell.column, "seed": cell.seed}
            clients.append(told | {"accuracy": known["client_accuracy"]})
            records[str(cell.seed)] = known["client_sizes"]
    return {"clients": clients, "records": records}


def lines(results: Mapping[str, Any]) -> list[str]:
    """The page: noise, accuracy and what is left to the limit, who pays, and what nobody knows."""
    by_run = {(one["row"], one["column"], one["seed"]): np.array(one["accuracy"]) for one in results["clients"]}
    return [
        *_said(results["table"], by_run),
        *_noise_lines(results["table"]),
        *_accuracy_lines(by_run),
        *_payers(by_run, results["records"]),
        *_asked(),
    ]


def _said(table: Sequence[Mapping[str, Any]], by_run: Mapping[tuple[str, str, int], Any]) -> list[str]:
    """What the page says: noise of the rules, how far they are from the limit, whether strict clients pay more."""
    noise: dict[str, list[float]] = {}
    for one in table:
        if one["block"] == NOISE and one["measure"] == "noise":
            noise.setdefault(one["method"], []).append(one["measured"])
    ranges = [f"{row} {min(own):.1f} to {max(own):.1f}" for row, own in noise.items() if row != LIMIT]
    gaps: dict[str, list[Gap]] = {"rules": [], theory.SHARED: []}
    for row in (*FIVE, theory.SHARED):
        for median in MEDIANS:
            own, limit = (_by_seed(by_run, one, f"ε = {median:g}") for one in (row, LIMIT))
            if both := sorted(set(own) & set(limit)):
                pairs = {seed: own[seed] - limit[seed] for seed in both}
                gaps[row if row in gaps else "rules"].append(Gap(pairs, f"ε = {median:g}"))
    told = [f"Times a curator's noise, over all these budgets: {', '.join(ranges)}."] if ranges else []
    if gaps["rules"]:
        words = [one.word for one in gaps["rules"]]
        told.append(f"The five methods against {LIMIT}: below on {words.count(verdicts.BELOW)} of {len(words)}.")
    if gaps[theory.SHARED]:
        told.append(f"{theory.SHARED.capitalize()}, against {LIMIT}: {verdicts.count(gaps[theory.SHARED])}.")
    return ["## What this says", "", *(f"- {one}" for one in told), ""] if told else []


def _noise_lines(table: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [one for one in table if one["block"] == NOISE and one["measure"] == "noise"]
    names, budgets = (list(dict.fromkeys(one[key] for one in rows)) for key in ("method", "federation"))
    value = {(one["federation"], one["method"]): one["measured"] for one in rows}
    return [
        "## The least noise",
        "",
        "Deviation of the noise on the combined gradient, as a multiple of what a curator whom everybody trusts would "
        "add for the same budgets, batches and rounds (no training; see below for the settings).",
        "",
        *_table("budgets", names, [(one, [f"{value[one, name]:.1f}" for name in names]) for one in budgets]),
    ]


def _accuracy_lines(by_run: Mapping[tuple[str, str, int], Any]) -> list[str]:
    columns = [f"ε = {median:g}" for median in MEDIANS]
    shown, behind = [], []
    for row in ROWS:
        found = [_by_seed(by_run, row, column) for column in columns]
        limits = [_by_seed(by_run, LIMIT, column) for column in columns]
        shown.append((row, [_spread(list(one.values())) for one in found]))
        if row != LIMIT:
            gaps = [
                [one[seed] - limit[seed] for seed in sorted(set(one) & set(limit))] for one, limit in zip(found, limits)
            ]
            behind.append((row, [_gap(gap) for gap in gaps]))
    ceiling = _by_seed(by_run, "fedavg", "no noise")
    return [
        "## Accuracy against ε",
        "",
        f"Mean over clients, %, ± deviation over seeds; ε is the middle third's, half and twice of it the others'. "
        f"Without privacy: {_spread(list(ceiling.values()))}.",
        "",
        *_table("method", columns, shown),
        "## How far from the limit",
        "",
        f"Points above {LIMIT}, in whose place stands DP-FedAvg with noise shared against the server alone, which is "
        "as much; its weights stay near the clients' shares of the data. Paired by seed, 95 % t-intervals.",
        "",
        *_table("method", columns, behind),
    ]


def _payers(by_run: Mapping[tuple[str, str, int], Any], records: Mapping[str, Sequence[int]]) -> list[str]:
    """What privacy costs a client: its accuracy without privacy less its accuracy, in the same deal."""
    columns = [f"ε = {median:g}" for median in MEDIANS]
    place = np.arange(CLIENTS) % len(GROUPS)
    by_budget, by_size = [], []
    for row in ROWS:
        budget, size = [], []
        for column in columns:
            strict, small = [], []
            for seed in sorted(_by_seed(by_run, row, column)):
                if ("fedavg", "no noise", seed) not in by_run:
                    continue
                price = 100 * (by_run["fedavg", "no noise", seed] - by_run[row, column, seed])
                order = (
                    np.argsort(np.argsort(records[str(seed)], kind="stable"), kind="stable") * len(GROUPS) // CLIENTS
                )
                strict.append(float(price[place == 0].mean() - price[place == 2].mean()))
                small.append(float(price[order == 0].mean() - price[order == 2].mean()))
            budget.append(_gap(strict))
            size.append(_gap(small))
        by_budget.append((row, budget))
        by_size.append((row, size))
    return [
        "## Who pays: by budget",
        "",
        "A client's price is its accuracy without privacy less its accuracy, in the same deal. Shown is how many "
        "points more the strict third pays than the generous third; 95 % t-intervals over seeds.",
        "",
        *_table("method", columns, by_budget),
        "## Who pays: by size",
        "",
        "The same for the third with the fewest records against the third with the most.",
        "",
        *_table("method", columns, by_size),
    ]


def _asked() -> list[str]:
    return [
        "## Questions that stay open",
        "",
        "None of the four papers behind these methods answers them, nor does this page; every table of theirs and ours "
        "rests on some answer.",
        "",
        *(f"- {question}" for question in QUESTIONS),
        "",
    ]


def _by_seed(by_run: Mapping[tuple[str, str, int], Any], row: str, column: str) -> dict[int, float]:
    return {key[2]: 100 * float(np.mean(one)) for key, one in by_run.items() if key[:2] == (row, column)}


def _spread(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{np.mean(values):.1f}" + (f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else "")


def _gap(differences: Sequence[float]) -> str:
    if not differences:
        return "–"
    mean, low, high = interval(differences)
    return f"{mean:+.1f}" + (f" [{low:+.1f}, {high:+.1f}]" if len(differences) > 1 else "")


def _table(first: str, columns: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    head = [f"| {' | '.join([first, *columns])} |", "|" + "---|" * (len(columns) + 1)]
    return [*head, *(f"| {' | '.join([name, *cells])} |" for name, cells in rows), ""]


EXPERIMENTS = (
    Experiment(
        name="accuracy/limits",
        title="the least noise there could be, accuracy against ε for five methods, and who pays",
        cost="245 runs of a linear head, 60 rounds, and 539 more to choose values; twenty minutes on one core",
        measures=(ACCURACY, Measure("noise", "noise, times a curator's", 1.0, ".2f")),
        published={},
        differs=(
            "Tables of our own, no paper's. Noise, Dist1 to Dist9: Robust-HDP's budgets and batch sizes, 2,400 records "
            "a client, 200 rounds of one local step, δ = 1e-4; the rest: the federation below with clients of one "
            "size. 'Least' is meant for these batches and one Gaussian a step; weights that leave the least noise may "
            "be far from the clients' shares of the data, and none of this is about that bias.",
            f"Accuracy: 12,000 records of MNIST dealt to {CLIENTS} clients by Dirichlet(0.5), a fifth of each for "
            "tests, a linear head on fixed scattering features (24,020 parameters); every third client has half of ε, "
            "every third twice. "
            f"{ROUNDS} rounds of one step, q = {RATE:g}, C = 1, steps that shrink to nothing, tight noise, every "
            "release counted. Another deal for every seed, the same for all rows.",
            f"One learning rate is searched for every row and ε over the same {len(RATES)} values, "
            f"{RATES[0]:g} to {RATES[-1]:g}, on seed 100, which no cell shows.",
            "Robust-HDP's pursuit looks at 2,000 rows of its matrix. Random effects weigh noise against how much "
            "clients differ and are not in the table of noise: they do not aim for the least.",
        ),
        cells=cells,
        compute=noises,
        seeds=5,
        features=True,
        quick=Quick(
            columns=("ε = 1", "no noise"), data={"options": {"records": 2000}}, training={"rounds": 5, "evaluate": 5}
        ),
        gather=gather,
        lines=lines,
        axes=("method", "federation"),
    ),
)
