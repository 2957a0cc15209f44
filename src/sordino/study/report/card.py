"""A model card: Markdown for whoever is handed the model, from one result. What nobody measured is not in it."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sordino.privacy.attacker import at_most
from sordino.privacy.statement import ELSEWHERE, NOT_COVERED, SHARED_NOT_COVERED, TUNING, UNPAID, words_of
from sordino.privacy.types import RECORD
from sordino.study.evaluated import estimate_of
from sordino.study.judged import figures, unit_of
from sordino.study.report.gather import Client, Result, SeedRun, dig, grouped, study_name
from sordino.study.report.numbers import MISSING, as_epsilon, finite, percent, plain
from sordino.study.report.page import filled, in_markdown
from sordino.study.report.paid import NAMES
from sordino.study.report.promises import Promise, is_shared, promise_to, statement, terms, trust_of

SHOWN = 20
"""Clients whose statements a card has in full; the table has everybody."""
SETTINGS = ("rounds", "rate", "batch", "steps", "epochs", "lr", "clip", "sampling", "server_lr")
OBSERVED = {
    "accuracy": "accuracy, mean over clients",
    "worst_accuracy": "accuracy, worst client",
    "central_accuracy": "accuracy, central test set",
    "loss": "loss",
    "psi": "Ψ, spread of clients' losses",
}
"""An observer's metrics, and what a card calls them."""


def card_text(result: Result, files: Mapping[str, str] | None = None) -> str:
    """The card of one result (a dict of ``result.json``). ``files``: SHA-256 of files it came with, by name.

    Guarantees
    ----------
    A result that is not private, and one in which a client spent more than it allowed or nobody recorded what it spent,
    says so before anything else. Metrics that were not paid for are named as an observer's.
    """
    (group,) = grouped([result])
    (run,) = group.runs
    study, of = run.study, words_of(_unit(run))
    named = terms([group])
    promises = [promise_to(client, run.private) for client in run.clients]
    return filled(
        "card.md",
        title=study_name(study) or group.label,
        private=run.private,
        broken=_broken(run.clients, promises),
        simulated=run.simulated,
        clients=run.clients,
        sizes=[int(client.size) for client in run.clients if client.size is not None],
        unit=of["unit"],
        data=_source(study.get("data") or {}),
        shape=dig(study, ("model", "shape")),
        classes=dig(study, ("model", "classes")),
        held=finite(dig(study, ("evaluation", "share"))),
        schema=bool(dig(study, ("data", "schema"))),
        declared=hashlib.sha256(json.dumps(study.get("data"), sort_keys=True).encode()).hexdigest(),
        settings=_settings(result, run),
        auto=list(study.get("auto") or ()),
        rows=[_row(client, told) for client, told in zip(run.clients, promises)],
        statements=[statement(client, run.private) for client in run.clients[:SHOWN]],
        unsaid=max(0, len(run.clients) - SHOWN),
        trust=_trust(trust_of(group), run.private),
        terms=named,
        not_covered=_not_covered(run, of),
        paid=_paid(result),
        observed=_observed(run),
        versions={str(key): str(value) for key, value in run.versions.items()},
        checksums=_checksums(result, files or {}),
        seed=run.seed,
    )


def _unit(run: SeedRun) -> str:
    named = {client.unit for client in run.clients}
    return named.pop() if len(named) == 1 else "unit" if named else RECORD


def _broken(clients: Sequence[Client], promises: Sequence[Promise]) -> str:
    """What is wrong with the promises of a run that says it is private."""
    for bad, words in ((Promise.EXCEEDED, "BUDGET EXCEEDED by"), (Promise.UNKNOWN, "NOT SHOWN TO BE PRIVATE:")):
        names = [client.name for client, told in zip(clients, promises) if told is bad]
        if names:
            return f"{words} {in_markdown(', '.join(names))}."
    if not clients:
        return "NOT SHOWN TO BE PRIVATE."
    return "NOT PRIVATE: all data are declared public." if set(promises) == {Promise.PUBLIC} else ""


def _source(data: Mapping[str, Any]) -> str:
    """Where the records are from, and how they came to clients, as far as the study says."""
    source, dealt = data.get("source") or {}, data.get("partition") or {}
    said = [f"{source['name']}" if source.get("name") else ""]
    said += [f"dealt to clients by {dealt['kind']}" if dealt.get("kind") else ""]
    return ", ".join(filter(None, said))


def _settings(result: Result, run: SeedRun) -> dict[str, str]:
    training, model = run.study.get("training") or {}, run.study.get("model") or {}
    found: dict[str, Any] = {
        "method": result["method"],
        "model": model.get("name"),
        "parameters": model.get("parameters"),
    }
    found |= {key: training.get(key) for key in SETTINGS}
    parts = {f"part {key}": value for key, value in (run.study.get("method") or {}).items() if key != "name"}
    found |= {"rounds done": len(run.rounds), "seed": run.seed, **parts}
    return {key: _shown(value) for key, value in found.items() if value is not None}


def _shown(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    number = finite(value)
    return plain(number, 6) if number is not None else json.dumps(value, ensure_ascii=False)


def _row(client: Client, promise: Promise) -> list[str]:
    view = client.attack if promise in (Promise.KEPT, Promise.EXCEEDED) else None
    return [
        client.name,
        plain(client.size, 9),
        as_epsilon(client.epsilon),
        plain(client.delta),
        as_epsilon(client.spent),
        as_epsilon(client.replace_one),
        MISSING if view is None else f"at most {at_most(view['success'])}",
        MISSING if view is None else f"at most {at_most(view['true_positives'])}",
        promise.value,
    ]


def _trust(words: str, private: bool) -> list[str]:
    if not private:
        return ["nobody: nothing was promised"]
    told = f"The promises hold {words}" if words else "The result does not say whom the promises hold against"
    return [told, "The server is honest but curious: it follows the protocol and may look at all it gets"]


def _not_covered(run: SeedRun, of: Mapping[str, str]) -> list[str]:
    """What statements do not cover, as they say it."""
    paid = any(client.held is not None for client in run.clients)
    told = [UNPAID if paid and one is TUNING else one.format(**of) for one in NOT_COVERED]
    told += [] if of["unit"] == RECORD else [ELSEWHERE.format(**of)]
    return told + (list(SHARED_NOT_COVERED) if any(map(is_shared, run.clients)) else [])


def _paid(result: Result) -> list[list[str]]:
    """The estimates of the model that is handed out, with their intervals; single clients and classes aside."""
    last = estimate_of(result)
    rows = [one for one in result.get("evaluation") or () if last is not None and one["round"] == last["round"]]
    found = []
    for one in rows:
        if "/" not in one["metric"]:
            shown = [text + unit_of(dict(one)) for text in figures(dict(one))]
            found.append([NAMES.get(one["metric"], one["metric"].replace("_", " ")), *shown])
    return found


def _observed(run: SeedRun) -> dict[str, str]:
    if not run.simulated:
        return {}
    known = {words: finite(run.final.get(key)) for key, words in OBSERVED.items()}
    return {
        words: percent(value) if words.startswith("accuracy") else plain(value)
        for words, value in known.items()
        if value is not None and math.isfinite(value)
    }


def _checksums(result: Result, files: Mapping[str, str]) -> dict[str, str]:
    weights = result.get("checksum")
    return {"weights (SHA-256, little-endian float32)": weights or "not recorded", **files}
