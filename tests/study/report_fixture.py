"""Results as a simulation would write them, made up but plausible: saturating curves, unequal clients, true budgets.

Only the shapes matter here; no number below is a measurement.
"""

from __future__ import annotations

import math
import random
from typing import Any

RATES = {"fedavg": (0.965, 6.0), "dp-fedavg": (0.83, 9.0), "minimum-epsilon": (0.69, 12.0)}
PRIVATE = ("dp-fedavg", "minimum-epsilon", "robust-hdp", "weiavg", "random-effects")


def budgets(clients: int, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [round(max(0.1, draw.gauss(*draw.choice([(0.3, 0.08), (1.0, 0.1), (5.0, 0.6)]))), 4) for _ in range(clients)]


def result(
    method: str = "dp-fedavg",
    seed: int = 0,
    clients: int = 12,
    rounds: int = 40,
    evaluate_every: int = 1,
    public: int = 0,
) -> dict[str, Any]:
    """One result of schema 1. The first ``public`` clients hold public data (ε = ∞, null in JSON)."""
    draw = random.Random(f"{method}/{seed}")
    luck = draw.gauss(0, 0.02)
    world = random.Random(clients)
    names = [f"client-{place:02d}" for place in range(clients)]
    sizes = [world.randint(60, 240) for _ in names]
    allowed: list[float | None] = [None if place < public else e for place, e in enumerate(budgets(clients))]
    private = method in PRIVATE
    floor = min(e for e in allowed if e is not None)
    top, pace = RATES.get(method, (0.78 + 0.03 * (hash_of(method) % 4), 7.0 + hash_of(method) % 5))
    offsets = [world.gauss(0, 0.04) + (0.0 if e is None else 0.03 * math.log10(e)) for e in allowed]
    shares = weights(method, names, allowed, sizes)
    rows = []
    for number in range(1, rounds + 1):
        level = top * (1 - 0.88 * math.exp(-number / pace)) + luck * (1 - number / rounds / 2) + draw.gauss(0, 0.006)
        seen = number % evaluate_every == 0 or number == rounds
        each = sorted(min(1.0, max(0.0, level + offset)) for offset in offsets)
        rows.append(
            {
                "round": number,
                "accuracy": level if seen else None,
                "loss": 2.3 * (1 - level) + 0.12 + draw.gauss(0, 0.01) if seen else None,
                "psi": 0.05 + 0.4 * math.exp(-number / pace) + abs(draw.gauss(0, 0.004)) if seen else None,
                "spent_epsilon": dict.fromkeys(("min", "median", "max"))
                if not private
                else {key: e * math.sqrt(number / rounds) for key, e in (("min", 0.2), ("median", 0.9), ("max", 5.4))},
                "participants": names,
                "weights": shares,
                "client_accuracy": [min(1.0, max(0.0, level + offset)) for offset in offsets] if seen else None,
                "worst_decile": each[0] if seen else None,
            }
            | (combined(method, shares, number, draw) if private else {})
        )
    accuracy = [min(1.0, max(0.0, rows[-1]["accuracy"] + offset + draw.gauss(0, 0.01))) for offset in offsets]
    return {
        "schema": 1,
        "study": {
            "data": {
                "source": {"name": "digits"},
                "partition": {"kind": "dirichlet", "clients": clients, "seed": seed, "beta": 0.3, "topped_up": seed},
                "budgets": {"spec": "dist2", "delta": 1e-5, "seed": seed},
            },
            "budgets": allowed,
            "sizes": sizes,
            "model": {"name": "cnn-small"},
            "method": {"name": method},
            "training": {"rounds": rounds, "rate": 0.1, "steps": 1, "lr": 0.5, "clip": 1.0},
        },
        "method": method,
        "seed": seed,
        "rounds": rows,
        "final": {
            "accuracy": sum(accuracy) / clients,
            "loss": rows[-1]["loss"],
            "psi": rows[-1]["psi"],
            "worst_accuracy": min(accuracy),
            "client_accuracy": accuracy,
            "central_accuracy": rows[-1]["accuracy"] + 0.01,
            "train_psi": 0.8 * rows[-1]["psi"],
            "accuracy_variance": 0.0031,
            "worst_decile": min(accuracy),
            "best_decile": max(accuracy),
        },
        "privacy": [
            privacy_entry(name, allowed[place], private, floor if method == "minimum-epsilon" else None, rounds)
            for place, name in enumerate(names)
        ],
        "private": private,
        "seconds": 14.2 + 3 * draw.random(),
        "versions": {"sordino": "0.1.0", "torch": "2.13.0", "python": "3.11.2"},
    }


def privacy_entry(name: str, allowed: float | None, private: bool, floor: float | None, rounds: int) -> dict[str, Any]:
    spent = None if not private or allowed is None else (floor or allowed) * 0.998
    noise = 0.0 if spent is None else round(2.2 / spent**0.8 * math.sqrt(rounds / 40), 4)
    return {
        "client": name,
        "epsilon": allowed if private else None,
        "delta": 1e-5,
        "spent_epsilon": spent,
        "run_epsilon": spent,
        "replace_one_epsilon": None if spent is None else spent * 1.94,
        "adjacency": "zero-out",
        "sampling": "poisson",
        "accountant": "pld",
        "releases": [{"what": "gradient", "rate": 0.1, "noise": noise, "count": rounds}],
        **({"budget_ends": None if allowed is None or floor is not None else rounds} if private else {}),
    }


def combined(method: str, shares: dict[str, float], number: int, draw: random.Random) -> dict[str, Any]:
    """What a private run tells of its combination in a round, as an observer of a simulation sees it."""
    best = {name: value * (1 + 0.3 * (place % 3)) for place, (name, value) in enumerate(shares.items())}
    best = {name: value / sum(best.values()) for name, value in best.items()}
    power = (0.4 if method == "dp-fedavg" else 3.9) + abs(draw.gauss(0, 0.02))
    spectrum = [9.0 / (1 + place) + number / 100 for place in range(len(shares))]
    return {
        "declared_weights": best,
        "observer": {"optimum_weights": best, "noise_power": power, "least_noise_power": 0.3},
        "diagnostics": {"update_singular_values": spectrum, "low_rank_singular_values": [4.0, 1.0, *spectrum[2:3], 0.0]}
        if method == "robust-hdp"
        else {},
    }


def weights(method: str, names: list[str], allowed: list[float | None], sizes: list[int]) -> dict[str, float]:
    raw = [
        float(size) if method in ("fedavg", "dp-fedavg", "minimum-epsilon") else (e or 10.0) ** 1.2
        for e, size in zip(allowed, sizes, strict=True)
    ]
    return {name: value / sum(raw) for name, value in zip(names, raw, strict=True)}


def hash_of(text: str) -> int:
    """A hash that is the same in every process."""
    return sum(map(ord, text))


def comparison(
    methods: tuple[str, ...] = ("fedavg", "dp-fedavg", "minimum-epsilon"),
    seeds: tuple[int, ...] = (0, 1),
    **settings: Any,
) -> list[dict[str, Any]]:
    """Several methods times several seeds."""
    return [result(method, seed, **settings) for method in methods for seed in seeds]


def with_baselines(result: dict[str, Any]) -> dict[str, Any]:
    """The same with what ``sordino run --baselines`` trains beside it: some clients gain by taking part."""
    each = result["final"]["client_accuracy"]
    found = {
        "majority": [0.3 + 0.05 * (place % 9) for place in range(len(each))],
        "alone": [max(0.0, value - 0.2 + 0.05 * (place % 7)) for place, value in enumerate(each)],
        "ceiling": [0.9] * len(each),
    }
    told = {name: {"accuracy": sum(v) / len(v), "client_accuracy": v} for name, v in found.items()}
    return {**result, "baselines": {"covered": False, **told}}
