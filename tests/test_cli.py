"""The command line as a person meets it: what it prints, what it writes, how it fails."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from sordino import cli
from sordino.study import many

STUDY = """
[study]
name = "small"
rounds = 3

[data]
name = "digits"
records = 500
partition = "dirichlet"
clients = 5
beta = 0.5
minimum = 30

[budgets]
epsilon = [0.5, 1.0, 2.0, 4.0, 8.0]
delta = 1e-4

[model]
name = "logistic"

[training]
rate = 0.3
lr = 0.3
"""


@pytest.fixture
def call(in_folder):
    """Run a command in an empty folder; returns (exit code, stdout, stderr)."""
    return in_folder


@pytest.fixture
def study(tmp_path):
    """A study file to change: write(text, old, new, …) returns its path."""

    def write(*changes: str) -> str:
        text = STUDY
        for old, new in zip(changes[::2], changes[1::2]):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "study.toml").write_text(text)
        return str(tmp_path / "study.toml")

    return write


def test_version_and_help(call):
    assert call("--version")[1].startswith("sordino 0.")
    code, out, _ = call("--help")
    assert code == 0
    assert all(word in out for word in ("demo", "plan", "run", "compare", "ledger", "data"))
    assert call("run", "--help")[1].count("[sweep]") == 3, "brackets are not taken for markup"


def test_methods_lists_every_method_and_marks_what_is_not_private(call):
    _, out, _ = call("methods")
    line = next(one for one in out.splitlines() if "fedavg" in one and "dp-" not in one)
    assert "NOT PRIVATE" in line


def test_plan_says_noise_and_cost_per_client_and_trains_nothing(call, study, tmp_path):
    code, out, _ = call("plan", study())
    assert code == 0
    assert "client-0" in out
    assert "noise z" in out
    assert not (tmp_path / "runs").exists()
    planned = json.loads(call("plan", study(), "--json")[1])
    assert [c["epsilon"] for c in planned["clients"]] == [0.5, 1.0, 2.0, 4.0, 8.0]
    noises = [c["noise"] for c in planned["clients"]]
    assert noises == sorted(noises, reverse=True)


def test_a_plan_fits_a_narrow_terminal(call, study, monkeypatch):
    """Every client can be told from the others; what all have in common is said once."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call("plan", study())
    assert "…" not in out
    assert "every client: δ " in out
    assert "client-0" in out


def test_plan_warns_of_a_client_whose_update_is_mostly_noise(call, study):
    _, out, _ = call("plan", study("[0.5,", "[0.01,"))
    assert "times more noise than signal" in out


def test_run_writes_a_run_folder_and_refuses_to_overwrite_it(call, study, tmp_path):
    code, _, _ = call("run", study())
    folder = tmp_path / "runs" / "small"
    assert code == 0
    assert {p.name for p in folder.iterdir()} >= {"result.json", "study.json", "ledger.db", "log.jsonl"}
    result = json.loads((folder / "result.json").read_text())
    assert result["schema"] == 2
    assert [r["round"] for r in result["rounds"]] == [1, 2, 3]
    assert all(p["spent_epsilon"] <= p["epsilon"] for p in result["privacy"])
    code, _, err = call("run", study())
    assert code == 2
    assert "--resume" in err
    assert call("run", study(), "--resume")[0] == 0
    again = json.loads((folder / "result.json").read_text())
    assert again["rounds"] == result["rounds"]


def test_set_puts_values_over_the_study(call, study, tmp_path):
    call("run", study(), "--set", "study.rounds=2", "--set", "training.lr=0.1", "--out", "elsewhere")
    result = json.loads((tmp_path / "elsewhere" / "result.json").read_text())
    assert len(result["rounds"]) == 2
    assert result["study"]["training"]["lr"] == 0.1


def test_a_run_that_is_not_private_says_so(call, study):
    _, out, _ = call("run", study(), "--set", "method.name=fedavg")
    assert "NOT PRIVATE" in out


def test_compare_prints_a_table_and_writes_a_report(call, study, tmp_path):
    path = study()
    Path(path).write_text(STUDY + '[compare]\nmethods = ["dp-fedavg", "fedavg"]\nseeds = [0, 1]\n')
    code, out, _ = call("compare", path)
    assert code == 0
    assert "±" in out
    assert "NOT PRIVATE" in out
    assert (tmp_path / "runs" / "small-compare" / "report.html").stat().st_size > 100_000


def test_one_run_makes_no_stack(call, study):
    code, _, err = call("run", study(), "--stack")
    assert (code, "this study is one: give it a [sweep]" in err) == (2, True), err


def test_compare_leaves_out_what_diverges_and_says_so(call, study, tmp_path, monkeypatch, caplog):
    path = study()
    Path(path).write_text(STUDY + '[compare]\nmethods = ["dp-fedavg", "fedavg"]\n')
    code, _, err = call("compare", path, "--set", "training.server_lr=1e60", "--out", str(tmp_path / "all"))
    assert code == 1
    assert "training diverged" in err
    real = many.prepare

    def wild(clients, model, method, seed, options, settings, noises, **more):
        settings |= {"server_lr": 1e60} if method.name == "fedavg" else {}
        return real(clients, model, method, seed, options, settings, noises, **more)

    monkeypatch.setattr(many, "prepare", wild)
    caplog.clear()
    code, out, _ = call("compare", path, "--out", str(tmp_path / "some"))
    assert code == 0
    assert "dp-fedavg" in out
    assert "NOT PRIVATE" not in out, "fedavg is not in the table"
    assert "fedavg, seed 0, is left out: the model is no longer finite" in caplog.text


def test_ledger_commands_print_a_statement_verify_and_export(call, study, tmp_path):
    call("run", study())
    path = str(tmp_path / "runs" / "small" / "ledger.db")
    _, out, _ = call("ledger", "show", path)
    assert "client-0" in out
    assert "zero-out" in out
    assert call("ledger", "verify", path)[0] == 0
    assert json.loads(call("ledger", "export", path)[1])
    Path(path).write_bytes(b"not a ledger" * 1000)
    code, _, err = call("ledger", "verify", path)
    assert code == 1
    assert len(err.strip().splitlines()) == 1


def test_data_list_names_every_source(call):
    _, out, _ = call("data", "list")
    assert all(name in out for name in ("digits", "mnist", "cifar10", "adult", "bank-marketing", "breast-cancer"))


BAD = {
    "unknown section": (["[budgets]", "[bugets]"], "unknown key bugets: did you mean 'budgets'?"),
    "unknown key": (["lr = 0.3", "learning = 0.3"], "unknown key training.learning"),
    "close key": (["clients = 5", "client = 5"], "did you mean 'clients'?"),
    "wrong type": (["rounds = 3", 'rounds = "three"'], "study.rounds"),
    "zero epsilon": (["[0.5,", "[0.0,"], "epsilon > 0"),
    "negative epsilon": (["[0.5,", "[-1.0,"], "epsilon > 0"),
    "NaN epsilon": (["[0.5,", "[nan,"], "NaN: a budget is a number > 0"),
    "delta 0": (["delta = 1e-4", "delta = 0.0"], "delta"),
    "delta 1": (["delta = 1e-4", "delta = 1.0"], "delta"),
    "unknown data": (['name = "digits"', 'name = "digitz"'], "digit"),
    "unknown model": (['name = "logistic"', 'name = "transformer"'], "transformer"),
    "more clients than records": (["clients = 5", "clients = 5000", "[0.5, 1.0, 2.0, 4.0, 8.0]", "1.0"], "5000"),
    "batch and rate": (["rate = 0.3", "rate = 0.3\nbatch = 5"], "keep one of them"),
    "contradicting budgets": (["delta = 1e-4", 'delta = 1e-4\nname = "dist2"'], "keep one of them"),
    "batch too large": (["rate = 0.3", "batch = 5000"], "larger than client"),
    "negative lr": (["lr = 0.3", "lr = -0.3"], "training.lr"),
    "fixed sampling under zero-out": (["rate = 0.3", 'rate = 0.3\nsampling = "fixed"'], "replace-one"),
    "no such device": (["rounds = 3", 'rounds = 3\ndevice = "tpu9"'], "device"),
    "unknown method": (["[model]", '[method]\nname = "dp-fedavgg"\n[model]'], "did you mean 'dp-fedavg'?"),
    "unknown part": (["[model]", '[method]\naggregate = "magic"\n[model]'], "method.aggregate = 'magic' is unknown"),
    "not TOML": (["rounds = 3", "rounds = = 3"], "not valid TOML"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_the_cause(call, study, case):
    changes, expected = BAD[case]
    code, _, err = call("run", study(*changes))
    assert code == 2, err
    assert expected in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_a_missing_file_is_bad_input(call):
    code, _, err = call("run", "nowhere.toml")
    assert code == 2
    assert "does not exist" in err


def test_a_batchnorm_layer_is_refused_by_name_with_a_remedy(call, study, tmp_path):
    """The model's module lies in the folder that the command is given in."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def normed(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))\n"
        "def narrow(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
    )
    code, _, err = call("run", study('name = "logistic"', 'name = "mine:normed"'))
    assert code == 2
    assert "BatchNorm" in err
    assert "private_ready" in err
    code, _, err = call("run", study('name = "logistic"', 'name = "mine:narrow"'))
    assert code == 2
    assert "3" in err


SITES = """
[study]
name = "own"
rounds = 2
[data]
name = "sites"
{invalid}
[data.schema]
target = "ill"
classes = ["no", "yes"]
[data.schema.numeric]
age = [0, 100]
[data.schema.categorical]
ward = ["a", "b"]
[budgets]
epsilon = 2.0
delta = 1e-3
[model]
name = "logistic"
[training]
rate = 0.5
"""


def _sites(folder: Path, spoil: str = "") -> None:
    random = np.random.default_rng(0)
    folder.mkdir()
    for site in ("north", "south"):
        rows = [f"{a},{random.choice(['a', 'b'])},{'yes' if a > 50 else 'no'}" for a in random.integers(0, 100, 40)]
        rows[7] = rows[7] if site == "north" or not spoil else spoil
        (folder / f"{site}.csv").write_text("age,ward,ill\n" + "\n".join(rows) + "\n")


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [("old,a,yes", "old"), ("nan,a,yes", "age"), ("30,a,perhaps", "perhaps")],
    ids=["text in a numeric column", "NaN", "a label the model has no output for"],
)
def test_records_that_do_not_fit_are_refused_unless_nulled(call, tmp_path, spoil, expected):
    _sites(tmp_path / "sites", spoil)
    (tmp_path / "own.toml").write_text(SITES.format(invalid=""))
    code, _, err = call("run", "own.toml")
    assert code == 2
    assert expected in err
    assert "south.csv" in err
    (tmp_path / "own.toml").write_text(SITES.format(invalid='invalid = "null"'))
    assert call("run", "own.toml")[0] == 0


def test_a_client_without_records_is_refused(call, tmp_path):
    _sites(tmp_path / "sites")
    (tmp_path / "sites" / "empty.csv").write_text("age,ward,ill\n")
    (tmp_path / "own.toml").write_text(SITES.format(invalid=""))
    code, _, err = call("run", "own.toml")
    assert code == 2
    assert "empty" in err


def test_a_drafted_schema_is_toml_that_a_study_can_hold(call, tmp_path):
    import tomllib

    _sites(tmp_path / "sites")
    code, out, _ = call("data", "schema", "sites")
    assert code == 0
    assert tomllib.loads(out)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_a_device_that_is_full_is_said_to_be_full(call, study, monkeypatch, error):
    def full(*given, **options):
        raise error

    monkeypatch.setattr("sordino.engine.simulate.take_turn", full)
    code, _, err = call("run", study())
    assert code == 1
    assert "out of memory" in err
    assert "--processes" in err
    assert "internal" not in err


def test_interruption_exits_130_and_says_how_to_go_on(call, study, monkeypatch):
    from sordino.study import session

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "simulate", interrupt)
    code, _, err = call("run", study())
    assert code == 130
    assert "--resume" in err


def test_a_full_disk_is_one_line_and_the_run_can_go_on(study, tmp_path):
    """Files may not grow beyond a few pages: what a full disk looks like to the ledger, the log and checkpoints."""
    limit = (
        "import os, resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "sordino", "-q", "run", study(), "--set", "study.rounds=40", "--out", "full"]
    full = subprocess.run([sys.executable, "-c", limit, *command], cwd=tmp_path, capture_output=True, text=True)
    assert full.returncode == 2, full.stderr
    assert len(full.stderr.strip().splitlines()) == 1
    again = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    result = json.loads((tmp_path / "full" / "result.json").read_text())
    assert len(result["rounds"]) == 40
    assert all(p["spent_epsilon"] <= p["epsilon"] for p in result["privacy"])


def test_every_argument_and_option_says_what_it_is_for():
    def commands(command, path):
        for name, one in getattr(command, "commands", {}).items():
            yield from commands(one, [*path, name])
        yield path, command

    found = list(commands(typer.main.get_command(cli.app), ["sordino"]))
    silent = [(*path, param.name) for path, command in found for param in command.params if not param.help]
    assert len(found) > 20
    assert silent == []
