"""The only app that runs at a site is sordino's shell, text for text."""

from __future__ import annotations

import io
import zipfile

import pytest

from sordino.engine.federation.shell import FILES, is_shell


def bundle(files: dict[str, str]) -> bytes:
    """An app bundle as Flower packs it: a zip with a list of its contents."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, text in {**files, ".info/CONTENT": "list"}.items():
            archive.writestr(name, text)
    return out.getvalue()


def test_the_shell_itself_runs():
    assert is_shell(bundle(FILES))


@pytest.mark.parametrize(
    "change",
    [
        {"sordino_shell/client.py": FILES["sordino_shell/client.py"] + "\nprint('more')\n"},
        {"sordino_shell/__init__.py": "import os"},
        {"sordino_shell/more.py": ""},
        {"sitecustomize.py": ""},
        {"pyproject.toml": FILES["pyproject.toml"].replace("sordino_shell.client:app", "os:app")},
        {"pyproject.toml": "[tool.flwr.app]\n"},
    ],
    ids=["changed", "init", "another module", "beside", "entry point", "no entry point"],
)
def test_anything_else_does_not(change: dict[str, str]):
    assert not is_shell(bundle({**FILES, **change}))


def test_one_name_twice_is_not_the_shell():
    out = io.BytesIO(bundle(FILES))
    with zipfile.ZipFile(out, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("sordino_shell/client.py", FILES["sordino_shell/client.py"])
    assert not is_shell(out.getvalue())
    assert not is_shell(b"no zip at all")


def test_what_flower_builds_from_the_shell_is_the_shell(tmp_path):
    flwr = pytest.importorskip("flwr.cli.build")
    from sordino.engine.federation.shell import write_shell

    assert is_shell(flwr.build_fab_from_disk(write_shell(tmp_path / "shell")))
