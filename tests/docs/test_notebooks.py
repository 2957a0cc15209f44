"""The notebooks of the three readers run as they stand, from an empty folder, and are kept without outputs."""

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))


def test_there_is_one_for_each_reader():
    assert [path.stem for path in NOTEBOOKS] == ["engineer", "officer", "researcher"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_kept_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_cell_runs(path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, start=1):
        exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
    said = capsys.readouterr().out
    told = {
        "researcher": ["auto", "worst client", "mine", "comparison.html"],
        "engineer": ["95 % interval", "refused: nobody's budget", "any one of the two other sites"],
        "officer": ["would overdraw", "Privacy statement of client south", "refused: entry"],
    }
    for words in told[path.stem]:
        assert words in said
