"""Attacks on surveys: rows that want to count more than once, files that differ in a row, too little noise."""

from __future__ import annotations

import gzip
import json
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from federation_rig import Fixture, Wires
from replay import Tape, compare_messages

sys.path.insert(0, str(Path(__file__).parents[1] / "study"))
from survey_files import study, write_files, write_sites

from sordino.data.survey import parse_survey, places, read_raw
from sordino.privacy.auditing import audit
from sordino.privacy.gate import Gate
from sordino.privacy.generators import Keyed, Turn
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger, LedgerPlan
from sordino.privacy.types import Budget
from sordino.study.conduct import conduct, set_up
from sordino.study.file import make_study
from sordino.study.folder import SURVEYED
from sordino.study.site_file import read_site
from sordino.study.survey.conduct import ask_survey
from sordino.study.survey.plan import plan_survey

SURVEY = parse_survey(
    {
        "target": "ill",
        "columns": {
            "age": {"low": 0, "high": 100, "bins": 8},
            "dose": {"low": -1, "high": 1e6, "bins": 8, "log": True},
            "ward": {"categories": ["a", "b", "😀", "1"]},
            "ill": {"categories": ["no", "yes"]},
        },
    }
)
CLEAN = [f"{20 + k},{k * 1.5:g},{'ab'[k % 2]},{('no', 'yes')[k % 2]}" for k in range(40)]
ROWS = [
    *(
        "1e308,1e308,a,no",
        "-1e308,-1e308,a,no",
        "nan,nan,nan,nan",
        "NaN,-nan,NA,",
        "inf,-inf,inf,-inf",
        "1e400,1e-400,,",
    ),
    *(
        "😀,😀,😀,😀",
        '"a""b","1","a","yes"',
        '"7',
        '7"',
        '"',
        '""',
        '","',
        ",,,",
        ",,,,,,,,",
        "",
        "7",
        "\x00,\x00,\x00,",
    ),
    *("\ufeff7,7,a,no", "９,９,ａ,no", "1_000,1_000,1_000,1_000", "0x10,1d5,TRUE,None", " 7 , 7 , a , no "),
    *("9" * 5000 + ",1,a,no", "a" * 100_000 + ",1,b,no", "+7,+7,+1,no", "--7,7e,a,no", "7,7,a,no\r", "\r\r\r\r"),
    *("\u2028,7,a,no", "\u202e7,7,a,no", "7\t,7,a,no", "nan(1),infinity,a,no", "1e5,1E5,a,no", ".5,5.,a,no"),
    *("-0,-0.0,a,no", "=1+1,7,a,no", "7.0,7.0,1.0,no.0"),
]


def released(path: Path) -> np.ndarray:
    """The exact table of a file: what noise is added to."""
    cells = places(read_raw(path, SURVEY), SURVEY) + np.array(SURVEY.starts)
    return np.bincount(cells.reshape(-1), minlength=SURVEY.width).astype(float)


def write(path: Path, lines: list[str] | list[bytes]) -> Path:
    rows = [one if isinstance(one, bytes) else one.encode() for one in ["age,dose,ward,ill", *lines]]
    body = b"\n".join(rows) + b"\n"
    path.write_bytes(gzip.compress(body) if path.suffix == ".gz" else body)
    return path


@pytest.mark.parametrize(("suffix", "every"), [(".csv", 1), (".csv.gz", 9)])
def test_a_row_moves_the_table_by_at_most_the_root_of_the_columns_whatever_it_holds(tmp_path, suffix, every):
    file = tmp_path / f"a{suffix}"
    usual = released(write(file, CLEAN))
    assert usual.sum() == 4 * len(CLEAN)
    random = np.random.default_rng(0)
    bad = [bytes(random.choice(list(b'",;\r\\ \x00\xff\xc30a.e-nN'), size).tolist()) for size in range(60)]
    for row in [*ROWS, *bad][::every]:
        for place in (0, 17, len(CLEAN) - 1):
            found = released(write(file, [*CLEAN[:place], row, *CLEAN[place + 1 :]]))
            assert found.sum() == 4 * len(CLEAN)  # there are as many records as before, each once a column
            exchanged = np.linalg.norm(found - usual)
            assert exchanged <= np.sqrt(2 * 4) + 1e-12, row
            # Zeroed instead: what is left of both files without that row is the same, so either row added √4.
            rest = released(write(tmp_path / f"rest{suffix}", [*CLEAN[:place], *CLEAN[place + 1 :]]))
            assert np.linalg.norm(found - rest) == 2.0, row


def test_entries_of_a_parquet_file_do_not_touch_each_other(tmp_path):
    usual = [b"7", b"8", None, b"9"]
    for odd in (b"\xff\xfe", b"", b"nan", "😀".encode(), None, b"1e999"):
        found = []
        for column in ([*usual, b"5"], [*usual, odd]):
            pq.write_table(pa.table({"age": pa.array(column, pa.binary()), "ward": column}), tmp_path / "a.parquet")
            found.append(places(read_raw(tmp_path / "a.parquet", SURVEY), SURVEY))
        assert np.array_equal(found[0][:-1], found[1][:-1]), odd


def replayed(folder: Path, adjacency: str, change: tuple[int, str] | None, tape: Tape) -> tuple[list[Any], int]:
    """One survey of four sites on files of their own; ``change``: a line of west's file, and what it is instead.

    What was said, and the line of a record that west holds out.
    """
    write_files(folder, 1)
    file = folder / "files" / "west.csv"
    lines = file.read_bytes().split(b"\n")
    if change is not None:
        lines[change[0]] = change[1].encode()
        file.write_bytes(b"\n".join(lines))
    asked = study(folder)
    asked["budgets"]["adjacency"] = adjacency
    with ExitStack() as stack:
        sites = {}
        for name, path in write_sites(folder).items():
            path.write_text(path.read_text() + f'adjacency = "{adjacency}"\n')
            sites[name] = stack.enter_context(read_site(path).open(Fixture("a key")))
        held = read_site(folder / "west.toml").held(sites["west"].ledger, len(lines) - 2)
        wires, serve = Wires(sites), folder / "run" / "serve.json"
        set_up(folder / "run", make_study(asked), False, kind=SURVEYED)
        serve.write_text(json.dumps(json.loads(serve.read_text()) | {"run": "run1"}))
        with tape.listening():
            conduct(folder / "run", wires, ask_survey)
    return wires.heard, 1 + int(np.flatnonzero(held)[3])


@pytest.mark.parametrize(
    ("adjacency", "row"),
    [
        ("replace-one", "1e308,1e308,nan,nan,😀,?"),
        ("replace-one", '",,,,,'),
        ("replace-one", ""),
        ("zero-out", "NA,NA,NA,NA,NA,NA"),  # a row in a file is never zero: it may move tables by √2 more than that
    ],
)
def test_replay_on_files_that_differ_in_a_held_out_row(tmp_path, monkeypatch, adjacency, row):
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"the same split in both runs".ljust(count)[:count])
    tape = Tape(frozenset({"west"}))
    first, line = replayed(tmp_path / "1", adjacency, None, tape)
    second, _ = replayed(tmp_path / "2", adjacency, (line, row), tape)
    compare_messages(tape, first, second)
    moved = [one for one in tape.findings if one.name == "sum"]
    assert len(moved) == len(tape.findings) == (adjacency == "zero-out"), "\n".join(map(str, tape.findings[:5]))
    assert 0.5 < tape.moved <= (2**0.5 if adjacency == "zero-out" else 2**-0.5) + 1e-12


def scores_of(folder: Path, included: np.ndarray, epsilon: float, columns: int, scale: float = 1.0) -> np.ndarray:
    """Canaries in one release of a survey through the real plan, ledger and gate.

    Every canary is a record in cells of its own, one in each of ``columns`` columns; its score is the mean of their
    noisy counts, which is the sharpest that an attacker can do. ``scale``: break the noise by this factor.
    """
    canaries = len(included)
    asked = {f"c{k}": {"low": 0, "high": 1, "bins": 2} for k in range(columns - 1)} | {"t": {"categories": ["a", "b"]}}
    survey = parse_survey({"target": "t", "columns": asked})
    assert len(survey.columns) == columns
    site = plan_survey(survey, 1.0, {"a": canaries}, {"a": Budget(epsilon, 1e-5)}).sites[0]
    cells = np.arange(canaries)[:, None] + canaries * np.arange(columns)
    cells[~included] = -1  # a null record adds nothing
    with Ledger(folder / "l.db", durable=False) as ledger:
        ledger.open_account("a" + HELD, Budget(epsilon, 1e-5), simulated=True)
        assert ledger.declare([LedgerPlan("a" + HELD, "r", (site.terms.event,), 1)])["a" + HELD] == 1
        gate = Gate(ledger, Scaled("k", scale), "r")
        permit = gate.grant([Turn("a" + HELD, 1)], [site.terms], "request")
        tables = {"survey": (torch.from_numpy(cells), canaries * columns)}
        found = gate.count(permit, 0, tables)["survey"].value.numpy()
    return found.reshape(columns, canaries).mean(axis=0)


class Scaled(Keyed):
    """Noise that is too small by a factor: what a bug would do."""

    def __init__(self, run: str, scale: float) -> None:
        super().__init__(run)
        self.scale = scale

    def rounded(self, turn, what, step, width, deviation):
        return super().rounded(turn, what, step, width, deviation * self.scale)


@pytest.mark.parametrize(("epsilon", "columns"), [(0.5, 9), (2.0, 2), (2.0, 9), (6.0, 4)])
def test_an_audit_of_a_survey_stays_below_the_claim_and_comes_near_it(tmp_path, epsilon, columns):
    found = audit(lambda included: scores_of(tmp_path, included, epsilon, columns), epsilon, 1e-5, 60_000)
    assert found.passed, found
    assert found.gaussian > (0.85 if epsilon > 1 else 0.5) * epsilon


@pytest.mark.parametrize(("what", "scale"), [("the columns were forgotten", 1 / 3), ("a tenth too little", 0.9)])
def test_an_audit_catches_a_survey_with_too_little_noise(tmp_path, what, scale):
    found = audit(lambda included: scores_of(tmp_path, included, 2.0, 9, scale), 2.0, 1e-5, 60_000)
    assert not found.passed, what
