"""Budgets: how much each client of a federation is willing to spend.

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
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from sordino.data.partitions import generator
from sordino.errors import BadInput
from sordino.privacy.types import Adjacency, Budget, check_promised

log = logging.getLogger("sordino.data")

LARGE = 20.0
"""Above this ε a promise says next to nothing: a record may make what is seen e^20, half a billion, times likelier."""

_NARROW, _HALF, _ONE = (0.2, 0.01**2), (0.5, 0.1**2), (1.0, 0.1**2)

MIXTURES: dict[str, tuple[tuple[float, float, float], ...]] = {
    "dist1": ((1.0, 2.0, 1.0),),
    "dist2": ((0.2, *_NARROW), (0.6, *_ONE), (0.2, 5.0, 1.0)),
    "dist4": ((0.2, *_NARROW), (0.6, *_HALF), (0.2, 2.0, 1.0)),
    "dist6": ((0.3, *_NARROW), (0.5, *_HALF), (0.2, *_ONE)),
    "dist8": ((0.6, *_NARROW), (0.4, *_HALF)),
}
UNIFORMS: dict[str, tuple[float, float]] = {
    "dist3": (0.2, 5.0), "dist5": (0.2, 2.0), "dist7": (0.2, 1.0), "dist9": (0.2, 0.5),
}  # fmt: skip
DISTRIBUTIONS = tuple(f"dist{k}" for k in range(1, 10))

Spec = str | float | Sequence[float] | Mapping[str, Any]
Draw = Callable[[int], npt.NDArray[np.float64]]
"""Gives so many independent draws of a distribution."""

_WORDS = {"mixture", "uniform", "csv", "column", "client"}
"""Keys of a table that describes a distribution or a file; numbers under any keys are budgets by name."""


@dataclass(frozen=True)
class BudgetTerms:
    """What was said about budgets before it is known whose they are: the arguments of ``Federation.with_budgets``."""

    spec: Spec
    delta: float | Sequence[float] | Mapping[str, float] = 1e-5
    seed: int = 0
    adjacency: str | Adjacency = Adjacency.ZERO_OUT
    public: tuple[str, ...] = ()
    order: Sequence[str] | None = None
    options: dict[str, float] = field(default_factory=dict)

    def of(self, names: Sequence[str], sorted_files: bool = False) -> tuple[tuple[Budget, ...], tuple[int, ...] | None]:
        """A budget for each of these clients, and batch sizes where they come along. Touches no record.

        ``sorted_files`` says that the order of ``names`` follows from the names of files: nobody chose it, so lists of
        budgets are refused unless ``order`` says whose is whose.
        """
        unknown = set(self.public) - set(names)
        if unknown:
            raise BadInput(f"budgets.public names {min(unknown)!r}, which is no client: clients are {names[0]}, …")
        order = self.order
        if order is not None:
            _check_everyone_once(order, "order", names, "leaves out", "name every client once")
        elif not sorted_files or len(names) == 1:
            order = names
        spec = self.spec
        if is_by_name(spec):  # public clients need no budget
            spec = {**dict.fromkeys(self.public, math.inf), **cast(Mapping[str, Any], spec)}
        values, batches = epsilons(spec, names, self.seed, order, **self.options)
        deltas = _one_each(self.delta, "delta", names, order)
        kind = Adjacency.parse(self.adjacency)
        check_promised(kind)
        budgets = []
        for name, epsilon, delta in zip(names, values, deltas):
            try:
                budgets.append(Budget(math.inf if name in self.public else epsilon, delta, kind))
            except BadInput as error:
                raise BadInput(f"client {name!r}: {error}") from None
        return tuple(budgets), batches


def epsilons(
    spec: Spec, names: Sequence[str], seed: int = 0, order: Sequence[str] | None = None, **options: float
) -> tuple[tuple[float, ...], tuple[int, ...] | None]:
    """One ε per client, and the batch sizes when the specification brings them.

    ``spec``, ``seed`` and ``options`` are those of ``Federation.with_budgets``; ``order`` names the clients as lists
    do, None where nobody chose an order.
    """
    if options and spec != "uniform":
        raise BadInput(f"budgets {spec!r} take no {', '.join(options)}: only 'uniform' has low and high")
    if isinstance(spec, str):
        if spec.endswith("-published"):
            return _published(spec, len(names))
        spec = math.inf if spec == "inf" else _by_its_name(spec, options)
    if not isinstance(spec, Mapping) or is_by_name(spec):
        return tuple(_one_each(spec, "epsilon", names, order)), None
    keys = set(spec)
    if {"csv", "column"} <= keys <= {"csv", "column", "client"}:
        return tuple(_from_csv(Path(spec["csv"]), spec["column"], spec.get("client"), names, order)), None
    if keys not in ({"mixture"}, {"uniform"}):
        raise BadInput(
            f"budgets table has keys {sorted(keys)}: use {{mixture = [[weight, mean, variance], …]}}, "
            "{uniform = [low, high]}, {csv = path, column = name}, or the clients' names with a number each"
        )
    random = generator(seed, "budgets")
    draw = _mixture(spec["mixture"], random) if "mixture" in keys else _uniform(spec["uniform"], random)
    values = draw(len(names))
    for _ in range(1000):
        wrong = np.flatnonzero(values <= 0)
        if not wrong.size:
            return tuple(values.tolist()), None
        values[wrong] = draw(wrong.size)  # discarded (of a mixture, component and all) and repeated
    raise BadInput("this budget distribution hardly ever gives ε > 0: raise its mean")


def _check_everyone_once(told: Iterable[str], key: str, names: Sequence[str], lacks: str, remedy: str) -> None:
    """Refuse names that are no client's, twice the same, or not everybody's."""
    known, seen = set(names), set[str]()
    for name in told:
        if name not in known:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"clients are {', '.join(names[:8])}"
            raise BadInput(f"budgets.{key} names {name!r}, which is no client: {hint}")
        if name in seen:
            raise BadInput(f"budgets.{key} names {name!r} twice: name every client once")
        seen.add(name)
    for name in names:
        if name not in seen:
            raise BadInput(f"budgets.{key} {lacks} client {name!r}: {remedy.format(_toml(name))}")


def is_by_name(spec: Any) -> bool:
    """Whether a table holds budgets by the clients' names: it does, unless it describes a distribution or a file."""
    if not isinstance(spec, Mapping):
        return False
    numbers = all(isinstance(value, int | float | np.number) for value in spec.values())
    return numbers or not set(spec) & _WORDS


def _one_each(
    said: float | Sequence[float] | Mapping[str, Any], key: str, names: Sequence[str], order: Sequence[str] | None
) -> list[float]:
    """One number per client from what ``budgets.{key}`` says: one for all, a table by name, or a list."""
    if isinstance(said, Mapping):
        _check_everyone_once(said, key, names, "has no value for", "add {} = …")
        return [_number(said[name], f"budgets.{key}.{name}") for name in names]
    where = "budgets" if key == "epsilon" else f"budgets.{key}"
    if isinstance(said, int | float | np.number):
        return [_number(said, where)] * len(names)
    if said is None or isinstance(said, str):
        raise BadInput(f"{where} is {said!r}: give one number for all, a table by name, or a list with one for each")
    values = [_number(value, f"{where}[{k}]") for k, value in enumerate(said)]
    if len(values) != len(names):
        told = "budgets list" if key == "epsilon" else where
        raise BadInput(f"{told} has {len(values)} values for {len(names)} clients: give one each, or one number")
    if order is None:
        told = ", ".join(f"{_toml(name)} = {value:g}" for name, value in zip(names, values))
        raise BadInput(
            f"budgets.{key} is a list, but these clients are files, whose order follows from their names: say whose it "
            f"is, budgets.{key} = {{{told}}}, or in which order they come, budgets.order = {json.dumps(list(names))}"
        )
    found = dict(zip(order, values))
    return [found[name] for name in names]


def _toml(name: str) -> str:
    """A name as a TOML key."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else f'"{name}"'


def _by_its_name(spec: str, options: Mapping[str, float]) -> dict[str, Any]:
    """The parameters of a distribution that has a name."""
    if spec in MIXTURES:
        return {"mixture": MIXTURES[spec]}
    if spec in UNIFORMS:
        return {"uniform": UNIFORMS[spec]}
    if spec == "uniform":
        if set(options) != {"low", "high"}:
            raise BadInput("budgets 'uniform' need low and high, e.g. low=0.0, high=1.0")
        return {"uniform": (options["low"], options["high"])}
    raise BadInput(
        f"budgets {spec!r} are unknown: use dist1…dist9, dist1-published…dist9-published, 'uniform' with low and high, "
        "'inf', a number, a list, or a table with 'mixture', 'uniform' or 'csv'"
    )


def _uniform(bounds: Any, random: np.random.Generator) -> Draw:
    """ε ~ U(low, high)."""
    try:
        low, high = bounds
    except (TypeError, ValueError):
        raise BadInput(f"budgets.uniform is {bounds!r}: give [low, high]") from None
    low, high = _number(low, "budgets low"), _number(high, "budgets high")
    if not (0 <= low < high < math.inf):
        raise BadInput(f"uniform budgets from {low} to {high}: need 0 ≤ low < high < inf")
    return lambda count: random.uniform(low, high, count)


def _mixture(parts: Any, random: np.random.Generator) -> Draw:
    """ε ~ Σ_k weight_k N(mean_k, variance_k)."""
    try:
        rows = [(float(weight), float(mean), float(variance)) for weight, mean, variance in parts]
    except (TypeError, ValueError):
        raise BadInput(f"budgets.mixture is {parts!r}: give [[weight, mean, variance], …]") from None
    if not rows or not np.isfinite(rows).all() or any(row[0] < 0 or row[2] < 0 for row in rows):
        raise BadInput(f"budgets.mixture is {parts!r}: weights and variances must be finite and ≥ 0")
    if abs(sum(row[0] for row in rows) - 1.0) > 1e-6:
        raise BadInput(f"budgets.mixture has weights that sum to {sum(row[0] for row in rows):g}: they must sum to 1")
    weights, means, variances = (np.array(column, dtype=np.float64) for column in zip(*rows))

    def draw(count: int) -> npt.NDArray[np.float64]:
        component = random.choice(len(weights), size=count, p=weights / weights.sum())
        return means[component] + np.sqrt(variances[component]) * random.standard_normal(count)

    return draw


def published() -> dict[str, Any]:
    """The 20 budgets of each of Dist1…Dist9 and the batch sizes, as drawn by Robust-HDP's authors."""
    text = resources.files("sordino.data").joinpath("robust_hdp_budgets.json").read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    return content


def _published(spec: str, count: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
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
    path: Path, column: str, client: str | None, names: Sequence[str], order: Sequence[str] | None
) -> list[float]:
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
        others = [key for key in rows[0] if key not in (None, column)]
        client = next((key for key in others if any(row[key] in names for row in rows)), None)
    if client is None:
        if len(rows) != len(names):
            raise BadInput(f"budgets file {path} has {len(rows)} rows for {len(names)} clients: give one row each")
        if order is None:
            raise BadInput(
                f"budgets file {path} has no column with the names of the clients ({', '.join(names[:8])}): add one, "
                "and name it in budgets.client; or say whose row is whose with budgets.order"
            )
    owners = [row[client] for row in rows] if client is not None else order or ()
    found = {name: k for k, name in enumerate(owners)}
    if len(found) != len(rows):
        raise BadInput(f"budgets file {path} names a client twice in column {client!r}: give each client one row")
    for name in names:
        if name not in found:
            raise BadInput(f"budgets file {path} has no row for client {name!r}: add one")
    for name in found:
        if name not in names:
            raise BadInput(f"budgets file {path} has a row for {name!r}, which is no client: take it out")
    return [_number(rows[found[name]][column], f"{path} row {found[name] + 1}, column {column}") for name in names]


def _number(value: Any, where: str) -> float:
    """A float that is not NaN; ε > 0 is checked by Budget."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise BadInput(f"{where} is {value!r}: a budget is a number > 0 (inf for public data)") from None
    if math.isnan(number):
        raise BadInput(f"{where} is NaN: a budget is a number > 0 (inf for public data)")
    return number


def warn_of(names: Sequence[str], budgets: Sequence[Budget]) -> None:
    """Log what budgets do not promise: nothing at all where ε is infinite, next to nothing where it is large."""
    if budgets and all(one.is_public for one in budgets):
        _say_once("NOT PRIVATE: every client's epsilon is infinite, so nobody's records are protected")
    large = [f"{name} ({b.epsilon:g})" for name, b in zip(names, budgets) if LARGE < b.epsilon < math.inf]
    wanted = "promises that mean something are about 0.1 to 10"
    _warn_of_each(large, f"budgets.epsilon above {LARGE:g} promises next to nothing", wanted)


def warn_of_deltas(names: Sequence[str], sizes: Sequence[int], budgets: Sequence[Budget]) -> None:
    """Log whose δ is so large that a record may be given away whole: δ > 1/n."""
    told = zip(names, sizes, budgets)
    found = [f"{name} ({b.delta:g}, {n} records)" for name, n, b in told if b.delta * n > 1 and not b.is_public]
    _warn_of_each(found, "budgets.delta above 1/records allows to give a record away whole", "choose it well below")


def _warn_of_each(found: Sequence[str], why: str, remedy: str) -> None:
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        _say_once(f"{why}: {', '.join(found[:5])}{more}; {remedy}")


@lru_cache(maxsize=1024)
def _say_once(text: str) -> None:
    """Log a warning, the same one once: a study with many runs gives its clients budgets many times."""
    log.warning("%s", text)
