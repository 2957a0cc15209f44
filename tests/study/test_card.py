"""A model card: what is handed over with a model, honest first, complete, and only text whatever names say."""

from __future__ import annotations

import copy
import hashlib
import json
import re

import pytest
import report_fixture as fixture
from report_page import page_of

import sordino as sd
from sordino.privacy.attacker import at_most
from sordino.study.report.card import SHOWN, card_text
from sordino.study.result import to_json

SECTIONS = [
    "Intended use",
    "Data",
    "Method and settings",
    "What is promised, client by client",
    "Whom it holds against",
    "What is not covered",
    "How good it is",
    "Versions",
    "Checksums",
    "How to reproduce",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    clients = sd.data.load("digits").subset(300, 0).partition("iid", clients=3, seed=0)
    out = tmp_path_factory.mktemp("run") / "here"
    budgets = clients.with_budgets([1.0, 2.0, 4.0], delta=1e-4)
    options = {"rounds": 2, "rate": 0.3, "lr": 0.3, "evaluation": {"every": 1}}
    return sd.train(budgets, "logistic", "dp-fedavg", out=out, name="heart", **options), out


@pytest.fixture(scope="module")
def card(run):
    return card_text(json.loads(to_json(run[0].result)))


def test_it_has_every_section_and_says_what_people_must_fill_in(card):
    assert re.findall(r"^## (.*)$", card, re.M) == SECTIONS
    assert card.startswith("# Model card: heart\n")
    assert "To be filled in by people" in card
    assert "Trained in a simulation" in card.split("## ")[0]
    assert "NOT PRIVATE" not in card


def test_every_client_has_its_figures_and_its_statement(card, run):
    for one in run[0].privacy:
        (row,) = re.findall(rf"^\| {one['client']} \|.*$", card, re.M)
        assert f"at most {at_most(one['attack']['success'])}" in row
        assert f"at most {at_most(one['attack']['true_positives'])}" in row
        assert "within budget" in row
        assert f"\n{one['client']} allowed ε" in card
    assert "The promises hold against the server and all other sites together" in card
    assert "Record-level (ε, δ)-differential privacy: zero-out adjacency, poisson sampling" in card


def test_paid_metrics_have_intervals_and_the_observers_are_called_so(card, run):
    last = next(one for one in run[0].result["evaluation"] if one["round"] == 2 and one["metric"] == "accuracy")
    value, low, high = (f"{100 * last[key]:.1f} %" for key in ("value", "low", "high"))
    assert f"| accuracy, of all held-out records | {value} | {low} | {high} |" in card
    seen = card[card.index("What an observer") :]
    assert "No guarantee covers these figures" in seen
    assert f"| accuracy, mean over clients | {100 * run[0].result['final']['accuracy']:.1f} % |" in seen


def test_versions_settings_and_the_checksum_are_the_results(card, run):
    result = run[0].result
    assert result["checksum"] in card
    assert all(f"| {name} | {found} |" in card for name, found in result["versions"].items())
    for line in ("| method | dp-fedavg |", "| rate | 0.3 |", "| clip | 1 |", "| part clip | flat |", "study.seed=0"):
        assert line in card
    assert re.search(r"SHA-256 of what was declared about the data: `[0-9a-f]{64}`", card)


def test_what_is_not_private_says_so_before_anything_else():
    text = card_text(fixture.result("fedavg", clients=3, rounds=2))
    assert text.split("\n\n")[1].startswith("**NOT PRIVATE.**")
    assert "nobody: nothing was promised" in text
    assert "at most" not in text[text.index("## What is promised") : text.index("## Whom it holds")]


def test_a_budget_that_was_exceeded_is_named_first():
    result = fixture.result(clients=3, rounds=2)
    result["privacy"][1]["spent_epsilon"] = 99.0
    assert card_text(result).split("\n\n")[1].startswith("**BUDGET EXCEEDED by client-01.**")
    del result["privacy"][1]["spent_epsilon"], result["privacy"][1]["run_epsilon"]
    assert "NOT SHOWN TO BE PRIVATE: client-01" in card_text(result).split("## ")[0]


def test_old_results_have_a_card_too_and_many_clients_a_table():
    text = card_text(fixture.result(clients=30, rounds=2))
    assert len(re.findall(r"^\| client-", text, re.M)) == 30
    assert f"Statements of {30 - SHOWN} more clients" in text
    assert "weights (SHA-256, little-endian float32): `not recorded`" in text
    assert "Nothing was paid for" in text


def test_a_deployment_says_site_and_what_can_be_checked(run):
    result = json.loads(to_json(run[0].result)) | {"simulated": False}
    text = card_text(result)
    assert "## What is promised, site by site" in text
    assert "simulation" not in text.split("## ")[0]
    assert "sordino ledger verify" in text
    assert "What an observer" not in text


def test_names_are_only_text():
    result = copy.deepcopy(fixture.result(clients=2, rounds=2))
    result["privacy"][0]["client"] = "<script>x</script> | [a](b)\n# head"
    text = card_text(result)
    assert "<script>" not in text
    assert "\n# head" not in text
    (row,) = re.findall(r"^\| &lt;script>.*$", text, re.M)
    assert len(re.findall(r"(?<!\\)\|", row)) == 10


def test_the_report_of_one_run_has_the_card_and_of_several_not(run):
    result = json.loads(to_json(run[0].result))
    page = page_of([result])
    assert 'id="card"' in page
    assert 'download="model-card.md" href="data:text/markdown;charset=utf-8,%23%20Model%20card%3A%20heart' in page
    assert 'id="card"' not in page_of([result, {**result, "seed": 1}])


def test_the_command_prints_or_writes_it_with_checksums_of_files(in_folder, run, tmp_path):
    _, out = run
    code, said, _ = in_folder("card", str(out))
    assert code == 0
    assert f"result.json: `{hashlib.sha256((out / 'result.json').read_bytes()).hexdigest()}`" in said
    assert in_folder("card", str(out / "result.json"), "--out", "card.md")[1] == "card: card.md\n"
    assert (tmp_path / "card.md").read_text() == said
    assert in_folder("card", "nowhere")[0] == 2


def test_a_model_that_is_not_the_results_has_no_card(in_folder, run, tmp_path):
    done, out = run
    done.save(tmp_path / "model.safetensors")
    result = json.loads((out / "result.json").read_text())
    (tmp_path / "result.json").write_text(json.dumps({**result, "checksum": "0" * 64}))
    code, _, err = in_folder("card", str(tmp_path))
    assert code == 2
    assert "their checksums differ" in err
