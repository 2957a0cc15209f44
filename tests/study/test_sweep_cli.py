"""Sweeps and the plan's page from the command line."""

import json

import pytest

STUDY = """
[study]
name = "small"
rounds = 2
[data]
name = "digits"
records = 300
partition = "iid"
clients = 3
[budgets]
epsilon = [0.5, 2.0, 8.0]
delta = 1e-4
[model]
name = "logistic"
[training]
rate = 0.3
"""
SWEEP = '\n[sweep]\n"method.name" = ["dp-fedavg", "fedavg"]\ntraining.lr = [0.1, 0.3]\n"study.seed" = [0, 1]\n'


@pytest.fixture
def call(in_folder, tmp_path):
    """Run a command on a study in an empty folder; returns (exit code, stdout, stderr)."""

    def run(text: str, name: str, *words: str) -> tuple[int, str, str]:
        (tmp_path / "study.toml").write_text(text)
        return in_folder("-q", name, "study.toml", *words)

    return run


def test_run_trains_a_sweep_and_writes_its_tables_and_report(call, tmp_path):
    code, out, _ = call(STUDY + SWEEP, "run")
    assert code == 0
    assert "mean ± deviation over 2 seeds" in out
    lines = [line.strip().split("  ")[0] for line in out.splitlines() if "fedavg" in line]
    assert lines == [
        "dp-fedavg lr=0.1",
        "dp-fedavg lr=0.3",
        "fedavg lr=0.1 NOT PRIVATE",
        "fedavg lr=0.3 NOT PRIVATE",
    ]
    folder = tmp_path / "runs" / "small"
    files = {path.name for path in folder.iterdir() if path.is_file()}
    assert files == {"runs.parquet", "runs.csv", "rounds.parquet", "rounds.csv", "report.html", "sweep.json"}
    assert len([path for path in folder.iterdir() if path.is_dir()]) == 8
    before = (folder / "runs.csv").read_text()
    assert call(STUDY + SWEEP, "run")[0] == 0
    assert (folder / "runs.csv").read_text() == before


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("run", ["--ledger", "l.db"], "each of its runs has a ledger of its own"),
        ("run", ["--set", "sweep.mode='zip'"], "use 'grid' (every combination) or 'list'"),
        ("compare", [], "use 'sordino run'"),
    ],
)
def test_what_does_not_go_with_a_sweep_is_bad_input(call, command, options, words):
    code, _, err = call(STUDY + SWEEP, command, *options)
    assert code == 2
    assert words in " ".join(err.split())


def test_plan_writes_a_page_and_trains_nothing(call, tmp_path):
    code, out, _ = call(STUDY, "plan", "--html", "pages/plan.html")
    assert code == 0
    assert "plan: pages/plan.html" in out
    assert "Private, if run as planned" in (tmp_path / "pages" / "plan.html").read_text()
    assert not (tmp_path / "runs").exists()
    assert len(json.loads(call(STUDY, "plan", "--json", "--html", "plan.html")[1])["clients"]) == 3
    code, _, err = call(STUDY, "plan", "--html", "study.toml/plan.html")
    assert code == 2
    assert "cannot be written" in err


def test_plan_says_that_it_leaves_the_sweep_out(call):
    assert "without its [sweep], which makes 8 runs" in call(STUDY + SWEEP, "plan")[1]
