"""No table cuts a figure: every command at 60, 80 and 200 columns and in a pipe, and the same rows for programs."""

import csv
import io
import json
import math
import re
import sys

import pytest
import typer
from rich.console import Console
from rich.text import Text

import bench
from sordino import cli
from sordino.commands.output import shown
from sordino.study import show
from sordino.study.show import Sheet, to_csv
from sordino.study.status import table

STUDY = """
[study]
name = "small"
rounds = 2
[data]
name = "digits"
records = 500
clients = 4
[budgets]
epsilon = {epsilon}
delta = 1e-4
[model]
name = "logistic"
[method]
name = "{method}"
[training]
rate = 0.3
lr = 0.3
"""
PAID = "[evaluation]\nevery = 1\nshare = 0.3\n"
SURVEY = """
[study]
name = "wards"
[data]
folder = "files"
[budgets]
epsilon = 4.0
delta = 1e-3
[survey]
target = "ill"
[survey.columns]
age = {low = 0, high = 100}
ward = {categories = ["a", "b", "a-ward-whose-name-is-longer-than-others"]}
ill = {categories = ["no", "yes"]}
[deployment]
sites = ["north", "south"]
"""
WORK = {"work": "a small network", "sordino": 1.25, "plain": 0.5, "peak_mb": {"sordino": 812.0}}
BENCH = {
    "W1": {**WORK, "ratios": {peer: {"median": 2.5, "min": 2.25, "max": 2.75} for peer in ("sordino", "plain")}},
    "_meta": {"repeats": 3, "threads": 2, "torch": "2.13.0", "device": "cpu"},
}
COMMANDS = {
    "methods": "methods",
    "data list": "data list",
    "plan": "plan study.toml",
    "plan, noise shared": "plan study.toml --set trust.noise=shared --set trust.colluders=1",
    "plan, selection": "plan study.toml --set method.name=privacy-aware --set training.select=2",
    "plan, evaluated": "plan paid.toml",
    "run": "-q run paid.toml --out run --resume",
    "sweep": "-q run sweep.toml --out sweep",
    "compare": "-q compare compare.toml --out compare",
    "tune": "-q tune tune.toml --out tune",
    "evaluate": "evaluate run paid.toml --set budgets.epsilon=4.0",
    "ledger show": "ledger show run/ledger.db",
    "audit": "audit dp-fedavg --canaries 2000",
    "survey": "survey survey.toml",
    "survey, plan": "survey survey.toml --plan",
    "status": "status deployed",
    "bench": "bench",
    "reproduce": "reproduce",
}
WIDTHS = (60, 80, 200, None)
NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*\.?\d*(?:e[-+]?\d+)?")
NOT_SHOWN = {
    # What a table for people leaves to programs.
    "plan": ("batch", "last_round"),
    "run": ("runs",),
    "compare": ("runs",),
    "sweep": ("runs",),
    "data list": ("classes",),
    "tune": ("estimate.epsilon", "estimate.round"),
    "survey, plan": ("delta",),
    "survey": ("value", "low", "high"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a study in several forms, its runs, a survey's files and a deployed run."""
    folder = tmp_path_factory.mktemp("tables")
    text = STUDY.format(epsilon="[0.5, 1.0, 2.5, 123.4567]", method="dp-fedavg")
    (folder / "study.toml").write_text(text)
    (folder / "paid.toml").write_text(text + PAID)
    (folder / "compare.toml").write_text(text + '[compare]\nmethods = ["dp-fedavg", "fedavg"]\nseeds = [0, 1]\n')
    (folder / "sweep.toml").write_text(text + '[sweep]\n"training.lr" = [0.1, 0.2]\n')
    (folder / "tune.toml").write_text(text.replace("123.4567", "8.0") + PAID + '[tune]\n"training.lr" = [0.1, 0.2]\n')
    (folder / "survey.toml").write_text(SURVEY)
    (folder / "files").mkdir()
    for site in ("north", "south"):
        lines = [f"{(7 * k) % 100},{'ab'[k % 2]},{('no', 'yes')[k % 3 == 0]}" for k in range(400)]
        (folder / "files" / f"{site}.csv").write_text("\n".join(["age,ward,ill", *lines]) + "\n")
    deployed(folder / "deployed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        cli.app(["-q", "run", "paid.toml", "--out", "run"], standalone_mode=False)
    return folder


def deployed(folder):
    """The files of a deployed run in which one site has a long name, and one an ε that a narrow column would cut."""
    folder.mkdir()
    names = ["the-university-hospital-of-the-northern-region", "south"]
    study = {"study": {"name": "ward", "rounds": 4}, "deployment": {"sites": names}}
    sites = {name: {"records": 123_456, "epsilon": 0.5, "delta": 1.25e-5} for name in names}
    rounds = [{"round": 1, "participants": names, "absent": [], "refused": {}}]
    written = {
        "serve": {"run": "r", "study": study},
        "enrolled": {"sites": sites},
        "agreed": {"payable": dict.fromkeys(names, 1234)},
    }
    for name, value in written.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "log.jsonl").write_text("\n".join(json.dumps(one) for one in rounds) + "\n")


@pytest.fixture
def call(place, monkeypatch, capsys):
    """Run a command so many columns wide (None: in a pipe); returns what it printed and the rows of its tables."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(bench, "bench", lambda *_, **__: BENCH)
    rows = []
    real = Sheet.add_row

    def add_row(self, *cells, **more):
        rows.append((self, [one.plain if isinstance(one, Text) else one for one in cells]))
        real(self, *cells, **more)

    monkeypatch.setattr(Sheet, "add_row", add_row)

    def run(words, width=None):
        rows.clear()
        if width is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "argv", ["sordino", *words])
        monkeypatch.setattr(shown, "out", show.console())
        monkeypatch.setattr(shown, "err", show.console(stderr=True))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        said = capsys.readouterr()
        assert not stop.value.code, said.err
        return said.out, list(rows)

    return run


def figures(text):
    """Every number in a text with half a unit of its last digit."""
    for found in NUMBER.findall(text):
        plain = found.replace(",", "").replace("−", "-")
        digits, _, power = plain.partition("e")
        decimals = len(digits.partition(".")[2])
        yield float(plain), 0.5 * 10.0 ** (int(power or 0) - decimals)


def says(shown, value):
    """Whether a text has this number, rounded (some ε are rounded up, some numbers to 0), as it is or in per cent."""
    return any(
        abs(seen - times * value) <= max(0.005 * abs(value), 2 * half if half <= 0.15 * abs(times * value) else 1e-9)
        or (seen == 0 and abs(times * value) <= half)
        for times in (1.0, 100.0)
        for seen, half in shown
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_every_cell_is_there_whole_at_every_width(call, name):
    words = COMMANDS[name].split()
    for width in WIDTHS:
        text, rows = call(words, width)
        assert text.strip()
        assert "…\n" not in text
        if width is not None and name not in ("ledger show", "reproduce"):
            assert max(len(line) for line in text.splitlines() if "/" not in line) <= width, name
        flat = " ".join(text.split())
        for sheet, cells in rows:
            for column, cell in zip(sheet.columns, cells):
                if column in sheet.prose:
                    assert all(word in flat for word in cell.split()), (width, cell)
                else:
                    assert all(line.strip() in text for line in cell.splitlines()), (width, column, cell)


@pytest.mark.parametrize("name", COMMANDS)
def test_programs_get_json_or_csv_with_the_figures_that_people_see(call, name):
    words = COMMANDS[name].split()
    as_json = [*words, "--json", "-"] if name == "bench" else [*words, "--json"]
    told = json.loads(call(as_json)[0])
    rows = list(csv.DictReader(io.StringIO(call([*words, "--csv"])[0])))
    assert told
    assert rows
    assert all(None not in row for row in rows), "every line has as many cells as the first"
    known = set(leaves(told))
    if name != "bench":  # its JSON is by workload and by peer
        assert all(float(cell) in known for row in rows for cell in row.values() if is_number(cell))
    shown = list(figures(call(words, 80)[0]))
    hidden = next((keys for key, keys in NOT_SHOWN.items() if name.startswith(key)), ())
    keys = (
        ("epsilon", "spent_epsilon", "delta")
        if name == "ledger show"
        else [key for key in rows[0] if key not in hidden]
    )
    assert keys
    for row in rows:
        missing = {key: row[key] for key in keys if is_number(row[key]) and not says(shown, float(row[key]))}
        assert not missing


def is_number(cell):
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def leaves(value):
    """Every number in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    elif value is not None and not isinstance(value, bool) and is_number(value):
        yield float(value)


def test_both_forms_at_once_are_refused_before_anything_is_done(in_folder, tmp_path):
    (tmp_path / "study.toml").write_text(STUDY.format(epsilon="1.0", method="dp-fedavg"))
    code, out, err = in_folder("run", "study.toml", "--json", "--csv")
    assert (code, out) == (2, "")
    assert "keep one of them" in err
    assert not (tmp_path / "runs").exists()


def printed(thing, width):
    console = Console(width=width)
    with console.capture() as caught:
        console.print(thing)
    return caught.get()


def test_a_sheet_that_does_not_fit_is_a_list_and_one_that_does_is_a_table():
    sheet = Sheet(("site", "ε", "what"), prose=("what",), title="sites", notes=["a [note]"])
    sheet.add_row("north", "0.5", "some words that may be wrapped wherever there is a space between two of them")
    sheet.add_row("south [closed]", "∞", "")
    wide = printed(sheet, 120)
    assert wide.splitlines()[1].split() == ["site", "ε", "what"]
    assert "south [closed]" in wide
    assert "a [note]" in wide
    narrow = printed(sheet, 50)
    assert "ε" in narrow.splitlines()[1], "prose is wrapped before the table is given up"
    listed = printed(sheet, 30)
    assert "site: north\n" in listed
    assert "  ε: 0.5\n" in listed
    assert "what:" not in listed.partition("south")[2], "an empty cell says nothing"
    assert all(len(line) <= 30 for line in listed.splitlines())
    with pytest.raises(ValueError, match="2 cells for 3 columns"):
        sheet.add_row("east", "1.0")


def test_a_half_is_never_a_zero_and_dots():
    seen = {"site": "x" * 40, "records": 10**9, "epsilon": 0.5, "delta": 1e-5, "payable": 40, "answered": 3}
    site = {**seen, "missed": 0, "last_seen": 3, "spent_epsilon": 0.4999, "refused": [], "enrolled": True}
    about = dict.fromkeys(("name", "method", "state"), "s") | {
        "round": 1,
        "rounds": 2,
        "waiting": None,
        "why": None,
        "trouble": None,
    }
    told = table({**about, "sites": [site], "evaluation": [], "trust": []})
    for width in (40, 60, 80, 200):
        text = printed(told, width)
        assert "…" not in text
        assert re.search(r"(^|\s)0\.5\s", text)
        assert "0.4999" in text


def test_csv_has_dotted_names_and_nothing_for_what_is_endless():
    text = to_csv([{"a": {"b": 1}, "c": math.inf}, {"c": True, "d": [1, "x, y"], "e": None}])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[0] == {"a.b": "1", "c": "", "d": "", "e": ""}
    assert rows[1] == {"a.b": "", "c": "true", "d": '[1, "x, y"]', "e": ""}


def pages(command, path=()):
    for name, one in getattr(command, "commands", {}).items():
        yield from pages(one, (*path, name))
    yield path, command


HELP = dict(pages(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("path", HELP, ids=" ".join)
def test_help_pages_keep_their_brackets(path, in_folder, monkeypatch):
    """Rich takes [word] for markup unless it is escaped: every word of a docstring and of an option's help is there."""
    command = HELP[path]
    monkeypatch.setenv("COLUMNS", "200")
    code, text, _ = in_folder(*path, "--help")
    assert code == 0
    shown = " ".join(text.replace("│", " ").split())
    sources = [command.help or "", *(param.help or "" for param in command.params)]
    for word in {word for source in sources for word in source.replace("\\[", "[").split()}:
        assert word in shown, word
    assert "\\[" not in shown
