"""What a site allows, whatever a server asks. Every refusal here depends on public parameters only (never on records),
so its reason may be read on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sordino import models
from sordino.client.ask import Question
from sordino.client.clip import Clip, flat
from sordino.client.local import Local, sgd
from sordino.engine.federation.limits import BLANK, Declared, Policy, Refused
from sordino.methods import Method, get
from sordino.methods.identity import identity
from sordino.privacy.gate import Terms
from sordino.privacy.levels import present
from sordino.privacy.types import Budget


def check_study(policy: Policy, brief: Mapping[str, Any], method: Method, declared: Declared, budget: Budget) -> None:
    """Refuse a study that asks for what this site does not allow, or does not have."""
    name = str(brief["method"]["name"])
    if policy.methods is not None and name not in policy.methods:
        raise Refused(f"method {name!r} is not allowed here: this site allows {', '.join(policy.methods)}")
    if policy.methods is not None:
        _check_parts(method, get(name, modules=policy.modules))
    if not method.private and not policy.not_private:
        raise Refused(f"method {name!r} adds no noise, and this site does not allow methods that are NOT PRIVATE")
    model = str(brief["model"]["name"])
    known = policy.models if policy.models is not None else tuple(models.names())
    if model not in known:
        raise Refused(f"model {model!r} is not allowed here: this site allows {', '.join(known)}")
    if "features" in brief["model"]["options"]:
        models.check_features(brief["model"]["options"]["features"], policy.modules)
    if int(brief["parameters"]) > policy.parameters:
        raise Refused(f"a model of {brief['parameters']} parameters is too large here: at most {policy.parameters}")
    if int(brief["rounds"]) > policy.rounds:
        raise Refused(f"{brief['rounds']} rounds are too many for this site: it allows {policy.rounds} a run")
    if declared.shape == BLANK:
        raise Refused("this site has no [data.schema] yet, and answers surveys only")
    shape, classes = tuple(brief["shape"]), brief["classes"]
    if (shape, classes) != (declared.shape, declared.classes):
        raise Refused(
            f"the study's records have shape {shape} and {_labels(classes)}, this site's have shape {declared.shape} "
            f"and {_labels(declared.classes)}: the feature schemas differ"
        )
    if brief.get("tokens") != declared.tokens:
        raise Refused(
            f"the study's records are {_kind(brief.get('tokens'))}, this site's are {_kind(declared.tokens)}: the "
            "feature schemas differ"
        )
    if brief["schema"] is not None and brief["schema"] != declared.schema:
        raise Refused(
            "the study's feature schema (names, ranges, categories, labels) is not this site's: compare [data.schema]"
        )
    if str(brief["adjacency"]) != str(budget.adjacency):
        raise Refused(f"the study accounts under {brief['adjacency']}, this site's budget is under {budget.adjacency}")


def _check_parts(method: Method, usual: Method) -> None:
    """Refuse a method that is allowed by name but does something else at a client than the method of that name.

    Options of a part may be tuned; the part itself may only be exchanged for plain clipping and plain descent.
    """
    allowed: dict[str, tuple[Sequence[Clip | Local | Question], set[str]]] = {
        "clip": ([method.clip], {_factory(usual.clip), _factory(flat())}),
        "local": ([method.local], {_factory(usual.local), _factory(sgd())}),
        "ask": ([one.question for one in method.ask], {_factory(one.question) for one in usual.ask}),
    }
    for part, (values, known) in allowed.items():
        for value in values:
            if _factory(value) not in known:
                name = value.what if isinstance(value, Question) else value.name
                raise Refused(
                    f"method {method.name!r} is allowed here as it comes, but this study exchanges its {part} for "
                    f"{name!r}"
                )


def _factory(value: Clip | Local | Question) -> str:
    """What made a part, whatever its options; the identity of one that no factory of sordino made."""
    made = value.made
    return made.factory if made is not None and made.still(value) else identity(value)


def _kind(tokens: int | None) -> str:
    return "numbers" if tokens is None else f"ids of {tokens} tokens"


def _labels(classes: int | None) -> str:
    return "a number to predict" if classes is None else f"{classes} classes"


def check_size(policy: Policy, name: str, declared: Declared, options: Mapping[str, Any]) -> None:
    """Refuse a model that is larger than the server says: sordino's own are built without memory first.

    A model that the site itself installed and allowed is taken at its word.
    """
    if name not in models.names():
        return
    with torch.device("meta"):
        built = models.build(name, declared.shape, declared.classes, 0, tokens=declared.tokens, **options)
        tensors = built.state_dict().values()
    size = sum(one.numel() for one in tensors)
    if size > policy.parameters:
        raise Refused(f"a model of {size} parameters is too large here: at most {policy.parameters}")


def check_layout(brief: Mapping[str, Any], layout: list[Any]) -> None:
    """Refuse a model whose tensors are not those of the model of that name that is installed here."""
    if [list(one) for one in brief["layout"]] != layout:
        raise Refused(
            f"model {brief['model']['name']!r} has other tensors here than at the server: install the same version of "
            "sordino (or of the module it comes from) on both sides"
        )


def check_features(brief: Mapping[str, Any], template: nn.Module) -> None:
    """Refuse features that hold other numbers here than at the server: the model would be trained on other records."""
    if "features" not in brief["model"]["options"]:
        return
    told = template.get_submodule("features")
    if brief["features"]["sha256"] != models.digest(told):
        raise Refused(
            f"features {brief['features']['name']!r} hold other numbers here than at the server: install the same "
            "version of sordino (or of the module and the weights they come from) on both sides"
        )


def check_frozen(brief: Mapping[str, Any], template: nn.Module) -> None:
    """Refuse other frozen weights than the server's, beside which another model would be trained, and useless ones."""
    models.refuse_not_finite(template)
    if brief.get("frozen") != models.frozen(template):
        raise Refused(
            f"model {brief['model']['name']!r} has other frozen weights here than at the server: install the same "
            "version of sordino (or of the module and the weights it comes from) on both sides"
        )


def check_terms(
    policy: Policy, method: Method, terms: Terms, asks: tuple[Terms, ...], turns: int, declared: Declared, public: bool
) -> None:
    """Refuse releases that the method does not make, or that this site does not allow."""
    beside = [one.question.what for one in method.ask if one.batch == "step"]
    own = [one.question.what for one in method.ask if one.batch == "own"]
    if [name for name, _ in terms.parts] != ["gradient", *beside] or [one.what for one in asks] != own:
        said = "; ".join(one.what for one in (terms, *asks))
        raise Refused(f"method {method.name!r} does not release {said}")
    if turns > policy.rounds:
        raise Refused(f"{turns} turns are too many for this site: it allows {policy.rounds} a run")
    if terms.count > policy.steps:
        raise Refused(f"{terms.count} local steps a turn are too many for this site: it allows {policy.steps}")
    if any(one.count != 1 for one in asks):
        raise Refused("a question is answered from one batch")
    levels = [(one.name, one.records) for one in present(declared.levels)]
    for one in (terms, *asks):
        if [(group.name, group.records) for group in one.groups] != levels:
            told = ", ".join(f"{count} of {name!r}" for name, count in levels) or "none"
            raise Refused(f"{one.what!r} is not offered by this site's levels of consent, which are: {told}")
        one.sampling.check_whole(declared.records)
        expected = one.sampling.rate * declared.records
        if not math.isclose(one.divisor, expected, rel_tol=1e-6):
            raise Refused(f"{one.what!r} would be divided by {one.divisor:g}, not by its expected batch {expected:g}")
        for name, z in one.parts:
            if method.private and not public and not z >= policy.least_noise:
                raise Refused(f"{name!r} would have noise {z:.3g}: this site adds at least {policy.least_noise:g}")


def check_place(policy: Policy, rounds: int, number: int, copy: int, turns: int) -> None:
    """Refuse a round or a virtual copy that the run does not have."""
    if not 1 <= number <= min(rounds, policy.rounds):
        raise Refused(f"there is no round {number}: the run has {rounds}, and this site allows {policy.rounds}")
    if not 0 <= copy < max(1, turns):
        raise Refused(f"there is no virtual copy {copy} in a run of {turns} turns")


def check_bounds(policy: Policy, bounds: Mapping[str, float], private: bool) -> None:
    """Refuse a clipping radius outside the allowed range; a question's bound only has to be a positive number."""
    for part, bound in bounds.items():
        if not private:
            continue
        low, high = policy.clip if part == "gradient" else (1e-6, 1e12)
        if not low <= bound <= high:
            raise Refused(f"the bound of {part!r} is {bound:g}: this site allows {low:g} to {high:g}")
