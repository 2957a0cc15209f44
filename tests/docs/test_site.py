"""``make docs``: the site builds without a warning, loads nothing from anywhere, and leaves no page out."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("pages", ROOT / "tools" / "pages.py")
pages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(pages)


def test_a_page_that_the_navigation_does_not_name_is_there_all_the_same(tmp_path, monkeypatch):
    for name in ("named.md", "new.md", "results/index.md", "results/a.md"):
        (tmp_path / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "docs" / name).write_text(f"# Page {name}: about\n")
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    nav = [{"Reader": [{"Named": "named.md"}]}, {"Results": []}, {"More": []}]
    assert pages.on_config(SimpleNamespace(nav=nav)).nav == [
        {"Reader": [{"Named": "named.md"}]},
        {"Results": [{"Page results/index.md": "results/index.md"}, {"Page results/a.md": "results/a.md"}]},
        {"More": ["new.md"]},
    ]


@pytest.mark.parametrize(
    ("source", "link", "expected"),
    [
        ("README.md", "[a](docs/data.md#budgets)", "[a](data.md#budgets)"),
        ("README.md", "![p](docs/report.png)", "![p](report.png)"),
        ("docs/methods/auto.md", "[a](../models.md)", "[a](../models.md)"),
        ("docs/methods/auto.md", "[a](../../CHANGELOG.md)", "[a](../changelog.md)"),
        ("docs/api.md", "[a](../examples/digits.toml)", "[a](examples.md)"),
        ("docs/api.md", "[a](notebooks/officer.ipynb)", "[a](notebooks/officer.md)"),
        ("docs/api.md", "[`a`](../src/sordino/cli.py)", "`a`"),
        ("docs/api.md", "[a](https://x.y)", "[a](https://x.y)"),
        ("docs/api.md", "[a](#experimental)", "[a](#experimental)"),
    ],
)
def test_links_between_files_become_links_between_pages(source, link, expected):
    uri = pages.PAGES.get(source, source.removeprefix("docs/"))
    assert pages.relinked(pages.LINK.fullmatch(link), source, uri) == expected


def test_the_page_of_commands_has_every_command_and_option():
    page = pages.commands()
    for words in ("## sordino run", "## sordino ledger verify", "`--set`", "`--stack`, `--no-stack`"):
        assert words in page


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_elsewhere(tmp_path):
    pytest.importorskip("mkdocs", reason="make docs installs what the site needs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    built = sorted((tmp_path / "site").rglob("*.html"))
    assert len(built) > 100
    for page in built:
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link rel="(?:stylesheet|icon)")[^>]*?(?:src|href)="([^"]+)"', text)
        assert loaded, page
        assert [one for one in loaded if one.startswith(("http", "//"))] == [], page
    for entry in (
        "sordino.study.run.train",
        "sordino.privacy.ledger.Ledger.charge",
        "sordino.data.federation.Federation",
    ):
        assert any(f'id="{entry}"' in page.read_text() for page in built), entry
