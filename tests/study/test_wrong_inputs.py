"""Wrong inputs of a new user: each is refused, by its key and with a remedy, before the first record is read."""

from __future__ import annotations

import inspect
import logging
import re
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import sordino as sd
from sordino import cli
from sordino.commands.output import shown
from sordino.data import budgets, own, sources
from sordino.data import read as read_module
from sordino.errors import BadInput
from sordino.methods import Training
from sordino.methods.settings import Settings
from sordino.study.file import make_study, read_study
from sordino.study.site_file import read_site
from sordino.study.sweep import points

FINE: dict[str, Any] = {
    "study": {"name": "small", "rounds": 2},
    "data": {"name": "digits", "partition": "dirichlet", "clients": 4, "beta": 0.5},
    "budgets": {"epsilon": 2.0},
    "model": {"name": "logistic"},
    "method": {"name": "dp-fedavg"},
}

SCHEMA = {"target": "y", "classes": ["no", "yes"], "numeric": {"age": [0, 100]}}


class Read(AssertionError):
    """A record was read."""


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading any record fails the test."""

    def read(*args: Any, **options: Any) -> None:
        raise Read

    monkeypatch.setattr(sources, "_read", read)
    monkeypatch.setattr(sources, "least_squares", read)
    monkeypatch.setattr(own, "_read_client", read)
    monkeypatch.setattr(read_module, "file_lines", read)


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name in ("north", "south", "west"):
        (folder / f"{name}.csv").write_text("age,y\n30,no\n40,yes\n")
    return folder


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """The study that is fine, with keys put over it; None takes one out."""
    table = {section: dict(keys) for section, keys in FINE.items()}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})
        if not name:
            table[section] = value
        elif value is None:
            del table[section][name]
        else:
            table[section][name] = value
    return table


def test_the_study_is_fine_as_it_is(unread: None) -> None:
    with pytest.raises(Read):
        make_study(changed({})).federation()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"study.name": "../../evil"}, r"study.name = '../../evil': it names the folder below runs/"),
        ({"study.name": "/tmp/evil"}, r"study.name"),
        ({"study.name": ""}, r"study.name"),
        ({"study.name": ".."}, r"study.name"),
        ({"study.name": "a\\b"}, r"study.name"),
        ({"study.name": "x" * 300}, r"study.name.*200 bytes"),
        ({"study.seed": -1}, r"study.seed = -1"),
        ({"study.rounds": 0}, r"study.rounds = 0"),
        ({"study.round": 3}, r"unknown key study.round: did you mean 'rounds'"),
        ({"data.name": "digit"}, r"data.name = 'digit' is unknown: use one of digits"),
        ({"data.clients": None}, r"data.clients is missing"),
        ({"data.beta": None}, r"data.beta is missing: data.partition = 'dirichlet' needs it"),
        ({"data.shards": 2}, r"dirichlet partition has no option 'shards'"),
        ({"data.partition": "natural", "data.beta": None}, r"data.partition = 'natural': digits comes without clients"),
        ({"data.records": 99999}, r"data.records = 99999: digits has 1797"),
        ({"data.clients": 5000}, r"data.clients = 5000"),
        ({"data.minimum": 900}, r"data.clients = 4 with at least data.minimum = 900"),
        ({"data.test": 1.5}, r"data.test = 1.5"),
        ({"data.invalid": "null"}, r"data.invalid = 'null' is for files of your own"),
        ({"budgets": {}}, r"\[budgets\] says nothing: give budgets.epsilon"),
        ({"budgets.epsilon": 0.0}, r"epsilon is 0.0"),
        ({"budgets.epsilon": [1.0, 2.0]}, r"budgets list has 2 values for 4 clients"),
        ({"budgets.epsilon": {"client-00": 1.0}}, r"budgets.epsilon has no value for client 'client-01'"),
        ({"budgets.delta": 0.0}, r"delta is 0.0"),
        ({"budgets.delta": [1e-5]}, r"budgets.delta has 1 values for 4 clients"),
        ({"budgets.name": "dist2"}, r"budgets.name and budgets.epsilon contradict"),
        ({"budgets": {"name": "dist77"}}, r"budgets 'dist77' are unknown"),
        ({"budgets.public": ["nobody"]}, r"budgets.public names 'nobody'"),
        ({"budgets.low": 1.0}, r"take no low"),
        ({"budgets.column": "eps"}, r"budgets.column names a column of budgets.csv, which is missing"),
        ({"budgets": {"csv": "none.csv"}}, r"budgets file none.csv cannot be read"),
        ({"budgets.adjacency": "add-remove"}, r"add-remove"),
        ({"model.name": "logistik"}, r"model.name\): did you mean 'logistic'"),
        ({"model.options": {"hiden": 3}}, r"model 'logistic' has no option hiden"),
        ({"method.name": "dp-fedavgg"}, r"method 'dp-fedavgg' is unknown: did you mean 'dp-fedavg'"),
        ({"method.aggregate": "robustt"}, r"method.aggregate = 'robustt' is unknown"),
        ({"method.clipp": "flat"}, r"unknown key method.clipp: did you mean 'clip'"),
        ({"training.lr": -0.1}, r"training.lr is -0.1"),
        ({"training.clip": 0.0}, r"training.clip is 0.0"),
        ({"training.rate": 1.5}, r"training.rate is 1.5: rates lie in \(0, 1\]"),
        ({"training.batch": [5.0, 5.0]}, r"training.batch lists 2 values for 4 clients"),
        ({"training.batch": 5.0, "training.rate": 0.1}, r"training.batch and training.rate say the same"),
        ({"training.sampling": "fixed"}, r"fixed"),
        ({"training.select": 2}, r"training.select does not go with method 'dp-fedavg'"),
        ({"training.select": 9, "method.name": "unbiased"}, r"training.select = 9 of 4 clients: use at most 4"),
        ({"compare.seeds": [0, 0]}, r"compare.seeds = \[0, 0\]: 0 is listed twice"),
        ({"compare.methods": ["fedavg", "fedavg"]}, r"compare.methods.*'fedavg' is listed twice"),
        ({"compare.methods": ["dp-fedavg", "robust-hpd"]}, r"'robust-hpd' is unknown: did you mean 'robust-hdp'"),
        (
            {"compare.methods": ["weiavg"], "method.name": "unbiased", "training.select": 2},
            r"select.*'weiavg'",
        ),
    ],
)
def test_a_wrong_study_is_refused_before_a_record_is_read(
    unread: None, changes: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadInput, match=words):
        make_study(changed(changes)).federation()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"budgets.epsilon": [1.0, 2.0, 3.0]}, r"budgets.epsilon is a list.*budgets.order"),
        ({"budgets.epsilon": {"north": 1.0, "south": 1.0}}, r"no value for client 'west'"),
        (
            {"budgets.epsilon": {"north": 1.0, "south": 1.0, "wset": 1.0}},
            r"'wset', which.*did you mean 'west'",
        ),
        ({"data.clients": 4}, r"data.clients = 4, but there are 3 files"),
        ({"data.records": 2}, r"data.records = 2 does not go with data.schema"),
        ({"data.beta": 0.5}, r"data.beta = 0.5 does not go with data.schema"),
        ({"data.partition": "iid"}, r"data.partition = 'iid' does not go with data.schema"),
        ({"data.folder": "nowhere"}, r"nowhere is neither a folder nor"),
        ({"data.schema": {**SCHEMA, "numeric": {"age": [100, 0]}}}, r"data.schema.numeric.age is \[100, 0\]"),
        ({"data.schema": {**SCHEMA, "numerics": {}}}, r"data.schema.numerics is unknown"),
        ({"data.schema": {**SCHEMA, "classes": ["no"]}}, r"data.schema.classes"),
        ({"training.batch": [1.0, 1.0, 1.0]}, r"training.batch is a list.*budgets.order"),
        ({"training.select": 4, "method.name": "uniform"}, r"training.select = 4 of 3 clients"),
    ],
)
def test_wrong_words_about_files_of_ones_own(
    unread: None, hospitals: Path, changes: dict[str, Any], words: str
) -> None:
    table = changed({"data": {"name": str(hospitals), "schema": SCHEMA}})
    for key, value in changes.items():
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    study = make_study(table)
    with pytest.raises(BadInput, match=words):
        study.check()
    with pytest.raises(BadInput, match=words):
        study.federation()


def test_a_spreadsheet_among_the_files_is_refused(unread: None, hospitals: Path) -> None:
    (hospitals / "east.xls").write_bytes(b"")
    with pytest.raises(BadInput, match=r"east.xls is none of .csv"):
        make_study(changed({"data": {"name": str(hospitals), "schema": SCHEMA}})).federation()


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ({"training.lr": [0.1, -0.1]}, r"\[sweep\] training.lr is -0.1"),
        ({"method.name": ["dp-fedavg", "dp-fedavgg"]}, r"\[sweep\] method 'dp-fedavgg' is unknown"),
        ({"budgets.epsilon": [1.0, 0.0]}, r"\[sweep\].*epsilon is 0.0"),
        ({"model.name": ["logistic", "logistik"]}, r"\[sweep\].*logistik"),
        ({"training.lrr": [0.1]}, r"\[sweep\] unknown key training.lrr"),
        ({"study.seed": [0, 0]}, r"lists 0 twice"),
    ],
)
def test_every_run_of_a_sweep_is_checked_before_the_first(unread: None, sweep: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        points(make_study(changed({"sweep": sweep})))


def test_files_and_settings_that_are_no_study(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    with pytest.raises(BadInput, match="does not exist"):
        read_study(path)
    path.write_text("[study\n")
    with pytest.raises(BadInput, match="not valid TOML"):
        read_study(path)
    path.write_text("")
    for setting in ("lr=1", "training.lr", "training.lrr=1"):
        with pytest.raises(BadInput, match=r"--set|training\.lrr"):
            read_study(path, [setting])


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    budgets._say_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_a_budget_that_promises_nothing_is_a_warning_before_records_are_read(
    unread: None, said: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Read):
        make_study(changed({"budgets.epsilon": 1e6})).federation()
    assert "budgets.epsilon above 20 promises next to nothing: client-00 (1e+06)" in said.text
    with pytest.raises(Read):
        make_study(changed({"budgets.epsilon": float("inf")})).federation()
    assert "NOT PRIVATE: every client's epsilon is infinite" in said.text


SITE = """\
[site]
name = "north"
server = "127.0.0.1:1"
[data]
path = "north.csv"
[budget]
epsilon = EPSILON
delta = 1e-5
"""


@pytest.mark.parametrize(("epsilon", "words"), [("1e6", "budget.epsilon = 1e+06"), ("inf", "NOT PRIVATE"), ("2.0", "")])
def test_the_same_at_a_site_is_said_there(
    tmp_path: Path, said: pytest.LogCaptureFixture, epsilon: str, words: str
) -> None:
    path = tmp_path / "SITE.toml"
    path.write_text(SITE.replace("EPSILON", epsilon))
    read_site(path)
    assert words in said.text
    assert bool(words) == bool(said.records)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["compare", "study.toml", "--set", 'compare.methods=["dp-fedavg","robust-hpd"]'], "robust-hpd"),
        (["run", "study.toml", "--set", "study.name='../../evil'"], "study.name"),
        (["run", "study.toml", "--set", "training.select=9"], "training.select"),
        (["plan", "study.toml", "--set", "budgets.epsilon=-1"], "epsilon"),
        (["run", "none.toml"], "none.toml does not exist"),
        (["report", "nothing"], "nothing"),
        (["ledger", "verify", "none.db"], "none.db"),
        (["join", "none.toml"], "none.toml does not exist"),
        (["data", "get", "nothing"], "nothing"),
        (["run", "study.toml", "--ledger", "nowhere/ledger.db"], "the folder"),
        (["demo", "--out", "study.toml"], "cannot make the folder study.toml"),
        (["certify", "keys", "--sites", "north,north"], "--sites names a site twice"),
        (["certify", "keys", "--sites", "../north"], "site name '../north'"),
        (["serve", "study.toml", "--insecure"], "deployment.sites"),
        (["audit", "no-such-method"], "no-such-method"),
    ],
)
def test_the_command_line_refuses_with_code_2_and_writes_nothing(
    unread: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.toml").write_text(
        '[study]\nname = "small"\n[data]\nclients = 4\n[budgets]\nepsilon = 2.0\n[model]\nname = "logistic"\n'
    )
    monkeypatch.setattr(sys, "argv", ["sordino", *words])
    monkeypatch.setattr(shown, "err", Console(stderr=True, width=300))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert told in capsys.readouterr().err
    assert [one.name for one in tmp_path.iterdir()] == ["study.toml"]


@pytest.fixture(scope="module")
def federation() -> sd.data.Federation:
    return sd.data.load("digits").subset(300, seed=0).partition("iid", clients=3, seed=0).with_budgets(4.0)


class Own(torch.nn.Module):
    """A network of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"clients": None}, r"clients is None: give a federation, sd.data.load"),
        ({"clients": [1, 2]}, r"clients is a list: give a federation"),
        ({"clients": sd.data.load("digits")}, r"records of digits have no clients yet: call .partition"),
        ({"model": None}, r"model is None: give a name such as 'auto'"),
        ({"model": Own}, r"model is the class Own: give one of its modules, Own\(…\)"),
        ({"model": lambda shape, classes: Own()}, r"which makes one: give what it returns"),
        ({"model": "mlp", "model_options": {"hidden": [8]}}, r"'mlp': hidden = \[8\]: it is one whole number ≥ 1"),
        ({"model": "mlp", "model_options": {"hidden": 0}}, r"hidden = 0"),
        ({"model": "cnn-small", "model_options": {"unit": 3}}, r"unit = 3: it is a word, such as 'relu'"),
        ({"model": "robust-hdp-cnn", "model_options": {"standardise": 1}}, r"standardise = 1: it is true or false"),
        ({"model": "mlp", "model_options": [8]}, r"model_options is a list: give a table such as"),
        ({"method": None}, r"method is None: give a name such as 'auto'"),
        ({"method": sd.Method}, r"method is <class.*give a name"),
        ({"rounds": "ten"}, r"training.rounds is 'ten': it must be a positive whole number"),
        ({"rounds": True}, r"training.rounds is True"),
        ({"seed": None}, r"seed is None: give a whole number"),
        ({"seed": -1}, r"seed is -1"),
        ({"rate": "lots"}, r"training.rate is 'lots'"),
        ({"batch": {"a": 1}}, r"training.batch is \{'a': 1\}"),
        ({"learning_rate": 0.1}, r"training.learning_rate is unknown: did you mean 'lr'\?"),
        ({"stepps": 2}, r"training.stepps is unknown: did you mean 'steps'\?"),
        ({"callbacks": print}, r"callbacks is a function: put it into a list"),
        ({"callbacks": None}, r"callbacks is None: give a list"),
        ({"callbacks": [3]}, r"callbacks holds 3: each is a function"),
        ({"device": None}, r"device None is unknown"),
        ({"out": 3}, r"out is 3: give a path"),
        ({"ledger": 3}, r"ledger is 3: give a path"),
    ],
    ids=lambda one: re.sub(r" at 0x\w+", "", str(one)),  # every process has to collect the same names
)
def test_wrong_arguments_in_python_are_messages(
    federation: sd.data.Federation, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        sd.train(**{"clients": federation, "rounds": 2, **arguments})


def test_wrong_arguments_of_what_comes_before_training(federation: sd.data.Federation) -> None:
    for call, words in (
        (lambda: sd.data.load(None), r"data set None: give a name"),
        (lambda: federation.with_budgets(None), r"budgets is None: give one number"),
        (lambda: federation.with_budgets(1.0, delta=None), r"budgets.delta is None"),
        (lambda: sd.load(None), r"path is None"),
        (
            lambda: make_study(changed({"model": {"name": "mlp", "options": {"hidden": [8]}}})).check(),
            r"hidden = \[8\]",
        ),
    ):
        with pytest.raises(BadInput, match=words):
            call()


def test_the_keywords_that_editors_know_are_the_settings_of_training() -> None:
    """``sd.train(clients, lr=…)``: completed and checked by type, whatever ``Training`` has."""
    known = typing.get_type_hints(Settings)
    fields = {name: hint for name, hint in typing.get_type_hints(Training).items() if name != "rounds"}
    assert set(known) == set(fields)
    for name, hint in fields.items():
        wanted = set(typing.get_args(hint)) or {hint}
        missing = wanted - set(typing.get_args(known[name]))
        assert missing <= {str}, name  # sampling is one of three words
    for function in (sd.train, sd.plan):
        assert inspect.signature(function).parameters["training"].annotation == "Unpack[Settings]"


class Recurrent(Own):
    """An image's rows as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = torch.nn.GRU(8, 16, batch_first=True), torch.nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.squeeze(1))[0][:, -1])


@pytest.mark.parametrize(
    "model",
    [Recurrent(), Own().double(), Recurrent().double(), Own().half()],
    ids=["gru", "double", "double gru", "half"],
)
def test_recurrent_and_double_precision_models_train(
    federation: sd.data.Federation, model: torch.nn.Module, said: pytest.LogCaptureFixture
) -> None:
    before = {name: one.clone() for name, one in model.state_dict().items()}
    run = sd.train(federation, model, "dp-fedavg", rounds=2, rate=0.2)
    assert all(one["spent_epsilon"] <= one["epsilon"] for one in run.privacy)
    assert next(run.model.parameters()).dtype == torch.float32
    assert any((one != before[name]).any() for name, one in run.model.state_dict().items())
    told = "a copy in torch.float32 is trained" in said.text
    assert told == (next(model.parameters()).dtype != torch.float32)
