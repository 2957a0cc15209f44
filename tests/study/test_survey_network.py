"""Four real SuperNodes, by commands only: certify, join, survey, the drafted schema to the sites, serve, report."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from survey_files import SITES, study, write_files, write_sites

from sordino.data.toml import toml_key, toml_value
from sordino.engine.federation.processes import Child, free_port
from sordino.privacy.held import HELD
from sordino.privacy.ledger import Ledger
from sordino.study.result import read_result

KEYS = '[keys]\nauthority = "keys/ca.crt"\nprivate = "keys/sites/{name}.key"\n'


def sordino(folder: Path, *arguments: str) -> str:
    """A command in this folder, at 80 columns; what it printed."""
    command = [sys.executable, "-m", "sordino", *arguments]
    about = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, cwd=folder, env=about, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def joined(folder: Path, port: int, more: str = "") -> list[Child]:
    """All sites, as processes, with ``more`` in their [data]."""
    started = []
    for name, path in write_sites(folder, more, port).items():
        path.write_text(path.read_text() + KEYS.format(name=name))
        command = [sys.executable, "-m", "sordino", "join", str(path)]
        started.append(Child(command, dict(os.environ), folder / f"{name}.log"))
    return started


def as_toml(table: dict[str, Any]) -> str:
    sections = []
    for name, section in table.items():
        sections += [f"[{name}]", *(f"{toml_key(key)} = {toml_value(value)}" for key, value in section.items())]
    return "\n".join(sections) + "\n"


@pytest.mark.slow
def test_from_files_to_a_trained_model_with_real_sites(tmp_path):
    pytest.importorskip("flwr")
    write_files(tmp_path)
    asked = study(tmp_path)
    asked["deployment"] |= {"enrol": 120.0, "timeout": 120.0}
    asked["data"] = {"invalid": "null"}  # the server has no files
    (tmp_path / "ask.toml").write_text(as_toml(asked))
    port = free_port()
    sordino(tmp_path, "certify", "keys", "--sites", ",".join(SITES))
    sites = joined(tmp_path, port)
    try:
        shown = sordino(tmp_path, "survey", "ask.toml", "--serve", "--port", str(port), "--held", "280")
    finally:
        for one in sites:
            one.stop()
    assert "told from 0" in shown
    assert max(map(len, shown.splitlines())) <= 80
    folder = tmp_path / "runs" / "wards-survey"
    draft = (folder / "drafted.toml").read_text()
    schema = draft[draft.index("\n[data.schema]") : draft.index("[budgets]")]
    sites = joined(tmp_path, port, schema)
    drafted = str(folder / "drafted.toml")
    try:
        sordino(tmp_path, "serve", drafted, "--port", str(port), "--set", "study.rounds=3", "--out", "runs/trained")
    finally:
        for one in sites:
            one.stop()
    assert len(read_result(tmp_path / "runs" / "trained" / "result.json")["rounds"]) == 3
    sordino(tmp_path, "report", "runs/trained")
    assert "finished" in sordino(tmp_path, "status", "runs/wards-survey")
    assert set(tomllib.loads(draft)["data"]["schema"]["categorical"]) == {"ward"}
    for name, epsilon in SITES.items():
        with Ledger(tmp_path / name / "ledger.db", readonly=True) as ledger:
            assert 0.39 * epsilon < ledger.epsilon([name + HELD])[name + HELD] <= 0.4 * epsilon
            assert 0 < ledger.epsilon([name])[name] <= epsilon
            assert not ledger.account(name).not_private
