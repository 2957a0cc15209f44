"""Whatever file a hospital has: a schema is drafted, and trained with, on as many records as the file has; or refused.

Never an internal error, never another number of records than was counted when the file was made. Where the names of a
few columns are values of them too, nothing can tell whether a file has a header; the draft then says what it took.
"""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_files import make

import sordino as sd
from sordino.data import draft_schema, from_folder
from sordino.data.own import load_folder
from sordino.data.schema import parse_schema
from sordino.data.survey import parse_survey, places, read_raw
from sordino.errors import BadInput

pytest.importorskip("openpyxl", reason="pip install 'sordino[excel]'")


def judged(folder: Path, seed: int) -> str:
    """Draft, train and read as a site would; returns which of it worked."""
    odd = make(folder, seed)
    try:
        text = draft_schema(odd.path)
    except BadInput:
        return "not drafted"
    schema = tomllib.loads(text)["data"]["schema"]
    told = f"{seed}: {odd.path.name}\n{text}"
    n, ended = odd.records, "trained"
    if odd.header and schema.get("header") is False and n is not None:
        # Its names are values too; the draft says what it took.
        n, ended = n + odd.blank + 1, "trained, names taken for a record"
    found = len(load_folder(odd.path, schema, "null").x)  # a site never refuses a record
    assert n is None or found == n, told
    _surveyed(odd.path, schema, found)
    try:
        clients = from_folder(odd.path, schema, test=0.0)
    except BadInput:
        return "a record refused"
    assert n is None or int(clients.sizes.sum()) == n - _blank_end(odd.path), told
    assert clients.valid.all(), told
    assert np.isfinite(clients.x).all(), told
    assert np.isfinite(clients.y).all(), told
    run = sd.train(
        clients.with_budgets(1.0, delta=1e-3), model="logistic", method="dp-fedavg", rounds=1, rate=0.5, lr=0.1, seed=0
    )
    assert np.isfinite(run.result["final"]["loss"]), told
    return ended


def _blank_end(path: Path) -> int:
    """Empty lines at the end of a CSV file, which are no records in simulation."""
    if path.suffix.lower() != ".csv":
        return 0
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1]:
        lines.pop()
    return max(path.read_bytes().count(b"\n") - len(lines), 0)


def _surveyed(path: Path, raw: dict[str, Any], records: int) -> None:
    """A survey counts every record once, whatever it holds."""
    schema = parse_schema(raw)
    columns: dict[str, Any] = {name: {"low": 0, "high": 100, "bins": 2} for name in schema.numeric}
    columns |= {name: {"categories": ["a", "b"]} for name in schema.categorical}
    if schema.features:
        columns[schema.target] = {"categories": ["0", "1"]}
        survey = parse_survey({"target": schema.target, "columns": columns})
        assert len(places(read_raw(path, survey, schema), survey)) == records


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "sordino")


def judge_all(folder: Path, seeds: range) -> dict[str, int]:
    counts: dict[str, int] = {}
    for seed in seeds:
        ended = judged(folder / str(seed), seed)
        counts[ended] = counts.get(ended, 0) + 1
    return counts


def test_sixty_odd_files(tmp_path):
    counts = judge_all(tmp_path, range(60))
    assert counts["trained"] >= 25, counts
    assert counts["not drafted"] >= 5, counts
    assert set(counts) == {"trained", "not drafted", "a record refused"}


STUDY = """\
[study]
name = "odd"
rounds = 1
[data]
name = "{path}"
test = 0.0
{schema}
[budgets]
epsilon = 1.0
delta = 1e-3
[model]
name = "logistic"
[method]
name = "dp-fedavg"
[training]
rate = 0.5
lr = 0.1
"""


def judge_commands(command: Any, folder: Path, seeds: range) -> dict[tuple[int, int], int]:
    """``sordino data schema`` and ``sordino run``; returns how often they ended with which codes."""
    counts: dict[tuple[int, int], int] = {}
    for seed in seeds:
        odd = make(folder / str(seed), seed)
        code, draft, err = command("data", "schema", str(odd.path))
        codes = (code, 2)
        if code == 0:
            (folder / "odd.toml").write_text(STUDY.format(path=odd.path, schema=draft), encoding="utf-8")
            codes = (0, command("run", "odd.toml", "--out", str(folder / f"run {seed}"))[0])
        assert set(codes) <= {0, 2}, (seed, codes, err)
        assert code == 0 or (err.strip() and not draft), seed
        counts[codes] = counts.get(codes, 0) + 1
    return counts


def test_twelve_odd_files_by_commands(in_folder, tmp_path):
    counts = judge_commands(in_folder, tmp_path, range(12))
    assert set(counts) == {(0, 0), (0, 2), (2, 2)}


@pytest.mark.slow
def test_three_hundred_odd_files_by_commands(in_folder, tmp_path):
    counts = judge_commands(in_folder, tmp_path, range(660, 960))
    assert counts[0, 0] >= 100, counts


@pytest.mark.slow
def test_six_hundred_odd_files(tmp_path):
    counts = judge_all(tmp_path, range(60, 660))
    assert counts["trained"] >= 250, counts
    assert counts.get("trained, names taken for a record", 0) <= 3, counts
