"""An entry for OpenDP's public registry of deployments, from a site's ledger and what people say of the product.

The registry (github.com/opendp/deployments-registry-data) keeps one YAML file a deployment. Written against its
``schemas/deployments-schema.yaml`` as of commit 057e5d8. What a ledger knows is taken from it; what only people know
(curator, purpose, region, date) they say in a TOML file, and an entry that lacks any of it is refused with a list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sordino._version import __version__
from sordino.errors import BadInput
from sordino.privacy.attacker import attack_in_words
from sordino.privacy.book import Account
from sordino.privacy.groups import is_account_of
from sordino.privacy.ledger import Ledger
from sordino.privacy.living import cohort_of, is_held
from sordino.privacy.statement import export, release_in_words
from sordino.privacy.titles import titles
from sordino.privacy.words import epsilon_in_words
from sordino.study.registry_answers import date_of
from sordino.study.yaml_text import yaml_text

FILE_NAME = re.compile(r"[a-z0-9_]+\.yaml")
ACTORS = (
    "- The site, which holds the records, draws batches and noise in secret, and keeps the ledger. Trusted by its data "
    "subjects.\n- The server, which sees what sites release and combines it: honest but curious, nothing is trusted to "
    "it.\n- The other sites and everybody who gets the model: may know everything but the protected unit."
)


def entry(ledger: Ledger, about: dict[str, Any], client: str | None = None) -> dict[str, Any]:
    """The entry as plain values. ``client``: whose account, where a ledger has several.

    Guarantees: ε is what is promised to everybody at the site: of all its accounts the largest, rounded up; of an
    account that rests on a filter its whole budget. A simulation and an account that is NOT PRIVATE have no entry.
    """
    told = _told(ledger, client)
    first, date = told[0], date_of(about["publication_date"])
    name, curators = str(about["name"]), [one["name"] for one in about["curators"]]
    complete = bool(about.get("justification") and about.get("preprocessing"))
    found = {
        "url_slug": "-".join(_slug(word) for word in (name, curators[0], str(date)[:4])),
        "deployment": {
            "basic": {
                "name": name,
                "data_curators": [
                    {"data_curator_name": one["name"], "data_curator_type": one["type"]} for one in about["curators"]
                ],
                "description": about["description"],
                "intended_use": about["intended_use"],
                "data_product_type": about.get("product", "Machine learning model"),
                "data_product_region": about["region"],
                "data_product_sector": about.get("sector"),
                "publication_date": date,
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"Data sets of as many {first['unit_name']}s as this site has, of the declared form.",
                "unprotected_quantities": "\n".join(f"- {one}" for one in first["not_covered"]),
            },
            "privacy_loss": {
                "privacy_unit": f"{first['unit_name'].capitalize()}-level",
                "privacy_unit_details": f"{first['unit'].capitalize()}. Adjacency is {first['adjacency']}: "
                f"{first['adjacency_in_words']}.",
                "number_of_privacy_units": about.get("units"),
                "privacy_parameters": {
                    "epsilon": max(float(epsilon_in_words(_promised(one))) for one in told),
                    "delta": max(one["delta"] for one in told),
                },
                "privacy_parameters_details": "\n".join(line for one in told for line in _figures(one)),
            },
            "deployment_model": {
                "model_name": "Federated",
                "model_name_details": "Every site sets its own budget, and adds its noise before anything leaves it. "
                f"These figures are one site's and hold {first['trust']}.",
                "trust_assumptions": f"The figures hold {first['trust']}: {first['composition_in_words']}.",
                "actors": about.get("actors", ACTORS),
                "release_type": about.get("release_type", "One release"),
                "release_type_details": _released(told, about.get("release_type", "One release")),
                "data_source_type": about.get("data_source", "Static"),
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": about.get("preprocessing"),
                "mechanisms": _mechanisms(told),
                "composition": "\n".join(
                    dict.fromkeys(f"{one['accountant_in_words']}; {one['composition']}" for one in told)
                ),
                "post_processing": "Everything that the server does with what sites released: combining, averaging and "
                "choosing by released numbers.",
                "justification": about.get("justification"),
                "utility": about.get("utility"),
                "additional_information": about.get("more"),
            },
            "administrative": {"status": "Draft", "registry_authors": about["authors"], "tier": 3 if complete else 2},
        },
    }
    said: dict[str, Any] = _without_gaps(found)
    return said


def entry_text(ledger: Ledger, about: dict[str, Any], client: str | None = None) -> str:
    """The same as the YAML that the registry keeps."""
    return yaml_text(entry(ledger, about, client))


def check_file_name(path: Path) -> None:
    """Refuse a file name that the registry's checks do not admit."""
    if not FILE_NAME.fullmatch(path.name):
        raise BadInput(f"--out {path}: the registry wants lower-case letters, digits and _ before .yaml")


def _told(ledger: Ledger, client: str | None) -> list[dict[str, Any]]:
    """The statements of one site: of its records, of those held out, of all levels and cohorts."""
    names = list(dict.fromkeys(one.owner or one.client for one in ledger.accounts() if _is_whole(one)))
    if client is None and len(names) != 1:
        raise BadInput(f"{ledger.path} has the accounts of {len(names)} clients: say which by --client")
    chosen = client or names[0]
    both = [one.client for one in ledger.accounts() if is_account_of(one.client, chosen)]
    if chosen not in names:
        raise BadInput(f"--client {chosen!r} has no account in {ledger.path}")
    told = export(ledger, both)["statements"]
    if any(one["simulated"] for one in told):
        raise BadInput(f"{chosen} is a simulated account: the registry is of deployments, and a simulation is none")
    if any(one["public"] or not one["private"] for one in told):
        raise BadInput(f"{chosen} is NOT PRIVATE: there is no guarantee that the registry could hold")
    if not any(one["releases"] for one in told):
        raise BadInput(f"{chosen} has released nothing yet: there is nothing to register")
    if any(ledger.overdrawn(name) for name in both):
        raise BadInput(f"{chosen} has overdrawn its filter: its budget is not guaranteed, so there is no entry")
    return [one for one in told if one["releases"]]


def _is_whole(account: Account) -> bool:
    """Whether an account is a client's own, or one of its levels; not that of held-out records or a later cohort."""
    return not is_held(account.client) and cohort_of(account.client) == 1


def _promised(told: dict[str, Any]) -> float:
    """What is guaranteed: what was spent; of a filter, whose meter guarantees nothing, all of its budget."""
    return float(told["epsilon"] if told["composition"].startswith("filter") else told["spent_epsilon"])


def _figures(told: dict[str, Any]) -> list[str]:
    exchanged = told["replace_one_epsilon"]
    return [
        f"- {told['client']}: epsilon {epsilon_in_words(_promised(told))} of a budget of {told['epsilon']:g}, "
        f"delta {told['delta']:g}; under replace-one "
        + ("not claimed" if exchanged is None else f"epsilon {epsilon_in_words(exchanged)}")
        + ".",
        *(f"  {line.strip()}." for line in attack_in_words(told["attack"], told["unit_name"])),
    ]


def _released(told: list[dict[str, Any]], kind: str) -> str:
    lines = [f"{kind} of the product. The server saw these releases of this site on the way:"]
    for one in told:
        names = titles(one)
        lines += [f"- {names[r['run']]}: {release_in_words(r, one['unit_name'])}." for r in one["releases"]]
    return "\n".join([*lines, "The site's ledger refuses what would exceed its budget before records are read."])


def _mechanisms(told: list[dict[str, Any]]) -> str:
    kinds = {"poisson": "Poisson-sampled", "fixed": "fixed-size sampled", "full": "full-batch"}
    used = sorted({kinds[scheme] for one in told for scheme in one["sampling"]})
    shared = any("shared" in r for one in told for r in one["releases"])
    noise = (
        "- Noise is shared between sites: discrete Gaussians drawn exactly on a common lattice, under pairwise masks."
        if shared
        else "- Noise is a Gaussian rounded to a lattice of integers and drawn exactly from a secret generator of the "
        "site: its distribution does not depend on rounding."
    )
    return "\n".join(
        [
            f"- Gaussian mechanism on clipped sums, {' and '.join(used)}.",
            f"- Implemented by sordino {__version__}.",
            noise,
            "- Norms that clipping rests on are upper bounds that include rounding; a record's contribution does not "
            "depend on the records beside it.",
            "- Charges are durable on the site's disk before noise is drawn.",
        ]
    )


def _slug(text: str) -> str:
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")


def _without_gaps(value: Any) -> Any:
    """Without what nobody said."""
    if isinstance(value, dict):
        return {key: _without_gaps(one) for key, one in value.items() if one is not None}
    return value
