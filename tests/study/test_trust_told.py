"""Wherever a run with shared noise shows an ε, it says whom it holds against: tables, report, ledger, command line."""

from __future__ import annotations

import io
import json

import pyarrow.parquet
import pytest
import report_fixture as fixture
from report_page import first_screen, page_of, shown_client, with_privacy
from rich.console import Console
from typer.testing import CliRunner

import sordino as sd
from sordino.cli import app
from sordino.privacy.trust import EVERYBODY
from sordino.study.against import against, own_epsilon, trust_lines
from sordino.study.compare import comparison_table, plain_results, summary
from sordino.study.file import make_study
from sordino.study.report.promises import statement
from sordino.study.sweep import sweep
from sordino.study.tidy import write_tables
from sordino.study.track import settings

WORDS = "against the server and any one of the three other sites"
TABLE = {
    "study": {"name": "small", "rounds": 2},
    "data": {"name": "digits", "records": 300, "partition": "iid", "clients": 4, "seed": 0},
    "budgets": {"epsilon": [0.5, 2.0, 8.0, 1.0], "delta": 1e-4},
    "model": {"name": "logistic"},
    "method": {"name": "dp-fedavg"},
    "training": {"rate": 0.3, "lr": 0.3},
    "trust": {"noise": "shared", "colluders": 1},
}


def trained(trust, method="dp-fedavg", **more):
    study = make_study({**TABLE, "trust": trust, "method": {"name": method}})
    return sd.train(study.federation(), method=study.chosen_method(), **study.arguments(), **more).result


@pytest.fixture(scope="module")
def results():
    return [trained({}), trained(TABLE["trust"]), trained({}, "fedavg")]


def text_of(renderable, width=80):
    out = io.StringIO()
    Console(width=width, file=out).print(renderable)
    return " ".join(out.getvalue().split())


# ---- results and tables ----


def test_a_result_says_it_and_one_without_a_promise_does_not(results):
    alone, shared, nothing = results
    assert [against(one) for one in results] == [[EVERYBODY], [WORDS], []]
    assert [own_epsilon(one) for one in (alone, nothing)] == [None, None]
    assert own_epsilon(shared) == max(one["own_epsilon"] for one in shared["privacy"])


def test_the_table_of_a_run_names_it_and_never_averages_both_kinds(results):
    text = text_of(comparison_table(results))
    assert f"dp-fedavg: noise is shared, ε holds {WORDS}" in text
    assert [row["method"] for row in summary(results)] == ["dp-fedavg", "dp-fedavg, noise shared", "fedavg"]
    assert [row["runs"] for row in summary(results)] == [1, 1, 1]
    assert "holds" not in text_of(comparison_table([results[0], results[2]]))


def test_lines_are_said_once_for_several_runs(results):
    assert len(trust_lines([results[1], results[1]])) == 1
    assert trust_lines([results[1], results[1]], ["a", "b"]) == [f"a, b: noise is shared, ε holds {WORDS}"]


def test_a_sweep_and_its_tables(tmp_path):
    sharing = [{"noise": "per-site"}, {"noise": "shared", "colluders": 1}]
    keys = {"mode": "list", "trust.noise": [one["noise"] for one in sharing], "trust.colluders": [0, 1]}
    runs = sweep(make_study({**TABLE, "trust": {}, "sweep": keys}), tmp_path)
    write_tables(runs, tmp_path)
    rows = pyarrow.parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    assert [row["trust"] for row in rows] == [EVERYBODY, WORDS]
    assert rows[0]["own_epsilon_max"] is None
    assert rows[1]["own_epsilon_max"] > rows[1]["spent_epsilon_max"]


def test_trackers_are_told():
    private = settings(make_study(TABLE), True)["privacy"]
    assert private == "private: every client within its own budget, against the server and any one other site"
    assert settings(make_study({**TABLE, "trust": {}}), True)["privacy"].endswith("its own budget")
    assert settings(make_study(TABLE), False)["privacy"] == "NOT PRIVATE"


# ---- the report ----


def told(result: dict, **changes) -> dict:
    """A made-up result whose first client shared noise."""
    return with_privacy(result, trust=WORDS, own_epsilon=7.5, **changes)


def test_the_reports_first_screen_says_it():
    screen = " ".join(first_screen([told(fixture.result("dp-fedavg"))]).split())
    assert "Noise was shared between sites." in screen
    assert f"holds {WORDS}" in screen
    assert "ε = 7.5" in screen.replace("\u00a0", " ")
    assert "Noise was shared" not in first_screen([fixture.result("dp-fedavg")])
    unknown = told(fixture.result("dp-fedavg"))
    unknown["privacy"][0]["own_epsilon"] = None
    assert "∞" in first_screen([unknown])


def test_a_method_that_is_not_private_shares_no_promise():
    result = told(fixture.result("fedavg"))
    assert "Noise was shared" not in first_screen([result])
    assert "holds" not in statement(shown_client([result]), False)


def test_a_clients_statement_says_it():
    result = told(fixture.result("dp-fedavg"))
    text = statement(shown_client([result]), True)
    assert f"That holds {WORDS}: noise was shared." in text
    assert "its own share of the noise would still promise ε\u00a0=\u00a07.5" in text
    assert "Whoever among them sees all of that" in text
    others = statement(shown_client([result], 1), True)
    assert "shared" not in others
    assert "Someone who sees all of that" in others


def test_both_kinds_side_by_side_are_told_apart(results):
    page = page_of(plain_results(results))
    assert "dp-fedavg with shared noise (1 conspiring)" in page
    assert f'<td class="words">{WORDS}</td>' in page
    assert f'<td class="words">{EVERYBODY}</td>' in page
    assert "unset" not in page[page.index("<main") : page.index('id="t-study"')]
    assert "as strong as the ciphers" in " ".join(page.split())


def test_results_of_one_kind_need_no_column():
    assert "ε holds" not in page_of([fixture.result("dp-fedavg"), fixture.result("weiavg")])


# ---- the command line ----


def test_ledger_show_and_export(tmp_path):
    path = tmp_path / "ledger.db"
    trained(TABLE["trust"], ledger=path)
    shown = CliRunner().invoke(app, ["ledger", "show", str(path), "--client", "client-00"]).stdout
    assert f"that holds {WORDS}" in shown
    assert "all of them        epsilon" in shown
    exported = json.loads(CliRunner().invoke(app, ["ledger", "export", str(path)]).stdout)
    for one in exported["statements"]:
        assert one["trust"] == WORDS
        assert one["shared_noise"]["own_epsilon"] > one["spent_epsilon"]
        assert [row["colluders"] for row in one["shared_noise"]["against"]] == [0, 1, 2]


def test_run_says_it_in_the_end(tmp_path):
    lines = ["[study]", 'name = "small"', "rounds = 2", "[data]", 'name = "digits"', "records = 300"]
    lines += ['partition = "iid"', "clients = 4", "[budgets]", "epsilon = 2.0", "delta = 1e-4", "[model]"]
    lines += ['name = "logistic"', "[method]", 'name = "dp-fedavg"', "[training]", "rate = 0.3", "lr = 0.3"]
    (tmp_path / "s.toml").write_text("\n".join([*lines, "[trust]", 'noise = "shared"', "colluders = 1"]))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "s.toml"), "--out", str(tmp_path / "out")])
    assert f"noise is shared, ε holds {WORDS}" in " ".join(done.stdout.split())
    planned = CliRunner().invoke(app, ["plan", str(tmp_path / "s.toml"), "--json"])
    assert json.loads(planned.stdout)["trust"] == WORDS


def test_the_audit_says_against_whom():
    done = CliRunner().invoke(app, ["audit", "dp-fedavg", "--canaries", "2000"])
    assert "noise per site: claims hold against the server and all other sites together" in " ".join(
        done.stdout.split()
    )
