"""An entry for the public registry: every field its schema requires, what its checks look for, and no claim too many.

``FIELDS`` says, field by field, what the registry's schema (commit 057e5d8) requires and allows: our own check.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from sordino.errors import BadInput
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Charge, Ledger, LedgerPlan
from sordino.privacy.types import Budget, Event, Sampling
from sordino.study.registry import entry, entry_text
from sordino.study.registry_answers import NEEDED, read_answers
from sordino.study.yaml_text import yaml_text

GRADIENT = Event("gradient", Sampling.poisson(0.05), 2.0, 10)
ABOUT = """
name = "Readmission model"
description = "Predicts readmission within 30 days."
intended_use = "Planning of follow-up visits."
region = "Norway"
publication_date = 2026-03-01
authors = ["A. Name"]
sector = "Healthcare"

[[curators]]
name = "Northern Hospital"
type = "Government"
"""
MORE = 'units = 1200\njustification = "First\\nand second."\npreprocessing = "None."\nutility = "AUC 0.8"\n'

TEXT, NUMBER, WHOLE = str, (int, float), int
FIELDS = {  # path: (required, type or allowed values)
    "url_slug": (True, TEXT),
    "deployment/basic/name": (True, TEXT),
    "deployment/basic/data_curators": (True, list),
    "deployment/basic/description": (True, TEXT),
    "deployment/basic/intended_use": (True, TEXT),
    "deployment/basic/data_product_type": (True, {"Summary statistics", "Machine learning model", "Dataset"}),
    "deployment/basic/data_product_region": (True, TEXT),
    "deployment/basic/data_product_sector": (False, {"Technology", "Healthcare", "Education", "Government"}),
    "deployment/basic/publication_date": (True, TEXT),
    "deployment/dp_variant/variant_name": (False, {"Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP"}),
    "deployment/dp_variant/data_domain": (False, TEXT),
    "deployment/dp_variant/unprotected_quantities": (False, TEXT),
    "deployment/privacy_loss/privacy_unit": (False, TEXT),
    "deployment/privacy_loss/privacy_unit_details": (False, TEXT),
    "deployment/privacy_loss/number_of_privacy_units": (False, WHOLE),
    "deployment/privacy_loss/privacy_parameters/epsilon": (False, NUMBER),
    "deployment/privacy_loss/privacy_parameters/delta": (False, NUMBER),
    "deployment/privacy_loss/privacy_parameters/rho": (False, NUMBER),
    "deployment/privacy_loss/privacy_parameters_details": (False, TEXT),
    "deployment/deployment_model/model_name": (False, {"Local", "Central", "Shuffle", "Federated", "Varies"}),
    "deployment/deployment_model/model_name_details": (False, TEXT),
    "deployment/deployment_model/trust_assumptions": (False, TEXT),
    "deployment/deployment_model/actors": (False, TEXT),
    "deployment/deployment_model/release_type": (False, {"One release", "Many releases"}),
    "deployment/deployment_model/release_type_details": (False, TEXT),
    "deployment/deployment_model/data_source_type": (False, {"Static", "Dynamic"}),
    "deployment/deployment_model/data_source_type_details": (False, TEXT),
    "deployment/deployment_model/access_type": (False, {"Interactive", "Non-interactive"}),
    "deployment/deployment_model/access_type_details": (False, TEXT),
    "deployment/implementation/preprocessing_and_hyperparameter_tuning": (False, TEXT),
    "deployment/implementation/mechanisms": (False, TEXT),
    "deployment/implementation/composition": (False, TEXT),
    "deployment/implementation/post_processing": (False, TEXT),
    "deployment/implementation/justification": (False, TEXT),
    "deployment/implementation/utility": (False, TEXT),
    "deployment/implementation/additional_information": (False, TEXT),
    "deployment/administrative/status": (True, {"Converted", "Draft", "Pending", "Changes Required", "Approved"}),
    "deployment/administrative/registry_authors": (True, list),
    "deployment/administrative/tier": (True, {1, 2, 3}),
}


def leaves(value, path=""):
    for key, one in value.items():
        yield from leaves(one, f"{path}{key}/") if isinstance(one, dict) else [(path + key, one)]


def faults(text: str) -> list[str]:
    """What the registry's own checks would say: missing, unexpected, of another type, folded texts, odd escapes."""
    found = dict(leaves(yaml.load(text, Loader=yaml.Loader)))
    wrong = [f"{path} is missing" for path, (needed, _) in FIELDS.items() if needed and path not in found]
    wrong += [f"{path} is unexpected" for path in found if path not in FIELDS]
    for path, value in found.items():
        kind = FIELDS.get(path, (False, object))[1]
        good = value in kind if isinstance(kind, set) else isinstance(value, kind) and not isinstance(value, bool)
        wrong += [] if good else [f"{path} is {value!r}"]
        if isinstance(value, str) and re.search(r"\\\\[^()]", value):
            wrong.append(f"{path} has two backslashes")
    for one in found.get("deployment/basic/data_curators", []):
        if set(one) != {"data_curator_name", "data_curator_type"} or one["data_curator_type"] not in (
            "Government",
            "Industry",
            "Nonprofit",
        ):
            wrong.append(f"curator {one}")
    styles = {getattr(token, "style", None) for token in yaml.scan(text, Loader=yaml.Loader)}
    wrong += [f"style {style}" for style in styles - {None, "|", '"', "'"}]
    date = found.get("deployment/basic/publication_date", "")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(date)):
        wrong.append("no date")
    return wrong


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "north.db") as book:
        book.bind("north", lambda salt: "f" * 64)
        book.open_account("north", Budget(3.0, 1e-5))
        book.declare([LedgerPlan("north", "9f2c", (GRADIENT,), 30, "heart")])
        book.charge([Charge("north", "9f2c", "1", "gradient", 300, "r")])
        yield book


def about(tmp_path, text=ABOUT):
    (tmp_path / "about.toml").write_text(text)
    return tmp_path / "about.toml"


@pytest.mark.parametrize("more", ["", MORE])
def test_an_entry_has_every_field_the_schema_requires_and_no_other(ledger, tmp_path, more):
    said = read_answers(about(tmp_path, more + ABOUT))
    text = entry_text(ledger, said)
    assert faults(text) == []
    read = yaml.load(text, Loader=yaml.Loader)
    assert read == entry(ledger, said)
    assert read["url_slug"] == "readmission-model-northern-hospital-2026"
    assert read["deployment"]["administrative"]["tier"] == (3 if more else 2)


def test_our_check_can_fail(ledger, tmp_path):
    text = entry_text(ledger, read_answers(about(tmp_path)))
    assert faults(text.replace("  basic:", "  basics:"))
    assert faults(text.replace('"Federated"', '"Elsewhere"'))
    assert faults(text.replace("tier: 2", "tier: 4"))
    assert faults(text.replace('publication_date: "2026-03-01"', "publication_date: 2026-03-01"))


def test_its_figures_are_the_ledgers_rounded_up_with_the_attackers_view(ledger, tmp_path):
    loss = entry(ledger, read_answers(about(tmp_path)))["deployment"]["privacy_loss"]
    spent = ledger.epsilon(["north"])["north"]
    assert spent <= loss["privacy_parameters"]["epsilon"] <= spent * 1.001
    assert loss["privacy_parameters"]["delta"] == 1e-5
    assert loss["privacy_unit"] == "Record-level"
    assert "right at most 59.1 % of the time" in loss["privacy_parameters_details"]


def test_the_larger_of_two_accounts_counts_and_a_filter_counts_in_full(ledger, tmp_path):
    said = read_answers(about(tmp_path))
    ledger.open_account("north" + HELD, Budget(3.0, 1e-5), composition="filter")
    scores = Event("scores", Sampling.full(), 30.0, 1)
    ledger.declare([LedgerPlan("north" + HELD, "9f2c", (scores,), 5, "heart")])
    ledger.charge([Charge("north" + HELD, "9f2c", "1", "scores", 1, "r")])
    found = entry(ledger, said)["deployment"]
    assert found["privacy_loss"]["privacy_parameters"]["epsilon"] == 3.0
    assert "scores, 1 times" in found["deployment_model"]["release_type_details"]


def test_levels_and_cohorts_of_a_site_are_one_entry(tmp_path):
    with Ledger(tmp_path / "levels.db") as book:
        for name, epsilon, owner in (
            ("s (strict)", 1.0, "s"),
            ("s (loose)", 3.0, "s"),
            ("s (loose) (since 2)", 3.0, "s"),
        ):
            book.open_account(name, Budget(epsilon, 1e-5), owner=owner)
            gradient = Event("gradient", Sampling.poisson(0.02 * epsilon), 2.0, 1)
            book.declare([LedgerPlan(name, "9f2c", (gradient,), 100, "heart")])
            book.charge([Charge(name, "9f2c", "1", "gradient", 100, "r")])
        found = entry(book, read_answers(about(tmp_path)))["deployment"]["privacy_loss"]
        largest = max(book.epsilon().values())
    assert largest <= found["privacy_parameters"]["epsilon"] <= largest * 1.001
    assert found["privacy_parameters_details"].count("of a budget of") == 3


def test_what_is_missing_is_listed_all_at_once(tmp_path):
    with pytest.raises(BadInput) as told:
        read_answers(None)
    assert all(f"\n  {key}: " in str(told.value) for key in NEEDED)
    with pytest.raises(BadInput, match="\n  region: ") as told:
        read_answers(about(tmp_path, ABOUT.replace('region = "Norway"', "")))
    assert "intended_use:" not in str(told.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("2026-03-01", '"March"', "publication_date is no date"),
        ('"Government"', '"Club"', "curators have a name and a type"),
        ('"Healthcare"', '"Shoes"', "sector is none of"),
        ('["A. Name"]', '"A. Name"', "authors is no list"),
        ("region =", "nation =", "nation is unknown"),
        ('name = "Readmission model"', "name = 3", "name is no text"),
        ('sector = "Healthcare"', "units = true", "units is no number"),
    ],
)
def test_what_makes_no_sense_is_refused_by_its_key(tmp_path, old, new, words):
    with pytest.raises(BadInput, match=words):
        read_answers(about(tmp_path, ABOUT.replace(old, new)))


def test_there_is_no_entry_for_what_guarantees_nothing(tmp_path, ledger):
    said = read_answers(about(tmp_path))
    with Ledger(tmp_path / "simulated.db") as book:
        book.open_account("a", Budget(1.0, 1e-5), simulated=True)
        with pytest.raises(BadInput, match="simulation is none"):
            entry(book, said)
        book.open_account("b", Budget(1.0, 1e-5), simulated=True)
        with pytest.raises(BadInput, match="--client"):
            entry(book, said)
    with Ledger(tmp_path / "new.db") as book:
        book.open_account("a", Budget(1.0, 1e-5))
        with pytest.raises(BadInput, match="released nothing"):
            entry(book, said)
    ledger.mark_not_private("north", "a test")
    with pytest.raises(BadInput, match="NOT PRIVATE"):
        entry(ledger, said)


def test_yaml_comes_back_as_it_went_out():
    value = {
        "a": {"b": 1e-05, "c": 2.5, "d": 3, "e": True},
        "lines": "one: two\n\n- three # four",
        "odd": ['"quoted" \\ and: more', "yes", "  led by blanks\nand more".strip()],
        "rows": [{"x": "1", "y": {"z": "null"}}],
    }
    assert yaml.load(yaml_text(value), Loader=yaml.Loader) == value


def test_the_command_writes_it_and_refuses_with_code_2(in_folder, tmp_path, ledger):
    ledger.close()
    path = str(ledger.path)
    code, _, err = in_folder("ledger", "export", path, "--registry")
    assert code == 2
    assert "intended_use: what it is for" in err
    answers = str(about(tmp_path))
    assert in_folder("ledger", "export", path, "--registry", "--about", answers, "--out", "Bad Name.yaml")[0] == 2
    assert in_folder("ledger", "export", path, "--about", answers)[0] == 2
    code, out, _ = in_folder("ledger", "export", path, "--registry", "--about", answers, "--out", "heart.yaml")
    assert (code, out) == (0, "written: heart.yaml\n")
    assert faults((tmp_path / "heart.yaml").read_text()) == []


def test_a_top_up_needs_a_reason_and_a_name_and_raises_both_accounts(in_folder, tmp_path, ledger):
    ledger.open_account("north" + HELD, Budget(3.0, 1e-5))
    ledger.close()
    words = ["ledger", "top-up", str(ledger.path), "--client", "north", "--epsilon", "0.5"]
    assert in_folder(*words, "--officer", "Dr. Weiss")[0] == 2
    assert in_folder(*words, "--officer", "Dr. Weiss", "--reason", " ")[0] == 2
    assert in_folder(*words[:4], "south", *words[5:], "--officer", "Dr. Weiss", "--reason", "more")[0] == 2
    assert in_folder(*words[:6], "-1", "--officer", "Dr. Weiss", "--reason", "more")[0] == 2
    assert in_folder("ledger", "top-up", "none.db", *words[3:], "--officer", "W", "--reason", "more")[0] == 2
    with Ledger(ledger.path, readonly=True) as book:
        assert book.account("north").budget.epsilon == 3.0
    code, out, _ = in_folder(*words, "--officer", "Dr. Weiss", "--reason", "second study")
    assert code == 0
    assert "the budget of north is epsilon 3.5 at delta 1e-05 now" in out
    with Ledger(ledger.path, readonly=True) as book:
        for name in ("north", "north" + HELD):
            assert book.account(name).budget.epsilon == 3.5
            (note,) = book.account(name).top_ups
            assert (note.epsilon, note.reason, note.officer) == (0.5, "second study", "Dr. Weiss")


def test_the_example_is_complete(ledger):
    said = read_answers(Path(__file__).parents[2] / "examples" / "federation" / "registry.toml")
    assert faults(entry_text(ledger, said)) == []
    assert entry(ledger, said)["deployment"]["administrative"]["tier"] == 3
