"""Small real federations that many tests share."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: its interpreter needs no GPU

import sordino as sd

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def digits():
    """Six clients with some of scikit-learn's digits and very different budgets."""
    source = sd.data.load("digits").subset(600, seed=0)
    clients = source.partition("dirichlet", clients=6, beta=0.5, seed=0, minimum=30)
    return clients.with_budgets([0.5, 1.0, 2.0, 4.0, 8.0, 1.0], delta=1e-4)


@pytest.fixture(scope="session")
def school_folder(tmp_path_factory):
    """A data folder with School's file, from $SORDINO_DATA or from shared/data beside the checkout."""
    named = Path(os.environ.get("SORDINO_DATA", "data")) / "school" / "school.mat"
    beside = Path(__file__).parents[2] / "shared" / "data" / "school.mat"
    found = next((one for one in (named, beside) if one.is_file()), None)
    if found is None:
        pytest.skip(f"School's file is neither {named} nor {beside}")
    folder = tmp_path_factory.mktemp("data")
    (folder / "school").mkdir()
    shutil.copy(found, folder / "school")
    return folder


@pytest.fixture
def in_folder(capsys, monkeypatch, tmp_path):
    """Run a command in an empty folder, 200 characters wide; returns (exit code, stdout, stderr)."""
    from rich.console import Console

    from sordino import cli
    from sordino.commands.output import shown

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sordino", *words])
        monkeypatch.setattr(shown, "out", Console(width=200))
        monkeypatch.setattr(shown, "err", Console(stderr=True, width=200))
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
