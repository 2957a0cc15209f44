"""Every link between pages leads to a file and a heading that are there, and the site's navigation to every page."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("docs/**/*.ipynb")])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its blocks of code; of a notebook what is not code."""
    text = page.read_text()
    if page.suffix == ".ipynb":
        text = "\n\n".join("".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "markdown")
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(page: Path) -> set[str]:
    """What code hosts and the site call a page's headings: small letters, words joined by hyphens."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
        found.append(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return {name if found[:k].count(name) == 0 else f"{name}-{found[:k].count(name)}" for k, name in enumerate(found)}


def broken(page: Path) -> Iterator[str]:
    """Links of a page that lead nowhere; addresses outside of the project are not looked at."""
    for target in LINK.findall(prose(page)):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        there = page.parent / path if path else page
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(there):
            yield f"{target}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert list(broken(page)) == []


def test_a_link_to_nowhere_is_found(tmp_path):
    (tmp_path / "there.md").write_text("# One\n\n## Two words, *and* `code`\n\n## One\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](there.md#two-words-and-code) [b](there.md#one-1) [c](there.md#two) [d](no.md) [e](https://x.y)\n"
    )
    assert list(broken(page)) == ["there.md#two: no such heading", "no.md: no such file"]


def test_every_page_of_the_navigation_exists_or_is_made():
    named = re.findall(r"^ +- [^:\n]+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    made = {"index.md", "changelog.md", "contributing.md", "examples.md", "reference/commands.md"}
    made |= {f"notebooks/{path.stem}.md" for path in ROOT.glob("docs/notebooks/*.ipynb")}
    assert len(named) > 30
    assert [page for page in named if page not in made and not (ROOT / "docs" / page).exists()] == []


def test_every_stable_name_is_in_the_reference():
    import sordino as sd

    reference = "\n".join(path.read_text() for path in ROOT.glob("docs/reference/*.md"))
    rooms = {"data": sd.data, "models": sd.models, "methods": sd.methods, "privacy": sd.privacy}
    stable = (ROOT / "docs" / "api.md").read_text().split("## Stable")[1].split("\n## ")[0]
    names = {name for name in re.findall(r"`sd\.([\w.]+)`", stable) if name.split(".")[0] != "server"}
    assert len(names) > 15
    for name in names:
        room, _, last = name.rpartition(".")
        assert hasattr(rooms[room] if room else sd, last), name
        assert re.search(rf"^::: sordino\.[\w.]+\.{last}$", reference, re.M), f"{name} is in no page of docs/reference"
