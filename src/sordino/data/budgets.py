"""Budget distributions: how much each client of a simulated federation is willing to spend.

``N(m, v)`` below always has the *variance* as its second number, as in ``{"mixture": [[weight, mean, variance]]}``.
The two papers read differently, and their own numbers say how:

- Robust-HDP's Table 4 prints *standard deviations*: the authors' published draws of N(0.2, 0.01), N(0.5, 0.1) and
  N(1.0, 0.1) spread by about 0.01, 0.1 and 0.12. ``dist1``…``dist9`` square them.
- The selection paper's 0.3·N(0.5, 0.04) + 0.7·N(10, 1) prints *variances*: it writes N(0, σ²) throughout, and only a
  deviation of 0.2 ever gives the negative values that it says are discarded (0.04 would be 12 deviations away).
"""

from __future__ import annotations

import csv
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.data.seeds import generator
from sordino.errors import BadInput

Floats = npt.NDArray[np.float64]
Mixture = tuple[tuple[float, float, float], ...]

_NARROW, _HALF, _ONE = (0.2, 0.01**2), (0.5, 0.1**2), (1.0, 0.1**2)

MIXTURES: dict[str, Mixture] = {
    "dist1": ((1.0, 2.0, 1.0),),
    "dist2": ((0.2, *_NARROW), (0.6, *_ONE), (0.2, 5.0, 1.0)),
    "dist4": ((0.2, *_NARROW), (0.6, *_HALF), (0.2, 2.0, 1.0)),
    "dist6": ((0.3, *_NARROW), (0.5, *_HALF), (0.2, *_ONE)),
    "dist8": ((0.6, *_NARROW), (0.4, *_HALF)),
}
UNIFORMS: dict[str, tuple[float, float]] = {
    "dist3": (0.2, 5.0),
    "dist5": (0.2, 2.0),
    "dist7": (0.2, 1.0),
    "dist9": (0.2, 0.5),
}
DISTRIBUTIONS = tuple(f"dist{k}" for k in range(1, 10))

Spec = str | float | Sequence[float] | Mapping[str, Any]

_WORDS = {"mixture", "uniform", "csv", "column", "client"}
"""Keys of a table that describes a distribution or a file; numbers under any keys are budgets by name."""


def epsilons(
    spec: Spec,
    names: Sequence[str],
    seed: int = 0,
    order: Sequence[str] | None = None,
    sorted_files: bool = False,
    **options: float,
) -> tuple[tuple[float, ...], tuple[int, ...] | None]:
    """One ε per client, and the batch sizes when the specification brings them.

    Parameters
    ----------
    spec
        ``"dist1"``…``"dist9"`` (Table 4 of Robust-HDP); ``"dist1-published"``… (its authors' 20 values and batch
        sizes); ``"uniform"`` with ``low=`` and ``high=``; ``{"uniform": [low, high]}``;
        ``{"mixture": [[weight, mean, variance], …]}``; ``{"north": 3.0, "south": 1.0}``, by name;
        ``{"csv": path, "column": name}``, by name where a column of it holds the clients' names (``"client": column``
        says which); a list, in the order of ``order`` or of the clients; or one number for all.
    names
        The clients' names, in order.
    seed
        Governs the draws. Draws ε ≤ 0 are discarded and drawn again.
    order
        The clients' names in the order that a list of budgets follows.
    sorted_files
        Whether the clients' order is that of their files' names, which nobody chose: a list then needs ``order``.
    """
    check_order(order, names)
    if options and spec != "uniform":
        raise BadInput(f"budgets {spec!r} take no {', '.join(options)}: only 'uniform' has low and high")
    if isinstance(spec, str):
        if spec.endswith("-published"):
            return _published(spec, len(names))
        return _named(spec, len(names), seed, options), None
    if isinstance(spec, Mapping):
        return _described(spec, names, seed, order, sorted_files), None
    if isinstance(spec, int | float | np.number):
        return (_number(spec, "budgets"),) * len(names), None
    values = [_number(value, f"budgets[{k}]") for k, value in enumerate(spec)]
    if len(values) != len(names):
        raise BadInput(f"budgets list has {len(values)} values for {len(names)} clients: give one each, or one number")
    return tuple(in_order(values, "epsilon", names, order, sorted_files)), None


def check_order(order: Sequence[str] | None, names: Sequence[str]) -> None:
    """Refuse an order that does not name every client once."""
    if order is None:
        return
    for name in order:
        if name not in names:
            raise BadInput(f"budgets.order names {name!r}, which is no client: clients are {', '.join(names)}")
        if list(order).count(name) > 1:
            raise BadInput(f"budgets.order names {name!r} twice: name every client once")
    for name in names:
        if name not in order:
            raise BadInput(f"budgets.order leaves out client {name!r}: name every client once")


def in_order(
    values: Sequence[float], key: str, names: Sequence[str], order: Sequence[str] | None, sorted_files: bool
) -> list[float]:
    """One value per client from a list, which follows ``order``, else the clients' own order if somebody chose it."""
    if order is None and sorted_files and len(names) > 1:
        told = ", ".join(f"{_toml(name)} = {value:g}" for name, value in zip(names, values))
        raise BadInput(
            f"budgets.{key} is a list, but these clients are files, whose order follows from their names: say whose it "
            f"is, budgets.{key} = {{{told}}}, or in which order they come, budgets.order = {json.dumps(list(names))}"
        )
    found = dict(zip(names if order is None else order, values))
    return [found[name] for name in names]


def by_name(values: Mapping[str, Any], key: str, names: Sequence[str]) -> list[float]:
    """One value per client from a table of names; a name too many or too few is refused."""
    for name in values:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            told = f"did you mean {near[0]!r}?" if near else f"clients are {', '.join(names[:8])}"
            raise BadInput(f"budgets.{key} names {name!r}, which is no client: {told}")
    for name in names:
        if name not in values:
            raise BadInput(f"budgets.{key} has no value for client {name!r}: add {_toml(name)} = …")
    return [_number(values[name], f"budgets.{key}.{name}") for name in names]


def _toml(name: str) -> str:
    """A name as a TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _named(spec: str, count: int, seed: int, options: Mapping[str, float]) -> tuple[float, ...]:
    """Draws of a distribution that has a name."""
    if spec in MIXTURES:
        return _mixture(MIXTURES[spec], count, seed)
    if spec in UNIFORMS:
        return _uniform(*UNIFORMS[spec], count, seed)
    if spec == "uniform":
        if set(options) != {"low", "high"}:
            raise BadInput("budgets 'uniform' need low and high, e.g. low=0.0, high=1.0")
        return _uniform(options["low"], options["high"], count, seed)
    if spec == "inf":
        return (math.inf,) * count
    raise BadInput(
        f"budgets {spec!r} are unknown: use dist1…dist9, dist1-published…dist9-published, 'uniform' with low and high, "
        "'inf', a number, a list, or a table with 'mixture', 'uniform' or 'csv'"
    )


def is_by_name(spec: Any) -> bool:
    """Whether a table holds budgets by the clients' names: it does, unless it describes a distribution or a file."""
    if not isinstance(spec, Mapping):
        return False
    numbers = all(isinstance(value, int | float | np.number) for value in spec.values())
    return numbers or not set(spec) & _WORDS


def _described(
    spec: Mapping[str, Any], names: Sequence[str], seed: int, order: Sequence[str] | None, sorted_files: bool
) -> tuple[float, ...]:
    """Budgets by name, draws of a distribution given by its parameters, or values from a file."""
    keys = set(spec)
    if is_by_name(spec):
        return tuple(by_name(spec, "epsilon", names))
    if keys == {"mixture"}:
        return _mixture(_checked_mixture(spec["mixture"]), len(names), seed)
    if keys == {"uniform"}:
        try:
            low, high = spec["uniform"]
        except (TypeError, ValueError):
            raise BadInput(f"budgets.uniform is {spec['uniform']!r}: give [low, high]") from None
        return _uniform(low, high, len(names), seed)
    if {"csv", "column"} <= keys <= {"csv", "column", "client"}:
        return _from_csv(Path(spec["csv"]), spec["column"], spec.get("client"), names, order, sorted_files)
    raise BadInput(
        f"budgets table has keys {sorted(keys)}: use {{mixture = [[weight, mean, variance], …]}}, "
        "{uniform = [low, high]}, {csv = path, column = name}, or the clients' names with a number each"
    )


def _uniform(low: float, high: float, count: int, seed: int) -> tuple[float, ...]:
    """ε ~ U(low, high), draws ε ≤ 0 repeated."""
    low, high = _number(low, "budgets low"), _number(high, "budgets high")
    if not (0 <= low < high < math.inf):
        raise BadInput(f"uniform budgets from {low} to {high}: need 0 ≤ low < high < inf")
    random = generator(seed, "budgets")
    return _positive(lambda n: random.uniform(low, high, n), count)


def _mixture(parts: Mixture, count: int, seed: int) -> tuple[float, ...]:
    """ε ~ Σ_k weight_k N(mean_k, variance_k), draws ε ≤ 0 discarded (component and all) and repeated."""
    weights, means, variances = (np.array(column, dtype=np.float64) for column in zip(*parts))
    random = generator(seed, "budgets")

    def draw(n: int) -> Floats:
        component = random.choice(len(weights), size=n, p=weights / weights.sum())
        return means[component] + np.sqrt(variances[component]) * random.standard_normal(n)

    return _positive(draw, count)


def _positive(draw: Any, count: int, attempts: int = 1000) -> tuple[float, ...]:
    """``count`` positive values of ``draw(n)``, repeating those that are not."""
    values: Floats = draw(count)
    for _ in range(attempts):
        wrong = np.flatnonzero(values <= 0)
        if not wrong.size:
            return tuple(float(value) for value in values)
        values[wrong] = draw(wrong.size)
    raise BadInput("this budget distribution hardly ever gives ε > 0: raise its mean")


def _checked_mixture(parts: Any) -> Mixture:
    """The mixture's components, refused when they are no distribution."""
    try:
        rows = tuple((float(weight), float(mean), float(variance)) for weight, mean, variance in parts)
    except (TypeError, ValueError):
        raise BadInput(f"budgets.mixture is {parts!r}: give [[weight, mean, variance], …]") from None
    finite = all(math.isfinite(value) for row in rows for value in row)
    if not rows or not finite or any(row[0] < 0 or row[2] < 0 for row in rows):
        raise BadInput(f"budgets.mixture is {parts!r}: weights and variances must be finite and ≥ 0")
    if abs(sum(row[0] for row in rows) - 1.0) > 1e-6:
        raise BadInput(f"budgets.mixture has weights that sum to {sum(row[0] for row in rows):g}: they must sum to 1")
    return rows


def published() -> dict[str, Any]:
    """The 20 budgets of each of Dist1…Dist9 and the batch sizes, as drawn by Robust-HDP's authors."""
    text = resources.files("sordino.data").joinpath("robust_hdp_budgets.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _published(spec: str, count: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """The authors' values of one distribution."""
    name = spec.removesuffix("-published")
    if name not in DISTRIBUTIONS:
        raise BadInput(f"budgets {spec!r} are unknown: use dist1-published … dist9-published")
    content = published()
    values = content["epsilons"][name.capitalize()]
    if count != len(values):
        raise BadInput(
            f"budgets {spec!r} are for {len(values)} clients, here are {count}: use {name!r} to draw as many"
        )
    return tuple(map(float, values)), tuple(map(int, content["batch_sizes"]))


def _from_csv(
    path: Path,
    column: str,
    client: str | None,
    names: Sequence[str],
    order: Sequence[str] | None = None,
    sorted_files: bool = False,
) -> tuple[float, ...]:
    """One column of a CSV file: matched to clients by name where a column holds their names, else by order."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"budgets file {path} cannot be read: {error}") from None
    for wanted in (column, client):
        if wanted is not None and (not rows or wanted not in rows[0]):
            raise BadInput(
                f"budgets file {path} has no column {wanted!r}: it has {', '.join(rows[0]) if rows else 'no rows'}"
            )
    if client is None:
        client = _names_in(rows, column, names)
    if client is None:
        if len(rows) != len(names):
            raise BadInput(f"budgets file {path} has {len(rows)} rows for {len(names)} clients: give one row each")
        if sorted_files and order is None and len(names) > 1:
            raise BadInput(
                f"budgets file {path} has no column with the names of the clients ({', '.join(names[:8])}): add one, "
                "and name it in budgets.client; or say whose row is whose with budgets.order"
            )
        values = [_number(row[column], f"{path} row {k}, column {column}") for k, row in enumerate(rows, 1)]
        return tuple(in_order(values, "csv", names, order, sorted_files))
    found = {row[client]: (k, row[column]) for k, row in enumerate(rows, 1)}
    if len(found) != len(rows):
        raise BadInput(f"budgets file {path} names a client twice in column {client!r}: give each client one row")
    absent = [name for name in names if name not in found]
    if absent:
        raise BadInput(f"budgets file {path} has no row for client {absent[0]!r}: add one")
    strange = [name for name in found if name not in names]
    if strange:
        raise BadInput(f"budgets file {path} has a row for {strange[0]!r}, which is no client: take it out")
    return tuple(_number(found[name][1], f"{path} row {found[name][0]}, column {column}") for name in names)


def _names_in(rows: Sequence[Mapping[str, str]], column: str, names: Sequence[str]) -> str | None:
    """The column that says whose row it is: one with a client's name in it, or one that is called client."""
    others = [key for key in rows[0] if key not in (None, column)] if rows else []
    named = [key for key in others if any(row[key] in names for row in rows)]
    return next(iter(named), None)


def _number(value: Any, where: str) -> float:
    """A float that is not NaN; ε > 0 is checked by Budget."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadInput(f"{where} is {value!r}: a budget is a number > 0 (inf for public data)") from None
    if math.isnan(number):
        raise BadInput(f"{where} is NaN: a budget is a number > 0 (inf for public data)")
    return number
