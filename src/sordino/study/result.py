"""The result of a run: what result.json holds, and how it is made, written and read. Infinite ε is null in JSON.

In Python a result is a plain dict with the keys of ``Result``. ``complete`` makes one, ``read_result`` reads one; both
check it against the same types.
"""

import hashlib
import json
import math
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sordino._version import __version__
from sordino.data.schema import known_schema, parse_schema
from sordino.engine import metrics, rounds
from sordino.engine.checkpoint import Checkpoint, write_atomic
from sordino.engine.chosen import evaluations
from sordino.engine.chosen import kept as kept_of
from sordino.engine.evaluate import by_budget
from sordino.engine.simulate import Setup
from sordino.errors import BadInput
from sordino.methods import Plan
from sordino.privacy.accounting import composed_epsilon
from sordino.privacy.attacker import attacks, worst_of
from sordino.privacy.held import HELD, OF_HELD
from sordino.privacy.ledger import Ledger
from sordino.privacy.types import RECORD, Event, Scheme
from sordino.study.levels import spent_levels

SCHEMA = 2
_EPSILONS = ("epsilon", "spent_epsilon", "run_epsilon", "replace_one_epsilon")


class RoundRecord(TypedDict):
    """What was seen of one round, counted from 1; null where it was not evaluated. More keys may stand beside these."""

    round: int
    accuracy: float | None
    loss: float | None
    psi: float | None


class FinalFigures(TypedDict):
    """What the last model is worth; more keys may stand beside these."""

    accuracy: float | None
    loss: float | None
    psi: float | None
    worst_accuracy: float | None
    client_accuracy: list[float | None] | None


class ReleaseCount(TypedDict):
    """``count`` releases of one kind; ``noise`` is a multiplier of their sensitivity."""

    what: str
    rate: float
    noise: float
    count: int


class ClientPrivacy(TypedDict):
    """What one client budgeted and spent. ``run_epsilon`` is this run's part of ``spent_epsilon``."""

    client: str
    epsilon: float
    delta: float
    spent_epsilon: float
    run_epsilon: float
    replace_one_epsilon: float
    adjacency: str
    sampling: str
    accountant: str
    releases: list[ReleaseCount]
    unit: NotRequired[str]
    """What is protected as one, where it is not the record: "patient", say."""
    composition: NotRequired[str]
    budget_ends: NotRequired[int | None]
    """The round after which the budget could not pay another turn; 0: it never could; null: it outlasts the run."""
    training_epsilon: NotRequired[float]
    held_epsilon: NotRequired[float]
    """Where records are held out: what the two accounts have spent; a record's ε is that of its own part."""
    told_by: NotRequired[str]
    """Of a deployed run: whether the ``site`` said what it spent, or the ``server`` worked out the least it can be."""
    not_private: NotRequired[list[Any]]
    attack: NotRequired[dict[str, Any] | None]
    """The best an attacker can do who sees all that the client ever released: how often it guesses right whether a
    record was used (``success``), how many of the used it finds (``true_positives``) at ``false_positives``."""
    levels: NotRequired[list[dict[str, Any]]]
    """Where records have levels of consent: what each may spend and has spent, and its rate; then ``epsilon`` and the
    other figures are what holds for every record, those of the level that allows or spent most."""
    trust: str | None
    """Whom the promise holds against, in words."""
    own_epsilon: float | None
    """What the site's own share of the noise alone would promise."""


class Result(TypedDict):
    """result.json. Other keys may stand beside these."""

    schema: int
    study: dict[str, Any]
    method: str
    seed: int
    rounds: list[RoundRecord]
    final: FinalFigures
    privacy: list[ClientPrivacy]
    private: bool
    simulated: bool
    personal: NotRequired[bool]
    """Whether every client has a model of its own, by which it was judged."""
    stopped: NotRequired[dict[str, Any]]
    """Why the run ended before its last round."""
    refused: NotRequired[dict[str, str]]
    """Of a deployed run: sites that did not take part, and why."""
    evaluation: list[dict[str, Any]] | None
    """What was paid for to judge the model."""
    records: dict[str, Any] | None
    """What the model takes: the ``schema`` that makes numbers of a record, and what the ``classes`` are called."""
    baselines: NotRequired[dict[str, Any]]
    """What accuracy is to be compared with, by an observer: not covered. See ``study.baselines``."""
    kept: NotRequired[dict[str, Any]]
    """The round whose model this is, where it was chosen by paid estimates, and the estimate that decided."""
    threshold: NotRequired[dict[str, Any]]
    """For two classes: the ``edge`` from which on class 1 is answered, chosen by the released tables; what it gives."""
    checksum: str | None
    """SHA-256 of the final weights as little-endian float32."""
    seconds: float
    versions: dict[str, str]


def complete(parts: Mapping[str, Any], weights: Tensor | None) -> dict[str, Any]:
    """A whole result from what a run knows of itself: schema, versions and checksum are added, and all is checked."""
    later = ("trust", "own_epsilon")
    result = {
        "schema": SCHEMA,
        **parts,
        "privacy": [{**one, **{key: one.get(key) for key in later}} for one in parts["privacy"]],
        "evaluation": parts.get("evaluation"),
        "records": parts.get("records"),
        "checksum": None if weights is None else checksum(weights),
        "versions": versions(),
    }
    _check(result, Result, "result")
    return result


def checksum(weights: Tensor) -> str:
    """SHA-256 of weights as little-endian float32."""
    return hashlib.sha256(weights.detach().cpu().float().numpy().astype("<f4").tobytes()).hexdigest()


_types = cache(get_type_hints)


def _check(value: Any, kind: Any, where: str) -> None:
    """Refuse a value that is not of a type: a ``TypedDict``, a list, a union, a number or any other class."""
    if is_typeddict(kind):
        _check(value, dict, where)
        if missing := sorted(kind.__required_keys__ - value.keys()):
            raise ValueError(f"{where}.{missing[0]} is missing")
        for key, inner in _types(kind).items():
            if key in value:
                _check(value[key], inner, f"{where}.{key}")
    elif get_origin(kind) is list:
        _check(value, list, where)
        for place, one in enumerate(value):
            _check(one, get_args(kind)[0], f"{where}[{place}]")
    elif type(None) in get_args(kind):
        if value is not None:
            _check(value, get_args(kind)[0], where)
    elif kind is not Any:
        plain = {int: Integral, float: Real}.get(kind, get_origin(kind) or kind)
        if not isinstance(value, plain) or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{where} is {value!r:.60}")


def build_result(
    study: dict[str, Any],
    setup: Setup,
    state: Checkpoint,
    book: Ledger | None,
    run: str,
    seed: int,
    records: dict[str, Any],
) -> dict[str, Any]:
    """The result of a simulated run."""
    plan, observer, own = setup.plan, setup.observer, setup.own_models(state)
    last = observer.look(state.chosen, own)
    final = {key: last.get(key) for key in ("accuracy", "loss", "psi", "worst_accuracy", "client_accuracy")}
    others = ("client_loss", "accuracy_variance", "worst_decile", "best_decile")
    final |= {key: value for key, value in last.items() if key.startswith("central") or key in others}
    final |= observer.look_back(state.chosen, own) | beyond_accuracy(setup, state, study)
    final["by_budget"] = by_budget(
        [c.budget.epsilon for c in plan.clients], last["client_accuracy"], last["client_loss"]
    )
    early = rounds.stopped(plan, state.round, state.history)
    parts = {
        "study": study,
        "method": plan.method.name,
        "seed": seed,
        "rounds": state.history,
        "final": final,
        "privacy": _privacy(plan, state, book, run),
        "private": plan.private,
        "simulated": True,
        **({} if own is None else {"personal": True}),
        "baselines": {"covered": False, "majority" if observer.classification else "mean": observer.constant()},
        **({"stopped": early} if early else {}),
        **chosen_by(plan, state),
        "records": records,
        "seconds": state.seconds,
    }
    return complete(parts, state.chosen)


def records_of(schema: Mapping[str, Any] | None, task: str, classes: int | None) -> dict[str, Any]:
    """What a result says of the records that its model takes; without a schema they are numbers already."""
    table = {"task": task, **({} if classes is None else {"classes": classes})} if schema is None else dict(schema)
    known = known_schema(table)
    plain: dict[str, Any] = json.loads(
        to_json({"schema": table, "classes": None if known.classes is None else list(known.classes)})
    )
    return plain


def beyond_accuracy(setup: Setup, state: Checkpoint, study: Mapping[str, Any]) -> dict[str, Any]:
    """Of two classes AUC, sensitivity, specificity and confusion; of numbers RMSE and R², in the target's own scale.

    By the observer, on the central test set where there is one, else on all clients' test records (``judged_on``).
    """
    observer, own, classes = setup.observer, setup.own_models(state), study["model"]["classes"]
    if observer.classification and classes != 2:
        return {}
    outputs, targets = observer.outputs(state.chosen, own)
    where = {"judged_on": "clients" if own is not None or observer.central is None else "central"}
    if observer.classification:
        return {**metrics.two_classes(outputs[:, 1] - outputs[:, 0], targets), **where}
    found = [outputs, np.asarray(targets, dtype=np.float64).reshape(outputs.shape)]
    raw = (study["data"].get("source") or {}).get("schema")
    schema = None if raw is None else parse_schema(raw)
    if schema is not None and schema.interval is not None:
        found = [schema.interval.unscaled(one, schema.scale, clip=False) for one in found]
        where |= {"scale": schema.target}
    return {**metrics.numbers(*found), **where}


def chosen_by(plan: Plan, state: Checkpoint) -> dict[str, Any]:
    """What was paid for to judge the model, and what was chosen by it: the round, and for two classes an edge."""
    if plan.judging is None:
        return {"evaluation": None}
    kept = kept_of(state)
    last = state.round if kept is None else kept["round"]
    edges = [one["threshold"] for one in state.history if one["round"] <= last and one.get("threshold") is not None]
    return {
        "evaluation": evaluations(state.history),
        **({} if kept is None else {"kept": kept}),
        **({"threshold": edges[-1]} if edges else {}),
    }


def versions() -> dict[str, str]:
    """What a result was made with."""
    return {
        "sordino": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _privacy(plan: Plan, state: Checkpoint, book: Ledger | None, run: str) -> list[dict[str, Any]]:
    promised: list[dict[str, Any]] = [
        {
            "client": c.name,
            **dict.fromkeys(_EPSILONS, math.inf),
            "delta": c.budget.delta,
            "adjacency": str(c.budget.adjacency),
            **({} if c.budget.unit == RECORD else {"unit": c.budget.unit}),
            "sampling": str(c.terms.sampling.scheme),
            "accountant": "none",
            "releases": [],
        }
        for c in plan.clients
    ]
    if book is None:
        return promised
    spent, here, own = book.epsilon(), book.epsilon(run=run), book.own_epsilon()
    ends, seen = budget_ends(plan, state, book), attacks(book, list(spent))
    for c, one in zip(plan.clients, promised):
        accounts = list(c.accounts)  # of every record one: the largest ε holds for all
        first, paid = accounts[0], [e for account in accounts for e in book.spent(account)]
        one |= {
            "epsilon": c.widest[0].epsilon,
            "spent_epsilon": max(spent[account] for account in accounts),
            "run_epsilon": max(here[account] for account in accounts),
            "replace_one_epsilon": max(book.replace_one_epsilon(account) for account in accounts),
            "composition": book.composition(first),
            "accountant": accountant_used(paid or list(c.terms.events.values())),
            "releases": [
                {"what": e.what + suffix, "rate": e.sampling.rate, "noise": e.noise, "count": e.count}
                for account, suffix in zip(accounts, c.budgets)
                for e in book.run_events(account, run)
            ],
            "budget_ends": ends[c.name],
            "attack": worst_of([seen[one] for one in (*accounts, c.name + HELD) if one in spent]),
            "trust": book.trust(first),
            "own_epsilon": max(own[account] for account in accounts),
            **({"levels": spent_levels(c, spent, here)} if c.levels else {}),
        }
        if c.name + HELD in spent:  # a record is in one of the two parts: its ε is the larger
            held, trained = c.name + HELD, one["spent_epsilon"]
            one |= {key: max(one[key], found[held]) for key, found in (("spent_epsilon", spent), ("run_epsilon", here))}
            one["replace_one_epsilon"] = max(one["replace_one_epsilon"], book.replace_one_epsilon(held))
            one["own_epsilon"] = max(one["own_epsilon"], own[held])
            one |= {"training_epsilon": trained, "held_epsilon": spent[held]}
            one["releases"] += [
                {"what": e.what + OF_HELD, "rate": 1.0, "noise": e.noise, "count": e.count}
                for e in book.run_events(held, run)
            ]
    return promised


def accountant_used(events: list[Event]) -> str:
    """What the ledger's tight accountant is for these releases: PLD has no fixed-size batches, full ones are exact."""
    schemes = {event.sampling.scheme for event in events}
    if Scheme.FIXED in schemes:
        return "rdp-tightened"
    return "gaussian-exact" if schemes == {Scheme.FULL} else "pld"


def budget_ends(plan: Plan, state: Checkpoint, book: Ledger) -> dict[str, int | None]:
    """By client: the round after which its budget cannot pay another turn; 0 when it never could pay one.

    None where the budget outlasts the run, or never ends (public data).
    """
    last = {name: record["round"] for record in state.history for name in record["participants"]}
    bounded = [c for c in plan.clients if not c.budget.is_public]
    rows = [(c, suffix) for c in bounded for suffix in c.budgets]
    another = [
        [*book.spent(c.name + suffix), c.terms.events[suffix], *(one.events[suffix] for one in c.asks)]
        for c, suffix in rows
    ]
    budgets = [book.account(c.name + suffix).budget for c, suffix in rows]
    costs = composed_epsilon(another, [b.delta for b in budgets]) if bounded else ()
    over = {c.name for (c, _), b, cost in zip(rows, budgets, costs) if cost > b.epsilon}
    return {c.name: last.get(c.name, 0) if c.name in over else None for c in plan.clients}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (np.generic, np.ndarray, Tensor)):
        return _plain(value.tolist())
    return value


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON with null for every number that is not finite."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def json_pieces(table: Mapping[str, Any], entries: int = 64) -> Iterator[bytes]:
    """What ``to_json(table, indent=1)`` is, piece by piece: so many ``entries`` of a long list are in memory at a time.

    Line breaks may be moved to the right, for no text has one of its own in JSON.
    """
    yield b"{"
    for place, (key, value) in enumerate(table.items()):
        yield f"{',' * bool(place)}\n {json.dumps(str(key), ensure_ascii=False)}: ".encode()
        if isinstance(value, list) and value:
            for start in range(0, len(value), entries):
                inner = to_json(value[start : start + entries], indent=1)[1:-2].replace("\n", "\n ")
                yield f"{'[,'[start > 0]}{inner}".encode()
            yield b"\n ]"
        else:
            yield to_json(value, indent=1).replace("\n", "\n ").encode()
    yield b"\n}" if table else b"}"


def from_json(text: str) -> dict[str, Any]:
    """A table as it was in Python: a null ε is ∞ again."""
    result: dict[str, Any] = json.loads(text)
    for one in result.get("privacy", []):
        endless = (*_EPSILONS, "own_epsilon") if one.get("trust") is not None else _EPSILONS
        one |= {key: math.inf for key in endless if one.get(key) is None}
        one |= {key: math.inf for key in ("training_epsilon", "held_epsilon") if one.get(key, 0.0) is None}
        for level in one.get("levels", []):
            level |= {key: math.inf for key in ("spent_epsilon", "run_epsilon") if level.get(key) is None}
    final = result.get("final")
    for one in (final.get("by_budget") or []) if isinstance(final, dict) else []:
        one |= {key: math.inf for key in ("least_epsilon", "most_epsilon") if one.get(key) is None}
    return result


def _read(text: str) -> dict[str, Any]:
    """A result of schema 2, or of schema 1, which knew less; what is neither is refused."""
    result = from_json(text)
    schema = result.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise BadInput(f"it has schema {schema}, and this version reads up to {SCHEMA}: a newer sordino wrote it")
    if schema == 1:
        result = {"simulated": True, **result, "schema": SCHEMA, "evaluation": None, "checksum": None}
        for one in result.get("privacy", []):
            one |= {"trust": None, "own_epsilon": None}
    result.setdefault("records", None)  # early results of schema 2 do not say
    _check(result, Result, "result")
    return result


def read_result(file: Path) -> dict[str, Any]:
    """The result in a file; what is none is refused."""
    try:
        return _read(file.read_text())
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: name finished run folders or result.json files") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        told = f"{file} is not a result of sordino: it is damaged, or another program's ({error})"
        raise BadInput(told) from None


def save_run(path: Path, result: dict[str, Any], weights: Tensor, personal: Tensor | None = None) -> None:
    """Weights, clients' own models where there are some, and result in one safetensors file."""
    own = {} if personal is None else {"personal": personal.contiguous()}
    write_atomic(path, save({"weights": weights.contiguous(), **own}, {"sordino": to_json(result)}))


def load_run(path: Path) -> tuple[dict[str, Any], Tensor, Tensor | None]:
    """What ``save_run`` wrote; a run folder stands for the file in it."""
    file = path / "model.safetensors" if path.is_dir() else path
    try:
        with safe_open(str(file), framework="pt") as opened:
            personal = opened.get_tensor("personal") if "personal" in opened.keys() else None  # noqa: SIM118
            result, weights = _read((opened.metadata() or {})["sordino"]), opened.get_tensor("weights")
    except FileNotFoundError:
        raise BadInput(f"{file} does not exist: a finished run's folder has one, and run.save writes one") from None
    except (SafetensorError, KeyError, OSError, ValueError) as error:
        raise BadInput(f"{file} is not a saved run of sordino ({error})") from None
    if result["checksum"] not in (None, checksum(weights)):
        raise BadInput(
            f"the weights in {file} are not those of its result: their checksum differs, so the file was changed or "
            "damaged; take it from where the run was made"
        )
    return result, weights, personal
