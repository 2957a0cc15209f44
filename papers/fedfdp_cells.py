"""The runs behind FedFair's and FedFDP's tables and figures: which methods, on which data, with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from papers.experiment import Cell
from papers.round_budget import rounds_within

DATA = {"MNIST": "mnist", "FashionMNIST": "fashion-mnist", "CIFAR10": "cifar10"}
RATE, CLIP, NOISE, LOSS_NOISE, DELTA, EPSILON = 0.05, 0.1, 2.0, 5.0, 1e-5, 3.52
ONE, FIVE, TANH = "one local step", "five local steps", "one local step, tanh in place of ReLU"
STEPS = {ONE: 1, FIVE: 5, TANH: 1}

PRIVATE = {
    "FedAvg": "dp-fedavg",
    "SCAFFOLD": "dp-scaffold",
    "FedProx": "dp-fedprox",
    "FedDyn": "dp-feddyn",
    "ALI-DPFL": "ali-dpfl",
    "q-FFL": "dp-q-ffl",
    "q-FFL, corrected": "dp-q-ffl",
    "FedFDP": "fedfdp",
}
OPEN = {
    "FedAvg": "fedavg",
    "SCAFFOLD": "scaffold",
    "FedProx": "fedprox",
    "FedDyn": "feddyn",
    "q-FFL": "q-ffl",
    "FedFair": "fedfair",
}
MODEL, PIXELS = "fedavg-cnn", {"centred": True}
SHOWN = {"name": "ema", "decay": 0.98}
RATE_SHOWN = 10.0
"""η where nothing is searched: in the figures, at C = 0.1."""

CLIPS_TRIED = {"usual": (0.4, 1.6, 0.1, 6.4), "CIFAR10": (2.5, 1.25, 0.6, 5.0)}
LONGEST_TRIED = {"usual": (1.0, 2.5), "CIFAR10": (0.5, 1.0)}
"""C, and ηC, the longest step of a record, in which searches begin: four times two. With the paper's η = 1 and C = 0.1
a round moves the model by at most 0.1, and a C that clips every record leaves nothing for λ to act on. Methods that
have λ or q to search begin with two C, so that all begin with eight settings."""

RELEASES_LOSS = ("dp-q-ffl", "fedfdp")

PARTS: dict[str, dict[str, Any]] = {
    "FedProx": {"local": {"name": "fedprox"}},
    "FedDyn": {"local": {"name": "feddyn", "alpha": 0.1}},
    "ALI-DPFL": {"aggregate": {"name": "ali-dpfl", "whole_budget": True}},
    "q-FFL": {"aggregate": {"name": "q-ffl"}},
    "q-FFL, corrected": {"aggregate": {"name": "q-ffl", "corrected": True}},
    "FedFDP": {"clip": {"name": "fair"}},
    "FedFair": {"local": {"name": "fair"}},
}
SEARCH: dict[str, dict[str, tuple[float, ...]]] = {
    "q-FFL": {"aggregate.q": (0.01, 0.1)},
    "q-FFL, corrected": {"aggregate.q": (0.01, 0.1)},
    "FedFDP": {"clip.weight": (0.1, 1.0)},
    "FedFair": {"local.weight": (0.1, 1.0)},
}
"""q and λ: the paper gives neither, nor μ and α, which are 0.1 here."""

OPEN_ONE, OPEN_EPOCH = "not private, one local step", "not private, 20 local steps"
OPEN_LENGTH: dict[str, dict[str, int]] = {
    OPEN_ONE: {"rounds": 2000, "steps": 1, "evaluate": 100},
    OPEN_EPOCH: {"rounds": 100, "epochs": 1, "evaluate": 10},
}
"""As many gradients in both."""
ONE_STEP = (ONE, TANH, OPEN_ONE)
"""Blocks where FedProx, whose pull acts from the second local step on, is FedAvg."""
OPEN_RATES = (0.1, 0.05, 0.2, 0.025, 0.0125, 0.4, 0.00625, 0.8)
"""Without privacy the paper's η is 0.1, with which some methods diverge in 20 local steps: all begin with eight
settings around it, those that have λ or q to search with four η."""


@cache
def rounds(epsilon: float, noise: float, steps: int, loss: bool) -> int:
    """T: how many rounds the budget pays for with this noise, counting the loss where it is released."""
    asked = LOSS_NOISE if loss else None
    return rounds_within(epsilon, DELTA, RATE, noise, steps=steps, loss_noise=asked)


def loss_share(noise: float, steps: int) -> float:
    """The share of the budget (of Σ count/z²) that makes z_l = 5 beside K gradients with z."""
    return LOSS_NOISE**-2 / (steps * noise**-2 + LOSS_NOISE**-2)


def dealt(data: str, beta: float = 0.1, clients: int = 10) -> dict[str, Any]:
    """A data set with its published halves pooled, dealt by Dirichlet(β), a quarter of each client's kept for tests."""
    how = {"kind": "dirichlet", "clients": clients, "beta": beta, "test": 0.25, "minimum": 40}
    return {"name": DATA[data], "options": {"merge": True}, **how}


def private_cell(
    row: str,
    column: str,
    data: Mapping[str, Any],
    *,
    block: str = ONE,
    epsilon: float = EPSILON,
    noise: float = NOISE,
    weight: float | None = None,
    rate: float | None = None,
) -> Cell:
    """One private method at (ε, 1e-5) with as many rounds as that pays for at z = ``noise``; η searched or given."""
    method = PRIVATE.get(row, "fedfdp")
    steps = 5 if method == "ali-dpfl" else STEPS[block]
    parts = {key: dict(value) for key, value in PARTS.get("FedFDP" if method == "fedfdp" else row, {}).items()}
    if method in RELEASES_LOSS:
        parts["ask"] = {"name": "loss", "share": loss_share(noise, steps), "start": 2.5}
    parts["server"] = SHOWN
    search: dict[str, tuple[float, ...]] = SEARCH.get(row, {})
    if weight is not None:
        parts["clip"], search = {"name": "fair", "weight": weight}, {}
    return Cell(
        block=block,
        row=row,
        column=column,
        data=data,
        budgets={"spec": epsilon, "delta": DELTA},
        model=MODEL,
        model_options=PIXELS | ({"tanh": True} if block == TANH else {}),
        method=method,
        parts=parts,
        training={
            "rounds": rounds(epsilon, noise, steps, method in RELEASES_LOSS),
            "steps": steps,
            "rate": RATE,
            "clip": CLIP,
            "lr": rate or RATE_SHOWN,
            "evaluate": 50,
        },
        search=search if rate else {**search, **_lengths(row, data["name"], bool(search))},
    )


def _lengths(row: str, data: str, more: bool) -> dict[str, tuple[float, ...]]:
    """The C and ηC to begin with; fewer where there is ``more`` to search. FedDyn's dual variables add to its steps."""
    kind = "CIFAR10" if data == DATA["CIFAR10"] else "usual"
    shorter = 0.4 if row == "FedDyn" else 1.0
    lengths = tuple(shorter * length for length in LONGEST_TRIED[kind])
    return {"clip": CLIPS_TRIED[kind][: 2 if more else 4], "step": lengths}


def open_cell(row: str, column: str, data: Mapping[str, Any], block: str) -> Cell:
    """One method without privacy."""
    own = SEARCH.get(row, {})
    return Cell(
        block=block,
        row=row,
        column=column,
        data=data,
        model=MODEL,
        model_options=PIXELS,
        method=OPEN[row],
        parts=PARTS.get(row, {}),
        training={**OPEN_LENGTH[block], "rate": RATE},
        search={**own, "lr": OPEN_RATES[: 4 if own else 8]},
    )


SPREAD: dict[str, tuple[str, float, int]] = {
    "MNIST, Dir(0.1)": ("MNIST", 0.1, 10),
    "MNIST, Dir(0.5)": ("MNIST", 0.5, 10),
    "FashionMNIST, Dir(1)": ("FashionMNIST", 1.0, 10),
    "CIFAR10, 10 clients": ("CIFAR10", 0.1, 10),
    "CIFAR10, 20 clients": ("CIFAR10", 0.1, 20),
    "CIFAR10, 50 clients": ("CIFAR10", 0.1, 50),
}
"""Columns of Tables III and V: data set, β, clients."""


def private_tables(spread: bool) -> tuple[Cell, ...]:
    """Table IV in three blocks, or Table V (``spread``) in one."""
    if spread:
        return tuple(
            private_cell(row, column, dealt(data, beta, clients))
            for row in PRIVATE
            for column, (data, beta, clients) in SPREAD.items()
        )
    one = {(row, data): private_cell(row, data, dealt(data)) for row in PRIVATE for data in DATA}
    five = tuple(
        replace(
            private_cell(row, data, dealt(data), block=FIVE),
            tune_at={"training": usual.training, "parts": usual.parts},
        )
        for (row, data), usual in one.items()
        if row != "ALI-DPFL"  # which sets its steps itself, from five on
    )
    bounded = tuple(
        replace(private_cell(row, data, dealt(data), block=TANH), tune_at={"model_options": {"tanh": None}})
        for row, data in one
    )
    return (*one.values(), *five, *bounded)


def open_tables(spread: bool) -> tuple[Cell, ...]:
    """Table II, or Table III (``spread``), both in two blocks."""
    columns = SPREAD if spread else {data: (data, 0.1, 10) for data in DATA}
    return tuple(
        open_cell(row, column, dealt(data, beta, clients), block)
        for block in OPEN_LENGTH
        for row in OPEN
        for column, (data, beta, clients) in columns.items()
    )


BUDGETS = {"ε = 1": (1.0, 2.0), "ε = 2": (2.0, 2.0), "ε = 3": (3.0, 2.0), "ε = 4": (4.0, 1.65)}
"""Columns of Table VI: ε and z."""


def budget_cells() -> tuple[Cell, ...]:
    """Table VI: FashionMNIST at four budgets, each with values of its own."""
    return tuple(
        private_cell(row, column, dealt("FashionMNIST"), epsilon=epsilon, noise=noise)
        for row in PRIVATE
        for column, (epsilon, noise) in BUDGETS.items()
    )


LAMBDAS = (0.0, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0)
CLIPS = (0.01, 0.1, 1.0, 5.0, 10.0)
NOISES = (1.0, 1.5, 2.0, 2.5, 3.0)
TWO = ("MNIST", "FashionMNIST")


def lambda_cells() -> tuple[Cell, ...]:
    """Figure 3. λ = 0 releases no loss and is DP-FedAvg: it gets the rounds that this saves."""
    cells = []
    for weight in LAMBDAS:
        for data in TWO:
            row = "FedAvg" if weight == 0 else "FedFDP"
            cell = private_cell(row, data, dealt(data), weight=weight or None, rate=RATE_SHOWN)
            cells.append(_named(cell, f"λ = {weight:g}"))
    return tuple(cells)


def _named(cell: Cell, row: str, block: str = "") -> Cell:
    return replace(cell, row=row, block=block)


def clip_cells() -> tuple[Cell, ...]:
    """Figure 4: C at steps ηC of one length."""
    cells = []
    for clip in CLIPS:
        for data in TWO:
            cell = private_cell("FedFDP", data, dealt(data), weight=0.1, rate=RATE_SHOWN * CLIP / clip)
            cells.append(_named(replace(cell, training={**cell.training, "clip": clip}), f"C = {clip:g}"))
    return tuple(cells)


def noise_cells() -> tuple[Cell, ...]:
    """Figure 5: as many rounds as ε = 2 pays for at each z."""
    return tuple(
        _named(
            private_cell("FedFDP", data, dealt(data), epsilon=2.0, noise=z, weight=0.1, rate=RATE_SHOWN),
            f"σ = {z:g}",
            "trained",
        )
        for z in NOISES
        for data in TWO
    )
